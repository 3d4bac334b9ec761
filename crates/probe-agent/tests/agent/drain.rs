//! How an agent ends: which requests it finishes, which it cuts, and how it reports this.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{
    Process, agent, backend, client1, client2, eventually, fetch, get, held_backend, raw_backend, read_head,
    text, within,
};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;

#[tokio::test]
async fn sigterm_drains_requests_in_flight_and_refuses_new_ones() {
    let (addr, arrived, go) = held_backend().await;
    let mut process = Process::start(addr, &[]).await;
    for path in ["/healthz", "/readyz"] {
        assert_eq!(fetch(process.admin, path).await.0.status, StatusCode::OK, "{path}");
    }
    let mut client = client1(process.service).await;
    let request = tokio::spawn(async move { client.send_request(get("/")).await });
    within(arrived.notified()).await;
    process.terminate().await;
    eventually("nothing new is taken", || std::net::TcpStream::connect(process.service).is_err()).await;
    for path in ["/healthz", "/readyz"] {
        assert_eq!(fetch(process.admin, path).await.0.status, StatusCode::SERVICE_UNAVAILABLE, "{path}");
    }
    go.notify_one();
    let response = within(request).await.unwrap().unwrap();
    assert_eq!(response.headers()["connection"], "close");
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "finished");
    assert!(within(process.child.wait()).await.unwrap().success());
}

/// Sends a request and reads its response, which must say `connection: close` and end.
async fn last_request(tcp: &mut TcpStream) {
    tcp.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut reply = String::new();
    within(tcp.read_to_string(&mut reply)).await.unwrap();
    let head = reply.to_ascii_lowercase();
    assert!(head.starts_with("http/1.1 200 ") && head.contains("\r\nconnection: close\r\n"), "{reply}");
    assert!(reply.ends_with("hello"), "{reply}");
}

#[tokio::test]
async fn a_request_in_transit_on_an_idle_connection_is_served_after_sigterm() {
    let addr = backend(|_| async { text("hello") }).await;
    let process = Process::start(addr, &[]).await;
    let mut used = TcpStream::connect(process.service).await.unwrap();
    used.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let head = read_head(&mut used).await;
    assert!(!head.to_ascii_lowercase().contains("connection: close"), "{head}");
    within(used.read_exact(&mut [0; 5])).await.unwrap();
    let mut fresh = TcpStream::connect(process.service).await.unwrap();
    // The agent accepts connections in order, so it has accepted the previous one.
    fetch(process.service, "/").await;
    process.terminate().await;
    eventually("nothing new is taken", || std::net::TcpStream::connect(process.service).is_err()).await;
    last_request(&mut used).await;
    last_request(&mut fresh).await;
    let (status, stderr) = process.end().await;
    assert_eq!((status, stderr.as_str()), (Some(0), ""));
}

#[tokio::test]
async fn idle_connections_are_closed_and_do_not_count_as_cut() {
    let addr = backend(|_| async { text("hello") }).await;
    for flags in [["--drain-idle-ms", "200"], ["--drain-timeout-ms", "200"]] {
        let process = Process::start(addr, &flags).await;
        let mut used = client1(process.service).await;
        used.send_request(get("/")).await.unwrap().into_body().collect().await.unwrap();
        let mut fresh = TcpStream::connect(process.service).await.unwrap();
        fetch(process.service, "/").await;
        process.terminate().await;
        assert_eq!(within(fresh.read(&mut [0; 1])).await.unwrap(), 0);
        eventually("both are closed", || used.is_closed()).await;
        assert_eq!(process.end().await, (Some(0), String::new()), "{flags:?}");
    }
}

#[tokio::test]
async fn requests_left_at_the_drain_deadline_are_cut_and_reported() {
    let addr = raw_backend(|mut tcp| async move {
        let head = read_head(&mut tcp).await;
        if head.starts_with("GET /tunnel") {
            let reply =
                b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n";
            tcp.write_all(reply).await.unwrap();
        }
        let _ = tcp.read(&mut [0; 1]).await;
        std::future::pending::<()>().await;
    })
    .await;
    for threads in ["1", "2"] {
        let process = Process::start(addr, &["--drain-timeout-ms", "300", "--threads", threads]).await;
        let mut hangs = TcpStream::connect(process.service).await.unwrap();
        hangs.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        let mut tunnel = TcpStream::connect(process.service).await.unwrap();
        let request = b"GET /tunnel HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n";
        tunnel.write_all(request).await.unwrap();
        read_head(&mut tunnel).await;
        let mut rif = String::new();
        while rif != "prequal_agent_rif 2" {
            let metrics = within(process.metrics()).await;
            rif = metrics.lines().find(|line| line.starts_with("prequal_agent_rif ")).unwrap().to_owned();
        }
        process.terminate().await;
        for tcp in [&mut hangs, &mut tunnel] {
            let ended = within(tcp.read(&mut [0; 1])).await;
            assert!(!matches!(ended, Ok(1..)), "{ended:?}");
        }
        let (status, stderr) = process.end().await;
        assert_eq!(
            (status, stderr.as_str()),
            (Some(3), "probe-agent: drain timed out: cut 2 requests in flight\n")
        );
    }
}

#[tokio::test]
async fn an_embedded_agent_leaves_nothing_after_its_drain() {
    let (addr, arrived, _go) = held_backend().await;
    let agent = agent(addr, |config| config.limits.drain_timeout = Duration::from_millis(50));
    let (load, mut over1, mut over2) =
        (agent.load.clone(), client1(agent.addr).await, client2(agent.addr).await);
    let request = Request::get("http://a/").body(Empty::<bytes::Bytes>::new()).unwrap();
    let over1 = tokio::spawn(async move { over1.send_request(get("/")).await });
    let over2 = tokio::spawn(async move { over2.send_request(request).await });
    within(arrived.notified()).await;
    eventually("both are in flight", || load.rif() == 2).await;
    assert_eq!(within(agent.stop()).await, 2);
    assert_eq!(load.rif(), 0);
    assert!(within(over1).await.unwrap().is_err() && within(over2).await.unwrap().is_err());
}

/// The test and the agent share a single thread, so the agent accepts nothing until the test waits.
#[tokio::test]
async fn connections_in_the_backlog_are_served_after_sigterm() {
    let addr = backend(|_| async { text("hello") }).await;
    let mut agent = agent(addr, |_| {});
    fetch(agent.addr, "/").await;
    // More connections than a task accepts at a time.
    let mut waiting: Vec<_> = (0..200)
        .map(|_| {
            let mut tcp = std::net::TcpStream::connect(agent.addr).unwrap();
            tcp.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").unwrap();
            tcp
        })
        .collect();
    agent.begin_stop();
    for tcp in waiting.drain(..) {
        tcp.set_nonblocking(true).unwrap();
        let mut reply = String::new();
        within(TcpStream::from_std(tcp).unwrap().read_to_string(&mut reply)).await.unwrap();
        assert!(reply.ends_with("hello"), "{reply}");
    }
}

#[tokio::test]
async fn clients_that_keep_sending_lose_no_request_at_sigterm() {
    let addr = backend(|_| async { text("hello") }).await;
    let mut process = Process::start(addr, &[]).await;
    let service = process.service;
    let served = Arc::new(Notify::new());
    let clients: Vec<_> = (0..16)
        .map(|n| {
            let served = served.clone();
            tokio::spawn(async move {
                let mut client = client1(service).await;
                // Like Envoy, use a connection until a response says that it ends.
                for sent in 0..100_000 {
                    let response = client.send_request(get("/")).await.unwrap();
                    assert_eq!(response.status(), StatusCode::OK);
                    let ends = response.headers().get("connection").is_some_and(|value| value == "close");
                    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "hello");
                    if ends {
                        return;
                    }
                    if sent == 20 {
                        served.notify_one();
                    }
                    // Some clients are often idle, some never.
                    tokio::time::sleep(Duration::from_millis(n % 4)).await;
                }
                panic!("never asked to leave");
            })
        })
        .collect();
    within(served.notified()).await;
    process.terminate().await;
    for client in clients {
        within(client).await.unwrap();
    }
    assert!(within(process.child.wait()).await.unwrap().success());
}

#[tokio::test]
async fn a_drain_closes_http2_connections_after_their_streams() {
    let (addr, arrived, go) = held_backend().await;
    let mut agent = agent(addr, |_| {});
    let mut client = client2(agent.addr).await;
    let request = Request::get(format!("http://{}/", agent.addr)).body(Empty::<bytes::Bytes>::new()).unwrap();
    let response = tokio::spawn(client.send_request(request));
    within(arrived.notified()).await;
    agent.begin_stop();
    go.notify_one();
    let body = within(response).await.unwrap().unwrap().into_body().collect().await.unwrap();
    assert_eq!(body.to_bytes(), "finished");
    agent.at_rest([1, 0, 0, 0]).await;
    eventually("the connection closes", || client.is_closed()).await;
    tokio::time::timeout(Duration::from_secs(5), async {
        while TcpStream::connect(agent.addr).await.is_ok() {}
    })
    .await
    .unwrap();
}
