//! `/readyz`, and the reports of a replica whose backend cannot serve.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{Reply, Running, agent, any_port, backend, dead_backend, eventually, fetch, text};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use prequal_core::wire::report::LoadReport;
use probe_agent::config::UpstreamHttp2;
use tokio::net::TcpListener;

/// Starts an agent whose `/readyz` makes this check.
fn checking(backend: SocketAddr, check: &str) -> Running {
    agent(backend, |config| {
        config.admin = Some(any_port());
        config.ready_check = check.parse().unwrap();
        config.limits.ready_timeout = Duration::from_millis(200);
    })
}

async fn readyz(agent: &Running) -> (StatusCode, String) {
    let (head, body) = fetch(agent.admin.unwrap(), "/readyz").await;
    (head.status, String::from_utf8(body.to_vec()).unwrap())
}

#[track_caller]
fn assert_not_ready((status, body): (StatusCode, String), says: &str) {
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(body.contains(says), "{body}");
}

/// Returns the share of failures in the reply to a probe.
async fn failing(agent: &Running) -> u16 {
    let (head, _) = fetch(agent.addr, "/prequal/probe").await;
    LoadReport::parse(head.headers["x-prequal-load"].to_str().unwrap()).unwrap().failing
}

#[tokio::test]
async fn a_backend_that_listens_is_ready() {
    let addr = dead_backend().await;
    let agent = checking(addr, "tcp");
    assert_not_ready(readyz(&agent).await, "not reachable");
    let _listener = TcpListener::bind(addr).await.unwrap();
    assert_eq!(readyz(&agent).await, (StatusCode::OK, "ok\n".to_owned()));
}

/// Starts a backend that answers `/health?deep` with the status in `health`, or not at all if that is 0. Counts the
/// requests.
async fn with_health(health: Arc<AtomicU16>, asked: Arc<AtomicUsize>) -> SocketAddr {
    backend(move |req| {
        asked.fetch_add(1, Ordering::Relaxed);
        let asks_health = req.uri().path_and_query().is_some_and(|path| path == "/health?deep");
        let status = if asks_health { health.load(Ordering::Relaxed) } else { 404 };
        async move {
            if status == 0 {
                std::future::pending::<()>().await;
            }
            let mut reply = text("");
            *reply.status_mut() = StatusCode::from_u16(status).unwrap();
            reply
        }
    })
    .await
}

#[tokio::test]
async fn an_http_check_depends_on_the_status() {
    let (health, asked) = (Arc::new(AtomicU16::new(204)), Arc::default());
    let addr = with_health(health.clone(), asked).await;
    for http2 in [UpstreamHttp2::Auto, UpstreamHttp2::Always] {
        let agent = agent(addr, |config| {
            config.admin = Some(any_port());
            config.ready_check = "http:/health?deep".parse().unwrap();
            config.limits.ready_timeout = Duration::from_millis(200);
            config.upstream_http2 = http2;
        });
        for (status, says) in
            [(204, "ok"), (302, "ok"), (404, "404"), (503, "503"), (0, "in time"), (200, "ok")]
        {
            health.store(status, Ordering::Relaxed);
            let (answer, body) = readyz(&agent).await;
            assert_eq!(answer == StatusCode::OK, says == "ok", "{status}");
            assert!(body.contains(says), "{status}: {body}");
        }
    }
}

/// Returns a gRPC answer: headers alone, or with a message and trailers.
fn grpc(status: &'static str, message: &'static [u8]) -> Reply {
    let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static(status))]);
    let mut reply = if message.is_empty() {
        let mut reply = text("");
        reply.headers_mut().extend(trailers);
        reply
    } else {
        let body =
            Full::from(Bytes::from_static(message)).with_trailers(std::future::ready(Some(Ok(trailers))));
        Response::new(body.map_err(|never| match never {}).boxed())
    };
    reply.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
    reply
}

#[tokio::test]
async fn a_grpc_check_depends_on_the_health_service() {
    let addr = backend(|req| async {
        assert_eq!(req.uri().path(), "/grpc.health.v1.Health/Check");
        let request = req.into_body().collect().await.unwrap().to_bytes();
        match &request[..] {
            b"\0\0\0\0\0" => grpc("0", b"\0\0\0\0\x02\x08\x01"),
            b"\0\0\0\0\x06\x0a\x04cart" => grpc("0", b"\0\0\0\0\x02\x08\x02"),
            b"\0\0\0\0\x06\x0a\x04shop" => grpc("0", b"\0\0\0\0\0"),
            _ => grpc("5", b""),
        }
    })
    .await;
    assert_eq!(readyz(&checking(addr, "grpc")).await.0, StatusCode::OK);
    assert_not_ready(readyz(&checking(addr, "grpc:cart")).await, "not SERVING");
    assert_not_ready(readyz(&checking(addr, "grpc:shop")).await, "not SERVING");
    assert_not_ready(readyz(&checking(addr, "grpc:unknown")).await, "gRPC status 5");
}

#[tokio::test]
async fn a_replica_reports_that_everything_fails_until_its_backend_is_back() {
    let addr = dead_backend().await;
    let agent = checking(addr, "tcp");
    assert_eq!(failing(&agent).await, 0, "no request or check has come");
    assert_eq!(fetch(agent.addr, "/").await.0.status, StatusCode::BAD_GATEWAY);
    assert_eq!(failing(&agent).await, 1000);
    let _listener = TcpListener::bind(addr).await.unwrap();
    eventually("it is found without a request", || agent.load.is_ready()).await;
    assert!(failing(&agent).await <= 250, "one request has failed");
}

#[tokio::test]
async fn checks_are_repeated_only_while_the_backend_cannot_serve() {
    let (health, asked) = (Arc::new(AtomicU16::new(503)), Arc::<AtomicUsize>::default());
    let agent = checking(with_health(health.clone(), asked.clone()).await, "http:/health?deep");
    assert_not_ready(readyz(&agent).await, "503");
    assert_eq!(failing(&agent).await, 1000);
    assert_eq!(fetch(agent.addr, "/").await.0.status, StatusCode::NOT_FOUND, "connections are accepted");
    assert_eq!(failing(&agent).await, 1000);
    health.store(200, Ordering::Relaxed);
    eventually("it is ready", || agent.load.is_ready()).await;
    assert_eq!(failing(&agent).await, 0);
    let before = asked.load(Ordering::Relaxed);
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(asked.load(Ordering::Relaxed), before);
}
