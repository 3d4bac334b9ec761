//! The other contents of reports: failures, age, latency, endpoint. Claims of clients and backends are ignored.

use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use prequal_testbed::{Backend, Body, Client, Envoy, Reply, Request, eventually};
use serde_json::{Value, json};

use super::{MS, beside, probe, report_in, wait_for_count, with};
use crate::support::{PROBE_PATH, assert_no_prequal_headers, bed};

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
        wait_for_count(&envoy, "failure", failures);
    }
    wait_for_count(&envoy, "success", 8 + 15);
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
    let reported = report_in(&reply.headers)?;
    assert_eq!((reported.rif, reported.endpoint), (0, envoy.addr().to_string()));
    assert!(reply.header("x-prequal-rif").is_none() && reply.header("x-prequal-latency-us").is_none());
    let answer = envoy.client().send(spoof(Request::get(PROBE_PATH).header("accept", "application/json")))?;
    let reported = report_in(&answer.headers)?;
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
    assert_no_prequal_headers(&silent.client().get("/")?.headers);
    assert_eq!(probe(silent.addr())?.endpoint, silent.addr().to_string());
    Ok(())
}

#[test]
fn the_endpoint_can_be_configured() -> Result<()> {
    bed!();
    let backend = Backend::start(Reply::ok())?;
    let settings = json!({"role": "inbound", "endpoint": "[2001:db8::7]:8080"});
    let envoy = Envoy::start(with(beside(&backend)?, &settings))?;
    let reported = report_in(&envoy.client().get("/")?.headers)?;
    assert_eq!(reported.endpoint, "[2001:db8::7]:8080");
    let reported = probe(envoy.addr())?;
    assert_eq!(reported.endpoint, "[2001:db8::7]:8080");
    assert!(!reported.rest.contains("probe="), "another host's address must not be reported: {reported:?}");
    Ok(())
}
