//! The demo's Envoy with Prequal has the configuration that users copy, except for what a demo must change.

use std::path::Path;

use serde_json::{Value, json};

fn configuration(path: &str) -> Value {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../envoy-configs").join(path);
    let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    yaml_serde::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// The HTTP connection manager of the only listener.
fn manager(config: &mut Value) -> &mut Value {
    &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
}

fn route(config: &mut Value) -> &mut Value {
    let routes = &mut manager(config)["route_config"]["virtual_hosts"][0]["routes"];
    let last = routes.as_array().map_or(0, |routes| routes.len() - 1);
    &mut routes[last]["route"]
}

#[test]
fn the_demo_runs_the_shipped_configuration() {
    let mut filter = configuration("static/envoy.yaml");
    let wasm = &mut manager(&mut filter)["http_filters"][1]["typed_config"]["config"]["vm_config"];
    wasm["code"]["local"]["filename"] = "/etc/envoy/prequal_filter.wasm".into();
    for (file, mut expected) in
        [("envoy-prequal.yaml", filter), ("envoy-native.yaml", configuration("static/envoy-native.yaml"))]
    {
        change_for_the_demo(&mut expected);
        let found = configuration(&format!("compose/{file}"));
        for (part, expected) in expected.as_object().into_iter().flatten() {
            assert_eq!(found[part], *expected, "{file}: {part}");
        }
        assert_eq!(found, expected, "{file}");
    }
}

/// What a demo must change.
fn change_for_the_demo(expected: &mut Value) {
    expected["node"] = json!({"id": "prequal", "cluster": "demo"});
    expected["admin"]["address"]["socket_address"]["address"] = "0.0.0.0".into();
    // Sized for the container's 512 MB.
    let monitors = &mut expected["overload_manager"]["resource_monitors"];
    monitors[0]["typed_config"]["max_heap_size_bytes"] = (320 << 20).into();
    monitors[1]["typed_config"]["max_active_downstream_connections"] = 5000.into();
    let listener = &mut expected["static_resources"]["listeners"][0];
    listener["address"]["socket_address"]["address"] = "0.0.0.0".into();
    route(expected)["timeout"] = "2s".into();
    for cluster in expected["static_resources"]["clusters"].as_array_mut().into_iter().flatten() {
        cluster["type"] = "EDS".into();
        cluster["eds_cluster_config"] = json!({
            "service_name": "replicas",
            "eds_config": {
                "resource_api_version": "V3",
                "path_config_source": {"path": "/eds/replicas.json", "watched_directory": {"path": "/eds"}},
            },
        });
        cluster.as_object_mut().map(|cluster| cluster.remove("load_assignment"));
    }
}

#[test]
fn the_other_envoy_differs_only_in_its_policy() {
    let mut prequal = configuration("compose/envoy-prequal.yaml");
    let mut baseline = configuration("compose/envoy-baseline.yaml");
    for part in ["timeout", "retry_policy"] {
        assert_eq!(route(&mut baseline)[part], route(&mut prequal)[part], "{part}");
    }
    assert_eq!(baseline["overload_manager"], prequal["overload_manager"]);
    let limits = [
        "path_with_escaped_slashes_action",
        "common_http_protocol_options",
        "http2_protocol_options",
        "request_headers_timeout",
        "stream_idle_timeout",
    ];
    for part in limits {
        assert!(!manager(&mut prequal)[part].is_null(), "{part}");
        assert_eq!(manager(&mut baseline)[part], manager(&mut prequal)[part], "{part}");
    }
    for cluster in baseline["static_resources"]["clusters"].as_array().into_iter().flatten() {
        for part in [
            "type",
            "eds_cluster_config",
            "connect_timeout",
            "per_connection_buffer_limit_bytes",
            "typed_extension_protocol_options",
            "circuit_breakers",
        ] {
            let serving = &prequal["static_resources"]["clusters"][0];
            assert_eq!(cluster[part], serving[part], "{} of {}", part, cluster["name"]);
        }
    }
}
