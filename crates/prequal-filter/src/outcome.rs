//! How a request ended, as Envoy describes it. Both roles use this module.

use prequal_core::client::Class;
use prequal_core::shared::outcome::grpc_blames_server;
use proxy_wasm::types::MapType;

use crate::host;

/// How far a request had come when it ended. Envoy's own replies also count as responses here.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Progress {
    /// Whether the client had sent the whole request.
    pub(crate) request_whole: bool,
    /// Whether a response had begun.
    pub(crate) begun: bool,
    /// Whether the response had ended properly.
    pub(crate) complete: bool,
}

impl Progress {
    /// Returns whether the request may have been waiting for the host: the client had sent all of it, and there was
    /// either no response or a complete one, which may be Envoy's own.
    fn waits_for_host(self) -> bool {
        self.request_whole && (self.complete || !self.begun)
    }

    /// Returns who ended the request that is the effective context.
    pub(crate) fn class(self) -> Class {
        let details = host::text_property(&["response", "code_details"]).unwrap_or_default();
        let reached = || host::upstream_address().is_some();
        // Among complete responses, only a host's response has a backend latency; the others are Envoy's own.
        let answered = || host::number_property(&["response", "backend_latency"]).is_some();
        class_of(&details, || self.waits_for_host() && reached() && !answered())
    }
}

/// Returns whether the gRPC status in the map means that the replica failed. Valid only for gRPC responses
/// ([`is_grpc`](prequal_core::wire::headers::is_grpc)).
pub(crate) fn grpc_failed(map: MapType) -> bool {
    host::header(map, "grpc-status").is_some_and(|status| grpc_blames_server(status.as_bytes()))
}

/// Returns who ended a request, according to Envoy's response code details. (Its response flags do not show HTTP/2
/// resets and protocol errors.)
///
/// The details of a full circuit breaker look like a reset by the chosen host, although that host has not received the
/// request. A stream that reaches the limit on its duration has not failed. An idle timeout is the host's failure only
/// while the host has the whole request and has not answered. Earlier, the stream may be waiting for the client to
/// send. Later, it may be waiting for the client to receive.
fn class_of(details: &str, waits_for_host: impl FnOnce() -> bool) -> Class {
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| details.starts_with(prefix));
    if details == "via_upstream" {
        Class::Answer
    } else if starts(&["downstream_", "http2.remote_reset", "http3.remote_reset"]) {
        Class::ClientAbort
    } else if starts(&["upstream_reset_before_response_started{overflow", "upstream_max_stream_duration"]) {
        Class::Local
    } else if starts(&["stream_idle_timeout", "upstream_per_try_idle_timeout"]) {
        if waits_for_host() { Class::UpstreamFailure } else { Class::Local }
    } else if starts(&["upstream_", "response_timeout"]) {
        Class::UpstreamFailure
    } else {
        Class::Local
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_details_say_who_ended_a_request() {
        for (details, expected) in [
            ("via_upstream", Class::Answer),
            ("upstream_reset_before_response_started{connection_termination}", Class::UpstreamFailure),
            ("upstream_reset_after_response_started{connection_termination}", Class::UpstreamFailure),
            ("upstream_per_try_timeout", Class::UpstreamFailure),
            ("response_timeout", Class::UpstreamFailure),
            ("upstream_reset_before_response_started{overflow}", Class::Local),
            ("max_duration_timeout", Class::Local),
            ("upstream_max_stream_duration_reached", Class::Local),
            ("request_overall_timeout", Class::Local),
            ("no_healthy_upstream", Class::Local),
            ("", Class::Local),
            ("downstream_remote_disconnect", Class::ClientAbort),
            ("http2.remote_reset", Class::ClientAbort),
        ] {
            assert_eq!(class_of(details, || unreachable!("it does not matter")), expected, "{details}");
        }
    }

    #[test]
    fn an_idle_stream_is_the_hosts_failure_only_while_the_request_waits_for_it() {
        for details in ["stream_idle_timeout", "upstream_per_try_idle_timeout"] {
            assert_eq!(class_of(details, || true), Class::UpstreamFailure, "{details}");
            assert_eq!(class_of(details, || false), Class::Local, "{details}");
        }
        for (request_whole, begun, complete, waits) in [
            (true, false, false, true),
            // This may be Envoy's own reply.
            (true, true, true, true),
            (true, true, false, false),
            (false, false, false, false),
            (false, true, true, false),
        ] {
            let progress = Progress { request_whole, begun, complete };
            assert_eq!(progress.waits_for_host(), waits, "{progress:?}");
        }
    }
}
