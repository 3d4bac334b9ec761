//! The files of `envoy-configs/istio/` in sidecars and gateways, with traffic.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prequal_testbed::{
    Agent, AgentOptions, Backend, EnvoyConfig, Reply, Request, Response, assert_no_prequal_headers, bed,
    eventually,
};
use serde_json::{Value, json};

use crate::merge::apply;
use crate::proxy::{HOST, Mesh, OTHER, OTHER_HOST, PROBING, Proxy, Running, SERVING};
use prequal_testbed::manifests::{documents, find};

const PLUGIN: &str = "extensions.istio.io/wasmplugin/demo.prequal";
const ISTIO: [&str; 3] =
    ["envoy.filters.http.grpc_stats", "envoy.filters.http.fault", "envoy.filters.http.cors"];
const ROUTER: &str = "envoy.filters.http.router";

/// Three replicas that answer in 2 ms and a last one in 100 ms, each behind an agent or a sidecar.
pub struct Pods {
    apps: Vec<Backend>,
    serving: Vec<SocketAddr>,
    probing: Vec<SocketAddr>,
    _agents: Vec<Agent>,
    _sidecars: Vec<Running>,
}

impl Pods {
    /// Behind agents that answer probes at a separate port, as in server-agent.yaml.
    pub fn start() -> Result<Self> {
        Self::behind(&AgentOptions { probe_listen: Some("127.0.0.1:0".into()), ..AgentOptions::default() })
    }

    /// Behind agents started with `options`.
    pub fn behind(options: &AgentOptions) -> Result<Self> {
        let apps = Self::apps()?;
        let agents = apps.iter().map(|app| Agent::start_with(app.addr(), options));
        let agents = agents.collect::<Result<Vec<_>>>()?;
        let serving = agents.iter().map(Agent::addr).collect();
        let probing = agents.iter().map(Agent::probe_addr).collect();
        Ok(Self { apps, serving, probing, _agents: agents, _sidecars: Vec::new() })
    }

    /// Behind sidecars in the inbound role, as in server-inbound.yaml: one port of the pod for both ports of the
    /// Service, with Istio's mTLS.
    fn behind_sidecars(mesh: &Mesh) -> Result<Self> {
        let apps = Self::apps()?;
        let files = documents("istio/server-inbound.yaml")?;
        let start = |app: &Backend| {
            let mut proxy = Proxy::server(app.addr())?;
            apply(&mut proxy, &files);
            let plugin = "extensions.istio.io/wasmplugin/demo.prequal-inbound";
            assert_eq!(proxy.filter_names(), chain(&[plugin], &[]));
            mesh.terminate(&mut proxy);
            proxy.start()
        };
        let sidecars = apps.iter().map(start).collect::<Result<Vec<_>>>()?;
        let serving: Vec<SocketAddr> = sidecars.iter().map(|sidecar| sidecar.addr()).collect();
        Ok(Self { apps, probing: serving.clone(), serving, _agents: Vec::new(), _sidecars: sidecars })
    }

    fn apps() -> Result<Vec<Backend>> {
        let delays = [2, 2, 2, 100].map(Duration::from_millis);
        delays.into_iter().map(|delay| Backend::start(Reply::ok().delay(delay))).collect()
    }

    pub fn serving(&self) -> Vec<SocketAddr> {
        self.serving.clone()
    }

    /// A client's sidecar before any patch.
    pub fn sidecar(&self) -> Result<Proxy> {
        Proxy::sidecar(&self.serving, &self.probing)
    }

    pub fn served(&self) -> Vec<u64> {
        self.apps.iter().map(Backend::served).collect()
    }

    /// Stops an application; its agent keeps running.
    pub fn stop_app(&mut self, index: usize) {
        drop(self.apps.remove(index));
    }

    pub fn clear(&self) {
        self.apps.iter().for_each(Backend::clear);
    }

    /// Asserts that no replica has seen any of Prequal's headers since [`Self::clear`].
    #[track_caller]
    pub fn assert_saw_no_prequal_headers(&self) {
        for seen in self.apps.iter().flat_map(Backend::seen) {
            assert_no_prequal_headers(&seen.headers);
        }
    }

    /// A request whose client asks for the slow replica and claims that the others are busy.
    pub fn spoof(&self, host: &str) -> Request {
        let [first, .., slow] = self.serving()[..] else { panic!("replicas") };
        get(host)
            .header("x-prequal-dest", &STANDARD.encode(slow.to_string()))
            .header("x-prequal-load", &format!("100;1000000;{first}"))
            .header("x-prequal-host", &slow.to_string())
    }
}

/// A request to `host`, port 8080.
pub fn get(host: &str) -> Request {
    Request::get("/").header("host", &format!("{host}:8080"))
}

/// Sends `count` requests made by `make`, one after the other; all must be answered with 200.
#[track_caller]
pub fn ask(envoy: &Running, count: usize, make: impl Fn() -> Request) -> Vec<Response> {
    let client = envoy.client();
    let replies: Vec<Response> = (0..count).map(|_| client.send(make()).expect("an answer")).collect();
    replies.iter().for_each(|reply| assert_eq!(reply.status, 200, "{}", reply.text()));
    replies
}

/// Sends requests until the filter knows all four replicas and steers.
#[track_caller]
pub fn warm(envoy: &Running) {
    let client = envoy.client();
    eventually("four members are learned", Duration::from_secs(15), || {
        client
            .burst(10, 2, |_| get(HOST))
            .into_iter()
            .for_each(|reply| assert_eq!(reply.expect("an answer").status, 200));
        let now = envoy.prequal(SERVING).expect("stats");
        (now.other("prequal_members") == 4 && now.steered() > 20).then_some(())
    });
}

/// Asserts that twenty requests all go to the replicas that the filter chose, although their client asks for another,
/// and that none of Prequal's headers is visible outside.
#[track_caller]
fn assert_steers(envoy: &Running, pods: &Pods) {
    warm(envoy);
    pods.clear();
    let before = envoy.prequal(SERVING).expect("stats");
    for reply in ask(envoy, 20, || pods.spoof(HOST)) {
        assert_no_prequal_headers(&reply.headers);
    }
    let after = envoy.prequal(SERVING).expect("stats");
    assert_eq!(after.steered() - before.steered(), 20, "{after:#?}");
    assert_eq!(after.other("prequal_diverted_total"), before.other("prequal_diverted_total"), "{after:#?}");
    // The slow replica may get a first request while its latency is unknown.
    assert!(pods.served()[3] <= 1, "{:?}", pods.served());
    pods.assert_saw_no_prequal_headers();
    // Every reply to a probe named its host, which was the host that was probed.
    assert!(after.probes("used") > 0 && after.probes_rejected() == 0, "{after:#?}");
}

/// Asserts that a proxy in front of replicas with agents steers, once `patch` has changed it as Istio would.
#[track_caller]
fn assert_patched_steers(
    proxy: impl Fn(&[SocketAddr], &[SocketAddr]) -> Result<Proxy>,
    patch: impl FnOnce(&mut Proxy) -> Result<()>,
) -> Result<()> {
    bed!();
    let pods = Pods::start()?;
    let mut proxy = proxy(&pods.serving, &pods.probing)?;
    patch(&mut proxy)?;
    assert_steers(&proxy.start()?, &pods);
    Ok(())
}

/// The expected filter names, with Istio's own filters in between.
fn chain<'a>(front: &[&'a str], back: &[&'a str]) -> Vec<&'a str> {
    [front, &ISTIO, back, &[ROUTER]].concat()
}

/// An EnvoyFilter inserts the module as a file; this sets the path of the built one.
pub fn use_built_module(proxy: &mut Proxy) {
    let module = proxy.module.clone();
    let filters = proxy.listener().http_filters();
    let filter = filters.iter_mut().find(|filter| filter["name"] == "prequal").expect("the module");
    filter["typed_config"]["config"]["vm_config"]["code"]["local"]["filename"] = json!(module);
}

#[test]
fn a_sidecar_steers_with_the_wasm_plugin() -> Result<()> {
    assert_patched_steers(Proxy::sidecar, |proxy| {
        apply(proxy, &documents("istio/client-sidecar.yaml")?);
        assert_eq!(proxy.filter_names(), chain(&["prequal-strip", PLUGIN], &["prequal-shim"]));
        // The listener of the probe port is not changed.
        assert_eq!(proxy.listeners[1].http_filters().len(), 4);
        Ok(())
    })
}

#[test]
fn a_sidecar_steers_with_the_traffic_extension() -> Result<()> {
    assert_patched_steers(Proxy::sidecar, |proxy| {
        let mut files = documents("istio/client-sidecar.yaml")?;
        files.retain(|document| document["kind"] != "WasmPlugin");
        files.extend(documents("istio/client-sidecar-extension.yaml")?);
        apply(proxy, &files);
        let extension = "extensions.istio.io/trafficextension/demo.prequal";
        assert_eq!(proxy.filter_names(), chain(&["prequal-strip", extension], &["prequal-shim"]));
        Ok(())
    })
}

/// TrafficExtension and WasmPlugin differ only in the position of their fields.
#[test]
fn traffic_extensions_and_wasm_plugins_agree() -> Result<()> {
    for file in ["client-sidecar", "client-gateway", "server-inbound"] {
        let extensions = documents(&format!("istio/{file}-extension.yaml"))?;
        let [extension] = &extensions[..] else { panic!("{file}: {} documents", extensions.len()) };
        let files = documents(&format!("istio/{file}.yaml"))?;
        let plugin = files.iter().find(|it| it["kind"] == "WasmPlugin").expect("a WasmPlugin");
        assert_eq!(extension["metadata"], plugin["metadata"], "{file}");
        let mut flat = extension["spec"].clone();
        let wasm = flat.as_object_mut().expect("a spec").remove("wasm").expect("a module");
        flat.as_object_mut().expect("a spec").extend(wasm.as_object().expect("a module").clone());
        assert_eq!(flat, plugin["spec"], "{file}");
    }
    Ok(())
}

#[test]
fn a_sidecar_steers_with_the_module_by_envoy_filter() -> Result<()> {
    assert_patched_steers(Proxy::sidecar, |proxy| {
        let mut files = documents("istio/client-sidecar.yaml")?;
        files.retain(|document| document["kind"] != "WasmPlugin");
        // With the documents in this order, only the priorities put the filters in the right order.
        files.extend(documents("istio/client-sidecar-envoyfilter.yaml")?);
        apply(proxy, &files);
        assert_eq!(proxy.filter_names(), chain(&["prequal-strip"], &["prequal", "prequal-shim"]));
        use_built_module(proxy);
        Ok(())
    })
}

/// No agents, mTLS between the proxies, and a server that accepts only connections with Istio's server names (SNI).
#[test]
fn sidecars_steer_to_sidecars_in_the_inbound_role() -> Result<()> {
    bed!();
    let mesh = Mesh::new()?;
    let pods = Pods::behind_sidecars(&mesh)?;
    let mut proxy = pods.sidecar()?;
    // In server-inbound.yaml, the name of the second port begins with `http-`, so Istio does not offer HTTP/2 by ALPN.
    mesh.originate(&mut proxy, &[(SERVING, 8080), (PROBING, 8081)]);
    apply(&mut proxy, &documents("istio/client-sidecar.yaml")?);
    let envoy = proxy.start()?;
    assert_steers(&envoy, &pods);
    for name in [SERVING, PROBING] {
        assert!(envoy.stat(&format!("cluster.{name}.ssl.handshake"))? > 0, "{name}");
        assert_eq!(envoy.stat(&format!("cluster.{name}.ssl.connection_error"))?, 0, "{name}");
    }
    Ok(())
}

#[test]
fn a_gateway_steers() -> Result<()> {
    assert_patched_steers(Proxy::gateway, |proxy| {
        apply(proxy, &documents("istio/client-gateway.yaml")?);
        let plugin = PLUGIN.replace("/demo.", "/istio-system.");
        assert_eq!(proxy.filter_names(), chain(&["prequal-strip", &plugin], &["prequal-shim"]));
        Ok(())
    })
}

#[test]
fn a_gateway_retries_elsewhere_what_a_dead_application_did_not_receive() -> Result<()> {
    bed!();
    let mut pods = Pods::start()?;
    let files = documents("istio/client-gateway.yaml")?;
    let mut proxy = Proxy::gateway(&pods.serving, &pods.probing)?;
    // The route that istiod makes from the VirtualService.
    let http = &find(&files, "VirtualService", "replicas")["spec"]["http"][0];
    let route = proxy.listener().routes().find(|route| route["name"] == http["name"]).expect("its route");
    route["route"]["retry_policy"]["retry_on"] = http["retries"]["retryOn"].clone();
    apply(&mut proxy, &files);
    let envoy = proxy.start()?;
    warm(&envoy);
    pods.stop_app(0);
    eventually("the dead replica is chosen", Duration::from_secs(20), || {
        ask(&envoy, 100, || get(HOST));
        let retried = envoy.stat(&format!("cluster.{SERVING}.upstream_rq_retry_success")).ok()?;
        (retried > 0).then_some(())
    });
    Ok(())
}

#[test]
fn a_sidecar_steers_with_istios_own_session_filter() -> Result<()> {
    assert_patched_steers(Proxy::sidecar, |proxy| {
        proxy.persistent_session("x-prequal-dest");
        apply(proxy, &with_istios_shim()?);
        let session = "envoy.filters.http.stateful_session";
        assert_eq!(proxy.filter_names(), chain(&["prequal-strip", PLUGIN], &[session]));
        Ok(())
    })
}

/// The documents with Istio's own shim, selected as client-persistent-session.yaml describes.
pub fn with_istios_shim() -> Result<Vec<Value>> {
    let mut files = documents("istio/client-sidecar.yaml")?;
    files.retain(|document| document["metadata"]["name"] != "prequal-filters");
    files.extend(documents("istio/client-persistent-session.yaml")?);
    Ok(files)
}

#[test]
fn without_the_module_the_native_chain_keeps_clients_from_choosing() -> Result<()> {
    bed!();
    let pods = Pods::start()?;
    let mut proxy = pods.sidecar()?;
    let mut files = documents("istio/client-sidecar.yaml")?;
    files.retain(|document| document["kind"] != "WasmPlugin");
    apply(&mut proxy, &files);
    // In rotation, so that each replica gets five requests.
    proxy.cluster(SERVING)["lb_policy"] = json!("ROUND_ROBIN");
    let envoy = proxy.start()?;
    for reply in ask(&envoy, 20, || pods.spoof(HOST)) {
        assert_no_prequal_headers(&reply.headers);
    }
    assert_eq!(pods.served(), [5, 5, 5, 5]);
    pods.assert_saw_no_prequal_headers();
    Ok(())
}

/// Several Services share a listener of Istio, so this is a normal case, not a mistake.
#[test]
fn other_services_on_the_same_port_are_not_affected() -> Result<()> {
    bed!();
    let pods = Pods::start()?;
    let mut proxy = pods.sidecar()?;
    apply(&mut proxy, &documents("istio/client-sidecar.yaml")?);
    let others = (0..4).map(|_| Backend::start(Reply::ok())).collect::<Result<Vec<_>>>()?;
    proxy.set_endpoints(OTHER, &others.iter().map(Backend::addr).collect::<Vec<_>>());
    proxy.cluster(OTHER)["lb_policy"] = json!("ROUND_ROBIN");
    let envoy = proxy.start()?;
    warm(&envoy);
    // One request passes before the filter has noticed that this listener serves other clusters too.
    ask(&envoy, 1, || get(OTHER_HOST));
    others.iter().for_each(Backend::clear);
    let before = envoy.prequal(SERVING)?;
    for reply in ask(&envoy, 20, || pods.spoof(OTHER_HOST)) {
        assert_no_prequal_headers(&reply.headers);
    }
    let served: Vec<u64> = others.iter().map(Backend::served).collect();
    assert_eq!(served, [5, 5, 5, 5], "Envoy's own policy, undisturbed");
    others.iter().flat_map(Backend::seen).for_each(|seen| assert_no_prequal_headers(&seen.headers));
    assert_eq!(envoy.prequal(SERVING)?.picks, before.picks);
    assert_eq!(envoy.prequal(OTHER)?.picks.len(), 0, "nothing is counted for a cluster that is not named");
    // And requests to the configured cluster are still steered.
    assert_steers(&envoy, &pods);
    Ok(())
}

/// The parts equal those of the static configuration, which all other tests use.
#[test]
fn the_pieces_are_those_of_the_static_configuration() -> Result<()> {
    let shipped = &documents("static/envoy.yaml")?[0]["static_resources"];
    let manager = &shipped["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    let filter = |name: &str| {
        let filters = manager["http_filters"].as_array().expect("filters");
        filters.iter().find(|filter| filter["name"] == name).expect("such a filter").clone()
    };
    let probing = &shipped["clusters"][1];
    // Istio generates the routes, so they cannot remove the steering header. The router's upstream filters remove it,
    // as with the shim `override_host`.
    let router = EnvoyConfig::for_replicas(&[])?.override_host().router_mut()["typed_config"].clone();
    let value =
        |document: &Value, index: usize| document["spec"]["configPatches"][index]["patch"]["value"].clone();
    for file in
        ["istio/client-sidecar.yaml", "istio/client-gateway.yaml", "istio/client-persistent-session.yaml"]
    {
        let files = documents(file)?;
        let filters = find(&files, "EnvoyFilter", "prequal-filters");
        let last = filters["spec"]["configPatches"].as_array().expect("patches").len() - 1;
        assert_eq!(value(&filters, 0), filter("prequal-strip"), "{file}");
        assert_eq!(value(&filters, last)["typed_config"], router, "{file}");
        if file.contains("persistent") {
            continue;
        }
        assert_eq!(value(&filters, 1), filter("prequal-shim"), "{file}");
        let probes = value(&find(&files, "EnvoyFilter", "prequal-probes"), 0);
        for part in ["typed_extension_protocol_options", "load_balancing_policy"] {
            assert_eq!(probes[part], probing[part], "{part} in {file}");
        }
        let settings = &find(&files, "WasmPlugin", "prequal")["spec"]["pluginConfig"];
        let expected = json!([{"cluster": SERVING, "probe_cluster": PROBING, "verified_probes": true}]);
        assert_eq!(settings["clusters"], expected, "{file}");
    }
    let module = value(&documents("istio/client-sidecar-envoyfilter.yaml")?[0], 0);
    let (mut module, expected) =
        (module["typed_config"]["config"].clone(), filter("prequal")["typed_config"]["config"].clone());
    module["vm_config"]["code"] = expected["vm_config"]["code"].clone();
    module["configuration"] = expected["configuration"].clone();
    assert_eq!(module, expected);
    Ok(())
}

/// Placement is learned from probes, so the port for probes must fail over between localities as the serving port does.
/// Istio sets up this failover only for ports with outlier detection.
#[test]
fn both_ports_of_the_service_fail_over_alike() -> Result<()> {
    for file in ["istio/server-agent.yaml", "istio/server-inbound.yaml"] {
        let policy = find(&documents(file)?, "DestinationRule", "replicas")["spec"]["trafficPolicy"].clone();
        assert!(policy["outlierDetection"].is_object(), "{file}");
        let probes = &policy["portLevelSettings"][0];
        assert_eq!(probes["port"]["number"], 8081, "{file}");
        // Probe failures must not eject a host.
        assert_eq!(
            probes["outlierDetection"],
            json!({"consecutive5xxErrors": 0, "consecutiveGatewayErrors": 0}),
            "{file}"
        );
    }
    Ok(())
}
