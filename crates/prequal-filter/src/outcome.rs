//! How a request ended, as both roles read it from Envoy.

use prequal_core::failures::grpc_blames_server;
use proxy_wasm::types::MapType;

use crate::host;
use crate::metrics::Class;

/// Whether the gRPC status in the map says that the replica failed. Means nothing unless [`is_grpc`].
pub(crate) fn grpc_failed(map: MapType) -> bool {
    host::header(map, "grpc-status").is_some_and(|status| grpc_blames_server(status.as_bytes()))
}

/// Whether a response of this content type is gRPC's.
pub(crate) fn is_grpc(content_type: &[u8]) -> bool {
    content_type.starts_with(b"application/grpc")
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
