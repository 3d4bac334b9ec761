//! Renders the plan: a shipped configuration as a tree, with the plan's values put in.

use prequal_core::client::settings::Shim;
use serde_json::json;
use yaml_serde::Value;

use super::spec::{HostPort, Plan, PlannedCluster, Probe};

/// The shipped configurations, on which all output is based.
pub(super) const SHIPPED: &str = include_str!("../../../../envoy-configs/static/envoy.yaml");
pub(super) const NATIVE: &str = include_str!("../../../../envoy-configs/static/envoy-native.yaml");

/// Renders the whole file.
pub(super) fn render(plan: &Plan) -> String {
    let shipped = if plan.native { NATIVE } else { SHIPPED };
    let mut root: Value =
        yaml_serde::from_str(shipped).expect("the shipped configurations are YAML: tests read them");
    if let Some(admin) = plan.admin {
        root["admin"]["address"] = address(&admin.ip().to_string(), admin.port());
    }
    if plan.detour {
        add_detour(&mut root);
    }
    let resources = &mut root["static_resources"];
    set_listener(&mut resources["listeners"][0], plan);
    let (serving, probing) = (resources["clusters"][0].clone(), resources["clusters"][1].clone());
    let mut clusters = Vec::new();
    for cluster in &plan.clusters {
        let mut own = filled(&serving, &cluster.name, cluster, None);
        if plan.native {
            set_policy(&mut own, plan, &cluster.name);
        } else if plan.shim == Shim::OverrideHost {
            set_override_host(&mut own, &probing);
        }
        clusters.push(own);
        if let Some(Probe { cluster: name, port }) = &cluster.probe {
            clusters.push(filled(&probing, name, cluster, *port));
        }
    }
    resources["clusters"] = Value::Sequence(clusters);
    let module = if plan.native {
        "libprequal_native.so in the folder that ENVOY_DYNAMIC_MODULES_SEARCH_PATH names".to_owned()
    } else {
        let wasm = one_line(text_at(module(&mut root)));
        format!("{wasm} (relative to the directory in which Envoy is started)")
    };
    let admin = &root["admin"]["address"]["socket_address"];
    let (ip, port) = (text_at(&admin["address"]), admin["port_value"].as_u64().unwrap_or_default());
    let admin = if ip.contains(':') { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") };
    let body = yaml_serde::to_string(&root).expect("a tree of plain values can be written");
    format!("{}{body}", leading_comment(plan, &module, &admin))
}

fn leading_comment(plan: &Plan, module: &str, admin: &str) -> String {
    let file = if plan.native { "envoy-native.yaml" } else { "envoy.yaml" };
    let names: Vec<&str> = plan.clusters.iter().map(|cluster| cluster.name.as_str()).collect();
    let port = plan.clusters.iter().find_map(|cluster| cluster.probe.as_ref()?.port);
    let probe = port.map(|port| format!(" --probe-listen <its ip>:{port}")).unwrap_or_default();
    format!(
        "# Envoy with Prequal in front of: {}.\n\
         # Made by `prequal config` from the shipped envoy-configs/static/{file}, which explains every part.\n\
         #\n\
         # Beside each replica: probe-agent --listen <its address below>{probe} --upstream <the service>\n\
         # The module:          {module}\n\
         # Check:               prequal check <this file> && envoy --mode validate -c <this file>\n\
         # Start:               envoy -c <this file>\n\
         # Watch:               prequal top http://{admin}\n",
        one_line(&names.join(", ")),
    )
}

/// Replaces control characters, which could end a comment.
fn one_line(text: &str) -> String {
    text.replace(char::is_control, " ")
}

fn set_listener(listener: &mut Value, plan: &Plan) {
    if let Some(listen) = plan.listen {
        listener["address"] = address(&listen.ip().to_string(), listen.port());
    }
    let chain = &mut listener["filter_chains"][0];
    if let Some(tls) = &plan.tls {
        chain["transport_socket"] = yaml(json!({
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
                "common_tls_context": {
                    "alpn_protocols": ["h2", "http/1.1"],
                    "tls_certificates": [{
                        "certificate_chain": {"filename": tls.certificate},
                        "private_key": {"filename": tls.key},
                    }],
                },
            },
        }));
    }
    let manager = &mut chain["filters"][0]["typed_config"];
    let routes = &mut manager["route_config"]["virtual_hosts"][0]["routes"];
    let (closed, open) = (routes[0].clone(), routes[1].clone());
    let mut clusters: Vec<&PlannedCluster> = plan.clusters.iter().collect();
    // Envoy takes the first route that matches, so longer prefixes come first.
    clusters.sort_by_key(|cluster| std::cmp::Reverse(cluster.prefix.len()));
    let leading = clusters.into_iter().map(|cluster| {
        let mut route = open.clone();
        route["match"]["prefix"] = cluster.prefix.as_str().into();
        route["route"]["cluster"] = cluster.name.as_str().into();
        route
    });
    *routes = Value::Sequence(std::iter::once(closed).chain(leading).collect());
    if !plan.native {
        set_filter(manager, plan);
    }
}

/// Sets the filter's module and settings, and the shim.
fn set_filter(manager: &mut Value, plan: &Plan) {
    let filters = &mut manager["http_filters"];
    let config = &mut filters[1]["typed_config"]["config"];
    if let Some(wasm) = &plan.wasm {
        config["vm_config"]["code"]["local"]["filename"] = wasm.as_str().into();
    }
    config["configuration"]["value"] = lines(&plan.settings);
    if plan.shim == Shim::OverrideHost
        && let Some(filters) = filters.as_sequence_mut()
    {
        filters.retain(|filter| filter["name"].as_str() != Some("prequal-shim"));
        if let Some(router) = filters.last_mut() {
            router["typed_config"]["upstream_http_filters"] = yaml(upstream_strip());
        }
        if let Some(routes) = manager["route_config"].as_mapping_mut() {
            routes.remove("request_headers_to_remove");
        }
    }
}

/// Returns the filters that remove the steering header after `override_host` has read it. Routes cannot do this,
/// because they remove headers before that policy reads them.
fn upstream_strip() -> serde_json::Value {
    json!([
        {
            "name": "prequal-strip-upstream",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
                "mutations": {"request_mutations": [{"remove": "x-prequal-dest"}]},
            },
        },
        {
            "name": "envoy.filters.http.upstream_codec",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.upstream_codec.v3.UpstreamCodec",
            },
        },
    ])
}

/// Returns the file name of the module.
fn module(root: &mut Value) -> &mut Value {
    let manager =
        &mut root["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    &mut manager["http_filters"][1]["typed_config"]["config"]["vm_config"]["code"]["local"]["filename"]
}

/// Returns one of the two shipped clusters with another name and other endpoints.
fn filled(shipped: &Value, name: &str, cluster: &PlannedCluster, port: Option<u16>) -> Value {
    let mut own = shipped.clone();
    own["name"] = name.into();
    if cluster.dns {
        own["type"] = "STRICT_DNS".into();
    }
    own["load_assignment"]["cluster_name"] = name.into();
    let endpoints = cluster.hosts.iter().map(|HostPort { address: host, port: served }| {
        let mut endpoint = yaml(json!({"endpoint": {}}));
        endpoint["endpoint"]["address"] = address(host, port.unwrap_or(*served));
        endpoint
    });
    own["load_assignment"]["endpoints"][0]["lb_endpoints"] = Value::Sequence(endpoints.collect());
    own
}

/// Sets the probe cluster's policy on a serving cluster, with the serving cluster's own policy as the fallback.
fn set_override_host(serving: &mut Value, probing: &Value) {
    if let Some(serving) = serving.as_mapping_mut() {
        serving.remove("lb_policy");
    }
    let mut policy = probing["load_balancing_policy"].clone();
    policy["policies"][0]["typed_extension_config"]["typed_config"]["fallback_policy"]["policies"][0] = yaml(
        json!({
            "typed_extension_config": {
                "name": "envoy.load_balancing_policies.least_request",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest",
                },
            },
        }),
    );
    serving["load_balancing_policy"] = policy;
}

/// Sets the settings of the native module's policy, with only the entry for this cluster.
fn set_policy(serving: &mut Value, plan: &Plan, name: &str) {
    let mut settings = plan.settings.clone();
    if let Some(entries) = settings["clusters"].as_array_mut() {
        entries.retain(|entry| entry["cluster"] == name);
    }
    let policy = &mut serving["load_balancing_policy"]["policies"][0]["typed_extension_config"];
    policy["typed_config"]["lb_policy_config"]["value"] = lines(&settings);
}

/// Adds the native module's detour filter (role 5 in `docs/guide/native.md`), and lets Envoy use the hosts that it
/// names, which are not healthy.
fn add_detour(root: &mut Value) {
    let module = root["bootstrap_extensions"][0]["typed_config"]["dynamic_module_config"].clone();
    let resources = &mut root["static_resources"];
    let manager = &mut resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    let mut filter = yaml(json!({
        "name": "prequal-detour",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilter",
            "filter_name": "prequal_detour",
        },
    }));
    filter["typed_config"]["dynamic_module_config"] = module;
    if let Some(filters) = manager["http_filters"].as_sequence_mut() {
        // The router is last.
        filters.insert(filters.len().saturating_sub(1), filter);
    }
    let statuses = ["UNKNOWN", "HEALTHY", "UNHEALTHY", "DRAINING", "TIMEOUT", "DEGRADED"];
    resources["clusters"][0]["common_lb_config"] =
        yaml(json!({"override_host_status": {"statuses": statuses}}));
}

/// Returns settings as a text of several lines.
fn lines(settings: &serde_json::Value) -> Value {
    let text = serde_json::to_string_pretty(settings).expect("JSON can be written");
    format!("{text}\n").into()
}

fn address(host: &str, port: u16) -> Value {
    yaml(json!({"socket_address": {"address": host, "port_value": port}}))
}

fn yaml(value: serde_json::Value) -> Value {
    yaml_serde::to_value(value).expect("JSON is YAML")
}

fn text_at(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
