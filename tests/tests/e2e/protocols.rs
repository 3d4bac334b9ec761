//! HTTP/2, gRPC, WebSocket, streams: through Envoy, the filter and the agent.

use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use http::{HeaderValue, Version};
use prequal_testbed::{Body, Client, Prequal, Reply, Request, WebSocket};

use crate::support::{SERVING, assert_all_ok, bed, counted, grpc_reply, grpc_request, uniform_fleet};

#[test]
fn http2_and_grpc_pass_with_trailers() -> Result<()> {
    bed!();
    let (fleet, envoy) = uniform_fleet(3, &grpc_reply("0"))?;
    fleet.clear();
    let before = envoy.prequal(SERVING)?;
    let client = Client::http2(envoy.addr());
    for _ in 0..30 {
        let reply = client.send(grpc_request())?;
        assert_eq!(reply.status, 200);
        assert_eq!(reply.body, &b"\0\0\0\0\0"[..]);
        assert_eq!(reply.trailers.get("grpc-status").map(HeaderValue::as_bytes), Some(&b"0"[..]));
    }
    let after = envoy.prequal(SERVING)?;
    assert!(after.steered() - before.steered() >= 28, "{after:#?}");
    assert_eq!(after.outcomes("answer") - before.outcomes("answer"), 30, "{after:#?}");
    for seen in fleet.iter().flat_map(|replica| replica.backend.seen()) {
        assert_eq!(seen.version, Version::HTTP_2, "gRPC must reach the replica over HTTP/2");
        assert_eq!(seen.header("te"), Some("trailers"));
    }
    fleet.assert_idle();
    Ok(())
}

#[test]
fn grpc_errors_are_seen_as_failures() -> Result<()> {
    bed!();
    let (fleet, envoy) = uniform_fleet(2, &Reply::ok())?;
    let client = Client::http2(envoy.addr());
    let only = Reply::ok().header("grpc-status", "14").body(Body::Full(Bytes::new()));
    let grpc = only.clone().header("content-type", "application/grpc");
    let mut plain_trailers = grpc_reply("13");
    plain_trailers.headers.clear();
    // In a response that is not gRPC, this header means nothing.
    for (reply, fails) in [(grpc, 10), (grpc_reply("13"), 10), (only, 0), (plain_trailers, 0)] {
        for replica in fleet.iter() {
            replica.backend.set(reply.clone());
        }
        let before = envoy.prequal(SERVING)?;
        for _ in 0..10 {
            assert_eq!(client.send(grpc_request())?.status, 200);
        }
        let ended = |at: &Prequal| at.outcomes.values().sum::<u64>();
        let after = counted(&envoy, "ten ends", |now| ended(now) >= ended(&before) + 10);
        let failures = after.outcomes("upstream_failure") - before.outcomes("upstream_failure");
        assert_eq!(failures, fails, "{reply:?}: {before:#?} {after:#?}");
    }
    Ok(())
}

#[test]
fn a_websocket_is_one_request_in_flight() -> Result<()> {
    bed!();
    let (fleet, envoy) = uniform_fleet(2, &Reply::ok())?;
    for replica in fleet.iter() {
        replica.backend.set(Reply::ok().body(Body::Upgrade));
    }
    let mut socket = WebSocket::connect(envoy.addr(), "/socket")?;
    assert_eq!(socket.round_trip(b"to and fro")?, b"to and fro");
    let in_flight = fleet.iter().map(|replica| replica.agent.rif()).sum::<Result<u32>>()?;
    assert_eq!(in_flight, 1);
    assert_eq!(socket.round_trip(&[7; 4000])?, [7; 4000]);
    drop(socket);
    fleet.assert_idle();
    Ok(())
}

#[test]
fn bodies_stream_both_ways_and_a_broken_response_is_an_error() -> Result<()> {
    bed!();
    let (fleet, envoy) = uniform_fleet(2, &Reply::ok())?;
    let each = |reply: Reply| fleet.iter().for_each(|replica| replica.backend.set(reply.clone()));
    each(Reply::ok().body(Body::Echo));
    let big = Bytes::from(vec![b'z'; 4 << 20]);
    for client in [envoy.client(), Client::http2(envoy.addr())] {
        assert_eq!(client.send(Request::post("/", big.clone()))?.body, big);
    }
    let chunk = Bytes::from(vec![b'c'; 1000]);
    each(Reply::ok().body(Body::Stream { chunk, count: 50, gap: Duration::from_millis(1) }));
    assert_eq!(envoy.client().get("/")?.body.len(), 50_000);
    let before = envoy.prequal(SERVING)?;
    each(Reply::ok().body(Body::Broken(Bytes::from_static(b"half"))));
    for _ in 0..5 {
        assert!(envoy.client().get("/").is_err(), "a broken answer must not look whole");
    }
    fleet.assert_idle();
    let failures = before.outcomes("upstream_failure") + 5;
    let after = counted(&envoy, "five breaks", |now| now.outcomes("upstream_failure") >= failures);
    assert_eq!(after.outcomes("client_abort"), before.outcomes("client_abort"), "{after:#?}");
    each(Reply::ok());
    assert_all_ok(&envoy.client().burst(20, 2, |_| Request::get("/")));
    Ok(())
}
