//! Every path that a request can take through the agent, over real sockets: what arrives, what counts, and that RIF
//! always returns to zero.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::{
    Reply, agent, any_port, backend, client1, client2, dead_backend, eventually, fetch, get, raw_backend,
    read_head, text, within,
};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body::Frame;
use http_body_util::channel::Channel;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::TokioIo;
use prequal_core::wire::report::LoadReport;
use probe_agent::config::{Report, UpstreamHttp2};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;

#[tokio::test]
async fn a_request_passes_and_carries_a_report() {
    let agent = agent(backend(|_| async { text("hello") }).await, |_| {});
    let (head, body) = fetch(agent.addr, "/x?y=1").await;
    assert_eq!((head.status, body.as_ref()), (StatusCode::OK, &b"hello"[..]));
    let report = LoadReport::parse(head.headers["x-prequal-load"].to_str().unwrap()).unwrap();
    assert_eq!(report.endpoint, Some(agent.addr.into()));
    assert_eq!(report.rif, 0, "the request that carries the report is leaving");
    agent.at_rest([1, 0, 0, 0]).await;
    let (head, _) = fetch(agent.addr, "/").await;
    let report = LoadReport::parse(head.headers["x-prequal-load"].to_str().unwrap()).unwrap();
    assert!(report.latency_us.is_some());
}

#[tokio::test]
async fn one_connection_to_the_backend_serves_many_requests_in_turn() {
    let agent = agent(backend(|_| async { text("hello") }).await, |_| {});
    let mut client = client1(agent.addr).await;
    for _ in 0..50 {
        client.ready().await.unwrap();
        let response = client.send_request(get("/")).await.unwrap();
        response.into_body().collect().await.unwrap();
    }
    agent.at_rest([50, 0, 0, 0]).await;
    assert_eq!(agent.load.counters().upstream_connections(), 1);
}

#[tokio::test]
async fn headers_pass_except_hop_by_hop_and_prequal_ones() {
    let seen = Arc::new(std::sync::Mutex::new(None));
    let record = seen.clone();
    let addr = backend(move |req| {
        *record.lock().unwrap() = Some((req.uri().clone(), req.headers().clone()));
        async {
            let mut reply = text("");
            for (name, value) in [
                ("x-prequal-load", "99;1;9.9.9.9:9"),
                ("x-prequal-rif", "99"),
                ("x-prequal-failure", "unsent"),
                ("connection", "x-hop"),
                ("x-hop", "1"),
                ("x-app", "1"),
            ] {
                reply.headers_mut().insert(name, value.parse().unwrap());
            }
            reply
        }
    })
    .await;
    let agent = agent(addr, |config| config.report = Report::ProbeOnly);
    let request = Request::get("/a%20b?c=d")
        .header("host", "app.example:81")
        .header("connection", "x-mine")
        .header("x-mine", "1")
        .header("x-forwarded-for", "1.2.3.4")
        .header("x-forwarded-proto", "https")
        .header("x-prequal-dest", "9.9.9.9:9")
        .header("x-prequal-load", "0;1;9.9.9.9:9")
        .header("x-prequal-failure", "unsent")
        .body(Empty::<Bytes>::new())
        .unwrap();
    let response = client1(agent.addr).await.send_request(request).await.unwrap();
    let (uri, headers) = seen.lock().unwrap().take().unwrap();
    assert_eq!(uri, "/a%20b?c=d");
    let mut names: Vec<_> = headers.iter().map(|(n, v)| format!("{n}: {}", v.to_str().unwrap())).collect();
    names.sort();
    assert_eq!(names, ["host: app.example:81", "x-forwarded-for: 1.2.3.4", "x-forwarded-proto: https"]);
    let mut names: Vec<_> = response.headers().keys().map(|n| n.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["content-length", "date", "x-app"], "probe-only: no report, and never the backend's");
}

#[tokio::test]
async fn probes_are_answered_and_prequal_paths_are_not_forwarded() {
    let hits = Arc::new(AtomicUsize::new(0));
    let counter = hits.clone();
    let addr = backend(move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
        async { text("hello") }
    })
    .await;
    let agent = agent(addr, |config| config.probe_listen = Some(any_port()));
    let probe_addr = agent.probe.unwrap();
    for addr in [agent.addr, probe_addr] {
        let (head, body) = fetch(addr, "/prequal/probe").await;
        let load = head.headers["x-prequal-load"].to_str().unwrap();
        assert_eq!(load, format!("0;;{};probe={probe_addr};up=0", agent.addr));
        assert_eq!(head.headers["x-prequal-rif"], "0");
        assert!(!head.headers.contains_key("x-prequal-latency-us"), "unknown is left out");
        assert!(body.is_empty());
        assert_eq!(fetch(addr, "/prequal/other").await.0.status, StatusCode::NOT_FOUND);
    }
    let mut json = get("/prequal/probe");
    json.headers_mut().insert("accept", "application/json".parse().unwrap());
    let response = client1(agent.addr).await.send_request(json).await.unwrap();
    assert_eq!(response.headers()["content-type"], "application/json");
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let body = std::str::from_utf8(&body).unwrap();
    for field in [
        "\"rif\":0",
        "\"latency_median_ms\":null",
        "\"failing\":0",
        "\"up_s\":0",
        "\"timestamp_ms\":1",
        "\"endpoint\":\"127.0.0.1:",
    ] {
        assert!(body.contains(field), "{field} not in {body}");
    }
    assert_eq!(fetch(probe_addr, "/").await.0.status, StatusCode::NOT_FOUND, "no requests on the probe port");
    let mut client = client2(agent.addr).await;
    let response = client.send_request(get2(agent.addr, "/prequal/probe")).await.unwrap();
    assert_eq!(response.headers()["x-prequal-rif"], "0", "over HTTP/2 too");
    assert_eq!(hits.load(Ordering::Relaxed), 0);
    assert_eq!(agent.load.counters().probes(), [3, 1]);
    agent.at_rest([0, 0, 0, 0]).await;
}

#[tokio::test]
async fn an_advertised_endpoint_is_reported_unchanged() {
    let agent = agent(backend(|_| async { text("") }).await, |config| {
        config.advertise = Some("[2001:db8::1]:443".parse().unwrap());
    });
    let (head, _) = fetch(agent.addr, "/prequal/probe").await;
    assert_eq!(head.headers["x-prequal-load"], "0;;[2001:db8::1]:443;up=0");
}

#[tokio::test]
async fn a_backend_that_is_down_causes_a_502_with_a_reason() {
    let agent = agent(dead_backend().await, |_| {});
    let (head, body) = fetch(agent.addr, "/").await;
    assert_eq!(head.status, StatusCode::BAD_GATEWAY);
    assert_eq!(body, "probe-agent: backend refused the connection\n");
    assert!(head.headers.contains_key("x-prequal-load"));
    assert_eq!(head.headers["x-prequal-failure"], "unsent", "safe to send again");
    let mut client = client2(agent.addr).await;
    let response = client.send_request(get2(agent.addr, "/")).await.unwrap();
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    assert_eq!(response.headers()["x-prequal-failure"], "unsent");
    agent.at_rest([0, 2, 0, 0]).await;
}

#[tokio::test]
async fn a_silent_backend_causes_a_504_at_the_response_timeout() {
    let addr = raw_backend(|mut tcp| async move {
        let mut sink = Vec::new();
        let _ = tcp.read_to_end(&mut sink).await;
    })
    .await;
    let agent = agent(addr, |config| config.limits.response_timeout = Some(Duration::from_millis(50)));
    let (head, _) = fetch(agent.addr, "/").await;
    assert_eq!(head.status, StatusCode::GATEWAY_TIMEOUT);
    assert!(!head.headers.contains_key("x-prequal-failure"), "the backend may still work on it");
    agent.at_rest([0, 1, 0, 0]).await;
}

#[tokio::test]
async fn a_5xx_is_a_failure_and_not_a_latency_sample() {
    let addr = backend(|_| async {
        let mut reply = text("broken");
        *reply.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        reply
    })
    .await;
    let agent = agent(addr, |_| {});
    let (head, _) = fetch(agent.addr, "/").await;
    assert_eq!(head.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(!head.headers.contains_key("x-prequal-failure"), "the backend has answered");
    agent.at_rest([0, 1, 0, 0]).await;
    assert_eq!(agent.load.counters().latency_buckets().iter().sum::<u64>(), 0);
}

#[tokio::test]
async fn a_backend_that_dies_before_or_during_a_response_is_a_failure() {
    let addr = raw_backend(|mut tcp| async move {
        if read_head(&mut tcp).await.starts_with("GET /half") {
            let _ = tcp.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf").await;
        }
    })
    .await;
    let agent = agent(addr, |_| {});
    let (head, body) = fetch(agent.addr, "/").await;
    assert_eq!(head.status, StatusCode::BAD_GATEWAY);
    assert_eq!(body, "probe-agent: backend closed the connection before a response\n");
    assert_eq!(head.headers["x-prequal-failure"], "unanswered", "it may have been served");
    agent.at_rest([0, 1, 0, 0]).await;
    let response = client1(agent.addr).await.send_request(get("/half")).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert!(response.into_body().collect().await.is_err(), "the client must notice the truncation");
    agent.at_rest([0, 2, 0, 0]).await;
}

#[tokio::test]
async fn a_client_that_disconnects_cancels_the_request_at_the_backend() {
    for http2 in [false, true] {
        let (arrived, gone) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (on_arrival, on_end) = (arrived.clone(), gone.clone());
        let addr = backend(move |_| {
            on_arrival.notify_one();
            let guard = NotifyOnDrop(on_end.clone());
            async move {
                std::future::pending::<()>().await;
                drop(guard);
                text("never")
            }
        })
        .await;
        let agent = agent(addr, |_| {});
        let request = {
            let addr = agent.addr;
            tokio::spawn(async move {
                if http2 {
                    client2(addr).await.send_request(get2(addr, "/")).await.map(drop)
                } else {
                    client1(addr).await.send_request(get("/")).await.map(drop)
                }
            })
        };
        within(arrived.notified()).await;
        assert_eq!(agent.load.rif(), 1);
        request.abort();
        agent.at_rest([0, 0, 1, 0]).await;
        within(gone.notified()).await;
    }
}

struct NotifyOnDrop(Arc<Notify>);

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

#[tokio::test]
async fn a_client_that_disconnects_during_a_response_is_an_abort() {
    let addr = backend(|_| async { endless() }).await;
    let agent = agent(addr, |_| {});
    let mut response = client1(agent.addr).await.send_request(get("/")).await.unwrap();
    response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(agent.load.rif(), 1);
    drop(response);
    agent.at_rest([0, 0, 1, 0]).await;
}

#[tokio::test]
async fn a_client_that_breaks_off_its_upload_is_an_abort() {
    let addr = backend(|req| async {
        let _ = req.into_body().collect().await;
        text("done")
    })
    .await;
    let agent = agent(addr, |_| {});
    let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
    tcp.write_all(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\nhalf").await.unwrap();
    eventually("the request is in flight", || agent.load.rif() == 1).await;
    drop(tcp);
    agent.at_rest([0, 0, 1, 0]).await;
}

#[tokio::test]
async fn downloads_stream_with_back_pressure() {
    let produced = Arc::new(AtomicUsize::new(0));
    let counter = produced.clone();
    let addr = backend(move |_| {
        let counter = counter.clone();
        async move { endless_counted(counter) }
    })
    .await;
    let agent = agent(addr, |_| {});
    let mut response = client1(agent.addr).await.send_request(get("/")).await.unwrap();
    // The client reads nothing: production must stop long before memory runs out.
    let settled = settle(&produced).await;
    assert!(settled < 16 << 20, "{settled} bytes were produced for a client that does not read");
    let mut read = 0;
    while read < 64 << 20 {
        read += response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap().len();
    }
    assert!(produced.load(Ordering::Relaxed) >= read);
    drop(response);
    agent.at_rest([0, 0, 1, 0]).await;
}

#[tokio::test]
async fn uploads_stream_with_back_pressure_and_arrive_whole() {
    let go = Arc::new(Notify::new());
    let wait = go.clone();
    let addr = backend(move |req| {
        let wait = wait.clone();
        async move {
            wait.notified().await;
            let body = req.into_body().map_err(io::Error::other).boxed();
            Response::new(body)
        }
    })
    .await;
    let agent = agent(addr, |_| {});
    let sent = Arc::new(AtomicUsize::new(0));
    let (mut tx, body) = Channel::<Bytes, io::Error>::new(1);
    let counter = sent.clone();
    const CHUNK: usize = 64 * 1024;
    const CHUNKS: usize = 512;
    tokio::spawn(async move {
        for i in 0..CHUNKS {
            if tx.send_data(Bytes::from(vec![i as u8; CHUNK])).await.is_err() {
                return;
            }
            counter.fetch_add(CHUNK, Ordering::Relaxed);
        }
    });
    let request = Request::post("/").header("host", "a").body(body).unwrap();
    let mut client = client1(agent.addr).await;
    let response = tokio::spawn(async move { client.send_request(request).await.unwrap() });
    let settled = settle(&sent).await;
    assert!(settled < 16 << 20, "{settled} bytes were taken for a backend that does not read");
    go.notify_one();
    let echoed = within(response).await.unwrap().into_body().collect().await.unwrap().to_bytes();
    assert_eq!(echoed.len(), CHUNK * CHUNKS);
    assert!(echoed.chunks(CHUNK).enumerate().all(|(i, chunk)| chunk.iter().all(|b| *b == i as u8)));
    agent.at_rest([1, 0, 0, 0]).await;
}

#[tokio::test]
async fn a_get_keeps_its_body_and_no_other_gets_one() {
    // Returns the body and its framing in a header, because the answer to HEAD has no body.
    let addr = backend(|req| async move {
        let framing = [header::TRANSFER_ENCODING, header::CONTENT_LENGTH]
            .map(|name| req.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned));
        let body = req.into_body().collect().await.unwrap().to_bytes();
        let mut reply = text("");
        reply.headers_mut().insert("x-seen", format!("{framing:?} {body:?}").parse().unwrap());
        reply
    })
    .await;
    let agent = agent(addr, |config| config.upstream_http2 = UpstreamHttp2::Never);
    let (mut client1, client2) = (client1(agent.addr).await, client2(agent.addr).await);
    let mut ended = 0;
    for method in [Method::GET, Method::HEAD, Method::DELETE] {
        for (length, body, seen) in [
            (None, Some("abc"), r#"[Some("chunked"), None] b"abc""#),
            (Some(3), Some("abc"), r#"[None, Some("3")] b"abc""#),
            (None, None, r#"[None, None] b"""#),
        ] {
            for http2 in [false, true] {
                let target = if http2 { "http://app.example/" } else { "/" };
                let mut request =
                    Request::builder().method(&method).uri(target).header("host", "app.example");
                request = match length {
                    Some(length) => request.header("content-length", length),
                    None if body.is_some() && !http2 => request.header("transfer-encoding", "chunked"),
                    None => request,
                };
                let request = request.body(body.map_or_else(nothing, unknown_length)).unwrap();
                let response = if http2 {
                    within(client2.clone().send_request(request)).await
                } else {
                    client1.ready().await.unwrap();
                    within(client1.send_request(request)).await
                };
                assert_eq!(response.unwrap().headers()["x-seen"], seen, "{method} http2={http2}");
                ended += 1;
            }
        }
    }
    agent.at_rest([ended, 0, 0, 0]).await;
    assert_eq!(agent.load.counters().upstream_connections(), 1);
}

#[tokio::test]
async fn trailers_pass_in_both_versions() {
    for http2 in [false, true] {
        let addr = backend(|req| async move {
            let sent = req.into_body().collect().await.unwrap();
            let trailer = sent.trailers().and_then(|t| t.get("x-sum")).cloned();
            let mut reply = Response::new(with_trailer("a", trailer.unwrap()).boxed());
            reply.headers_mut().insert("trailer", "x-sum".parse().unwrap());
            reply
        })
        .await;
        let agent = agent(addr, |_| {});
        let body = with_trailer("b", "42".parse().unwrap());
        let uri = if http2 { format!("http://{}/", agent.addr) } else { "/".to_owned() };
        let mut request =
            Request::post(uri).header("te", "trailers").header("trailer", "x-sum").body(body).unwrap();
        let response = if http2 {
            client2(agent.addr).await.send_request(request).await.unwrap()
        } else {
            request.headers_mut().insert("host", "a".parse().unwrap());
            request.headers_mut().insert("connection", "te".parse().unwrap());
            client1(agent.addr).await.send_request(request).await.unwrap()
        };
        let whole = response.into_body().collect().await.unwrap();
        assert_eq!(whole.trailers().unwrap()["x-sum"], "42", "http2={http2}");
        agent.at_rest([1, 0, 0, 0]).await;
    }
}

#[tokio::test]
async fn the_http_version_is_kept_unless_configured_or_unsupported_by_the_backend() {
    let echo_version = |req: Request<hyper::body::Incoming>| async move {
        let mut reply = text("");
        let host = req.uri().authority().map(|a| a.to_string());
        let host = host.or_else(|| Some(req.headers().get("host")?.to_str().ok()?.to_owned())).unwrap();
        let seen = format!("{:?} {host} {:?}", req.version(), req.headers().get("cookie"));
        reply.headers_mut().insert("x-seen", seen.parse().unwrap());
        reply
    };
    let both = backend(echo_version).await;
    for (setting, request_http2, expected) in [
        (UpstreamHttp2::Auto, false, "HTTP/1.1 app.example None"),
        (UpstreamHttp2::Auto, true, "HTTP/2.0 app.example None"),
        (UpstreamHttp2::Never, true, "HTTP/1.1 app.example None"),
        (UpstreamHttp2::Always, false, "HTTP/2.0 app.example None"),
    ] {
        let agent = agent(both, |config| config.upstream_http2 = setting);
        let response = if request_http2 {
            let request = Request::get("http://app.example/").body(Empty::<Bytes>::new()).unwrap();
            let response = client2(agent.addr).await.send_request(request).await.unwrap();
            assert_eq!(response.version(), Version::HTTP_2);
            response
        } else {
            client1(agent.addr).await.send_request(get("/")).await.unwrap()
        };
        assert_eq!(response.headers()["x-seen"], expected, "{setting:?} {request_http2}");
        agent.at_rest([1, 0, 0, 0]).await;
    }

    let only_http1 = raw_backend(|mut tcp| async move {
        let head = read_head(&mut tcp).await;
        let reply: &[u8] = if head.starts_with("GET / HTTP/1.1\r\n") && head.contains("cookie: a=1; b=2") {
            b"HTTP/1.1 204 No Content\r\n\r\n"
        } else {
            b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n"
        };
        let _ = tcp.write_all(reply).await;
    })
    .await;
    let agent = agent(only_http1, |_| {});
    let mut client = client2(agent.addr).await;
    for _ in 0..2 {
        let request = Request::get("http://app.example/")
            .header("cookie", "a=1")
            .header("cookie", "b=2")
            .body(Empty::<Bytes>::new())
            .unwrap();
        assert_eq!(client.send_request(request).await.unwrap().status(), StatusCode::NO_CONTENT);
    }
    agent.at_rest([2, 0, 0, 0]).await;
}

#[tokio::test]
async fn an_upgrade_joins_the_connections_and_counts_as_one_request() {
    let addr = raw_backend(|mut tcp| async move {
        let head = read_head(&mut tcp).await.to_ascii_lowercase();
        assert!(head.contains("upgrade: websocket") && head.contains("connection: upgrade"), "{head}");
        let _ = tcp
            .write_all(
                b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nhi",
            )
            .await;
        let (mut read, mut write) = tcp.split();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    })
    .await;
    let agent = agent(addr, |_| {});
    let mut request = get("/");
    request.headers_mut().insert("connection", "Upgrade".parse().unwrap());
    request.headers_mut().insert("upgrade", "websocket".parse().unwrap());
    let response = client1(agent.addr).await.send_request(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(response.headers()["upgrade"], "websocket");
    assert!(response.headers().contains_key("x-prequal-load"));
    let mut tunnel = TokioIo::new(hyper::upgrade::on(response).await.unwrap());
    let mut greeting = [0; 2];
    within(tunnel.read_exact(&mut greeting)).await.unwrap();
    assert_eq!(&greeting, b"hi", "what came with the head is not lost");
    tunnel.write_all(b"ping").await.unwrap();
    let mut echo = [0; 4];
    within(tunnel.read_exact(&mut echo)).await.unwrap();
    assert_eq!((&echo, agent.load.rif()), (b"ping", 1));
    drop(tunnel);
    agent.at_rest([0, 0, 0, 1]).await;
    assert_eq!(agent.load.latency_us(), None, "a WebSocket's life is no latency");
}

#[tokio::test]
async fn a_refused_upgrade_is_an_ordinary_response() {
    let agent = agent(backend(|_| async { text("no") }).await, |_| {});
    let mut request = get("/");
    request.headers_mut().insert("connection", "upgrade".parse().unwrap());
    request.headers_mut().insert("upgrade", "websocket".parse().unwrap());
    let response = client1(agent.addr).await.send_request(request).await.unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "no");
    agent.at_rest([1, 0, 0, 0]).await;
}

#[tokio::test]
async fn a_pooled_connection_closed_by_the_backend_fails_no_request() {
    let addr = raw_backend(|mut tcp| async move {
        // The backend promises keep-alive, but closes the connection.
        read_head(&mut tcp).await;
        let _ = tcp.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    })
    .await;
    let agent = agent(addr, |_| {});
    for i in 1..=20 {
        assert_eq!(fetch(agent.addr, "/").await.0.status, StatusCode::OK);
        agent.at_rest([i, 0, 0, 0]).await;
        // Wait until the close has arrived: a request sent at the same moment may be lost.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_mix_of_clients_leaves_no_request_in_flight() {
    let addr = backend(|req| async move {
        match req.uri().path() {
            "/slow" => {
                tokio::time::sleep(Duration::from_millis(30)).await;
                text("slow")
            }
            "/fail" => {
                let mut reply = text("fail");
                *reply.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
                reply
            }
            "/endless" => endless(),
            _ => text("fast"),
        }
    })
    .await;
    // A hundred concurrent connections take time on a busy machine.
    let agent = agent(addr, |config| config.limits.connect_timeout = Duration::from_secs(20));
    let mut tasks = Vec::new();
    for i in 0..200 {
        let addr = agent.addr;
        tasks.push(tokio::spawn(async move {
            let path = ["/", "/slow", "/fail", "/endless"][i % 4];
            let run = async {
                let response = if i % 8 < 4 {
                    client1(addr).await.send_request(get(path)).await
                } else {
                    client2(addr).await.send_request(get2(addr, path)).await
                };
                let _ = response.unwrap().into_body().collect().await;
            };
            // Some clients give up at a random point.
            let patience = Duration::from_millis(if i % 4 == 3 { 20 } else { 5000 });
            let _ = tokio::time::timeout(patience, run).await;
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    eventually("all requests ended", || agent.load.rif() == 0).await;
    let [success, failure, _, streaming] = agent.ended();
    assert_eq!((success, failure, streaming), (100, 50, 0));
}

fn get2(addr: std::net::SocketAddr, path: &str) -> Request<Empty<Bytes>> {
    Request::get(format!("http://{addr}{path}")).body(Empty::new()).unwrap()
}

/// Returns a body of unknown length, so that HTTP/1.1 sends it in chunks.
fn with_trailer(data: &'static str, trailer: HeaderValue) -> Channel<Bytes, io::Error> {
    let (mut tx, body) = Channel::new(2);
    tokio::spawn(async move {
        let _ = tx.send_data(Bytes::from_static(data.as_bytes())).await;
        let _ = tx.send_trailers(HeaderMap::from_iter([("x-sum".parse().unwrap(), trailer)])).await;
    });
    body
}

fn nothing() -> BoxBody<Bytes, io::Error> {
    Empty::new().map_err(|never| match never {}).boxed()
}

fn unknown_length(data: &'static str) -> BoxBody<Bytes, io::Error> {
    let (mut tx, body) = Channel::new(1);
    tokio::spawn(async move { tx.send_data(Bytes::from_static(data.as_bytes())).await });
    body.boxed()
}

fn endless() -> Reply {
    endless_counted(Arc::default())
}

fn endless_counted(produced: Arc<AtomicUsize>) -> Reply {
    let (mut tx, body) = Channel::<Bytes, io::Error>::new(1);
    tokio::spawn(async move {
        let chunk = Bytes::from(vec![7; 64 * 1024]);
        while tx.send(Frame::data(chunk.clone())).await.is_ok() {
            produced.fetch_add(chunk.len(), Ordering::Relaxed);
        }
    });
    Response::new(body.boxed())
}

/// Waits until a counter has not moved for 200 ms and returns it.
async fn settle(counter: &AtomicUsize) -> usize {
    let mut last = (counter.load(Ordering::Relaxed), Instant::now());
    loop {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let now = counter.load(Ordering::Relaxed);
        if now != last.0 {
            assert!(now < 256 << 20, "no back-pressure: {now} bytes and counting");
            last = (now, Instant::now());
        } else if now > 0 && last.1.elapsed() > Duration::from_millis(200) {
            return now;
        }
    }
}
