//! HTTP/1.1 backends that close an idle connection just as the agent sends a request on it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::common::{Running, agent, client1, raw_backend, read_head, within};

/// How the backend closes a connection instead of answering.
#[derive(Clone, Copy)]
enum Close {
    /// Closes the connection with FIN, once it has read the request.
    Fin,
    /// Closes the connection with RST.
    Reset,
    /// Sends the start of a response first.
    Begun,
}

/// Starts a backend that closes the connection unless `answers` returns true for a request. `answers` gets the number
/// of the connection and the number of the request on it. Also returns the requests that the backend saw.
async fn backend<F>(close: Close, answers: F) -> (SocketAddr, Arc<Mutex<Vec<String>>>)
where
    F: Fn(usize, usize) -> bool + Copy + Send + Sync + 'static,
{
    let seen = Arc::<Mutex<Vec<String>>>::default();
    let (log, connections) = (seen.clone(), AtomicUsize::new(0));
    let addr = raw_backend(move |mut tcp| {
        let (log, connection) = (log.clone(), connections.fetch_add(1, Ordering::Relaxed));
        async move {
            for request in 0.. {
                let head = read_head(&mut tcp).await.to_lowercase();
                let Some(line) = head.lines().next() else { return };
                let len = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
                let mut body = vec![0; len.unwrap_or(0)];
                tcp.read_exact(&mut body).await.unwrap();
                log.lock()
                    .unwrap()
                    .push(format!("{line} {}", body.iter().filter(|byte| **byte == b'x').count()));
                if answers(connection, request) {
                    tcp.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
                    continue;
                }
                match close {
                    Close::Fin => {}
                    Close::Reset => tcp.set_zero_linger().unwrap(),
                    Close::Begun => tcp.write_all(b"HTTP/1.1 200").await.unwrap(),
                }
                return;
            }
        }
    })
    .await;
    (addr, seen)
}

/// Sends a request with a body of `len` bytes. Returns the status and the agent's signal for retries.
async fn send(agent: &Running, method: Method, len: usize) -> (StatusCode, String) {
    let body = Full::new(Bytes::from(vec![b'x'; len]));
    let request =
        Request::builder().method(method).uri("/").header("host", "app.example").body(body).unwrap();
    let response = within(client1(agent.addr).await.send_request(request)).await.unwrap();
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    assert_eq!(head.status == StatusCode::OK, body == "ok");
    let failure = head.headers.get("x-prequal-failure").map_or("", |value| value.to_str().unwrap());
    (head.status, failure.to_owned())
}

/// Answers the first request of each connection.
fn first(_: usize, request: usize) -> bool {
    request == 0
}

#[tokio::test]
async fn an_idempotent_request_on_a_connection_that_closes_is_sent_a_second_time() {
    for close in [Close::Fin, Close::Reset] {
        for (method, len) in [
            (Method::GET, 0),
            (Method::DELETE, 0),
            (Method::OPTIONS, 0),
            (Method::PUT, 1000),
            (Method::PUT, 60_000),
        ] {
            let (addr, seen) = backend(close, first).await;
            let agent = agent(addr, |_| {});
            for _ in 0..3 {
                let sent = send(&agent, method.clone(), len).await;
                assert_eq!(sent, (StatusCode::OK, String::new()), "{method} {len}");
            }
            let line = format!("{method} / HTTP/1.1 {len}").to_lowercase();
            assert_eq!(
                *seen.lock().unwrap(),
                vec![line; 5],
                "the second and third are sent twice, and whole"
            );
            assert_eq!(agent.load.counters().resent(), 2);
            agent.at_rest([3, 0, 0, 0]).await;
        }
    }
}

#[tokio::test]
async fn a_request_that_may_have_been_processed_is_not_sent_again() {
    for (close, method, len) in [
        (Close::Fin, Method::POST, 0),
        (Close::Reset, Method::POST, 1000),
        (Close::Fin, Method::PATCH, 10),
        // Too long to be kept.
        (Close::Fin, Method::PUT, 100_000),
        // The backend began to respond.
        (Close::Begun, Method::GET, 0),
    ] {
        let (addr, seen) = backend(close, first).await;
        let agent = agent(addr, |_| {});
        assert_eq!(send(&agent, method.clone(), len).await.0, StatusCode::OK);
        let sent = send(&agent, method.clone(), len).await;
        assert_eq!(sent, (StatusCode::BAD_GATEWAY, "unanswered".into()), "{method} {len}");
        assert_eq!((seen.lock().unwrap().len(), agent.load.counters().resent()), (2, 0));
        agent.at_rest([1, 1, 0, 0]).await;
    }
}

#[tokio::test]
async fn a_request_on_a_new_connection_is_sent_once_and_no_request_more_than_twice() {
    let (addr, seen) = backend(Close::Fin, |_, _| false).await;
    let fresh = agent(addr, |_| {});
    assert_eq!(send(&fresh, Method::GET, 0).await, (StatusCode::BAD_GATEWAY, "unanswered".into()));
    assert_eq!(seen.lock().unwrap().len(), 1);

    let (addr, seen) = backend(Close::Fin, |connection, request| (connection, request) == (0, 0)).await;
    let reused = agent(addr, |_| {});
    assert_eq!(send(&reused, Method::GET, 0).await.0, StatusCode::OK);
    // The first attempt may have been processed: the failure is not marked as unsent.
    assert_eq!(send(&reused, Method::GET, 0).await, (StatusCode::BAD_GATEWAY, "unanswered".into()));
    assert_eq!(seen.lock().unwrap().len(), 3);
    reused.at_rest([1, 1, 0, 0]).await;
}
