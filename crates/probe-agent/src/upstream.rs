//! Connections to the single backend: a pool of idle ones for HTTP/1.1, shared ones for HTTP/2.
//!
//! hyper-util's client is not used: it looks up its pool by authority, and usually needs a task to return a connection.
//! This pool has one authority, and takes a connection back with the last frame of the response body, usually without
//! an extra task. A request is sent again if the backend certainly did not process it, or if the backend closed a
//! reused HTTP/1.1 connection and the request is idempotent.

mod answer;
mod error;
mod http1;
mod http2;
mod patient;

use std::collections::VecDeque;
use std::error::Error as _;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::net::{TcpSocket, TcpStream};

use crate::config::{Limits, Upstream};
use crate::load::Load;
use crate::plb::Plb;
use crate::received::{BrokenOff, Received};
use crate::socket::Socket;
use crate::tls::Connector;
use crate::upload::Upload;

use error::is_of_body;
use http1::{Http1, Idle};
use http2::{Http2, Permit};

pub(crate) use error::ForwardError;
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

    /// Sends a request over HTTP/2 and waits for the head of the response. A request that the backend certainly did not
    /// process is sent again.
    pub(crate) async fn send_http2(
        self: &Arc<Self>,
        req: Request<Upload>,
        mut slot: Slot,
    ) -> Result<Response<UpstreamBody>, ForwardError> {
        let (head, mut body) = req.into_parts();
        let mut retries = Retries::default();
        loop {
            let (upload, returned) = body.lend(Some(slot.permit.clone()));
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
                        return Err(ForwardError::sending(error));
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
                _ => return Err(ForwardError::Refused),
            };
        }
    }

    async fn connect(&self) -> Result<Socket, ForwardError> {
        let unix = self.target.path().is_some();
        let socket = match &self.plb {
            Some(plb) if !unix => self.repathable(plb).await.map(Socket::Tcp),
            _ => Socket::connect(&self.target).await,
        }
        .inspect_err(|error| {
            // No process listens. Other errors come from the network or the agent, and do not show that the backend has
            // restarted.
            let kind = error.kind();
            if kind == io::ErrorKind::ConnectionRefused || unix && kind == io::ErrorKind::NotFound {
                self.load.mark_down();
            }
        })
        .map_err(ForwardError::Connect)?;
        self.load.mark_up();
        socket.set_nodelay().map_err(ForwardError::Connect)?;
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
    /// Some servers (nginx) send GOAWAY after a number of requests. If more requests than that are in flight, such a
    /// server refuses some of them repeatedly. Each of its connections accepts some requests, so the retries come to an
    /// end, and only the time that they take is limited.
    fn next(&mut self, accepted_others: bool, limit: Duration) -> Option<Instant> {
        if !accepted_others {
            self.fruitless += 1;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        (self.fruitless < MAX_FRUITLESS && since.elapsed() < limit).then_some(since)
    }
}

/// Returns whether the backend processed nothing: it sent `REFUSED_STREAM`, or a `GOAWAY` that names an earlier stream
/// as the last (RFC 9113 §8.7), or the connection closed before the backend allowed the stream. h2 reports a `GOAWAY`
/// as an error only for requests on streams after the one that it names.
fn is_refusal(error: &hyper::Error) -> bool {
    let h2 = error.source().and_then(|source| source.downcast_ref::<h2::Error>());
    h2.is_some_and(|error| {
        error.is_remote() && (error.is_go_away() || error.reason() == Some(h2::Reason::REFUSED_STREAM))
    }) || error.is_user() && !is_of_body(error)
}

/// Response body of the backend. Gives its connection or stream back with the last frame.
pub(crate) struct UpstreamBody {
    inner: Received,
    lease: Option<Lease>,
}

impl UpstreamBody {
    fn new(inner: Incoming, lease: Lease) -> Self {
        let inner = Received::new(inner, matches!(lease, Lease::Stream(_)));
        let mut this = Self { inner, lease: Some(lease) };
        if this.inner.is_end_stream() {
            this.release();
        }
        this
    }

    /// Returns whether the backend is closing the connection. It then waits for the open streams to end.
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
    type Error = BrokenOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
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
        if let Self::Connection { conn, pool } = self {
            conn.release(pool);
        }
    }
}

/// HTTP/2 flow-control window of a stream: maximum data buffered for a client that reads slowly, bytes.
const WINDOW: u32 = 64 * 1024;
/// HTTP/2 flow-control window of a connection, bytes. Clients that never read block the other streams only if their own
/// streams fill this window. `http2::SHARED_STREAMS` prevents this as long as another connection can be opened.
const CONNECTION_WINDOW: u32 = 256 * WINDOW;
/// Maximum length of a response's head, bytes; more if requests may have longer heads.
const RESPONSE_HEAD: usize = 64 * 1024;
/// Number of refusals after which a request is given up, if the backend accepts no other request either.
const MAX_FRUITLESS: u32 = 5;
