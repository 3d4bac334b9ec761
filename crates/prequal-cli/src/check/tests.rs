//! The shipped configuration has no findings. Each single change that breaks it yields exactly one finding, which names
//! the mistake.

mod native;

use serde_json::{Value, json};

use super::codes::{self, Level};
use super::{Finding, check, judge};
use crate::read;

const SHIPPED: &str = include_str!("../../../../envoy-configs/static/envoy.yaml");
const INBOUND: &str = include_str!("../../../../envoy-configs/static/envoy-inbound.yaml");
const COMPOSE: &str = include_str!("../../../../envoy-configs/compose/envoy-prequal.yaml");
const COMPOSE_NATIVE: &str = include_str!("../../../../envoy-configs/compose/envoy-native.yaml");
const DOCS: &str = include_str!("../../../../docs/reference/prequal.md");

/// The shipped manifests that load the module.
const MANIFESTS: [&str; 6] = [
    include_str!("../../../../envoy-configs/istio/client-sidecar.yaml"),
    include_str!("../../../../envoy-configs/istio/client-gateway.yaml"),
    include_str!("../../../../envoy-configs/istio/server-inbound.yaml"),
    include_str!("../../../../envoy-configs/istio/client-sidecar-extension.yaml"),
    include_str!("../../../../envoy-configs/istio/client-gateway-extension.yaml"),
    include_str!("../../../../envoy-configs/istio/server-inbound-extension.yaml"),
];
const SERVER_AGENT: &str = include_str!("../../../../envoy-configs/istio/server-agent.yaml");

const MANAGER: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
const WASM: &str = "/http_filters/1/typed_config/config";
const ROUTES: &str = "/route_config/virtual_hosts/0/routes";
const HTTP_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

fn shipped() -> Value {
    let mut root = read::text(SHIPPED).unwrap();
    // Whether the module has been built does not matter here; this file certainly exists.
    manager(&mut root, &format!("{WASM}/vm_config/code/local"))["filename"] =
        json!(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    root
}

/// Returns the value at `path` below the HTTP connection manager.
fn manager<'a>(root: &'a mut Value, path: &str) -> &'a mut Value {
    root.pointer_mut(&format!("{MANAGER}{path}")).unwrap()
}

/// Returns the serving (0) or the probe cluster (1).
fn cluster(root: &mut Value, index: usize) -> &mut Value {
    &mut root["static_resources"]["clusters"][index]
}

fn remove(value: &mut Value, key: &str) {
    value.as_object_mut().unwrap().remove(key).unwrap();
}

fn list(value: &mut Value) -> &mut Vec<Value> {
    value.as_array_mut().unwrap()
}

fn settings(root: &mut Value, change: impl FnOnce(&mut Value)) {
    let text = manager(root, &format!("{WASM}/configuration/value"));
    let mut settings: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
    change(&mut settings);
    *text = json!(settings.to_string());
}

fn codes_of(findings: &[Finding]) -> Vec<&'static str> {
    findings.iter().map(|finding| finding.code.name).collect()
}

/// Switches to the other shim, which reads the choice after routes have removed headers.
fn override_host(root: &mut Value) {
    settings(root, |settings| settings["shim"] = json!("override_host"));
    let policy = cluster(root, 1)["load_balancing_policy"].clone();
    remove(cluster(root, 0), "lb_policy");
    cluster(root, 0)["load_balancing_policy"] = policy;
    remove(manager(root, "/route_config"), "request_headers_to_remove");
    strip_upstream(root);
    list(manager(root, "/http_filters")).remove(2);
}

fn strip_upstream(root: &mut Value) {
    let package = "type.googleapis.com/envoy.extensions.filters.http";
    let strip = json!({"@type": format!("{package}.header_mutation.v3.HeaderMutation"), "mutations":
        {"request_mutations": [{"remove": "x-prequal-dest"}]}});
    let codec = json!({"@type": format!("{package}.upstream_codec.v3.UpstreamCodec")});
    let router = list(manager(root, "/http_filters")).last_mut().unwrap();
    router["typed_config"]["upstream_http_filters"] =
        json!([{"name": "strip", "typed_config": strip}, {"name": "codec", "typed_config": codec}]);
}

/// Returns an HTTP filter of Envoy's.
fn filter(kind: &str, mut config: Value) -> Value {
    config["@type"] = json!(format!("type.googleapis.com/envoy.extensions.filters.http.{kind}"));
    json!({"name": kind, "typed_config": config})
}

/// Returns a filter that makes Envoy evaluate the route again.
fn jwt() -> Value {
    filter("jwt_authn.v3.JwtAuthentication", json!({"providers": {"a": {"clear_route_cache": true}}}))
}

fn subset_policy() -> Value {
    json!({"policies": [{"typed_extension_config": {"name": "subset", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.subset.v3.Subset",
        "subset_selectors": [{"keys": ["version"]}]}}}]})
}

fn upstream_filters(root: &mut Value) -> &mut Vec<Value> {
    let router = list(manager(root, "/http_filters")).last_mut().unwrap();
    list(&mut router["typed_config"]["upstream_http_filters"])
}

/// A change to the shipped configuration, preceded by the code that it must cause. An allowed change has a description
/// instead.
type Break = (&'static str, fn(&mut Value));

const BREAKS: &[Break] = &[
    ("wrong-type", |root| root["static_resources"]["clusters"] = json!(7)),
    ("wrong-type", |root| *manager(root, "/http_filters") = json!({"a": 1})),
    ("wrong-type", |root| *manager(root, "/http_filters/0") = Value::Null),
    ("wrong-type", |root| {
        let filter = manager(root, "/http_filters/0/typed_config").take();
        *manager(root, "/http_filters/0/typed_config") = json!({"@type": "type.googleapis.com/xds.type.v3.TypedStruct",
            "type_url": filter["@type"], "value": {"mutations": {"request_mutations": 7}}});
    }),
    ("merge-key", |root| cluster(root, 0)["<<"] = json!({"connect_timeout": "1s"})),
    ("filter-missing", |root| drop(list(manager(root, "/http_filters")).remove(1))),
    ("filter-missing", |root| root["static_resources"]["listeners"] = json!([])),
    ("strip-missing", |root| drop(list(manager(root, "/http_filters")).remove(0))),
    ("strip-incomplete", |root| {
        drop(list(manager(root, "/http_filters/0/typed_config/mutations/request_mutations")).pop());
    }),
    ("strip-incomplete", |root| {
        list(manager(root, "/http_filters/0/typed_config/mutations/response_mutations")).remove(0);
    }),
    ("strip-order", |root| list(manager(root, "/http_filters")).swap(0, 1)),
    ("shim-missing", |root| drop(list(manager(root, "/http_filters")).remove(2))),
    ("shim-missing", |root| {
        *manager(root, "/http_filters/2/typed_config/session_state/typed_config/name") = json!("x-session");
    }),
    ("shim-missing", |root| {
        override_host(root);
        remove(cluster(root, 0), "load_balancing_policy");
    }),
    ("shim-order", |root| {
        let filters = list(manager(root, "/http_filters"));
        let shim = filters.remove(2);
        filters.insert(1, shim);
    }),
    ("shim-strict", |root| manager(root, "/http_filters/2/typed_config")["strict"] = json!(true)),
    ("router-order", |root| list(manager(root, "/http_filters")).swap(2, 3)),
    ("router-order", |root| drop(list(manager(root, "/http_filters")).pop())),
    ("route-kept", |root| {
        list(manager(root, "/http_filters"))
            .insert(1, filter("lua.v3.Lua", json!({"clear_route_cache": false})));
    }),
    ("route-kept", |root| {
        let config = json!({"route_cache_action": "RETAIN"});
        list(manager(root, "/http_filters")).insert(0, filter("ext_proc.v3.ExternalProcessor", config));
    }),
    ("route-changes", |root| list(manager(root, "/http_filters")).insert(1, jwt())),
    ("route-changes", |root| list(manager(root, "/http_filters")).insert(3, jwt())),
    ("route-changes", |root| {
        let config = json!({"route_cache_action": "CLEAR"});
        list(manager(root, "/http_filters")).insert(2, filter("ext_proc.v3.ExternalProcessor", config));
    }),
    ("upstream-strip", |root| remove(manager(root, "/route_config"), "request_headers_to_remove")),
    // Only one of two routes removes the header.
    ("upstream-strip", |root| {
        remove(manager(root, "/route_config"), "request_headers_to_remove");
        let mut other = manager(root, ROUTES)[1].clone();
        other["match"] = json!({"prefix": "/other"});
        other["request_headers_to_remove"] = json!(["x-prequal-dest"]);
        list(manager(root, ROUTES)).insert(1, other);
    }),
    ("upstream-strip", |root| {
        override_host(root);
        upstream_filters(root).remove(0);
    }),
    ("upstream-codec", |root| {
        strip_upstream(root);
        upstream_filters(root).pop();
    }),
    ("upstream-codec", |root| {
        list(&mut cluster(root, 1)["typed_extension_protocol_options"][HTTP_OPTIONS]["http_filters"]).pop();
    }),
    ("fail-closed", |root| remove(manager(root, WASM), "failure_policy")),
    ("fail-closed", |root| manager(root, WASM)["failure_policy"] = json!("FAIL_CLOSED")),
    ("fail-open", |root| manager(root, WASM)["failure_policy"] = json!("FAIL_OPEN")),
    ("fail-open", |root| {
        remove(manager(root, WASM), "failure_policy");
        manager(root, WASM)["fail_open"] = json!(true);
    }),
    ("module-denied", |root| {
        // This is the form in which an Istio proxy shows a denied module.
        const NAME: &str = "extensions.istio.io/trafficextension/demo.prequal";
        *manager(root, "/http_filters/1") = json!({"name": NAME, "config_discovery": {}});
        let denial = json!({
            "@type": "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC",
            "rules": {"action": "DENY", "policies": {"deny-all": {}}},
        });
        let admin = |kind: &str| json!(format!("type.googleapis.com/envoy.admin.v3.{kind}ConfigDump"));
        *root = json!({"configs": [
            {"@type": admin("Listeners"), "static_listeners": [{"listener": root["static_resources"]["listeners"][0]}]},
            {"@type": admin("Ecds"), "ecds_filters": [{"ecds_filter": {"name": NAME, "typed_config": denial}}]},
        ]});
    }),
    ("reload-slow", |root| remove(manager(root, WASM), "reload_config")),
    ("runtime", |root| {
        manager(root, &format!("{WASM}/vm_config"))["runtime"] = json!("envoy.wasm.runtime.wamr")
    }),
    ("module-inline", |root| {
        manager(root, &format!("{WASM}/vm_config/code"))["local"] = json!({"inline_string": "prequal"});
    }),
    ("module-missing", |root| {
        manager(root, &format!("{WASM}/vm_config/code/local"))["filename"] = json!("nowhere/prequal.wasm");
    }),
    ("settings", |root| settings(root, |settings| settings["clusters"][0]["max_age_ms"] = json!(7))),
    ("settings", |root| settings(root, |settings| settings["latency_band"] = json!(1.5))),
    ("settings", |root| remove(manager(root, WASM), "configuration")),
    ("settings", |root| *manager(root, &format!("{WASM}/configuration/value")) = json!("{")),
    // The routes are unchanged, so none leads to the cluster of the second entry.
    ("cluster-absent", |root| {
        settings(root, |settings| {
            let mut copy = settings["clusters"][0].clone();
            copy["cluster"] = json!("absent");
            list(&mut settings["clusters"]).push(copy);
        });
    }),
    ("probe-cluster-absent", |root| {
        settings(root, |settings| settings["clusters"][0]["probe_cluster"] = json!("absent"));
    }),
    ("routes-elsewhere", |root| manager(root, &format!("{ROUTES}/1/route"))["cluster"] = json!("other")),
    ("route-unnamed", |root| {
        let mut other = manager(root, ROUTES)[1].clone();
        other["match"] = json!({"prefix": "/other"});
        other["route"]["cluster"] = json!("other");
        list(manager(root, ROUTES)).insert(1, other);
    }),
    ("route-removes-dest", |root| {
        override_host(root);
        manager(root, &format!("{ROUTES}/1"))["request_headers_to_remove"] = json!(["a", "X-Prequal-Dest"]);
    }),
    ("route-removes-dest", |root| {
        override_host(root);
        manager(root, "/route_config")["request_headers_to_remove"] = json!(["x-prequal-dest"]);
    }),
    ("route-removes-dest", |root| {
        override_host(root);
        manager(root, "/route_config/virtual_hosts/0")["request_headers_to_remove"] =
            json!(["x-prequal-dest"]);
    }),
    ("route-removes-dest", |root| {
        override_host(root);
        let route = manager(root, &format!("{ROUTES}/1/route"));
        remove(route, "cluster");
        route["weighted_clusters"] = json!({"clusters": [
            {"name": "replicas", "weight": 1, "request_headers_to_remove": ["x-prequal-dest"]}]});
    }),
    ("route-removes-load", |root| {
        manager(root, "/route_config")["response_headers_to_remove"] = json!(["x-prequal-load"]);
    }),
    ("probe-open", |root| drop(list(manager(root, ROUTES)).remove(0))),
    ("probe-open", |root| list(manager(root, ROUTES)).swap(0, 1)),
    ("probe-open", |root| {
        manager(root, &format!("{ROUTES}/0/match"))["headers"] =
            json!([{"name": "a", "present_match": true}]);
    }),
    ("probe-open", |root| {
        list(manager(root, ROUTES)).remove(0);
        *manager(root, &format!("{ROUTES}/0/match")) = json!({"safe_regex": {"regex": "/[a-z]+/.*"}});
    }),
    ("path-spelling", |root| remove(manager(root, ""), "normalize_path")),
    ("path-spelling", |root| manager(root, "")["merge_slashes"] = json!(false)),
    ("retry-same-host", |root| {
        remove(manager(root, &format!("{ROUTES}/1/route/retry_policy")), "retry_host_predicate");
    }),
    ("original-dst", |root| cluster(root, 0)["type"] = json!("ORIGINAL_DST")),
    ("original-dst", |root| {
        remove(cluster(root, 1), "type");
        cluster(root, 1)["cluster_type"] = json!({"name": "envoy.cluster.original_dst"});
    }),
    ("aggregate", |root| {
        let serving = cluster(root, 0);
        remove(serving, "type");
        remove(serving, "load_assignment");
        serving["lb_policy"] = json!("CLUSTER_PROVIDED");
        serving["cluster_type"] = json!({"name": "envoy.clusters.aggregate", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.clusters.aggregate.v3.ClusterConfig",
            "clusters": ["one", "other"]}});
    }),
    ("subsets", |root| {
        cluster(root, 0)["lb_subset_config"] =
            json!({"fallback_policy": "NO_FALLBACK", "subset_selectors": [{"keys": ["version"]}]});
    }),
    ("subsets", |root| {
        remove(cluster(root, 0), "lb_policy");
        cluster(root, 0)["load_balancing_policy"] = subset_policy();
    }),
    ("subsets", |root| {
        override_host(root);
        let policy = &mut cluster(root, 0)["load_balancing_policy"]["policies"][0]["typed_extension_config"];
        policy["typed_config"]["fallback_policy"] = subset_policy();
    }),
    ("logical-dns", |root| cluster(root, 0)["type"] = json!("LOGICAL_DNS")),
    ("logical-dns", |root| {
        remove(cluster(root, 1), "type");
        cluster(root, 1)["cluster_type"] = json!({"name": "envoy.clusters.dns", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.clusters.dns.v3.DnsCluster",
            "all_addresses_in_single_endpoint": true}});
    }),
    ("probe-cluster-same", |root| {
        settings(root, |settings| {
            settings["clusters"][0]["probe_cluster"] = json!("replicas");
            remove(&mut settings["clusters"][0], "verified_probes");
        });
    }),
    ("breakers-shared", |root| {
        override_host(root);
        settings(root, |settings| {
            settings["clusters"][0]["probe_cluster"] = json!("replicas");
            remove(&mut settings["clusters"][0], "verified_probes");
        });
    }),
    ("probe-policy", |root| remove(cluster(root, 1), "load_balancing_policy")),
    ("probe-policy", |root| {
        let policy = &mut cluster(root, 1)["load_balancing_policy"]["policies"][0]["typed_extension_config"];
        policy["typed_config"]["override_host_sources"] = json!([{"header": "x-other"}]);
    }),
    ("probe-fallback", |root| {
        let policy = &mut cluster(root, 1)["load_balancing_policy"]["policies"][0]["typed_extension_config"];
        policy["typed_config"]["fallback_policy"]["policies"][0]["typed_extension_config"]["typed_config"]
            ["@type"] =
            json!("type.googleapis.com/envoy.extensions.load_balancing_policies.random.v3.Random");
    }),
    ("endpoints-differ", |root| {
        drop(list(&mut cluster(root, 1)["load_assignment"]["endpoints"][0]["lb_endpoints"]).pop())
    }),
    ("endpoints-differ", |root| cluster(root, 0)["load_assignment"]["endpoints"][0]["priority"] = json!(1)),
    ("endpoints-differ", |root| {
        cluster(root, 0)["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["load_balancing_weight"] =
            json!(3);
    }),
    ("endpoints-differ", |root| {
        let endpoint =
            &mut cluster(root, 1)["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"];
        endpoint["address"]["socket_address"]["port_value"] = json!(9);
    }),
    ("endpoints-differ", |root| cluster(root, 1)["type"] = json!("EDS")),
    ("health-differs", |root| {
        for index in 0..2 {
            let groups = &mut cluster(root, index)["load_assignment"]["endpoints"];
            let mut second = groups[0].clone();
            second["priority"] = json!(1);
            list(groups).push(second);
        }
        cluster(root, 0)["health_checks"] = json!([{"timeout": "1s"}]);
    }),
    ("locality-differs", |root| {
        cluster(root, 0)["common_lb_config"] = json!({"locality_weighted_lb_config": {}});
    }),
    ("host-unverified", |root| {
        list(&mut cluster(root, 1)["typed_extension_protocol_options"][HTTP_OPTIONS]["http_filters"])
            .remove(0);
    }),
    ("host-unverified", |root| {
        let filters = &mut cluster(root, 1)["typed_extension_protocol_options"][HTTP_OPTIONS]["http_filters"];
        remove(
            &mut filters[0]["typed_config"]["mutations"]["response_mutations"][0]["append"],
            "append_action",
        );
    }),
    ("host-unused", |root| {
        settings(root, |settings| remove(&mut settings["clusters"][0], "verified_probes"))
    }),
    ("breakers-narrow", |root| {
        cluster(root, 0)["circuit_breakers"]["thresholds"][0]["max_requests"] = json!("10")
    }),
    ("stats-tags", |root| remove(root, "stats_config")),
    ("stats-tags", |root| drop(list(&mut root["stats_config"]["stats_tags"]).pop())),
    ("unseen", |root| {
        remove(manager(root, ""), "route_config");
        manager(root, "")["rds"] = json!({"route_config_name": "ingress"});
    }),
    ("unseen", |root| {
        remove(manager(root, "/http_filters/1"), "typed_config");
        manager(root, "/http_filters/1")["config_discovery"] = json!({"config_source": {"ads": {}}});
    }),
    ("unseen", |root| {
        list(&mut root["static_resources"]["clusters"]).remove(1);
        root["dynamic_resources"] = json!({"cds_config": {"path": "cds.yaml"}});
    }),
    ("unseen", |root| {
        for (index, service) in ["one", "other"].into_iter().enumerate() {
            let cluster = cluster(root, index);
            cluster["type"] = json!("EDS");
            cluster["eds_cluster_config"] = json!({"service_name": service, "eds_config": {"ads": {}}});
        }
    }),
];

#[test]
fn each_mistake_is_found_alone() {
    for (code, break_it) in BREAKS {
        let mut root = shipped();
        break_it(&mut root);
        let findings = check(&root, false).unwrap();
        assert_eq!(codes_of(&findings), [*code], "{findings:#?}");
        assert!(!findings[0].path.is_empty() || *code == "filter-missing", "{findings:#?}");
    }
}

/// Returns a shipped manifest with the module pinned by digest, as in a release.
fn pinned(text: &str) -> String {
    let pinned = text.replace("prequal_filter:0.1.0", &format!("prequal_filter@sha256:{}", "a".repeat(64)));
    assert_ne!(pinned, text);
    pinned
}

/// Returns the documents of a manifest as `kubectl get -o json` prints them, after a change to the module's fields.
fn changed(text: &str, change: impl FnOnce(&mut Value)) -> String {
    let mut items = read::documents(&pinned(text)).unwrap();
    let loads = |item: &&mut Value| matches!(item["kind"].as_str(), Some("WasmPlugin" | "TrafficExtension"));
    let plugin = items.iter_mut().find(loads).unwrap();
    change(if plugin["kind"] == "WasmPlugin" { &mut plugin["spec"] } else { &mut plugin["spec"]["wasm"] });
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}

/// Single changes to the module's fields in Istio's manifests.
const MANIFEST_BREAKS: &[Break] = &[
    ("module-fetched", |wasm| wasm["failStrategy"] = json!("FAIL_RELOAD")),
    ("module-fetched", |wasm| {
        wasm["url"] = json!("https://example.com/prequal.wasm");
        wasm["sha256"] = json!("a".repeat(64));
        wasm["failStrategy"] = json!("FAIL_RELOAD");
    }),
    // Without a scheme, the URL names an image.
    ("module-fetched", |wasm| {
        wasm["url"] = json!(wasm["url"].as_str().unwrap().replace("oci://", ""));
        wasm["failStrategy"] = json!("FAIL_RELOAD");
    }),
    ("module-moves", |wasm| wasm["url"] = json!("oci://example.com/prequal:1.0.0")),
    ("module-moves", |wasm| wasm["url"] = json!("https://example.com/prequal.wasm")),
    ("module-moves", |wasm| {
        // Only an image has a digest in its name.
        wasm["url"] = json!(format!("http://example.com/prequal.wasm@sha256:{}", "a".repeat(64)));
        wasm["sha256"] = json!("");
    }),
    ("fail-closed", |wasm| {
        wasm["url"] = json!("file:///var/lib/prequal/prequal_filter.wasm");
        remove(wasm, "failStrategy");
    }),
    ("fail-open", |wasm| wasm["url"] = json!("file:///var/lib/prequal/prequal_filter.wasm")),
    ("settings", |wasm| wasm["pluginConfig"]["nonsense"] = json!(1)),
    ("settings", |wasm| remove(wasm, "pluginConfig")),
    ("filter-missing", |wasm| {
        *wasm = json!({"url": "oci://example.com/other:1", "pluginName": "other"});
    }),
];

#[test]
fn each_mistake_in_a_manifest_is_found_alone() {
    for (code, break_it) in MANIFEST_BREAKS {
        for text in MANIFESTS {
            // Otherwise the object's name alone would identify its module as Prequal's.
            let text = if *code == "filter-missing" {
                text.replace("name: prequal", "name: x")
            } else {
                text.into()
            };
            let findings = judge(&changed(&text, break_it), false).unwrap();
            assert_eq!(codes_of(&findings), [*code], "{findings:#?}");
        }
    }
    // A missing `failStrategy` has two effects in Istio.
    let text = changed(MANIFESTS[0], |wasm| remove(wasm, "failStrategy"));
    let findings = judge(&text, false).unwrap();
    assert_eq!(codes_of(&findings), ["fail-closed", "module-fetched"], "{findings:#?}");
    assert_eq!(findings[1].path, "WasmPlugin demo/prequal: spec.failStrategy");
    assert!(findings[1].code.cure.contains("docs/guide/istio.md"), "{findings:#?}");
}

#[test]
fn shipped_manifests_are_clean_once_they_are_pinned() {
    for text in MANIFESTS {
        assert_eq!(judge(&pinned(text), false).unwrap(), []);
        assert_eq!(codes_of(&judge(text, false).unwrap()), ["module-moves"]);
        assert_eq!(judge(&changed(text, |_| {}), false).unwrap(), []);
        let file = changed(text, |wasm| {
            wasm["url"] = json!("file:///var/lib/prequal/prequal_filter.wasm");
            wasm["failStrategy"] = json!("FAIL_RELOAD");
        });
        assert_eq!(judge(&file, false).unwrap(), []);
    }
}

#[test]
fn manifests_without_the_module_are_refused() {
    let error = judge(SERVER_AGENT, false).unwrap_err().to_string();
    assert!(error.contains("WasmPlugin"), "{error}");
    let error = judge(MANIFESTS[0], true).unwrap_err().to_string();
    assert!(error.contains("config_dump"), "{error}");
    // All documents of a manifest are read, but only the first of an Envoy configuration.
    let error = judge(&format!("{}\n---\na: [", MANIFESTS[3]), false).unwrap_err();
    assert!(format!("{error:#}").contains("document 2"), "{error:#}");
    let mut findings = judge(&format!("{SHIPPED}\n---\na: ["), false).unwrap();
    findings.retain(|finding| finding.code.name != "module-missing");
    assert_eq!(findings, []);
}

#[test]
fn wrong_types_in_a_manifest_do_not_panic() {
    let mut reported = 0;
    for text in [MANIFESTS[0], MANIFESTS[3]] {
        let root: Value = serde_json::from_str(&changed(text, |_| {})).unwrap();
        let mut all = Vec::new();
        places(&root, String::new(), &mut all);
        for path in &all {
            for wrong in [json!(null), json!(-1), json!("\u{0}"), json!([null, [7]]), json!({"a": {}})] {
                let mut broken = root.clone();
                *broken.pointer_mut(path).unwrap() = wrong;
                reported += judge(&broken.to_string(), false).map_or(1, |findings| findings.len());
            }
        }
    }
    assert!(reported > 50, "{reported}");
}

#[test]
fn an_old_setting_name_is_reported_with_the_new_one() {
    for (old, new) in [
        ("error_aversion", "ejection_failure_share"),
        ("breaker", "ejection_wait_factor"),
        ("ramp_ms", "slow_start_ms"),
    ] {
        let mut root = shipped();
        settings(&mut root, |settings| settings["clusters"][0][old] = json!(1));
        let findings = check(&root, false).unwrap();
        assert_eq!(codes_of(&findings), ["settings"], "{findings:#?}");
        let message = format!("`clusters[0].{old}` is no longer a field: its new name is \"{new}\"");
        assert_eq!(findings[0].found, message);
    }
}

#[test]
fn every_code_has_a_test_and_a_line_in_the_docs() {
    for code in codes::ALL {
        let breaks = BREAKS.iter().chain(MANIFEST_BREAKS).chain(native::BREAKS);
        assert!(breaks.into_iter().any(|(name, _)| *name == code.name), "no test for {}", code.name);
        let cell = |text: &str| text.replace('|', "\\|");
        let row = format!(
            "| `{}` | {} | {} | {} | {} |",
            code.name,
            code.level.name(),
            cell(code.what),
            cell(code.effect),
            cell(code.cure)
        );
        assert!(DOCS.lines().any(|line| line == row), "docs/reference/prequal.md lacks this row:\n{row}");
    }
    let rows = DOCS.lines().filter(|line| line.starts_with("| `")).filter(|line| {
        ["error", "warning", "hint"].iter().any(|level| line.contains(&format!("` | {level} |")))
    });
    assert_eq!(
        rows.count(),
        codes::ALL.len(),
        "docs/reference/prequal.md has rows for codes that do not exist"
    );
}

#[test]
fn shipped_configurations_are_clean() {
    for text in [SHIPPED, INBOUND, COMPOSE, COMPOSE_NATIVE] {
        let mut findings = check(&read::text(text).unwrap(), false).unwrap();
        // The location of the module depends on the machine.
        findings.retain(|finding| finding.code.name != "module-missing");
        assert_eq!(findings, []);
    }
    let root = shipped();
    assert_eq!(check(&root, false).unwrap(), []);
}

#[test]
fn allowed_variants_have_no_findings() {
    let allowed: &[Break] = &[
        ("probes on a port of their own", |root| {
            let endpoints = &mut cluster(root, 1)["load_assignment"]["endpoints"][0]["lb_endpoints"];
            for endpoint in list(endpoints) {
                let port = &mut endpoint["endpoint"]["address"]["socket_address"]["port_value"];
                *port = json!(port.as_u64().unwrap() + 1000);
            }
        }),
        ("override_host", override_host),
        // Envoy then ignores the field.
        ("subsets without selectors", |root| cluster(root, 0)["lb_subset_config"] = json!({})),
        ("the choice removed by every route that leads to replicas", |root| {
            remove(manager(root, "/route_config"), "request_headers_to_remove");
            manager(root, &format!("{ROUTES}/1"))["request_headers_to_remove"] = json!(["X-Prequal-Dest"]);
        }),
        ("the choice removed by a filter behind the shim", |root| {
            remove(manager(root, "/route_config"), "request_headers_to_remove");
            strip_upstream(root);
            let strip = upstream_filters(root).remove(0);
            upstream_filters(root).clear();
            list(manager(root, "/http_filters")).insert(3, strip);
        }),
        ("the choice removed upstream", |root| {
            remove(manager(root, "/route_config"), "request_headers_to_remove");
            strip_upstream(root);
        }),
        ("a rule without probes", |root| {
            settings(root, |settings| {
                settings["clusters"] =
                    json!([{"cluster": "replicas", "probe_cluster": "none", "rule": "peak_ewma"}]);
            });
            list(&mut root["static_resources"]["clusters"]).remove(1);
        }),
        ("a strip by prefix", |root| {
            let strip = json!([{"remove_on_match": {"key_matcher": {"prefix": "x-prequal-"}}}]);
            *manager(root, "/http_filters/0/typed_config/mutations") =
                json!({"request_mutations": strip, "response_mutations": strip});
        }),
        ("routes that do not take the probe's path", |root| {
            list(manager(root, ROUTES)).remove(0);
            *manager(root, &format!("{ROUTES}/0/match")) = json!({"path_separated_prefix": "/api"});
        }),
        ("localities weighted in both", |root| {
            cluster(root, 0)["common_lb_config"] = json!({"locality_weighted_lb_config": {}});
            let policy =
                &mut cluster(root, 1)["load_balancing_policy"]["policies"][0]["typed_extension_config"];
            let fallback =
                &mut policy["typed_config"]["fallback_policy"]["policies"][0]["typed_extension_config"];
            fallback["typed_config"]["locality_lb_config"] = json!({"locality_weighted_lb_config": {}});
        }),
        ("settings as an object", |root| {
            let configuration = manager(root, &format!("{WASM}/configuration"));
            let settings: Value = serde_json::from_str(configuration["value"].as_str().unwrap()).unwrap();
            *configuration =
                json!({"@type": "type.googleapis.com/google.protobuf.Struct", "value": settings});
        }),
        ("a filter that changes the route before the strip", |root| {
            list(manager(root, "/http_filters")).insert(0, jwt());
        }),
        ("a filter that keeps the route behind the shim", |root| {
            let lua = filter("lua.v3.Lua", json!({"clear_route_cache": false}));
            list(manager(root, "/http_filters")).insert(3, lua);
        }),
        ("an access log in JSON with keys that are fields elsewhere", |root| {
            let format =
                json!({"route": "%ROUTE_NAME%", "match": "%REQ(:PATH)%", "clusters": "%UPSTREAM_CLUSTER%"});
            manager(root, "")["access_log"] = json!([{"name": "file", "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
                "path": "/dev/stdout", "log_format": {"json_format": format}}}]);
            manager(root, "")["local_reply_config"] = json!({"body_format": {"json_format": format}});
        }),
        ("filters of others, with fields of their own", |root| {
            let filters = list(manager(root, "/http_filters"));
            let of_others = json!({"route": "a", "filters": {}});
            let wrapped = json!({"@type": "type.googleapis.com/udpa.type.v1.TypedStruct",
                "type_url": "type.googleapis.com/example.Filter", "value": of_others});
            filters.insert(0, json!({"name": "wrapped", "typed_config": wrapped}));
            let mut plain = of_others;
            plain["@type"] = json!("type.googleapis.com/example.Filter");
            filters.insert(0, json!({"name": "plain", "typed_config": plain}));
        }),
        ("a Dubbo proxy, whose `route_config` is a list", |root| {
            let mut listener = root["static_resources"]["listeners"][0].clone();
            listener["filter_chains"] = json!([{"filters": [{"name": "dubbo", "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.network.dubbo_proxy.v3.DubboProxy",
                "stat_prefix": "dubbo", "route_config": [{"name": "a", "interface": "b", "routes": []}]}}]}]);
            list(&mut root["static_resources"]["listeners"]).push(listener);
        }),
        ("transport sockets by labels", |root| {
            cluster(root, 0)["transport_socket_matches"] = json!([{"name": "a", "match": {"route": "b"}}]);
        }),
        ("a filter in a wrapper", |root| {
            let filter = manager(root, "/http_filters/0/typed_config").take();
            *manager(root, "/http_filters/0/typed_config") = json!({
                "@type": "type.googleapis.com/xds.type.v3.TypedStruct", "type_url": filter["@type"], "value": filter});
        }),
    ];
    for (what, change) in allowed {
        let mut root = shipped();
        change(&mut root);
        assert_eq!(check(&root, false).unwrap(), [], "{what}");
    }
}

#[test]
fn a_dump_is_recognised_and_its_parts_are_put_together() {
    let mut root = shipped();
    let mut listener = root["static_resources"]["listeners"][0].take();
    let manager = listener.pointer_mut("/filter_chains/0/filters/0/typed_config").unwrap();
    let wasm = manager["http_filters"][1].take();
    manager["http_filters"][1] = json!({"name": wasm["name"], "config_discovery": {}});
    let routes = manager["route_config"].take();
    remove(manager, "route_config");
    manager["rds"] = json!({"route_config_name": "ingress"});
    let mut clusters = root["static_resources"]["clusters"].take();
    let mut assignments = Vec::new();
    for cluster in list(&mut clusters) {
        cluster["type"] = json!("EDS");
        let assignment = cluster["load_assignment"].take();
        remove(cluster, "load_assignment");
        assignments.push(json!({"endpoint_config": assignment}));
        cluster["eds_cluster_config"] = json!({"eds_config": {"ads": {}}});
    }
    let clusters: Vec<Value> =
        list(&mut clusters).drain(..).map(|cluster| json!({"cluster": cluster})).collect();
    remove(&mut root, "static_resources");
    let admin = |kind: &str| json!(format!("type.googleapis.com/envoy.admin.v3.{kind}ConfigDump"));
    let mut dump = json!({"configs": [
        {"@type": admin("Bootstrap"), "bootstrap": root},
        {"@type": admin("Clusters"), "dynamic_active_clusters": clusters},
        {"@type": admin("Listeners"), "dynamic_listeners": [{"name": "x", "active_state": {"listener": listener}}]},
        {"@type": admin("Routes"), "dynamic_route_configs": [{"route_config": routes}]},
        {"@type": admin("Endpoints"), "dynamic_endpoint_configs": assignments},
        {"@type": admin("Ecds"), "ecds_filters": [{"ecds_filter": wasm}]},
    ]});
    assert_eq!(check(&dump, true).unwrap(), []);
    // Now Istio's agent has fetched the module.
    let mut fetched = dump.clone();
    let plugin = &mut fetched["configs"][5]["ecds_filters"][0]["ecds_filter"]["typed_config"]["config"];
    plugin["vm_config"]["code"]["local"]["filename"] = json!("/var/lib/istio/data/oci/sum.wasm");
    assert_eq!(codes_of(&check(&fetched, false).unwrap()), ["module-fetched"]);
    let plugin = &mut fetched["configs"][5]["ecds_filters"][0]["ecds_filter"]["typed_config"]["config"];
    plugin["failure_policy"] = json!("FAIL_OPEN");
    assert_eq!(check(&fetched, false).unwrap(), []);
    dump["configs"][4]["dynamic_endpoint_configs"][1]["endpoint_config"]["endpoints"][0]["priority"] =
        json!(1);
    assert_eq!(codes_of(&check(&dump, false).unwrap()), ["endpoints-differ"]);
    dump["configs"][3]["dynamic_route_configs"] = json!([]);
    assert_eq!(codes_of(&check(&dump, false).unwrap()), ["endpoints-differ", "unseen"]);
}

#[test]
fn other_files_are_refused() {
    for text in ["7", "[]", "{}", "a: b", "text"] {
        assert!(check(&read::text(text).unwrap(), false).is_err(), "{text}");
    }
    assert!(check(&shipped(), true).is_err(), "a bootstrap is not a dump");
}

/// Collects pointers to every value below `value`.
fn places(value: &Value, path: String, all: &mut Vec<String>) {
    match value {
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, item)| places(item, format!("{path}/{index}"), all))
        }
        Value::Object(fields) => fields.iter().for_each(|(key, item)| {
            places(item, format!("{path}/{}", key.replace('~', "~0").replace('/', "~1")), all);
        }),
        _ => {}
    }
    all.push(path);
}

#[test]
fn wrong_types_anywhere_do_not_panic() {
    replace_every_value(&shipped());
}

/// Replaces every value of a shipped configuration in turn. The findings do not matter, but nothing may panic.
fn replace_every_value(root: &Value) {
    let mut all = Vec::new();
    places(root, String::new(), &mut all);
    assert!(all.len() > 200, "{}", all.len());
    let mut reported = 0;
    for path in &all {
        for wrong in
            [json!(null), json!(-1), json!("\u{0}"), json!([null, [7]]), json!({"a": {}}), json!(true)]
        {
            let mut broken = root.clone();
            *broken.pointer_mut(path).unwrap() = wrong;
            reported += check(&broken, false).map_or(1, |findings| findings.len());
        }
    }
    assert!(reported > all.len(), "{reported} findings at {} places", all.len());
}

#[test]
fn every_spelling_of_true_counts() {
    for word in ["y", "yes", "Yes", "on", "ON", "true", "TRUE"] {
        let mut root = shipped();
        manager(&mut root, "")["normalize_path"] = json!(word);
        assert!(check(&root, false).unwrap().is_empty(), "{word}");
    }
    let mut root = shipped();
    manager(&mut root, "")["normalize_path"] = json!("oui");
    assert!(!check(&root, false).unwrap().is_empty());
}

#[test]
fn levels_sort_the_worst_first() {
    let mut root = shipped();
    remove(&mut root, "stats_config");
    remove(manager(&mut root, ""), "normalize_path");
    remove(manager(&mut root, WASM), "failure_policy");
    let levels: Vec<Level> = check(&root, false).unwrap().iter().map(|finding| finding.code.level).collect();
    assert_eq!(levels, [Level::Error, Level::Warning, Level::Hint]);
}
