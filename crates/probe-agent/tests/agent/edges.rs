//! Corner cases of the protocols: what the standards require of a proxy, and what real peers do.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::common::{
    agent, backend, client2, dead_backend, eventually, fetch, held_backend, raw, raw_backend, read_head,
    text, within,
};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::channel::Channel;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::ext::Protocol;
use hyper_util::rt::TokioIo;
use probe_agent::config::UpstreamHttp2;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Starts a backend that returns the names by which it was addressed.
async fn hosts() -> SocketAddr {
    backend(|req| async move {
        let mut hosts: Vec<String> = req.uri().authority().map(ToString::to_string).into_iter().collect();
        hosts.extend(req.headers().get_all("host").iter().map(|host| host.to_str().unwrap().to_owned()));
        let mut reply = text("");
        reply.headers_mut().insert("x-hosts", hosts.join(",").parse().unwrap());
        reply
    })
    .await
}

#[tokio::test]
async fn over_http2_the_authority_is_the_only_host() {
    let addr = hosts().await;
    for upstream in [UpstreamHttp2::Auto, UpstreamHttp2::Never] {
        let agent = agent(addr, |config| config.upstream_http2 = upstream);
        for (lines, seen) in [
            (&[][..], Some("app.example:81")),
            (&["app.example:81"], Some("app.example:81")),
            (&["APP.example:81"], Some("app.example:81")),
            (&["app.example"], None),
            (&["evil.example"], None),
            (&["app.example:81", "app.example:81"], None),
            (&["app.example:81", "evil.example"], None),
        ] {
            let mut request = Request::get("http://app.example:81/").body(Empty::<Bytes>::new()).unwrap();
            for line in lines {
                request.headers_mut().append("host", line.parse().unwrap());
            }
            let response = client2(agent.addr).await.send_request(request).await.unwrap();
            let expected = if seen.is_some() { StatusCode::OK } else { StatusCode::BAD_REQUEST };
            assert_eq!(response.status(), expected, "{lines:?}");
            let hosts = response.headers().get("x-hosts").map(|hosts| hosts.to_str().unwrap());
            assert_eq!(hosts, seen, "{lines:?}");
        }
        agent.at_rest([3, 0, 0, 0]).await;
    }
}

#[tokio::test]
async fn http_1_0_without_host_gets_that_of_the_backend() {
    let addr = hosts().await;
    let agent = agent(addr, |_| {});
    let reply = raw(agent.addr, "GET / HTTP/1.0\r\n\r\n").await;
    assert!(reply.contains(&format!("x-hosts: {addr}\r\n")), "{reply}");
    let reply = raw(agent.addr, "GET / HTTP/1.0\r\nhost: a\r\n\r\n").await;
    assert!(reply.contains("x-hosts: a\r\n"), "{reply}");
}

#[tokio::test]
async fn limits_on_request_heads_do_not_apply_to_responses() {
    for upstream in [UpstreamHttp2::Never, UpstreamHttp2::Always] {
        let addr = backend(|_| async {
            let mut reply = text("");
            for n in 0..250 {
                let cookie = format!("{n}={}", "x".repeat(100));
                reply.headers_mut().append("set-cookie", cookie.parse().unwrap());
            }
            reply
        })
        .await;
        let agent = agent(addr, |config| {
            config.upstream_http2 = upstream;
            config.limits.max_headers = 20;
            config.limits.max_header_bytes = 1024;
        });
        let reply = raw(agent.addr, "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
        assert!(reply.starts_with("HTTP/1.1 200 "), "{upstream:?}: {reply}");
        assert_eq!(reply.matches("set-cookie: ").count(), 250);
    }
}

/// Starts a backend that answers before the upload has arrived. It then stops reading, or closes.
async fn early(closes: bool) -> SocketAddr {
    raw_backend(move |mut tcp| async move {
        read_head(&mut tcp).await;
        let _ = tcp.write_all(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 4\r\n\r\nfull").await;
        if !closes {
            tokio::time::sleep(Duration::from_secs(20)).await;
        }
    })
    .await
}

#[tokio::test]
async fn a_complete_response_does_not_wait_for_the_upload() {
    for closes in [false, true] {
        let agent = agent(early(closes).await, |_| {});
        for n in 0..10 {
            // One client waits for the answer in the middle of its upload; the other only sends.
            for waits in [true, false] {
                let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
                tcp.write_all(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10000000\r\n\r\n")
                    .await
                    .unwrap();
                let (mut read, mut write) = tcp.into_split();
                let sends = tokio::spawn(async move {
                    let rest = if waits { 100_000 } else { 10_000_000 };
                    let _ = write.write_all(&vec![b'x'; rest]).await;
                    write
                });
                let mut reply = Vec::new();
                let mut chunk = [0; 4096];
                while !reply.ends_with(b"full") {
                    let read = within(read.read(&mut chunk)).await;
                    let got = read.unwrap_or_else(|error| panic!("{closes} {waits} {n}: {error}"));
                    assert!(got > 0, "{closes} {waits} {n}: {:?}", String::from_utf8_lossy(&reply));
                    reply.extend_from_slice(&chunk[..got]);
                }
                assert!(reply.starts_with(b"HTTP/1.1 413 "));
                drop((read, within(sends).await));
            }
        }
        agent.at_rest([20, 0, 0, 0]).await;
    }
}

/// Sends an upload, then another request on the same connection if the first answer allows that. Returns the first
/// head.
async fn upload_and_go_on(addr: SocketAddr, len: usize) -> String {
    let mut tcp = TcpStream::connect(addr).await.unwrap();
    let head = format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {len}\r\n\r\n");
    tcp.write_all(&[head.as_bytes(), &vec![b'x'; len]].concat()).await.unwrap();
    let head = within(read_head(&mut tcp)).await;
    let body = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    within(tcp.read_exact(&mut vec![0; body.unwrap()])).await.unwrap();
    if !head.contains("connection: close") {
        tcp.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        let next = within(read_head(&mut tcp)).await;
        assert!(next.starts_with("HTTP/1.1 50"), "after {len} bytes: {next:?}");
    }
    head
}

#[tokio::test]
async fn an_error_during_an_upload_announces_that_the_connection_closes() {
    let dead = agent(dead_backend().await, |_| {});
    let (backend, arrived, go) = held_backend().await;
    let full = agent(backend, |config| config.limits.max_rif = 1.try_into().ok());
    let held = tokio::spawn(fetch(full.addr, "/"));
    within(arrived.notified()).await;
    for len in [0, 1, 1000, 100_000, 2_000_000] {
        for (agent, status) in [(&dead, "HTTP/1.1 502 "), (&full, "HTTP/1.1 503 ")] {
            let head = upload_and_go_on(agent.addr, len).await;
            assert!(head.starts_with(status), "{head}");
            assert_eq!(
                head.contains("connection: close"),
                len > 1000 || len > 0 && status.contains("502"),
                "{len}"
            );
        }
    }
    go.notify_one();
    within(held).await.unwrap();
}

/// Envoy's client, for example, sends in pieces. A reset would make Envoy drop the answer that it has not read.
#[tokio::test]
async fn an_early_answer_does_not_reset_an_upload_that_pauses() {
    let dead = agent(dead_backend().await, |_| {});
    let quick = agent(early(true).await, |_| {});
    for (agent, status) in [(&dead, "HTTP/1.1 502 "), (&quick, "HTTP/1.1 413 ")] {
        let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
        tcp.write_all(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\nxxx").await.unwrap();
        let mut answer = String::new();
        let _ = within(tcp.read_to_string(&mut answer)).await.unwrap();
        assert!(answer.starts_with(status), "{answer}");
        for piece in 0..3 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let wrote = tcp.write_all(&[b'x'; 1000]).await;
            assert!(wrote.is_ok(), "{status} {piece}: {wrote:?}");
        }
    }
}

#[tokio::test]
async fn a_complete_response_ends_an_upload_over_http2() {
    for closes in [false, true] {
        let agent = agent(early(closes).await, |config| config.upstream_http2 = UpstreamHttp2::Never);
        let mut client = client2(agent.addr).await;
        for n in 1..=2 {
            let (mut tx, body) = Channel::<Bytes, io::Error>::new(1);
            let request = Request::post("http://app.example/").body(body).unwrap();
            let sends =
                tokio::spawn(async move { while tx.send_data(vec![b'x'; 10_000].into()).await.is_ok() {} });
            let response = within(client.send_request(request)).await.unwrap();
            assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
            assert_eq!(within(response.into_body().collect()).await.unwrap().to_bytes(), "full");
            within(sends).await.unwrap();
            agent.at_rest([n, 0, 0, 0]).await;
        }
    }
}

#[tokio::test]
async fn a_tunnel_ends_when_its_backend_goes_away() {
    let addr = raw_backend(|mut tcp| async move {
        read_head(&mut tcp).await;
        let reply = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n";
        tcp.write_all(reply).await.unwrap();
        tcp.shutdown().await.unwrap();
    })
    .await;
    let agent = agent(addr, |_| {});
    let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
    let request = b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n";
    tcp.write_all(request).await.unwrap();
    read_head(&mut tcp).await;
    // The client goes on sending: unread data must not keep the tunnel open.
    let sends = tokio::spawn(async move { while tcp.write_all(b"ping").await.is_ok() {} });
    agent.at_rest([0, 0, 0, 1]).await;
    within(sends).await.unwrap();
}

/// Starts an HTTP/1.1 WebSocket server that echoes, and refuses at `/403` and `/200`.
async fn websocket() -> SocketAddr {
    raw_backend(|mut tcp| async move {
        let head = read_head(&mut tcp).await.to_ascii_lowercase();
        let switches = head.starts_with("get /chat http/1.1\r\n")
            && [
                "host: app.example",
                "upgrade: websocket",
                "connection: upgrade",
                "sec-websocket-version: 13",
            ]
            .iter()
            .all(|line| head.lines().any(|l| l == *line))
            && head.contains("\r\nsec-websocket-key: ");
        let reply: &[u8] = if switches {
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\
              sec-websocket-accept: x\r\nx-app: 1\r\n\r\nhi"
        } else if head.starts_with("get /200") {
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno"
        } else {
            b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno"
        };
        let _ = tcp.write_all(reply).await;
        if switches {
            let (mut read, mut write) = tcp.split();
            let _ = tokio::io::copy(&mut read, &mut write).await;
        }
    })
    .await
}

/// Asks to switch to `protocol` as in RFC 8441.
async fn extended_connect(
    addr: SocketAddr,
    path: &str,
    protocol: Option<&'static str>,
) -> Response<Incoming> {
    let mut client = client2(addr).await;
    // A client may send this CONNECT only after the server's SETTINGS allow it. A reply to a probe shows that they have
    // arrived.
    let request = Request::get(format!("http://{addr}/prequal/probe")).body(Empty::<Bytes>::new()).unwrap();
    client.send_request(request).await.unwrap();
    let mut request = Request::connect(format!("http://app.example{path}"))
        .header("sec-websocket-version", "13")
        .body(Empty::<Bytes>::new())
        .unwrap();
    match protocol {
        Some(protocol) => drop(request.extensions_mut().insert(Protocol::from_static(protocol))),
        None => *request.uri_mut() = "app.example:80".parse().unwrap(),
    }
    within(client.send_request(request)).await.unwrap()
}

async fn echoes(response: Response<Incoming>) {
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["x-app"], "1");
    for gone in ["upgrade", "connection", "sec-websocket-accept"] {
        assert!(!response.headers().contains_key(gone), "{gone}");
    }
    let mut tunnel = TokioIo::new(hyper::upgrade::on(response).await.unwrap());
    let mut greeting = [0; 2];
    within(tunnel.read_exact(&mut greeting)).await.unwrap();
    tunnel.write_all(b"ping").await.unwrap();
    let mut echo = [0; 4];
    within(tunnel.read_exact(&mut echo)).await.unwrap();
    assert_eq!((&greeting, &echo), (b"hi", b"ping"));
}

#[tokio::test]
async fn a_websocket_over_http2_reaches_a_backend_of_either_version() {
    let inner = agent(websocket().await, |_| {});
    echoes(extended_connect(inner.addr, "/chat", Some("websocket")).await).await;
    inner.at_rest([0, 0, 0, 1]).await;
    // The inner agent is a backend that supports WebSockets over HTTP/2.
    for upstream in [UpstreamHttp2::Auto, UpstreamHttp2::Always, UpstreamHttp2::Never] {
        let outer = agent(inner.addr, |config| config.upstream_http2 = upstream);
        let response = extended_connect(outer.addr, "/chat", Some("websocket")).await;
        eventually("it is in flight", || outer.load.rif() == 1).await;
        echoes(response).await;
        outer.at_rest([0, 0, 0, 1]).await;
    }
}

#[tokio::test]
async fn a_tunnel_refused_by_the_backend_is_an_ordinary_response() {
    let http1 = websocket().await;
    let http2 = backend(|_| async { text("") }).await;
    for (backend, upstream, path, protocol, status) in [
        (http1, UpstreamHttp2::Auto, "/403", Some("websocket"), StatusCode::FORBIDDEN),
        (http1, UpstreamHttp2::Never, "/200", Some("websocket"), StatusCode::BAD_GATEWAY),
        (http1, UpstreamHttp2::Auto, "/chat", Some("h2c"), StatusCode::NOT_IMPLEMENTED),
        (http2, UpstreamHttp2::Always, "/chat", Some("websocket"), StatusCode::NOT_IMPLEMENTED),
        (http1, UpstreamHttp2::Auto, "/chat", None, StatusCode::METHOD_NOT_ALLOWED),
    ] {
        let agent = agent(backend, |config| config.upstream_http2 = upstream);
        let response = extended_connect(agent.addr, path, protocol).await;
        assert_eq!(response.status(), status, "{upstream:?} {path} {protocol:?}");
        eventually("nothing is in flight", || agent.load.rif() == 0).await;
    }
}
