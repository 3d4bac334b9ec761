//! Checks whether the backend can serve: at each request for `/readyz`, and repeatedly while it cannot.
//!
//! There are no repeated checks while the backend can serve: requests show that it can, and a backend is not required
//! to cope with connections that carry no request.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::config::{ReadyCheck, Upstream};
use crate::load::Load;
use crate::socket::Socket;
use crate::tls::Connector;

/// Checks the backend.
pub(crate) struct Checker {
    pub(crate) check: ReadyCheck,
    pub(crate) target: Upstream,
    pub(crate) tls: Option<Connector>,
    /// Whether an HTTP check goes over HTTP/2.
    pub(crate) http2: bool,
    pub(crate) timeout: Duration,
    pub(crate) load: Load,
}

impl Checker {
    /// Checks once, and records the result in the load: reports of a replica that is not ready say that everything
    /// fails.
    pub(crate) async fn check(&self) -> Result<(), NotReady> {
        let checked = tokio::time::timeout(self.timeout, self.ask()).await.unwrap_or(Err(NotReady::Timeout));
        self.load.mark_ready(checked.is_ok());
        checked
    }

    /// Checks repeatedly whenever the backend cannot serve, until it can again. Never ends.
    pub(crate) async fn watch(self: Arc<Self>) {
        loop {
            self.load.until_not_ready().await;
            if self.check().await.is_err() {
                tokio::time::sleep(RECHECK).await;
            }
        }
    }

    async fn ask(&self) -> Result<(), NotReady> {
        let socket = Socket::connect(&self.target).await?;
        match &self.check {
            ReadyCheck::Tcp => Ok(()),
            ReadyCheck::Http { path } => {
                let request = Request::get(self.uri(path, self.http2)).body(Full::default());
                let status = self.send(socket, self.http2, request).await?.status();
                let well = status.is_success() || status.is_redirection();
                if well { Ok(()) } else { Err(NotReady::Status(status)) }
            }
            ReadyCheck::Grpc { service } => self.ask_grpc(socket, service).await,
        }
    }

    /// Calls `grpc.health.v1.Health/Check`. Its two messages are too small to need a library.
    async fn ask_grpc(&self, socket: Socket, service: &str) -> Result<(), NotReady> {
        let mut message = Vec::new();
        if let (false, Ok(length)) = (service.is_empty(), u8::try_from(service.len())) {
            message.extend([0x0a, length]);
            message.extend(service.as_bytes());
        }
        let mut body = vec![0, 0, 0, 0, u8::try_from(message.len()).unwrap_or_default()];
        body.append(&mut message);
        let request = Request::post(self.uri("/grpc.health.v1.Health/Check", true))
            .header(header::CONTENT_TYPE, "application/grpc")
            .header(header::TE, "trailers")
            .body(Full::from(body));
        let (head, body) = self.send(socket, true, request).await?.into_parts();
        if head.status != StatusCode::OK {
            return Err(NotReady::Status(head.status));
        }
        let body = Limited::new(body, MAX_ANSWER).collect().await.map_err(|_| NotReady::Answer)?;
        let headers = body.trailers().unwrap_or(&head.headers);
        let status = headers.get("grpc-status").and_then(|status| status.to_str().ok()).unwrap_or_default();
        if status != "0" {
            return Err(NotReady::Grpc(status.to_owned()));
        }
        // Five bytes of framing, then field 1: SERVING.
        if body.to_bytes().get(5..7) == Some(&[0x08, 1]) { Ok(()) } else { Err(NotReady::NotServing) }
    }

    /// Returns the target of a request. HTTP/2 names the authority in it.
    fn uri(&self, path: &str, http2: bool) -> String {
        if !http2 {
            return path.to_owned();
        }
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}{path}", self.target.authority())
    }

    async fn send(
        &self,
        socket: Socket,
        http2: bool,
        request: http::Result<Request<Full<Bytes>>>,
    ) -> Result<Response<Incoming>, NotReady> {
        let mut request = request.map_err(|_| NotReady::Answer)?;
        let io: Box<dyn Io> = match &self.tls {
            None => Box::new(socket),
            Some(tls) => Box::new(tls.connect(http2, socket).await?),
        };
        // A connection ends when its sender is dropped.
        if http2 {
            let (mut sender, conn) = http2::handshake(TokioExecutor::new(), TokioIo::new(io)).await?;
            tokio::spawn(conn);
            return Ok(sender.send_request(request).await?);
        }
        let (mut sender, conn) = http1::handshake(TokioIo::new(io)).await?;
        tokio::spawn(conn);
        if let Ok(host) = self.target.authority().parse() {
            request.headers_mut().insert(header::HOST, host);
        }
        Ok(sender.send_request(request).await?)
    }
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Reason why the backend does not count as ready.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotReady {
    #[error("not reachable: {0}")]
    Connect(#[from] std::io::Error),
    #[error("no answer: {0}")]
    Http(#[from] hyper::Error),
    #[error("answers {0}")]
    Status(StatusCode),
    #[error("answers gRPC status {0}")]
    Grpc(String),
    #[error("not SERVING")]
    NotServing,
    #[error("answer not readable")]
    Answer,
    #[error("no answer in time")]
    Timeout,
}

/// Time between two checks of a backend that cannot serve.
const RECHECK: Duration = Duration::from_millis(250);
/// Maximum length of a health answer, bytes. A normal answer has a few bytes.
const MAX_ANSWER: usize = 4096;
