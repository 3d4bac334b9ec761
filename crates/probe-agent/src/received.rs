//! The body of a request or response as it is received. Decides whether a body that has ended is complete; counting and
//! cutting bodies is left to `upload.rs` and `body.rs`.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

/// Body that counts as complete only if the peer said that it is.
///
/// A peer may reset an HTTP/2 stream with `NO_ERROR` before the body has ended. hyper then reports the end of the body,
/// as if it were complete.
pub(crate) struct Received {
    inner: Incoming,
    http2: bool,
}

impl Received {
    /// `http2` says whether the body came over HTTP/2.
    pub(crate) fn new(inner: Incoming, http2: bool) -> Self {
        Self { inner, http2 }
    }
}

impl Body for Received {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        Poll::Ready(match frame {
            None if self.http2 && !self.inner.is_end_stream() => Some(Err(BrokenOff::Reset)),
            frame => frame.map(|frame| frame.map_err(BrokenOff::Failed)),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Reason why a body ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BrokenOff {
    #[error(transparent)]
    Failed(hyper::Error),
    #[error("reset before its end")]
    Reset,
}
