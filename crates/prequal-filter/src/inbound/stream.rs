//! One request on its way to the replica behind this Envoy. It counts as in flight until the replica has answered it;
//! then its outcome is classified. The speed at which its client sends and receives does not count against the replica.
//!
//! Requests are classified as in the agent's table (`crates/probe-agent/src/body.rs`), except that here Envoy reports
//! who ended the request. A request that Envoy itself answered has counted as in flight. It shows nothing about the
//! replica, unless the replica refused it, reset it, or was late.

use std::rc::Rc;

use prequal_core::client::Class;
use prequal_core::server::tracker::Ticket;
use prequal_core::shared::outcome::Outcome;
use prequal_core::shared::time::Micros;
use prequal_core::wire::headers::is_grpc;
use prequal_core::wire::orca;
use prequal_core::wire::probe::Route;
use prequal_core::wire::report::{HEADER_LATENCY, HEADER_LOAD, HEADER_RIF};
use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::{Action, BufferType, MapType};

use super::served::Served;
use super::{Inbound, reply};
use crate::host;
use crate::outcome::{Progress, grpc_failed};

/// Time after the first response message beyond which an open gRPC call counts as a stream, microseconds.
const GRPC_UNARY_TAIL_US: u64 = 1_000_000;
/// Length of the prefix of each gRPC message, bytes: a flag, and the message's length in four bytes.
const GRPC_PREFIX: usize = 5;
/// Flag that marks gRPC-Web's trailers, which look like a message. HTTP/1.1 clients find them in the body.
const GRPC_WEB_TRAILERS: u8 = 0x80;

/// One request at the replica's Envoy.
pub(crate) struct InboundStream {
    inbound: Rc<Inbound>,
    flight: Option<Flight>,
    /// Whether the filter answered the request itself; the response is then not the replica's.
    local_reply: bool,
    progress: Progress,
    failed: bool,
    /// Whether the response has not begun and the client is still sending its request.
    uploading: bool,
    streaming: bool,
    /// Whether the connection was upgraded, for example to a WebSocket.
    upgraded: bool,
    grpc: Option<Grpc>,
}

/// A request that is counted.
struct Flight {
    served: Rc<Served>,
    ticket: Ticket,
}

/// State that distinguishes a gRPC stream from a unary call.
#[derive(Default)]
struct Grpc {
    first: Option<Micros>,
    /// Size of the first message with its prefix, bytes; `None` until known.
    unary: Option<usize>,
    received: usize,
}

impl InboundStream {
    pub(crate) fn new(inbound: Rc<Inbound>) -> Self {
        Self {
            inbound,
            flight: None,
            local_reply: false,
            progress: Progress::default(),
            failed: false,
            uploading: false,
            streaming: false,
            upgraded: false,
            grpc: None,
        }
    }

    /// Answers requests for paths below Prequal's prefix. Returns true if it did.
    fn answered_here(&self) -> bool {
        let header = |name| host::header(MapType::HttpRequestHeaders, name).unwrap_or_default();
        let path = header(":path");
        let path = path.split('?').next().unwrap_or_default();
        let mut method = String::new();
        let route = Route::of(path, || {
            method = header(":method");
            &method
        });
        match route {
            Route::Forward => return false,
            Route::Probe => self.inbound.answer(host::now()),
            Route::MethodNotAllowed => reply(405, &[("allow", "GET, HEAD")], b"probes use GET or HEAD\n"),
            Route::NotFound => reply(404, &[], b"not found\n"),
        }
        true
    }

    fn mark_streaming(&mut self) {
        if let (false, Some(flight)) = (self.streaming, &self.flight) {
            flight.served.streaming(&*self.inbound.vm, &flight.ticket, host::now());
        }
        self.streaming = true;
    }

    /// Reads the headers of the response.
    fn read_head(&mut self, end_of_stream: bool) {
        let header = |name| host::header_bytes(MapType::HttpResponseHeaders, name).unwrap_or_default();
        let status = header(":status");
        self.progress.complete = end_of_stream;
        self.failed = status.starts_with(b"5");
        if status == b"101" {
            self.upgraded = true;
            self.mark_streaming();
            return;
        }
        let content_type = header("content-type");
        if is_grpc(&content_type) {
            self.failed |= grpc_failed(MapType::HttpResponseHeaders);
            // The messages of this type are in base64, so they are not counted. The call counts as an ordinary request.
            self.grpc = (!content_type.starts_with(b"application/grpc-web-text")).then(Grpc::default);
        } else if content_type.starts_with(b"text/event-stream") {
            self.mark_streaming();
        }
    }

    /// Writes the reports to the response.
    fn stamp(&self, flight: &Flight) {
        let set = |name, value: Option<&str>| {
            host::set_header(MapType::HttpResponseHeaders, name, value.map(str::as_bytes))
        };
        let leaving = (!self.streaming && self.grpc.is_none()).then(|| flight.ticket.visit());
        let (config, now) = (&self.inbound.config, host::now());
        let orca = config.orca.filter(|orca| orca.responses.includes(self.grpc.is_some()));
        let report = (config.report_on_responses || orca.is_some())
            .then(|| flight.served.report(&*self.inbound.vm, now, leaving));
        if let (Some(orca), Some(report)) = (orca, &report) {
            let load = flight.served.orca(now, report, leaving.is_some(), orca.limit);
            // The replica's own ORCA report would contradict this one.
            set(orca::HEADER, None);
            set(orca::HEADER_BIN, None);
            set(orca.format.header(), load.map(|load| load.header(orca.format)).as_deref());
        }
        let report = report.filter(|_| config.report_on_responses).map(|report| report.to_string());
        // The report made here replaces the replica's own report of its load.
        set(HEADER_LOAD, report.as_deref());
        set(HEADER_RIF, None);
        set(HEADER_LATENCY, None);
    }

    /// Stops counting the request: the replica sends nothing more, and the rest depends on the client's speed.
    fn end(&mut self) {
        if let Some(Flight { served, ticket }) = self.flight.take() {
            let (outcome, up) = self.judge();
            served.finish(&*self.inbound.vm, host::now(), ticket, outcome, up);
        }
    }

    /// Sets whether the replica waits for the client's upload.
    fn set_client_waits(&self, waits: bool) {
        if let Some(flight) = &self.flight {
            flight.served.set_client_waits(&*self.inbound.vm, &flight.ticket, host::now(), waits);
        }
    }

    fn uploaded(&mut self) {
        if std::mem::take(&mut self.uploading) {
            self.set_client_waits(false);
        }
    }

    /// Returns how the request ended and whether the replica is up; the latter is `None` if the end does not show it.
    fn judge(&self) -> (Outcome, Option<bool>) {
        match self.progress.class() {
            _ if self.upgraded => (Outcome::Streaming, None),
            Class::Answer | Class::ClientAbort if self.streaming && !self.failed => {
                (Outcome::Streaming, Some(true))
            }
            Class::Answer if self.failed => (Outcome::Failure, Some(true)),
            Class::Answer if self.progress.complete => (Outcome::Success, Some(true)),
            Class::Answer | Class::ClientAbort | Class::Local => (Outcome::Aborted, None),
            // If the connection was refused, the replica's port has no listener. Other failures do not show that the
            // replica is down.
            Class::UpstreamFailure if refused() => (Outcome::Failure, Some(false)),
            Class::UpstreamFailure => (Outcome::Failure, None),
        }
    }
}

impl Context for InboundStream {}

impl HttpContext for InboundStream {
    fn on_http_request_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        #[cfg(feature = "crash-test")]
        host::crash_on_demand();
        if self.answered_here() {
            self.local_reply = true;
            return Action::Pause;
        }
        let now = host::now();
        if let Some(served) = self.inbound.replica_of_request(now) {
            self.inbound.vm.ensure_slot(now);
            if let Some(orca) = self.inbound.config.orca {
                served.count_rates(now, orca.window_ms);
            }
            let ticket = served.start(&*self.inbound.vm, now);
            self.flight = Some(Flight { served, ticket });
            self.uploading = !end_of_stream;
            self.progress.request_whole = end_of_stream;
            if self.uploading {
                self.set_client_waits(true);
            }
        }
        Action::Continue
    }

    fn on_http_request_body(&mut self, _size: usize, end_of_stream: bool) -> Action {
        if end_of_stream {
            self.progress.request_whole = true;
            self.uploaded();
        }
        Action::Continue
    }

    fn on_http_request_trailers(&mut self, _count: usize) -> Action {
        self.progress.request_whole = true;
        self.uploaded();
        Action::Continue
    }

    fn on_http_response_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        if self.local_reply {
            return Action::Continue;
        }
        // A replica may answer before it has read the whole request.
        self.uploaded();
        self.progress.begun = true;
        self.read_head(end_of_stream);
        if let Some(flight) = &self.flight {
            self.stamp(flight);
        }
        if end_of_stream {
            self.end();
        }
        Action::Continue
    }

    fn on_http_response_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        self.progress.complete |= end_of_stream;
        if let Some(grpc) = &mut self.grpc
            && !self.streaming
            && size > 0
            && grpc.data(size)
        {
            self.mark_streaming();
        }
        if end_of_stream {
            self.end();
        }
        Action::Continue
    }

    fn on_http_response_trailers(&mut self, _count: usize) -> Action {
        self.progress.complete = true;
        if self.grpc.is_some() && grpc_failed(MapType::HttpResponseTrailers) {
            self.failed = true;
        }
        self.end();
        Action::Continue
    }
}

impl Drop for InboundStream {
    fn drop(&mut self) {
        self.end();
    }
}

impl Grpc {
    /// Processes the next bytes of the body, which are in the current buffer. Returns whether they show that the call
    /// is a stream.
    fn data(&mut self, size: usize) -> bool {
        let now = host::now();
        let read = |start, length| match hostcalls::get_buffer(BufferType::HttpResponseBody, start, length) {
            Ok(bytes) => bytes.unwrap_or_default(),
            Err(_) => Vec::new(),
        };
        if self.received == 0
            && let [_, a, b, c, d] = read(0, GRPC_PREFIX)[..]
        {
            let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
            self.unary = Some(length.saturating_add(GRPC_PREFIX));
        }
        let before = self.received;
        self.received = before.saturating_add(size);
        let first = *self.first.get_or_insert(now);
        if let Some(unary) = self.unary.filter(|unary| self.received > *unary) {
            let flags = read(unary.saturating_sub(before), 1);
            if flags.first().is_none_or(|flags| flags & GRPC_WEB_TRAILERS == 0) {
                return true;
            }
            // Nothing follows the trailers.
            self.unary = None;
        }
        now.saturating_since(first) > GRPC_UNARY_TAIL_US
    }
}

/// Returns whether the replica's port refused the connection.
fn refused() -> bool {
    let details = host::text_property(&["response", "code_details"]).unwrap_or_default();
    details.contains("remote_connection_failure")
}
