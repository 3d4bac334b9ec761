//! Unix sockets on either side of the agent.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::{Process, Running, agent, dead_backend, eventually, fetch, get, serve, text, within};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use probe_agent::config::{Listen, Upstream};
use tempfile::TempDir;
use tokio::net::{UnixListener, UnixSocket, UnixStream};
use tokio::process::Command;

fn unix_backend(path: &Path) {
    accept(UnixListener::bind(path).unwrap());
}

fn accept(listener: UnixListener) {
    tokio::spawn(async move {
        while let Ok((unix, _)) = listener.accept().await {
            tokio::spawn(serve(unix, |req| async move {
                let mut reply = text("hello");
                let host = req.headers().get("host").cloned().unwrap_or("none".parse().unwrap());
                reply.headers_mut().insert("x-host", host);
                reply
            }));
        }
    });
}

async fn between(dir: &TempDir) -> (Running, PathBuf, PathBuf) {
    let (front, back) = (dir.path().join("agent.sock"), dir.path().join("app.sock"));
    let upstream: Upstream = format!("unix:{}", back.display()).parse().unwrap();
    let agent = agent(dead_backend().await, |config| {
        config.listen = Listen::Unix(front.clone());
        config.upstream = upstream;
        config.advertise = Some("10.1.2.3:80".parse().unwrap());
        config.probe_listen = Some(crate::common::any_port());
    });
    (agent, front, back)
}

#[tokio::test]
async fn requests_pass_over_unix_sockets_in_both_versions() {
    let dir = tempfile::tempdir().unwrap();
    let (agent, front, back) = between(&dir).await;
    unix_backend(&back);
    let unix = UnixStream::connect(&front).await.unwrap();
    let (mut sender, conn) = http1::handshake(TokioIo::new(unix)).await.unwrap();
    tokio::spawn(conn);
    for _ in 0..2 {
        let response = within(sender.send_request(get("/"))).await.unwrap();
        assert_eq!(response.headers()["x-host"], "app.example");
        let load = response.headers()["x-prequal-load"].to_str().unwrap();
        assert!(load.starts_with("0;") && load.contains(";10.1.2.3:80"), "{load}");
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "hello");
    }
    assert_eq!(agent.load.counters().upstream_connections(), 1);
    let unix = UnixStream::connect(&front).await.unwrap();
    let (mut sender, conn) = http2::handshake(TokioExecutor::new(), TokioIo::new(unix)).await.unwrap();
    tokio::spawn(conn);
    let request = Request::get("http://app.example/").body(Empty::<Bytes>::new()).unwrap();
    let response = within(sender.send_request(request)).await.unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "hello");
    agent.at_rest([3, 0, 0, 0]).await;
    let probe = fetch(agent.probe.unwrap(), "/prequal/probe").await.0;
    let load = probe.headers["x-prequal-load"].to_str().unwrap();
    assert!(load.contains(";10.1.2.3:80"), "{load}");
    assert_eq!(agent.stop().await, 0);
    assert!(!front.exists(), "the file goes with its listener");
}

#[tokio::test]
async fn a_backend_without_its_socket_is_down() {
    let dir = tempfile::tempdir().unwrap();
    let (agent, front, back) = between(&dir).await;
    for left_behind in [false, true] {
        if left_behind {
            drop(std::os::unix::net::UnixListener::bind(&back).unwrap());
        }
        let unix = UnixStream::connect(&front).await.unwrap();
        let (mut sender, conn) = http1::handshake(TokioIo::new(unix)).await.unwrap();
        tokio::spawn(conn);
        let response = within(sender.send_request(get("/"))).await.unwrap();
        assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
        assert_eq!(response.headers()["x-prequal-failure"], "unsent");
        let load = response.headers()["x-prequal-load"].to_str().unwrap();
        assert!(load.contains(";fail=1000;up=0"), "{left_behind}: {load}");
    }
    std::fs::remove_file(&back).unwrap();
    unix_backend(&back);
    eventually("the agent finds it", || agent.load.is_ready()).await;
}

async fn request(front: &Path) -> Response<Incoming> {
    let unix = UnixStream::connect(front).await.unwrap();
    let (mut sender, conn) = http1::handshake(TokioIo::new(unix)).await.unwrap();
    tokio::spawn(conn);
    within(sender.send_request(get("/"))).await.unwrap()
}

#[tokio::test]
async fn a_backend_that_accepts_late_fails_no_request() {
    let dir = tempfile::tempdir().unwrap();
    let (agent, front, back) = between(&dir).await;
    let listener = UnixSocket::new_stream().unwrap();
    listener.bind(&back).unwrap();
    let listener = listener.listen(1).unwrap();
    let requests: Vec<_> = (0..8)
        .map(|_| {
            let front = front.clone();
            tokio::spawn(async move { request(&front).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(200)).await;
    accept(listener);
    for request in requests {
        assert_eq!(within(request).await.unwrap().status(), StatusCode::OK);
    }
    agent.at_rest([8, 0, 0, 0]).await;
    assert!(agent.load.counters().upstream_errors().all(|(_, count)| count == 0));
}

#[tokio::test]
async fn a_backend_that_does_not_accept_causes_a_504() {
    let dir = tempfile::tempdir().unwrap();
    let (agent, front, back) = between(&dir).await;
    let _listener = std::os::unix::net::UnixListener::bind(&back).unwrap();
    let mut queued = Vec::new();
    while let Ok(unix) = UnixStream::connect(&back).await {
        queued.push(unix);
    }
    let response = request(&front).await;
    assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(response.headers()["x-prequal-failure"], "unsent");
    agent.at_rest([0, 1, 0, 0]).await;
}

fn binary(listen: &Path, extra: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_probe-agent"));
    command.args(["--listen", &format!("unix:{}", listen.display()), "--upstream", "127.0.0.1:1"]);
    command.args(["--admin", "0"]).args(extra);
    command
}

#[tokio::test]
async fn only_the_socket_of_a_killed_agent_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.sock");
    let advertise = ["--advertise", "10.1.2.3:80"];
    let mut killed = Process::spawn(binary(&path, &advertise)).await;
    let output = within(binary(&path, &advertise).output()).await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && stderr.contains("in use") && stderr.contains("agent.sock"),
        "{stderr}"
    );
    assert!(UnixStream::connect(&path).await.is_ok(), "the first still listens");
    killed.child.kill().await.unwrap();
    assert!(path.exists());
    let again = Process::spawn(binary(&path, &advertise)).await;
    assert!(UnixStream::connect(&path).await.is_ok());
    again.terminate().await;
    let (status, _) = again.end().await;
    assert_eq!((status, path.exists()), (Some(0), false));

    std::fs::write(&path, "mine").unwrap();
    let output = within(binary(&path, &advertise).output()).await.unwrap();
    assert!(!output.status.success());
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");

    let output = within(binary(&path, &[]).output()).await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("needs --advertise"), "{stderr}");
}
