//! Body of a request on its way to the backend. Time spent waiting for the client to send more does not count against
//! the replica. The start of the body is kept as long as the request may have to be sent again.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::oneshot;

use crate::conn::Watch;
use crate::leash::{Leash, Open};
use crate::load::Client;
use crate::received::{BrokenOff, Received};

/// Request body that records when its client keeps the backend waiting.
pub(crate) struct Upload {
    /// `None` once the source has been given back.
    source: Option<Source>,
    waits: bool,
    lent: Option<Lent>,
    /// Permit of the HTTP/2 stream, held as long as the body.
    stream: Option<Arc<dyn Send + Sync>>,
}

/// Source of a body.
pub(crate) struct Source {
    /// Data that was already read, and is read again.
    again: VecDeque<Bytes>,
    /// Client that sends the rest. `None`: the agent's own request, which is whole.
    inner: Option<(Received, Client)>,
    open: Option<Open>,
    /// Connection of the client, which learns when the body ends. `None` over HTTP/2, or if there is no more to read.
    watch: Option<Arc<Watch>>,
}

impl Source {
    /// Records that everything has been read.
    fn end(&mut self) {
        // The source may be kept for a long time, in case the request must be sent again.
        self.open = None;
        if let Some(watch) = self.watch.take() {
            watch.body_ended();
        }
    }

    /// Returns whether nothing is left to read after `again`.
    fn has_ended(&self) -> bool {
        self.inner.as_ref().is_none_or(|(inner, _)| inner.is_end_stream())
    }
}

/// Data read from a body that may have to be given back.
struct Lent {
    read: VecDeque<Bytes>,
    len: usize,
    back: oneshot::Sender<Source>,
}

impl Upload {
    pub(crate) fn new(
        inner: Incoming,
        client: Client,
        leash: Option<&Arc<Leash>>,
        watch: &Arc<Watch>,
    ) -> Self {
        let http2 = watch.is_http2();
        let open = leash.filter(|_| !inner.is_end_stream()).cloned().map(Open::new);
        let watch = watch.is_unread().then(|| watch.clone());
        let inner = Received::new(inner, http2);
        Source { again: VecDeque::new(), inner: Some((inner, client)), open, watch }.into()
    }

    /// Creates the body of a request that the agent itself makes.
    pub(crate) fn own(message: Bytes) -> Self {
        Source { again: VecDeque::from([message]), inner: None, open: None, watch: None }.into()
    }

    pub(crate) fn empty() -> Self {
        Source { again: VecDeque::new(), inner: None, open: None, watch: None }.into()
    }

    /// Lends the body. When the lent body is dropped, the receiver gets all of it back, unless too much of it was read.
    /// The lent body holds `stream`.
    pub(crate) fn lend(mut self, stream: Option<Arc<dyn Send + Sync>>) -> (Self, oneshot::Receiver<Source>) {
        let (back, returned) = oneshot::channel();
        self.lent = Some(Lent { read: VecDeque::new(), len: 0, back });
        self.stream = stream;
        (self, returned)
    }

    fn set_waits(&mut self, waits: bool) {
        if waits != self.waits
            && let Some(Source { inner: Some((_, client)), .. }) = &self.source
        {
            self.waits = waits;
            client.set_waits(waits);
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

/// Reason why a body broke off. The backend is never the cause.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadError {
    #[error("the client broke off")]
    Client(#[source] BrokenOff),
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
        let frame = match (source.again.pop_front(), &mut source.inner) {
            (Some(data), _) => Poll::Ready(Some(Ok(Frame::data(data)))),
            (None, Some((inner, _))) => Pin::new(inner).poll_frame(cx).map_err(UploadError::Client),
            (None, None) => Poll::Ready(None),
        };
        if frame.is_ready() {
            if let Some(open) = &source.open {
                open.moved();
            }
            if matches!(frame, Poll::Ready(None)) || source.has_ended() {
                source.end();
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
        self.source.as_ref().is_none_or(|source| source.again.is_empty() && source.has_ended())
    }

    fn size_hint(&self) -> SizeHint {
        let Some(source) = &self.source else { return SizeHint::with_exact(0) };
        let again: u64 = source.again.iter().map(|data| data.len() as u64).sum();
        let rest = source.inner.as_ref().map_or(SizeHint::with_exact(0), |(inner, _)| inner.size_hint());
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + again);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + again);
        }
        hint
    }
}

impl Drop for Upload {
    /// Gives the body back. Also ends the wait for the client, because a backend may answer without having read
    /// everything.
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

/// Length up to which a body is kept, bytes.
const KEPT: usize = 64 * 1024;
