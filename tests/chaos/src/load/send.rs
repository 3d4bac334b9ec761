//! Sends one request of each kind, as a user's client would, and checks the answer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Channel, Full};
use hyper::body::{Frame, Incoming};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::Ending;
use crate::mix::{self, Kind, MESSAGE_GAP, MESSAGES, PART, PART_GAP, PARTS};

type Body = UnsyncBoxBody<Bytes, std::convert::Infallible>;
type Pool = Client<HttpConnector, Body>;

/// Number of HTTP/2 clients, each with one connection.
const HTTP2_CLIENTS: usize = 4;

/// Users' clients, with their connections.
#[derive(Clone)]
pub(crate) struct Clients {
    addr: SocketAddr,
    http1: Pool,
    http2: Arc<[Pool]>,
    next: Arc<AtomicUsize>,
}

impl Clients {
    pub(crate) fn new(addr: SocketAddr) -> Self {
        let pool = |http2| {
            let mut connector = HttpConnector::new();
            connector.set_nodelay(true);
            Client::builder(TokioExecutor::new())
                .pool_timer(TokioTimer::new())
                // Like other clients: if a request was not sent because its connection was closing, send it on another
                // one.
                .retry_canceled_requests(true)
                .http2_only(http2)
                .build(connector)
        };
        let http2 = (0..HTTP2_CLIENTS).map(|_| pool(true)).collect();
        Self { addr, http1: pool(false), http2, next: Arc::new(AtomicUsize::new(0)) }
    }

    /// The clients of the kind's HTTP version. Uploads and downloads alternate between HTTP/1.1 and HTTP/2.
    fn pool(&self, kind: Kind) -> &Pool {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        match kind {
            Kind::Http2 | Kind::Unary | Kind::Streaming => &self.http2[next % HTTP2_CLIENTS],
            Kind::Upload | Kind::Download if next.is_multiple_of(2) => &self.http2[next / 2 % HTTP2_CLIENTS],
            _ => &self.http1,
        }
    }

    async fn request(
        &self,
        kind: Kind,
        method: Method,
        path: &str,
        body: Body,
        ending: &mut Ending,
    ) -> Result<Response<Incoming>> {
        let mut request =
            Request::builder().method(method).uri(format!("http://{}{path}", self.addr)).body(body)?;
        if matches!(kind, Kind::Unary | Kind::Streaming) {
            let headers = request.headers_mut();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
            headers.insert(header::TE, HeaderValue::from_static("trailers"));
        }
        let response = self.pool(kind).request(request).await?;
        ending.replica = replica(response.headers());
        if response.status() != StatusCode::OK {
            return Err(refusal(response).await);
        }
        Ok(response)
    }
}

/// Sends one request and waits for its end; `ending` receives the outcome.
pub(crate) async fn send(kind: Kind, clients: &Clients, ending: &mut Ending) {
    let done = match kind {
        Kind::Http1 | Kind::Http2 => plain(kind, clients, ending).await,
        Kind::Unary => unary(clients, ending).await,
        Kind::Streaming => streaming(clients, ending).await,
        Kind::WebSocket => socket(clients.addr, ending).await,
        Kind::Upload => upload(clients, ending).await,
        Kind::Download => download(clients, ending).await,
    };
    if let Err(error) = done {
        ending.error = Some(format!("{error:#}"));
    }
}

async fn plain(kind: Kind, clients: &Clients, ending: &mut Ending) -> Result<()> {
    let response = clients.request(kind, Method::GET, mix::PLAIN, full(Bytes::new()), ending).await?;
    let body = response.into_body().collect().await?.to_bytes();
    ensure!(body == "ok", "another body: {body:?}");
    Ok(())
}

async fn unary(clients: &Clients, ending: &mut Ending) -> Result<()> {
    let body = full(mix::message());
    let response = clients.request(Kind::Unary, Method::POST, mix::UNARY, body, ending).await?;
    ensure_grpc_ok(response.headers())?;
    let body = response.into_body().collect().await?;
    let trailers = body.trailers().cloned().context("no trailers")?;
    ensure!(trailers.contains_key("grpc-status"), "no grpc-status");
    ensure_grpc_ok(&trailers)?;
    let got = body.to_bytes();
    ensure!(
        got == mix::message(),
        "another message: {} bytes instead of {}",
        got.len(),
        mix::message().len()
    );
    Ok(())
}

async fn streaming(clients: &Clients, ending: &mut Ending) -> Result<()> {
    let (mut sender, body) = Channel::<Bytes, std::convert::Infallible>::new(1);
    tokio::spawn(async move {
        for _ in 0..MESSAGES {
            // An error means that the call has ended; its receiving half reports why.
            if sender.send(Frame::data(mix::message())).await.is_err() {
                return;
            }
            tokio::time::sleep(MESSAGE_GAP).await;
        }
    });
    let response =
        clients.request(Kind::Streaming, Method::POST, mix::STREAMING, body.boxed_unsync(), ending).await?;
    ensure_grpc_ok(response.headers())?;
    let body = response.into_body().collect().await?;
    let trailers = body.trailers().cloned().context("no trailers")?;
    ensure!(trailers.contains_key("grpc-status"), "no grpc-status");
    ensure_grpc_ok(&trailers)?;
    let (got, all) = (body.to_bytes().len(), mix::message().len() * MESSAGES);
    ensure!(got == all, "{got} bytes of {all} came back");
    Ok(())
}

async fn upload(clients: &Clients, ending: &mut Ending) -> Result<()> {
    let (mut sender, body) = Channel::<Bytes, std::convert::Infallible>::new(1);
    tokio::spawn(async move {
        for _ in 0..PARTS {
            if sender.send(Frame::data(Bytes::from(vec![b'u'; PART]))).await.is_err() {
                return;
            }
            tokio::time::sleep(PART_GAP).await;
        }
    });
    let response =
        clients.request(Kind::Upload, Method::POST, mix::UPLOAD, body.boxed_unsync(), ending).await?;
    let body = response.into_body().collect().await?.to_bytes();
    ensure!(body == (PARTS * PART).to_string(), "{body:?} bytes arrived");
    Ok(())
}

async fn download(clients: &Clients, ending: &mut Ending) -> Result<()> {
    let response =
        clients.request(Kind::Download, Method::GET, mix::DOWNLOAD, full(Bytes::new()), ending).await?;
    let length = response.into_body().collect().await?.to_bytes().len();
    ensure!(length == PARTS * PART, "{length} bytes came");
    Ok(())
}

async fn socket(addr: SocketAddr, ending: &mut Ending) -> Result<()> {
    let stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection.with_upgrades());
    let request = Request::builder()
        .uri(mix::SOCKET)
        .header(header::HOST, addr.to_string())
        .header(header::CONNECTION, "upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_VERSION, "13")
        .header(header::SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ==")
        .body(Full::<Bytes>::default())?;
    let response = sender.send_request(request).await?;
    ending.replica = replica(response.headers());
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Err(refusal(response).await);
    }
    let mut io = TokioIo::new(hyper::upgrade::on(response).await?);
    for _ in 0..MESSAGES {
        io.write_all(&mix::message()).await?;
        io.flush().await?;
        let mut back = vec![0; mix::message().len()];
        io.read_exact(&mut back).await?;
        ensure!(back == mix::message(), "another message");
        tokio::time::sleep(MESSAGE_GAP).await;
    }
    drop(io);
    connection.abort();
    Ok(())
}

fn full(bytes: Bytes) -> Body {
    Full::new(bytes).boxed_unsync()
}

fn replica(headers: &HeaderMap) -> Option<usize> {
    headers.get(mix::REPLICA)?.to_str().ok()?.parse().ok()
}

/// Fails if `headers` carry a `grpc-status` other than 0. Response headers carry one if nothing follows them.
fn ensure_grpc_ok(headers: &HeaderMap) -> Result<()> {
    match headers.get("grpc-status") {
        Some(status) if status != "0" => {
            let message =
                headers.get("grpc-message").map(|message| String::from_utf8_lossy(message.as_bytes()));
            bail!(
                "grpc-status {}: {}",
                String::from_utf8_lossy(status.as_bytes()),
                message.unwrap_or_default()
            )
        }
        _ => Ok(()),
    }
}

async fn refusal(response: Response<Incoming>) -> anyhow::Error {
    let status = response.status();
    let body = response.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let text = String::from_utf8_lossy(&body[..body.len().min(160)]).trim().to_owned();
    anyhow::anyhow!("{}: {text}", status.as_u16())
}
