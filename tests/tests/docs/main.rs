//! Checks the documents: links lead somewhere, settings are accepted, commands run or are parsed by their programs, and
//! the getting-started page works line by line.

mod commands;
mod compose;
mod getting_started;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use prequal_core::config::Config;
use prequal_testbed::{bed, dist_dir, envoy_binary, manifests, missing_program, needs, workspace_root};
use serde_json::{Value, json};

/// A fenced block of a document.
struct Block {
    language: String,
    text: String,
    place: String,
}

/// Every document of the repository, relative to its root.
fn documents() -> Result<Vec<PathBuf>> {
    let listed = Command::new("git").args(["ls-files", "*.md"]).current_dir(workspace_root()).output()?;
    let names = String::from_utf8(listed.stdout)?;
    let documents: Vec<PathBuf> = names.lines().map(PathBuf::from).collect();
    assert!(documents.len() > 10, "this is no git checkout: git lists only {documents:?}");
    Ok(documents)
}

fn read(document: &Path) -> Result<String> {
    let path = workspace_root().join(document);
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

fn blocks(document: &Path) -> Result<Vec<Block>> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for (number, line) in read(document)?.lines().enumerate() {
        match (line.trim_start().strip_prefix("```"), open.take()) {
            (Some(language), None) => {
                let place = format!("{}:{}", document.display(), number + 1);
                open = Some(Block { language: language.to_owned(), text: String::new(), place });
            }
            (Some(_), Some(block)) => blocks.push(block),
            (None, Some(mut block)) => {
                block.text += line;
                block.text.push('\n');
                open = Some(block);
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "{}: a block is not closed", document.display());
    Ok(blocks)
}

fn all_blocks(language: &str) -> Result<Vec<Block>> {
    let mut found = Vec::new();
    for document in documents()? {
        found.extend(blocks(&document)?.into_iter().filter(|block| block.language == language));
    }
    Ok(found)
}

/// The anchor of a heading: lower-case letters, digits, `-` and `_`; spaces become `-`.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn anchors(document: &Path) -> Result<BTreeSet<String>> {
    let text = read(document)?;
    let headings = text.lines().filter(|line| line.starts_with('#'));
    Ok(headings.map(|line| anchor(line.trim_start_matches('#'))).collect())
}

/// Targets of `[text](target)`.
fn links(text: &str) -> Vec<String> {
    let ends = text.split("](").skip(1);
    ends.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target.to_owned()).collect()
}

#[test]
fn links_lead_to_files_and_headings_that_exist() -> Result<()> {
    needs!(missing_program(&["git"]));
    let mut checked = 0;
    for document in documents()? {
        for link in links(&read(&document)?) {
            if link.contains("://") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((&link, ""));
            let target = if file.is_empty() {
                document.clone()
            } else {
                document.parent().expect("a folder").join(file)
            };
            let path = workspace_root().join(&target);
            assert!(path.exists(), "{}: {link} leads nowhere", document.display());
            if !heading.is_empty() {
                assert!(
                    anchors(&target)?.contains(heading),
                    "{}: {link}: no such heading",
                    document.display()
                );
            }
            checked += 1;
        }
    }
    assert!(checked > 50, "{checked}");
    Ok(())
}

#[test]
fn documented_json_settings_are_accepted() -> Result<()> {
    needs!(missing_program(&["git"]));
    let mut checked = 0;
    for block in all_blocks("json")? {
        let value: Value =
            serde_json::from_str(&block.text).with_context(|| format!("{}: no JSON", block.place))?;
        if value.get("clusters").is_some() || value.get("role").is_some() {
            Config::parse(&block.text).with_context(|| block.place)?;
            checked += 1;
        }
    }
    assert!(checked > 0);
    Ok(())
}

#[test]
fn documented_yaml_works() -> Result<()> {
    bed!(&[dist_dir().join("prequal")]);
    needs!(missing_program(&["git"]));
    for block in all_blocks("yaml")? {
        let document = block.place.split(':').next().unwrap_or_default();
        match document {
            "docs/reference/prequal.md" => renders(&block.text),
            "docs/guide/kubernetes.md" => is_of_kubernetes(&yaml_serde::from_str(&block.text)?),
            "docs/guide/orca.md" => {
                let shown: Value = yaml_serde::from_str(&block.text)?;
                if shown.get("kind").is_some() { is_backend_policy(&shown) } else { is_policy(&shown) }
            }
            "docs/guide/native.md" => is_of_native(&yaml_serde::from_str(&block.text)?),
            "docs/guide/istio.md" => are_volumes(&yaml_serde::from_str(&block.text)?),
            _ => bail!("no test for this kind of block"),
        }
        .with_context(|| block.place)?;
    }
    Ok(())
}

/// Checks that `prequal config` accepts this specification.
fn renders(text: &str) -> Result<()> {
    let mut program = Command::new(dist_dir().join("prequal"));
    let mut program = program.args(["config", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    program.stdin.take().context("no standard input")?.write_all(text.as_bytes())?;
    ensure!(program.wait()?.success(), "refused");
    Ok(())
}

/// Checks a block about Kubernetes: Envoy clusters, a chart's dependency on this project's chart, or values for this
/// project's chart. The mesh's tests render charts and values.
fn is_of_kubernetes(shown: &Value) -> Result<()> {
    // The chart's values as a user writes them, or below the chart's name in a chart that depends on it.
    if let Some(values) = shown.get("prequal").or_else(|| shown.get("agent").map(|_| shown)) {
        let schema = fs::read_to_string(workspace_root().join("charts/prequal/values.schema.json"))?;
        let validator = jsonschema::draft7::new(&serde_json::from_str(&schema)?)?;
        let wrong: Vec<String> = validator.iter_errors(values).map(|error| error.to_string()).collect();
        ensure!(wrong.is_empty(), "{}", wrong.join("; "));
        return Ok(());
    }
    if let Some(dependency) = shown.pointer("/dependencies/0") {
        ensure!(dependency["version"] == env!("CARGO_PKG_VERSION"), "another version: {dependency}");
        return Ok(());
    }
    replaces_static_clusters(shown)
}

/// Checks that Envoy accepts the shipped clusters if this part of a cluster, which uses EDS, replaces their endpoints.
fn replaces_static_clusters(shown: &Value) -> Result<()> {
    let shipped = fs::read_to_string(workspace_root().join("envoy-configs/static/envoy.yaml"))?;
    let mut config: Value = yaml_serde::from_str(&shipped)?;
    let clusters = config["static_resources"]["clusters"].as_array_mut().context("clusters")?;
    for cluster in clusters.iter_mut().filter_map(Value::as_object_mut) {
        cluster.remove("load_assignment");
        let shown = shown[0].as_object().context("a cluster")?;
        cluster.extend(shown.clone().into_iter().filter(|(key, _)| key != "name"));
    }
    clusters.push(json!({
        "name": "xds", "type": "STATIC", "load_assignment": {"cluster_name": "xds"},
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }},
    }));
    config["dynamic_resources"]["ads_config"] = json!({
        "api_type": "GRPC", "transport_api_version": "V3",
        "grpc_services": [{"envoy_grpc": {"cluster_name": "xds"}}],
    });
    validates(&config)
}

/// Checks that Envoy accepts this policy of the serving cluster in place of the shipped one.
fn is_policy(shown: &Value) -> Result<()> {
    let shipped = fs::read_to_string(workspace_root().join("envoy-configs/static/envoy.yaml"))?;
    let mut config: Value = yaml_serde::from_str(&shipped)?;
    let cluster = config["static_resources"]["clusters"][0].as_object_mut().context("a cluster")?;
    cluster.remove("lb_policy");
    cluster.extend(shown.as_object().context("a policy")?.clone());
    validates(&config)
}

/// Checks filters of the listener or settings of the cluster, in the shipped configuration with the native module.
fn is_of_native(shown: &Value) -> Result<()> {
    let shipped = fs::read_to_string(workspace_root().join("envoy-configs/static/envoy-native.yaml"))?;
    let mut config: Value = yaml_serde::from_str(&shipped)?;
    let resources = &mut config["static_resources"];
    if let Some(filters) = shown.as_array() {
        let manager = &mut resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
        let chain = manager["http_filters"].as_array_mut().context("the listener's filters")?;
        let router = chain.len().saturating_sub(1);
        chain.splice(router..router, filters.clone());
    } else {
        let cluster = resources["clusters"][0].as_object_mut().context("a cluster")?;
        cluster.extend(shown.as_object().context("settings of a cluster")?.clone());
    }
    validates(&config)
}

/// Checks that an Envoy Gateway policy is the shipped one, which the mesh's tests run. The page omits what does not
/// concern load reports.
fn is_backend_policy(shown: &Value) -> Result<()> {
    let mut shipped = manifests::documents("envoy-gateway/utilization.yaml")?.swap_remove(0);
    shipped["spec"].as_object_mut().context("a specification")?.remove("useClientProtocol");
    ensure!(*shown == shipped, "not as shipped: {shipped}");
    Ok(())
}

fn validates(config: &Value) -> Result<()> {
    let scratch = tempfile::TempDir::new()?;
    let path = scratch.path().join("envoy.json");
    fs::write(&path, config.to_string())?;
    let mut envoy = Command::new(envoy_binary());
    let output = envoy
        .args(["--mode", "validate", "-c"])
        .arg(&path)
        .current_dir(workspace_root())
        .env("ENVOY_DYNAMIC_MODULES_SEARCH_PATH", dist_dir())
        .output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Checks annotations whose values are lists of a pod's volumes and mounts.
fn are_volumes(shown: &Value) -> Result<()> {
    fn only<T: serde::de::DeserializeOwned + serde::Serialize>(text: &Value) -> Result<()> {
        let written: Value = serde_json::from_str(text.as_str().context("a text")?)?;
        let known: Vec<T> = serde_json::from_value(written.clone())?;
        ensure!(serde_json::to_value(known)? == written, "unknown fields in {written}");
        Ok(())
    }
    let annotations = &shown["metadata"]["annotations"];
    only::<k8s_openapi::api::core::v1::Volume>(&annotations["sidecar.istio.io/userVolume"])?;
    only::<k8s_openapi::api::core::v1::VolumeMount>(&annotations["sidecar.istio.io/userVolumeMount"])
}
