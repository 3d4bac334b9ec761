//! Mistakes that operators make in a mesh: their effects, and how to recognise them. `docs/guide/istio.md` lists each
//! with its remedy.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prequal_testbed::{bed, crash_module, eventually};
use serde_json::{Value, json};

use crate::istio::{Pods, ask, get, warm};
use crate::merge::apply;
use crate::proxy::{HOST, OTHER, OTHER_HOST, PROBING, Proxy, Running, SERVING};
use prequal_testbed::manifests::documents;

fn client_files() -> Result<Vec<Value>> {
    documents("istio/client-sidecar.yaml")
}

/// The document of `kind` called `name`.
fn of<'a>(files: &'a mut [Value], kind: &str, name: &str) -> &'a mut Value {
    files.iter_mut().find(|it| it["kind"] == kind && it["metadata"]["name"] == name).expect("such a document")
}

#[test]
fn settings_that_name_another_cluster_leave_the_traffic_to_envoy() -> Result<()> {
    bed!();
    let pods = Pods::start()?;
    let mut proxy = pods.sidecar()?;
    let mut files = client_files()?;
    let wrong = "outbound|8080||replica.demo.svc.cluster.local";
    of(&mut files, "WasmPlugin", "prequal")["spec"]["pluginConfig"]["clusters"][0]["cluster"] = json!(wrong);
    apply(&mut proxy, &files);
    proxy.cluster(SERVING)["lb_policy"] = json!("ROUND_ROBIN");
    let envoy = proxy.start()?;
    // At first the filter assumes that the only cluster of its settings is the one that is requested.
    ask(&envoy, 20, || get(HOST));
    pods.clear();
    let before = envoy.prequal(wrong)?;
    ask(&envoy, 20, || pods.spoof(HOST));
    assert_eq!(pods.served(), [5, 5, 5, 5]);
    assert_eq!(envoy.prequal(wrong)?.picks, before.picks, "symptom: no picks");
    assert_eq!(envoy.prequal(SERVING)?.picks.len(), 0);
    Ok(())
}

#[test]
fn a_sidecar_resource_that_trims_the_probe_port_takes_the_probes_away() -> Result<()> {
    bed!();
    let pods = Pods::start()?;
    let mut proxy = pods.sidecar()?;
    apply(&mut proxy, &client_files()?);
    proxy.clusters.retain(|cluster| cluster["name"] != PROBING);
    let envoy = proxy.start()?;
    ask(&envoy, 40, || pods.spoof(HOST));
    let now = envoy.prequal(SERVING)?;
    assert!(now.probes("undispatched") > 0, "symptom: {now:#?}");
    assert_eq!(now.probes("sent"), 0);
    Ok(())
}

/// The filter notices other clusters by the replicas that answer. Here both clusters have the same replicas, so it has
/// to check the route of a request from time to time.
#[test]
fn a_second_service_with_the_same_pods_is_soon_told_from_the_configured_one() -> Result<()> {
    bed!();
    let pods = Pods::start()?;
    let mut proxy = pods.sidecar()?;
    apply(&mut proxy, &client_files()?);
    proxy.set_endpoints(OTHER, &pods.serving());
    let envoy = proxy.start()?;
    warm(&envoy);
    let before = envoy.prequal(SERVING)?.steered();
    ask(&envoy, 100, || get(OTHER_HOST));
    let taken = envoy.prequal(SERVING)?.steered() - before;
    // The requests share a connection, and so a worker, which checks one response in 16.
    assert!(taken <= 16, "symptom: {taken} of 100");
    Ok(())
}

/// Changes a cluster as `simple: PASSTHROUGH` does.
fn pass_through(cluster: &mut Value) {
    cluster["type"] = json!("ORIGINAL_DST");
    cluster["lb_policy"] = json!("CLUSTER_PROVIDED");
    cluster.as_object_mut().expect("an object").remove("load_assignment");
}

/// The status of one request on a connection with the original destination `to`, as iptables would report it. The
/// client asks for the replica `wanted`.
fn request_to(envoy: &Running, to: SocketAddr, wanted: SocketAddr) -> Result<String> {
    let mut stream = TcpStream::connect(envoy.addr())?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    write!(
        stream,
        "PROXY TCP4 127.0.0.1 {} 40000 {}\r\nGET / HTTP/1.1\r\nhost: {HOST}\r\nx-prequal-dest: {}\r\nconnection: close\r\n\r\n",
        to.ip(),
        to.port(),
        STANDARD.encode(wanted.to_string()),
    )?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    Ok(reply.lines().next().unwrap_or_default().to_owned())
}

#[test]
fn under_passthrough_envoy_refuses_the_probe_cluster_and_clients_choose_no_host_by_header() -> Result<()> {
    bed!();
    let pods = Pods::start()?;
    let passing = || -> Result<Proxy> {
        let mut proxy = pods.sidecar()?;
        for name in [SERVING, PROBING] {
            pass_through(proxy.cluster(name));
        }
        apply(&mut proxy, &client_files()?);
        Ok(proxy)
    };
    // The symptom: Envoy refuses the cluster's update. In this test the clusters are static, so it refuses the whole
    // configuration.
    let error = passing()?.start().err().map(|error| format!("{error:#}")).unwrap_or_default();
    assert!(error.contains(PROBING) || error.contains("ORIGINAL_DST"), "{error}");
    // With the update refused, the cluster does not exist.
    let mut proxy = passing()?;
    proxy.clusters.retain(|cluster| cluster["name"] != PROBING);
    proxy.listener().restore_destination();
    let envoy = proxy.start()?;
    let [first, .., slow] = pods.serving()[..] else { panic!("replicas") };
    for _ in 0..20 {
        assert_eq!(request_to(&envoy, first, slow)?, "HTTP/1.1 200 OK");
    }
    assert_eq!(pods.served(), [20, 0, 0, 0], "each request went to its connection's original destination");
    assert!(envoy.prequal(SERVING)?.probes("undispatched") > 0);
    Ok(())
}

/// The files of the client side without one patch of `prequal-filters`, given by its index.
fn client_files_without(patch: usize) -> Result<Vec<Value>> {
    let mut files = client_files()?;
    let patches = &mut of(&mut files, "EnvoyFilter", "prequal-filters")["spec"]["configPatches"];
    patches.as_array_mut().expect("patches").remove(patch);
    Ok(files)
}

#[test]
fn without_the_front_strip_only_the_module_keeps_clients_from_choosing() -> Result<()> {
    bed!();
    let pods = Pods::start()?;
    let mut files = client_files_without(0)?;
    let mut proxy = pods.sidecar()?;
    apply(&mut proxy, &files);
    let envoy = proxy.start()?;
    warm(&envoy);
    pods.clear();
    let replies = ask(&envoy, 20, || pods.spoof(HOST));
    assert!(pods.served()[3] <= 1, "the filter overwrites what it finds: {:?}", pods.served());
    assert!(
        replies.iter().all(|reply| reply.header("x-prequal-load").is_some()),
        "symptom: load on every reply"
    );
    drop(envoy);
    // Where the module is missing (another port, a failed start with FAIL_OPEN), the client's choice takes effect.
    files.retain(|document| document["kind"] != "WasmPlugin");
    let mut proxy = pods.sidecar()?;
    apply(&mut proxy, &files);
    let envoy = proxy.start()?;
    pods.clear();
    ask(&envoy, 20, || pods.spoof(HOST));
    assert_eq!(pods.served(), [0, 0, 0, 20]);
    Ok(())
}

#[test]
fn without_the_upstream_strip_the_agent_still_keeps_the_choice_from_the_application() -> Result<()> {
    bed!();
    let pods = Pods::start()?;
    let files = client_files_without(2)?;
    let mut proxy = pods.sidecar()?;
    apply(&mut proxy, &files);
    let envoy = proxy.start()?;
    warm(&envoy);
    let before = envoy.prequal(SERVING)?;
    pods.clear();
    ask(&envoy, 20, || get(HOST));
    assert_eq!(envoy.prequal(SERVING)?.steered() - before.steered(), 20, "it still steers");
    pods.assert_saw_no_prequal_headers();
    Ok(())
}

fn crash(envoy: &Running) -> Result<http::StatusCode> {
    Ok(envoy.client().send(get(HOST).header("x-crash-prequal", "1"))?.status)
}

#[test]
fn the_fail_strategy_decides_what_a_crash_costs() -> Result<()> {
    let module = crash_module();
    bed!(std::slice::from_ref(&module));
    let pods = Pods::start()?;
    let start = |strategy: Option<&str>| -> Result<(Running, u64)> {
        let mut files = client_files()?;
        let spec = of(&mut files, "WasmPlugin", "prequal")["spec"].as_object_mut().expect("a spec");
        spec.remove("failStrategy");
        spec.extend(strategy.map(|strategy| ("failStrategy".to_owned(), json!(strategy))));
        let mut proxy = pods.sidecar()?;
        proxy.module = module.to_string_lossy().into_owned();
        apply(&mut proxy, &files);
        let envoy = proxy.start()?;
        warm(&envoy);
        let steered = envoy.prequal(SERVING)?.steered();
        let status = crash(&envoy)?;
        assert!(status == 503 || strategy == Some("FAIL_OPEN"), "{strategy:?}: {status}");
        Ok((envoy, steered))
    };
    let (envoy, steered) = start(Some("FAIL_RELOAD"))?;
    // The back-off is Envoy's default of one second, because a WasmPlugin cannot set it.
    eventually("the filter is back", Duration::from_secs(5), || {
        let answered = envoy.client().send(get(HOST)).is_ok_and(|reply| reply.status == 200);
        (answered && envoy.prequal(SERVING).ok()?.steered() > steered).then_some(())
    });
    drop(envoy);
    // First the strategy that is shipped for images, then Istio's default.
    for (strategy, status) in [(Some("FAIL_OPEN"), 200), (None, 503)] {
        let (envoy, _) = start(strategy)?;
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end {
            assert_eq!(envoy.client().send(get(HOST))?.status, status, "{strategy:?}: symptom");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    Ok(())
}

/// If Istio's agent cannot fetch an image, every request gets 403, unless the plugin fails open.
#[test]
fn every_shipped_module_that_is_fetched_fails_open() -> Result<()> {
    let mut plugins = 0;
    for file in ["client-sidecar", "client-gateway", "server-inbound"] {
        for file in [format!("istio/{file}.yaml"), format!("istio/{file}-extension.yaml")] {
            for document in documents(&file)? {
                let wasm = match document["kind"].as_str() {
                    Some("WasmPlugin") => &document["spec"],
                    Some("TrafficExtension") => &document["spec"]["wasm"],
                    _ => continue,
                };
                assert!(wasm["url"].as_str().context("a url")?.starts_with("oci://"), "{file}");
                assert_eq!(wasm["failStrategy"], "FAIL_OPEN", "{file}");
                plugins += 1;
            }
        }
    }
    assert_eq!(plugins, 6);
    Ok(())
}

/// Asserts that `proxy`, whose shim comes before the module, serves every request and steers none.
fn assert_choices_have_no_effect(mut proxy: Proxy, pods: &Pods) -> Result<()> {
    // In rotation, so that requests that are not steered are spread evenly.
    proxy.cluster(SERVING)["lb_policy"] = json!("ROUND_ROBIN");
    let envoy = proxy.start()?;
    let client = envoy.client();
    eventually("the filter chooses", Duration::from_secs(15), || {
        client
            .burst(10, 2, |_| get(HOST))
            .into_iter()
            .for_each(|reply| assert_eq!(reply.expect("an answer").status, 200));
        (envoy.prequal(SERVING).ok()?.steered() > 0).then_some(())
    });
    pods.clear();
    ask(&envoy, 20, || pods.spoof(HOST));
    assert_eq!(pods.served(), [5, 5, 5, 5]);
    let now = envoy.prequal(SERVING)?;
    assert!(now.other("prequal_diverted_total") > 0, "symptom: {now:#?}");
    Ok(())
}

#[test]
fn a_module_behind_the_shim_has_no_effect() -> Result<()> {
    bed!();
    let pods = Pods::start()?;
    let mut files = client_files()?;
    files.retain(|document| document["kind"] != "WasmPlugin");
    files.extend(documents("istio/client-sidecar-envoyfilter.yaml")?);
    // Without priorities the order of creation decides.
    for file in files.iter_mut().filter(|file| file["kind"] == "EnvoyFilter") {
        file["spec"].as_object_mut().expect("a spec").remove("priority");
    }
    let mut proxy = pods.sidecar()?;
    apply(&mut proxy, &files);
    let names = proxy.filter_names();
    assert_eq!(names[4..], ["prequal-shim", "prequal", "envoy.filters.http.router"]);
    crate::istio::use_built_module(&mut proxy);
    assert_choices_have_no_effect(proxy, &pods)
}

#[test]
fn with_istios_own_shim_an_inserted_module_runs_too_late() -> Result<()> {
    bed!();
    let pods = Pods::start()?;
    let mut files = crate::istio::with_istios_shim()?;
    files.retain(|document| document["kind"] != "WasmPlugin");
    files.extend(documents("istio/client-sidecar-envoyfilter.yaml")?);
    let mut proxy = pods.sidecar()?;
    proxy.persistent_session("x-prequal-dest");
    apply(&mut proxy, &files);
    let names = proxy.filter_names();
    let session = "envoy.filters.http.stateful_session";
    assert_eq!(names[4..], [session, "prequal", "envoy.filters.http.router"]);
    crate::istio::use_built_module(&mut proxy);
    assert_choices_have_no_effect(proxy, &pods)
}
