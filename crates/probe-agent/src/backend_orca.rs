//! A backend that reports load in the format of ORCA itself: the agent asks for it, reads it off responses and trailers, and hands
//! it to the replica's load. What is kept of a report is [`prequal_core::orca::backend`]'s matter, and what is reported on
//! [`prequal_core::orca`]'s.

use std::str::FromStr;

use base64::Engine as _;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use http::{HeaderMap, HeaderName, HeaderValue};
use prequal_core::orca::backend::{BackendError, BackendReport, MAX_REPORT, Metric, Utilization, binary};
use prost::Message as _;

use crate::load::{BackendSaid, Load};
use crate::orca::proto::OrcaLoadReport;
use crate::orca::{LOAD_METRICS, LOAD_METRICS_BIN};

/// How clients ask a server for such reports, which vLLM and Triton want.
const ASKS: HeaderName = HeaderName::from_static("endpoint-load-metrics-format");
const AS_TEXT: HeaderValue = HeaderValue::from_static("text");

/// That the backend is asked for reports, and what of them is its utilisation.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FromBackend(pub Metric);

impl FromStr for FromBackend {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Metric::parse(text).map(Self).ok_or_else(|| format!("must be {}", Metric::FORM))
    }
}

impl FromBackend {
    /// Asks for a report with a request, unless its client does. Whether it did.
    pub(crate) fn ask(&self, request: &mut HeaderMap) -> bool {
        let asks = !request.contains_key(&ASKS);
        if asks {
            request.insert(ASKS, AS_TEXT);
        }
        asks
    }

    /// Takes in what a response, or its trailers, say of the backend's load.
    pub(crate) fn hear(&self, headers: &HeaderMap, load: &Load) {
        let said = match read(headers) {
            None => return,
            Some(Err(BackendError::TooLong)) => BackendSaid::TooLong,
            Some(Err(BackendError::Malformed)) => BackendSaid::Malformed,
            Some(Err(BackendError::Contradictory)) => BackendSaid::Contradictory,
            Some(Ok(mut report)) => {
                report.go_by(&self.0);
                let said = if report.is_partial() { BackendSaid::Partial } else { BackendSaid::Used };
                load.backend_reports(report);
                said
            }
        };
        load.counters().count_backend_report(said);
    }

    /// Takes what the agent asked for off a response.
    pub(crate) fn consume(response: &mut HeaderMap) {
        response.remove(&LOAD_METRICS);
        response.remove(&LOAD_METRICS_BIN);
    }
}

/// The report in a set of headers, if there is any.
fn read(headers: &HeaderMap) -> Option<Result<BackendReport, BackendError>> {
    let mut text = headers.get_all(&LOAD_METRICS).iter();
    let mut bin = headers.get_all(&LOAD_METRICS_BIN).iter();
    match (text.next(), bin.next()) {
        (None, None) => None,
        (Some(_), Some(_)) => Some(Err(BackendError::Contradictory)),
        _ if text.next().is_some() || bin.next().is_some() => Some(Err(BackendError::Contradictory)),
        (Some(value), None) => Some(match binary(value.as_bytes()) {
            Some(base64) => decode(base64),
            None => BackendReport::parse(value.as_bytes()),
        }),
        (None, Some(value)) => Some(decode(value.as_bytes())),
    }
}

/// gRPC writes binary headers without padding, others with.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

fn decode(base64: &[u8]) -> Result<BackendReport, BackendError> {
    if base64.len() > MAX_REPORT {
        return Err(BackendError::TooLong);
    }
    let bytes = BASE64.decode(base64).map_err(|_| BackendError::Malformed)?;
    let message = OrcaLoadReport::decode(&bytes[..]).map_err(|_| BackendError::Malformed)?;
    let mut report = BackendReport::default();
    for (of, value) in [
        (Utilization::Application, message.application_utilization),
        (Utilization::Cpu, message.cpu_utilization),
        (Utilization::Memory, message.mem_utilization),
    ] {
        // What is absent is 0.
        if value != 0.0 {
            report.put(of, value);
        }
    }
    message.named_metrics.iter().for_each(|(name, value)| report.put_named(name, *value));
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;
    use prequal_core::tracker::TrackerConfig;

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
    fn every_format_is_read_and_every_fault_counted() {
        let (text, bin) = ("endpoint-load-metrics", "endpoint-load-metrics-bin");
        let report = OrcaLoadReport { cpu_utilization: 0.25, ..OrcaLoadReport::default() };
        let (message, in_text) = (binary_of(&report), format!("BIN {}", binary_of(&report)));
        let nan = binary_of(&OrcaLoadReport { cpu_utilization: f64::NAN, ..report.clone() });
        let long = format!("TEXT cpu_utilization=0.{}", "1".repeat(MAX_REPORT));
        for (lines, said, utilization) in [
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
            assert_eq!(load.counters().backend_reports(said), 1, "{lines:?}");
        }
    }

    #[test]
    fn which_metric_it_is_may_be_said() {
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
    fn a_client_that_asks_itself_is_not_spoken_for() {
        let mut request = HeaderMap::new();
        assert!(FromBackend(Metric::Utilization).ask(&mut request));
        assert_eq!(request[ASKS], "text");
        assert!(!FromBackend(Metric::Utilization).ask(&mut request));
    }
}
