//! Connections to the one backend: an idle pool for HTTP/1.1, one shared connection for HTTP/2.
//!
//! A pool of our own instead of hyper-util's client: there is one authority, so no key is hashed, and a connection
//! goes back to the pool with the last frame of the body, without a task of its own. A request is sent again only
//! if not a byte of it was written (the pooled connection had been closed meanwhile).

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use prequal_core::report::{UNANSWERED, UNSENT};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::config::{Limits, Upstream};
use crate::load::Load;
use crate::plb::Plb;
use crate::tls::Connector;
use crate::upload::Upload;

/// The way to the backend.
pub(crate) struct Pool {
    target: Upstream,
    tls: Option<Connector>,
    plb: Option<Plb>,
    load: Load,
    connect_timeout: Duration,
    idle_timeout: Duration,
    max_idle: usize,
    max_header_bytes: usize,
    idle: Mutex<VecDeque<Idle>>,
    http2: Mutex<Option<http2::SendRequest<Upload>>>,
    /// Held while the HTTP/2 connection is made, so that a burst makes one.
    connecting: tokio::sync::Mutex<()>,
    /// When the backend last showed that it speaks HTTP/1 only.
    http1_only: Mutex<Option<Instant>>,
}

struct Idle {
    sender: http1::SendRequest<Upload>,
    since: Instant,
}

impl Pool {
    pub(crate) fn new(
        target: Upstream,
        tls: Option<Connector>,
        plb: Option<Plb>,
        limits: &Limits,
        load: Load,
    ) -> Self {
        Self {
            target,
            tls,
            plb,
            load,
            connect_timeout: limits.connect_timeout,
            idle_timeout: limits.upstream_idle_timeout,
            max_idle: limits.max_upstream_idle,
            max_header_bytes: limits.max_header_bytes,
            idle: Mutex::default(),
            http2: Mutex::default(),
            connecting: tokio::sync::Mutex::default(),
            http1_only: Mutex::default(),
        }
    }

    pub(crate) fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// The authority of the backend, for an HTTP/2 request that came without any.
    pub(crate) fn authority(&self) -> String {
        self.target.authority()
    }

    /// Whether a request that came over HTTP/2 can go on over HTTP/2. Makes the connection to find out.
    ///
    /// Clients are told to speak HTTP/2 to agents, and most backends speak HTTP/1.1 only.
    pub(crate) async fn speaks_http2(&self) -> bool {
        if self.live_http2().is_some() {
            return true;
        }
        let refused = *self.http1_only.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.is_some_and(|at| at.elapsed() < HTTP1_ONLY_MEMORY) {
            return false;
        }
        if !matches!(self.http2_sender(true).await, Err(UpstreamError::NoHttp2)) {
            return true;
        }
        *self.http1_only.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        false
    }

    /// Sends over HTTP/1.1 and returns with the head of the response.
    pub(crate) async fn send_http1(
        self: &Arc<Self>,
        mut req: Request<Upload>,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        loop {
            let (mut sender, reused) = match self.take_idle() {
                Some(sender) => (sender, true),
                None => (self.connect_http1().await?, false),
            };
            match sender.try_send_request(req).await {
                Ok(response) => {
                    let lease = Lease { sender, pool: self.clone() };
                    return Ok(response.map(|body| UpstreamBody::new(body, Some(lease))));
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if reused => req = unsent,
                    Some(_) => return Err(connect_error(io::Error::other(error.into_error()))),
                    None => return Err(UpstreamError::sending(error.into_error())),
                },
            }
        }
    }

    /// Sends over HTTP/2 and returns with the head of the response.
    pub(crate) async fn send_http2(
        &self,
        mut req: Request<Upload>,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        for _ in 0..MAX_UNSENT {
            let mut sender = self.http2_sender(false).await?;
            match sender.try_send_request(req).await {
                Ok(response) => return Ok(response.map(|body| UpstreamBody::new(body, None))),
                Err(mut error) => match error.take_message() {
                    Some(unsent) => req = unsent,
                    None => return Err(UpstreamError::sending(error.into_error())),
                },
            }
        }
        Err(UpstreamError::Connect(io::ErrorKind::ConnectionReset.into()))
    }

    fn take_idle(&self) -> Option<http1::SendRequest<Upload>> {
        let mut idle = self.idle();
        // The last one in is the likeliest to be alive, and lets the others age out.
        while let Some(Idle { sender, since }) = idle.pop_back() {
            if since.elapsed() >= self.idle_timeout {
                idle.clear();
                return None;
            }
            if sender.is_ready() {
                return Some(sender);
            }
        }
        None
    }

    fn put_idle(&self, sender: http1::SendRequest<Upload>) {
        let now = Instant::now();
        let mut idle = self.idle();
        while idle.front().is_some_and(|old| now.saturating_duration_since(old.since) >= self.idle_timeout) {
            idle.pop_front();
        }
        if idle.len() < self.max_idle {
            idle.push_back(Idle { sender, since: now });
        }
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect_http1(&self) -> Result<http1::SendRequest<Upload>, UpstreamError> {
        let connect = async {
            let tcp = self.tcp().await?;
            match &self.tls {
                None => self.handshake_http1(tcp).await,
                Some(tls) => {
                    self.handshake_http1(
                        tls.http1.connect(tls.name.clone(), tcp).await.map_err(connect_error)?,
                    )
                    .await
                }
            }
        };
        tokio::time::timeout(self.connect_timeout, connect)
            .await
            .map_err(|_| UpstreamError::ConnectTimeout)?
    }

    async fn handshake_http1<T>(&self, io: T) -> Result<http1::SendRequest<Upload>, UpstreamError>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (sender, conn) = http1::Builder::new()
            .max_buf_size(self.max_header_bytes.max(MIN_BUFFER))
            .handshake(TokioIo::new(io))
            .await
            .map_err(|error| connect_error(io::Error::other(error)))?;
        // Its errors also come out of the request or body that they hit.
        tokio::spawn(conn.with_upgrades());
        Ok(sender)
    }

    /// `ask` first makes sure that the backend speaks HTTP/2 in cleartext.
    async fn http2_sender(&self, ask: bool) -> Result<http2::SendRequest<Upload>, UpstreamError> {
        if let Some(sender) = self.live_http2() {
            return Ok(sender);
        }
        let connect = async {
            let _one_at_a_time = self.connecting.lock().await;
            if let Some(sender) = self.live_http2() {
                return Ok(sender);
            }
            if ask && self.tls.is_none() {
                tokio::time::timeout(self.connect_timeout / 2, greet(self.tcp().await?))
                    .await
                    .map_err(|_| UpstreamError::NoHttp2)??;
            }
            let tcp = self.tcp().await?;
            let sender = match &self.tls {
                None => self.handshake_http2(tcp).await?,
                Some(tls) => {
                    let stream = tls.http2.connect(tls.name.clone(), tcp).await.map_err(connect_error)?;
                    if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
                        return Err(UpstreamError::NoHttp2);
                    }
                    self.handshake_http2(stream).await?
                }
            };
            *self.http2.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender.clone());
            Ok(sender)
        };
        // Waiting for another's attempt counts too: otherwise a silent backend would hold a queue for minutes.
        tokio::time::timeout(self.connect_timeout, connect)
            .await
            .map_err(|_| UpstreamError::ConnectTimeout)?
    }

    fn live_http2(&self) -> Option<http2::SendRequest<Upload>> {
        let sender = self.http2.lock().unwrap_or_else(PoisonError::into_inner);
        sender.as_ref().filter(|sender| !sender.is_closed()).cloned()
    }

    async fn handshake_http2<T>(&self, io: T) -> Result<http2::SendRequest<Upload>, UpstreamError>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (sender, conn) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW * 4)
            .max_header_list_size(u32::try_from(self.max_header_bytes).unwrap_or(u32::MAX))
            .handshake(TokioIo::new(io))
            .await
            .map_err(|error| connect_error(io::Error::other(error)))?;
        tokio::spawn(conn);
        Ok(sender)
    }

    async fn tcp(&self) -> Result<TcpStream, UpstreamError> {
        let tcp = match (&self.plb, self.target.addr()) {
            (Some(plb), _) => self.repathable(plb).await,
            (None, Some(addr)) => TcpStream::connect(addr).await,
            (None, None) => TcpStream::connect((self.target.host(), self.target.port())).await,
        }
        .inspect_err(|error| {
            // Nobody listens. Other errors are of the network or our own, and the backend may be as warm as ever.
            if error.kind() == io::ErrorKind::ConnectionRefused {
                self.load.mark_down();
            }
        })
        .map_err(connect_error)?;
        self.load.mark_up();
        tcp.set_nodelay(true).map_err(connect_error)?;
        self.load.counters().count_upstream_connection();
        Ok(tcp)
    }

    /// As `TcpStream::connect`, with the options of PLB set before the SYN.
    async fn repathable(&self, plb: &Plb) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for addr in tokio::net::lookup_host((self.target.host(), self.target.port())).await? {
            let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            plb.prepare("upstream", &socket, addr.is_ipv6());
            match socket.connect(addr).await {
                Ok(tcp) => return Ok(tcp),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// Opens HTTP/2 and waits for the `SETTINGS` that every HTTP/2 server sends first.
async fn greet(mut tcp: TcpStream) -> Result<(), UpstreamError> {
    tcp.write_all(GREETING).await.map_err(|_| UpstreamError::NoHttp2)?;
    let mut head = [0; FRAME_HEAD];
    tcp.read_exact(&mut head).await.map_err(|_| UpstreamError::NoHttp2)?;
    // Length (3), type 4 = SETTINGS, flags, stream 0. `HTTP/1.1 ...` has a `P` for a type.
    match head {
        [0, _, _, 4, 0, 0, 0, 0, 0] => Ok(()),
        _ => Err(UpstreamError::NoHttp2),
    }
}

/// The connection preface with an empty `SETTINGS`.
const GREETING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const FRAME_HEAD: usize = 9;

/// The response body of the backend. Gives its connection back with the last frame.
pub(crate) struct UpstreamBody {
    inner: Incoming,
    lease: Option<Lease>,
}

impl UpstreamBody {
    fn new(inner: Incoming, lease: Option<Lease>) -> Self {
        let mut this = Self { inner, lease };
        if this.inner.is_end_stream() {
            this.release();
        }
        this
    }

    fn release(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.release();
        }
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        match &frame {
            Some(Ok(_)) if !self.inner.is_end_stream() => {}
            Some(Err(_)) => self.lease = None,
            None | Some(Ok(_)) => self.release(),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

struct Lease {
    sender: http1::SendRequest<Upload>,
    pool: Arc<Pool>,
}

impl Lease {
    fn release(self) {
        let Self { mut sender, pool } = self;
        if sender.is_closed() {
            return;
        }
        if sender.is_ready() {
            pool.put_idle(sender);
            return;
        }
        // The response is over before its connection is: the request body is still being sent, or hyper's task
        // has not run yet.
        tokio::spawn(async move {
            if sender.ready().await.is_ok() {
                pool.put_idle(sender);
            }
        });
    }
}

/// Why no response came. Says what the client is told.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpstreamError {
    #[error("connect failed")]
    Connect(#[source] io::Error),
    #[error("connect timed out")]
    ConnectTimeout,
    #[error("HTTP/2 refused")]
    NoHttp2,
    #[error("closed before a response")]
    Reset(#[source] hyper::Error),
    #[error("no response in time")]
    ResponseTimeout,
    /// The client's own body broke off; the backend did nothing wrong.
    #[error("request body broke off")]
    RequestBody,
    #[error("switched protocols unasked")]
    Upgrade,
}

impl UpstreamError {
    fn sending(error: hyper::Error) -> Self {
        if error.is_user() { Self::RequestBody } else { Self::Reset(error) }
    }

    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Connect(_) | Self::NoHttp2 | Self::Reset(_) | Self::Upgrade => StatusCode::BAD_GATEWAY,
            Self::ConnectTimeout | Self::ResponseTimeout => StatusCode::GATEWAY_TIMEOUT,
            Self::RequestBody => StatusCode::BAD_REQUEST,
        }
    }

    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Connect(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                "probe-agent: backend refused the connection\n"
            }
            Self::Connect(_) => "probe-agent: backend not reachable\n",
            Self::NoHttp2 => "probe-agent: backend does not speak HTTP/2\n",
            Self::ConnectTimeout => "probe-agent: backend did not accept the connection in time\n",
            Self::Reset(_) => "probe-agent: backend closed the connection before a response\n",
            Self::ResponseTimeout => "probe-agent: backend did not respond in time\n",
            Self::RequestBody => "probe-agent: request body broke off\n",
            Self::Upgrade => "probe-agent: backend switched protocols unasked\n",
        }
    }

    /// What the client may do about it, for `x-prequal-failure`. Nothing is told of timeouts: the backend may still be at it,
    /// and a second request would add to its load.
    pub(crate) fn failure(&self) -> Option<&'static str> {
        match self {
            Self::Connect(_) | Self::ConnectTimeout | Self::NoHttp2 => Some(UNSENT),
            Self::Reset(_) => Some(UNANSWERED),
            Self::ResponseTimeout | Self::RequestBody | Self::Upgrade => None,
        }
    }

    /// For metrics; `None` for what is not the backend's doing.
    pub(crate) fn label(&self) -> Option<&'static str> {
        match self {
            Self::Connect(_) | Self::NoHttp2 => Some("connect"),
            Self::ConnectTimeout => Some("connect_timeout"),
            Self::Reset(_) => Some("reset"),
            Self::ResponseTimeout => Some("response_timeout"),
            Self::Upgrade => Some("upgrade"),
            Self::RequestBody => None,
        }
    }
}

fn connect_error(error: io::Error) -> UpstreamError {
    UpstreamError::Connect(error)
}

/// A backend that refused HTTP/2 is asked again after this long: it may have been replaced.
const HTTP1_ONLY_MEMORY: Duration = Duration::from_secs(60);
/// HTTP/2 flow-control window of a stream: what is buffered at most for a client that reads slowly.
const WINDOW: u32 = 256 * 1024;
/// hyper refuses a smaller read buffer.
const MIN_BUFFER: usize = 8192;
/// Tries of a request that an HTTP/2 connection on its way out did not take.
const MAX_UNSENT: usize = 3;
