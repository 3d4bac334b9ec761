//! Connections to the single backend: a pool of idle ones for HTTP/1.1, shared ones for HTTP/2.
//!
//! This is a separate pool instead of hyper-util's client: there is only one authority, so no key is hashed, and a connection
//! returns to the pool with the last frame of the body, without its own task. A request is sent again only if not a byte of it
//! was written (the pooled connection had been closed meanwhile), or if the backend says over HTTP/2 that it has not processed
//! the request.

mod answer;
mod http2;

use std::collections::VecDeque;
use std::error::Error as _;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use prequal_core::wire::report::{UNANSWERED, UNSENT};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::AbortHandle;

use crate::config::{Limits, Upstream};
use crate::load::Load;
use crate::plb::Plb;
use crate::socket::Socket;
use crate::tls::Connector;
use crate::upload::{Upload, UploadError};

use http2::{Http2, Permit};

pub(crate) use http2::Slot;

/// Connections to the backend, and how to open more.
pub(crate) struct Pool {
    target: Upstream,
    tls: Option<Connector>,
    plb: Option<Plb>,
    load: Load,
    connect_timeout: Duration,
    idle_timeout: Duration,
    max_idle: usize,
    max_response_head: usize,
    idle: Mutex<VecDeque<Idle>>,
    http2: Mutex<Http2>,
    /// Limits of HTTP/2: connections, and requests that wait for a stream.
    max_connections: usize,
    max_waiting: usize,
    ping_interval: Option<Duration>,
}

/// HTTP/1.1 connection.
struct Http1 {
    sender: http1::SendRequest<Upload>,
    task: AbortHandle,
}

struct Idle {
    conn: Http1,
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
            max_response_head: limits.max_header_bytes.max(RESPONSE_HEAD),
            idle: Mutex::default(),
            http2: Mutex::default(),
            max_connections: limits.max_upstream_connections,
            max_waiting: limits.max_upstream_waiting,
            ping_interval: limits.upstream_ping_interval,
        }
    }

    pub(crate) fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Returns the authority of the backend, for a request that came without one.
    pub(crate) fn authority(&self) -> String {
        self.target.authority()
    }

    /// Sends over HTTP/1.1 and returns with the head of the response.
    pub(crate) async fn send_http1(
        self: &Arc<Self>,
        mut req: Request<Upload>,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        loop {
            let (mut conn, reused) = match self.take_idle() {
                Some(conn) => (conn, true),
                None => (Box::pin(self.connect_http1()).await?, false),
            };
            match conn.sender.try_send_request(req).await {
                Ok(response) => {
                    let lease = Lease::Connection { conn, pool: self.clone() };
                    return Ok(response.map(|body| UpstreamBody::new(body, lease)));
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if reused => req = unsent,
                    Some(_) => return Err(connect_error(io::Error::other(error.into_error()))),
                    None => return Err(UpstreamError::sending(error.into_error())),
                },
            }
        }
    }

    /// Sends over HTTP/2 and returns with the head of the response. A request that the backend certainly did not process is sent
    /// again.
    pub(crate) async fn send_http2(
        self: &Arc<Self>,
        req: Request<Upload>,
        mut slot: Slot,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        let (head, mut body) = req.into_parts();
        let mut retries = Retries::default();
        loop {
            let (upload, returned) = body.lend(slot.permit.clone());
            match slot.sender.try_send_request(Request::from_parts(head.clone(), upload)).await {
                Ok(mut response) => {
                    if head.method == Method::CONNECT {
                        // A tunnel has no body that could hold the permit.
                        response.extensions_mut().insert(slot.permit.clone());
                    }
                    let lease = Lease::Stream(slot.permit);
                    return Ok(response.map(|body| UpstreamBody::new(body, lease)));
                }
                Err(mut error) => {
                    let unsent = error.take_message().is_some();
                    let error = error.into_error();
                    if !unsent && !is_refusal(&error) {
                        return Err(UpstreamError::sending(error));
                    }
                }
            }
            self.load.counters().count_refused();
            let again = retries.next(slot.permit.accepted_some(), self.connect_timeout);
            // The stream is given back before the request waits for another.
            drop(slot);
            body = match (again, returned.await) {
                (Some(since), Ok(source)) => {
                    slot = self.wait_for_stream(since).await?;
                    source.into()
                }
                _ => return Err(UpstreamError::Refused),
            };
        }
    }

    fn take_idle(&self) -> Option<Http1> {
        let mut idle = self.idle();
        // The most recent connection is the likeliest to be alive, and the others can age out.
        while let Some(Idle { conn, since }) = idle.pop_back() {
            if since.elapsed() >= self.idle_timeout {
                idle.clear();
                return None;
            }
            if conn.sender.is_ready() {
                return Some(conn);
            }
        }
        None
    }

    fn put_idle(&self, conn: Http1) {
        let now = Instant::now();
        let mut idle = self.idle();
        while idle.front().is_some_and(|old| now.saturating_duration_since(old.since) >= self.idle_timeout) {
            idle.pop_front();
        }
        if idle.len() < self.max_idle {
            idle.push_back(Idle { conn, since: now });
        }
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect_http1(&self) -> Result<Http1, UpstreamError> {
        let connect = async {
            let socket = self.connect().await?;
            match &self.tls {
                None => self.handshake_http1(socket).await,
                Some(tls) => {
                    self.handshake_http1(tls.connect(false, socket).await.map_err(connect_error)?).await
                }
            }
        };
        tokio::time::timeout(self.connect_timeout, connect)
            .await
            .map_err(|_| UpstreamError::ConnectTimeout)?
    }

    async fn handshake_http1<T>(&self, io: T) -> Result<Http1, UpstreamError>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (sender, conn) = http1::Builder::new()
            .max_buf_size(self.max_response_head)
            .max_headers(RESPONSE_HEADERS)
            .handshake(TokioIo::new(Patient::new(io)))
            .await
            .map_err(|error| connect_error(io::Error::other(error)))?;
        // Its errors also surface in the request or body that they affect.
        let task = tokio::spawn(conn.with_upgrades()).abort_handle();
        Ok(Http1 { sender, task })
    }

    async fn connect(&self) -> Result<Socket, UpstreamError> {
        let unix = self.target.path().is_some();
        let socket = match &self.plb {
            Some(plb) if !unix => self.repathable(plb).await.map(Socket::Tcp),
            _ => Socket::connect(&self.target).await,
        }
        .inspect_err(|error| {
            // No process listens. Other errors come from the network or the agent, and the backend may be as warm as before.
            let kind = error.kind();
            if kind == io::ErrorKind::ConnectionRefused || unix && kind == io::ErrorKind::NotFound {
                self.load.mark_down();
            }
        })
        .map_err(connect_error)?;
        self.load.mark_up();
        socket.set_nodelay().map_err(connect_error)?;
        self.load.counters().count_upstream_connection();
        Ok(socket)
    }

    /// Connects like `TcpStream::connect`, but sets the options of PLB before the SYN.
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

/// Refusals of one request over HTTP/2.
#[derive(Default)]
struct Retries {
    /// Time of the first refusal.
    since: Option<Instant>,
    /// Number of refusals without a sign that the backend accepts other requests.
    fruitless: u32,
}

impl Retries {
    /// Counts a refusal. Returns the time of the first one if the request should be sent again.
    ///
    /// Servers that send GOAWAY after a number of requests (nginx) refuse a request repeatedly if more are in flight than that.
    /// Each of their connections accepts some requests, so such retries come to an end, and only their time is limited.
    fn next(&mut self, accepted_others: bool, limit: Duration) -> Option<Instant> {
        if !accepted_others {
            self.fruitless += 1;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        (self.fruitless < MAX_FRUITLESS && since.elapsed() < limit).then_some(since)
    }
}

/// Returns whether nothing was processed: the backend sent `REFUSED_STREAM`, or a `GOAWAY` that names an earlier stream as the
/// last (RFC 9113 §8.7; h2 returns that error for no other requests), or the connection closed before it allowed the stream.
fn is_refusal(error: &hyper::Error) -> bool {
    let h2 = error.source().and_then(|source| source.downcast_ref::<h2::Error>());
    h2.is_some_and(|error| {
        error.is_remote() && (error.is_go_away() || error.reason() == Some(h2::Reason::REFUSED_STREAM))
    }) || error.is_user() && !is_of_body(error)
}

/// Returns whether the request body failed, rather than the sending.
fn is_of_body(error: &hyper::Error) -> bool {
    error.is_user() && error.source().is_some_and(|source| source.is::<UploadError>())
}

/// Response body of the backend. Gives its connection or stream back with the last frame.
pub(crate) struct UpstreamBody {
    inner: Incoming,
    lease: Option<Lease>,
}

impl UpstreamBody {
    fn new(inner: Incoming, lease: Lease) -> Self {
        let mut this = Self { inner, lease: Some(lease) };
        if this.inner.is_end_stream() {
            this.release();
        }
        this
    }

    /// Returns whether the backend is closing the connection. It waits for the streams that are open.
    pub(crate) fn leaving(&self) -> bool {
        matches!(&self.lease, Some(Lease::Stream(permit)) if permit.leaving())
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

enum Lease {
    Connection { conn: Http1, pool: Arc<Pool> },
    Stream(Arc<Permit>),
}

impl Lease {
    fn release(self) {
        let Self::Connection { mut conn, pool } = self else { return };
        if conn.sender.is_closed() {
            return;
        }
        if conn.sender.is_ready() {
            pool.put_idle(conn);
            return;
        }
        // The response is over before its connection is free: the request body is still being sent, or hyper's task has not run
        // yet.
        tokio::spawn(async move {
            match tokio::time::timeout(UPLOAD_GRACE, conn.sender.ready()).await {
                Ok(Ok(())) => pool.put_idle(conn),
                Ok(Err(_)) => {}
                Err(_) => conn.task.abort(),
            }
        });
    }
}

/// HTTP/1.1 connection to a backend that may answer and close before it has read the whole request. After a failed write, the
/// answer is still read before the write is reported as failed.
struct Patient<T> {
    io: T,
    /// Whether the peer accepts no more data. The writer then waits for the reader, which runs in the same task and wakes it.
    broken: bool,
    read_all: bool,
}

impl<T> Patient<T> {
    fn new(io: T) -> Self {
        Self { io, broken: false, read_all: false }
    }

    fn poll_broken(&self) -> Poll<io::Result<usize>> {
        if self.read_all { Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())) } else { Poll::Pending }
    }

    fn wrote(&mut self, wrote: io::Result<usize>) -> Poll<io::Result<usize>> {
        let kind = wrote.as_ref().err().map(io::Error::kind);
        if !matches!(kind, Some(io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)) {
            return Poll::Ready(wrote);
        }
        self.broken = true;
        self.poll_broken()
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Patient<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = ready!(Pin::new(&mut self.io).poll_read(cx, buf));
        self.read_all = read.is_err() || buf.filled().len() == before;
        Poll::Ready(read)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Patient<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.broken {
            return self.poll_broken();
        }
        let wrote = ready!(Pin::new(&mut self.io).poll_write(cx, buf));
        self.wrote(wrote)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.broken { Poll::Ready(Ok(())) } else { Pin::new(&mut self.io).poll_flush(cx) }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.broken {
            return self.poll_broken();
        }
        let wrote = ready!(Pin::new(&mut self.io).poll_write_vectored(cx, bufs));
        self.wrote(wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

/// Reason why no response came, and the answer that the client gets instead.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpstreamError {
    #[error("connect failed")]
    Connect(#[source] io::Error),
    #[error("connect timed out")]
    ConnectTimeout,
    #[error("HTTP/2 refused")]
    NoHttp2,
    #[error("closed before it spoke HTTP/2")]
    Silent,
    #[error("no free HTTP/2 stream")]
    NoStream,
    /// Nothing was processed, according to the backend.
    #[error("refused by the backend")]
    Refused,
    #[error("closed before a response")]
    Reset(#[source] hyper::Error),
    #[error("no response in time")]
    ResponseTimeout,
    /// The client's own body broke off; the backend did nothing wrong.
    #[error("request body broke off")]
    RequestBody,
    #[error("switched protocols unasked")]
    Upgrade,
    #[error("did not switch protocols")]
    NoUpgrade,
    /// Neither the agent nor the backend supports such a tunnel.
    #[error("no way to switch protocols")]
    NoTunnel,
}

impl UpstreamError {
    fn sending(error: hyper::Error) -> Self {
        if is_of_body(&error) { Self::RequestBody } else { Self::Reset(error) }
    }

    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Connect(_)
            | Self::NoHttp2
            | Self::Silent
            | Self::Reset(_)
            | Self::Upgrade
            | Self::NoUpgrade => StatusCode::BAD_GATEWAY,
            Self::NoStream | Self::Refused => StatusCode::SERVICE_UNAVAILABLE,
            Self::ConnectTimeout | Self::ResponseTimeout => StatusCode::GATEWAY_TIMEOUT,
            Self::RequestBody => StatusCode::BAD_REQUEST,
            Self::NoTunnel => StatusCode::NOT_IMPLEMENTED,
        }
    }

    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Connect(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                "probe-agent: backend refused the connection\n"
            }
            Self::Connect(_) => "probe-agent: backend not reachable\n",
            Self::NoHttp2 => "probe-agent: backend does not speak HTTP/2\n",
            Self::Silent => "probe-agent: backend closed the connection before it spoke HTTP/2\n",
            Self::NoStream => "probe-agent: backend has no HTTP/2 stream free\n",
            Self::Refused => "probe-agent: backend refused the request\n",
            Self::ConnectTimeout => "probe-agent: backend did not accept the connection in time\n",
            Self::Reset(_) => "probe-agent: backend closed the connection before a response\n",
            Self::ResponseTimeout => "probe-agent: backend did not respond in time\n",
            Self::RequestBody => "probe-agent: request body broke off\n",
            Self::Upgrade => "probe-agent: backend switched protocols unasked\n",
            Self::NoUpgrade => "probe-agent: backend did not switch protocols\n",
            Self::NoTunnel => "probe-agent: backend takes no such tunnel\n",
        }
    }

    /// Returns the value of `x-prequal-failure`, which says whether the client may retry. Not sent when a response did not come
    /// in time: the backend may still work on it, and a second request would add to its load.
    pub(crate) fn failure(&self) -> Option<&'static str> {
        match self {
            Self::Connect(_)
            | Self::ConnectTimeout
            | Self::NoHttp2
            | Self::Silent
            | Self::NoStream
            | Self::Refused => Some(UNSENT),
            Self::Reset(_) => Some(UNANSWERED),
            Self::ResponseTimeout | Self::RequestBody | Self::Upgrade | Self::NoUpgrade | Self::NoTunnel => {
                None
            }
        }
    }

    /// Returns the class for the log.
    pub(crate) fn class(&self) -> &'static str {
        match self {
            Self::Connect(_) | Self::ConnectTimeout | Self::NoHttp2 | Self::Silent => "backend connect",
            Self::NoStream | Self::Refused => "backend stream",
            Self::Reset(_) => "backend reset",
            Self::ResponseTimeout => "backend timeout",
            Self::Upgrade | Self::NoUpgrade => "backend upgrade",
            Self::RequestBody | Self::NoTunnel => "client",
        }
    }

    /// Returns the label for metrics; `None` if the backend is not the cause.
    pub(crate) fn label(&self) -> Option<&'static str> {
        match self {
            Self::Connect(_) | Self::NoHttp2 | Self::Silent => Some("connect"),
            Self::NoStream => Some("no_stream"),
            Self::Refused => Some("refused"),
            Self::ConnectTimeout => Some("connect_timeout"),
            Self::Reset(_) => Some("reset"),
            Self::ResponseTimeout => Some("response_timeout"),
            Self::Upgrade | Self::NoUpgrade => Some("upgrade"),
            Self::RequestBody | Self::NoTunnel => None,
        }
    }
}

fn connect_error(error: io::Error) -> UpstreamError {
    UpstreamError::Connect(error)
}

/// Time for which a client may go on sending once an HTTP/1.1 backend has answered in full.
const UPLOAD_GRACE: Duration = Duration::from_secs(1);
/// HTTP/2 flow-control window of a stream: maximum buffered for a client that reads slowly, bytes.
const WINDOW: u32 = 64 * 1024;
/// HTTP/2 flow-control window of a connection, bytes. Clients that never read block its other streams only if they hold as many
/// streams as fit into this window, which is more than common servers allow.
const CONNECTION_WINDOW: u32 = 256 * WINDOW;
/// Limits of a response: the length of its head, bytes (more if requests may have longer heads), and over HTTP/1.1 the number of
/// its headers.
const RESPONSE_HEAD: usize = 64 * 1024;
const RESPONSE_HEADERS: usize = 256;
/// Number of refusals after which a request is given up, if the backend accepts no other request either.
const MAX_FRUITLESS: u32 = 5;
