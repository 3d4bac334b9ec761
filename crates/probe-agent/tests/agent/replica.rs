//! Contents of reports besides the load: what share of requests the replica fails, how long it has been up, and for
//! which queries it is ready.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{
    Running, agent, any_port, backend, client1, client2, dead_backend, eventually, fetch, get, raw_backend,
    read_head, text,
};
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::channel::Channel;
use http_body_util::{BodyExt, Empty};
use prequal_core::wire::report::LoadReport;
use probe_agent::config::Report;
use probe_agent::hint::Hook;
use probe_agent::load::HintSeen;
use probe_agent::utilization::Utilization;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

async fn probe(agent: &Running) -> LoadReport {
    let (head, _) = fetch(agent.addr, "/prequal/probe").await;
    LoadReport::parse(head.headers["x-prequal-load"].to_str().unwrap()).unwrap()
}

fn status(code: u16) -> crate::common::Reply {
    let mut reply = text("");
    *reply.status_mut() = StatusCode::from_u16(code).unwrap();
    reply
}

fn grpc(status: &'static str) -> crate::common::Reply {
    let (mut tx, body) = Channel::<Bytes, std::io::Error>::new(1);
    tokio::spawn(async move {
        let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), status.parse().unwrap())]);
        let _ = tx.send(Frame::trailers(trailers)).await;
    });
    let mut reply = Response::new(body.boxed());
    reply.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
    reply
}

#[tokio::test]
async fn probes_and_responses_carry_the_share_of_failures() {
    let served = Arc::new(AtomicUsize::new(0));
    let addr = backend(move |_| {
        let half = served.fetch_add(1, Ordering::Relaxed) % 2;
        async move { if half == 0 { text("ok") } else { status(503) } }
    })
    .await;
    let agent = agent(addr, |_| {});
    for _ in 0..40 {
        fetch(agent.addr, "/").await;
    }
    agent.at_rest([20, 20, 0, 0]).await;
    let failing = probe(&agent).await.failing;
    assert!((450..=550).contains(&failing), "{failing}");
    let (head, _) = fetch(agent.addr, "/").await;
    let report = LoadReport::parse(head.headers["x-prequal-load"].to_str().unwrap()).unwrap();
    assert!((400..=550).contains(&report.failing), "{report:?}");
}

#[tokio::test]
async fn failures_of_the_replica_count_and_those_of_the_client_do_not() {
    async fn fail_of(addr: SocketAddr) -> u16 {
        let agent = agent(addr, |config| config.limits.response_timeout = Some(Duration::from_millis(200)));
        for ended in 1..=4 {
            // Without HTTP/2, gRPC's trailers would not arrive.
            let request =
                Request::get(format!("http://{}/", agent.addr)).body(Empty::<Bytes>::new()).unwrap();
            let response = client2(agent.addr).await.send_request(request).await.unwrap();
            let _ = response.into_body().collect().await;
            eventually("the request ended", || agent.ended().iter().sum::<u64>() == ended).await;
        }
        probe(&agent).await.failing
    }
    // Four of four requests failed, minus the decay during the test.
    let all = |failing: u16, what: &str| assert!(failing > 700, "{what}: {failing}");
    all(fail_of(backend(|_| async { status(500) }).await).await, "500");
    all(fail_of(backend(|_| async { grpc("14") }).await).await, "gRPC unavailable in trailers");
    all(fail_of(dead_backend().await).await, "refused");
    let reset = raw_backend(|mut tcp| async move { drop(read_head(&mut tcp).await) }).await;
    all(fail_of(reset).await, "closed before a response");
    let silent = backend(|_| async {
        std::future::pending::<()>().await;
        text("")
    });
    all(fail_of(silent.await).await, "no response in time");
    assert_eq!(fail_of(backend(|_| async { status(404) }).await).await, 0, "404");
    assert_eq!(fail_of(backend(|_| async { grpc("5") }).await).await, 0, "gRPC not found");
}

/// Serves one request per connection, so that no connection outlives the task.
fn serve(listener: TcpListener) -> JoinHandle<()> {
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            read_head(&mut tcp).await;
            let _ = tcp.write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n").await;
        }
    })
}

#[tokio::test]
async fn uptime_starts_when_the_backend_is_reached_and_again_after_a_restart() {
    let addr = dead_backend().await;
    let agent = agent(addr, |_| {});
    assert_eq!(fetch(agent.addr, "/").await.0.status, StatusCode::BAD_GATEWAY);
    assert_eq!(probe(&agent).await.up_s, Some(0), "not up yet");

    let running = serve(TcpListener::bind(addr).await.unwrap());
    assert_eq!(fetch(agent.addr, "/").await.0.status, StatusCode::NO_CONTENT);
    eventually("it has been up for a second", || agent.load.up_s() >= 1).await;
    assert_eq!(fetch(agent.addr, "/").await.0.status, StatusCode::NO_CONTENT);
    assert!(probe(&agent).await.up_s >= Some(1), "another connection does not restart the age");

    running.abort();
    let _ = running.await;
    assert_eq!(fetch(agent.addr, "/").await.0.status, StatusCode::BAD_GATEWAY);
    assert_eq!(probe(&agent).await.up_s, Some(0), "gone");
    let _running = serve(TcpListener::bind(addr).await.unwrap());
    assert_eq!(fetch(agent.addr, "/").await.0.status, StatusCode::NO_CONTENT);
    assert_eq!(agent.load.up_s(), 0, "as cold as a new one");
    eventually("it grows old again", || agent.load.up_s() >= 1).await;
}

/// Sends one GET with these hints. Returns the headers of the answer.
async fn get_with(addr: SocketAddr, path: &str, hints: &[&str]) -> HeaderMap {
    let mut request = get(path);
    for hint in hints {
        request.headers_mut().append("x-prequal-hint", hint.parse().unwrap());
    }
    let (head, body) = client1(addr).await.send_request(request).await.unwrap().into_parts();
    let _ = body.collect().await;
    head.headers
}

fn load_of(headers: &HeaderMap) -> &str {
    headers["x-prequal-load"].to_str().unwrap()
}

/// Starts a backend that notes the hints it sees, and answers `/fail` with 500.
async fn noting_backend() -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let notes = seen.clone();
    let addr = backend(move |req| {
        let hints = req.headers().get_all("x-prequal-hint").iter();
        notes.lock().unwrap().extend(hints.map(|hint| hint.to_str().unwrap().to_owned()));
        async move { if req.uri().path() == "/fail" { status(500) } else { text("ok") } }
    })
    .await;
    (addr, seen)
}

#[tokio::test]
async fn a_recently_served_query_gets_a_reduced_load_report() {
    let (addr, seen) = noting_backend().await;
    let agent = agent(addr, |config| {
        config.hints = Some(Hook::recent(2, 10));
        config.probe_listen = Some(any_port());
    });
    let busy: Vec<_> = (0..30).map(|_| agent.load.start()).collect();
    get_with(agent.addr, "/fail", &["broken"]).await;
    let answer = get_with(agent.addr, "/", &["0123456789abcdef"]).await;
    assert!(load_of(&answer).starts_with("30;"), "piggybacked reports are for any query: {answer:?}");
    for port in [agent.addr, agent.probe.unwrap()] {
        let warm = get_with(port, "/prequal/probe", &["0123456789abcdef"]).await;
        assert!(load_of(&warm).starts_with("3;") && load_of(&warm).ends_with(";scaled=10"), "{warm:?}");
        assert_eq!(warm["x-prequal-rif"], "3");
        for hints in [&["other"][..], &["broken"], &[]] {
            let cold = get_with(port, "/prequal/probe", hints).await;
            assert!(load_of(&cold).starts_with("30;") && !load_of(&cold).contains("scaled"), "{cold:?}");
        }
    }
    for newer in ["a", "b"] {
        get_with(agent.addr, "/", &[newer]).await;
    }
    let forgotten = get_with(agent.addr, "/prequal/probe", &["0123456789abcdef"]).await;
    assert_eq!(forgotten["x-prequal-rif"], "30", "two are remembered");
    assert!(seen.lock().unwrap().is_empty(), "the backend sees no hints");
    drop(busy);
    let idle = get_with(agent.addr, "/prequal/probe", &["a"]).await;
    assert_eq!(idle["x-prequal-rif"], "0");
}

#[tokio::test]
async fn bad_hints_are_ignored_and_counted() {
    let (addr, seen) = noting_backend().await;
    let agent = agent(addr, |config| {
        config.hints = Some(Hook::recent(10, 10));
        config.forward_hint = true;
    });
    let huge = "h".repeat(32_768);
    for hints in [&[huge.as_str()][..], &["a b"], &[""], &["a", "b"]] {
        let answer = get_with(agent.addr, "/", hints).await;
        assert!(load_of(&answer).starts_with("0;"));
        assert_eq!(get_with(agent.addr, "/prequal/probe", hints).await["x-prequal-rif"], "0");
    }
    assert_eq!(agent.load.counters().hints(HintSeen::Ignored), 8);
    get_with(agent.addr, "/", &["good"]).await;
    assert_eq!(*seen.lock().unwrap(), ["good"], "forwarded when asked, the bad ones never");
    agent.at_rest([5, 0, 0, 0]).await;
}

#[tokio::test]
async fn hints_have_no_effect_without_a_hook() {
    let (addr, seen) = noting_backend().await;
    let agent = agent(addr, |_| {});
    let _busy: Vec<_> = (0..30).map(|_| agent.load.start()).collect();
    get_with(agent.addr, "/", &["a"]).await;
    assert_eq!(get_with(agent.addr, "/prequal/probe", &["a"]).await["x-prequal-rif"], "30");
    assert!(seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn utilisation_is_reported_if_configured_and_replaces_that_of_the_backend() {
    let addr = backend(|_| async {
        let mut reply = text("");
        reply.headers_mut().insert("x-netflix.server.utilization", "1".parse().unwrap());
        reply
    })
    .await;
    let agent = agent(addr, |config| {
        config.report = Report::ProbeOnly;
        config.utilization = Some(Utilization { max: NonZeroU32::new(8).unwrap(), target: Some(60) });
    });
    let _busy: Vec<_> = (0..3).map(|_| agent.load.start()).collect();
    let (head, _) = fetch(agent.addr, "/").await;
    let reported: Vec<_> = head.headers.get_all("x-netflix.server.utilization").iter().collect();
    assert_eq!(reported, ["37.5, target=60"]);
    assert!(!head.headers.contains_key("x-prequal-load"));
}
