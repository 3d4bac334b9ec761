//! Response body that records the end and the outcome of its request.
//!
//! | event | outcome |
//! |---|---|
//! | last frame handed over, status below 500 | success |
//! | status 500 and up; a gRPC status that blames the server; the backend dies mid-response | failure |
//! | dropped before the end (client gone, stream reset) | aborted |
//! | `text/event-stream`; a gRPC call that turns out to be a stream | streaming |
//!
//! A gRPC call is a stream if its response carries more than one message, or stays open for longer than
//! [`GRPC_UNARY_TAIL`] after the first. Every other call is unary, however long it took. A call that streams its
//! request and gets a single response message looks unary, and its duration is its latency.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use http::{HeaderMap, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use prequal_core::server::tracker::Visit;
use prequal_core::shared::outcome::Outcome;
use prequal_core::shared::outcome::grpc_blames_server;

use crate::load::InFlight;

/// How long a gRPC call may stay open after its first response message before it counts as a stream.
pub const GRPC_UNARY_TAIL: Duration = Duration::from_secs(1);

/// Length above which a body of known length counts as a large download, bytes.
const LARGE_BODY: u64 = 1 << 20;

pin_project! {
    /// Response body that records the end of its request when it ends or is dropped.
    pub struct TrackedBody<B> {
        #[pin]
        inner: B,
        guard: Option<InFlight>,
        verdict: Outcome,
        remaining: Option<u64>,
        client_waits: bool,
        grpc: Option<Box<Grpc>>,
    }
}

impl<B: Body> TrackedBody<B> {
    /// Ties `guard` to `body`. The head of the response decides the initial outcome.
    pub fn new(body: B, mut guard: InFlight, status: StatusCode, headers: &HeaderMap) -> Self {
        let mut verdict = if status.is_server_error() { Outcome::Failure } else { Outcome::Success };
        let mut grpc = None;
        match kind(headers) {
            Kind::Plain => {}
            Kind::EventStream => {
                guard.mark_streaming();
                if verdict == Outcome::Success {
                    verdict = Outcome::Streaming;
                }
            }
            Kind::Grpc => {
                if grpc_failure(headers) {
                    verdict = Outcome::Failure;
                }
                grpc = Some(Box::new(Grpc::default()));
            }
        }
        let remaining = body.size_hint().exact();
        let mut this =
            Self { inner: body, guard: Some(guard), verdict, remaining, client_waits: false, grpc };
        // The HTTP server never polls an empty body.
        if this.inner.is_end_stream() {
            end(&mut this.guard, this.verdict);
        }
        this
    }

    /// Returns whether the head, or the body so far, blames the server.
    pub(crate) fn failed(&self) -> bool {
        self.verdict == Outcome::Failure
    }

    /// Returns whether the response may stay open indefinitely: an event stream, or any gRPC call.
    pub(crate) fn may_stream(&self) -> bool {
        self.verdict == Outcome::Streaming || self.grpc.is_some()
    }

    /// Returns the request if it is in flight and about to leave: neither a stream nor a large download. Such a request
    /// does not delay the next one, so reports leave it out.
    pub fn leaving(&self) -> Option<Visit> {
        let leaves_soon = self.verdict != Outcome::Streaming
            && self.grpc.is_none()
            && self.inner.size_hint().lower() <= LARGE_BODY;
        self.guard.as_ref().filter(|_| leaves_soon)?.visit()
    }
}

impl<B: Body<Data = Bytes>> Body for TrackedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let mut this = self.project();
        if *this.client_waits
            && let Some(guard) = this.guard
        {
            *this.client_waits = false;
            guard.set_client_waits(false);
        }
        let frame = match ready!(this.inner.as_mut().poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => {
                if let Some(guard) = this.guard.take() {
                    guard.load().counters().count_upstream_error("body");
                    guard.finish(Outcome::Failure);
                }
                return Poll::Ready(Some(Err(error)));
            }
            None => {
                end(this.guard, *this.verdict);
                return Poll::Ready(None);
            }
        };
        if let Some(data) = frame.data_ref() {
            if let Some(grpc) = this.grpc {
                grpc.data(data);
            }
            if let Some(remaining) = this.remaining {
                *remaining = remaining.saturating_sub(data.remaining() as u64);
                // The HTTP server may drop a body of known length without polling for its end.
                if *remaining == 0
                    && let Some(guard) = this.guard
                {
                    guard.set_on_drop(*this.verdict);
                }
            }
        } else if let Some(trailers) = frame.trailers_ref()
            && this.grpc.is_some()
            && grpc_failure(trailers)
        {
            *this.verdict = Outcome::Failure;
        }
        if let Some(grpc) = this.grpc
            && *this.verdict == Outcome::Success
            && grpc.is_stream()
        {
            *this.verdict = Outcome::Streaming;
            if let Some(guard) = this.guard {
                guard.mark_streaming();
            }
        }
        if frame.is_trailers() || this.inner.is_end_stream() {
            end(this.guard, *this.verdict);
        } else if let Some(guard) = this.guard {
            // Until hyper asks for the next frame, the replica waits for the client.
            *this.client_waits = true;
            guard.set_client_waits(true);
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

fn end(guard: &mut Option<InFlight>, verdict: Outcome) {
    if let Some(guard) = guard.take() {
        guard.finish(verdict);
    }
}

enum Kind {
    Plain,
    EventStream,
    Grpc,
}

/// Returns whether a response belongs to a gRPC call.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    matches!(kind(headers), Kind::Grpc)
}

fn kind(headers: &HeaderMap) -> Kind {
    let Some(content_type) = headers.get(header::CONTENT_TYPE) else { return Kind::Plain };
    let content_type = content_type.as_bytes();
    if content_type.starts_with(b"application/grpc-web-text") {
        // The messages are in base64, so they are not counted. The call counts as an ordinary request.
        Kind::Plain
    } else if content_type.starts_with(b"application/grpc") {
        Kind::Grpc
    } else if content_type.starts_with(b"text/event-stream") {
        Kind::EventStream
    } else {
        Kind::Plain
    }
}

/// Returns whether the gRPC status in `headers` (of a trailers-only answer, or trailers) blames the server.
fn grpc_failure(headers: &HeaderMap) -> bool {
    headers.get("grpc-status").is_some_and(|status| grpc_blames_server(status.as_bytes()))
}

/// Flag that marks grpc-web's trailers, which look like a message. HTTP/1.1 clients find them in the body.
const GRPC_WEB_TRAILERS: u8 = 0x80;

/// Follows the length prefixes of gRPC messages across data frames.
#[derive(Default)]
struct Grpc {
    prefix: [u8; 5],
    have: usize,
    skip: usize,
    messages: u32,
    first: Option<Instant>,
}

impl Grpc {
    fn data(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            if self.skip > 0 {
                let n = self.skip.min(data.len());
                self.skip -= n;
                data.advance(n);
                continue;
            }
            let n = (self.prefix.len() - self.have).min(data.len());
            self.prefix[self.have..self.have + n].copy_from_slice(&data[..n]);
            self.have += n;
            data.advance(n);
            if self.have == self.prefix.len() {
                let [flags, a, b, c, d] = self.prefix;
                self.skip = u32::from_be_bytes([a, b, c, d]) as usize;
                self.have = 0;
                if flags & GRPC_WEB_TRAILERS != 0 {
                    continue;
                }
                self.messages = self.messages.saturating_add(1);
                self.first.get_or_insert_with(Instant::now);
            }
        }
    }

    fn is_stream(&self) -> bool {
        self.messages > 1 || self.first.is_some_and(|first| first.elapsed() > GRPC_UNARY_TAIL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Load;
    use http_body_util::{BodyExt, Empty, Full};
    use prequal_core::server::tracker::TrackerConfig;
    use std::collections::VecDeque;

    struct Script(VecDeque<Result<Frame<Bytes>, &'static str>>);

    impl Body for Script {
        type Data = Bytes;
        type Error = &'static str;
        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
            Poll::Ready(self.0.pop_front())
        }
    }

    /// Runs a whole response and returns [success, failure, aborted, streaming].
    async fn run(
        status: u16,
        content_type: &'static str,
        frames: Vec<Result<Frame<Bytes>, &'static str>>,
    ) -> [u64; 4] {
        let load = Load::new(TrackerConfig::default());
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, content_type.parse().unwrap())]);
        let status = StatusCode::from_u16(status).unwrap();
        let body = TrackedBody::new(Script(frames.into()), load.start(), status, &headers);
        assert_eq!(load.rif(), 1);
        let _ = body.collect().await;
        assert_eq!(load.rif(), 0);
        ended(&load)
    }

    fn ended(load: &Load) -> [u64; 4] {
        [Outcome::Success, Outcome::Failure, Outcome::Aborted, Outcome::Streaming]
            .map(|outcome| load.counters().ended(outcome))
    }

    fn data(bytes: &'static [u8]) -> Result<Frame<Bytes>, &'static str> {
        Ok(Frame::data(Bytes::from_static(bytes)))
    }

    fn grpc_status(status: &'static str) -> Result<Frame<Bytes>, &'static str> {
        Ok(Frame::trailers(HeaderMap::from_iter([("grpc-status".parse().unwrap(), status.parse().unwrap())])))
    }

    const MESSAGE: &[u8] = &[0, 0, 0, 0, 3, 1, 2, 3];

    #[tokio::test]
    async fn outcomes_match_the_table() {
        let success = [1, 0, 0, 0];
        let failure = [0, 1, 0, 0];
        let streaming = [0, 0, 0, 1];
        assert_eq!(run(200, "text/plain", vec![data(b"a"), data(b"b")]).await, success);
        assert_eq!(run(404, "text/plain", vec![data(b"a")]).await, success, "the client's fault");
        assert_eq!(run(503, "text/plain", vec![data(b"a")]).await, failure);
        assert_eq!(run(200, "text/plain", vec![data(b"a"), Err("reset")]).await, failure);
        assert_eq!(run(200, "text/event-stream", vec![data(b"a")]).await, streaming);
        assert_eq!(run(500, "text/event-stream", vec![data(b"a")]).await, failure);
        let grpc = "application/grpc+proto";
        assert_eq!(run(200, grpc, vec![data(MESSAGE), grpc_status("0")]).await, success, "unary");
        assert_eq!(
            run(200, grpc, vec![data(MESSAGE), grpc_status("5")]).await,
            success,
            "not found is an answer"
        );
        assert_eq!(run(200, grpc, vec![data(MESSAGE), grpc_status("14")]).await, failure);
        assert_eq!(run(200, grpc, vec![data(MESSAGE), data(MESSAGE), grpc_status("0")]).await, streaming);
    }

    #[tokio::test]
    async fn grpc_messages_are_counted_across_any_split() {
        let split = vec![data(&MESSAGE[..2]), data(&MESSAGE[2..6]), data(&MESSAGE[6..]), grpc_status("0")];
        assert_eq!(run(200, "application/grpc", split).await, [1, 0, 0, 0]);
    }

    #[tokio::test]
    async fn trailers_in_a_grpc_web_body_do_not_count_as_a_message() {
        const TRAILERS: &[u8] = b"\x80\0\0\0\x0fgrpc-status:0\r\n";
        let call = || vec![data(MESSAGE), data(TRAILERS)];
        assert_eq!(run(200, "application/grpc-web+proto", call()).await, [1, 0, 0, 0]);
        assert_eq!(
            run(200, "application/grpc-web-text", vec![data(b"AAAAAAMBAgM="), data(b"AAAA")]).await,
            [1, 0, 0, 0]
        );
        let stream = vec![data(MESSAGE), data(MESSAGE), data(TRAILERS)];
        assert_eq!(run(200, "application/grpc-web", stream).await, [0, 0, 0, 1]);
    }

    #[tokio::test]
    async fn only_an_incomplete_body_is_an_abort_when_dropped() {
        let load = Load::new(TrackerConfig::default());
        let headers = HeaderMap::new();
        drop(TrackedBody::new(Full::new(Bytes::from_static(b"abc")), load.start(), StatusCode::OK, &headers));
        assert_eq!(ended(&load), [0, 0, 1, 0]);
        let mut body =
            TrackedBody::new(Full::new(Bytes::from_static(b"abc")), load.start(), StatusCode::OK, &headers);
        let _ = body.frame().await;
        drop(body);
        assert_eq!(ended(&load), [1, 0, 1, 0]);
    }

    #[test]
    fn a_body_that_is_empty_from_the_start_ends_at_once() {
        let load = Load::new(TrackerConfig::default());
        let _body =
            TrackedBody::new(Empty::<Bytes>::new(), load.start(), StatusCode::NO_CONTENT, &HeaderMap::new());
        assert_eq!((load.rif(), ended(&load)), (0, [1, 0, 0, 0]));
    }

    #[test]
    fn a_trailers_only_error_is_a_failure() {
        let load = Load::new(TrackerConfig::default());
        let headers = HeaderMap::from_iter([
            (header::CONTENT_TYPE, "application/grpc".parse().unwrap()),
            ("grpc-status".parse().unwrap(), "14".parse().unwrap()),
        ]);
        let _body = TrackedBody::new(Empty::<Bytes>::new(), load.start(), StatusCode::OK, &headers);
        assert_eq!(ended(&load), [0, 1, 0, 0]);
    }
}
