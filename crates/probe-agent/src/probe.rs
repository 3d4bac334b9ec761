//! The replies of our own: probes, refusals, upstream errors.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use prequal_core::report::{LoadReport, PROBE_PATH};

use crate::headers;

/// Everything below this path is ours and never forwarded.
const PREFIX: &str = "/prequal/";

/// What to do with a request of this method and path.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Route {
    /// The application's.
    Forward,
    /// A probe.
    Probe,
    /// A probe asked for in a way that we do not answer.
    MethodNotAllowed,
    /// Below our prefix, but nothing is there.
    NotFound,
}

pub(crate) fn route(method: &Method, path: &str) -> Route {
    if !path.starts_with(PREFIX) {
        return Route::Forward;
    }
    match (path == PROBE_PATH, method) {
        (false, _) => Route::NotFound,
        (true, &Method::GET | &Method::HEAD) => Route::Probe,
        (true, _) => Route::MethodNotAllowed,
    }
}

/// The reply to a probe: `report`, which has been divided by `divisor`. The body is empty unless the probe accepts JSON.
pub(crate) fn reply(report: &LoadReport, divisor: u32, request: &HeaderMap) -> Response<Bytes> {
    let wants_json = request
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .any(|value| value.contains("application/json"));
    let mut response = Response::new(Bytes::new());
    let fields = response.headers_mut();
    if let Some(value) = header_value(report, divisor) {
        fields.insert(headers::LOAD, value);
    }
    fields.insert(headers::RIF, HeaderValue::from(report.rif));
    if let Some(latency) = report.latency_us {
        fields.insert(headers::LATENCY, HeaderValue::from(latency));
    }
    fields.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if wants_json {
        fields.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        *response.body_mut() = json(report).into();
    }
    response
}

/// The report as a header value, saying by what it has been divided. `None` cannot happen: the text is digits and
/// punctuation.
pub(crate) fn header_value(report: &LoadReport, divisor: u32) -> Option<HeaderValue> {
    let mut text = String::with_capacity(64);
    write!(text, "{report}").ok()?;
    if divisor > 1 {
        write!(text, ";scaled={divisor}").ok()?;
    }
    HeaderValue::from_maybe_shared(Bytes::from(text)).ok()
}

fn json(report: &LoadReport) -> String {
    let timestamp_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
    let mut text = format!("{{\"rif\":{},\"latency_median_ms\":", report.rif);
    // Written by hand: digits and addresses need no escaping. Errors cannot happen on a String.
    let _ = match report.latency_us {
        Some(us) => write!(text, "{}.{:03},\"latency_us\":{us}", us / 1000, us % 1000),
        None => write!(text, "null,\"latency_us\":null"),
    };
    let _ = write!(text, ",\"failing\":{},\"up_s\":", report.failing);
    let _ = match report.up_s {
        Some(up) => write!(text, "{up}"),
        None => text.write_str("null"),
    };
    let _ = write!(text, ",\"timestamp_ms\":{timestamp_ms}");
    if let Some(endpoint) = report.endpoint {
        let _ = write!(text, ",\"endpoint\":\"{endpoint}\"");
    }
    if let Some(probe) = report.probe_endpoint {
        let _ = write!(text, ",\"probe_endpoint\":\"{probe}\"");
    }
    text.push('}');
    text
}

/// A short plain-text reply.
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
    fn our_paths_are_never_forwarded() {
        for (method, path, expected) in [
            (Method::GET, "/prequal/probe", Route::Probe),
            (Method::POST, "/prequal/probe", Route::MethodNotAllowed),
            (Method::GET, "/prequal/probe/", Route::NotFound),
            (Method::GET, "/prequal/", Route::NotFound),
            (Method::GET, "/prequal", Route::Forward),
            (Method::GET, "/prequalx/probe", Route::Forward),
            (Method::GET, "/", Route::Forward),
        ] {
            assert_eq!(route(&method, path), expected, "{method} {path}");
        }
    }

    #[test]
    fn a_reply_has_all_headers_and_json_only_when_asked() {
        let mut report = LoadReport {
            rif: 3,
            latency_us: Some(50_123),
            endpoint: Some("127.0.0.1:80".parse().unwrap()),
            probe_endpoint: None,
            failing: 0,
            up_s: None,
        };
        let plain = reply(&report, 1, &HeaderMap::new());
        assert_eq!(plain.headers()["x-prequal-load"], "3;50123;127.0.0.1:80");
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
        assert!(body.contains(",\"failing\":300,\"up_s\":null,"), "{body}");
        assert!(
            body.ends_with(",\"endpoint\":\"127.0.0.1:80\",\"probe_endpoint\":\"127.0.0.1:81\"}"),
            "{body}"
        );
    }
}
