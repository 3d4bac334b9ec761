//! The stream of load reports that a backend sends out of band: correct streams and faulty ones.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, header};
use http_body_util::BodyExt;
use http_body_util::channel::{Channel, Sender};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use probe_agent::load::{BackendSaid, BackendStreamEnd};
use prost::Message as _;
use tokio::net::TcpListener;
use tokio::sync::Notify;

use crate::common::{Reply, Running, agent, any_port, backend, eventually, fetch, raw_backend, text, within};
use crate::orca::{METHOD, Report, asking};

/// Answers calls of `METHOD` with what `talk` sends. `talk` gets the number of the call, from 0.
fn streams<F, R>(req: Request<Incoming>, calls: &AtomicUsize, talk: F) -> Reply
where
    F: FnOnce(usize, Request<Incoming>, Sender<Bytes>) -> R,
    R: Future<Output = ()> + Send + 'static,
{
    if req.uri().path() != METHOD {
        return text("hello");
    }
    let (sender, body) = Channel::<Bytes, Infallible>::new(1);
    tokio::spawn(talk(calls.fetch_add(1, Ordering::Relaxed), req, sender));
    let body = body.map_err(|never| match never {}).boxed();
    Response::builder().header(header::CONTENT_TYPE, "application/grpc").body(body).unwrap()
}

/// Starts a backend whose streams send what `talk` sends.
async fn reporting<F, R>(talk: F) -> (SocketAddr, Arc<AtomicUsize>)
where
    F: Fn(usize, Request<Incoming>, Sender<Bytes>) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    let calls = Arc::<AtomicUsize>::default();
    let counted = calls.clone();
    let addr = backend(move |req| {
        let reply = streams(req, &counted, talk.clone());
        async move { reply }
    });
    (addr.await, calls)
}

fn reading(addr: SocketAddr) -> Running {
    agent(addr, |config| {
        config.orca_from_backend = Some("utilization".parse().unwrap());
        config.orca_backend_stream = Some(Duration::from_millis(250));
        config.limits.backend_stream_silence = Duration::from_secs(2);
        config.admin = Some(any_port());
    })
}

/// A gRPC message.
fn framed(message: &[u8]) -> Vec<u8> {
    [&[0], &u32::try_from(message.len()).unwrap().to_be_bytes()[..], message].concat()
}

fn utilization(application_utilization: f64) -> Vec<u8> {
    framed(&Report { application_utilization, ..Report::default() }.encode_to_vec())
}

fn status(code: &'static str) -> HeaderMap {
    HeaderMap::from_iter([(HeaderName::from_static("grpc-status"), HeaderValue::from_static(code))])
}

/// Waits until a stream has ended like this.
async fn ends(agent: &Running, end: BackendStreamEnd) {
    eventually(&format!("a stream is {end:?}"), || agent.load.counters().backend_streams(end) > 0).await;
}

/// Waits until the backend's utilisation is this, in millionths.
async fn reports(agent: &Running, micro: Option<u64>) {
    eventually(&format!("the utilisation is {micro:?}"), || agent.load.backend_utilization_micro() == micro)
        .await;
}

#[tokio::test]
async fn reports_of_a_stream_are_used_and_the_stream_does_not_count_as_a_request() {
    let (next, asked) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (go, came) = (next.clone(), asked.clone());
    let (addr, calls) = reporting(move |_, req, mut sender| {
        let (go, came) = (go.clone(), came.clone());
        async move {
            assert_eq!(req.headers()["content-type"], "application/grpc");
            assert_eq!(req.into_body().collect().await.unwrap().to_bytes(), asking(250));
            came.notify_one();
            for micro in [0.25, 0.5] {
                go.notified().await;
                sender.send_data(utilization(micro).into()).await.unwrap();
            }
            std::future::pending::<()>().await;
        }
    })
    .await;
    let agent = reading(addr);
    within(asked.notified()).await;
    assert_eq!(agent.load.backend_utilization_micro(), None, "nothing yet");
    for micro in [250_000, 500_000] {
        next.notify_one();
        reports(&agent, Some(micro)).await;
    }
    assert_eq!((agent.load.rif(), agent.ended()), (0, [0; 4]));
    assert_eq!(fetch(agent.addr, "/").await.1, "hello");
    let (_, page) = fetch(agent.admin.unwrap(), "/metrics").await;
    for line in [
        "prequal_agent_backend_utilization_ratio 0.5\n",
        "prequal_agent_backend_reports_total{result=\"used\"} 2\n",
        "prequal_agent_backend_streams_total{end=\"closed\"} 0\n",
    ] {
        assert!(String::from_utf8_lossy(&page).contains(line), "{line}");
    }
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn bad_reports_are_counted_and_unreadable_data_ends_the_stream() {
    let value = |value: f64| framed(&Report { cpu_utilization: value, ..Report::default() }.encode_to_vec());
    let huge = || framed(&[10; 5000]);
    for (sends, result, end, micro) in [
        ([framed(b"\x09"), utilization(0.5)], BackendSaid::Malformed, None, Some(500_000)),
        ([value(f64::NAN), utilization(0.5)], BackendSaid::Partial, None, Some(500_000)),
        ([value(-1.0), utilization(0.5)], BackendSaid::Partial, None, Some(500_000)),
        ([value(f64::INFINITY), utilization(0.5)], BackendSaid::Partial, None, Some(500_000)),
        ([utilization(0.5), framed(b"")], BackendSaid::Used, None, None),
        ([utilization(0.5), huge()], BackendSaid::TooLong, Some(BackendStreamEnd::Malformed), Some(500_000)),
        ([vec![1, 0, 0, 0, 0], vec![]], BackendSaid::Malformed, Some(BackendStreamEnd::Malformed), None),
    ] {
        let what = format!("{sends:?}");
        let (addr, _) = reporting(move |call, _, mut sender| {
            // In pieces that do not end where messages end.
            let bytes = if call == 0 { sends.concat() } else { vec![] };
            async move {
                for piece in bytes.chunks(64) {
                    let _ = sender.send_data(Bytes::copy_from_slice(piece)).await;
                }
                std::future::pending::<()>().await;
            }
        })
        .await;
        let agent = reading(addr);
        eventually(&format!("{result:?} is counted: {what}"), || {
            agent.load.counters().backend_reports(result) > 0
        })
        .await;
        if let Some(end) = end {
            ends(&agent, end).await;
        }
        reports(&agent, micro).await;
        assert_eq!(fetch(agent.addr, "/").await.1, "hello");
    }
}

#[tokio::test]
async fn a_stalled_stream_is_opened_again_and_its_last_report_expires() {
    let (addr, calls) = reporting(|call, _, mut sender| async move {
        // Silent, then a report and silence, then a trickle that never completes a report.
        match call {
            0 => {}
            1 => sender.send_data(utilization(0.5).into()).await.unwrap(),
            _ => {
                for byte in framed(&[0; 4000]) {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    if sender.send_data(vec![byte].into()).await.is_err() {
                        break;
                    }
                }
            }
        }
        std::future::pending::<()>().await;
    })
    .await;
    let agent = agent(addr, |config| {
        config.orca_from_backend = Some("utilization".parse().unwrap());
        config.orca_backend_stream = Some(Duration::from_millis(100));
        config.limits.backend_stream_silence = Duration::from_millis(300);
    });
    ends(&agent, BackendStreamEnd::Stalled).await;
    reports(&agent, Some(500_000)).await;
    reports(&agent, None).await;
    eventually("the trickle stalls too", || {
        agent.load.counters().backend_streams(BackendStreamEnd::Stalled) >= 3
    })
    .await;
    assert!(calls.load(Ordering::Relaxed) >= 3);
    assert_eq!(fetch(agent.addr, "/").await.1, "hello");
}

#[tokio::test]
async fn a_flooding_stream_is_ended_while_requests_succeed() {
    let (addr, calls) = reporting(|call, _, mut sender| async move {
        let report = utilization(if call == 0 { 0.5 } else { 0.75 });
        let flood = Bytes::from(report.repeat(if call == 0 { 500 } else { 1 }));
        while sender.send_data(flood.clone()).await.is_ok() && call == 0 {}
        std::future::pending::<()>().await;
    })
    .await;
    let agent = reading(addr);
    ends(&agent, BackendStreamEnd::Flooded).await;
    let read = agent.load.counters().backend_reports(BackendSaid::Used);
    assert!(read <= 200, "{read} reports");
    for _ in 0..20 {
        assert_eq!(fetch(agent.addr, "/").await.1, "hello");
    }
    reports(&agent, Some(750_000)).await;
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn a_stream_that_ends_is_opened_again() {
    let (addr, calls) = reporting(|call, _, mut sender| async move {
        match call {
            // Cut before its trailers, then ended with a status.
            0 => {}
            1 => {
                sender.send_data(utilization(0.5).into()).await.unwrap();
                sender.send_trailers(status("14")).await.unwrap();
            }
            _ => {
                sender.send_data(utilization(0.75).into()).await.unwrap();
                std::future::pending::<()>().await;
            }
        }
    })
    .await;
    let agent = reading(addr);
    reports(&agent, Some(500_000)).await;
    reports(&agent, Some(750_000)).await;
    let closed = agent.load.counters().backend_streams(BackendStreamEnd::Closed);
    assert_eq!((closed, calls.load(Ordering::Relaxed)), (2, 3));
}

#[tokio::test]
async fn backends_without_the_service_still_serve_requests() {
    // A gRPC server that does not know the method.
    let calls = Arc::<AtomicUsize>::default();
    let counted = calls.clone();
    let grpc = backend(move |req: Request<Incoming>| {
        let called = req.uri().path() == METHOD;
        let mut reply = text(if called { "" } else { "hello" });
        if called {
            counted.fetch_add(1, Ordering::Relaxed);
            *reply.headers_mut() = status("12");
        }
        async move { reply }
    })
    .await;
    // A server that speaks HTTP/1.1 only.
    let http1 = raw_backend(|tcp| async move {
        let service = service_fn(async |_| Ok::<_, Infallible>(text("hello")));
        let served = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(tcp), service);
        let _ = served.await;
    })
    .await;
    for (addr, end) in [(grpc, BackendStreamEnd::Unimplemented), (http1, BackendStreamEnd::Unopened)] {
        let agent = reading(addr);
        ends(&agent, end).await;
        assert_eq!(fetch(agent.addr, "/").await.1, "hello");
        assert!(agent.load.is_ready());
    }
    assert_eq!(calls.load(Ordering::Relaxed), 1, "asked again in a minute");
}

/// Serves the agent's first connection with `answer`. Once `begun` is ready, shuts down gracefully, and waits until the
/// connection has ended.
async fn drains<F>(
    listener: TcpListener,
    answer: impl Fn(Request<Incoming>) -> F + Send + 'static,
    begun: impl Future<Output = ()>,
) where
    F: Future<Output = Reply> + Send + 'static,
{
    let (tcp, _) = within(listener.accept()).await.unwrap();
    let service = service_fn(|req| {
        let reply = answer(req);
        async { Ok::<_, Infallible>(reply.await) }
    });
    let mut served = std::pin::pin!(
        http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(tcp), service)
    );
    tokio::select! {
        _ = &mut served => panic!("the connection ended"),
        () = begun => {}
    }
    served.as_mut().graceful_shutdown();
    // The connection ends once its streams have ended.
    let _ = within(served).await;
}

#[tokio::test]
async fn the_stream_does_not_delay_a_draining_backend() {
    let listener = TcpListener::bind(any_port()).await.unwrap();
    let agent = reading(listener.local_addr().unwrap());
    let calls = AtomicUsize::new(0);
    let answer = move |req| {
        let reply = streams(req, &calls, |_, _, mut sender| async move {
            while sender.send_data(utilization(0.5).into()).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        std::future::ready(reply)
    };
    drains(listener, answer, reports(&agent, Some(500_000))).await;
    ends(&agent, BackendStreamEnd::Closed).await;
}

#[tokio::test]
async fn an_unanswered_call_does_not_delay_a_draining_backend() {
    let listener = TcpListener::bind(any_port()).await.unwrap();
    let agent = agent(listener.local_addr().unwrap(), |config| {
        config.orca_from_backend = Some("utilization".parse().unwrap());
        config.orca_backend_stream = Some(Duration::from_millis(250));
    });
    let called = Arc::new(Notify::new());
    let call = called.clone();
    let answer = move |_| {
        call.notify_one();
        std::future::pending()
    };
    drains(listener, answer, within(called.notified())).await;
    ends(&agent, BackendStreamEnd::Closed).await;
}
