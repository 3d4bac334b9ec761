//! The binary as an operator sees it: what it prints, how it drains, what it says of bad flags. And TLS.

mod common;

use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use common::{agent, any_port, backend, client1, client2, fetch, get, text, within};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::sync::Notify;

struct Process {
    child: Child,
    service: SocketAddr,
    admin: SocketAddr,
}

impl Process {
    async fn start(upstream: SocketAddr, extra: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_probe-agent"))
            .args(["--listen", "127.0.0.1:0", "--admin", "0", "--upstream", &upstream.to_string()])
            .args(extra)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (mut service, mut admin) = (None, None);
        while let Some(line) = within(lines.next_line()).await.unwrap() {
            if let Some(addr) = line.strip_prefix("listening service=") {
                service = Some(addr.parse().unwrap());
            } else if let Some(addr) = line.strip_prefix("listening admin=") {
                admin = Some(addr.parse().unwrap());
            } else if line == "ready" {
                break;
            }
        }
        Self { child, service: service.unwrap(), admin: admin.unwrap() }
    }

    async fn terminate(&self) {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
    }
}

/// A backend that says when a request has arrived, and answers when it may go on.
async fn held_backend() -> (SocketAddr, Arc<Notify>, Arc<Notify>) {
    let (arrived, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (on_arrival, wait) = (arrived.clone(), go.clone());
    let addr = backend(move |_| {
        on_arrival.notify_one();
        let wait = wait.clone();
        async move {
            wait.notified().await;
            text("finished")
        }
    })
    .await;
    (addr, arrived, go)
}

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
    // Also one that idles: it is closed.
    let mut idle = TcpStream::connect(process.service).await.unwrap();
    process.terminate().await;
    assert_eq!(within(idle.read(&mut [0; 1])).await.unwrap_or(0), 0);
    for path in ["/healthz", "/readyz"] {
        assert_eq!(fetch(process.admin, path).await.0.status, StatusCode::SERVICE_UNAVAILABLE, "{path}");
    }
    assert!(TcpStream::connect(process.service).await.is_err(), "nothing new is taken");
    go.notify_one();
    let response = within(request).await.unwrap().unwrap();
    assert_eq!(response.headers()["connection"], "close");
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "finished");
    assert!(within(process.child.wait()).await.unwrap().success());
}

#[tokio::test]
async fn a_drain_ends_at_its_timeout() {
    let arrived = Arc::new(Notify::new());
    let on_arrival = arrived.clone();
    let addr = backend(move |_| {
        on_arrival.notify_one();
        async {
            std::future::pending::<()>().await;
            text("never")
        }
    })
    .await;
    let mut process = Process::start(addr, &["--drain-timeout-ms", "100", "--threads", "1"]).await;
    let mut tcp = TcpStream::connect(process.service).await.unwrap();
    tcp.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    within(arrived.notified()).await;
    process.terminate().await;
    assert!(within(process.child.wait()).await.unwrap().success());
}

#[tokio::test]
async fn metrics_and_environment() {
    let addr = backend(|_| async { text("hello") }).await;
    let process = Process::start(addr, &["--report", "probe-only"]).await;
    let (head, _) = fetch(process.service, "/").await;
    assert!(!head.headers.contains_key("x-prequal-load"));
    let (head, body) = fetch(process.admin, "/metrics").await;
    assert!(head.headers["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
    assert!(String::from_utf8_lossy(&body).contains("\nprequal_agent_requests_total{class=\"success\"} 1\n"));

    let output = Command::new(env!("CARGO_BIN_EXE_probe-agent"))
        .args(["--upstream", "127.0.0.1:1"])
        .env("PROBE_AGENT_LISTEN", "nonsense")
        .output()
        .await
        .unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("--listen"), "{output:?}");
}

#[tokio::test]
async fn hints_and_utilisation_are_flags() {
    let (addr, arrived, go) = held_backend().await;
    let flags = [
        "--hint-cache",
        "100",
        "--hint-divisor",
        "4",
        "--netflix-utilization",
        "5",
        "--netflix-target",
        "60",
    ];
    let process = Process::start(addr, &flags).await;
    let with_hint = |path: &str| {
        let mut request = get(path);
        request.headers_mut().insert("x-prequal-hint", "warm".parse().unwrap());
        request
    };
    go.notify_one();
    let response = client1(process.service).await.send_request(with_hint("/")).await.unwrap();
    assert_eq!(response.headers()["x-netflix.server.utilization"], "0, target=60");
    let _ = response.into_body().collect().await;
    within(arrived.notified()).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut client = client1(process.service).await;
        held.push(tokio::spawn(async move { client.send_request(get("/")).await.unwrap().status() }));
        within(arrived.notified()).await;
    }
    let rif = async |request| {
        let response = client1(process.service).await.send_request(request).await.unwrap();
        response.headers()["x-prequal-rif"].clone()
    };
    assert_eq!(rif(get("/prequal/probe")).await, "2");
    assert_eq!(rif(with_hint("/prequal/probe")).await, "1", "a quarter of two, rounded up");
    for held in held {
        go.notify_one();
        assert_eq!(within(held).await.unwrap(), StatusCode::OK);
    }
    let (_, metrics) = fetch(process.admin, "/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics);
    for line in [
        "prequal_agent_hints_total{result=\"scaled\"} 1",
        "prequal_agent_failing_ratio 0",
        "# TYPE prequal_agent_up_seconds gauge",
        "# TYPE prequal_agent_backend_ready gauge",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} not in\n{metrics}");
    }
}

#[tokio::test]
async fn an_address_in_use_is_named() {
    let taken = tokio::net::TcpListener::bind(any_port()).await.unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_probe-agent"))
        .args(["--listen", &addr, "--upstream", "127.0.0.1:1"])
        .output()
        .await
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains(&addr) && stderr.contains("service"), "{stderr}");
}

#[tokio::test]
async fn a_drain_closes_http2_after_its_streams() {
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
    common::eventually("the connection closes", || client.is_closed()).await;
    tokio::time::timeout(Duration::from_secs(5), async {
        while TcpStream::connect(agent.addr).await.is_ok() {}
    })
    .await
    .unwrap();
}
