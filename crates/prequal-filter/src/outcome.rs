//! What Envoy says of a request, as both roles read it.

use prequal_core::client::{Class, Witness};
use prequal_core::endpoint::Endpoint;
use prequal_core::failures::grpc_blames_server;
use prequal_core::report::{HEADER_LATENCY, HEADER_LOAD, HEADER_RIF, LoadReport, ReportError};
use prequal_core::time::Micros;
use proxy_wasm::types::MapType;

use crate::host;
use crate::store::Envoy;

/// Of the request that is the effective context.
impl Witness for Envoy {
    fn now(&self) -> Micros {
        host::now()
    }

    fn served_by(&self) -> Option<Endpoint> {
        host::upstream_address()
    }

    fn class(&self) -> Class {
        class_of(&host::text_property(&["response", "code_details"]).unwrap_or_default())
    }

    fn attempts(&self) -> u64 {
        host::number_property(&["upstream", "request_attempt_count"]).unwrap_or(1)
    }
}

/// The report in a map of headers, if there is one.
pub(crate) fn report_in(map: MapType) -> Option<Result<LoadReport, ReportError>> {
    let header = |name| host::header_bytes(map, name);
    Some(match header(HEADER_LOAD) {
        Some(load) => LoadReport::parse(load),
        None => LoadReport::parse_pair(&header(HEADER_RIF)?, header(HEADER_LATENCY).as_deref()),
    })
}

/// Whether the response's status is a 5xx.
pub(crate) fn server_error() -> bool {
    let status = host::header_bytes(MapType::HttpResponseHeaders, ":status");
    status.is_some_and(|status| status.starts_with(b"5"))
}

/// Whether the gRPC status in the map says that the replica failed. Means nothing unless [`is_grpc`].
pub(crate) fn grpc_failed(map: MapType) -> bool {
    host::header(map, "grpc-status").is_some_and(|status| grpc_blames_server(status.as_bytes()))
}

/// Whether a response of this content type is gRPC's.
pub(crate) fn is_grpc(content_type: &[u8]) -> bool {
    content_type.starts_with(b"application/grpc")
}

/// Whether the response is gRPC's. For where its headers are known to be at hand: with them and at the end.
pub(crate) fn grpc_response() -> bool {
    let content_type = host::header_bytes(MapType::HttpResponseHeaders, "content-type");
    content_type.is_some_and(|content_type| is_grpc(&content_type))
}

/// Who ended a request, from Envoy's code details (the flags leave out HTTP/2 resets and protocol errors).
///
/// A circuit breaker that is full looks like a reset of the host it was for, which has not heard of the request.
pub(crate) fn class_of(details: &str) -> Class {
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| details.starts_with(prefix));
    if details == "via_upstream" {
        Class::Answer
    } else if starts(&["downstream_", "http2.remote_reset", "http3.remote_reset"]) {
        Class::ClientAbort
    } else if starts(&["upstream_reset_before_response_started{overflow"]) {
        Class::Local
    } else if starts(&["upstream_", "response_timeout"])
        || (starts(&["stream_idle_timeout"]) && host::upstream_address().is_some())
    {
        Class::UpstreamFailure
    } else {
        Class::Local
    }
}
