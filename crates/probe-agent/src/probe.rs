//! Replies that this crate writes itself: to probes, for refusals, and for upstream errors.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use prequal_core::wire::probe::{Route, json};
use prequal_core::wire::report::LoadReport;

use crate::names;

pub(crate) fn route(method: &Method, path: &str) -> Route {
    Route::of(path, || method.as_str())
}

/// Returns the reply to a probe. The load in `report` has already been divided by `divisor`. The body is empty unless
/// the probe accepts JSON.
pub(crate) fn reply(report: &LoadReport, divisor: u32, request: &HeaderMap) -> Response<Bytes> {
    let wants_json = request
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .any(|value| value.contains("application/json"));
    let mut response = Response::new(Bytes::new());
    let fields = response.headers_mut();
    if let Some(value) = header_value(report, divisor) {
        fields.insert(names::LOAD, value);
    }
    fields.insert(names::RIF, HeaderValue::from(report.rif));
    if let Some(latency) = report.latency_us {
        fields.insert(names::LATENCY, HeaderValue::from(latency));
    }
    fields.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if wants_json {
        fields.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let timestamp_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        *response.body_mut() = json(report, timestamp_ms).into();
    }
    response
}

/// Returns the report as a header value that includes its divisor. `None` cannot happen: the text is visible ASCII.
pub(crate) fn header_value(report: &LoadReport, divisor: u32) -> Option<HeaderValue> {
    let mut text = String::with_capacity(64);
    write!(text, "{report}").ok()?;
    if divisor > 1 {
        write!(text, ";scaled={divisor}").ok()?;
    }
    HeaderValue::from_maybe_shared(Bytes::from(text)).ok()
}

/// Returns the reply to a probe with a method other than GET or HEAD.
pub(crate) fn method_not_allowed() -> Response<Bytes> {
    let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "probes use GET or HEAD\n");
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
    response
}

/// Returns a short plain-text reply.
pub(crate) fn plain(status: StatusCode, reason: &'static str) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from_static(reason.as_bytes()));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_has_all_headers_and_json_only_on_request() {
        let mut report = LoadReport {
            rif: 3,
            away: 2,
            latency_us: Some(50_123),
            capacity: None,
            endpoint: Some("127.0.0.1:80".parse().unwrap()),
            probe_endpoint: None,
            failing: 0,
            up_s: None,
        };
        let plain = reply(&report, 1, &HeaderMap::new());
        assert_eq!(plain.headers()["x-prequal-load"], "3;50123;127.0.0.1:80;away=2");
        assert_eq!(plain.headers()["x-prequal-rif"], "3");
        assert_eq!(plain.headers()["x-prequal-latency-us"], "50123");
        assert!(plain.body().is_empty());
        report.latency_us = None;
        report.failing = 300;
        report.probe_endpoint = Some("127.0.0.1:81".parse().unwrap());
        let accept = HeaderMap::from_iter([(header::ACCEPT, HeaderValue::from_static("application/json"))]);
        let json = reply(&report, 1, &accept);
        assert!(!json.headers().contains_key("x-prequal-latency-us"), "unknown latency is omitted");
        let body = std::str::from_utf8(json.body()).unwrap();
        assert!(body.starts_with("{\"rif\":3,\"latency_median_ms\":null,"), "{body}");
        assert!(body.contains(",\"away\":2,\"failing\":300,\"up_s\":null,"), "{body}");
        assert!(
            body.ends_with(",\"endpoint\":\"127.0.0.1:80\",\"probe_endpoint\":\"127.0.0.1:81\"}"),
            "{body}"
        );
    }
}
