//! The body of a request on its way to the backend. While it waits for its client to send more, the time does not count
//! against the replica. Its start is kept for as long as the backend may refuse the request unprocessed.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::oneshot;

use crate::leash::{Leash, Open};
use crate::load::Client;

/// A request body that marks when its client keeps the backend waiting.
pub(crate) struct Upload {
    /// `None` once it has been given back.
    source: Option<Source>,
    waits: bool,
    lent: Option<Lent>,
    /// Held while the body is.
    stream: Option<Arc<dyn Send + Sync>>,
}

/// What a body is read from.
pub(crate) struct Source {
    /// Was read before, and is read again.
    again: VecDeque<Bytes>,
    inner: Incoming,
    client: Client,
    open: Option<Open>,
}

/// What was read of a body that may have to come back.
struct Lent {
    read: VecDeque<Bytes>,
    len: usize,
    back: oneshot::Sender<Source>,
}

impl Upload {
    pub(crate) fn new(inner: Incoming, client: Client, leash: Option<&Arc<Leash>>) -> Self {
        let open = leash.filter(|_| !inner.is_end_stream()).cloned().map(Open::new);
        Source { again: VecDeque::new(), inner, client, open }.into()
    }

    /// Sends the body out on `stream`. Once it is dropped it comes back whole, unless too much of it was read.
    pub(crate) fn lend(mut self, stream: Arc<dyn Send + Sync>) -> (Self, oneshot::Receiver<Source>) {
        let (back, returned) = oneshot::channel();
        self.lent = Some(Lent { read: VecDeque::new(), len: 0, back });
        self.stream = Some(stream);
        (self, returned)
    }

    fn set_waits(&mut self, waits: bool) {
        if waits != self.waits
            && let Some(source) = &self.source
        {
            self.waits = waits;
            source.client.set_waits(waits);
        }
    }

    fn keep(&mut self, frame: &Frame<Bytes>) {
        let Some(lent) = &mut self.lent else { return };
        match frame.data_ref() {
            Some(data) if lent.len + data.len() <= KEPT && !lent.back.is_closed() => {
                lent.len += data.len();
                lent.read.push_back(data.clone());
            }
            _ => self.lent = None,
        }
    }
}

/// Why a body broke off. The backend is never the cause.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadError {
    #[error("the client broke off")]
    Client(#[source] hyper::Error),
    #[error("the request was cut")]
    Cut,
}

impl From<Source> for Upload {
    fn from(source: Source) -> Self {
        Self { source: Some(source), waits: false, lent: None, stream: None }
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = UploadError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadError>>> {
        let Some(source) = &mut self.source else { return Poll::Ready(None) };
        if let Some(open) = &source.open
            && open.is_cut(cx)
        {
            self.lent = None;
            return Poll::Ready(Some(Err(UploadError::Cut)));
        }
        let frame = match source.again.pop_front() {
            Some(data) => Poll::Ready(Some(Ok(Frame::data(data)))),
            None => Pin::new(&mut source.inner).poll_frame(cx).map_err(UploadError::Client),
        };
        if let Some(open) = &source.open
            && frame.is_ready()
        {
            open.moved();
            // What is left may be kept for long, in case that the backend refuses the request.
            if source.inner.is_end_stream() || matches!(frame, Poll::Ready(None)) {
                source.open = None;
            }
        }
        self.set_waits(frame.is_pending());
        match &frame {
            Poll::Ready(Some(Ok(frame))) => self.keep(frame),
            Poll::Ready(Some(Err(_))) => self.lent = None,
            Poll::Ready(None) | Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.source.as_ref().is_none_or(|source| source.again.is_empty() && source.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let Some(source) = &self.source else { return SizeHint::with_exact(0) };
        let again: u64 = source.again.iter().map(|data| data.len() as u64).sum();
        let rest = source.inner.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + again);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + again);
        }
        hint
    }
}

impl Drop for Upload {
    /// A backend may answer without having read everything.
    fn drop(&mut self) {
        self.set_waits(false);
        if let (Some(Lent { mut read, back, .. }), Some(mut source)) = (self.lent.take(), self.source.take())
        {
            read.append(&mut source.again);
            source.again = read;
            // The request may have ended.
            let _ = back.send(source);
        }
    }
}

/// A body is kept up to this length, bytes.
const KEPT: usize = 64 * 1024;
