//! Input from a hostile or broken client: it is refused with a clear status, the connection stays in a sane state, and
//! RIF is zero.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Running, agent, backend, raw, text, within};
use http_body_util::BodyExt;
use probe_agent::config::AgentConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Starts an agent, and counts the requests that reach its backend.
async fn counted(change: impl FnOnce(&mut AgentConfig)) -> (Running, Arc<AtomicUsize>) {
    let hits = Arc::new(AtomicUsize::new(0));
    let counter = hits.clone();
    let addr = backend(move |req| {
        counter.fetch_add(1, Ordering::Relaxed);
        async {
            let _ = req.into_body().collect().await;
            text("hello")
        }
    })
    .await;
    (agent(addr, change), hits)
}

#[tokio::test]
async fn ambiguous_framing_and_malformed_heads_get_400_and_close_the_connection() {
    let (agent, hits) = counted(|_| {}).await;
    let tail = "0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n";
    for (name, head) in [
        (
            "CL then TE",
            "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        ),
        (
            "TE then CL",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n",
        ),
        ("CL differs", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n"),
        ("CL list", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5, 6\r\n\r\n"),
        ("CL signed", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +5\r\n\r\n"),
        ("CL negative", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n"),
        ("CL hex", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0x5\r\n\r\n"),
        ("CL huge", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999\r\n\r\n"),
        ("TE unknown", "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n"),
        (
            "TE twice",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
        ),
        ("TE stacked", "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n"),
        ("TE not last", "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n\r\n"),
        ("TE in 1.0", "POST / HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"),
        ("space before colon", "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding : chunked\r\n\r\n"),
        ("folded line", "POST / HTTP/1.1\r\nhost: a\r\nx: b\r\n c\r\n\r\n"),
        ("NUL in a value", "POST / HTTP/1.1\r\nhost: a\r\nx: b\0c\r\n\r\n"),
        ("CR in a value", "POST / HTTP/1.1\r\nhost: a\r\nx: b\rc\r\n\r\n"),
        ("no host", "GET / HTTP/1.1\r\n\r\n"),
        ("two hosts", "GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n"),
        ("no version", "GET /\r\n\r\n"),
        ("garbage", "\x01\x02\x03\r\n\r\n"),
        ("bad target", "GET /a b HTTP/1.1\r\nhost: a\r\n\r\n"),
    ] {
        let reply = raw(agent.addr, &format!("{head}{tail}")).await;
        assert!(reply.starts_with("HTTP/1.1 400 "), "{name}: {reply}");
        assert_eq!(reply.matches("HTTP/1.1 ").count(), 1, "{name}: nothing after the refusal\n{reply}");
        assert_eq!(hits.load(Ordering::Relaxed), 0, "{name} got through");
    }
    agent.at_rest([0, 0, 0, 0]).await;
}

#[tokio::test]
async fn unambiguous_framing_is_accepted() {
    let (agent, hits) = counted(|_| {}).await;
    for request in [
        "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: Chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 2\r\n\r\nab",
        "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nab",
        "GET / HTTP/1.0\r\n\r\n",
        "GET http://a/b HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
    ] {
        let reply = raw(agent.addr, request).await;
        assert!(reply.contains(" 200 OK\r\n"), "{request}: {reply}");
    }
    // Two pipelined requests, and then chunked requests that follow one another on the same connection.
    let two = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\naGET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    assert_eq!(raw(agent.addr, two).await.matches(" 200 OK\r\n").count(), 2);
    assert_eq!(hits.load(Ordering::Relaxed), 8);
    let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
    for _ in 0..3 {
        tcp.write_all(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
        tcp.write_all(b"3\r\nabc\r\n0\r\n\r\n").await.unwrap();
        let head = within(crate::common::read_head(&mut tcp)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        within(tcp.read_exact(&mut [0; 5])).await.unwrap();
    }
    agent.at_rest([11, 0, 0, 0]).await;
}

#[tokio::test]
async fn tunnels_are_refused() {
    let (agent, hits) = counted(|_| {}).await;
    let reply =
        raw(agent.addr, "CONNECT evil:22 HTTP/1.1\r\nhost: evil:22\r\nconnection: close\r\n\r\n").await;
    assert!(reply.starts_with("HTTP/1.1 405 "), "{reply}");
    assert_eq!(hits.load(Ordering::Relaxed), 0);
    let h2c = "GET / HTTP/1.1\r\nhost: a\r\nconnection: close, upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n";
    assert!(raw(agent.addr, h2c).await.starts_with("HTTP/1.1 200 "), "an h2c upgrade is ignored");
    agent.at_rest([1, 0, 0, 0]).await;
}

#[tokio::test]
async fn oversized_heads_and_too_many_headers_get_431() {
    let (agent, hits) = counted(|_| {}).await;
    let long = format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "y".repeat(70_000));
    let many = format!("GET / HTTP/1.1\r\nhost: a\r\n{}\r\n", "x: y\r\n".repeat(101));
    for (name, head) in [("long", long), ("many", many)] {
        let reply = raw(agent.addr, &head).await;
        assert!(reply.starts_with("HTTP/1.1 431 "), "{name}: {reply:.80}");
    }
    assert_eq!(hits.load(Ordering::Relaxed), 0);
    agent.at_rest([0, 0, 0, 0]).await;
    let fits = format!("GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx: {}\r\n\r\n", "y".repeat(60_000));
    assert!(raw(agent.addr, &fits).await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn slow_heads_end_a_connection_and_idling_does_not() {
    let (agent, hits) = counted(|config| config.limits.header_timeout = Duration::from_millis(100)).await;
    // A new connection, a kept-alive one, and one that dribbles the HTTP/2 preface.
    for (first, dribble) in [("", "GET / HTTP/1.1\r\nx: "), (GET, "GET / HTTP/1.1\r\nx: "), ("", "PRI * HT")]
    {
        let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
        if !first.is_empty() {
            tcp.write_all(first.as_bytes()).await.unwrap();
            within(crate::common::read_head(&mut tcp)).await;
            within(tcp.read_exact(&mut [0; 5])).await.unwrap();
            // The connection is idle for longer than a head may take, which is allowed.
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        tcp.write_all(dribble.as_bytes()).await.unwrap();
        let dribbling = async {
            loop {
                // With one more letter, the bytes would no longer be the start of a preface, and would be answered.
                if !dribble.starts_with("PRI") {
                    let _ = tcp.write_all(b"y").await;
                }
                if let Ok(read) =
                    tokio::time::timeout(Duration::from_millis(20), tcp.read(&mut [0; 64])).await
                {
                    return read;
                }
            }
        };
        let cut = within(dribbling).await;
        assert!(matches!(cut, Ok(0) | Err(_)), "{dribble:?} after {first:?}: {cut:?}");
    }
    assert_eq!(hits.load(Ordering::Relaxed), 1);
    agent.at_rest([1, 0, 0, 0]).await;
}

#[tokio::test]
async fn a_kept_alive_connection_outlives_the_time_for_one_head() {
    let (agent, hits) = counted(|config| config.limits.header_timeout = Duration::from_millis(100)).await;
    let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
    // Each head comes in two parts, so that each arms the deadline. Together they take far longer than the deadline.
    for served in 1..=8 {
        let (start, rest) = GET.split_at(10);
        tcp.write_all(start.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(40)).await;
        tcp.write_all(rest.as_bytes()).await.unwrap();
        within(crate::common::read_head(&mut tcp)).await;
        within(tcp.read_exact(&mut [0; 5])).await.unwrap();
        assert_eq!(hits.load(Ordering::Relaxed), served);
    }
}

const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

#[tokio::test]
async fn idle_connections_are_closed_eventually_and_busy_ones_are_not() {
    let addr = backend(|_| async {
        tokio::time::sleep(Duration::from_millis(600)).await;
        text("hello")
    })
    .await;
    let agent = agent(addr, |config| config.limits.idle_timeout = Duration::from_millis(500));
    let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
    let began = Instant::now();
    tcp.write_all(GET.as_bytes()).await.unwrap();
    let mut reply = String::new();
    within(tcp.read_to_string(&mut reply)).await.unwrap();
    assert!(reply.ends_with("hello"), "{reply}");
    assert!(began.elapsed() >= Duration::from_millis(1100), "closed before the limit: {:?}", began.elapsed());
    let mut silent = TcpStream::connect(agent.addr).await.unwrap();
    assert_eq!(within(silent.read(&mut [0; 1])).await.unwrap(), 0);
}
