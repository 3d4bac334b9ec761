//! Synchronous mode: requests that wait for their own probes, and events that may happen while they wait.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use prequal_testbed::{
    AgentOptions, Backend, Body, Client, Envoy, EnvoyConfig, Fleet, Prequal, Replica, Reply, Request,
    eventually,
};
use serde_json::{Value, json};

use crate::support::{
    PROBE_PATH, SERVING, addrs, assert_all_ok, assert_none_of_ours, assert_probes_balance, bed, counted,
    is_probe, report, set, stand_in, stand_ins, with_load,
};

const MS: fn(u64) -> Duration = Duration::from_millis;

/// The shipped configuration in synchronous mode; `settings` are added to the cluster's.
fn sync_config(addrs: &[SocketAddr], settings: Value) -> Result<EnvoyConfig> {
    let config = EnvoyConfig::for_replicas(addrs)?.filter_settings(|all| {
        let cluster = &mut all["clusters"][0];
        cluster["mode"] = json!("sync");
        // Long, so that a busy machine does not reach it; the tests of the deadline set their own.
        cluster["sync_deadline_ms"] = json!(1000);
        // Listed explicitly, so that the first request already has replicas to probe.
        cluster["endpoints"] = json!(addrs.iter().map(ToString::to_string).collect::<Vec<_>>());
        for (key, value) in settings.as_object().expect("an object") {
            cluster[key] = value.clone();
        }
    });
    Ok(config)
}

fn start(addrs: &[SocketAddr], settings: Value) -> Result<Envoy> {
    Envoy::start(sync_config(addrs, settings)?)
}

fn hang() -> Reply {
    Reply::ok().body(Body::Hang)
}

fn user_requests(backend: &Backend) -> usize {
    backend.seen().iter().filter(|seen| !is_probe(seen)).count()
}

/// Asserts that no VM of `envoy` has crashed.
#[track_caller]
fn assert_no_crash(envoy: &Envoy) {
    let log = envoy.log();
    assert!(!log.contains("panicked") && !log.contains("Function: proxy_on"), "{log}");
    let reloads = envoy.stats().expect("stats");
    let reloads: Vec<_> = reloads.iter().filter(|(name, n)| name.contains("vm_reload") && **n > 0).collect();
    assert!(reloads.is_empty(), "{reloads:?}");
}

#[test]
fn a_request_goes_to_the_best_of_the_probed_replicas() -> Result<()> {
    bed!();
    let answering = |rif, latency| move |addr| with_load(report(rif, latency, addr));
    let good = stand_in(answering(1, 2000), |_| Reply::ok())?;
    let bad = stand_in(answering(9, 80_000), |_| Reply::ok())?;
    // Load is only reported by probes.
    let envoy = start(&[good.addr(), bad.addr()], json!({"piggyback": false}))?;
    for client in [envoy.client(), Client::http2(envoy.addr())] {
        assert_all_ok(&client.burst(100, 4, |_| Request::get("/")));
    }
    assert_eq!((user_requests(&good), user_requests(&bad)), (200, 0));
    let after = assert_probes_balance(&envoy);
    assert_eq!((after.picks("sync"), after.waits("enough")), (200, 200), "{after:#?}");
    assert_eq!(after.other("prequal_sync_answers_total"), 400, "{after:#?}");
    for seen in good.seen().iter().filter(|seen| !is_probe(seen)) {
        assert_none_of_ours(&seen.headers);
    }
    // Envoy merges histograms every five seconds.
    eventually("the waits are timed", Duration::from_secs(20), || {
        let text = envoy.admin_get("/stats/prometheus").ok()?;
        text.contains("prequal_sync_wait_us_count{cluster=\"replicas\"} 200").then_some(())
    });
    let text = envoy.admin_get("/stats/prometheus")?;
    assert!(text.contains("prequal_sync_waits_total{cluster=\"replicas\",end=\"enough\"} 200"), "{text}");
    assert_no_crash(&envoy);
    Ok(())
}

#[test]
fn one_hung_agent_of_three_delays_no_request() -> Result<()> {
    bed!();
    let mut fleet = stand_ins(2, |addr| with_load(report(1, 2000, addr)), |_| Reply::ok())?;
    fleet.push(stand_in(|_| hang(), |_| Reply::ok())?);
    let envoy = start(&addrs(&fleet), json!({}))?;
    let answers = envoy.client().burst(60, 3, |_| Request::get("/"));
    assert_all_ok(&answers);
    assert!(
        answers.iter().flatten().all(|answer| answer.elapsed < MS(900)),
        "no request waits for the deadline"
    );
    let after = envoy.prequal(SERVING)?;
    assert_eq!((after.waits("enough"), after.waits("deadline")), (60, 0), "{after:#?}");
    assert_no_crash(&envoy);
    Ok(())
}

#[test]
fn hung_agents_cost_the_deadline_and_no_request() -> Result<()> {
    bed!();
    let fleet = stand_ins(3, |_| hang(), |_| Reply::ok())?;
    let envoy = start(&addrs(&fleet), json!({"sync_deadline_ms": 40}))?;
    let answers = envoy.client().burst(40, 4, |_| Request::get("/"));
    assert_all_ok(&answers);
    for answer in answers.iter().flatten() {
        assert!(answer.elapsed >= MS(40), "before the deadline: {:?}", answer.elapsed);
        // Generous: the overshoot is measured by `cargo xtask bench cost -- --only deadline`.
        assert!(answer.elapsed < MS(400), "long after the deadline: {:?}", answer.elapsed);
    }
    let after = envoy.prequal(SERVING)?;
    // On a stalled machine the calls may time out, 10 ms after the deadline, before the deadline is noticed.
    let (deadline, all_ended) = (after.waits("deadline"), after.waits("all_ended"));
    assert!(deadline >= 30 && deadline + all_ended == 40 && after.picks("sync") == 0, "{after:#?}");
    assert_no_crash(&envoy);
    Ok(())
}

#[test]
fn late_probe_replies_enter_the_pool() -> Result<()> {
    bed!();
    let late = |addr| with_load(report(1, 2000, addr)).delay(MS(60));
    let fleet = stand_ins(3, late, |_| Reply::ok())?;
    // The pool's own count of requests in flight never decreases here, so switch its limit off (`burst_guard`).
    let settings = json!({"sync_deadline_ms": 3, "piggyback": false, "probe_timeout_ms": 2000, "max_age_ms": 60_000, "idle_probe_interval_ms": 0, "burst_guard": false});
    let envoy = start(&addrs(&fleet), settings)?;
    let client = envoy.client();
    client.get("/")?;
    let first = envoy.prequal(SERVING)?;
    assert_eq!((first.waits("deadline"), first.picks("fallback")), (1, 1), "{first:#?}");
    counted(&envoy, "the late answers", |now| now.probes("used") >= 3);
    assert_all_ok(&client.burst(10, 1, |_| Request::get("/")));
    let after = envoy.prequal(SERVING)?;
    // An Envoy that stalls for 60 ms finds the replies before the deadline.
    assert_eq!(after.waits("deadline") + after.waits("enough"), 11, "{after:#?}");
    assert_eq!((after.picks("sync"), after.picks("fallback")), (after.waits("enough"), 1), "{after:#?}");
    let from_the_pool = after.picks("cold") + after.picks("hot");
    assert!(from_the_pool >= 5 && from_the_pool + after.waits("enough") == 10, "{after:#?}");
    Ok(())
}

#[test]
fn with_dead_agents_requests_continue_at_once() -> Result<()> {
    bed!();
    let fleet = stand_ins(3, |_| Reply::ok(), |_| Reply::ok())?;
    // Ports that are no longer open.
    let dead: Vec<SocketAddr> =
        stand_ins(3, |_| Reply::ok(), |_| Reply::ok())?.iter().map(Backend::addr).collect();
    let config = sync_config(&addrs(&fleet), json!({}))?;
    let envoy = Envoy::start(config.endpoints("replicas-agent", &dead))?;
    let answers = envoy.client().burst(50, 2, |_| Request::get("/"));
    assert_all_ok(&answers);
    assert!(answers.iter().flatten().all(|answer| answer.elapsed < MS(900)));
    let after = envoy.prequal(SERVING)?;
    assert_eq!((after.waits("all_ended"), after.picks("sync")), (50, 0), "{after:#?}");
    // The same if no call can be sent at all.
    let missing = start(&addrs(&fleet), json!({"probe_cluster": "no-such-cluster"}))?;
    let answers = missing.client().burst(50, 2, |_| Request::get("/"));
    assert_all_ok(&answers);
    assert!(answers.iter().flatten().all(|answer| answer.elapsed < MS(900)));
    let after = missing.prequal(SERVING)?;
    assert_eq!((after.waits("unasked"), after.probes("sent")), (50, 0), "{after:#?}");
    assert_no_crash(&missing);
    Ok(())
}

#[test]
fn failed_calls_are_ended_and_never_usable() -> Result<()> {
    bed!();
    let calls = Arc::new(AtomicU64::new(0));
    let half = move |addr| match calls.fetch_add(1, Ordering::Relaxed) % 4 {
        0 => Reply::status(500),
        1 => with_load("garbage"),
        _ => with_load(report(1, 2000, addr)),
    };
    let fleet = stand_ins(3, half, |_| Reply::ok())?;
    let envoy = start(&addrs(&fleet), json!({}))?;
    let answers = envoy.client().burst(120, 3, |_| Request::get("/"));
    assert_all_ok(&answers);
    assert!(answers.iter().flatten().all(|answer| answer.elapsed < MS(900)));
    let after = assert_probes_balance(&envoy);
    assert!(after.waits("enough") > 20 && after.waits("all_ended") > 20, "{after:#?}");
    assert_eq!(after.waits("enough") + after.waits("all_ended"), 120, "{after:#?}");
    assert_no_crash(&envoy);
    Ok(())
}

#[test]
fn a_request_aborted_during_its_wait_is_dropped() -> Result<()> {
    bed!();
    let slow = Arc::new(AtomicBool::new(true));
    let probe = {
        let slow = Arc::clone(&slow);
        move |addr| {
            with_load(report(1, 2000, addr)).delay(MS(if slow.load(Ordering::Relaxed) { 400 } else { 0 }))
        }
    };
    let fleet = stand_ins(3, probe, |_| Reply::ok())?;
    let envoy = start(&addrs(&fleet), json!({"probe_timeout_ms": 2000}))?;
    for client in [envoy.client(), Client::http2(envoy.addr())] {
        for _ in 0..10 {
            assert!(client.abandon(Request::get("/"), MS(60)));
            assert!(client.abandon(Request::post("/", vec![b'x'; 100_000]), MS(60)));
        }
    }
    // On a busy machine a request may be aborted before it is sent.
    counted(&envoy, "the aborts", |now| {
        now.waits("aborted") >= 30 && now.outcomes("client_abort") == now.waits("aborted")
    });
    // The replies arrive nevertheless, and are used.
    let after = counted(&envoy, "the late answers", |now| now.probes("used") >= 90);
    assert_eq!((after.steered(), envoy.stat("http.ingress.downstream_rq_active")?), (0, 0), "{after:#?}");
    assert_eq!(fleet.iter().map(user_requests).sum::<usize>(), 0, "no request was sent on");
    slow.store(false, Ordering::Relaxed);
    assert_all_ok(&envoy.client().burst(50, 3, |_| Request::get("/")));
    assert_eq!(envoy.prequal(SERVING)?.waits("enough"), 50);
    assert_no_crash(&envoy);
    Ok(())
}

#[test]
fn bodies_wait_with_their_request() -> Result<()> {
    bed!();
    let probe = |addr| with_load(report(1, 2000, addr)).delay(MS(10));
    let fleet = stand_ins(3, probe, |_| Reply::ok().body(Body::Echo))?;
    let envoy = start(&addrs(&fleet), json!({}))?;
    for client in [envoy.client(), Client::http2(envoy.addr())] {
        for size in [0, 1, 10_000, 4 << 20] {
            let body = Bytes::from(vec![b'b'; size]);
            let answer = client.send(Request::post("/", body.clone()))?;
            assert!(answer.status == 200 && answer.body == body, "{size} bytes");
        }
    }
    let after = envoy.prequal(SERVING)?;
    assert_eq!((after.picks("sync"), after.outcomes("answer")), (8, 8), "{after:#?}");
    Ok(())
}

#[test]
fn a_local_reply_from_envoy_ends_the_wait() -> Result<()> {
    bed!();
    let fleet = stand_ins(3, |_| hang(), |_| Reply::ok())?;
    // Envoy ends the stream before the deadline.
    let config = sync_config(&addrs(&fleet), json!({}))?
        .edit(|config| config.http_mut()["request_timeout"] = json!("0.1s"));
    let envoy = Envoy::start(config)?;
    let mut socket = TcpStream::connect(envoy.addr())?;
    // The body never arrives completely, so the request's own timeout ends it.
    socket.write_all(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n123")?;
    let mut answer = [0; 12];
    socket.read_exact(&mut answer)?;
    assert_eq!(&answer, b"HTTP/1.1 408");
    let after = counted(&envoy, "the end of the wait", |now| now.waits("aborted") == 1);
    assert_eq!(after.waits("deadline"), 0, "{after:#?}");
    assert_no_crash(&envoy);
    Ok(())
}

#[test]
fn a_local_reply_on_resuming_does_no_harm() -> Result<()> {
    bed!();
    let fleet = stand_ins(3, |addr| with_load(report(1, 2000, addr)), |_| Reply::ok())?;
    // The agents answer, but there is no replica to serve: the resumed request is answered within the same event.
    let config = sync_config(&addrs(&fleet), json!({}))?.endpoints(SERVING, &[]);
    let envoy = Envoy::start(config)?;
    for client in [envoy.client(), Client::http2(envoy.addr())] {
        for answer in client.burst(40, 8, |_| Request::post("/", "body")) {
            assert_eq!(answer?.status, 503);
        }
    }
    let after = envoy.prequal(SERVING)?;
    assert_eq!((after.waits("enough"), after.outcomes("local")), (80, 80), "{after:#?}");
    assert_no_crash(&envoy);
    Ok(())
}

#[test]
fn requests_that_do_not_wait_are_also_steered() -> Result<()> {
    bed!();
    let load = |addr| with_load(report(1, 2000, addr));
    let fleet = stand_ins(3, load, load)?;
    let envoy = start(&addrs(&fleet), json!({"probe_cluster": "no-such-cluster", "max_age_ms": 60_000}))?;
    assert_all_ok(&envoy.client().burst(60, 2, |_| Request::get("/")));
    let after = envoy.prequal(SERVING)?;
    assert_eq!((after.waits("unasked"), after.other("prequal_diverted_total")), (60, 0), "{after:#?}");
    assert!(after.picks("cold") + after.picks("hot") >= 30, "{after:#?}");
    assert_no_crash(&envoy);
    Ok(())
}

#[test]
fn in_fleets_smaller_than_d_every_replica_is_probed() -> Result<()> {
    bed!();
    // With this many requests, chance leaves no replica out.
    for (n, asked, requests) in [(1, 0, 40), (2, 2, 40), (3, 3, 40), (9, 8, 200)] {
        let fleet = stand_ins(n, |addr| with_load(report(1, 2000, addr)), |_| Reply::ok())?;
        let settings = json!({"sync_d": 8, "idle_probe_interval_ms": 0, "discovery_interval_ms": 60_000});
        let envoy = start(&addrs(&fleet), settings)?;
        assert_all_ok(&envoy.client().burst(requests, 2, |_| Request::get("/")));
        let after = assert_probes_balance(&envoy);
        let addressed = fleet.iter().flat_map(Backend::seen).filter(is_probe).count();
        assert!(addressed >= requests * asked, "n = {n}: {addressed} probes: {after:#?}");
        let all = requests as u64;
        let (waited, unasked) = if n == 1 { (0, all) } else { (all, 0) };
        assert_eq!((after.waits("enough"), after.waits("unasked")), (waited, unasked), "n = {n}: {after:#?}");
        assert!(fleet.iter().all(|backend| user_requests(backend) > 0), "n = {n}: no replica is left out");
    }
    Ok(())
}

#[test]
fn an_ejected_replica_is_not_probed() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(4, &Reply::ok().delay(MS(2)))?;
    // One reply is enough to decide, and an ejected replica would not send it.
    let envoy = start(&fleet.addrs(), json!({"sync_d": 2, "sync_deadline_ms": 1000}))?;
    let client = envoy.client();
    fleet[0].backend.set(Reply::status(503));
    eventually("the failing replica is ejected", Duration::from_secs(10), || {
        client.burst(20, 4, |_| Request::get("/"));
        (envoy.prequal(SERVING).ok()?.other("prequal_ejected") == 1).then_some(())
    });
    let before = envoy.prequal(SERVING)?;
    client.burst(200, 4, |_| Request::get("/"));
    let after = envoy.prequal(SERVING)?;
    let more = |count: fn(&Prequal) -> u64| count(&after) - count(&before);
    let trials = more(|counts| counts.other("prequal_trials_total"));
    assert!(more(|counts| counts.picks("sync")) + trials >= 195, "{after:#?}");
    Ok(())
}

#[test]
fn synchronous_mode_also_learns_the_fleet() -> Result<()> {
    bed!();
    let fleet = Fleet::start([5, 5, 60].map(|delay| Reply::ok().delay(MS(delay))))?;
    let config = set(EnvoyConfig::for_replicas(&fleet.addrs())?, "mode", "sync");
    let envoy = Envoy::start(set(config, "sync_deadline_ms", 1000))?;
    crate::support::warm(&envoy, 3);
    fleet.clear();
    let before = envoy.prequal(SERVING)?;
    assert_all_ok(&envoy.client().burst(300, 3, |_| Request::get("/")));
    let after = envoy.prequal(SERVING)?;
    assert!(after.picks("sync") - before.picks("sync") >= 250, "{after:#?}");
    // The slow replica is chosen only if the two that replied first were the slow one and a busy one.
    assert!(fleet.served()[2] < 60, "{:?}", fleet.served());
    fleet.assert_idle();
    Ok(())
}

#[test]
fn a_route_can_have_its_own_mode() -> Result<()> {
    bed!();
    let fleet = stand_ins(3, |addr| with_load(report(1, 2000, addr)), |_| Reply::ok())?;
    let config = EnvoyConfig::for_replicas(&addrs(&fleet))?
        .filter_settings(|settings| {
            let addrs = addrs(&fleet);
            settings["clusters"][0]["endpoints"] =
                json!(addrs.iter().map(ToString::to_string).collect::<Vec<_>>());
            settings["clusters"][0]["route_modes"] = json!({"chat": "sync"});
            settings["clusters"][0]["sync_deadline_ms"] = json!(1000);
        })
        .edit(|config| {
            let mut route = config.routes_mut().last().expect("a route").clone();
            route["name"] = json!("chat");
            route["match"] = json!({"prefix": "/chat"});
            let routes = config.routes_mut();
            routes.insert(routes.len() - 1, route);
        });
    let envoy = Envoy::start(config)?;
    assert_all_ok(&envoy.client().burst(30, 2, |_| Request::get("/other")));
    let before = envoy.prequal(SERVING)?;
    assert_eq!((before.picks("sync"), before.waits("enough")), (0, 0), "{before:#?}");
    assert_all_ok(&envoy.client().burst(30, 2, |_| Request::get("/chat")));
    let after = envoy.prequal(SERVING)?;
    assert_eq!((after.picks("sync"), after.steered() - before.steered()), (30, 30), "{after:#?}");
    Ok(())
}

#[test]
fn a_new_listener_leaves_no_request_hanging() -> Result<()> {
    bed!();
    let fleet = stand_ins(3, |_| hang(), |_| Reply::ok())?;
    let config = sync_config(&addrs(&fleet), json!({"sync_deadline_ms": 900}))?.dynamic_listener();
    let mut envoy = Envoy::start(config.clone())?;
    for round in 0..2 {
        let (h1, h2) = (envoy.client(), Client::http2(envoy.addr()));
        let waiting =
            [h1, h2].map(|client| std::thread::spawn(move || client.burst(5, 5, |_| Request::get("/"))));
        let asked = 30 * (round + 1);
        counted(&envoy, "ten requests wait", |now| now.probes("sent") >= asked);
        let next = set(config.clone(), "max_age_ms", 2000 + round);
        assert!(envoy.update_listener(next)?);
        for requests in waiting {
            assert_all_ok(&requests.join().expect("no panic"));
        }
    }
    let after = envoy.prequal(SERVING)?;
    // On a stalled machine the calls may time out, 10 ms after the deadline, before the deadline is noticed.
    let over = ["deadline", "all_ended", "aborted"].map(|end| after.waits(end)).iter().sum::<u64>();
    assert_eq!(over, 20, "{after:#?}");
    assert_no_crash(&envoy);
    Ok(())
}

/// The answer to a raw request with these header bytes.
fn raw(addr: SocketAddr, path: &str, headers: &[u8]) -> Result<String> {
    let mut socket = TcpStream::connect(addr)?;
    socket.set_read_timeout(Some(Duration::from_secs(10)))?;
    socket.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n").as_bytes())?;
    socket.write_all(headers)?;
    socket.write_all(b"\r\n")?;
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned())
}

#[test]
fn a_hint_is_a_hash_whatever_the_client_sends() -> Result<()> {
    bed!();
    let fleet = stand_ins(3, |addr| with_load(report(1, 2000, addr)), |_| Reply::ok())?;
    // Only the probes of requests and of discovery.
    let hint = json!({"header": "x-session", "path_segment": 2});
    let settings = json!({"hint": hint, "budget": "fixed", "r_probe": 0, "idle_probe_interval_ms": 0});
    let config = sync_config(&addrs(&fleet), settings)?
        .edit(|config| config.http_mut()["max_request_headers_kb"] = json!(96));
    let envoy = Envoy::start(config)?;
    // The hints of all probes and of all requests since the last call.
    let hints = || {
        let seen: Vec<_> = fleet.iter().flat_map(Backend::seen).collect();
        fleet.iter().for_each(Backend::clear);
        let of = |probes: bool| -> BTreeSet<Option<String>> {
            let kind = seen.iter().filter(|seen| is_probe(seen) == probes);
            kind.map(|seen| seen.header("x-prequal-hint").map(str::to_owned)).collect()
        };
        (of(true), of(false))
    };
    let long = [b"x-session: ".to_vec(), vec![b'x'; 64 << 10], b"\r\n".to_vec()].concat();
    let mut all = BTreeSet::new();
    for (path, headers) in [
        ("/", &b"x-session: abc\r\n"[..]),
        ("/a/model", b""),
        ("/a/model/b?c", b"x-session: abc\r\n"),
        ("/", b"x-session: \xff\xfe\x80 \x01binary\r\n"),
        ("/", b"x-session: \xff\xfe\x80\r\n"),
        ("/", &long),
    ] {
        let answer = raw(envoy.addr(), path, headers)?;
        let shown = String::from_utf8_lossy(&headers[..headers.len().min(40)]);
        if !answer.starts_with("HTTP/1.1 200") {
            // Envoy refuses control characters in header values.
            assert!(answer.starts_with("HTTP/1.1 400") && shown.contains('\u{1}'), "{answer}: {shown}");
            continue;
        }
        let (mut probes, requests) = hints();
        probes.remove(&None);
        // A request does not wait for all its probes: one of the previous request may arrive only now.
        probes.retain(|hint| hint.as_ref().is_none_or(|hint| !all.contains(hint)));
        assert_eq!(probes, requests, "the replica learns what it was asked: {shown}");
        let [Some(hint)] = &*probes.into_iter().collect::<Vec<_>>() else { panic!("not one hint: {shown}") };
        assert!(hint.len() == 16 && hint.bytes().all(|b| b.is_ascii_hexdigit()), "{hint}");
        assert!(all.insert(hint.clone()), "{shown} has the hint of another");
    }
    assert_eq!(all.len(), 5);
    // No hint, and a hint that the client forged.
    for headers in [&b""[..], b"x-prequal-hint: 0123456789abcdef\r\n"] {
        assert_eq!(raw(envoy.addr(), "/", headers)?, "HTTP/1.1 200 OK");
        let (mut probes, requests) = hints();
        // A probe of a previous request may arrive late.
        probes.retain(|hint| hint.as_ref().is_none_or(|hint| !all.contains(hint)));
        assert_eq!((probes, requests), (BTreeSet::from([None]), BTreeSet::from([None])));
    }
    assert_no_crash(&envoy);
    Ok(())
}

#[test]
fn a_hint_leads_to_the_replica_that_served_it_before() -> Result<()> {
    bed!();
    let options = AgentOptions { args: vec!["--hint-cache".into(), "100".into()], ..Default::default() };
    let replica = || Replica::start_with(Reply::ok().delay(MS(10)), &options);
    let fleet = [replica()?, replica()?];
    // With two replicas both are probed, and both must answer.
    let envoy = start(&[fleet[0].addr(), fleet[1].addr()], json!({"hint": {"header": "x-session"}}))?;
    let client = envoy.client();
    let get = |session: &str| {
        assert_all_ok(&[client.send(Request::get("/").header("x-session", session))]);
    };
    // A replica that has no latency estimate yet is tried, whatever the other reports.
    (0..20).for_each(|number| get(&format!("before {number}")));
    for session in (0..8).map(|number| format!("session {number}")) {
        (0..10).for_each(|_| get(&session));
        let served = fleet.each_ref().map(|replica| {
            let seen = replica.backend.seen();
            seen.iter().filter(|seen| seen.header("x-session") == Some(&session)).count()
        });
        // By chance alone it would be five each.
        assert!(served.iter().any(|served| *served >= 9), "{session}: {served:?}");
    }
    Ok(())
}

#[test]
fn a_hint_has_the_same_home_in_every_envoy() -> Result<()> {
    bed!();
    let fleet = stand_ins(6, |addr| with_load(report(1, 2000, addr)), |_| Reply::ok())?;
    let settings = json!({"hint": {"header": "x-session"}});
    let envoys = [start(&addrs(&fleet), settings.clone())?, start(&addrs(&fleet), settings)?];
    let mut homes = BTreeSet::new();
    for session in (0..20).map(|number| format!("session {number}")) {
        for envoy in &envoys {
            let client = envoy.client();
            let send = |_| client.send(Request::get("/").header("x-session", &session));
            assert_all_ok(&(0..5).map(send).collect::<Vec<_>>());
        }
        let is_ours = |backend: &Backend| {
            backend.seen().iter().any(|seen| seen.header("x-session") == Some(&session) && !is_probe(seen))
        };
        let served: Vec<usize> = (0..fleet.len()).filter(|index| is_ours(&fleet[*index])).collect();
        assert_eq!(served.len(), 1, "{session}: {served:?}");
        homes.extend(served);
    }
    assert!(homes.len() > 1, "all sessions have the same home");
    Ok(())
}

#[test]
fn a_client_cannot_inject_a_hint() -> Result<()> {
    bed!();
    let fleet = stand_ins(3, |addr| with_load(report(1, 2000, addr)), |_| Reply::ok())?;
    for mode in ["async", "sync"] {
        let envoy = Envoy::start(set(EnvoyConfig::for_replicas(&addrs(&fleet))?, "mode", mode))?;
        fleet.iter().for_each(Backend::clear);
        assert_all_ok(&envoy.client().burst(20, 2, |_| Request::get("/").header("x-prequal-hint", "abc")));
        for seen in fleet.iter().flat_map(Backend::seen) {
            assert!(seen.header("x-prequal-hint").is_none(), "{mode}: {seen:?}");
        }
    }
    Ok(())
}

#[test]
fn hinted_loads_do_not_enter_the_pool() -> Result<()> {
    bed!();
    // Each replica claims to be idle in reply to hinted probes; its other replies are never requested. Discovery only
    // learns names.
    let fleet = stand_ins(3, |addr| with_load(report(0, 100, addr)), |_| Reply::ok())?;
    let settings = json!({"hint": {"header": "x-session"}, "piggyback": false, "idle_probe_interval_ms": 0,
        "budget": "fixed", "r_probe": 0, "verified_probes": false});
    let envoy = start(&addrs(&fleet), settings)?;
    assert_all_ok(&envoy.client().burst(30, 2, |_| Request::get("/").header("x-session", "s")));
    let hinted = counted(&envoy, "all probes", |now| now.probes("used") >= 90);
    assert_eq!((hinted.picks("sync"), hinted.other("prequal_pool_occupancy")), (30, 0), "{hinted:#?}");
    assert_all_ok(&envoy.client().burst(5, 1, |_| Request::get("/")));
    counted(&envoy, "a pool of three", |now| now.other("prequal_pool_occupancy") == 3);
    assert!(fleet[0].seen().iter().any(|seen| seen.path == PROBE_PATH));
    Ok(())
}
