//! The body of a request on its way to the backend: while it waits for its client to send more, the request is none of the
//! replica's doing.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use crate::load::Client;

/// A request body that tells when its client keeps the backend waiting.
pub(crate) struct Upload {
    inner: Incoming,
    client: Client,
    waits: bool,
}

impl Upload {
    pub(crate) fn new(inner: Incoming, client: Client) -> Self {
        Self { inner, client, waits: false }
    }

    fn set_waits(&mut self, waits: bool) {
        if waits != self.waits {
            self.waits = waits;
            self.client.set_waits(waits);
        }
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.inner).poll_frame(cx);
        self.set_waits(frame.is_pending());
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Drop for Upload {
    /// A backend may answer without having read everything.
    fn drop(&mut self) {
        self.set_waits(false);
    }
}
