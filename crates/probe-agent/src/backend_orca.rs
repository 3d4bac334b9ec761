//! Reads the load that a backend itself reports in ORCA format. The agent asks for the reports, reads them from
//! responses and trailers, and hands them to the replica's load. `backend_stream.rs` reads them out of band.
//! [`prequal_core::wire::orca::backend`] decides which values of a report are kept, and [`prequal_core::wire::orca`]
//! decides which are passed on.

use std::str::FromStr;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use prequal_core::server::replica::BACKEND_FRESH_US;
use prequal_core::wire::orca::backend::{BackendError, BackendReport, Metric};

use crate::load::{BackendSaid, Load};
use crate::orca::{LOAD_METRICS, LOAD_METRICS_BIN};

/// Header by which clients ask a server for such reports. vLLM and Triton require it.
const ASKS: HeaderName = HeaderName::from_static("endpoint-load-metrics-format");
const AS_TEXT: HeaderValue = HeaderValue::from_static("text");

/// Setting that asks the backend for reports. Holds the metric that counts as the backend's utilisation.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FromBackend(pub Metric);

impl FromStr for FromBackend {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Metric::parse(text).map(Self).ok_or_else(|| format!("must be {}", Metric::FORM))
    }
}

impl FromBackend {
    /// Adds the header that asks for a report to `request`, unless the client has set it. Returns whether it was added.
    pub(crate) fn ask(&self, request: &mut HeaderMap) -> bool {
        let asks = !request.contains_key(&ASKS);
        if asks {
            request.insert(ASKS, AS_TEXT);
        }
        asks
    }

    /// Records the backend's load from the head or trailers of a response.
    pub(crate) fn hear(&self, headers: &HeaderMap, load: &Load) {
        if let Some(report) = read(headers) {
            self.record(report, load, Duration::from_micros(BACKEND_FRESH_US));
        }
    }

    /// Records a report that is valid for the time `fresh`. A report that cannot be read is only counted.
    pub(crate) fn record(&self, read: Result<BackendReport, BackendError>, load: &Load, fresh: Duration) {
        let result = match read {
            Err(BackendError::TooLong) => BackendSaid::TooLong,
            Err(BackendError::Malformed) => BackendSaid::Malformed,
            Err(BackendError::Contradictory) => BackendSaid::Contradictory,
            Ok(mut report) => {
                report.go_by(&self.0);
                let result = if report.is_partial() { BackendSaid::Partial } else { BackendSaid::Used };
                load.backend_reports(report, fresh);
                result
            }
        };
        load.counters().count_backend_report(result);
    }

    /// Removes from a response the reports that only the agent asked for.
    pub(crate) fn consume(response: &mut HeaderMap) {
        response.remove(&LOAD_METRICS);
        response.remove(&LOAD_METRICS_BIN);
    }
}

/// Returns the report in a set of headers, if there is one.
fn read(headers: &HeaderMap) -> Option<Result<BackendReport, BackendError>> {
    let values = |name| headers.get_all(name).iter().map(HeaderValue::as_bytes);
    BackendReport::read(values(&LOAD_METRICS), values(&LOAD_METRICS_BIN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::orca::proto::OrcaLoadReport;
    use base64::Engine as _;
    use prequal_core::server::tracker::TrackerConfig;
    use prequal_core::wire::orca::backend::MAX_REPORT;
    use prost::Message as _;

    fn hears(lines: &[(&'static str, &str)]) -> (Load, FromBackend) {
        let (load, from) = (Load::new(TrackerConfig::default()), FromBackend(Metric::Utilization));
        let lines = lines.iter().map(|(name, value)| {
            (HeaderName::from_static(name), HeaderValue::from_bytes(value.as_bytes()).unwrap())
        });
        let mut headers = HeaderMap::new();
        lines.for_each(|(name, value)| {
            headers.append(name, value);
        });
        from.hear(&headers, &load);
        (load, from)
    }

    fn binary_of(report: &OrcaLoadReport) -> String {
        base64::engine::general_purpose::STANDARD_NO_PAD.encode(report.encode_to_vec())
    }

    #[test]
    fn every_format_is_read_and_every_fault_is_counted() {
        let (text, bin) = ("endpoint-load-metrics", "endpoint-load-metrics-bin");
        let report = OrcaLoadReport { cpu_utilization: 0.25, ..OrcaLoadReport::default() };
        let (message, in_text) = (binary_of(&report), format!("BIN {}", binary_of(&report)));
        let nan = binary_of(&OrcaLoadReport { cpu_utilization: f64::NAN, ..report.clone() });
        let long = format!("TEXT cpu_utilization=0.{}", "1".repeat(MAX_REPORT));
        for (lines, result, utilization) in [
            (vec![(text, "TEXT cpu_utilization=0.25")], BackendSaid::Used, Some(250_000)),
            (vec![(text, r#"JSON {"cpu_utilization": 0.25}"#)], BackendSaid::Used, Some(250_000)),
            (vec![(text, &in_text[..])], BackendSaid::Used, Some(250_000)),
            (vec![(bin, &message)], BackendSaid::Used, Some(250_000)),
            (vec![(bin, &nan)], BackendSaid::Partial, None),
            (vec![(bin, "")], BackendSaid::Used, None),
            (vec![(bin, "!")], BackendSaid::Malformed, None),
            (vec![(bin, "CQ")], BackendSaid::Malformed, None),
            (vec![(bin, &long)], BackendSaid::TooLong, None),
            (vec![(text, &long)], BackendSaid::TooLong, None),
            (vec![(text, "TEXT")], BackendSaid::Malformed, None),
            (vec![(text, "TEXT cpu_utilization=0.25"), (bin, &message)], BackendSaid::Contradictory, None),
            (vec![(text, "TEXT a=1"), (text, "TEXT a=1")], BackendSaid::Contradictory, None),
        ] {
            let (load, _) = hears(&lines);
            assert_eq!(load.backend_utilization_micro(), utilization, "{lines:?}");
            assert_eq!(load.counters().backend_reports(result), 1, "{lines:?}");
        }
    }

    #[test]
    fn the_metric_for_utilisation_is_configurable() {
        let wrong = "cpu_utilization".parse::<FromBackend>().unwrap_err();
        assert!(wrong.contains("named_metrics.NAME"), "{wrong}");
        let load = Load::new(TrackerConfig::default());
        let mut headers = HeaderMap::new();
        let value = HeaderValue::from_static("TEXT cpu_utilization=0.5, named_metrics.kv=0.75");
        headers.insert(LOAD_METRICS, value);
        FromBackend(Metric::Named("kv".into())).hear(&headers, &load);
        assert_eq!(load.backend_utilization_micro(), Some(750_000));
        FromBackend(Metric::Named("other".into())).hear(&headers, &load);
        assert_eq!(load.backend_utilization_micro(), Some(500_000));
    }

    #[test]
    fn a_client_that_asks_for_reports_itself_is_recognised() {
        let mut request = HeaderMap::new();
        assert!(FromBackend(Metric::Utilization).ask(&mut request));
        assert_eq!(request[ASKS], "text");
        assert!(!FromBackend(Metric::Utilization).ask(&mut request));
    }
}
