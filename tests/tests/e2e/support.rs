//! Helpers shared by several themes: warming up, counters at rest, stand-ins for agents.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use prequal_testbed::{Backend, Body, Envoy, EnvoyConfig, Fleet, Prequal, Reply, Request, Seen, lb_endpoint};
use serde_json::Value;

/// The serving cluster of the shipped configuration.
pub const SERVING: &str = "replicas";
/// The path of a probe.
pub const PROBE_PATH: &str = "/prequal/probe";

pub(crate) use prequal_testbed::{assert_no_prequal_headers, bed};

/// Sets `key` for the only cluster in the filter's settings.
pub fn set(config: EnvoyConfig, key: &str, value: impl Into<Value>) -> EnvoyConfig {
    let value = value.into();
    config.filter_settings(|settings| settings["clusters"][0][key] = value)
}

/// Whether Envoy verifies who answered a probe, as in the shipped configuration, or the filter relies on the replicas'
/// own reports.
pub const VERIFIED_OR_NOT: [bool; 2] = [true, false];

/// Sets `verified_probes`.
pub fn verified(config: EnvoyConfig, verified: bool) -> EnvoyConfig {
    set(config, "verified_probes", verified)
}

/// One element of `lb_endpoints`, with a weight and Envoy's name of a health status.
pub fn endpoint(addr: SocketAddr, weight: u32, health: &str) -> Value {
    let mut endpoint = lb_endpoint(&addr);
    endpoint["load_balancing_weight"] = weight.into();
    endpoint["health_status"] = health.into();
    endpoint
}

/// Three replicas that answer in 5 ms and a last one in 150 ms, behind an Envoy that knows them all.
pub fn three_fast_and_one_slow() -> Result<(Fleet, Envoy)> {
    let ms = Duration::from_millis;
    let fleet = Fleet::start([5, 5, 5, 150].map(|delay| Reply::ok().delay(ms(delay))))?;
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&fleet.addrs())?)?;
    warm(&envoy, 4);
    fleet.clear();
    Ok((fleet, envoy))
}

/// Replicas that all answer `reply`, behind an Envoy that knows them all.
pub fn uniform_fleet(replicas: usize, reply: &Reply) -> Result<(Fleet, Envoy)> {
    let fleet = Fleet::uniform(replicas, reply)?;
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&fleet.addrs())?)?;
    warm(&envoy, replicas as u64);
    Ok((fleet, envoy))
}

/// Sends requests until the filter knows `members` replicas and steers; panics after ten seconds.
#[track_caller]
pub fn warm(envoy: &Envoy, members: u64) -> Prequal {
    warm_cluster(envoy, SERVING, "/", members)
}

/// [`warm`] for any cluster, reached under `path`.
#[track_caller]
pub fn warm_cluster(envoy: &Envoy, cluster: &str, path: &str, members: u64) -> Prequal {
    let client = envoy.client();
    let start = Instant::now();
    loop {
        let path = path.to_owned();
        client.burst(10, 2, move |_| Request::get(&path));
        let now = envoy.prequal(cluster).expect("stats");
        if now.other("prequal_members") >= members && now.steered() > 0 {
            return now;
        }
        let limit = Duration::from_secs(10);
        assert!(start.elapsed() < limit, "the filter does not know {members} members of {cluster}: {now:#?}");
    }
}

/// Waits until every probe is accounted for, and asserts that the sum is exact. Requires that no requests are running
/// and that idle probing is off.
#[track_caller]
pub fn assert_probes_balance(envoy: &Envoy) -> Prequal {
    let mut last = Prequal::default();
    let limit = Instant::now() + Duration::from_secs(5);
    while Instant::now() < limit {
        last = envoy.prequal(SERVING).expect("stats");
        if last.probes_open() == 0 {
            return last;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("sent {} != settled {}: {last:#?}", last.probes("sent"), last.probes_settled());
}

/// Asserts that every request was answered with status 200.
#[track_caller]
pub fn assert_all_ok(answers: &[Result<prequal_testbed::Response>]) {
    for answer in answers {
        match answer {
            Ok(reply) => assert_eq!(reply.status, 200, "{}", reply.text()),
            Err(error) => panic!("{error:#}"),
        }
    }
}

/// A server that acts as replica and agent at once: `probe` answers probes, `request` everything else. Both get the
/// server's own address, to report truthfully or to lie about.
pub fn stand_in(
    probe: impl Fn(SocketAddr) -> Reply + Send + Sync + 'static,
    request: impl Fn(SocketAddr) -> Reply + Send + Sync + 'static,
) -> Result<Backend> {
    let backend = Backend::start(Reply::ok())?;
    let addr = backend.addr();
    backend.set_handler(move |seen| if is_probe(seen) { probe(addr) } else { request(addr) });
    Ok(backend)
}

/// `count` identical stand-ins.
pub fn stand_ins(
    count: usize,
    probe: impl Fn(SocketAddr) -> Reply + Send + Sync + 'static,
    request: impl Fn(SocketAddr) -> Reply + Send + Sync + 'static,
) -> Result<Vec<Backend>> {
    let (probe, request) = (Arc::new(probe), Arc::new(request));
    (0..count)
        .map(|_| {
            let (probe, request) = (Arc::clone(&probe), Arc::clone(&request));
            stand_in(move |addr| probe(addr), move |addr| request(addr))
        })
        .collect()
}

/// Addresses of several backends.
pub fn addrs(backends: &[Backend]) -> Vec<SocketAddr> {
    backends.iter().map(Backend::addr).collect()
}

/// Whether a request is a probe.
pub fn is_probe(seen: &Seen) -> bool {
    seen.path.split('?').next() == Some(PROBE_PATH)
}

/// The text of a report.
pub fn report(rif: u32, latency_us: u32, addr: SocketAddr) -> String {
    format!("{rif};{latency_us};{addr}")
}

/// An answer that carries `load`.
pub fn with_load(load: impl Into<String>) -> Reply {
    Reply::ok().header("x-prequal-load", load)
}

/// A call over HTTP/2.
pub fn grpc_request() -> Request {
    Request::post("/test.Service/Call", &b"\0\0\0\0\0"[..])
        .header("content-type", "application/grpc")
        .header("te", "trailers")
}

/// A response to [`grpc_request`]: a message, and the status in trailers.
pub fn grpc_reply(status: &'static str) -> Reply {
    let trailers =
        HeaderMap::from_iter([(HeaderName::from_static("grpc-status"), HeaderValue::from_static(status))]);
    Reply::ok()
        .header("content-type", "application/grpc")
        .body(Body::Trailers(Bytes::from_static(b"\0\0\0\0\0"), trailers))
}

/// The response to a call that failed at once: headers only.
pub fn grpc_reply_alone(status: &'static str) -> Reply {
    Reply::status(200).header("content-type", "application/grpc").header("grpc-status", status)
}

/// Polls the counters of the serving cluster until `done`; panics with them after five seconds.
#[track_caller]
pub fn counted(envoy: &Envoy, what: &str, done: impl Fn(&Prequal) -> bool) -> Prequal {
    let start = Instant::now();
    loop {
        let now = envoy.prequal(SERVING).expect("stats");
        if done(&now) {
            return now;
        }
        assert!(start.elapsed() < Duration::from_secs(5), "not counted: {what}: {now:#?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
