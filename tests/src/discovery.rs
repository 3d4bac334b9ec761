//! Discovery by files: listeners (LDS) and endpoints (EDS) that change while Envoy runs.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

/// Makes `cluster` read its endpoints from a file in `dir`.
pub(crate) fn move_endpoints_to_file(dir: &Path, cluster: &mut Value) -> Result<()> {
    let name = cluster["name"].as_str().context("a cluster has a name")?.to_owned();
    let path = eds_path(dir, &name);
    let assignment = cluster.as_object_mut().and_then(|cluster| cluster.remove("load_assignment"));
    let endpoints = assignment.context("the cluster has no endpoints")?["endpoints"].take();
    write_atomically(&path, &eds(&name, &endpoints, 0))?;
    cluster["type"] = json!("EDS");
    cluster["eds_cluster_config"] = json!({ "service_name": name, "eds_config": file_source(&path) });
    Ok(())
}

pub(crate) fn eds_path(dir: &Path, cluster: &str) -> PathBuf {
    dir.join(format!("eds-{}.json", cluster.replace('/', "_")))
}

pub(crate) fn eds(cluster: &str, endpoints: &Value, version: u64) -> Value {
    json!({"version_info": version.to_string(), "resources": [{
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": cluster,
        "endpoints": endpoints,
    }]})
}

pub(crate) fn lds(listener: &Value, version: u64) -> Value {
    let mut resource = listener.clone();
    resource["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
    json!({"version_info": version.to_string(), "resources": [resource]})
}

pub(crate) fn file_source(path: &Path) -> Value {
    json!({"resource_api_version": "V3", "path_config_source": {"path": path}})
}

/// Writes a new file and moves it into place. Envoy watches for such moves, so it never reads half of a file.
pub(crate) fn write_atomically(path: &Path, content: &Value) -> Result<()> {
    let next = path.with_extension("next");
    fs::write(&next, content.to_string())?;
    fs::rename(&next, path)?;
    Ok(())
}
