//! The routing of requests that reach the replica's side, and the body of the answer to a probe.

use std::fmt::Write as _;

use crate::shared::capacity::Capacity;
use crate::wire::report::{LoadReport, PROBE_PATH};

/// Path prefix reserved for Prequal. Requests below it are never forwarded.
const PREFIX: &str = "/prequal/";

/// How to handle a request, by its method and path.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Route {
    /// A request for the application.
    Forward,
    /// A probe.
    Probe,
    /// A probe whose method is not supported.
    MethodNotAllowed,
    /// A path below the reserved prefix that does not exist.
    NotFound,
}

impl Route {
    /// Returns the route of `path`, which must not include a query. `method` is called only where it matters.
    pub fn of<'a>(path: &str, method: impl FnOnce() -> &'a str) -> Self {
        if !path.starts_with(PREFIX) {
            Self::Forward
        } else if path != PROBE_PATH {
            Self::NotFound
        } else if matches!(method(), "GET" | "HEAD") {
            Self::Probe
        } else {
            Self::MethodNotAllowed
        }
    }
}

/// Returns a report as JSON, for probes that accept it. `timestamp_ms` is the time since the epoch.
pub fn json(report: &LoadReport, timestamp_ms: u128) -> String {
    let mut text = format!("{{\"rif\":{},\"latency_median_ms\":", report.rif);
    // Written by hand, as digits and addresses need no escaping. Writing to a String cannot fail.
    let _ = match report.latency_us {
        Some(us) => write!(text, "{}.{:03},\"latency_us\":{us}", us / 1000, us % 1000),
        None => write!(text, "null,\"latency_us\":null"),
    };
    let _ = match report.capacity {
        Some(Capacity { base_us, knee, open, steady, rse_percent }) => write!(
            text,
            ",\"base_us\":{base_us},\"knee\":{knee},\"open\":{open},\"steady\":{steady},\"rse_percent\":{rse_percent}"
        ),
        None => text.write_str(",\"base_us\":null,\"knee\":null"),
    };
    let _ = write!(text, ",\"away\":{},\"failing\":{},\"up_s\":", report.away, report.failing);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_paths_are_never_forwarded() {
        for (method, path, expected) in [
            ("GET", "/prequal/probe", Route::Probe),
            ("HEAD", "/prequal/probe", Route::Probe),
            ("POST", "/prequal/probe", Route::MethodNotAllowed),
            ("GET", "/prequal/probe/", Route::NotFound),
            ("GET", "/prequal/", Route::NotFound),
            ("GET", "/prequal", Route::Forward),
            ("GET", "/prequalx/probe", Route::Forward),
            ("GET", "/", Route::Forward),
        ] {
            assert_eq!(Route::of(path, || method), expected, "{method} {path}");
        }
    }
}
