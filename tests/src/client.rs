//! A blocking HTTP client, a minimal WebSocket client for echoes, and ways to abort a request.

use std::error::Error as _;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::runtime::{block_on, handle};

/// Timeout of every request, so that no test runs for ever.
const LIMIT: Duration = Duration::from_secs(30);
/// Idle time after which a connection is no longer reused. A draining listener may close a connection just as the
/// client reuses it, and then the client cannot tell whether the request was processed.
const IDLE: Duration = Duration::from_secs(90);
/// The same for a client that reconnects: shorter than the drain time of any listener in the tests.
const IDLE_IF_RECONNECTING: Duration = Duration::from_millis(500);

/// A request to send.
#[derive(Clone, Debug)]
pub struct Request {
    method: Method,
    path: String,
    headers: HeaderMap,
    body: Bytes,
}

impl Request {
    /// A GET of `path`.
    pub fn get(path: &str) -> Self {
        Self { method: Method::GET, path: path.into(), headers: HeaderMap::new(), body: Bytes::new() }
    }

    /// A POST of `body` to `path`.
    pub fn post(path: &str, body: impl Into<Bytes>) -> Self {
        Self { method: Method::POST, body: body.into(), ..Self::get(path) }
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        let name = HeaderName::from_bytes(name.as_bytes()).expect("a header name");
        self.headers.append(name, HeaderValue::from_str(value).expect("a header value"));
        self
    }
}

/// A complete response.
#[derive(Clone, Debug)]
pub struct Response {
    /// Status.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
    /// Trailers, empty if there were none.
    pub trailers: HeaderMap,
    /// Time from sending to the end of the body.
    pub elapsed: Duration,
}

impl Response {
    /// The header `name` as text, if there is one.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Sends requests to one address over a pool of connections.
#[derive(Clone, Debug)]
pub struct Client {
    addr: SocketAddr,
    pool: Pool<HttpConnector, Full<Bytes>>,
    /// Whether to resend a request that the server did not process.
    reconnects: bool,
}

impl Client {
    /// A client that speaks HTTP/1.1.
    pub fn new(addr: SocketAddr) -> Self {
        Self::build(addr, false, false)
    }

    /// A client that speaks cleartext HTTP/2 with prior knowledge.
    pub fn http2(addr: SocketAddr) -> Self {
        Self::build(addr, true, false)
    }

    /// A client that behaves like users' clients: if a request could not be sent because its connection was closing, or
    /// was refused for that reason, it sends the request on another one. It does not reuse connections that were idle
    /// for half a second.
    pub fn reconnecting(addr: SocketAddr, http2: bool) -> Self {
        Self::build(addr, http2, true)
    }

    fn build(addr: SocketAddr, http2: bool, reconnects: bool) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let pool = Pool::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(if reconnects { IDLE_IF_RECONNECTING } else { IDLE })
            .retry_canceled_requests(reconnects)
            .http2_only(http2)
            .build(connector);
        Self { addr, pool, reconnects }
    }

    /// Sends a GET for `path` and waits for the complete response.
    pub fn get(&self, path: &str) -> Result<Response> {
        self.send(Request::get(path))
    }

    /// Sends `request` and waits for the complete response.
    pub fn send(&self, request: Request) -> Result<Response> {
        let client = self.clone();
        block_on(async move { client.send_async(request).await })
    }

    /// Sends `request` and resolves to the complete response. Dropping the future aborts the request.
    pub async fn send_async(&self, request: Request) -> Result<Response> {
        let start = Instant::now();
        let mut message = http::Request::builder()
            .method(request.method)
            .uri(format!("http://{}{}", self.addr, request.path))
            .body(Full::new(request.body))?;
        message.headers_mut().extend(request.headers);
        let answer = async {
            let mut response = self.pool.request(message.clone()).await;
            while self.reconnects && response.as_ref().is_err_and(was_not_processed) {
                response = self.pool.request(message.clone()).await;
            }
            let (parts, body) = response?.into_parts();
            let body = body.collect().await?;
            let trailers = body.trailers().cloned().unwrap_or_default();
            anyhow::Ok(Response {
                status: parts.status,
                headers: parts.headers,
                body: body.to_bytes(),
                trailers,
                elapsed: start.elapsed(),
            })
        };
        tokio::time::timeout(LIMIT, answer).await.context("no answer within 30 s")?
    }

    /// Sends `request` and aborts it after `patience`. Returns true if it was aborted before it was answered.
    pub fn abandon(&self, request: Request, patience: Duration) -> bool {
        let client = self.clone();
        block_on(async move { tokio::time::timeout(patience, client.send_async(request)).await.is_err() })
    }

    /// Sends `request` and aborts it as soon as `when` holds, which is checked every millisecond. Returns true if it
    /// was aborted before it was answered.
    pub fn abandon_when(&self, request: Request, when: impl Fn() -> bool) -> bool {
        let client = self.clone();
        let sent = handle().spawn(async move { client.send_async(request).await });
        while !when() && !sent.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        sent.abort();
        block_on(async move { sent.await.is_err() })
    }

    /// Sends `total` requests, up to `at_once` in parallel, the i-th made by `make(i)`. The results are in order of
    /// completion.
    pub fn burst(
        &self,
        total: usize,
        at_once: usize,
        make: impl Fn(usize) -> Request + Send + Sync + 'static,
    ) -> Vec<Result<Response>> {
        let client = self.clone();
        block_on(async move {
            let next = Arc::new(AtomicUsize::new(0));
            let make = Arc::new(make);
            let mut tasks = tokio::task::JoinSet::new();
            for _ in 0..at_once {
                let (client, next, make) = (client.clone(), Arc::clone(&next), Arc::clone(&make));
                tasks.spawn(async move {
                    let mut results = Vec::new();
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= total {
                            return results;
                        }
                        results.push(client.send_async(make(index)).await);
                    }
                });
            }
            tasks.join_all().await.into_iter().flatten().collect()
        })
    }
}

/// A connection after `Upgrade: websocket` that carries raw bytes. They are not framed, because nothing on the path
/// parses frames.
#[derive(Debug)]
pub struct WebSocket(TcpStream);

impl WebSocket {
    /// Requests an upgrade from `addr`; fails unless the response is 101.
    pub fn connect(addr: SocketAddr, path: &str) -> Result<Self> {
        let mut stream = TcpStream::connect(addr)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: {addr}\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).context("the connection ended before the answer to the upgrade")?;
            head.push(byte[0]);
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        ensure!(head.starts_with("HTTP/1.1 101"), "upgrade refused: {head}");
        Ok(Self(stream))
    }

    /// Sends `bytes` and reads the same number back.
    pub fn round_trip(&mut self, bytes: &[u8]) -> Result<Vec<u8>> {
        self.0.write_all(bytes)?;
        let mut back = vec![0; bytes.len()];
        self.0.read_exact(&mut back)?;
        Ok(back)
    }
}

/// Whether the server closed the connection in an orderly way without processing the request: its stream came after the
/// last one that the GOAWAY frame names.
fn was_not_processed(error: &hyper_util::client::legacy::Error) -> bool {
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<h2::Error>() {
            return error.is_go_away() && error.reason() == Some(h2::Reason::NO_ERROR);
        }
        cause = error.source();
    }
    false
}

/// Asserts that none of Prequal's headers is among `headers`.
#[track_caller]
pub fn assert_no_prequal_headers(headers: &HeaderMap) {
    let found = headers.keys().find(|name| name.as_str().starts_with("x-prequal-"));
    assert!(found.is_none(), "{found:?} in {headers:?}");
}

/// GETs `path` from `addr` and returns the body; fails unless the status is 200.
pub fn http_get(addr: SocketAddr, path: &str) -> Result<String> {
    let response = Client::new(addr).get(path)?;
    ensure!(response.status == StatusCode::OK, "{path}: {} {}", response.status, response.text());
    Ok(response.text())
}
