//! The inbound role: an Envoy beside each replica reports for it, without an agent.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use prequal_testbed::{
    Backend, Body, Client, Envoy, EnvoyConfig, Reply, Request, Response, Seen, WebSocket, eventually,
    workspace_root,
};
use serde_json::{Value, json};

use crate::support::{PROBE_PATH, SERVING, assert_all_ok, assert_none_of_ours, bed, is_probe, warm};

const MS: fn(u64) -> Duration = Duration::from_millis;
/// Time within which a dead VM's requests must leave the RIF, including some time to poll on a busy machine.
const HEALED: Duration = Duration::from_millis(3500);

/// The shipped inbound configuration with two workers.
fn beside(replica: &Backend) -> Result<EnvoyConfig> {
    Ok(EnvoyConfig::inbound(replica.addr())?.concurrency(2))
}

fn with(config: EnvoyConfig, settings: &Value) -> EnvoyConfig {
    config.filter_text(&settings.to_string())
}

/// A report of the inbound role.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Report {
    rif: u64,
    latency_us: Option<u64>,
    endpoint: String,
    /// The fields after the endpoint.
    rest: String,
}

fn report(headers: &HeaderMap) -> Result<Report> {
    let all: Vec<_> = headers.get_all("x-prequal-load").iter().collect();
    anyhow::ensure!(all.len() == 1, "{} reports in {headers:?}", all.len());
    let mut fields = all[0].to_str()?.splitn(4, ';');
    let mut next = || fields.next().unwrap_or_default();
    let (rif, latency) = (next().parse()?, next());
    let latency_us = if latency.is_empty() { None } else { Some(latency.parse()?) };
    Ok(Report { rif, latency_us, endpoint: next().into(), rest: next().into() })
}

/// Probes over a new connection, so that any worker may answer.
fn probe(addr: SocketAddr) -> Result<Report> {
    let reply = Client::new(addr).get(PROBE_PATH)?;
    anyhow::ensure!(reply.status == 200, "{}: {}", reply.status, reply.text());
    report(&reply.headers)
}

/// Probes over several connections, so that both workers answer.
fn probes(addr: SocketAddr) -> Vec<u64> {
    (0..12).map(|_| probe(addr).expect("a report").rif).collect()
}

/// Sends `count` requests at once, each over a new connection.
fn hold(
    addr: SocketAddr,
    count: usize,
    http2: bool,
    path: &'static str,
) -> Vec<JoinHandle<Result<Response>>> {
    let client = move || if http2 { Client::http2(addr) } else { Client::new(addr) };
    (0..count).map(|_| std::thread::spawn(move || client().get(path))).collect()
}

fn wait_for_rif(addr: SocketAddr, rif: u64, limit: Duration) {
    let start = Instant::now();
    loop {
        let reported = probes(addr);
        if reported.iter().all(|reported| *reported == rif) {
            return;
        }
        assert!(start.elapsed() < limit, "not {rif} in flight within {limit:?}, but {reported:?}");
    }
}

/// Requests in flight in each slot that has any.
fn slots(envoy: &Envoy) -> Result<Vec<u64>> {
    let found = envoy.inbound(envoy.addr())?;
    Ok(found.iter().filter(|(name, n)| name.starts_with("in_flight.") && **n > 0).map(|(_, n)| *n).collect())
}

fn counted(envoy: &Envoy, result: &str, count: u64) {
    let name = format!("requests.{result}");
    eventually(&format!("{count} of {name}"), Duration::from_secs(5), || {
        (envoy.inbound(envoy.addr()).ok()?.get(&name).copied().unwrap_or(0) == count).then_some(())
    });
}

/// A port that was free a moment ago, for an address that must be known before Envoy starts.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn on_port(config: EnvoyConfig, port: u16) -> EnvoyConfig {
    config.edit(|config| config.listener_mut()["address"]["socket_address"]["port_value"] = json!(port))
}

/// Asserts that a client's Envoy avoids the last of `backends`, which is slow.
fn assert_steers(backends: &[Backend], client: &Envoy) -> Result<()> {
    warm(client, backends.len() as u64);
    // On a busy machine, six callers are more than the filter may send to a fleet that it is still learning, and one of the
    // fast replicas may look slow.
    let after = eventually("three are used, the slow one is left alone", Duration::from_secs(20), || {
        backends.iter().for_each(Backend::clear);
        let before = client.prequal(SERVING).ok()?;
        let answers = client.client().burst(600, 6, |_| Request::get("/"));
        assert_all_ok(&answers);
        for answer in answers.into_iter().flatten() {
            assert_none_of_ours(&answer.headers);
        }
        let after = client.prequal(SERVING).ok()?;
        let served: Vec<u64> = backends.iter().map(Backend::served).collect();
        let used = served[..3].iter().filter(|served| **served >= 30).count();
        let steered = after.steered() - before.steered() >= 580;
        let heard = after.reports("used") - before.reports("used") >= 550;
        (steered && heard && served[3] <= 60 && used >= 2).then_some(after)
    });
    assert_eq!(after.reports("wrong_endpoint"), 0, "{after:#?}");
    assert!(after.probes("used") >= 10 && after.probes("timeout") * 5 < after.probes("used"), "{after:#?}");
    assert!(backends.iter().flat_map(Backend::seen).all(|seen| !is_probe(&seen)), "a probe got through");
    Ok(())
}

fn three_fast_and_one_slow() -> Result<Vec<Backend>> {
    [5, 5, 5, 150].map(|delay| Backend::start(Reply::ok().delay(MS(delay)))).into_iter().collect()
}

#[test]
fn steering_needs_no_agent() -> Result<()> {
    bed!();
    let backends = three_fast_and_one_slow()?;
    let servers =
        backends.iter().map(|backend| Envoy::start(beside(backend)?)).collect::<Result<Vec<_>>>()?;
    let addrs: Vec<SocketAddr> = servers.iter().map(Envoy::addr).collect();
    let client = Envoy::start(EnvoyConfig::for_replicas(&addrs)?.concurrency(2))?;
    assert_steers(&backends, &client)?;
    for server in &servers {
        assert!(server.inbound(server.addr())?["probes"] > 0);
        assert_eq!(probe(server.addr())?.endpoint, server.addr().to_string());
    }
    Ok(())
}

#[test]
fn probes_may_have_a_separate_port() -> Result<()> {
    bed!();
    let backends = three_fast_and_one_slow()?;
    let server = |backend: &Backend| -> Result<Envoy> {
        let port = free_port()?;
        let config = with(beside(backend)?, &json!({"role": "inbound", "serving_port": port}));
        Envoy::start(on_port(config.add_listener("probes"), port))
    };
    let servers = backends.iter().map(server).collect::<Result<Vec<_>>>()?;
    let serving: Vec<SocketAddr> = servers.iter().map(Envoy::addr).collect();
    let ports = servers.iter().map(|server| server.listener("probes").context("no such listener"));
    let probing = ports.collect::<Result<Vec<_>>>()?;
    let client = EnvoyConfig::shipped()?.endpoints(SERVING, &serving).endpoints("replicas-agent", &probing);
    let client = Envoy::start(client.concurrency(2))?;
    assert_steers(&backends, &client)?;
    for (serving, probing) in serving.iter().zip(&probing) {
        let reported = probe(*probing)?;
        assert_eq!(reported.endpoint, serving.to_string());
        assert!(reported.rest.starts_with(&format!("probe={probing}")), "{reported:?}");
    }
    // A request on that port that is not a probe passes through and is not counted.
    let before = servers[0].inbound(serving[0])?["requests.success"];
    assert_eq!(Client::new(probing[0]).get("/")?.status, 200);
    assert_eq!(servers[0].inbound(serving[0])?["requests.success"], before);
    assert!(servers[0].inbound(probing[0])?.is_empty());
    Ok(())
}

/// Answers by path: `/slow` after 2.5 s, `/late` after the route's timeout, `/reset` never.
fn by_path(seen: &Seen) -> Reply {
    match seen.path.as_str() {
        "/slow" => Reply::ok().delay(MS(2500)),
        "/reset" => Reply::ok().delay(MS(20)).body(Body::Reset),
        "/late" | "/given-up" => Reply::ok().delay(MS(1500)),
        "/broken" => Reply::ok().body(Body::Broken(Bytes::from_static(b"half"))),
        "/error" => Reply::status(500),
        _ => Reply::ok(),
    }
}

#[test]
fn rif_is_exact_over_workers_however_requests_end() -> Result<()> {
    bed!();
    let backend = Backend::start_on("127.0.0.1:0", by_path)?;
    let envoy = Envoy::start(beside(&backend)?.edit(|config| {
        let mut late = config.routes_mut()[0].clone();
        late["match"] = json!({"path": "/late"});
        late["route"]["timeout"] = json!("0.3s");
        config.routes_mut().insert(0, late);
    }))?;
    for http2 in [false, true] {
        let before = envoy.inbound(envoy.addr())?;
        let held = hold(envoy.addr(), 40, http2, "/slow");
        wait_for_rif(envoy.addr(), 40, MS(2000));
        let by_slot = slots(&envoy)?;
        assert!(by_slot.len() == 2 && by_slot.iter().sum::<u64>() == 40, "one worker's share: {by_slot:?}");
        let addr = envoy.addr();
        let mixed: Vec<_> = (0..5)
            .map(|_| {
                std::thread::spawn(move || {
                    let client = if http2 { Client::http2(addr) } else { Client::new(addr) };
                    for path in ["/", "/error", "/reset", "/broken", "/late"] {
                        let _ = client.get(path);
                    }
                    assert!(client.abandon(Request::get("/given-up"), MS(50)));
                })
            })
            .collect();
        while mixed.iter().any(|thread| !thread.is_finished()) {
            let reported = probe(addr)?.rif;
            assert!((40..=45).contains(&reported), "{reported} with 40 to 45 in flight");
        }
        mixed.into_iter().for_each(|thread| thread.join().expect("it ran"));
        wait_for_rif(addr, 40, MS(1000));
        for answer in held {
            assert_eq!(answer.join().expect("it ran")?.status, 200);
        }
        wait_for_rif(addr, 0, MS(1000));
        assert_eq!(slots(&envoy)?, [0; 0]);
        // Errors, resets, broken responses and timeouts are failures; requests that the client aborted do not count.
        let since = |result: &str| before.get(&format!("requests.{result}")).copied().unwrap_or(0);
        for (result, count) in [("success", 45), ("failure", 20), ("aborted", 5)] {
            counted(&envoy, result, since(result) + count);
        }
    }
    Ok(())
}

#[test]
fn requests_of_a_crashed_vm_are_removed_and_serving_continues() -> Result<()> {
    let module = workspace_root().join("target/dist-test/prequal_filter_crash.wasm");
    bed!(std::slice::from_ref(&module));
    let backend = Backend::start_on("127.0.0.1:0", |seen| match seen.path.as_str() {
        "/slow" => Reply::ok().delay(MS(5000)),
        _ => Reply::ok(),
    })?;
    let envoy = Envoy::start(beside(&backend)?.module(&module))?;
    let addr = envoy.addr();
    let held = hold(addr, 30, false, "/slow");
    wait_for_rif(addr, 30, MS(2000));
    let before = slots(&envoy)?;
    assert!(before.len() == 2 && before.iter().sum::<u64>() == 30, "{before:?}");
    let crash = Client::new(addr).send(Request::get("/").header("x-crash-prequal", "1"))?;
    let crashed = Instant::now();
    assert_eq!(crash.status, 503);
    let left = eventually("the dead VM's requests are gone", HEALED, || {
        slots(&envoy).ok().filter(|now| now.len() == 1).map(|now| now[0])
    });
    assert!(before.contains(&left), "{before:?}, then {left}");
    wait_for_rif(addr, left, HEALED.saturating_sub(crashed.elapsed()));
    // The worker has a new VM, which counts requests.
    assert_all_ok(&(0..50).map(|_| Client::new(addr).get("/")).collect::<Vec<_>>());
    let more = hold(addr, 20, false, "/slow");
    wait_for_rif(addr, left + 20, MS(2000));
    assert_eq!(slots(&envoy)?.len(), 2);
    let answers: Vec<_> = held.into_iter().map(|thread| thread.join().expect("it ran")).collect();
    let served = answers.iter().flatten().filter(|answer| answer.status == 200).count();
    assert_eq!(served as u64, left, "the other worker's requests");
    for answer in more {
        assert_eq!(answer.join().expect("it ran")?.status, 200);
    }
    wait_for_rif(addr, 0, MS(1000));
    assert!(envoy.stat("wasm.prequal.vm_reload_success")? >= 1);
    Ok(())
}

#[test]
fn an_update_of_the_listener_keeps_counting() -> Result<()> {
    bed!();
    // Shorter than the drain of the old generation.
    let backend = Backend::start_on("127.0.0.1:0", |seen| match seen.path.as_str() {
        "/slow" => Reply::ok().delay(MS(1500)),
        _ => Reply::ok(),
    })?;
    let config = on_port(beside(&backend)?, free_port()?).dynamic_listener();
    let mut envoy = Envoy::start(config.clone())?;
    let addr = envoy.addr();
    let held = hold(addr, 20, false, "/slow");
    wait_for_rif(addr, 20, MS(2000));
    let next = with(config.clone(), &json!({"role": "inbound", "report": "probe_only"}));
    assert!(envoy.update_listener(next)?, "{}", envoy.log());
    wait_for_rif(addr, 20, MS(500));
    let more = hold(addr, 10, false, "/slow");
    wait_for_rif(addr, 30, MS(1000));
    for (text, word) in [
        (
            json!({"role": "inbound", "serving_port": 70_000}),
            "`serving_port` must be a whole number from 1 to 65535",
        ),
        (json!({"role": "inbound", "endpoint": "here"}), "`endpoint` must be an `ip:port`"),
        (json!({"role": "inbound", "clusters": []}), "`clusters` has no effect with \"role\": \"inbound\""),
        (json!({"role": "sideways"}), "`role` must be one of \"outbound\", \"inbound\""),
        (json!({"serving_port": 80}), "`serving_port` needs \"role\": \"inbound\""),
    ] {
        assert!(!envoy.update_listener(with(config.clone(), &text))?, "{text}");
        assert!(envoy.log().contains(word), "{text}: no {word} in {}", envoy.log());
    }
    for answer in held.into_iter().chain(more) {
        assert_eq!(answer.join().expect("it ran")?.status, 200);
    }
    wait_for_rif(addr, 0, MS(1000));
    assert_eq!(envoy.stat("wasmcustom.prequal_inbound_slots_total.result=claimed")?, 2, "a slot per worker");
    assert_none_of_ours(&Client::new(addr).get("/")?.headers);
    Ok(())
}

#[test]
fn every_worker_reports_failures_age_and_latency() -> Result<()> {
    bed!();
    let backend = Backend::start(Reply::ok().delay(MS(30)))?;
    let envoy = Envoy::start(beside(&backend)?)?;
    // All over one connection, so on one worker; a probe may reach the other.
    let client = envoy.client();
    for _ in 0..8 {
        client.get("/")?;
    }
    for _ in 0..12 {
        let reported = probe(envoy.addr())?;
        assert!(reported.latency_us.is_some_and(|us| (30_000..60_000).contains(&us)), "{reported:?}");
        assert!(reported.rest.starts_with("up="), "{reported:?}");
    }
    let grpc = |status: &'static str| {
        let trailers = HeaderMap::from_iter([(
            http::HeaderName::from_static("grpc-status"),
            HeaderValue::from_static(status),
        )]);
        Reply::ok()
            .header("content-type", "application/grpc")
            .body(Body::Trailers(Bytes::from_static(b"\0\0\0\0\0"), trailers))
    };
    let only = Reply::ok()
        .header("content-type", "application/grpc")
        .header("grpc-status", "14")
        .body(Body::Full(Bytes::new()));
    // In a response that is not gRPC, this header means nothing.
    let plain = Reply::ok().header("grpc-status", "14");
    let mut failures = 0;
    for (reply, fails) in
        [(Reply::status(503), 5), (grpc("13"), 5), (only, 5), (grpc("0"), 0), (grpc("5"), 0), (plain, 0)]
    {
        backend.set(reply);
        let client = Client::http2(envoy.addr());
        for _ in 0..5 {
            client
                .send(Request::post("/s/m", &b"\0\0\0\0\0"[..]).header("content-type", "application/grpc"))?;
        }
        failures += fails;
        counted(&envoy, "failure", failures);
    }
    counted(&envoy, "success", 8 + 15);
    for _ in 0..12 {
        let reported = probe(envoy.addr())?;
        let per_mille: u64 =
            reported.rest.split(';').find_map(|field| field.strip_prefix("fail=")?.parse().ok()).unwrap_or(0);
        assert!((250..=600).contains(&per_mille), "15 of 38 failed: {reported:?}");
    }
    Ok(())
}

#[test]
fn the_age_of_a_replica_that_does_not_answer_is_zero() -> Result<()> {
    bed!();
    let backend = Backend::start(Reply::ok())?;
    let addr = backend.addr();
    let envoy = Envoy::start(beside(&backend)?)?;
    assert_eq!(envoy.client().get("/")?.status, 200);
    eventually("it grows older", Duration::from_secs(4), || {
        (probe(envoy.addr()).ok()?.rest.split(';').any(|field| field == "up=1")).then_some(())
    });
    drop(backend);
    assert_eq!(Client::new(envoy.addr()).get("/")?.status, 503);
    let reported = probe(envoy.addr())?;
    assert!(reported.rest.starts_with("fail=") && reported.rest.contains(";up=0"), "{reported:?}");
    std::thread::sleep(MS(1100));
    assert!(probe(envoy.addr())?.rest.contains(";up=0"), "it is still not there");
    let _back = Backend::start_on(&addr.to_string(), |_| Reply::ok())?;
    assert_eq!(Client::new(envoy.addr()).get("/")?.status, 200);
    eventually("it grows older again", Duration::from_secs(4), || {
        probe(envoy.addr()).ok()?.rest.contains(";up=1").then_some(())
    });
    Ok(())
}

#[test]
fn streams_count_in_rif_but_not_in_latency() -> Result<()> {
    bed!();
    let backend = Backend::start(Reply::ok())?;
    let envoy = Envoy::start(beside(&backend)?)?;
    for _ in 0..4 {
        envoy.client().get("/")?;
    }
    backend.set(Reply::ok().body(Body::Upgrade));
    let mut socket = WebSocket::connect(envoy.addr(), "/socket")?;
    assert_eq!(socket.round_trip(b"to and fro")?, b"to and fro");
    wait_for_rif(envoy.addr(), 1, MS(500));
    let events = |content_type| {
        let body = Body::Stream { chunk: Bytes::from_static(b"\0\0\0\0\x02ok"), count: 4, gap: MS(150) };
        Reply::ok().header("content-type", content_type).body(body)
    };
    for content_type in ["text/event-stream", "application/grpc"] {
        backend.set(events(content_type));
        Client::http2(envoy.addr()).get("/")?;
    }
    drop(socket);
    wait_for_rif(envoy.addr(), 0, MS(1000));
    counted(&envoy, "streaming", 3);
    let reported = probe(envoy.addr())?;
    assert!(reported.latency_us.is_some_and(|us| us < 100_000), "{reported:?}");
    Ok(())
}

#[test]
fn reports_from_clients_and_backends_are_replaced() -> Result<()> {
    bed!();
    let liar = ["x-prequal-load", "x-prequal-load", "x-prequal-rif", "x-prequal-latency-us"];
    let lies = liar.iter().fold(Reply::ok(), |reply, name| reply.header(name, "0;1;9.9.9.9:1"));
    let backend = Backend::start(lies)?;
    let envoy = Envoy::start(beside(&backend)?)?;
    let names = ["x-prequal-load", "x-prequal-rif", "x-prequal-dest", "x-prequal-hint", "x-prequal-host"];
    let spoof =
        |request: Request| names.iter().fold(request, |request, name| request.header(name, "9;9;9.9.9.9:9"));
    let reply = envoy.client().send(spoof(Request::get("/")))?;
    let reported = report(&reply.headers)?;
    assert_eq!((reported.rif, reported.endpoint), (0, envoy.addr().to_string()));
    assert!(reply.header("x-prequal-rif").is_none() && reply.header("x-prequal-latency-us").is_none());
    let answer = envoy.client().send(spoof(Request::get(PROBE_PATH).header("accept", "application/json")))?;
    let reported = report(&answer.headers)?;
    assert_eq!((reported.rif, &reported.endpoint), (0, &envoy.addr().to_string()));
    let body: Value = serde_json::from_str(&answer.text())?;
    assert_eq!((&body["rif"], &body["endpoint"]), (&json!(0), &json!(reported.endpoint)));
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    // A query string does not hide a probe, and nothing below /prequal reaches the replica.
    backend.clear();
    assert_eq!(envoy.client().get("/prequal/probe?x=1")?.status, 200);
    assert_eq!(envoy.client().send(Request::post(PROBE_PATH, "x"))?.status, 405);
    assert_eq!(envoy.client().get("/prequal/other")?.status, 404);
    assert_eq!(backend.served(), 0);
    assert_eq!(envoy.client().get("/prequal")?.status, 200);
    let silent = Envoy::start(with(beside(&backend)?, &json!({"role": "inbound", "report": "probe_only"})))?;
    assert_none_of_ours(&silent.client().get("/")?.headers);
    assert_eq!(probe(silent.addr())?.endpoint, silent.addr().to_string());
    Ok(())
}

#[test]
fn the_endpoint_can_be_configured() -> Result<()> {
    bed!();
    let backend = Backend::start(Reply::ok())?;
    let settings = json!({"role": "inbound", "endpoint": "[2001:db8::7]:8080"});
    let envoy = Envoy::start(with(beside(&backend)?, &settings))?;
    let reported = report(&envoy.client().get("/")?.headers)?;
    assert_eq!(reported.endpoint, "[2001:db8::7]:8080");
    let reported = probe(envoy.addr())?;
    assert_eq!(reported.endpoint, "[2001:db8::7]:8080");
    assert!(!reported.rest.contains("probe="), "another host's address must not be reported: {reported:?}");
    Ok(())
}

#[test]
fn what_envoy_does_by_itself_does_not_count_against_the_replica() -> Result<()> {
    bed!();
    let tries = AtomicU64::new(0);
    let backend = Backend::start_on("127.0.0.1:0", move |_| {
        let fails = tries.fetch_add(1, Ordering::Relaxed) % 3 < 2;
        if fails { Reply::status(503) } else { Reply::ok().delay(MS(20)) }
    })?;
    let envoy = Envoy::start(beside(&backend)?.edit(|config| {
        config.route_mut()["retry_policy"] = json!({"retry_on": "5xx", "num_retries": 2});
        let own = json!({"match": {"path": "/own"}, "direct_response": {"status": 200}});
        let broken = json!({"match": {"path": "/none"}, "direct_response": {"status": 503}});
        config.routes_mut().splice(0..0, [own, broken]);
    }))?;
    for _ in 0..10 {
        for (path, status) in [("/own", 200), ("/none", 503)] {
            assert_eq!(envoy.client().get(path)?.status, status);
        }
    }
    counted(&envoy, "aborted", 20);
    let reported = probe(envoy.addr())?;
    assert_eq!((reported.rif, reported.latency_us, &reported.rest[..3]), (0, None, "up="), "{reported:?}");
    // Two retries count as one request.
    for _ in 0..5 {
        assert_eq!(envoy.client().get("/")?.status, 200);
    }
    assert_eq!(backend.served(), 15);
    counted(&envoy, "success", 5);
    counted(&envoy, "failure", 0);
    wait_for_rif(envoy.addr(), 0, MS(500));
    Ok(())
}

/// Base latency and knee as reported on several connections, so by both workers.
fn capacities(addr: SocketAddr) -> Vec<(u64, u64)> {
    let field = |reported: &Report, name: &str| {
        let mut fields = reported.rest.split(';').filter_map(|field| field.strip_prefix(name)?.parse().ok());
        fields.next().unwrap_or_else(|| panic!("no {name} in {reported:?}"))
    };
    let reported = (0..12).map(|_| probe(addr).expect("a report"));
    reported.map(|reported| (field(&reported, "base="), field(&reported, "knee="))).collect()
}

/// Asserts that both workers report about `ms` as base latency and as latency.
#[track_caller]
fn assert_takes(addr: SocketAddr, ms: std::ops::RangeInclusive<u64>) {
    let us = ms.start() * 1000..=ms.end() * 1000;
    let reported = capacities(addr);
    assert!(reported.iter().all(|(base, _)| us.contains(base)), "not {ms:?} ms: {reported:?}");
    let reported: Vec<_> = (0..12).map(|_| probe(addr).expect("a report").latency_us).collect();
    assert!(reported.iter().flatten().all(|latency| us.contains(latency)), "not {ms:?} ms: {reported:?}");
}

#[test]
fn two_workers_report_the_same_base_latency_and_knee() -> Result<()> {
    bed!();
    let backend = Backend::start(Reply::ok().delay(MS(40)))?;
    let envoy = Envoy::start(beside(&backend)?)?;
    assert_eq!(probe(envoy.addr())?.rest, "up=0", "nothing has been served");
    // With pauses, so that the requests do not run in step.
    let addr = envoy.addr();
    let clients = [7, 18, 29].map(|pause| {
        std::thread::spawn(move || {
            let client = Client::new(addr);
            (0..40).map(|_| (client.get("/"), std::thread::sleep(MS(pause))).0).collect::<Vec<_>>()
        })
    });
    clients.into_iter().for_each(|client| assert_all_ok(&client.join().expect("it ran")));
    assert_takes(envoy.addr(), 30..=60);
    let reported = capacities(envoy.addr());
    assert!(reported.iter().all(|(_, knee)| (1..=6).contains(knee)), "three at once: {reported:?}");
    let answer = envoy.client().get("/")?;
    let reported = report(&answer.headers)?.rest;
    assert!(reported.contains(";base=") && reported.contains(";knee="), "{reported}");
    Ok(())
}

/// Sends `first`, waits for `pause`, sends `rest`, and reads the whole response.
fn slow_upload(addr: SocketAddr, first: &str, pause: Duration, rest: &str) -> Result<String> {
    let mut socket = TcpStream::connect(addr)?;
    socket.write_all(first.as_bytes())?;
    std::thread::sleep(pause);
    socket.write_all(rest.as_bytes())?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn the_time_of_slow_clients_does_not_count_as_latency() -> Result<()> {
    bed!();
    let backend = Backend::start_on("127.0.0.1:0", |seen| match seen.path.as_str() {
        "/large" => Reply::ok().delay(MS(20)).body(Body::Full(Bytes::from(vec![b'x'; 512 << 10]))),
        _ => Reply::ok().delay(MS(20)).reads_first(),
    })?;
    let envoy = Envoy::start(beside(&backend)?)?;
    let addr = envoy.addr();
    let head = "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n";
    let sized = format!("{head}content-length: 8\r\n\r\nhalf");
    let chunked = format!("{head}transfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n");
    for (first, rest) in [(sized, "half"), (chunked, "4\r\nhalf\r\n0\r\n\r\n")] {
        let slow: Vec<_> = (0..4)
            .map(|number| {
                let first = first.clone();
                std::thread::spawn(move || slow_upload(addr, &first, MS(1000 + 100 * number), rest))
            })
            .collect();
        wait_for_rif(addr, 4, MS(500));
        for slow in slow {
            let answer = slow.join().expect("it ran")?;
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
    }
    // A worker that learns late of another worker's few requests may miss part of their time, but never counts the
    // clients' second.
    counted(&envoy, "success", 8);
    assert_takes(addr, 5..=250);
    for _ in 0..4 {
        let mut socket = TcpStream::connect(addr)?;
        socket.write_all(b"GET /large HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")?;
        std::thread::sleep(MS(1000));
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer)?;
        assert!(answer.len() > 512 << 10);
    }
    counted(&envoy, "success", 12);
    assert_takes(addr, 5..=250);
    Ok(())
}

#[test]
fn streams_and_aborts_do_not_change_base_latency_and_knee() -> Result<()> {
    bed!();
    let backend = Backend::start_on("127.0.0.1:0", |seen| match seen.path.as_str() {
        "/socket" => Reply::ok().body(Body::Upgrade),
        _ => Reply::ok().delay(MS(100)),
    })?;
    let envoy = Envoy::start(beside(&backend)?)?;
    let addr = envoy.addr();
    let mut sockets = [WebSocket::connect(addr, "/socket")?, WebSocket::connect(addr, "/socket")?];
    for _ in 0..5 {
        assert_eq!(envoy.client().get("/")?.status, 200);
    }
    for socket in &mut sockets {
        assert_eq!(socket.round_trip(b"to and fro")?, b"to and fro");
    }
    assert_takes(addr, 90..=130);
    // One request at a time, and two streams that are in flight but use no capacity.
    let reported = capacities(addr);
    assert!(reported.iter().all(|(_, knee)| (1..=3).contains(knee)), "{reported:?}");
    for _ in 0..30 {
        assert!(Client::new(addr).abandon(Request::get("/"), MS(20)));
    }
    counted(&envoy, "aborted", 30);
    // The time that aborted requests spent at the server counts, but none of them was served. If they counted as
    // departures, the base latency would be 32 ms.
    let reported = capacities(addr);
    assert!(reported.iter().all(|(base, _)| (90_000..=300_000).contains(base)), "{reported:?}");
    Ok(())
}
