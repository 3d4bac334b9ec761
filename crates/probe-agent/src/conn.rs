//! One accepted connection, below HTTP. This module detects the HTTP version, a request head that arrives too slowly,
//! and a head with both `Content-Length` and `Transfer-Encoding`.
//!
//! hyper does not suffice for the last two. Its header timeout also runs while a kept-alive connection is idle, and its
//! parser silently resolves `Content-Length` beside `Transfer-Encoding`. This module reads the bytes as they pass.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use crate::tls;

use crate::access::Entry;
use crate::leash::Leash;
use crate::socket::Socket;

/// A plain or TLS stream from a client.
pub(crate) enum Stream {
    Plain(Socket),
    Tls(Box<tls::ClientTls>),
}

/// Reads as much as needed to distinguish HTTP/2 with prior knowledge from HTTP/1. Returns whether it is HTTP/2, and
/// the bytes read.
pub(crate) async fn detect(
    stream: &mut Stream,
    silent: Duration,
    head: Duration,
) -> Result<(bool, Vec<u8>), Undetected> {
    let mut seen = Vec::with_capacity(PREFACE.len());
    let first = tokio::time::timeout(silent, read_some(stream, &mut seen));
    if first.await.map_err(|_| Undetected::Silent)?? == 0 {
        return Err(Undetected::Gone);
    }
    if let Stream::Tls(tls) = stream
        && let Some(http2) = tls::accepted_http2(tls)
    {
        return Ok((http2, seen));
    }
    let rest = async {
        while PREFACE.starts_with(&seen) && seen.len() < PREFACE.len() {
            if read_some(stream, &mut seen).await? == 0 {
                break;
            }
        }
        Ok::<_, io::Error>(())
    };
    tokio::time::timeout(head, rest).await.map_err(|_| Undetected::Slow)??;
    Ok((seen == PREFACE, seen))
}

/// Reason why a connection brought no request.
pub(crate) enum Undetected {
    /// The client never sent anything.
    Silent,
    /// The client began to send, but did not continue.
    Slow,
    /// The client closed the connection.
    Gone,
}

impl From<io::Error> for Undetected {
    fn from(_: io::Error) -> Self {
        Self::Gone
    }
}

/// Reads some bytes, but never past the preface.
async fn read_some(stream: &mut Stream, seen: &mut Vec<u8>) -> io::Result<usize> {
    let mut chunk = [0; PREFACE.len()];
    let room = chunk.len() - seen.len();
    let n = stream.read(&mut chunk[..room]).await?;
    seen.extend_from_slice(&chunk[..n]);
    Ok(n)
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// State shared by the byte stream of a connection and its requests.
pub(crate) struct Watch {
    http2: bool,
    /// Whether request heads are watched: over HTTP/1, until an upgrade.
    heads: AtomicBool,
    in_flight: AtomicU32,
    served: AtomicU64,
    /// Number of writes to the client that have completed.
    wrote: AtomicU64,
    /// Whether a head took too long.
    slow: AtomicBool,
    /// Whether the body of the last request has not been read to its end, over HTTP/1.
    unread: AtomicBool,
    /// Whether the connection was asked to end.
    parting: AtomicBool,
    /// Leash of the last request, over HTTP/1.
    leash: Mutex<Option<Arc<Leash>>>,
    /// Bytes of the head that is coming in; empty between heads.
    head: Mutex<Vec<u8>>,
}

impl Watch {
    pub(crate) fn new(http2: bool) -> Self {
        Self {
            http2,
            heads: AtomicBool::new(!http2),
            in_flight: AtomicU32::new(0),
            served: AtomicU64::new(0),
            wrote: AtomicU64::new(0),
            slow: AtomicBool::new(false),
            unread: AtomicBool::new(false),
            parting: AtomicBool::new(false),
            leash: Mutex::default(),
            head: Mutex::default(),
        }
    }

    pub(crate) fn is_http2(&self) -> bool {
        self.http2
    }

    /// Returns whether the connection ended because a head took too long.
    pub(crate) fn is_slow(&self) -> bool {
        self.slow.load(Ordering::Relaxed)
    }

    /// Records that a head was parsed, and whether a body follows. Refuses a head with both `Transfer-Encoding`
    /// (`chunked`) and `Content-Length`.
    pub(crate) fn begin(self: &Arc<Self>, chunked: bool, body: bool) -> Begun {
        self.unread.store(body && !self.http2, Ordering::Relaxed);
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.served.fetch_add(1, Ordering::Relaxed);
        let busy = Busy { watch: self.clone(), entry: None };
        if !self.heads.load(Ordering::Relaxed) {
            return (busy, Ok(()));
        }
        let mut head = self.head();
        let verdict = if chunked { check_framing(&head) } else { Ok(()) };
        if head.capacity() > KEEP_CAPACITY {
            *head = Vec::new();
        }
        head.clear();
        (busy, verdict)
    }

    /// Records that the body of the request has been read to its end.
    pub(crate) fn body_ended(&self) {
        self.unread.store(false, Ordering::Relaxed);
    }

    /// Returns whether the connection must end with the response, because the start of the next request is unknown.
    pub(crate) fn is_unread(&self) -> bool {
        self.unread.load(Ordering::Relaxed)
    }

    /// Records that the connection was asked to end.
    pub(crate) fn part(&self) {
        self.parting.store(true, Ordering::Relaxed);
    }

    /// Returns whether the client closes the connection, as HTTP/2 clients do after GOAWAY.
    fn client_closes(&self) -> bool {
        self.http2 && self.parting.load(Ordering::Relaxed)
    }

    /// Records the leash of a request that begins.
    pub(crate) fn follow(&self, leash: Arc<Leash>) {
        *self.leash.lock().unwrap_or_else(PoisonError::into_inner) = Some(leash);
    }

    /// Returns the leash of the last request, and a number that changes when the client accepts data.
    pub(crate) fn leash(&self) -> (Option<Arc<Leash>>, u64) {
        let leash = self.leash.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (leash, self.wrote.load(Ordering::Relaxed))
    }

    fn wrote(&self, wrote: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if wrote.is_ready() {
            self.wrote.fetch_add(1, Ordering::Relaxed);
        }
        wrote
    }

    /// Records that the connection is no longer HTTP.
    pub(crate) fn upgraded(&self) {
        self.heads.store(false, Ordering::Relaxed);
    }

    /// Returns the number of requests begun so far, and whether any is in flight.
    pub(crate) fn activity(&self) -> (u64, bool) {
        (self.served.load(Ordering::Relaxed), self.in_flight.load(Ordering::Relaxed) > 0)
    }

    /// Returns whether bytes that arrive now belong to a head.
    fn expects_head(&self) -> bool {
        self.heads.load(Ordering::Relaxed) && self.in_flight.load(Ordering::Relaxed) == 0
    }

    fn head(&self) -> MutexGuard<'_, Vec<u8>> {
        self.head.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that began, and the result of the check of its head: an error holds the reason for refusing it.
pub(crate) type Begun = (Busy, Result<(), &'static str>);

/// Keeps a request of this connection in flight until this value is dropped.
pub(crate) struct Busy {
    watch: Arc<Watch>,
    /// Line of the request in the access log.
    entry: Option<Box<Entry>>,
}

impl Busy {
    pub(crate) fn log(&mut self, entry: Box<Entry>) {
        self.entry = Some(entry);
    }

    pub(crate) fn entry(&mut self) -> Option<&mut Entry> {
        self.entry.as_deref_mut()
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.watch.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Time for which the client may continue to send once its connection is closed.
const LINGER: Duration = Duration::from_secs(2);
/// Time in which an HTTP/2 client closes a connection that was asked to end, once its last response was sent.
const PARTING: Duration = Duration::from_secs(30);
/// Capacity up to which the buffer for heads is kept, bytes, so that an ordinary connection allocates once.
const KEEP_CAPACITY: usize = 4096;
/// Length up to which a head is kept, bytes. The command line allows no higher `max_header_bytes`, so hyper refuses
/// longer heads.
const MAX_CAPTURE: usize = 1 << 20;

fn check_framing(head: &[u8]) -> Result<(), &'static str> {
    let mut chunked = false;
    for line in head.split(|b| *b == b'\n').map(<[u8]>::trim_ascii_end).skip_while(|line| line.is_empty()) {
        if line.is_empty() {
            break;
        }
        let name = line.split(|b| *b == b':').next().unwrap_or_default();
        if name.eq_ignore_ascii_case(b"content-length") {
            return Err("both content-length and transfer-encoding");
        }
        chunked |= name.eq_ignore_ascii_case(b"transfer-encoding");
    }
    // If a chunked request was pipelined behind another request's body, its head was not captured, and it is refused.
    // No common client sends such requests.
    if chunked { Ok(()) } else { Err("a chunked request must not be pipelined behind a request with a body") }
}

/// Connection as hyper reads and writes it.
pub(crate) struct ServerIo {
    stream: Stream,
    replay: Vec<u8>,
    watch: Arc<Watch>,
    head_timeout: Duration,
    deadline: Option<Pin<Box<Sleep>>>,
    /// Time until which the client's data is read once the connection is closed. Set if the client is still sending
    /// then, or has not sent its whole request.
    linger: Option<Pin<Box<Sleep>>>,
}

impl ServerIo {
    pub(crate) fn new(stream: Stream, replay: Vec<u8>, watch: Arc<Watch>, head_timeout: Duration) -> Self {
        Self { stream, replay, watch, head_timeout, deadline: None, linger: None }
    }

    fn poll_bytes(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.replay.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let n = self.replay.len().min(buf.remaining());
        buf.put_slice(&self.replay[..n]);
        self.replay.drain(..n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for ServerIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        let read = this.poll_bytes(cx, buf);
        if !this.watch.expects_head() {
            // A head is complete: its deadline must not affect the next head on this connection.
            this.deadline = None;
            return read;
        }
        match read {
            Poll::Ready(Ok(())) => {
                let mut head = this.watch.head();
                if head.is_empty() {
                    this.deadline = None;
                }
                if head.len() < MAX_CAPTURE {
                    head.extend_from_slice(&buf.filled()[before..]);
                }
                read
            }
            Poll::Pending => {
                if this.watch.head().is_empty() {
                    this.deadline = None;
                    return Poll::Pending;
                }
                let timeout = this.head_timeout;
                let deadline = this.deadline.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
                ready!(deadline.as_mut().poll(cx));
                this.watch.slow.store(true, Ordering::Relaxed);
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
            Poll::Ready(Err(_)) => read,
        }
    }
}

impl AsyncWrite for ServerIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.watch.wrote(wrote)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    /// Reads on for a while if the client is still sending, or has not sent its whole request. Closing at once would
    /// cause a reset, and the client would lose the answer (RFC 9112 §9.6).
    ///
    /// If an HTTP/2 connection was asked to end, leaves closing it to the client. Envoy holds the end of a response
    /// while its own client reads slowly, and breaks the response off if the connection closes meanwhile.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.linger.is_none() {
            if this.watch.client_closes() {
                ready!(Pin::new(&mut this.stream).poll_flush(cx))?;
                this.linger = Some(Box::pin(tokio::time::sleep(PARTING)));
            } else {
                ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
            }
        }
        let mut chunk = [0; 4096];
        loop {
            let mut buf = ReadBuf::new(&mut chunk);
            match Pin::new(&mut this.stream).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() => {
                    let linger = this.linger.get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER)));
                    if linger.is_elapsed() {
                        return Poll::Ready(Ok(()));
                    }
                }
                Poll::Ready(_) => return Poll::Ready(Ok(())),
                Poll::Pending => {
                    if this.linger.is_none() && this.watch.is_unread() {
                        this.linger = Some(Box::pin(tokio::time::sleep(LINGER)));
                    }
                    return this
                        .linger
                        .as_mut()
                        .map_or(Poll::Ready(()), |linger| linger.as_mut().poll(cx))
                        .map(Ok);
                }
            }
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.watch.wrote(wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_framings_are_refused_in_any_order_and_case() {
        for (head, ok) in [
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ncontent-length: 3", true),
            ("\r\nPOST / HTTP/1.1\r\ntransfer-encoding:chunked\r\n\r\n", true),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\ncontent-LENGTH: 3\r\n\r\n", false),
            ("POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", false),
            ("POST / HTTP/1.1\nContent-Length: 3\nTransfer-Encoding: chunked\n\n", false),
            ("", false),
        ] {
            assert_eq!(check_framing(head.as_bytes()).is_ok(), ok, "{head:?}");
        }
    }
}
