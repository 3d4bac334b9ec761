//! Uploads and responses that stay unread must not block other requests on the same connection. `http2.rs` has the other
//! tests of HTTP/2 connections to the backend.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{Frame, agent, client2, eventually, frame, raw_backend, read_frame, within};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::channel::Channel;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2 as client;
use hyper::server::conn::http2 as server;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use probe_agent::config::UpstreamHttp2;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// Number of requests that the shipped configuration of Envoy has in flight on one HTTP/2 connection.
const STREAMS: usize = 100;

/// Begins a connection as an HTTP/2 server that allows no upload.
async fn allow_no_upload(tcp: &mut TcpStream) {
    tcp.read_exact(&mut [0; 24]).await.unwrap();
    let no_window = [0, 4, 0, 0, 0, 0];
    tcp.write_all(&frame(SETTINGS, 0, 0, &no_window)).await.unwrap();
}

#[tokio::test]
async fn uploads_that_the_backend_does_not_read_block_no_other_upload() {
    let requests = Arc::new(AtomicUsize::new(0));
    let counter = requests.clone();
    // Reads the body of the last request alone.
    let addr = raw_backend(move |mut tcp| {
        let counter = counter.clone();
        async move {
            allow_no_upload(&mut tcp).await;
            while let Ok(Frame { kind, flags, stream, .. }) = read_frame(&mut tcp).await {
                if kind == HEADERS && counter.fetch_add(1, Ordering::Relaxed) == STREAMS - 1 {
                    let window = 1_u32 << 16;
                    tcp.write_all(&frame(WINDOW_UPDATE, 0, stream, &window.to_be_bytes())).await.unwrap();
                } else if kind == DATA && flags & END_STREAM != 0 {
                    let answer = frame(HEADERS, END_HEADERS | END_STREAM, stream, &[0x88]);
                    tcp.write_all(&answer).await.unwrap();
                }
            }
        }
    })
    .await;
    let agent = agent(addr, |config| config.upstream_http2 = UpstreamHttp2::Always);
    let client = client2(agent.addr).await;
    let post = |len: usize| {
        let body = Full::new(Bytes::from(vec![b'x'; len]));
        let request = Request::post("http://app.example/").body(body).unwrap();
        tokio::spawn(client.clone().send_request(request))
    };
    let _unread: Vec<_> = (1..STREAMS).map(|_| post(1 << 20)).collect();
    eventually("the backend has them", || requests.load(Ordering::Relaxed) == STREAMS - 1).await;
    // Long enough to fill every window.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(within(post(1000)).await.unwrap().unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn an_unread_upload_in_frames_of_one_byte_does_not_end_the_connection() {
    let go = Arc::new(Notify::new());
    let wait = go.clone();
    // Answers a request without a body when it may go on.
    let addr = raw_backend(move |mut tcp| {
        let wait = wait.clone();
        async move {
            allow_no_upload(&mut tcp).await;
            while let Ok(Frame { kind, flags, stream, .. }) = read_frame(&mut tcp).await {
                if kind == HEADERS && flags & END_STREAM != 0 {
                    wait.notified().await;
                    let answer = frame(HEADERS, END_HEADERS | END_STREAM, stream, &[0x88]);
                    tcp.write_all(&answer).await.unwrap();
                }
            }
        }
    })
    .await;
    let agent = agent(addr, |config| config.upstream_http2 = UpstreamHttp2::Always);
    let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
    // `GET http://a/` and `POST http://a/` in HPACK.
    let [get, post] = [0x82, 0x83].map(|method| [method, 0x86, 0x84, 0x01, 1, b'a']);
    let start = [
        &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
        &frame(SETTINGS, 0, 0, &[]),
        &frame(HEADERS, END_HEADERS | END_STREAM, 1, &get),
        &frame(HEADERS, END_HEADERS, 3, &post),
        // As much as any server allows at first.
        &frame(DATA, 0, 3, b"x").repeat(65_535),
        &frame(PING, 0, 0, &[7; 8]),
    ];
    within(tcp.write_all(&start.concat())).await.unwrap();
    loop {
        let frame = within(read_frame(&mut tcp)).await.unwrap();
        match (frame.kind, frame.stream) {
            (PING, _) => go.notify_one(),
            (HEADERS, 1) => break,
            (GOAWAY, _) => panic!("went away: {:?}", &frame.payload[4..]),
            _ => {}
        }
    }
}

#[tokio::test]
async fn responses_that_their_clients_do_not_read_block_no_other_response() {
    let addr = raw_backend(|tcp| async move {
        let answer = |req: Request<Incoming>| async move {
            let (mut tx, body) = Channel::<Bytes>::new(1);
            tokio::spawn(async move {
                if req.uri().path() == "/" {
                    let _ = tx.send_data(Bytes::from_static(b"hello")).await;
                    return;
                }
                let chunk = Bytes::from(vec![b'x'; 16 << 10]);
                while tx.send_data(chunk.clone()).await.is_ok() {}
            });
            Ok::<_, Infallible>(Response::new(body))
        };
        let _ = server::Builder::new(TokioExecutor::new())
            .max_concurrent_streams(10_000)
            .serve_connection(TokioIo::new(tcp), service_fn(answer))
            .await;
    })
    .await;
    let agent = agent(addr, |config| config.upstream_http2 = UpstreamHttp2::Always);
    let mut unread = Vec::new();
    for _ in 0..4 {
        let tcp = TcpStream::connect(agent.addr).await.unwrap();
        let (client, conn) = client::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(1 << 10)
            .handshake(TokioIo::new(tcp))
            .await
            .unwrap();
        tokio::spawn(conn);
        for _ in 0..150 {
            let request = Request::get("http://app.example/endless").body(Empty::<Bytes>::new()).unwrap();
            let response = within(client.clone().send_request(request)).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            unread.push(response);
        }
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let request = Request::get("http://app.example/").body(Empty::<Bytes>::new()).unwrap();
    let response = within(client2(agent.addr).await.send_request(request)).await.unwrap();
    assert_eq!(within(response.into_body().collect()).await.unwrap().to_bytes(), "hello");
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
