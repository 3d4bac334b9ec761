//! Applies EnvoyFilters, WasmPlugins and TrafficExtensions as Istio does, but only the features that the shipped ones
//! use. Anything else panics, so that no file passes by being ignored.
//!
//! The rules, as in Istio 1.29 (`pilot/pkg/networking/core/envoyfilter`, `pkg/proto/merge`):
//!
//! * EnvoyFilters apply in the order of `priority`, then of creation, which here is the order of the list.
//! * For HTTP filters all insertions come first, then all merges.
//! * A merge appends to lists, recurses into messages, and replaces everything else. Entries of a protobuf map are
//!   replaced as a whole; in a cluster these are the entries of `typed_extension_protocol_options`.
//! * WasmPlugins are added before any EnvoyFilter applies, in front of Istio's own filters. From 1.30 on,
//!   TrafficExtensions are added in the same way, and a WasmPlugin is turned into a TrafficExtension
//!   (`pilot/pkg/model/extensions.go`).

use serde_json::{Value, json};

use crate::proxy::{Listener, Proxy};

const MANAGER: &str = "envoy.filters.network.http_connection_manager";

/// Applies every EnvoyFilter, WasmPlugin and TrafficExtension among `documents` that selects `proxy`; other kinds do
/// not affect Envoy.
pub fn apply(proxy: &mut Proxy, documents: &[Value]) {
    for document in documents {
        let wasm = match document["kind"].as_str() {
            Some("WasmPlugin") => &document["spec"],
            Some("TrafficExtension") => &document["spec"]["wasm"],
            _ => continue,
        };
        if selects(proxy, document, &document["spec"]["selector"]["matchLabels"]) {
            extension(proxy, document, wasm);
        }
    }
    let mut filters: Vec<&Value> = documents
        .iter()
        .filter(|it| it["kind"] == "EnvoyFilter")
        .filter(|it| selects(proxy, it, &it["spec"]["workloadSelector"]["labels"]))
        .collect();
    filters.sort_by_key(|filter| filter["spec"]["priority"].as_i64().unwrap_or(0));
    let patches: Vec<&Value> = filters
        .iter()
        .flat_map(|filter| filter["spec"]["configPatches"].as_array().expect("patches"))
        .collect();
    let patches = patches.into_iter().filter(|patch| patch["match"]["context"] == proxy.context);
    let (merges, others): (Vec<_>, Vec<_>) =
        patches.partition(|patch| patch["patch"]["operation"] == "MERGE");
    for patch in others.into_iter().chain(merges) {
        match patch["applyTo"].as_str() {
            Some("HTTP_FILTER") => http_filter(proxy, patch),
            Some("CLUSTER") => cluster(proxy, patch),
            Some("HTTP_ROUTE") => http_route(proxy, patch),
            other => panic!("applyTo {other:?} is not modelled"),
        }
    }
}

/// Whether a resource applies to this proxy: same namespace, and labels that the proxy has.
fn selects(proxy: &Proxy, document: &Value, labels: &Value) -> bool {
    let labels = labels.as_object().expect("a selector: without one it would be for every proxy");
    document["metadata"]["namespace"] == proxy.namespace
        && labels.iter().all(|(name, value)| proxy.labels[name] == *value)
}

fn http_filter(proxy: &mut Proxy, patch: &Value) {
    let listener = &patch["match"]["listener"];
    let filter = &listener["filterChain"]["filter"];
    assert_eq!(filter["name"], MANAGER, "only filters of HTTP are modelled");
    let next_to = &filter["subFilter"]["name"];
    let value = patch["patch"]["value"].clone();
    for found in &mut proxy.listeners {
        if !listener["portNumber"].is_null() && listener["portNumber"] != found.port {
            continue;
        }
        let filters = found.http_filters();
        let place = filters.iter().position(|filter| filter["name"] == *next_to);
        match (patch["patch"]["operation"].as_str(), place) {
            (Some("INSERT_FIRST"), _) => filters.insert(0, value.clone()),
            (Some("INSERT_BEFORE"), Some(place)) => filters.insert(place, value.clone()),
            (Some("MERGE"), Some(place)) => merge(&mut filters[place], &value),
            // Istio ignores a patch whose neighbour is missing.
            (Some("INSERT_BEFORE" | "MERGE"), None) => {}
            (other, _) => panic!("operation {other:?} is not modelled"),
        }
    }
}

fn http_route(proxy: &mut Proxy, patch: &Value) {
    let wanted = &patch["match"]["routeConfiguration"]["vhost"]["route"]["name"];
    assert!(wanted.is_string(), "without a name it would be for every route");
    assert_eq!(patch["patch"]["operation"], "MERGE", "only merges are modelled");
    for route in proxy.listeners.iter_mut().flat_map(Listener::routes).filter(|it| it["name"] == *wanted) {
        merge(route, &patch["patch"]["value"]);
    }
}

fn cluster(proxy: &mut Proxy, patch: &Value) {
    let wanted = &patch["match"]["cluster"];
    let service = wanted["service"].as_str().expect("a service");
    let name = format!("outbound|{}||{service}", wanted["portNumber"]);
    assert_eq!(patch["patch"]["operation"], "MERGE", "only merges are modelled");
    for cluster in proxy.clusters.iter_mut().filter(|cluster| cluster["name"] == name) {
        for (key, value) in patch["patch"]["value"].as_object().expect("an object") {
            if key == "typed_extension_protocol_options" {
                for (options, value) in value.as_object().expect("a map") {
                    cluster[key][options] = value.clone();
                }
            } else {
                merge(&mut cluster[key], value);
            }
        }
    }
}

/// A protobuf merge, in terms of JSON.
fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(from)) => into.extend(from.iter().cloned()),
        (into, from) => *into = from.clone(),
    }
}

/// The module is delivered by extension discovery, under a name that Istio chooses; the listener only refers to it.
fn extension(proxy: &mut Proxy, document: &Value, wasm: &Value) {
    let (spec, metadata) = (&document["spec"], &document["metadata"]);
    let mode = if proxy.context == "SIDECAR_INBOUND" { "SERVER" } else { "CLIENT" };
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let id = format!("{}.{}", text(&metadata["namespace"]), text(&metadata["name"]));
    let name = format!("extensions.istio.io/{}/{id}", text(&document["kind"]).to_lowercase());
    let failure = match wasm["failStrategy"].as_str() {
        None | Some("FAIL_CLOSE") => "FAIL_CLOSED",
        Some("FAIL_OPEN") => "FAIL_OPEN",
        Some("FAIL_RELOAD") => "FAIL_RELOAD",
        Some(other) => panic!("failStrategy {other} is not modelled"),
    };
    let config = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
        "config": {
            "name": id,
            "root_id": wasm["pluginName"],
            "failure_policy": failure,
            "vm_config": {"runtime": "envoy.wasm.runtime.v8", "code": {"local": {"filename": proxy.module}}},
            "configuration": {
                "@type": "type.googleapis.com/google.protobuf.StringValue",
                "value": wasm["pluginConfig"].to_string(),
            },
        },
    });
    let source = proxy.discover_extension(&name, config);
    for listener in &mut proxy.listeners {
        let matches = spec["match"].as_array().expect("a match").iter().any(|rule| {
            let ports = rule["ports"].as_array();
            rule["mode"] == mode
                && ports.is_none_or(|ports| ports.iter().any(|port| port["number"] == listener.port))
        });
        if matches {
            let filter = json!({"name": name, "config_discovery": {
                "config_source": source,
                "type_urls": ["type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm"],
            }});
            listener.http_filters().insert(0, filter);
        }
    }
}
