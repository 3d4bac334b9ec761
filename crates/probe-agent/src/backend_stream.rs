//! Reads the load that a gRPC backend reports out of band: the agent keeps one stream of
//! `xds.service.orca.v3.OpenRcaService` open.
//!
//! The stream shares the HTTP/2 connections of requests. It does not count as a request in flight. A stream that
//! stalls, floods or ends is opened again after a pause. Requests never wait for it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::uri::{Authority, Scheme};
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version, header};
use http_body_util::BodyExt as _;
use prequal_core::wire::orca::METHOD;
use prequal_core::wire::orca::backend::{BackendError, BackendReport, MAX_REPORT};
use prost::Message as _;
use tokio::time::Instant;

use crate::backend_orca::FromBackend;
use crate::load::{BackendStreamEnd, Load};
use crate::log::Log;
use crate::oob::{GRPC, MIN_INTERVAL, PREFIX};
use crate::orca::proto::{self, OrcaLoadReportRequest};
use crate::upload::Upload;
use crate::upstream::{ForwardError, Pool, Slot, UpstreamBody};

/// Reader of a backend's stream of load reports.
pub(crate) struct BackendStream {
    pub(crate) pool: Arc<Pool>,
    pub(crate) load: Load,
    pub(crate) log: Log,
    pub(crate) from: FromBackend,
    /// Interval to ask for.
    pub(crate) interval: Duration,
    /// Time to wait for a report until the backend's own interval is known. After that, it is the upper limit of the
    /// wait. If three times `interval` is longer, that time applies instead.
    pub(crate) silence: Duration,
}

/// How a stream ended, for metrics, and why, for the log.
struct End(BackendStreamEnd, String);

impl End {
    fn new(end: BackendStreamEnd, why: impl fmt::Display) -> Self {
        Self(end, why.to_string())
    }
}

impl From<ForwardError> for End {
    fn from(error: ForwardError) -> Self {
        Self::new(BackendStreamEnd::Unopened, error)
    }
}

impl BackendStream {
    /// Reads streams, one after the other. Never ends.
    pub(crate) async fn keep_open(self) {
        let mut pause = Duration::ZERO;
        loop {
            let opened = Instant::now();
            let Err(End(end, why)) = self.read_one().await;
            self.load.backend_stream_ended(end);
            self.log.failure("backend load reports", || why);
            // Only this agent calls its backend, so the pauses need no jitter.
            pause = next_pause(pause, opened.elapsed(), end);
            tokio::time::sleep(pause).await;
        }
    }

    /// Opens a stream and reads its reports until it ends.
    async fn read_one(&self) -> Result<std::convert::Infallible, End> {
        let slot = self.pool.stream(true).await?.ok_or(ForwardError::NoHttp2)?;
        let response = self.open(slot).await?;
        self.read(response).await
    }

    /// Sends the request and waits for the head of the response.
    async fn open(&self, slot: Slot) -> Result<Response<UpstreamBody>, End> {
        let request = self.request().map_err(|error| End::new(BackendStreamEnd::Unopened, error))?;
        let leaving = slot.departure();
        let deadline = Instant::now() + self.patience(None);
        let mut sent = std::pin::pin!(self.pool.send_http2(request, slot));
        loop {
            let look = next_look(deadline, leaving(), (BackendStreamEnd::Unopened, "no answer"))?;
            if let Ok(response) = tokio::time::timeout_at(look, &mut sent).await {
                return Ok(response?);
            }
        }
    }

    fn request(&self) -> Result<Request<Upload>, http::Error> {
        let authority = Authority::try_from(self.pool.authority())?;
        let scheme = if self.pool.is_tls() { Scheme::HTTPS } else { Scheme::HTTP };
        Request::builder()
            .method(Method::POST)
            .uri(Uri::builder().scheme(scheme).authority(authority).path_and_query(METHOD).build()?)
            .version(Version::HTTP_2)
            .header(header::CONTENT_TYPE, GRPC)
            .header(header::TE, "trailers")
            .body(Upload::own(asking(self.interval)))
    }

    async fn read(&self, response: Response<UpstreamBody>) -> Result<std::convert::Infallible, End> {
        let (head, mut body) = response.into_parts();
        if head.status != StatusCode::OK {
            let why = format!("the stream is answered with {}", head.status);
            return Err(End::new(BackendStreamEnd::Unopened, why));
        }
        let (mut messages, mut rate) = (Messages::default(), Rate::new(Instant::now()));
        let mut last = None::<Instant>;
        let mut deadline = Instant::now() + self.patience(None);
        loop {
            let stalled = (BackendStreamEnd::Stalled, "the stream sends no reports");
            let look = next_look(deadline, body.leaving(), stalled)?;
            let frame = match tokio::time::timeout_at(look, body.frame()).await {
                Err(_) => continue,
                Ok(None) => return Err(ended(&head.headers)),
                Ok(Some(Err(error))) => return Err(End::new(BackendStreamEnd::Closed, error)),
                Ok(Some(Ok(frame))) => frame,
            };
            let now = Instant::now();
            rate.count(now)?;
            let data = match frame.into_data() {
                Ok(data) => data,
                Err(frame) => return Err(ended(frame.trailers_ref().unwrap_or(&head.headers))),
            };
            messages.push(&data);
            while let Some(message) = messages.next() {
                if let Err(Broken(why, report)) = &message {
                    if let Some(error) = report {
                        self.from.record(Err(*error), &self.load, Duration::ZERO);
                    }
                    return Err(End::new(BackendStreamEnd::Malformed, why));
                }
                rate.count(now)?;
                let gap = last.replace(now).map(|last| now.saturating_duration_since(last));
                let patience = self.patience(gap);
                deadline = now + patience;
                let report = message.map_err(|_| BackendError::Malformed);
                let report = report.and_then(|message| BackendReport::decode(&message));
                self.from.record(report, &self.load, patience);
            }
        }
    }

    /// Returns how long a report is valid, which is also how long to wait for the next one. It depends on `gap`, the
    /// time between the last two reports, because servers may send less often than they are asked to.
    fn patience(&self, gap: Option<Duration>) -> Duration {
        let most = self.silence.max(self.interval * MISSED);
        match gap {
            None => most,
            Some(gap) => (gap.max(self.interval) * MISSED).max(MIN_PATIENCE).min(most),
        }
    }
}

/// Returns when to check the connection next. Fails if the backend is `leaving`, because it may be waiting for its
/// streams to end. Also fails, with the error `late`, if the deadline has passed.
fn next_look(
    deadline: Instant,
    leaving: bool,
    late: (BackendStreamEnd, &'static str),
) -> Result<Instant, End> {
    let now = Instant::now();
    if leaving {
        Err(End::new(BackendStreamEnd::Closed, "the backend closes the connection"))
    } else if now >= deadline {
        Err(End::new(late.0, late.1))
    } else {
        Ok(deadline.min(now + LOOK))
    }
}

/// Returns the request message with its prefix.
fn asking(interval: Duration) -> Bytes {
    let interval = interval.max(MIN_INTERVAL);
    let report_interval = Some(proto::Duration {
        seconds: i64::try_from(interval.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(interval.subsec_nanos()).unwrap_or_default(),
    });
    let message = OrcaLoadReportRequest { report_interval }.encode_to_vec();
    let mut bytes = BytesMut::with_capacity(PREFIX + message.len());
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    bytes.extend_from_slice(&message);
    bytes.freeze()
}

/// Returns why a stream with these trailers ended.
fn ended(trailers: &HeaderMap) -> End {
    let status = trailers.get("grpc-status").map_or("none", |status| status.to_str().unwrap_or("unreadable"));
    let end =
        if status == UNIMPLEMENTED { BackendStreamEnd::Unimplemented } else { BackendStreamEnd::Closed };
    End(end, format!("the stream ended with gRPC status {status}"))
}

/// Returns the pause before the next stream. It doubles with each stream that ends soon after it began.
fn next_pause(last: Duration, lasted: Duration, end: BackendStreamEnd) -> Duration {
    if end == BackendStreamEnd::Unimplemented {
        MAX_PAUSE
    } else if lasted >= MAX_PAUSE {
        MIN_PAUSE
    } else {
        (last * 2).clamp(MIN_PAUSE, MAX_PAUSE)
    }
}

/// Reassembles the messages of a stream, wherever frames split them.
#[derive(Default)]
struct Messages(BytesMut);

/// Reason why a stream cannot be read any further, and the report's error if a report is the cause.
struct Broken(&'static str, Option<BackendError>);

impl Messages {
    /// Adds data. The HTTP/2 connection limits its length.
    fn push(&mut self, data: &Bytes) {
        self.0.extend_from_slice(data);
    }

    /// Returns the next message, once it is complete.
    fn next(&mut self) -> Option<Result<Bytes, Broken>> {
        let [flag, length @ ..] = *self.0.first_chunk::<PREFIX>()?;
        let length = u32::from_be_bytes(length) as usize;
        if flag != 0 {
            return Some(Err(Broken("a report is compressed", Some(BackendError::Malformed))));
        }
        if length > MAX_REPORT {
            return Some(Err(Broken("a report is longer than 4096 bytes", Some(BackendError::TooLong))));
        }
        (self.0.len() >= PREFIX + length).then(|| {
            self.0.advance(PREFIX);
            Ok(self.0.split_to(length).freeze())
        })
    }
}

/// Number of frames and reports in the current second.
struct Rate {
    since: Instant,
    count: u32,
}

impl Rate {
    fn new(now: Instant) -> Self {
        Self { since: now, count: 0 }
    }

    /// Counts a frame or a report. Fails if the backend floods the agent with them.
    fn count(&mut self, now: Instant) -> Result<(), End> {
        if now.saturating_duration_since(self.since) >= Duration::from_secs(1) {
            *self = Self::new(now);
        }
        self.count += 1;
        if self.count <= MAX_PER_SECOND {
            return Ok(());
        }
        Err(End::new(BackendStreamEnd::Flooded, "the stream sends too many reports"))
    }
}

const UNIMPLEMENTED: &str = "12";
/// Number of intervals after which a stream counts as stalled.
const MISSED: u32 = 3;
/// Shortest time after which a stream counts as stalled. Reports on responses are valid for the same time.
const MIN_PATIENCE: Duration = Duration::from_secs(10);
/// Interval at which the agent checks whether the backend is closing the connection.
const LOOK: Duration = Duration::from_secs(1);
/// Pauses between two streams.
const MIN_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Maximum number of frames and reports a second: ten times as many as the shortest interval needs.
const MAX_PER_SECOND: u32 = 200;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_until_a_stream_lasts() {
        let (closed, second) = (BackendStreamEnd::Closed, Duration::from_secs);
        let mut pause = Duration::ZERO;
        let pauses: Vec<u64> = (0..8)
            .map(|_| {
                pause = next_pause(pause, second(5), closed);
                pause.as_secs()
            })
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(next_pause(pause, second(60), closed), MIN_PAUSE);
        assert_eq!(next_pause(second(1), second(0), BackendStreamEnd::Unimplemented), MAX_PAUSE);
    }

    #[test]
    fn messages_are_read_across_any_split() {
        let bytes = b"\0\0\0\0\x02ab\0\0\0\0\0\0\0\0\0\x01c";
        for piece in 1..=bytes.len() {
            let (mut messages, mut read) = (Messages::default(), Vec::new());
            for piece in bytes.chunks(piece) {
                messages.push(&Bytes::copy_from_slice(piece));
                while let Some(message) = messages.next() {
                    read.push(message.unwrap_or_else(|Broken(why, _)| panic!("{why}")));
                }
            }
            assert_eq!(read, [&b"ab"[..], b"", b"c"], "{piece}");
        }
        for (bytes, fault) in
            [(b"\x01\0\0\0\0", BackendError::Malformed), (b"\0\0\0\x10\x01", BackendError::TooLong)]
        {
            let mut messages = Messages::default();
            messages.push(&Bytes::from_static(bytes));
            assert!(matches!(messages.next(), Some(Err(Broken(_, Some(found)))) if found == fault));
        }
    }
}
