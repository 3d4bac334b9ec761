//! HTTP/1.1 connection to a backend that may answer and close before it has read the whole request.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Connection that reports a failed write only after it has read everything that the backend sent.
pub(super) struct Patient<T> {
    io: T,
    reads: Reads,
    /// Whether the peer accepts no more data. Writes then wait until everything has been read. The reader runs in the
    /// same task and wakes it.
    broken: bool,
    read_all: bool,
}

/// Number of times that data arrived on a connection.
#[derive(Clone, Default)]
pub(super) struct Reads(Arc<AtomicUsize>);

impl Reads {
    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl<T> Patient<T> {
    pub(super) fn new(io: T) -> Self {
        Self { io, reads: Reads::default(), broken: false, read_all: false }
    }

    pub(super) fn reads(&self) -> Reads {
        self.reads.clone()
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
        if !self.read_all {
            self.reads.0.fetch_add(1, Ordering::Relaxed);
        }
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
