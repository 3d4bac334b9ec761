//! Out-of-band load reports: the gRPC service `xds.service.orca.v3.OpenRcaService`. Its only method sends a report at
//! the interval that the client asks for, until the client leaves or the agent is draining.
//!
//! The service exists only if the operator asks for it; otherwise the backend gets these calls. The calls do not count
//! as requests in flight. A client that does not read gets no more reports than fit into its window.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Version, header};
use http_body::{Body, Frame};
use http_body_util::BodyExt as _;
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::wire::orca::METHOD;
use prost::Message as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Interval, MissedTickBehavior};

use crate::load::Load;
use crate::orca::Orca;
use crate::orca::proto::{OrcaLoadReport, OrcaLoadReportRequest};
use crate::phase::{Life, Phase};

/// Shortest interval between the reports of a stream. A client that asks for less gets this.
pub(crate) const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Interval if the client asks for none.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(1);
/// Longest interval.
const MAX_INTERVAL: Duration = Duration::from_secs(3600);
/// Maximum length of the request message, bytes.
const MAX_REQUEST: usize = 4096;
/// Length of the prefix of a message, bytes: a flag and the length of the message.
pub(crate) const PREFIX: usize = 5;

/// Report service of one replica.
pub(crate) struct Oob {
    room: Arc<Semaphore>,
    limit: Option<u32>,
    /// Time within which the request must arrive.
    patience: Duration,
}

impl Oob {
    /// Returns `None` unless the service was asked for.
    pub(crate) fn new(orca: &Orca, patience: Duration) -> Option<Self> {
        let room = Arc::new(Semaphore::new(orca.streams as usize));
        (orca.streams > 0).then(|| Self { room, limit: orca.limit(), patience })
    }

    /// Returns whether a request is for this service. gRPC exists only over HTTP/2.
    pub(crate) fn is_for<B>(&self, req: &Request<B>) -> bool {
        req.uri().path() == METHOD && req.version() == Version::HTTP_2
    }

    /// Starts a stream of reports of `load`, or refuses with a reason. `endpoint` is that of the replica.
    pub(crate) async fn serve<B: Body<Data = Bytes> + Unpin>(
        &self,
        req: Request<B>,
        load: &Load,
        endpoint: Endpoint,
        life: Life,
    ) -> Response<Reports> {
        // A call whose request has not arrived yet also takes a place. Otherwise such calls would be unlimited.
        let Ok(room) = self.room.clone().try_acquire_owned() else {
            return refuse(load, Refusal("8", "too many streams of load reports"));
        };
        let asked = tokio::select! {
            biased;
            () = life.clone().until(Phase::Draining) => Err(DRAINS),
            asked = tokio::time::timeout(self.patience, read(req.into_body())) => {
                asked.unwrap_or(Err(Refusal("4", "the request did not arrive in time")))
            }
        };
        let interval = match asked {
            Ok(interval) => interval,
            Err(refusal) => {
                // The client may call again as soon as it has the answer.
                drop(room);
                return refuse(load, refusal);
            }
        };
        let mut timer = tokio::time::interval(interval);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        load.counters().count_orca_stream(true);
        let open = OpenStream {
            timer,
            draining: Box::pin(life.until(Phase::Draining)),
            load: load.clone(),
            endpoint,
            limit: self.limit,
            _room: room,
        };
        let mut response = Response::new(Reports(Some(open)));
        response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
        response
    }
}

/// A gRPC status and its message.
struct Refusal(&'static str, &'static str);

const DRAINS: Refusal = Refusal("14", "the agent is draining");

/// Returns a "trailers-only" response, as gRPC calls it.
fn refuse(load: &Load, refusal: Refusal) -> Response<Reports> {
    load.counters().count_orca_refused();
    let mut response = Response::new(Reports(None));
    *response.headers_mut() = status(refusal);
    response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    response
}

fn status(Refusal(code, message): Refusal) -> HeaderMap {
    HeaderMap::from_iter([
        (HeaderName::from_static("grpc-status"), HeaderValue::from_static(code)),
        (HeaderName::from_static("grpc-message"), HeaderValue::from_static(message)),
    ])
}

/// Content type of a call.
pub(crate) const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// Reads the single message of the request and returns the interval that it asks for.
async fn read<B: Body<Data = Bytes> + Unpin>(mut body: B) -> Result<Duration, Refusal> {
    let mut bytes = BytesMut::new();
    loop {
        if let Some((prefix, message)) = bytes.split_first_chunk::<PREFIX>() {
            let [flag, length @ ..] = *prefix;
            let length = u32::from_be_bytes(length) as usize;
            if flag != 0 {
                return Err(Refusal("12", "compressed requests are not supported"));
            }
            if length > MAX_REQUEST {
                return Err(Refusal("8", "the request is longer than 4096 bytes"));
            }
            if let Some(message) = message.get(..length) {
                return interval(message);
            }
        }
        match body.frame().await {
            // The connection limits the length of frames, so the buffer exceeds its limit by at most one frame.
            Some(Ok(frame)) => bytes.extend_from_slice(&frame.into_data().unwrap_or_default()),
            Some(Err(_)) | None => return Err(Refusal("3", "the request ends before its message does")),
        }
    }
}

fn interval(message: &[u8]) -> Result<Duration, Refusal> {
    let request = OrcaLoadReportRequest::decode(message)
        .map_err(|_| Refusal("3", "the request is not an OrcaLoadReportRequest"))?;
    let Some(asked) = request.report_interval else { return Ok(DEFAULT_INTERVAL) };
    match (u64::try_from(asked.seconds), u32::try_from(asked.nanos)) {
        (Ok(0), Ok(0)) => Ok(DEFAULT_INTERVAL),
        (Ok(seconds), Ok(nanos)) if nanos < 1_000_000_000 => {
            Ok(Duration::new(seconds, nanos).clamp(MIN_INTERVAL, MAX_INTERVAL))
        }
        _ => Err(Refusal("3", "report_interval is not a valid duration")),
    }
}

/// Response body that sends reports until the stream ends.
pub(crate) struct Reports(Option<OpenStream>);

struct OpenStream {
    timer: Interval,
    draining: Pin<Box<dyn Future<Output = ()> + Send>>,
    load: Load,
    endpoint: Endpoint,
    limit: Option<u32>,
    _room: OwnedSemaphorePermit,
}

impl OpenStream {
    /// Returns a report as a gRPC message.
    fn message(&self) -> Bytes {
        let (_, orca) = self.load.report_with_orca(self.endpoint, None, None, self.limit);
        let report = orca.as_ref().map(OrcaLoadReport::from).unwrap_or_default();
        let length = report.encoded_len();
        let mut bytes = BytesMut::with_capacity(PREFIX + length);
        bytes.put_u8(0);
        bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
        // Encoding cannot fail: the buffer grows.
        let _ = report.encode(&mut bytes);
        self.load.counters().count_orca(true);
        bytes.freeze()
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.load.counters().count_orca_stream(false);
    }
}

impl Body for Reports {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(open) = &mut self.0 else { return Poll::Ready(None) };
        if open.draining.as_mut().poll(cx).is_ready() {
            self.0 = None;
            let trailers = status(DRAINS);
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
        ready!(open.timer.poll_tick(cx));
        Poll::Ready(Some(Ok(Frame::data(open.message()))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::orca::proto;

    fn asks(seconds: i64, nanos: i32) -> Option<Duration> {
        let report_interval = Some(proto::Duration { seconds, nanos });
        interval(&OrcaLoadReportRequest { report_interval }.encode_to_vec()).ok()
    }

    #[test]
    fn any_interval_is_clamped_to_the_bounds() {
        for (seconds, nanos, expected) in [
            (0, 0, Some(DEFAULT_INTERVAL)),
            (0, 1, Some(MIN_INTERVAL)),
            (0, 250_000_000, Some(Duration::from_millis(250))),
            (2, 500_000_000, Some(Duration::from_millis(2500))),
            (i64::MAX, 999_999_999, Some(MAX_INTERVAL)),
            (-1, 0, None),
            (0, -1, None),
            (i64::MIN, i32::MIN, None),
            (1, i32::MAX, None),
        ] {
            assert_eq!(asks(seconds, nanos), expected, "{seconds} s {nanos} ns");
        }
        assert_eq!(interval(&[]).ok(), Some(DEFAULT_INTERVAL));
        assert!(interval(b"\x0a\xff").is_err(), "a length past the end");
    }
}
