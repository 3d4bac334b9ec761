//! Base latency and knee in reports. The time of slow clients, streams and aborted requests does not distort them.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use prequal_testbed::{Backend, Body, Client, Envoy, Reply, Request, WebSocket};

use super::{MS, Report, beside, probe, report_in, wait_for_count, wait_for_rif};
use crate::support::{assert_all_ok, bed};

/// Base latency and knee as reported on several connections, so by both workers.
fn capacities(addr: SocketAddr) -> Vec<(u64, u64)> {
    let field = |reported: &Report, name: &str| {
        let mut fields = reported.rest.split(';').filter_map(|field| field.strip_prefix(name)?.parse().ok());
        fields.next().unwrap_or_else(|| panic!("no {name} in {reported:?}"))
    };
    let reported = (0..12).map(|_| probe(addr).expect("a report"));
    reported.map(|reported| (field(&reported, "base="), field(&reported, "knee="))).collect()
}

/// Asserts that the base latency and the latency that both workers report are within `ms`.
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
    let reported = report_in(&answer.headers)?.rest;
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
        wait_for_rif(addr, 4, MS(900));
        for slow in slow {
            let answer = slow.join().expect("it ran")?;
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
    }
    // A worker that learns late of another worker's few requests may miss part of their time. But it never counts the
    // second in which a request waits for its client.
    wait_for_count(&envoy, "success", 8);
    assert_takes(addr, 5..=250);
    for _ in 0..4 {
        let mut socket = TcpStream::connect(addr)?;
        socket.write_all(b"GET /large HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")?;
        std::thread::sleep(MS(1000));
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer)?;
        assert!(answer.len() > 512 << 10);
    }
    wait_for_count(&envoy, "success", 12);
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
    wait_for_count(&envoy, "aborted", 30);
    // The time that aborted requests spent at the server counts, but none of them was served. If they counted as
    // departures, the base latency would be 32 ms.
    let reported = capacities(addr);
    assert!(reported.iter().all(|(base, _)| (90_000..=300_000).contains(base)), "{reported:?}");
    Ok(())
}
