//! HTTP/2 connections to the backend. They are opened when requests wait for a stream, as far as the limits allow.
//!
//! hyper-util's pools keep one connection and do not count its streams. hyper then queues, without a limit, the streams
//! that the backend does not allow. Here, no connection gets more streams than the backend allows. A waiting request
//! takes a stream of any connection, so it does not depend on another request's attempt to connect.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;

use super::answer::{Listened, Terms};
use super::{CONNECTION_WINDOW, ForwardError, Pool, WINDOW};
use crate::config::ping_timeout;
use crate::tls;
use crate::upload::Upload;

/// Connections, and requests that wait for a stream.
pub(super) struct Http2 {
    conns: Vec<Conn>,
    /// Number of requests that the backend is expected to accept on a new connection.
    quota: u32,
    /// Requests that wait for a stream, the one that has waited longest first.
    waiting: VecDeque<Waiter>,
    /// Number of attempts to connect that are under way, and the start of the last one.
    dialing: usize,
    dialed: Option<Instant>,
    /// Time at which the backend last answered in something other than HTTP/2.
    http1_only: Option<Instant>,
}

impl Default for Http2 {
    fn default() -> Self {
        Self {
            conns: Vec::new(),
            quota: u32::MAX,
            waiting: VecDeque::new(),
            dialing: 0,
            dialed: None,
            http1_only: None,
        }
    }
}

impl Http2 {
    /// Returns whether the last attempt to connect should have succeeded by now.
    fn is_stalled(&self) -> bool {
        self.dialed.is_none_or(|at| at.elapsed() >= HEDGE)
    }

    /// Drops connections that are closing or superfluous, and adjusts the quotas to what the backend accepted.
    fn tidy(&mut self) {
        let mut first = true;
        let quota = &mut self.quota;
        self.conns.retain_mut(|conn| {
            let idle = conn.streams.load(Ordering::Relaxed) == 0;
            if let Some(accepted) = conn.terms.accepted() {
                if (1..conn.begun).contains(&accepted) {
                    *quota = accepted;
                }
            } else if idle && conn.begun >= conn.quota {
                // A backend with this quota would have closed the connection by now.
                conn.quota = conn.quota.saturating_mul(2);
                *quota = conn.quota.max(*quota);
            }
            let spare = idle && conn.used.elapsed() >= SPARE_IDLE;
            conn.usable() && (mem::take(&mut first) || !spare)
        });
    }
}

/// Request that waits for a stream.
struct Waiter {
    since: Instant,
    turn: oneshot::Sender<Result<Slot, Failure>>,
}

struct Conn {
    sender: http2::SendRequest<Upload>,
    terms: Arc<Terms>,
    streams: Arc<AtomicU32>,
    /// Number of requests that were given a stream, and how many the backend is expected to accept.
    begun: u32,
    quota: u32,
    used: Instant,
}

impl Conn {
    fn usable(&self) -> bool {
        !self.terms.leaving() && !self.terms.worn() && !self.sender.is_closed()
    }

    /// Returns whether the connection has a stream for another request, which the backend is expected to accept, and
    /// for whose response there is room even if no client reads the others.
    fn has_room(&self) -> bool {
        self.begun < self.quota && self.streams.load(Ordering::Relaxed) < SHARED_STREAMS && self.has_stream()
    }

    fn has_stream(&self) -> bool {
        self.streams.load(Ordering::Relaxed) < self.terms.max_streams()
    }
}

/// Stream that one request may open.
pub(crate) struct Slot {
    pub(super) sender: http2::SendRequest<Upload>,
    pub(super) permit: Arc<Permit>,
    extended_connect: bool,
}

impl Slot {
    /// Returns whether the request may switch to another protocol.
    pub(crate) fn extended_connect(&self) -> bool {
        self.extended_connect
    }

    /// Returns a function that says whether the backend is closing the connection. The function does not hold the
    /// stream.
    pub(crate) fn departure(&self) -> impl Fn() -> bool + use<> {
        let terms = self.permit.terms.clone();
        move || terms.leaving()
    }
}

/// Counts as one stream until it is dropped.
pub(super) struct Permit {
    pool: Arc<Pool>,
    streams: Arc<AtomicU32>,
    terms: Arc<Terms>,
}

impl Permit {
    /// Returns whether the backend is closing the connection of this stream.
    pub(super) fn leaving(&self) -> bool {
        self.terms.leaving()
    }

    /// Returns whether the backend accepted requests on this connection, according to its GOAWAY.
    pub(super) fn accepted_some(&self) -> bool {
        self.terms.accepted().is_some_and(|requests| requests > 0)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.streams.fetch_sub(1, Ordering::Relaxed);
        self.pool.serve_waiting();
    }
}

/// Reason why an attempt to open a connection failed. If it is not a timeout and there is no other connection, every
/// request that waits for a stream gets this error.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Failure {
    Connect(io::ErrorKind),
    Timeout,
    NoHttp2,
    Silent,
}

impl From<Failure> for ForwardError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Connect(kind) => Self::Connect(kind.into()),
            Failure::Timeout => Self::ConnectTimeout,
            Failure::NoHttp2 => Self::NoHttp2,
            Failure::Silent => Self::Silent,
        }
    }
}

impl From<ForwardError> for Failure {
    fn from(error: ForwardError) -> Self {
        match error {
            ForwardError::Connect(error) => Self::Connect(error.kind()),
            _ => Self::Silent,
        }
    }
}

impl Pool {
    /// Returns a stream for a request, or `None` if the request must go over HTTP/1.1 instead. Never returns `None` if
    /// the request `needs_http2`.
    ///
    /// A backend is remembered as one without HTTP/2 only if it answered in something else.
    pub(crate) async fn stream(self: &Arc<Self>, needs_http2: bool) -> Result<Option<Slot>, ForwardError> {
        if !needs_http2 && self.http1_only() {
            return Ok(None);
        }
        match self.wait_for_stream(Instant::now()).await {
            // HTTP/1 servers may also close without an answer, for example during a restart. This says nothing about
            // the next connection.
            Err(ForwardError::NoHttp2 | ForwardError::Silent) if !needs_http2 => Ok(None),
            slot => slot.map(Some),
        }
    }

    /// Returns whether the backend speaks only HTTP/1, according to its last answer. Once that answer is old, also
    /// tries HTTP/2 again, without making requests wait.
    fn http1_only(self: &Arc<Self>) -> bool {
        let mut http2 = self.http2();
        let Some(since) = http2.http1_only else { return false };
        if since.elapsed() >= HTTP1_ONLY_MEMORY {
            http2.http1_only = Some(Instant::now());
            self.dial_another(&mut http2);
        }
        true
    }

    /// Takes a stream of any connection, or waits for one, for at most `connect_timeout`. `since` is when the request
    /// first needed a stream: earlier requests come first.
    pub(super) async fn wait_for_stream(self: &Arc<Self>, since: Instant) -> Result<Slot, ForwardError> {
        let taken = {
            let mut http2 = self.http2();
            http2.waiting.retain(|waiter| !waiter.turn.is_closed());
            let place = http2.waiting.partition_point(|waiter| waiter.since <= since);
            if place == 0
                && let Some(slot) = self.take(&mut http2, false)
            {
                return Ok(slot);
            }
            if http2.waiting.len() >= self.max_waiting {
                return Err(ForwardError::NoStream);
            }
            let (turn, taken) = oneshot::channel();
            http2.waiting.insert(place, Waiter { since, turn });
            self.dial_another(&mut http2);
            taken
        };
        Box::pin(self.wait_for_turn(taken)).await
    }

    async fn wait_for_turn(
        self: &Arc<Self>,
        mut turn: oneshot::Receiver<Result<Slot, Failure>>,
    ) -> Result<Slot, ForwardError> {
        // The backend may have raised its limit.
        self.serve_waiting();
        let hedge = HEDGE.min(self.connect_timeout);
        for patience in [hedge, self.connect_timeout - hedge] {
            match tokio::time::timeout(patience, &mut turn).await {
                Ok(Ok(slot)) => return Ok(slot?),
                Ok(Err(_)) => break,
                Err(_) => {
                    self.serve_waiting();
                    self.dial_another(&mut self.http2());
                }
            }
        }
        let connected = !self.http2().conns.is_empty();
        Err(if connected { ForwardError::NoStream } else { ForwardError::ConnectTimeout })
    }

    /// Takes a stream of the first connection that has room, so that the others become idle when there is little to do.
    /// Also takes a stream of a connection without room if no other connection can be opened, or if `dialed` is true:
    /// the pool has tried to connect, and no attempt is about to succeed. At worst, the backend refuses the request, or
    /// clients that do not read delay the response.
    fn take(self: &Arc<Self>, http2: &mut Http2, dialed: bool) -> Option<Slot> {
        http2.tidy();
        let beyond = dialed || http2.conns.len() + http2.dialing >= self.max_connections;
        let index = http2.conns.iter().position(Conn::has_room).or_else(|| {
            let open = http2.conns.iter().enumerate().filter(|(_, conn)| beyond && conn.has_stream());
            open.min_by_key(|(_, conn)| conn.streams.load(Ordering::Relaxed)).map(|(index, _)| index)
        })?;
        let conn = &mut http2.conns[index];
        conn.begun = conn.begun.saturating_add(1);
        conn.used = Instant::now();
        conn.streams.fetch_add(1, Ordering::Relaxed);
        let permit = Permit { pool: self.clone(), streams: conn.streams.clone(), terms: conn.terms.clone() };
        Some(Slot {
            sender: conn.sender.clone(),
            permit: Arc::new(permit),
            extended_connect: conn.terms.extended_connect(),
        })
    }

    fn serve_waiting(self: &Arc<Self>) {
        let mut served = Vec::new();
        {
            let mut http2 = self.http2();
            let dialed = http2.dialing == 0 || http2.is_stalled();
            while let Some(waiter) = http2.waiting.pop_front() {
                if waiter.turn.is_closed() {
                    continue;
                }
                let Some(slot) = self.take(&mut http2, dialed) else {
                    http2.waiting.push_front(waiter);
                    break;
                };
                served.push((waiter, slot));
            }
        }
        for (waiter, slot) in served {
            // If the request is gone, the slot is dropped, which serves the next request.
            let _ = waiter.turn.send(Ok(slot));
        }
    }

    /// Opens another connection, unless there are enough connections or an attempt under way suffices.
    fn dial_another(self: &Arc<Self>, http2: &mut Http2) {
        let expected = EXPECTED_STREAMS.min(http2.quota as usize);
        let crowded = http2.waiting.len() > http2.dialing * expected;
        if http2.conns.len() + http2.dialing < self.max_connections
            && (http2.dialing == 0 || http2.is_stalled() || crowded)
        {
            http2.dialing += 1;
            http2.dialed = Some(Instant::now());
            tokio::spawn(self.clone().dial());
        }
    }

    /// Opens a connection. The attempt does not belong to any single request: if one goes away, the others still use
    /// it.
    async fn dial(self: Arc<Self>) {
        // While a backend restarts, a connection that the old process accepted may close.
        let opened = match Box::pin(self.open_http2()).await {
            Err(Failure::Silent) => Box::pin(self.open_http2()).await,
            opened => opened,
        };
        let mut failed = VecDeque::new();
        let failure = opened.as_ref().err().copied();
        {
            let mut http2 = self.http2();
            http2.dialing -= 1;
            match opened {
                Ok(conn) => {
                    http2.http1_only = None;
                    if !http2.waiting.is_empty() || !http2.conns.iter().any(Conn::has_room) {
                        http2.conns.push(conn);
                    }
                }
                Err(Failure::NoHttp2) => http2.http1_only = Some(Instant::now()),
                Err(_) => {}
            }
            // Requests with time left continue to wait for an answer, or for a stream of another connection.
            if failure.is_some_and(|failure| failure != Failure::Timeout) && http2.conns.is_empty() {
                failed = mem::take(&mut http2.waiting);
            }
        }
        if let Some(failure) = failure {
            for waiter in failed {
                let _ = waiter.turn.send(Err(failure));
            }
        }
        self.serve_waiting();
        let mut http2 = self.http2();
        if matches!(failure, None | Some(Failure::Timeout)) && !http2.waiting.is_empty() {
            self.dial_another(&mut http2);
        }
    }

    async fn open_http2(&self) -> Result<Conn, Failure> {
        let tcp = tokio::time::timeout(self.connect_timeout, self.connect());
        let tcp = tcp.await.map_err(|_| Failure::Timeout)??;
        let Some(tls) = &self.tls else { return self.greet(tcp).await };
        let stream = tokio::time::timeout(self.connect_timeout, tls.connect(true, tcp));
        let stream = stream.await.map_err(|_| Failure::Timeout)?.map_err(|error| {
            if tls::refused_protocol(&error) { Failure::NoHttp2 } else { Failure::Connect(error.kind()) }
        })?;
        if !tls::connected_http2(&stream) {
            return Err(Failure::NoHttp2);
        }
        Box::pin(self.greet(stream)).await
    }

    /// Opens HTTP/2 and waits for the `SETTINGS` that every HTTP/2 server sends first. Until they arrive, the agent
    /// knows neither how many streams the backend allows nor whether it is alive.
    async fn greet<T>(&self, io: T) -> Result<Conn, Failure>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let terms = Arc::<Terms>::default();
        let (io, answer) = Listened::new(io, terms.clone());
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(u32::try_from(self.max_response_head).unwrap_or(u32::MAX));
        if let Some(interval) = self.ping_interval {
            builder.keep_alive_interval(interval).keep_alive_timeout(ping_timeout(interval));
        }
        let (sender, conn) = builder.handshake(TokioIo::new(io)).await.map_err(|_| Failure::Silent)?;
        tokio::spawn(conn);
        match tokio::time::timeout(ANSWER_PATIENCE.max(self.connect_timeout), answer).await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => return Err(Failure::NoHttp2),
            Ok(Err(_)) => return Err(Failure::Silent),
            Err(_) => return Err(Failure::Timeout),
        }
        Ok(Conn {
            sender,
            terms,
            streams: Arc::default(),
            begun: 0,
            quota: self.http2().quota,
            used: Instant::now(),
        })
    }

    fn http2(&self) -> MutexGuard<'_, Http2> {
        self.http2.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Time after which a backend that refused HTTP/2 is asked again, because it may have been replaced.
const HTTP1_ONLY_MEMORY: Duration = Duration::from_secs(60);
/// Time for which an attempt to connect waits for the backend's first answer, even if its requests have given up. If
/// `connect_timeout` is longer, it applies instead. The backend may be starting, and later requests then find the
/// connection open.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// Time without an answer after which another attempt is made.
const HEDGE: Duration = Duration::from_millis(100);
/// Number of waiting requests that one more connection is expected to serve. Common servers allow at least that many
/// streams.
const EXPECTED_STREAMS: usize = 100;
/// Number of streams after which a request gets another connection if one can be opened. Responses that no client reads
/// then fill at most half of the connection's window.
const SHARED_STREAMS: u32 = CONNECTION_WINDOW / WINDOW / 2;
/// Idle time after which all connections but the first are closed.
const SPARE_IDLE: Duration = Duration::from_secs(60);
