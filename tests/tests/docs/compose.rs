//! docs/guide/compose.md: the demo runs the shipped configurations, except for what the page lists.

use anyhow::{Context as _, Result};
use prequal_testbed::manifests::documents;
use serde_json::{Value, json};

#[test]
fn the_demos_envoy_is_the_shipped_one_except_for_addresses_discovery_limits_and_the_timeout() -> Result<()> {
    let manager = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
    for (shipped, demo) in [("envoy.yaml", "envoy-prequal.yaml"), ("envoy-native.yaml", "envoy-native.yaml")]
    {
        let mut expected = documents(&format!("static/{shipped}"))?.remove(0);
        let mut set = |path: &str, value: Value| -> Result<()> {
            *expected.pointer_mut(path).with_context(|| format!("{path} in {shipped}"))? = value;
            Ok(())
        };
        set("/node", json!({"id": "prequal", "cluster": "demo"}))?;
        set("/admin/address/socket_address/address", json!("0.0.0.0"))?;
        set("/static_resources/listeners/0/address/socket_address/address", json!("0.0.0.0"))?;
        // Limits for a container with 512 MB.
        let monitors = "/overload_manager/resource_monitors";
        set(&format!("{monitors}/0/typed_config/max_heap_size_bytes"), json!(320 << 20))?;
        set(&format!("{monitors}/1/typed_config/max_active_downstream_connections"), json!(5000))?;
        set(&format!("{manager}/route_config/virtual_hosts/0/routes/1/route/timeout"), json!("2s"))?;
        if shipped == "envoy.yaml" {
            let file = "http_filters/1/typed_config/config/vm_config/code/local/filename";
            set(&format!("{manager}/{file}"), json!("/etc/envoy/prequal_filter.wasm"))?;
        }
        for cluster in expected["static_resources"]["clusters"].as_array_mut().context("clusters")? {
            let cluster = cluster.as_object_mut().context("a cluster")?;
            cluster.remove("load_assignment");
            cluster.insert("type".to_owned(), json!("EDS"));
            let discovery = json!({
                "service_name": "replicas",
                "eds_config": {
                    "resource_api_version": "V3",
                    "path_config_source": {
                        "path": "/eds/replicas.json",
                        "watched_directory": {"path": "/eds"},
                    },
                },
            });
            cluster.insert("eds_cluster_config".to_owned(), discovery);
        }
        assert_eq!(documents(&format!("compose/{demo}"))?.remove(0), expected, "{demo}");
    }
    Ok(())
}
