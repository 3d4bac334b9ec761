//! Limits on requests and connections: each ends the right ones, counts them, and does not affect the rest.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::common::{
    Running, agent, any_port, backend, client1, client2, eventually, fetch, get, held_backend, raw_backend,
    read_head, text, within,
};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::channel::{Channel, Sender};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use probe_agent::config::{AgentConfig, UpstreamHttp2};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// An agent with an admin port.
fn counted(backend: SocketAddr, change: impl FnOnce(&mut AgentConfig)) -> Running {
    agent(backend, |config| {
        config.admin = Some(any_port());
        change(config);
    })
}

/// Waits until a sample of /metrics has this value.
async fn counts(agent: &Running, sample: &str, value: u64) {
    let line = format!("{sample} {value}");
    let began = Instant::now();
    loop {
        let (_, page) = fetch(agent.admin.unwrap(), "/metrics").await;
        let page = String::from_utf8(page.to_vec()).unwrap();
        if page.lines().any(|l| l == line) {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(10), "never {line}:\n{page}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn requests_beyond_the_rif_limit_are_marked_unsent() {
    let (addr, arrived, go) = held_backend().await;
    let agent = counted(addr, |config| config.limits.max_rif = 2.try_into().ok());
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut client = client1(agent.addr).await;
        held.push(tokio::spawn(async move { client.send_request(get("/")).await.unwrap().status() }));
        within(arrived.notified()).await;
    }
    for n in 1..=3 {
        let (head, _) = fetch(agent.addr, "/").await;
        assert_eq!(head.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(head.headers["x-prequal-failure"], "unsent");
        let load = head.headers["x-prequal-load"].to_str().unwrap();
        assert!(load.starts_with("2;") && !load.contains("fail="), "{load}");
        counts(&agent, "prequal_agent_shed_total", n).await;
    }
    let (head, _) = fetch(agent.addr, "/prequal/probe").await;
    assert_eq!((head.status, &head.headers["x-prequal-rif"]), (StatusCode::OK, &"2".parse().unwrap()));
    for held in held {
        go.notify_one();
        assert_eq!(within(held).await.unwrap(), StatusCode::OK);
    }
    agent.at_rest([2, 0, 0, 0]).await;
    go.notify_one();
    assert_eq!(fetch(agent.addr, "/").await.0.status, StatusCode::OK);
}

#[tokio::test]
async fn a_silent_connection_is_closed() {
    let addr = backend(|_| async { text("") }).await;
    let agent = counted(addr, |config| {
        config.probe_listen = Some(any_port());
        config.limits.silent_timeout = Duration::from_millis(200);
        config.limits.header_timeout = Duration::from_millis(300);
    });
    for (n, port) in [agent.addr, agent.probe.unwrap()].into_iter().enumerate() {
        let mut used = client1(port).await;
        used.send_request(get("/prequal/probe")).await.unwrap();
        let mut slow = TcpStream::connect(port).await.unwrap();
        slow.write_all(b"G").await.unwrap();
        let mut tcp = TcpStream::connect(port).await.unwrap();
        let began = Instant::now();
        assert_eq!(within(tcp.read(&mut [0; 1])).await.unwrap_or(0), 0);
        assert!(began.elapsed() >= Duration::from_millis(150));
        let n = n as u64 + 1;
        counts(&agent, "prequal_agent_closed_total{reason=\"silent\"}", n).await;
        assert_eq!(within(slow.read(&mut [0; 1])).await.unwrap_or(0), 0);
        counts(&agent, "prequal_agent_closed_total{reason=\"slow_head\"}", n).await;
        assert!(!used.is_closed(), "something was sent on it");
    }
}

/// Whether the two sides use HTTP/2: client, backend.
const VERSIONS: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];
const IDLE: Duration = Duration::from_millis(400);

fn impatient(backend: SocketAddr, http2: bool) -> Running {
    counted(backend, |config| {
        config.upstream_http2 = if http2 { UpstreamHttp2::Always } else { UpstreamHttp2::Never };
        config.limits.body_idle_timeout = Some(IDLE);
    })
}

type Body = Channel<Bytes, Infallible>;

async fn send(addr: SocketAddr, http2: bool, body: Body) -> hyper::Result<Response<Incoming>> {
    let request = Request::post("http://app.example/").header("host", "app.example").body(body).unwrap();
    if http2 {
        within(client2(addr).await.send_request(request)).await
    } else {
        let (head, body) = request.into_parts();
        let mut request = Request::from_parts(head, body);
        *request.uri_mut() = "/".parse().unwrap();
        within(client1(addr).await.send_request(request)).await
    }
}

fn no_body() -> Body {
    Channel::new(1).1
}

/// Sends up to `pieces` pieces with pauses. If `hold` is set, then sends nothing for a minute before the body ends.
async fn drip(mut tx: Sender<Bytes, Infallible>, pieces: usize, hold: bool) {
    for _ in 0..pieces {
        if tx.send_data(Bytes::from_static(b"drip")).await.is_err() {
            return;
        }
        tokio::time::sleep(IDLE / 3).await;
    }
    if hold {
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
}

#[tokio::test]
async fn a_stalled_body_ends_its_request() {
    // Answers with a body: one piece and then nothing.
    let addr = backend(|req| async move {
        if req.headers().contains_key("x-discard") {
            let _ = req.into_body().collect().await;
            return text("late");
        }
        let (tx, body) = Channel::<Bytes, Infallible>::new(1);
        let _upload = tokio::spawn(req.into_body().collect());
        tokio::spawn(drip(tx, 1, true));
        Response::new(body.map_err(|never| match never {}).boxed())
    })
    .await;
    for (down, up) in VERSIONS {
        let agent = impatient(addr, up);
        let response = send(agent.addr, down, no_body()).await.unwrap();
        let began = Instant::now();
        assert!(within(response.into_body().collect()).await.is_err(), "{down} {up}");
        assert!(began.elapsed() >= IDLE * 3 / 4, "{down} {up}");
        agent.at_rest([0, 0, 1, 0]).await;
        counts(&agent, "prequal_agent_cut_total{reason=\"body_idle\"}", 1).await;
    }
}

#[tokio::test]
async fn a_stalled_upload_is_aborted_at_the_backend_too() {
    for answers in [false, true] {
        let (ended, mut ends) = tokio::sync::mpsc::unbounded_channel();
        let addr = backend(move |req| {
            let ended = ended.clone();
            async move {
                let upload = async move { ended.send(req.into_body().collect().await.is_err()).unwrap() };
                if answers {
                    tokio::spawn(upload);
                    let (tx, body) = Channel::<Bytes, Infallible>::new(1);
                    tokio::spawn(drip(tx, 1, true));
                    return Response::new(body.map_err(|never| match never {}).boxed());
                }
                upload.await;
                text("")
            }
        })
        .await;
        for (down, up) in VERSIONS {
            let agent = impatient(addr, up);
            let (tx, body) = Channel::new(1);
            let sends = tokio::spawn(drip(tx, 2, true));
            let answer = send(agent.addr, down, body).await;
            if answers {
                assert!(within(answer.unwrap().into_body().collect()).await.is_err(), "{down} {up}");
            } else {
                // The order is not defined. If the backend has broken off first, the agent sends an answer of its own.
                assert!(!answer.is_ok_and(|answer| answer.status().is_success()), "{down} {up}");
            }
            assert_eq!(within(ends.recv()).await, Some(true), "{answers} {down} {up}: a whole body");
            agent.at_rest([0, 0, 1, 0]).await;
            counts(&agent, "prequal_agent_cut_total{reason=\"body_idle\"}", 1).await;
            sends.abort();
        }
    }
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_cut() {
    let addr = backend(|_| async {
        let (mut tx, body) = Channel::<Bytes, Infallible>::new(1);
        tokio::spawn(async move { while tx.send_data(vec![b'x'; 100_000].into()).await.is_ok() {} });
        Response::new(body.map_err(|never| match never {}).boxed())
    })
    .await;
    for (down, up) in VERSIONS {
        let agent = impatient(addr, up);
        let response = send(agent.addr, down, no_body()).await.unwrap();
        eventually("it is in flight", || agent.load.rif() == 1).await;
        eventually("and then not", || agent.load.rif() == 0).await;
        counts(&agent, "prequal_agent_cut_total{reason=\"body_idle\"}", 1).await;
        assert!(within(response.into_body().collect()).await.is_err(), "{down} {up}");
        agent.at_rest([0, 0, 1, 0]).await;
    }
}

#[tokio::test]
async fn slow_bodies_and_waits_for_a_response_are_not_cut() {
    let addr = backend(|req| async move {
        let _ = req.into_body().collect().await;
        tokio::time::sleep(IDLE * 3).await;
        let (tx, body) = Channel::<Bytes, Infallible>::new(1);
        tokio::spawn(drip(tx, 9, false));
        Response::new(body.map_err(|never| match never {}).boxed())
    })
    .await;
    let runs: Vec<_> = VERSIONS
        .into_iter()
        .map(|(down, up)| {
            tokio::spawn(async move {
                let agent = impatient(addr, up);
                let (tx, body) = Channel::new(1);
                tokio::spawn(drip(tx, 9, false));
                let response = send(agent.addr, down, body).await.unwrap();
                let body = within(response.into_body().collect()).await.unwrap().to_bytes();
                assert_eq!(body, "drip".repeat(9), "{down} {up}");
                agent.at_rest([1, 0, 0, 0]).await;
            })
        })
        .collect();
    for run in runs {
        run.await.unwrap();
    }
}

#[tokio::test]
async fn streams_end_at_the_age_limit_and_downloads_do_not() {
    let addr = backend(|req| async move {
        let (tx, body) = Channel::<Bytes, Infallible>::new(1);
        tokio::spawn(drip(tx, 9, false));
        let mut response = Response::new(body.map_err(|never| match never {}).boxed());
        if let Some(kind) = req.headers().get("x-kind") {
            response.headers_mut().insert("content-type", kind.clone());
        }
        response
    })
    .await;
    for (down, kind, outcomes) in [
        (false, Some("text/event-stream"), [0, 0, 0, 1]),
        (true, Some("text/event-stream"), [0, 0, 0, 1]),
        (true, Some("application/grpc"), [0, 0, 1, 0]),
        (false, None, [1, 0, 0, 0]),
        (true, None, [1, 0, 0, 0]),
    ] {
        let agent = counted(addr, |config| {
            config.upstream_http2 = UpstreamHttp2::Always;
            config.limits.max_stream_age = Some(IDLE);
        });
        let mut request = Request::get("http://app.example/").body(Empty::<Bytes>::new()).unwrap();
        request.headers_mut().insert("host", "app.example".parse().unwrap());
        if let Some(kind) = kind {
            request.headers_mut().insert("x-kind", kind.parse().unwrap());
        }
        let response = if down {
            client2(agent.addr).await.send_request(request).await
        } else {
            client1(agent.addr).await.send_request(request).await
        };
        let body = within(response.unwrap().into_body().collect()).await;
        assert_eq!(body.is_err(), kind.is_some(), "{down} {kind:?}");
        agent.at_rest(outcomes).await;
        let cut = u64::from(kind.is_some());
        counts(&agent, "prequal_agent_cut_total{reason=\"stream_age\"}", cut).await;
    }
}

#[tokio::test]
async fn tunnels_end_at_the_age_limit_or_when_silent() {
    let addr = raw_backend(|mut tcp| async move {
        read_head(&mut tcp).await;
        let reply = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n";
        tcp.write_all(reply).await.unwrap();
        let (mut read, mut write) = tcp.split();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    })
    .await;
    for (age, talks, reason) in [(true, true, "stream_age"), (false, false, "body_idle")] {
        let agent = counted(addr, |config| {
            let limit =
                if age { &mut config.limits.max_stream_age } else { &mut config.limits.body_idle_timeout };
            *limit = Some(IDLE);
        });
        let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
        tcp.write_all(b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n")
            .await
            .unwrap();
        read_head(&mut tcp).await;
        let began = Instant::now();
        let echo = async {
            let mut echo = [0; 4];
            for _ in 0..if talks { 1000 } else { 1 } {
                if tcp.write_all(b"ping").await.is_err() || tcp.read_exact(&mut echo).await.is_err() {
                    return;
                }
                tokio::time::sleep(IDLE / 10).await;
            }
            let _ = tcp.read(&mut echo).await;
        };
        within(echo).await;
        assert!(began.elapsed() >= IDLE * 3 / 4);
        agent.at_rest([0, 0, 0, 1]).await;
        counts(&agent, &format!("prequal_agent_cut_total{{reason=\"{reason}\"}}"), 1).await;
    }
}
