//! The files of `envoy-configs/envoy-gateway/`: their translation by Envoy Gateway, run on a real Envoy with traffic.
//!
//! The translation is committed, because the translator takes minutes to build: `tests/envoy-gateway/translated.json`,
//! written by `cargo xtask gateway`. Replaced here: endpoints, ports, the path of the module, and the
//! discovery of routes and endpoints. Not tested here: how Envoy Gateway fetches the module and serves it to Envoy.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prequal_testbed::manifests::{EnvoyGateway, find};
use prequal_testbed::{
    AgentOptions, Envoy, EnvoyConfig, Request, Response, assert_no_prequal_headers, bed, crash_module,
    envoy_loads_native_modules, eventually, lb_endpoint, manifests, missing_file, target_dir, wasm_module,
    workspace_root,
};
use serde_json::{Value, json};

use crate::istio::Pods;
use crate::schemas::check;

const SERVING: &str = "httproute/demo/replicas/rule/0";
const PROBING: &str = "httproute/demo/replicas-probes/rule/0";
const LISTENER: &str = "demo/edge/http";
const FILTER: &str = "envoy.filters.http.wasm/envoyextensionpolicy/demo/prequal/wasm/0";

/// The whole committed file.
fn committed() -> Result<Value> {
    let file = workspace_root().join("tests/envoy-gateway/translated.json");
    Ok(serde_json::from_str(&std::fs::read_to_string(file)?)?)
}

/// The translation of one of [`EnvoyGateway::ALL`].
fn translated(variant: &str) -> Result<Value> {
    Ok(committed()?[variant].clone())
}

/// The resources of one kind, selected by the last part of their type.
fn resources(translated: &Value, kind: &str) -> Vec<Value> {
    let kinds = translated.as_object().expect("an object");
    let found = kinds.iter().find(|(name, _)| name.ends_with(&format!(".{kind}")));
    found.expect(kind).1.as_array().expect("a list").clone()
}

fn by_name(resources: Vec<Value>, field: &str, name: &str) -> Value {
    resources.into_iter().find(|it| it[field] == name).unwrap_or_else(|| panic!("no {name}"))
}

/// The HTTP connection manager of a listener.
fn manager(listener: &mut Value) -> &mut Value {
    let filter = &mut listener["default_filter_chain"]["filters"][0];
    assert_eq!(filter["name"], "envoy.filters.network.http_connection_manager");
    &mut filter["typed_config"]
}

/// The bootstrap that the variant's EnvoyProxy adds to Envoy Gateway's.
fn bootstrap(translated: &Value) -> Result<Option<Value>> {
    let objects = translated["input"].as_array().context("the objects")?;
    let text = find(objects, "EnvoyProxy", "edge")["spec"]["bootstrap"]["value"].clone();
    text.as_str().map(|text| Ok(manifests::parse(text)?.remove(0))).transpose()
}

/// Starts an Envoy with the configuration that Envoy Gateway would send, in front of `replicas`. `module` is the path
/// of the module if the variant has the filter, otherwise `None`.
fn start(variant: &str, replicas: &[SocketAddr], module: Option<&Path>) -> Result<Envoy> {
    let translated = translated(variant)?;
    let mut listener = by_name(resources(&translated, "Listener"), "name", LISTENER);
    listener["address"] = json!({"socket_address": {"address": "127.0.0.1", "port_value": 0}});
    let manager = manager(&mut listener);
    let routes = manager["rds"]["route_config_name"].as_str().context("discovery of routes")?.to_owned();
    let object = manager.as_object_mut().context("an object")?;
    object.remove("rds");
    object.remove("access_log");
    manager["route_config"] = by_name(resources(&translated, "RouteConfiguration"), "name", &routes);
    let filters = manager["http_filters"].as_array_mut().context("filters")?;
    let wasm = filters.iter_mut().find(|filter| filter["name"] == FILTER);
    assert_eq!(wasm.is_some(), module.is_some());
    if let Some(wasm) = wasm {
        wasm["typed_config"]["config"]["vm_config"]["code"] = json!({"local": {"filename": module}});
    }
    listener.as_object_mut().context("an object")?.remove("access_log");

    // Skip the cluster that serves the module.
    let probed = module.is_some() || variant == "native";
    let names = if probed { &[SERVING, PROBING][..] } else { &[SERVING] };
    let mut clusters = Vec::new();
    for name in names {
        let mut cluster = by_name(resources(&translated, "Cluster"), "name", name);
        let mut endpoints = by_name(resources(&translated, "ClusterLoadAssignment"), "cluster_name", name);
        endpoints["endpoints"][0]["lb_endpoints"] = replicas.iter().map(lb_endpoint).collect();
        cluster.as_object_mut().context("an object")?.remove("eds_cluster_config");
        cluster["type"] = json!("STATIC");
        cluster["load_assignment"] = endpoints;
        clusters.push(cluster);
    }
    let mut root = json!({
        "node": {"id": "edge", "cluster": "demo/edge"},
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    });
    if let Some(Value::Object(added)) = bootstrap(&translated)? {
        root.as_object_mut().context("an object")?.extend(added);
    }
    Envoy::start(EnvoyConfig::from_root(root).eds(names))
}

fn pods() -> Result<Pods> {
    Pods::behind(&AgentOptions::default())
}

/// Sends `count` requests made by `make`, one after the other; all must be answered with 200 and without Prequal's
/// headers.
#[track_caller]
fn ask(envoy: &Envoy, count: usize, make: impl Fn() -> Request) {
    let client = envoy.client();
    for _ in 0..count {
        let reply: Response = client.send(make()).expect("an answer");
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_no_prequal_headers(&reply.headers);
    }
}

/// Sends requests until the filter knows `members` replicas and steers.
#[track_caller]
fn warm(envoy: &Envoy, members: u64) {
    let client = envoy.client();
    eventually("the members are learned", Duration::from_secs(20), || {
        for reply in client.burst(10, 2, |_| Request::get("/")) {
            assert_eq!(reply.expect("an answer").status, 200);
        }
        let now = envoy.prequal(SERVING).expect("stats");
        (now.other("prequal_members") == members && now.steered() > 20).then_some(())
    });
}

#[test]
fn the_committed_translation_is_of_the_shipped_files() -> Result<()> {
    for (what, value) in manifests::translator()? {
        assert_eq!(committed()?[&what], value, "{what}: run `cargo xtask gateway`");
    }
    for (variant, way) in EnvoyGateway::ALL {
        assert_eq!(
            translated(variant)?["input"],
            json!(way.objects()?),
            "{variant}: run `cargo xtask gateway`"
        );
    }
    Ok(())
}

/// If Envoy Gateway's translator has been built, its translation must still equal the committed one.
#[test]
fn envoy_gateway_still_translates_as_committed() -> Result<()> {
    let program = target_dir().join("bin/envoy-gateway-translate");
    // Not `needs!`, because CI may skip this: the translator takes minutes to build.
    if let Some(missing) = missing_file(std::slice::from_ref(&program), "cargo xtask gateway") {
        eprintln!("not compared: {missing}");
        return Ok(());
    }
    assert_eq!(manifests::translated(&program)?, committed()?);
    Ok(())
}

#[test]
fn envoy_gateway_accepts_every_object() -> Result<()> {
    for (variant, way) in EnvoyGateway::ALL {
        let translated = translated(variant)?;
        for object in way.objects()? {
            let (kind, name) = (object["kind"].as_str().context("a kind")?, &object["metadata"]["name"]);
            // Envoy Gateway reports no conditions for these. The class's parameters and the filter of a route are
            // visible in the translation.
            if matches!(kind, "GatewayClass" | "EnvoyProxy" | "HTTPRouteFilter") {
                continue;
            }
            if object["apiVersion"].as_str().is_some_and(|version| !version.contains("gateway")) {
                check(&object)?;
                continue;
            }
            let conditions =
                &translated["conditions"][format!("{kind} {}", name.as_str().context("a name")?)];
            let conditions = conditions.as_array().with_context(|| format!("{variant}: no {kind} {name}"))?;
            assert!(!conditions.is_empty(), "{variant}: {kind} {name} has no effect");
            for condition in conditions {
                let condition = condition.as_str().context("a text")?;
                assert!(condition.ends_with("=True"), "{variant}: {kind} {name}: {condition}");
            }
        }
    }
    Ok(())
}

/// The strip comes first, then the module, then the filter that carries out its choice. No route lets a client reach
/// the probe cluster.
#[test]
fn filters_come_in_the_order_that_steering_needs() -> Result<()> {
    let translated = translated("shipped")?;
    let mut listener = by_name(resources(&translated, "Listener"), "name", LISTENER);
    let manager = manager(&mut listener);
    let removed = &manager["early_header_mutation_extensions"][0]["typed_config"]["mutations"];
    let removed: Vec<&Value> =
        removed.as_array().context("removals")?.iter().map(|it| &it["remove"]).collect();
    assert!(removed.contains(&&json!("x-prequal-dest")) && removed.len() == 7, "{removed:?}");
    let filters = manager["http_filters"].as_array().context("filters")?;
    let place = |name: &str| filters.iter().position(|filter| filter["name"] == name).expect(name);
    let (strip, session) = ("envoy.filters.http.header_mutation", "envoy.filters.http.stateful_session");
    assert!(place(strip) < place(FILTER) && place(FILTER) < place(session));
    Ok(())
}

fn assert_steers(variant: &str, module: Option<&Path>) -> Result<(Envoy, Pods)> {
    let pods = pods()?;
    let envoy = start(variant, &pods.serving(), module)?;
    warm(&envoy, 4);
    pods.clear();
    let before = envoy.prequal(SERVING)?;
    ask(&envoy, 20, || pods.spoof("replicas.example.com"));
    let after = envoy.prequal(SERVING)?;
    assert_eq!(after.steered() - before.steered(), 20, "{after:#?}");
    assert_eq!(after.other("prequal_diverted_total"), before.other("prequal_diverted_total"), "{after:#?}");
    // The slow replica may get a first request while its latency is unknown.
    assert!(pods.served()[3] <= 1, "{:?}", pods.served());
    pods.assert_saw_no_prequal_headers();
    // Every reply to a probe came from the replica that was probed.
    assert!(after.probes("used") > 0 && after.probes_rejected() == 0, "{after:#?}");
    assert!(envoy.stat(&format!("cluster.{PROBING}.upstream_cx_http2_total"))? > 0);
    Ok((envoy, pods))
}

#[test]
fn a_gateway_of_envoy_gateway_steers() -> Result<()> {
    bed!();
    let (envoy, pods) = assert_steers("shipped", Some(&wasm_module()))?;
    assert_clients_cannot_reach_agents(envoy, &pods)
}

/// The native module behind the same resources, with its patches.
#[test]
fn a_gateway_with_the_native_module_steers() -> Result<()> {
    bed!();
    if !envoy_loads_native_modules()? {
        // `matrix.rs` tests that such an Envoy refuses the configuration.
        return Ok(());
    }
    // Envoy looks for the module where the volume is.
    let objects = EnvoyGateway::Native.objects()?;
    let container = find(&objects, "EnvoyProxy", "edge")["spec"]["provider"]["kubernetes"]["envoyDeployment"]
        ["container"]
        .clone();
    assert_eq!(container["env"][0]["name"], "ENVOY_DYNAMIC_MODULES_SEARCH_PATH");
    assert_eq!(container["env"][0]["value"], container["volumeMounts"][0]["mountPath"]);

    let (mut envoy, pods) = assert_steers("native", None)?;
    let before = envoy.prequal(SERVING)?;
    assert!(before.reports("used") > 0 && before.outcomes("answer") > 0, "{before:#?}");
    // The log entry of a failed connection says whose failure it is.
    let closed = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    envoy.set_endpoints(SERVING, &[closed])?;
    assert_eq!(envoy.client().get("/")?.status, 503);
    eventually("the failure is counted", Duration::from_secs(5), || {
        (envoy.prequal(SERVING).ok()?.outcomes("upstream_failure") > 0).then_some(())
    });
    assert_eq!(envoy.prequal(SERVING)?.outcomes("client_abort"), before.outcomes("client_abort"));
    envoy.set_endpoints(SERVING, &pods.serving())?;
    warm(&envoy, 4);
    assert_clients_cannot_reach_agents(envoy, &pods)
}

/// What holds for every way to steer: clients cannot read load or name a replica, and Envoy's health checks apply.
fn assert_clients_cannot_reach_agents(mut envoy: Envoy, pods: &Pods) -> Result<()> {
    // The filter's metrics, as an operator reads them.
    assert!(envoy.admin_get("/stats/prometheus")?.contains("prequal_members"));

    // Clients cannot read load, nor use the route that exists only for the probe cluster.
    let probes = envoy.stat(&format!("cluster.{PROBING}.upstream_rq_total"))?;
    pods.clear();
    let client = envoy.client();
    for path in ["/prequal/probe", "//prequal/probe", "/prequal", "/x/../prequal/probe"] {
        assert_eq!(client.get(path)?.status, 404, "{path}");
    }
    assert_eq!(pods.served().iter().sum::<u64>(), 0);
    ask(&envoy, 5, || Request::get("/").header("x-prequal-dest", "never"));
    assert_eq!(pods.served().iter().sum::<u64>(), 5, "the header is removed before route matching");
    let more = envoy.stat(&format!("cluster.{PROBING}.upstream_rq_total"))? - probes;
    assert!(more <= 20, "probes of the filter alone, not {more}");

    // Envoy's own health always applies: unhealthy hosts are not steered to, however good their reports.
    let [first, ..] = pods.serving()[..] else { panic!("replicas") };
    let endpoints: Vec<Value> = pods
        .serving()
        .into_iter()
        .map(|addr| {
            let mut endpoint = lb_endpoint(&addr);
            endpoint["health_status"] = json!(if addr == first { "UNHEALTHY" } else { "HEALTHY" });
            endpoint
        })
        .collect();
    for cluster in [SERVING, PROBING] {
        envoy.set_localities(cluster, &json!([{ "lb_endpoints": endpoints }]))?;
    }
    // Envoy delays a change of health alone by up to a second after another change (`update_merge_window`).
    eventually("the unhealthy replica gets nothing", Duration::from_secs(5), || {
        pods.clear();
        ask(&envoy, 40, || Request::get("/"));
        (pods.served()[0] == 0).then_some(())
    });
    Ok(())
}

#[test]
fn the_patches_verify_probes_and_retry_what_was_not_sent() -> Result<()> {
    bed!();
    let (envoy, mut pods) = assert_steers("patched", Some(&wasm_module()))?;
    // Stop the replica with the most requests, because it will be chosen again.
    let served = pods.served();
    pods.stop_app((0..served.len()).max_by_key(|index| served[*index]).context("a replica")?);
    eventually("the dead replica is chosen", Duration::from_secs(20), || {
        ask(&envoy, 100, || Request::get("/"));
        let retried = envoy.stat(&format!("cluster.{SERVING}.upstream_rq_retry_success")).ok()?;
        (retried > 0).then_some(())
    });
    Ok(())
}

/// The effect of `failOpen`: after a crash Envoy's own policy serves, and clients still cannot choose.
#[test]
fn after_a_crash_of_the_module_requests_continue_unsteered() -> Result<()> {
    let module = crash_module();
    bed!(std::slice::from_ref(&module));
    let pods = pods()?;
    let envoy = start("shipped", &pods.serving(), Some(&module))?;
    warm(&envoy, 4);
    envoy.client().send(Request::get("/").header("x-crash-prequal", "1"))?;
    let [.., slow] = pods.serving()[..] else { panic!("replicas") };
    let picks = envoy.prequal(SERVING)?.steered();
    let wanted = STANDARD.encode(slow.to_string());
    pods.clear();
    for _ in 0..40 {
        let reply = envoy.client().send(Request::get("/").header("x-prequal-dest", &wanted))?;
        assert_eq!(reply.status, 200);
        assert_no_prequal_headers(&reply.headers);
    }
    assert!(pods.served()[3] < 40, "{:?}", pods.served());
    pods.assert_saw_no_prequal_headers();
    assert_eq!(envoy.prequal(SERVING)?.steered(), picks, "nothing is steered");
    Ok(())
}

/// Envoy Gateway's `BackendUtilization`, without the filter, fed by agents: out of band as shipped, and in band.
#[test]
fn backend_utilization_spares_the_replica_that_agents_report_as_slow() -> Result<()> {
    bed!();
    let args = ["--orca=binary", "--orca-streams=100", "--orca-limit=64"].map(str::to_owned).to_vec();
    let options = AgentOptions { args, ..AgentOptions::default() };
    let runs = ["utilization", "utilization_in_band"].map(|variant| {
        let pods = Pods::behind(&options)?;
        let envoy = start(variant, &pods.serving(), None)?;
        Ok((variant, pods, envoy))
    });
    let runs = runs.into_iter().collect::<Result<Vec<_>>>()?;
    // A quarter would be the slow replica's fair share. Weights take effect ten seconds after the first report.
    std::thread::scope(|scope| {
        for (variant, pods, envoy) in &runs {
            scope.spawn(move || {
                eventually(
                    &format!("{variant}: the slow replica is spared"),
                    Duration::from_secs(40),
                    || {
                        pods.clear();
                        for reply in envoy.client().burst(100, 8, |_| Request::get("/")) {
                            let reply = reply.expect("an answer");
                            assert_eq!(reply.status, 200, "{}", reply.text());
                            let names = reply
                                .headers
                                .keys()
                                .filter(|name| name.as_str().starts_with("endpoint-load"));
                            assert_eq!(names.count(), 0, "removed by default: {:?}", reply.headers);
                            assert_no_prequal_headers(&reply.headers);
                        }
                        (pods.served()[3] <= 8).then_some(())
                    },
                );
            });
        }
    });
    let [(.., out_of_band), (.., in_band)] = &runs[..] else { panic!("two") };
    let reports = format!("cluster.{SERVING}.lb_orca_oob.reports_received");
    // An older Envoy ignores the setting, and uses the reports on responses.
    let came_out_of_band = out_of_band.stat(&reports)? > 0;
    assert_eq!(came_out_of_band, minor_version(out_of_band)? >= 39, "reports came out of band");
    assert_eq!(in_band.stat(&reports)?, 0, "none asked for");
    Ok(())
}

/// The second number of Envoy's version.
fn minor_version(envoy: &Envoy) -> Result<u32> {
    let info: Value = serde_json::from_str(&envoy.admin_get("/server_info")?)?;
    let version = info["version"].as_str().and_then(|version| version.split('/').nth(1));
    let minor = version.and_then(|version| version.split('.').nth(1)?.parse().ok());
    minor.with_context(|| format!("no version in {info}"))
}
