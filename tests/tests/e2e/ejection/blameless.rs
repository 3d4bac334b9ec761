//! Requests that clients, Envoy or its limits end, which must not count against the replica.

use std::io::Write as _;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use bytes::Bytes;
use prequal_testbed::{Body, Client, Envoy, EnvoyConfig, Fleet, Reply, Request, SHIM_NAME};
use serde_json::json;

use super::{MS, assert_not_ejected, get, good, without_retries};
use crate::support::{
    SERVING, addrs, bed, counted, is_probe, report, set, stand_in, stand_ins, warm, with_load,
};

#[test]
fn client_aborts_do_not_eject() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(3, &Reply::ok().delay(MS(30)))?;
    // The limit on waiting is switched off: a client that aborts early is not meant to reach it, but on a busy machine
    // it might.
    let config = set(EnvoyConfig::for_replicas(&fleet.addrs())?, "ejection_wait_factor", 0);
    let envoy = Envoy::start(config)?;
    warm(&envoy, 3);
    let served = || fleet.served().iter().sum::<u64>();
    for client in [envoy.client(), Client::http2(envoy.addr())] {
        let given_up = (0..30).filter(|_| {
            let before = served();
            client.abandon_when(Request::get("/"), || served() > before)
        });
        assert!(given_up.count() >= 20, "too busy a machine: answers came first");
    }
    counted(&envoy, "aborts", |now| now.outcomes("client_abort") >= 40);
    // The filter applies what it learned from a request only when the next request arrives.
    assert_eq!(good(&get(&envoy.client(), 1)), 1);
    assert_not_ejected(&envoy);
    assert_eq!(good(&get(&envoy.client(), 100)), 100);
    Ok(())
}

#[test]
fn requests_that_envoy_refuses_are_not_counted_against_the_replica() -> Result<()> {
    bed!();
    let load = |addr| with_load(report(1, 5000, addr));
    let backends = stand_ins(3, load, move |addr| load(addr).delay(MS(20)))?;
    let config = without_retries(&addrs(&backends))?;
    let breaker = |keys: &[&str]| {
        config.clone().edit(|config| {
            let threshold = &mut config.cluster_mut(SERVING)["circuit_breakers"]["thresholds"][0];
            keys.iter().for_each(|key| threshold[key] = json!(1));
        })
    };
    let fault = config.clone().edit(|config| {
        let fault = "type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault";
        let abort = json!({"http_status": 503, "percentage": {"numerator": 80}});
        let settings = json!({"@type": fault, "abort": abort});
        config.insert_before(SHIM_NAME, json!({"name": "fault", "typed_config": settings}));
    });
    for (case, config) in [
        ("requests", breaker(&["max_requests"])),
        ("pending requests", breaker(&["max_connections", "max_pending_requests"])),
        ("fault", fault),
    ] {
        let envoy = Envoy::start(config)?;
        warm(&envoy, 3);
        let before = envoy.prequal(SERVING)?;
        let answers = get(&envoy.client(), 300);
        assert!(good(&answers) < 250, "{case}: nothing was refused: {}", good(&answers));
        let refused = (300 - good(&answers)) as u64;
        let local = before.outcomes("local") + refused;
        let after = counted(&envoy, case, |now| now.outcomes("local") >= local);
        assert_eq!(after.outcomes("upstream_failure"), 0, "{case}: {after:#?}");
        assert_not_ejected(&envoy);
    }
    Ok(())
}

#[test]
fn a_full_circuit_breaker_starts_no_cooldown() -> Result<()> {
    bed!();
    // One replica that is preferred, and enough others to choose from without it.
    let best = |addr| with_load(report(0, 5000, addr));
    let worse = |addr| with_load(report(3, 900_000, addr));
    let wanted = stand_in(best, move |addr| best(addr).delay(MS(20)))?;
    let mut backends = stand_ins(3, worse, worse)?;
    backends.insert(0, wanted);
    let config = without_retries(&addrs(&backends))?.edit(|config| {
        config.cluster_mut(SERVING)["circuit_breakers"]["thresholds"][0]["max_requests"] = json!(1);
    });
    let envoy = Envoy::start(config)?;
    warm(&envoy, 4);
    let (client, wanted) = (envoy.client(), &backends[0]);
    client.burst(20, 1, |_| Request::get("/"));
    // The refused request may have been for another replica, so try three times.
    for _ in 0..3 {
        wanted.clear();
        assert_eq!(good(&client.burst(2, 2, |_| Request::get("/"))), 1, "one was to be refused");
        // A cooldown would last for a second.
        assert_eq!(good(&client.burst(10, 1, |_| Request::get("/"))), 10);
        let served = wanted.seen().iter().filter(|seen| !is_probe(seen)).count();
        assert!(served >= 8, "{served} of 11");
    }
    Ok(())
}

#[test]
fn only_an_idle_stream_with_a_complete_request_counts_against_the_replica() -> Result<()> {
    bed!();
    let (part, whole) = ("123", "1234567890");
    for (case, limit, body, class) in [
        ("a part, and buffered", "stream_idle_timeout", part, "local"),
        ("a part", "stream_idle_timeout", part, "local"),
        ("the whole request", "stream_idle_timeout", whole, "upstream_failure"),
        ("the whole request", "max_stream_duration", whole, "local"),
    ] {
        let load = |addr| with_load(report(1, 5000, addr));
        let hang = Arc::new(AtomicBool::new(false));
        let backends = {
            let hang = Arc::clone(&hang);
            let body =
                move || if hang.load(Ordering::Relaxed) { Body::Hang } else { Body::Full(Bytes::new()) };
            stand_ins(2, load, move |addr| load(addr).body(body()))?
        };
        let envoy = Envoy::start(without_retries(&addrs(&backends))?.edit(|config| {
            let http = config.http_mut();
            if limit == "max_stream_duration" {
                http["common_http_protocol_options"][limit] = json!("0.2s");
            } else {
                http[limit] = json!("0.2s");
            }
            if case.ends_with("buffered") {
                let buffer = "type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer";
                let settings = json!({"@type": buffer, "max_request_bytes": 1000});
                config.insert_before(SHIM_NAME, json!({"name": "buffer", "typed_config": settings}));
            }
        }))?;
        let before = warm(&envoy, 2);
        hang.store(true, Ordering::Relaxed);
        let mut socket = TcpStream::connect(envoy.addr())?;
        write!(socket, "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{body}")?;
        counted(&envoy, &format!("{case}, {limit}"), |now| now.outcomes(class) == before.outcomes(class) + 1);
    }
    Ok(())
}
