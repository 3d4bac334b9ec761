//! HTTP/2 towards the backend: when the agent uses it, over how many connections, and what it sends again.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{
    Frame, agent, client2, eventually, frame, raw, raw_backend, read_frame, read_head, serve, text, within,
};
use bytes::Bytes;
use http::{Request, Response, StatusCode, response};
use http_body_util::channel::Channel;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use probe_agent::config::UpstreamHttp2;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};

fn ordinary() -> Request<Empty<Bytes>> {
    Request::get("http://app.example/").body(Empty::new()).unwrap()
}

fn grpc() -> Request<Empty<Bytes>> {
    let request = Request::post("http://app.example/").header("content-type", "application/grpc+proto");
    request.body(Empty::new()).unwrap()
}

async fn send(addr: SocketAddr, request: Request<Empty<Bytes>>) -> Response<Incoming> {
    within(client2(addr).await.send_request(request)).await.unwrap()
}

/// Returns the version that the backend saw.
async fn version(response: Response<Incoming>) -> String {
    assert_eq!(response.status(), StatusCode::OK);
    let body = within(response.into_body().collect()).await.unwrap().to_bytes();
    String::from_utf8(body.to_vec()).unwrap()
}

/// Starts a backend that speaks both versions, and returns the version of the request. `greet` runs before each
/// connection, with its number, and returns whether the connection goes on.
async fn backend_after<F, R>(greet: F) -> SocketAddr
where
    F: Fn(usize) -> R + Send + Sync + 'static,
    R: Future<Output = bool> + Send + 'static,
{
    let connections = AtomicUsize::new(0);
    raw_backend(move |tcp| {
        let greeted = greet(connections.fetch_add(1, Ordering::Relaxed));
        async move {
            if greeted.await {
                let version = |req: Request<Incoming>| async move {
                    let http2 = req.version() == http::Version::HTTP_2;
                    text(if http2 { "HTTP/2" } else { "HTTP/1.1" })
                };
                serve(tcp, version).await;
            }
        }
    })
    .await
}

#[tokio::test]
async fn late_settings_are_not_taken_as_a_refusal() {
    for request in [ordinary, grpc] {
        let addr = backend_after(|_| async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            true
        })
        .await;
        let agent = agent(addr, |config| config.limits.connect_timeout = Duration::from_millis(500));
        assert_eq!(version(send(agent.addr, request()).await).await, "HTTP/2");
    }
}

#[tokio::test]
async fn a_connection_with_very_late_settings_serves_later_requests() {
    let addr = backend_after(|_| async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        true
    })
    .await;
    let agent = agent(addr, |config| config.limits.connect_timeout = Duration::from_millis(100));
    for request in [ordinary, grpc] {
        assert_eq!(send(agent.addr, request()).await.status(), StatusCode::GATEWAY_TIMEOUT);
    }
    tokio::time::sleep(Duration::from_millis(400)).await;
    for request in [ordinary, grpc] {
        assert_eq!(version(send(agent.addr, request()).await).await, "HTTP/2");
    }
}

#[tokio::test]
async fn a_connection_closed_without_an_answer_is_not_taken_as_a_refusal() {
    for request in [ordinary, grpc] {
        let addr = backend_after(|connection| async move { connection > 0 }).await;
        let agent = agent(addr, |_| {});
        for _ in 0..3 {
            assert_eq!(version(send(agent.addr, request()).await).await, "HTTP/2");
        }
    }
}

/// Starts a backend that answers HTTP/1.1 requests with 200, and everything else with `refusal`.
async fn http1_only(refusal: &'static [u8]) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let heads = Arc::new(Mutex::new(Vec::new()));
    let seen = heads.clone();
    let addr = raw_backend(move |mut tcp| {
        let seen = seen.clone();
        async move {
            let head = read_head(&mut tcp).await;
            let http1 = head.contains(" HTTP/1.1\r\n");
            if http1 {
                seen.lock().unwrap().push(head);
            }
            let ok = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 8\r\n\r\nHTTP/1.1";
            let _ = tcp.write_all(if http1 { ok } else { refusal }).await;
        }
    })
    .await;
    (addr, heads)
}

#[tokio::test]
async fn grpc_is_never_sent_over_http1_and_other_requests_only_if_necessary() {
    for refusal in [&b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n"[..], b"?", b""] {
        let (addr, heads) = http1_only(refusal).await;
        let agent = agent(addr, |_| {});
        for _ in 0..2 {
            assert_eq!(send(agent.addr, grpc()).await.status(), StatusCode::BAD_GATEWAY);
            assert_eq!(version(send(agent.addr, ordinary()).await).await, "HTTP/1.1", "{refusal:?}");
        }
        let grpc = Request::post("http://app.example/").header("content-type", "application/grpc-web");
        assert_eq!(version(send(agent.addr, grpc.body(Empty::new()).unwrap()).await).await, "HTTP/1.1");
        assert_eq!(heads.lock().unwrap().len(), 3, "no gRPC among them");
        agent.at_rest([3, 2, 0, 0]).await;
    }
}

#[tokio::test]
async fn a_silent_connection_delays_no_request() {
    let addr = backend_after(|connection| async move {
        if connection == 0 {
            std::future::pending::<()>().await;
        }
        true
    })
    .await;
    let agent = agent(addr, |config| config.limits.connect_timeout = Duration::from_secs(4));
    let start = Instant::now();
    let requests = (0..8).map(|_| tokio::spawn(send(agent.addr, ordinary())));
    for request in requests.collect::<Vec<_>>() {
        assert_eq!(version(request.await.unwrap()).await, "HTTP/2");
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}

/// Starts a backend that allows `streams` on a connection, and counts the requests that it has begun to handle. Each
/// permit added to `go` lets one request end.
async fn limited(streams: u32) -> (SocketAddr, Arc<AtomicUsize>, Arc<Semaphore>) {
    let (in_hand, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
    let (counter, gate) = (in_hand.clone(), go.clone());
    let addr = raw_backend(move |tcp| {
        let (counter, gate) = (counter.clone(), gate.clone());
        let answer = move |_: Request<Incoming>| {
            let (counter, gate) = (counter.clone(), gate.clone());
            async move {
                counter.fetch_add(1, Ordering::Relaxed);
                gate.acquire().await.unwrap().forget();
                Ok::<_, Infallible>(text("HTTP/2"))
            }
        };
        async move {
            let _ = http2::Builder::new(TokioExecutor::new())
                .max_concurrent_streams(streams)
                .serve_connection(TokioIo::new(tcp), service_fn(answer))
                .await;
        }
    })
    .await;
    (addr, in_hand, go)
}

#[tokio::test]
async fn more_connections_are_opened_when_streams_run_out_and_are_then_reused() {
    let (addr, in_hand, go) = limited(3).await;
    let agent = agent(addr, |_| {});
    let client = client2(agent.addr).await;
    for round in 1..=3 {
        let mut requests = Vec::new();
        for _ in 0..10 {
            requests.push(tokio::spawn(client.clone().send_request(ordinary())));
        }
        eventually("all ten are in hand", || in_hand.load(Ordering::Relaxed) == 10 * round).await;
        go.add_permits(10);
        for request in requests {
            assert_eq!(version(within(request).await.unwrap().unwrap()).await, "HTTP/2");
        }
        agent.at_rest([10 * round as u64, 0, 0, 0]).await;
        assert_eq!(agent.load.counters().upstream_connections(), 4);
    }
}

#[tokio::test]
async fn a_backend_that_sends_empty_frames_loses_no_request() {
    let addr = raw_backend(|tcp| async move {
        let answer = |_: Request<Incoming>| async {
            let (mut body, channel) = Channel::<Bytes>::new(3);
            for part in ["HTTP", "", "/2"] {
                body.send_data(Bytes::from_static(part.as_bytes())).await.unwrap();
            }
            Ok::<_, Infallible>(Response::new(channel))
        };
        let server = http2::Builder::new(TokioExecutor::new());
        let _ = server.serve_connection(TokioIo::new(tcp), service_fn(answer)).await;
    })
    .await;
    let agent = agent(addr, |_| {});
    let client = client2(agent.addr).await;
    for _ in 0..60 {
        let requests = (0..5).map(|_| tokio::spawn(client.clone().send_request(grpc())));
        for request in requests.collect::<Vec<_>>() {
            assert_eq!(version(within(request).await.unwrap().unwrap()).await, "HTTP/2");
        }
    }
    // Each carries 50 requests, and the others that were in flight then.
    let connections = agent.load.counters().upstream_connections();
    assert!((6..=7).contains(&connections), "{connections}");
}

#[tokio::test]
async fn the_queue_for_streams_is_bounded_in_number_and_time() {
    let (addr, in_hand, go) = limited(1).await;
    let agent = agent(addr, |config| {
        config.limits.max_upstream_connections = 2;
        config.limits.max_upstream_waiting = 1;
        config.limits.connect_timeout = Duration::from_millis(300);
    });
    let client = client2(agent.addr).await;
    let request = || tokio::spawn(client.clone().send_request(ordinary()));
    let mut served = Vec::new();
    for connections in 1..=2 {
        served.push(request());
        eventually("it is in hand", || in_hand.load(Ordering::Relaxed) == connections).await;
    }
    for gives_up in [true, false] {
        let waits = request();
        eventually("a third waits", || agent.load.rif() == 3).await;
        let response = within(client.clone().send_request(ordinary())).await.unwrap();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, "probe-agent: backend has no HTTP/2 stream free\n");
        if !gives_up {
            go.add_permits(3);
        }
        let status = within(waits).await.unwrap().unwrap().status();
        assert_eq!(status, if gives_up { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK });
    }
    for request in served {
        assert_eq!(within(request).await.unwrap().unwrap().status(), StatusCode::OK);
    }
    agent.at_rest([3, 3, 0, 0]).await;
    assert!(agent.load.counters().upstream_errors().any(|error| error == ("no_stream", 3)));
}

#[tokio::test]
async fn clients_that_leave_the_queue_hold_no_stream() {
    let (addr, in_hand, go) = limited(1).await;
    let agent = agent(addr, |config| config.limits.max_upstream_connections = 1);
    let client = client2(agent.addr).await;
    let first = tokio::spawn(client.clone().send_request(ordinary()));
    eventually("one is in hand", || in_hand.load(Ordering::Relaxed) == 1).await;
    for _ in 0..20 {
        let waits = tokio::spawn(client.clone().send_request(ordinary()));
        eventually("another waits", || agent.load.rif() == 2).await;
        waits.abort();
        eventually("it has left", || agent.load.rif() == 1).await;
    }
    go.add_permits(2);
    assert_eq!(version(within(first).await.unwrap().unwrap()).await, "HTTP/2");
    assert_eq!(version(send(agent.addr, ordinary()).await).await, "HTTP/2");
    agent.at_rest([2, 0, 20, 0]).await;
}

/// Reaction of a raw backend to a request.
#[derive(Clone, Copy)]
enum Act {
    /// Reset the stream with this code.
    Reset(u32),
    /// Go away and name stream 0 as the last.
    GoAway,
}

/// Starts a backend that reacts to its first requests with `acts`, as soon as it has `after` bytes of the body, and
/// echoes all others. Also returns the number of requests seen.
async fn refusing(acts: &'static [Act], after: usize) -> (SocketAddr, Arc<AtomicUsize>) {
    let requests = Arc::new(AtomicUsize::new(0));
    let seen = requests.clone();
    let addr = raw_backend(move |mut tcp| {
        let seen = seen.clone();
        async move {
            greet(&mut tcp, &[(INITIAL_WINDOW_SIZE, 1 << 20), (MAX_CONCURRENT_STREAMS, 1)]).await;
            tcp.write_all(&frame(WINDOW_UPDATE, 0, 0, &(1u32 << 20).to_be_bytes())).await.unwrap();
            let mut open: HashMap<u32, (Option<Act>, Vec<u8>)> = HashMap::new();
            while let Ok(Frame { kind, flags, stream, payload }) = read_frame(&mut tcp).await {
                match kind {
                    HEADERS => {
                        let number = seen.fetch_add(1, Ordering::Relaxed);
                        open.insert(stream, (acts.get(number).copied(), Vec::new()));
                    }
                    DATA => open.get_mut(&stream).unwrap().1.extend(payload),
                    _ => continue,
                }
                let Some((act, body)) = open.get(&stream) else { continue };
                let reply = match act {
                    Some(_) if body.len() < after => continue,
                    Some(Act::Reset(code)) => frame(RST_STREAM, 0, stream, &code.to_be_bytes()),
                    Some(Act::GoAway) => frame(GOAWAY, 0, 0, &[0; 8]),
                    None if flags & END_STREAM == 0 => continue,
                    // `:status: 200` is entry 8 of HPACK's static table.
                    None => {
                        let mut reply = frame(HEADERS, END_HEADERS, stream, &[0x88]);
                        for data in body.chunks(1 << 14) {
                            reply.extend(frame(DATA, 0, stream, data));
                        }
                        reply.extend(frame(DATA, END_STREAM, stream, &[]));
                        reply
                    }
                };
                tcp.write_all(&reply).await.unwrap();
            }
        }
    })
    .await;
    (addr, requests)
}

/// Begins a connection as an HTTP/2 server does.
async fn greet(tcp: &mut TcpStream, settings: &[(u16, u32)]) {
    tcp.read_exact(&mut [0; 24]).await.unwrap();
    let settings = settings.iter().flat_map(|(id, value)| {
        let (id, value) = (id.to_be_bytes(), value.to_be_bytes());
        id.into_iter().chain(value)
    });
    tcp.write_all(&frame(SETTINGS, 0, 0, &settings.collect::<Vec<_>>())).await.unwrap();
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const MAX_CONCURRENT_STREAMS: u16 = 3;
const INITIAL_WINDOW_SIZE: u16 = 4;
const NO_ERROR: u32 = 0;
const CANCEL: u32 = 8;
const REFUSED_STREAM: u32 = 7;

/// Sends a body of `len` bytes, the last of them only after `delay`. Returns the head and length of the answer.
async fn upload(addr: SocketAddr, len: usize, delay: Duration) -> (response::Parts, usize) {
    let (mut tx, body) = Channel::<Bytes, io::Error>::new(1);
    let request = Request::post("http://app.example/").body(body).unwrap();
    let response = tokio::spawn(client2(addr).await.send_request(request));
    let _ = tx.send_data(vec![b'x'; len - 1].into()).await;
    tokio::time::sleep(delay).await;
    let _ = tx.send_data(Bytes::from_static(b"y")).await;
    drop(tx);
    let (head, body) = within(response).await.unwrap().unwrap().into_parts();
    (head, within(body.collect()).await.unwrap().to_bytes().len())
}

#[tokio::test]
async fn requests_refused_unprocessed_are_sent_again_whole() {
    for acts in [
        &[Act::Reset(REFUSED_STREAM)][..],
        &[Act::GoAway],
        &[Act::Reset(REFUSED_STREAM), Act::GoAway],
        &[Act::GoAway, Act::GoAway],
    ] {
        // The request is refused while its body is on the way, or before.
        for (len, after) in [(1, 0), (1000, 0), (1000, 999), (1000, 1000), (60_000, 59_999)] {
            let (addr, requests) = refusing(acts, after).await;
            let agent = agent(addr, |config| config.limits.max_upstream_connections = 1);
            let (head, got) = upload(agent.addr, len, Duration::from_millis(20)).await;
            assert_eq!(
                (head.status, got),
                (StatusCode::OK, len),
                "{} refusals after {after} bytes",
                acts.len()
            );
            assert_eq!(requests.load(Ordering::Relaxed), acts.len() + 1);
            assert_eq!(send(agent.addr, ordinary()).await.status(), StatusCode::OK);
            agent.at_rest([2, 0, 0, 0]).await;
            assert_eq!(agent.load.counters().refused(), acts.len() as u64);
        }
    }
}

#[tokio::test]
async fn a_request_is_sent_again_only_if_kept_and_unprocessed() {
    const ALWAYS: &[Act] = &[Act::Reset(REFUSED_STREAM); 5];
    let unavailable = (StatusCode::SERVICE_UNAVAILABLE, "refused", "unsent");
    for (acts, after, len, (status, reason, failure), requests) in [
        (ALWAYS, 0, 10, unavailable, 5),
        (&[Act::GoAway][..], 100_000, 100_001, unavailable, 1),
        (&[Act::Reset(CANCEL)], 0, 10, (StatusCode::BAD_GATEWAY, "reset", "unanswered"), 1),
    ] {
        let (addr, seen) = refusing(acts, after).await;
        let agent = agent(addr, |_| {});
        let (head, _) = upload(agent.addr, len, Duration::ZERO).await;
        assert_eq!((head.status, head.headers["x-prequal-failure"].as_bytes()), (status, failure.as_bytes()));
        assert_eq!(seen.load(Ordering::Relaxed), requests);
        assert!(agent.load.counters().upstream_errors().any(|error| error == (reason, 1)), "{reason}");
        agent.at_rest([0, 1, 0, 0]).await;
    }
}

/// Starts a backend that accepts a number of requests on each connection; the last number applies to all later
/// connections. When the last request that it accepts arrives, the backend sends GOAWAY. It ignores later requests.
async fn accepting(numbers: &'static [u32]) -> SocketAddr {
    let connections = AtomicUsize::new(0);
    raw_backend(move |mut tcp| {
        let connection = connections.fetch_add(1, Ordering::Relaxed);
        let most = numbers[connection.min(numbers.len() - 1)];
        async move {
            greet(&mut tcp, &[(INITIAL_WINDOW_SIZE, 1 << 20), (MAX_CONCURRENT_STREAMS, 100)]).await;
            tcp.write_all(&frame(WINDOW_UPDATE, 0, 0, &(1u32 << 24).to_be_bytes())).await.unwrap();
            let last = 2 * most - 1;
            let mut answered = 0;
            while answered < most
                && let Ok(Frame { kind, flags, stream, .. }) = read_frame(&mut tcp).await
            {
                if kind == HEADERS && stream == last {
                    let goaway = [last.to_be_bytes(), [0; 4]].concat();
                    tcp.write_all(&frame(GOAWAY, 0, 0, &goaway)).await.unwrap();
                }
                if matches!(kind, HEADERS | DATA) && flags & END_STREAM != 0 && stream <= last {
                    tcp.write_all(&frame(HEADERS, END_HEADERS | END_STREAM, stream, &[0x88])).await.unwrap();
                    answered += 1;
                }
            }
            // Reads what still arrives, as nginx does. Otherwise a reset could destroy the answers.
            tcp.shutdown().await.unwrap();
            while let Ok(1..) = tcp.read(&mut [0; 1 << 14]).await {}
        }
    })
    .await
}

#[tokio::test]
async fn connections_that_accept_few_requests_fail_none() {
    // Refused requests are sent again for this long. A busy machine needs that much time.
    let agent = agent(accepting(&[3]).await, |config| config.limits.connect_timeout = Duration::from_secs(9));
    let client = client2(agent.addr).await;
    let send = async |number: usize, len: usize| {
        let request = || {
            let body = Full::new(Bytes::from(vec![b'x'; len]));
            client.clone().send_request(Request::post("http://app.example/").body(body).unwrap())
        };
        let requests: Vec<_> = (0..number).map(|_| tokio::spawn(request())).collect();
        for request in requests {
            assert_eq!(within(request).await.unwrap().unwrap().status(), StatusCode::OK);
        }
    };
    // More requests than all connections together accept.
    send(190, 100).await;
    let refused = agent.load.counters().refused();
    assert!(refused > 0);
    // By now the agent knows how many requests a connection accepts, and sends bodies that it could not send again.
    send(40, 200_000).await;
    assert_eq!(agent.load.counters().refused(), refused);
    agent.at_rest([230, 0, 0, 0]).await;
}

#[tokio::test]
async fn a_backend_that_accepts_more_requests_again_needs_few_connections() {
    let agent = agent(accepting(&[1, 1000]).await, |_| {});
    let client = client2(agent.addr).await;
    let (first, second) =
        tokio::join!(client.clone().send_request(ordinary()), client.clone().send_request(ordinary()));
    assert_eq!((first.unwrap().status(), second.unwrap().status()), (StatusCode::OK, StatusCode::OK));
    for _ in 0..20 {
        let response = within(client.clone().send_request(ordinary())).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
    }
    assert!(agent.load.counters().refused() > 0, "the agent has learned a limit");
    let connections = agent.load.counters().upstream_connections();
    assert!(connections <= 3, "{connections} connections");
}

/// Serves one connection as an HTTP/2 server: answers each request once its head is there, and stops after `most`
/// answers. Whatever arrives after that is not read.
fn answer_heads(tcp: &mut std::net::TcpStream, most: usize) -> io::Result<()> {
    tcp.read_exact(&mut [0; 24])?;
    tcp.write_all(&frame(SETTINGS, 0, 0, &[]))?;
    let mut answered = 0;
    while answered < most {
        let mut head = [0; 9];
        tcp.read_exact(&mut head)?;
        let [a, b, c, kind, _, stream @ ..] = head;
        tcp.read_exact(&mut vec![0; u32::from_be_bytes([0, a, b, c]) as usize])?;
        if kind == HEADERS {
            let reply = frame(HEADERS, END_HEADERS | END_STREAM, u32::from_be_bytes(stream), &[0x88]);
            tcp.write_all(&reply)?;
            answered += 1;
        }
    }
    Ok(())
}

/// The agent runs on the thread of the test, so that it sees the request and the reset at once.
#[tokio::test]
async fn a_request_that_was_not_written_when_its_connection_broke_is_sent_again() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let agent = agent(listener.local_addr().unwrap(), |config| config.upstream_http2 = UpstreamHttp2::Always);
    let ((reset, must_reset), (done, is_reset)) = (channel(), channel());
    std::thread::spawn(move || {
        let (mut first, _) = listener.accept().unwrap();
        answer_heads(&mut first, 1).unwrap();
        must_reset.recv().unwrap();
        // Unread data makes the system reset the connection.
        drop(first);
        done.send(()).unwrap();
        let (mut second, _) = listener.accept().unwrap();
        let _ = answer_heads(&mut second, 2);
    });
    let post = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nbody";
    let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
    tcp.write_all(post).await.unwrap();
    assert!(within(read_head(&mut tcp)).await.starts_with("HTTP/1.1 200 "));
    tokio::time::sleep(Duration::from_millis(50)).await;

    let mut tcp = tcp.into_std().unwrap();
    tcp.write_all(post).unwrap();
    reset.send(()).unwrap();
    is_reset.recv().unwrap();
    let mut tcp = TcpStream::from_std(tcp).unwrap();
    let head = within(read_head(&mut tcp)).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
}

/// Starts a backend that answers the first request on each connection with `body`, followed by a reset without an error
/// code. `flags` are those of the body's frame.
async fn resetting(flags: u8, body: &'static [u8]) -> SocketAddr {
    raw_backend(move |mut tcp| async move {
        greet(&mut tcp, &[]).await;
        while let Ok(Frame { kind, stream, .. }) = read_frame(&mut tcp).await {
            if kind == HEADERS {
                let reply = [
                    frame(HEADERS, END_HEADERS, stream, &[0x88]),
                    frame(DATA, flags, stream, body),
                    frame(RST_STREAM, 0, stream, &NO_ERROR.to_be_bytes()),
                ];
                tcp.write_all(&reply.concat()).await.unwrap();
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_response_reset_without_an_error_code_is_not_taken_as_complete() {
    let agent = agent(resetting(0, b"half").await, |config| config.upstream_http2 = UpstreamHttp2::Always);
    let reply = raw(agent.addr, "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
    assert!(!reply.ends_with("0\r\n\r\n"), "{reply}");
    // The reset may reach the client before the head.
    if let Ok(response) = within(client2(agent.addr).await.send_request(ordinary())).await {
        assert!(within(response.into_body().collect()).await.is_err());
    }
    agent.at_rest([0, 2, 0, 0]).await;
}

/// A server may end an upload that it does not need in this way (RFC 9113 §8.1).
#[tokio::test]
async fn a_complete_response_followed_by_a_reset_is_complete() {
    let agent = agent(resetting(END_STREAM, b"HTTP/2").await, |_| {});
    let (_tx, body) = Channel::<Bytes, io::Error>::new(1);
    let request = Request::post("http://app.example/").body(body).unwrap();
    let response = within(client2(agent.addr).await.send_request(request)).await.unwrap();
    assert_eq!(version(response).await, "HTTP/2");
    agent.at_rest([1, 0, 0, 0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_reset_without_an_error_code_is_not_taken_as_complete() {
    let (arrived, mut uploads) = mpsc::unbounded_channel();
    let addr = raw_backend(move |mut tcp| {
        let arrived = arrived.clone();
        async move {
            read_head(&mut tcp).await;
            tcp.read_exact(&mut [0; b"1\r\nx\r\n".len()]).await.unwrap();
            arrived.send(None).unwrap();
            let mut rest = Vec::new();
            let _ = tcp.read_to_end(&mut rest).await;
            arrived.send(Some(rest)).unwrap();
        }
    })
    .await;
    let agent = agent(addr, |config| config.upstream_http2 = UpstreamHttp2::Never);
    for round in 0..100 {
        let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
        // `POST http://a/` in HPACK.
        let head = [0x83, 0x86, 0x84, 0x01, 1, b'a'];
        let upload = [
            &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
            &frame(SETTINGS, 0, 0, &[]),
            &frame(HEADERS, END_HEADERS, 1, &head),
            &frame(DATA, 0, 1, b"x"),
        ];
        tcp.write_all(&upload.concat()).await.unwrap();
        assert_eq!(within(uploads.recv()).await.unwrap(), None);
        tcp.write_all(&frame(RST_STREAM, 0, 1, &NO_ERROR.to_be_bytes())).await.unwrap();
        let rest = within(uploads.recv()).await.unwrap().unwrap();
        assert_eq!(rest.as_slice(), b"", "round {round}");
    }
    agent.at_rest([0, 0, 100, 0]).await;
}

#[tokio::test]
async fn many_requests_share_the_connections_evenly() {
    let requests = Arc::new([0, 0, 0].map(AtomicUsize::new));
    let (connections, seen) = (AtomicUsize::new(0), requests.clone());
    let addr = raw_backend(move |mut tcp| {
        let (connection, seen) = (connections.fetch_add(1, Ordering::Relaxed), seen.clone());
        async move {
            greet(&mut tcp, &[]).await;
            while let Ok(Frame { kind, .. }) = read_frame(&mut tcp).await {
                if kind == HEADERS {
                    seen[connection].fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    })
    .await;
    let agent = agent(addr, |config| config.limits.max_upstream_connections = 2);
    let client = client2(agent.addr).await;
    let send = || tokio::spawn(client.clone().send_request(ordinary()));
    let shares = || [0, 1, 2].map(|connection: usize| requests[connection].load(Ordering::Relaxed));
    let _first: Vec<_> = (0..129).map(|_| send()).collect();
    eventually("they have arrived", || shares().iter().sum::<usize>() == 129).await;
    // Time for the second connection to open. Until then, the first one gets more.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let _more: Vec<_> = (129..300).map(|_| send()).collect();
    eventually("each has half of them", || shares() == [150, 150, 0]).await;
}

/// Reads until a PING arrives, and answers neither it nor anything after it.
async fn ping(tcp: &mut TcpStream) {
    while within(read_frame(tcp)).await.unwrap().kind != PING {}
    while let Ok(Ok(_)) = tokio::time::timeout(Duration::from_secs(5), read_frame(tcp)).await {}
}

#[tokio::test]
async fn a_backend_that_hangs_with_requests_in_flight_is_detected() {
    let pinged = Arc::new(Semaphore::new(0));
    let done = pinged.clone();
    let addr = raw_backend(move |mut tcp| {
        let done = done.clone();
        async move {
            greet(&mut tcp, &[]).await;
            ping(&mut tcp).await;
            done.add_permits(1);
        }
    })
    .await;
    let agent = agent(addr, |config| {
        config.limits.upstream_ping_interval = Some(Duration::from_millis(50));
    });
    assert_eq!(send(agent.addr, ordinary()).await.status(), StatusCode::BAD_GATEWAY);
    within(pinged.acquire()).await.unwrap().forget();
    agent.at_rest([0, 1, 0, 0]).await;
}

#[tokio::test]
async fn a_client_that_hangs_is_detected() {
    let (addr, ..) = limited(1).await;
    let agent = agent(addr, |config| config.limits.ping_interval = Some(Duration::from_millis(50)));
    let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
    tcp.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    tcp.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
    let start = Instant::now();
    ping(&mut tcp).await;
    assert!(start.elapsed() < Duration::from_secs(2), "the connection ends");
}
