//! Which requests count as in flight, and how their ends count.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::Bytes;
use prequal_testbed::{
    Backend, Body, Client, Envoy, Reply, Request, Seen, WebSocket, crash_module, eventually,
};
use serde_json::json;

use super::{MS, beside, free_port, hold, on_port, probe, slots, wait_for_count, wait_for_rif, with};
use crate::support::{assert_all_ok, assert_no_prequal_headers, bed};

/// Time within which a dead VM's requests must leave the RIF, including some time to poll on a busy machine.
const HEALED: Duration = Duration::from_millis(3500);
/// Time for requests to arrive on a busy machine; shorter than the route's timeout.
const PATIENCE: Duration = Duration::from_secs(10);

/// Answers by path: `/held` when the gate opens, `/late` after the route's timeout, `/reset` never.
fn by_path(seen: &Seen) -> Reply {
    match seen.path.as_str() {
        "/held" => Reply::ok().gated(),
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
        backend.set_gate(false);
        let held = hold(envoy.addr(), 40, http2, "/held");
        wait_for_rif(envoy.addr(), 40, PATIENCE);
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
        backend.set_gate(true);
        for answer in held {
            assert_eq!(answer.join().expect("it ran")?.status, 200);
        }
        wait_for_rif(addr, 0, MS(1000));
        assert_eq!(slots(&envoy)?, [0; 0]);
        // Errors, resets, broken responses and timeouts are failures; requests that the client aborted do not count.
        let since = |result: &str| before.get(&format!("requests.{result}")).copied().unwrap_or(0);
        for (result, count) in [("success", 45), ("failure", 20), ("aborted", 5)] {
            wait_for_count(&envoy, result, since(result) + count);
        }
    }
    Ok(())
}

#[test]
fn requests_of_a_crashed_vm_are_removed_and_serving_continues() -> Result<()> {
    let module = crash_module();
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
    // The delay is shorter than the drain of the old generation.
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
    assert_no_prequal_headers(&Client::new(addr).get("/")?.headers);
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
    wait_for_count(&envoy, "streaming", 3);
    let reported = probe(envoy.addr())?;
    assert!(reported.latency_us.is_some_and(|us| us < 100_000), "{reported:?}");
    Ok(())
}

#[test]
fn responses_made_by_envoy_do_not_count_against_the_replica() -> Result<()> {
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
    wait_for_count(&envoy, "aborted", 20);
    let reported = probe(envoy.addr())?;
    assert_eq!((reported.rif, reported.latency_us, &reported.rest[..3]), (0, None, "up="), "{reported:?}");
    // A request with two retries counts as one.
    for _ in 0..5 {
        assert_eq!(envoy.client().get("/")?.status, 200);
    }
    assert_eq!(backend.served(), 15);
    wait_for_count(&envoy, "success", 5);
    wait_for_count(&envoy, "failure", 0);
    wait_for_rif(envoy.addr(), 0, MS(500));
    Ok(())
}
