//! Runs the Envoy of a headless Service with a name server that answers as the cluster's does. The filter finds pods,
//! steers to them, and drops those that leave. Configurations from Kustomize and from the chart pass the same test.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result};
use prequal_testbed::{
    AgentOptions, Client, Envoy, EnvoyConfig, Replica, Reply, Request, eventually, http_get, wasm_module,
};
use serde_json::{Value, json};

/// Runs the configuration `root` in front of pods that `name` resolves to, whose agents get the extra arguments
/// `agent`.
pub fn assert_followed(mut root: Value, name: &str, agent: &[String]) -> Result<()> {
    let (port, pods) = pods(4, agent)?;
    let ips: Vec<Ipv4Addr> = (1..=4).map(|pod| Ipv4Addr::new(127, 0, 10, pod)).collect();
    let names = Names::start(name, ips.clone())?;
    let admin = free_port()?;
    let socket = |port: u16| json!({"socket_address": {"address": "127.0.0.1", "port_value": port}});
    root["admin"]["address"] = socket(admin);
    let parts = &mut root["static_resources"];
    parts["listeners"][0]["address"] = socket(0);
    parts["listeners"][1]["address"] = socket(0);
    parts["clusters"][2]["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"] =
        socket(admin);
    for cluster in 0..2 {
        let cluster = &mut parts["clusters"][cluster];
        let endpoint = &mut cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"];
        endpoint["address"]["socket_address"]["port_value"] = json!(port);
        let resolver = "envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig";
        cluster["typed_dns_resolver_config"] = json!({"name": "envoy.network.dns_resolver.cares", "typed_config": {
            "@type": format!("type.googleapis.com/{resolver}"), "resolvers": [socket(names.addr.port())],
        }});
    }
    let envoy = Envoy::start(EnvoyConfig::from_root(root).module(&wasm_module()))?;
    let client = envoy.client();
    let ask = |count| {
        for reply in client.burst(count, 2, |_| Request::get("/")) {
            assert_eq!(reply.expect("an answer").status, 200);
        }
    };
    eventually("every pod is a member", Duration::from_secs(15), || {
        ask(10);
        let now = envoy.prequal("replicas").ok()?;
        (now.other("prequal_members") == 4 && now.steered() > 0).then_some(())
    });
    let before = envoy.prequal("replicas")?;
    ask(20);
    let after = envoy.prequal("replicas")?;
    assert_eq!(after.steered() - before.steered(), 20, "{after:#?}");
    assert_eq!(after.other("prequal_diverted_total"), before.other("prequal_diverted_total"), "{after:#?}");
    assert_eq!(after.probes_rejected(), 0, "{after:#?}");
    // The cluster and Prometheus may see only these two paths of the admin interface.
    let status = envoy.listener("status").context("the listener of probes")?;
    let page = Client::new(status);
    assert_eq!(page.get("/ready")?.text(), "LIVE\n");
    assert!(http_get(status, "/stats/prometheus")?.contains("prequal_picks_total{"));
    for hidden in ["/", "/config_dump", "/quitquitquit", "/stats"] {
        assert_eq!(page.get(hidden)?.status, 404, "{hidden}");
    }
    // A pod leaves: its name no longer resolves to it.
    names.set(ips[1..].to_vec());
    eventually("the pod that left gets nothing", Duration::from_secs(10), || {
        pods[0].backend.clear();
        ask(40);
        (pods[0].backend.served() == 0).then_some(())
    });
    Ok(())
}

/// A name server that knows one name, with the given addresses.
struct Names {
    addr: SocketAddr,
    pods: Arc<Mutex<Vec<Ipv4Addr>>>,
}

impl Names {
    fn start(name: &str, pods: Vec<Ipv4Addr>) -> Result<Self> {
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        let names = Self { addr: socket.local_addr()?, pods: Arc::new(Mutex::new(pods)) };
        let pods = Arc::clone(&names.pods);
        // In wire format, each label follows its length.
        let name: Vec<u8> = name
            .split('.')
            .flat_map(|label| [&[u8::try_from(label.len()).expect("a label")], label.as_bytes()].concat())
            .chain([0])
            .collect();
        // The thread ends with the test program.
        std::thread::spawn(move || {
            let mut query = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut query) {
                let pods = pods.lock().expect("no panic").clone();
                if let Some(reply) = answer(&query[..length], &name, &pods) {
                    let _ = socket.send_to(&reply, from);
                }
            }
        });
        Ok(names)
    }

    fn set(&self, pods: Vec<Ipv4Addr>) {
        *self.pods.lock().expect("no panic") = pods;
    }
}

/// RFC 1035: repeats the question and adds an A record for each pod. Questions for other names and types get no
/// answers.
fn answer(query: &[u8], name: &[u8], pods: &[Ipv4Addr]) -> Option<Vec<u8>> {
    let end = 12 + query.get(12..)?.iter().position(|byte| *byte == 0)? + 5;
    let question = query.get(12..end)?;
    let pods = if question == [name, &[0, 1, 0, 1]].concat() { pods } else { &[] };
    let count = u8::try_from(pods.len()).ok()?;
    let header = [query[0], query[1], 0x81, 0x80, 0, 1, 0, count, 0, 0, 0, 0];
    // Name (of the question), type A, class IN, TTL 30 s as in cluster DNS, length 4.
    let record = |pod: &Ipv4Addr| [&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 30, 0, 4], &pod.octets()[..]].concat();
    Some([&header, question].concat().into_iter().chain(pods.iter().flat_map(record)).collect())
}

/// Starts pods that share one port, each at its own address.
fn pods(count: u8, agent: &[String]) -> Result<(u16, Vec<Replica>)> {
    let start = |port: u16| {
        (1..=count)
            .map(|pod| {
                let addr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 0, 10, pod)), port).to_string();
                let options = AgentOptions {
                    listen: addr.clone(),
                    advertise: Some(addr),
                    args: agent.to_vec(),
                    ..AgentOptions::default()
                };
                Replica::start_with(Reply::ok(), &options)
            })
            .collect::<Result<Vec<_>>>()
    };
    // A port that is free at one address may be in use at another.
    let mut tries = (0..5).map(|_| free_port().and_then(|port| Ok((port, start(port)?))));
    tries.find(Result::is_ok).context("no port is free at every address")?
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
