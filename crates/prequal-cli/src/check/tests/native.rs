//! The same tests for the native module.

use serde_json::{Value, json};

use super::{Break, HTTP_OPTIONS, MANAGER, ROUTES, cluster, codes_of, list, manager, places, remove};
use crate::check::check;
use crate::read;

const NATIVE: &str = include_str!("../../../../../envoy-configs/static/envoy-native.yaml");

/// An access log that is not the module's.
const FILE_LOG: &str = "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog";

fn shipped() -> Value {
    read::text(NATIVE).unwrap()
}

/// Returns the policy of the serving cluster.
fn policy(root: &mut Value) -> &mut Value {
    &mut cluster(root, 0)["load_balancing_policy"]["policies"][0]["typed_extension_config"]["typed_config"]
}

/// Returns the upstream filters of the serving (0) or the probe cluster (1).
fn filters(root: &mut Value, index: usize) -> &mut Vec<Value> {
    list(&mut cluster(root, index)["typed_extension_protocol_options"][HTTP_OPTIONS]["http_filters"])
}

fn router(root: &mut Value) -> &mut Value {
    &mut list(manager(root, "/http_filters")).last_mut().unwrap()["typed_config"]
}

fn settings(root: &mut Value, change: impl FnOnce(&mut Value)) {
    let text = &mut policy(root)["lb_policy_config"]["value"];
    let mut settings: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
    change(&mut settings);
    *text = json!(settings.to_string());
}

/// Changes every place that names the module.
fn modules(root: &mut Value, change: &impl Fn(&mut Value)) {
    let mut all = Vec::new();
    places(root, String::new(), &mut all);
    for path in all.iter().filter(|path| path.ends_with("/dynamic_module_config")) {
        change(root.pointer_mut(path).unwrap());
    }
}

fn strip(header: &str) -> Value {
    let kind = "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation";
    json!({"name": "strip", "typed_config":
        {"@type": kind, "mutations": {"response_mutations": [{"remove": header}]}}})
}

/// Adds the detour filter before the router, and lets Envoy use the hosts that it names.
fn add_detour(root: &mut Value) {
    let kind = "type.googleapis.com/envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilter";
    let module = policy(root)["dynamic_module_config"].clone();
    let detour = json!({"name": "detour", "typed_config":
        {"@type": kind, "dynamic_module_config": module, "filter_name": "prequal_detour"}});
    list(manager(root, "/http_filters")).insert(1, detour);
    let statuses = ["UNKNOWN", "HEALTHY", "UNHEALTHY", "DRAINING", "TIMEOUT", "DEGRADED"];
    cluster(root, 0)["common_lb_config"] = json!({"override_host_status": {"statuses": statuses}});
}

fn detour(root: &mut Value) -> &mut Value {
    manager(root, "/http_filters/1/typed_config")
}

/// A filter that keeps sessions at their hosts.
fn session() -> Value {
    let kind = "type.googleapis.com/envoy.extensions.filters.http.stateful_session.v3.StatefulSession";
    json!({"name": "session", "typed_config": {"@type": kind}})
}

pub(super) const BREAKS: &[Break] = &[
    ("wrong-type", |root| root["bootstrap_extensions"] = json!({})),
    ("filter-missing", |root| remove(cluster(root, 0), "load_balancing_policy")),
    ("filter-missing", |root| {
        modules(root, &|module| module["name"] = json!("other"));
        policy(root)["lb_policy_name"] = json!("other");
        remove(policy(root), "lb_policy_config");
    }),
    ("native-prober-missing", |root| remove(root, "bootstrap_extensions")),
    ("native-prober-missing", |root| {
        root["bootstrap_extensions"][0]["typed_config"]["dynamic_module_config"]["name"] =
            json!("prequal_native_2");
    }),
    ("native-filter-missing", |root| drop(filters(root, 0).remove(0))),
    ("native-filter-missing", |root| {
        let options = &mut cluster(root, 0)["typed_extension_protocol_options"][HTTP_OPTIONS];
        remove(options, "http_filters");
    }),
    ("native-filter-missing", |root| {
        filters(root, 0)[0]["typed_config"]["dynamic_module_config"]["name"] = json!("other");
    }),
    // The cluster's filters replace the router's.
    ("native-filter-missing", |root| {
        let all = filters(root, 0).clone();
        router(root)["upstream_http_filters"] = json!(all);
        filters(root, 0).remove(0);
    }),
    ("native-log-missing", |root| remove(router(root), "upstream_log")),
    ("native-log-missing", |root| {
        router(root)["upstream_log"][0]["typed_config"] = json!({"@type": FILE_LOG, "path": "/dev/null"});
    }),
    ("native-log-missing", |root| {
        router(root)["upstream_log"][0]["typed_config"]["dynamic_module_config"]["name"] = json!("other");
    }),
    // Of two listeners, one has no log.
    ("native-log-missing", |root| {
        let listeners = &mut root["static_resources"]["listeners"];
        let other = listeners[0].clone();
        list(listeners).push(other);
        remove(router(root), "upstream_log");
    }),
    // A filter with the name of the listener's filter is not the cluster's filter.
    ("native-filter-missing", |root| {
        filters(root, 0)[0]["typed_config"]["filter_name"] = json!("prequal_detour")
    }),
    ("native-detour-missing", |root| {
        add_detour(root);
        list(manager(root, "/http_filters")).remove(1);
    }),
    ("native-detour-status", |root| {
        add_detour(root);
        remove(cluster(root, 0), "common_lb_config");
    }),
    ("native-detour-status", |root| {
        add_detour(root);
        list(&mut cluster(root, 0)["common_lb_config"]["override_host_status"]["statuses"]).remove(2);
    }),
    ("native-detour-name", |root| {
        add_detour(root);
        detour(root)["filter_name"] = json!("prequal");
        remove(cluster(root, 0), "common_lb_config");
    }),
    ("native-detour-name", |root| {
        add_detour(root);
        detour(root)["dynamic_module_config"]["name"] = json!("prequal_native_2");
        remove(cluster(root, 0), "common_lb_config");
    }),
    ("native-detour-order", |root| {
        add_detour(root);
        list(manager(root, "/http_filters")).insert(1, session());
    }),
    ("router-order", |root| {
        add_detour(root);
        list(manager(root, "/http_filters")).swap(1, 2);
    }),
    ("native-filter-probes", |root| {
        let ours = filters(root, 0)[0].clone();
        filters(root, 1).insert(0, ours);
    }),
    ("settings", |root| settings(root, |settings| settings["clusters"][0]["max_age_ms"] = json!(7))),
    ("settings", |root| settings(root, |settings| settings["clusters"][0]["mode"] = json!("sync"))),
    ("settings", |root| {
        settings(root, |settings| settings["clusters"][0]["route_modes"] = json!({"/slow": "sync"}));
    }),
    ("settings", |root| settings(root, |settings| settings["profile"] = json!("inference"))),
    ("settings", |root| settings(root, |settings| *settings = json!({"role": "inbound"}))),
    ("settings", |root| remove(policy(root), "lb_policy_config")),
    ("settings", |root| policy(root)["lb_policy_config"]["value"] = json!("{")),
    ("cluster-absent", |root| {
        settings(root, |settings| {
            let mut copy = settings["clusters"][0].clone();
            copy["cluster"] = json!("absent");
            list(&mut settings["clusters"]).push(copy);
        });
    }),
    ("cluster-absent", |root| {
        settings(root, |settings| settings["clusters"][0]["cluster"] = json!("absent"))
    }),
    ("route-unnamed", |root| {
        settings(root, |settings| {
            settings["clusters"][0]["cluster"] = json!("replicas-agent");
            settings["clusters"][0]["probe_cluster"] = json!("replicas");
        });
    }),
    ("probe-cluster-absent", |root| {
        settings(root, |settings| settings["clusters"][0]["probe_cluster"] = json!("absent"));
    }),
    ("settings", |root| {
        settings(root, |settings| settings["clusters"][0]["probe_cluster"] = json!("replicas"))
    }),
    ("probe-policy", |root| remove(cluster(root, 1), "load_balancing_policy")),
    ("probe-policy", |root| {
        let policy = &mut cluster(root, 1)["load_balancing_policy"]["policies"][0]["typed_extension_config"];
        policy["typed_config"]["override_host_sources"] = json!([{"header": "x-other"}]);
    }),
    ("host-unverified", |root| drop(filters(root, 1).remove(0))),
    ("host-unverified", |root| {
        let mutations = &mut filters(root, 1)[0]["typed_config"]["mutations"]["response_mutations"];
        mutations[0]["append"]["append_action"] = json!("ADD_IF_ABSENT");
    }),
    ("endpoints-differ", |root| {
        drop(list(&mut cluster(root, 1)["load_assignment"]["endpoints"][0]["lb_endpoints"]).pop());
    }),
    ("endpoints-differ", |root| {
        let endpoint =
            &mut cluster(root, 1)["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"];
        endpoint["address"]["socket_address"]["port_value"] = json!(9);
    }),
    ("endpoints-differ", |root| cluster(root, 1)["type"] = json!("EDS")),
    ("original-dst", |root| cluster(root, 0)["type"] = json!("ORIGINAL_DST")),
    ("logical-dns", |root| cluster(root, 1)["type"] = json!("LOGICAL_DNS")),
    ("breakers-narrow", |root| {
        cluster(root, 0)["circuit_breakers"]["thresholds"][0]["max_requests"] = json!(10);
    }),
    ("upstream-codec", |root| drop(filters(root, 0).pop())),
    ("upstream-codec", |root| drop(filters(root, 1).pop())),
    ("upstream-codec", |root| router(root)["upstream_http_filters"] = json!([strip("x-other")])),
    ("strip-missing", |root| drop(list(manager(root, "/http_filters")).remove(0))),
    ("strip-incomplete", |root| {
        drop(list(manager(root, "/http_filters/0/typed_config/mutations/response_mutations")).pop());
    }),
    ("strip-order", |root| filters(root, 0).insert(1, strip("x-prequal-load"))),
    ("router-order", |root| list(manager(root, "/http_filters")).swap(0, 1)),
    ("routes-elsewhere", |root| manager(root, &format!("{ROUTES}/1/route"))["cluster"] = json!("other")),
    ("routes-elsewhere", |root| root["static_resources"]["listeners"] = json!([])),
    ("probe-open", |root| drop(list(manager(root, ROUTES)).remove(0))),
    ("probe-open", |root| list(manager(root, ROUTES)).swap(0, 1)),
    ("path-spelling", |root| remove(manager(root, ""), "normalize_path")),
    ("retry-same-host", |root| {
        remove(manager(root, &format!("{ROUTES}/1/route/retry_policy")), "retry_host_predicate");
    }),
    ("stats-tags", |root| remove(root, "stats_config")),
    ("unseen", |root| {
        remove(manager(root, ""), "route_config");
        manager(root, "")["rds"] = json!({"route_config_name": "ingress"});
    }),
    ("unseen", |root| {
        root["static_resources"]["listeners"] = json!([]);
        root["dynamic_resources"] = json!({"lds_config": {"path": "lds.yaml"}});
    }),
    ("unseen", |root| {
        root["static_resources"]["clusters"] = json!([]);
        root["dynamic_resources"] = json!({"cds_config": {"path": "cds.yaml"}});
    }),
    ("unseen", |root| {
        list(&mut root["static_resources"]["clusters"]).remove(1);
        root["dynamic_resources"] = json!({"cds_config": {"path": "cds.yaml"}});
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

#[test]
fn allowed_variants_have_no_findings() {
    let allowed: &[Break] = &[
        ("the shipped file", |_| {}),
        ("another policy for probes without an address", |root| {
            let policy =
                &mut cluster(root, 1)["load_balancing_policy"]["policies"][0]["typed_extension_config"];
            policy["typed_config"]["fallback_policy"]["policies"][0]["typed_extension_config"]["typed_config"]
                ["@type"] =
                json!("type.googleapis.com/envoy.extensions.load_balancing_policies.random.v3.Random");
        }),
        ("another placement of the probe cluster's endpoints", |root| {
            let group = &mut cluster(root, 0)["load_assignment"]["endpoints"][0];
            group["priority"] = json!(1);
            group["locality"] = json!({"zone": "a"});
            group["lb_endpoints"][0]["load_balancing_weight"] = json!(3);
            cluster(root, 0)["health_checks"] = json!([{"timeout": "1s"}]);
            cluster(root, 0)["common_lb_config"] = json!({"locality_weighted_lb_config": {}});
        }),
        ("probes on a port of their own", |root| {
            let endpoints = &mut cluster(root, 1)["load_assignment"]["endpoints"][0]["lb_endpoints"];
            for endpoint in list(endpoints) {
                let port = &mut endpoint["endpoint"]["address"]["socket_address"]["port_value"];
                *port = json!(port.as_u64().unwrap() + 1000);
            }
        }),
        ("replicas that are trusted", |root| {
            settings(root, |settings| remove(&mut settings["clusters"][0], "verified_probes"));
        }),
        ("a rule without probes", |root| {
            settings(root, |settings| {
                settings["clusters"] =
                    json!([{"cluster": "replicas", "probe_cluster": "none", "rule": "peak_ewma"}]);
            });
            list(&mut root["static_resources"]["clusters"]).remove(1);
        }),
        ("the filter in the router", |root| {
            let all = filters(root, 0).clone();
            router(root)["upstream_http_filters"] = json!(all);
            let options = &mut cluster(root, 0)["typed_extension_protocol_options"][HTTP_OPTIONS];
            remove(options, "http_filters");
        }),
        ("a report that routes remove after the module has read it", |root| {
            manager(root, "/route_config")["response_headers_to_remove"] = json!(["x-prequal-load"]);
        }),
        ("settings as an object", |root| {
            let settings = &mut policy(root)["lb_policy_config"];
            let object: Value = serde_json::from_str(settings["value"].as_str().unwrap()).unwrap();
            *settings = json!({"@type": "type.googleapis.com/google.protobuf.Struct", "value": object});
        }),
        ("a detour", add_detour),
        ("a detour before sessions", |root| {
            add_detour(root);
            list(manager(root, "/http_filters")).insert(2, session());
        }),
        ("sessions that stay at hosts that are not healthy", |root| {
            add_detour(root);
            *detour(root) = session()["typed_config"].clone();
        }),
        ("another module's filter in the listener", |root| {
            add_detour(root);
            *detour(root) = json!({"@type": detour(root)["@type"], "dynamic_module_config": {"name": "other"},
                                   "filter_name": "other"});
            remove(cluster(root, 0), "common_lb_config");
        }),
        ("a module by file", |root| {
            modules(root, &|module| {
                *module = json!({"module": {"local": {"filename": "/opt/libprequal_native.so"}}});
            });
        }),
        ("other names", |root| {
            modules(root, &|module| module["name"] = json!("balancer"));
            policy(root)["lb_policy_name"] = json!("balancer");
        }),
        ("two clusters with the same settings", |root| {
            settings(root, |settings| {
                let mut copy = settings["clusters"][0].clone();
                copy["cluster"] = json!("other");
                list(&mut settings["clusters"]).push(copy);
            });
            let mut other = cluster(root, 0).clone();
            other["name"] = json!("other");
            list(&mut root["static_resources"]["clusters"]).push(other);
            let mut route = manager(root, ROUTES)[1].clone();
            route["match"] = json!({"prefix": "/other"});
            route["route"]["cluster"] = json!("other");
            list(manager(root, ROUTES)).insert(1, route);
        }),
        ("a listener and a route to other clusters", |root| {
            let listeners = &mut root["static_resources"]["listeners"];
            let mut other = listeners[0].clone();
            let path = MANAGER.strip_prefix("/static_resources/listeners/0").unwrap();
            let manager = other.pointer_mut(path).unwrap();
            manager["route_config"]["virtual_hosts"][0]["routes"] =
                json!([{"match": {"prefix": "/"}, "route": {"cluster": "other"}}]);
            manager["http_filters"] = json!([]);
            remove(manager, "normalize_path");
            list(listeners).push(other);
        }),
    ];
    for (what, change) in allowed {
        let mut root = shipped();
        change(&mut root);
        assert_eq!(check(&root, false).unwrap(), [], "{what}");
    }
}

#[test]
fn a_dump_is_clean() {
    let root = shipped();
    let admin = |kind: &str| json!(format!("type.googleapis.com/envoy.admin.v3.{kind}ConfigDump"));
    let resources = &root["static_resources"];
    let clusters: Vec<Value> =
        resources["clusters"].as_array().unwrap().iter().map(|cluster| json!({"cluster": cluster})).collect();
    let mut dump = json!({"configs": [
        {"@type": admin("Bootstrap"), "bootstrap": root},
        {"@type": admin("Clusters"), "static_clusters": clusters},
        {"@type": admin("Listeners"), "static_listeners": [{"listener": resources["listeners"][0]}]},
    ]});
    assert_eq!(check(&dump, true).unwrap(), []);
    remove(&mut dump["configs"][0]["bootstrap"], "bootstrap_extensions");
    assert_eq!(codes_of(&check(&dump, true).unwrap()), ["native-prober-missing"]);
    // Without its bootstrap, a dump does not show whether the extension is there.
    list(&mut dump["configs"]).remove(0);
    assert_eq!(check(&dump, true).unwrap(), []);
}

#[test]
fn a_missing_role_is_reported_with_its_module_and_cluster() {
    let mut root = shipped();
    filters(&mut root, 0).remove(0);
    let findings = check(&root, false).unwrap();
    assert_eq!(findings[0].path, "static_resources.clusters[0]");
    assert_eq!(
        findings[0].found,
        "expected one that loads \"prequal_native\", as the policy of cluster `replicas` does"
    );
    let mut root = shipped();
    settings(&mut root, |settings| settings["clusters"][0]["mode"] = json!("sync"));
    let findings = check(&root, false).unwrap();
    assert!(findings[0].found.contains("`clusters[0].mode`"), "{findings:#?}");
}

#[test]
fn wrong_types_anywhere_do_not_panic() {
    super::replace_every_value(&shipped());
}
