//! The configuration of a sidecar or gateway as Istio generates it, limited to the parts that Prequal's files touch:
//! names, filters, retries, clusters before a patch. Only addresses differ: the system chooses the ports.

use std::net::SocketAddr;

use anyhow::Result;
use prequal_testbed::{Envoy, EnvoyConfig, lb_endpoint, wasm_module};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The Service that Prequal balances.
pub const HOST: &str = "replicas.demo.svc.cluster.local";
/// Its serving cluster.
pub const SERVING: &str = "outbound|8080||replicas.demo.svc.cluster.local";
/// The cluster of its second port.
pub const PROBING: &str = "outbound|8081||replicas.demo.svc.cluster.local";
/// A Service that the filter's settings do not name.
pub const OTHER_HOST: &str = "other.demo.svc.cluster.local";
/// Its cluster.
pub const OTHER: &str = "outbound|8080||other.demo.svc.cluster.local";

/// One HTTP listener.
pub struct Listener {
    /// The port number that Istio's matches refer to.
    pub port: u32,
    value: Value,
}

impl Listener {
    /// The HTTP filters, in order.
    pub fn http_filters(&mut self) -> &mut Vec<Value> {
        self.manager()["http_filters"].as_array_mut().expect("filters")
    }

    /// The HTTP connection manager.
    pub fn manager(&mut self) -> &mut Value {
        &mut self.value["filter_chains"][0]["filters"][0]["typed_config"]
    }

    /// Every route of every host.
    pub fn routes(&mut self) -> impl Iterator<Item = &mut Value> {
        let hosts = self.manager()["route_config"]["virtual_hosts"].as_array_mut().expect("hosts");
        hosts.iter_mut().flat_map(|host| host["routes"].as_array_mut().expect("routes"))
    }

    /// Lets a client state the original destination of its connection in a PROXY header. In a mesh, iptables provides
    /// it.
    pub fn restore_destination(&mut self) {
        let kind = "envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol";
        self.value["listener_filters"] = json!([{
            "name": "envoy.filters.listener.proxy_protocol",
            "typed_config": {"@type": format!("type.googleapis.com/{kind}")},
        }]);
    }
}

/// A proxy before it starts.
pub struct Proxy {
    /// The context in which EnvoyFilters match it.
    pub context: &'static str,
    /// The namespace of its pod.
    pub namespace: &'static str,
    /// The labels of its pod.
    pub labels: Value,
    /// Its HTTP listeners.
    pub listeners: Vec<Listener>,
    /// Its clusters.
    pub clusters: Vec<Value>,
    /// The path at which its WasmPlugins find the module.
    pub module: String,
    /// Files of extension discovery.
    extensions: TempDir,
}

/// A proxy that runs.
pub struct Running {
    pub envoy: Envoy,
    _extensions: TempDir,
}

impl std::ops::Deref for Running {
    type Target = Envoy;

    fn deref(&self) -> &Envoy {
        &self.envoy
    }
}

/// The certificate that all proxies of the mesh share here.
pub struct Mesh {
    certificate: String,
    key: String,
}

impl Mesh {
    pub fn new() -> Result<Self> {
        let made = rcgen::generate_simple_self_signed(vec!["mesh".into()])?;
        Ok(Self { certificate: made.cert.pem(), key: made.signing_key.serialize_pem() })
    }

    /// The settings that both sides of a connection share.
    fn context(&self, alpn: &[&str]) -> Value {
        json!({
            "alpn_protocols": alpn,
            "tls_certificates": [{
                "certificate_chain": {"inline_string": self.certificate},
                "private_key": {"inline_string": self.key},
            }],
            "validation_context": {"trusted_ca": {"inline_string": self.certificate}},
        })
    }

    /// Makes `clusters`, given with the Service's ports, connect as Istio's do to endpoints that have a sidecar.
    pub fn originate(&self, proxy: &mut Proxy, clusters: &[(&str, u32)]) {
        for (name, port) in clusters {
            let cluster = proxy.cluster(name);
            let tls = json!({
                "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": self.context(&["istio"]),
                "sni": format!("outbound_.{port}_._.{HOST}"),
            });
            let raw = json!({
                "@type": "type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer",
            });
            cluster["transport_socket_matches"] = json!([
                {"name": "tlsMode-istio", "match": {"tlsMode": "istio"}, "transport_socket": {
                    "name": "envoy.transport_sockets.tls", "typed_config": tls,
                }},
                {"name": "tlsMode-disabled", "match": {}, "transport_socket": {
                    "name": "envoy.transport_sockets.raw_buffer", "typed_config": raw,
                }},
            ]);
            let endpoints = &mut cluster["load_assignment"]["endpoints"][0]["lb_endpoints"];
            for endpoint in endpoints.as_array_mut().expect("endpoints") {
                let matches = json!({"envoy.transport_socket_match": {"tlsMode": "istio"}});
                endpoint["metadata"] = json!({ "filter_metadata": matches });
            }
        }
    }

    /// Makes `proxy` accept only connections from the mesh's clients with Istio's server names (SNI), as with `STRICT`.
    pub fn terminate(&self, proxy: &mut Proxy) {
        let listener = &mut proxy.listener().value;
        let inspector = "envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector";
        listener["listener_filters"] = json!([{
            "name": "envoy.filters.listener.tls_inspector",
            "typed_config": {"@type": format!("type.googleapis.com/{inspector}")},
        }]);
        let chain = &mut listener["filter_chains"][0];
        let names = [8080, 8081].map(|port| format!("outbound_.{port}_._.{HOST}"));
        chain["filter_chain_match"] = json!({"server_names": names, "application_protocols": ["istio"]});
        chain["transport_socket"] = json!({"name": "envoy.transport_sockets.tls", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "require_client_certificate": true,
            "common_tls_context": self.context(&["h2", "http/1.1"]),
        }});
    }
}

impl Proxy {
    /// The sidecar of a client, `app: client` in `demo`: the Service's two ports, and another Service on port 8080.
    pub fn sidecar(serving: &[SocketAddr], probing: &[SocketAddr]) -> Result<Self> {
        let listeners = [8080, 8081].map(|port| listener(port, route_config(port)));
        Self::new("SIDECAR_OUTBOUND", "demo", json!({"app": "client"}), listeners.into(), serving, probing)
    }

    /// The default gateway, whose pod listens on a different port from the one in its Gateway.
    pub fn gateway(serving: &[SocketAddr], probing: &[SocketAddr]) -> Result<Self> {
        let mut routes = route_config(8080);
        routes["name"] = json!("http.8080");
        routes["virtual_hosts"][0]["routes"][0]["name"] = json!("replicas");
        let listeners = vec![listener(8080, routes)];
        Self::new("GATEWAY", "istio-system", json!({"istio": "ingressgateway"}), listeners, serving, probing)
    }

    /// The sidecar of a replica, `app: replicas` in `demo`, in front of `app`.
    pub fn server(app: SocketAddr) -> Result<Self> {
        let mut routes = route_config(8080);
        let host = &mut routes["virtual_hosts"][0];
        host["domains"] = json!(["*"]);
        host["routes"][0]["route"] = json!({"cluster": "inbound|8080||", "timeout": "0s"});
        routes["virtual_hosts"].as_array_mut().expect("hosts").truncate(1);
        let clusters = vec![cluster("inbound|8080||", &[app], &json!({}))];
        let module = wasm_module().to_string_lossy().into_owned();
        Ok(Self {
            context: "SIDECAR_INBOUND",
            namespace: "demo",
            labels: json!({"app": "replicas"}),
            listeners: vec![listener(8080, routes)],
            clusters,
            module,
            extensions: TempDir::new()?,
        })
    }

    fn new(
        context: &'static str,
        namespace: &'static str,
        labels: Value,
        listeners: Vec<Listener>,
        serving: &[SocketAddr],
        probing: &[SocketAddr],
    ) -> Result<Self> {
        let clusters = vec![
            cluster(SERVING, serving, &json!({})),
            cluster(PROBING, probing, &json!({"explicit_http_config": {"http2_protocol_options": {}}})),
            cluster(OTHER, serving, &json!({})),
        ];
        let module = wasm_module().to_string_lossy().into_owned();
        Ok(Self { context, namespace, labels, listeners, clusters, module, extensions: TempDir::new()? })
    }

    /// The listener of the serving port.
    pub fn listener(&mut self) -> &mut Listener {
        &mut self.listeners[0]
    }

    /// The names of the HTTP filters of the serving port.
    pub fn filter_names(&mut self) -> Vec<String> {
        let filters = self.listener().http_filters();
        filters.iter().map(|filter| filter["name"].as_str().expect("a name").to_owned()).collect()
    }

    /// The cluster `name`.
    pub fn cluster(&mut self, name: &str) -> &mut Value {
        self.clusters.iter_mut().find(|cluster| cluster["name"] == name).expect("such a cluster")
    }

    /// Sets the endpoints of `cluster`.
    pub fn set_endpoints(&mut self, cluster: &str, addrs: &[SocketAddr]) {
        self.cluster(cluster)["load_assignment"]["endpoints"] = json!([{"lb_endpoints": endpoints(addrs)}]);
    }

    /// Has the effect of the Service's label `istio.io/persistent-session-header` in an istiod with that feature
    /// enabled.
    pub fn persistent_session(&mut self, header: &str) {
        const NAME: &str = "envoy.filters.http.stateful_session";
        let kind = |name: &str| {
            format!("type.googleapis.com/envoy.extensions.filters.http.stateful_session.v3.{name}")
        };
        let manager = self.listener().manager();
        let filters = manager["http_filters"].as_array_mut().expect("filters");
        let empty = json!({"name": NAME, "typed_config": {"@type": kind("StatefulSession")}});
        filters.insert(filters.len() - 1, empty);
        manager["route_config"]["virtual_hosts"][0]["typed_per_filter_config"] = json!({NAME: {
            "@type": kind("StatefulSessionPerRoute"),
            "stateful_session": {"session_state": {
                "name": "envoy.http.stateful_session.header",
                "typed_config": {
                    "@type":
                        "type.googleapis.com/envoy.extensions.http.stateful_session.header.v3.HeaderBasedSessionState",
                    "name": header,
                },
            }},
        }});
    }

    /// Stores `config` under `name` for extension discovery; returns the config source that finds it.
    pub fn discover_extension(&self, name: &str, mut config: Value) -> Value {
        let path = self.extensions.path().join(format!("{}.json", name.replace('/', "_")));
        let resource = json!({
            "@type": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
            "name": name,
            "typed_config": config.take(),
        });
        let resources = json!({"version_info": "0", "resources": [resource]});
        std::fs::write(&path, resources.to_string()).expect("a file in a folder of our own");
        json!({"resource_api_version": "V3", "path_config_source": {"path": path}})
    }

    /// Starts the proxy with endpoint discovery, as Istio's proxies have it.
    pub fn start(self) -> Result<Running> {
        let eds: Vec<String> =
            self.clusters.iter().filter(|it| it["type"] == "STATIC").map(name_of).collect();
        let config =
            EnvoyConfig::from_root(self.root()).eds(&eds.iter().map(String::as_str).collect::<Vec<_>>());
        Ok(Running { envoy: Envoy::start(config)?, _extensions: self.extensions })
    }

    /// The whole configuration.
    fn root(&self) -> Value {
        json!({
            "node": {"id": "sidecar~127.0.0.1~client.demo~demo.svc.cluster.local", "cluster": "client.demo"},
            "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
            "static_resources": {
                "listeners": self.listeners.iter().map(|listener| &listener.value).collect::<Vec<_>>(),
                "clusters": self.clusters,
            },
        })
    }
}

fn name_of(cluster: &Value) -> String {
    cluster["name"].as_str().expect("a name").to_owned()
}

/// `0.0.0.0_<port>` with the filters that Istio and a stock Envoy have in common, in Istio's order.
fn listener(port: u32, routes: Value) -> Listener {
    let filter = |name: &str, package: &str| {
        let kind = format!("type.googleapis.com/envoy.extensions.filters.http.{package}");
        json!({"name": name, "typed_config": {"@type": kind}})
    };
    let value = json!({
        "name": format!("0.0.0.0_{port}"),
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "filter_chains": [{"filters": [{
            "name": "envoy.filters.network.http_connection_manager",
            "typed_config": {
                "@type":
                    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
                "stat_prefix": format!("outbound_0.0.0.0_{port}"),
                "normalize_path": true,
                "upgrade_configs": [{"upgrade_type": "websocket"}],
                "route_config": routes,
                "http_filters": [
                    filter("envoy.filters.http.grpc_stats", "grpc_stats.v3.FilterConfig"),
                    filter("envoy.filters.http.fault", "fault.v3.HTTPFault"),
                    filter("envoy.filters.http.cors", "cors.v3.Cors"),
                    filter("envoy.filters.http.router", "router.v3.Router"),
                ],
            },
        }]}],
    });
    Listener { port, value }
}

fn route_config(port: u32) -> Value {
    // Istio's default policy.
    let retries = json!({
        "retry_on": "connect-failure,refused-stream,unavailable,cancelled",
        "num_retries": 2,
        "retry_host_predicate": [{
            "name": "envoy.retry_host_predicates.previous_hosts",
            "typed_config": {
                "@type":
                    "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate",
            },
        }],
        "host_selection_retry_max_attempts": "5",
    });
    let host = |name: &str| {
        json!({
            "name": format!("{name}:{port}"),
            "domains": [name, format!("{name}:{port}")],
            "routes": [{"name": "default", "match": {"prefix": "/"}, "route": {
                "cluster": format!("outbound|{port}||{name}"), "timeout": "0s", "retry_policy": retries,
            }}],
        })
    };
    let hosts = if port == 8080 { vec![host(HOST), host(OTHER_HOST)] } else { vec![host(HOST)] };
    json!({"name": port.to_string(), "virtual_hosts": hosts, "validate_clusters": false})
}

fn endpoints(addrs: &[SocketAddr]) -> Vec<Value> {
    addrs.iter().map(lb_endpoint).collect()
}

/// A cluster that uses `protocol` and has no DestinationRule.
fn cluster(name: &str, addrs: &[SocketAddr], protocol: &Value) -> Value {
    let mut cluster = json!({
        "name": name,
        "type": "STATIC",
        "connect_timeout": "10s",
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": {"thresholds": [{
            "max_connections": u32::MAX, "max_pending_requests": u32::MAX,
            "max_requests": u32::MAX, "max_retries": u32::MAX, "track_remaining": true,
        }]},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints(addrs)}]},
    });
    if protocol.as_object().is_some_and(|protocol| !protocol.is_empty()) {
        const OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
        let mut options = protocol.clone();
        options["@type"] = json!(format!("type.googleapis.com/{OPTIONS}"));
        cluster["typed_extension_protocol_options"] = json!({ OPTIONS: options });
    }
    cluster
}
