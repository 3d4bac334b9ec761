//! How waits end: with enough answers, with failures, at the deadline, or with the request.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::Result;
use bytes::Bytes;
use prequal_testbed::{Backend, Body, Client, Envoy, Reply, Request};
use serde_json::json;

use super::{MS, assert_no_crash, start, sync_config, user_requests};
use crate::support::{
    SERVING, addrs, assert_all_ok, assert_probes_balance, bed, counted, report, set, stand_in, stand_ins,
    with_load,
};

fn hang() -> Reply {
    Reply::ok().body(Body::Hang)
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
    // Responses carry reports; otherwise the filter would take these for replicas without an agent.
    let fleet = stand_ins(3, |_| hang(), |addr| with_load(report(1, 2000, addr)))?;
    let envoy = start(&addrs(&fleet), json!({"sync_deadline_ms": 40}))?;
    let answers = envoy.client().burst(40, 4, |_| Request::get("/"));
    assert_all_ok(&answers);
    for answer in answers.iter().flatten() {
        assert!(answer.elapsed >= MS(40), "before the deadline: {:?}", answer.elapsed);
        // Generous: the overshoot is measured by `cargo xtask bench cost -- --only deadline`.
        assert!(answer.elapsed < MS(400), "long after the deadline: {:?}", answer.elapsed);
    }
    let after = envoy.prequal(SERVING)?;
    // The calls time out 10 ms after the deadline. On a stalled machine, Envoy may notice that first.
    let (deadline, all_ended) = (after.waits("deadline"), after.waits("all_ended"));
    assert!(deadline >= 30 && deadline + all_ended == 40 && after.picks("sync") == 0, "{after:#?}");
    assert_no_crash(&envoy);
    Ok(())
}

#[test]
fn with_dead_agents_requests_continue_at_once() -> Result<()> {
    bed!();
    let fleet = stand_ins(3, |_| Reply::ok(), |addr| with_load(report(1, 2000, addr)))?;
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
    let unprobed = start(&addrs(&fleet), json!({"probe_cluster": "no-such-cluster"}))?;
    let answers = unprobed.client().burst(50, 2, |_| Request::get("/"));
    assert_all_ok(&answers);
    assert!(answers.iter().flatten().all(|answer| answer.elapsed < MS(900)));
    let after = unprobed.prequal(SERVING)?;
    assert_eq!((after.waits("unasked"), after.probes("sent")), (50, 0), "{after:#?}");
    assert_no_crash(&unprobed);
    Ok(())
}

#[test]
fn failed_calls_end_and_are_never_used() -> Result<()> {
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
    // The calls time out 10 ms after the deadline. On a stalled machine, Envoy may notice that first.
    let over = ["deadline", "all_ended", "aborted"].map(|end| after.waits(end)).iter().sum::<u64>();
    assert_eq!(over, 20, "{after:#?}");
    assert_no_crash(&envoy);
    Ok(())
}
