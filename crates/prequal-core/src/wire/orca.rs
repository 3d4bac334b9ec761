//! Load reports of a replica in the format of ORCA (Open Request Cost Aggregation), which Envoy's
//! `client_side_weighted_round_robin` and gRPC's `weighted_round_robin` read. This module defines their content and
//! their forms in a header.
//!
//! Those policies give a replica the weight `rps_fractional / application_utilization`. The utilisation therefore
//! covers the same time as the rate: it is the mean number of requests in flight, divided by the number that the
//! replica can serve at once. By Little's law, the weight is then the knee divided by the mean latency, which is the
//! rate that saturates the replica. The number in flight at one instant would be noisy, and those policies ignore a
//! report with none in flight.
//!
//! All numbers that Prequal computes are whole thousandths or millionths, so none can be negative, infinite or NaN.
//! Numbers of a backend that reports its own load are checked when they are read ([`backend`]). `docs/guide/orca.md`
//! explains how the fields are used.

use std::convert::Infallible;
use std::fmt::{self, Write as _};
use std::sync::Arc;

use backend::binary::Encoded;
use backend::{BackendReport, Utilization};

use crate::shared::capacity::Capacity;
use crate::wire::report::LoadReport;

pub mod backend;

/// Header of a report as text or JSON. Its value starts with the name of the format.
pub const HEADER: &str = "endpoint-load-metrics";
/// Header of a binary report in base64.
pub const HEADER_BIN: &str = "endpoint-load-metrics-bin";
/// Method of out-of-band reports.
pub const METHOD: &str = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics";
/// Field numbers in the protobuf message.
const RPS_FRACTIONAL: u8 = 6;
const EPS: u8 = 7;
/// Names of the metrics that ORCA has no field for.
pub const NAMED: [&str; 3] = ["prequal_rif", "prequal_base_latency_us", "prequal_knee"];

/// Format of a report in a header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Format {
    /// `TEXT name=value,name=value`.
    Text,
    /// `JSON {"name":value}`.
    Json,
    /// The protobuf message in base64.
    Binary,
}

impl Format {
    /// Returns the header of reports in this format.
    pub fn header(self) -> &'static str {
        match self {
            Self::Text | Self::Json => HEADER,
            Self::Binary => HEADER_BIN,
        }
    }
}

/// Responses that carry a report.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum ResponseKind {
    /// All responses.
    #[default]
    All,
    /// gRPC responses.
    Grpc,
    /// All other responses.
    Http,
}

impl ResponseKind {
    /// Whether a response is in this class.
    pub fn includes(self, grpc: bool) -> bool {
        match self {
            Self::All => true,
            Self::Grpc => grpc,
            Self::Http => !grpc,
        }
    }
}

/// Means over the recent past.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Window {
    /// Requests that ended, whatever their outcome, in thousandths per second.
    pub ended_milli: u64,
    /// Requests that failed through the replica's own fault, in thousandths per second.
    pub failed_milli: u64,
    /// Mean number of requests in flight, in millionths.
    pub rif_micro: u64,
}

/// One load report.
#[derive(Clone, Debug, PartialEq)]
pub struct OrcaReport {
    /// `application_utilization` in millionths; `None` if it is unknown how many requests the replica can serve at
    /// once.
    pub utilization_micro: Option<u64>,
    /// Rates of ended and failed requests, and the mean number in flight.
    pub rates: Window,
    /// Number of requests in flight now.
    pub rif: u32,
    /// Base latency and knee, once known.
    pub capacity: Option<Capacity>,
    /// The backend's own report. Its utilisation replaces Prequal's, and its named metrics are sent beside Prequal's.
    pub backend: Option<Arc<BackendReport>>,
}

impl OrcaReport {
    /// Creates a report from `report` and `rates`. `limit` is the number of requests that the replica is meant to serve
    /// at once. It replaces an unknown knee, and raises a knee that may be higher ([`Capacity::open`]).
    pub fn new(report: &LoadReport, rates: Window, limit: Option<u32>) -> Self {
        let capacity = report.capacity;
        let limit = limit.filter(|limit| *limit > 0);
        let serves = match capacity {
            Some(Capacity { knee, open: false, .. }) => Some(u32::from(knee)),
            Some(Capacity { knee, .. }) => Some(u32::from(knee).max(limit.unwrap_or(0))),
            None => limit,
        };
        let utilization_micro = serves.map(|serves| rates.rif_micro / u64::from(serves.max(1)));
        Self { utilization_micro, rates, rif: report.rif, capacity, backend: None }
    }

    /// Returns the utilisations to send, in millionths. Prequal's is sent unless the backend reports one that policies
    /// use, because the two do not measure the same thing.
    pub fn utilizations(&self) -> [(Utilization, Option<u64>); 3] {
        let backend = self.backend.as_deref();
        let own =
            self.utilization_micro.filter(|_| backend.and_then(BackendReport::utilization_micro).is_none());
        Utilization::ALL.map(|of| {
            let said = backend.and_then(|backend| backend.of(of));
            (of, said.or(own.filter(|_| of == Utilization::Application)))
        })
    }

    /// Passes each metric of the report to `put`, in the order of the report.
    fn each(&self, mut put: impl FnMut(MetricName<'_>, Amount) -> fmt::Result) -> fmt::Result {
        for (of, utilization) in self.utilizations() {
            if let Some(micro) = utilization {
                put(MetricName::Own(of.name()), Amount::Fixed(micro, 1_000_000))?;
            }
        }
        put(MetricName::Own("rps_fractional"), Amount::Fixed(self.rates.ended_milli, 1000))?;
        put(MetricName::Own("eps"), Amount::Fixed(self.rates.failed_milli, 1000))?;
        self.named(|name, value| put(MetricName::Named(name), Amount::Number(value)))
    }

    /// Passes each metric that ORCA has no field for to `put`: Prequal's, then the backend's. Their names need no
    /// escaping in text and JSON.
    pub fn named<E>(&self, mut put: impl FnMut(&str, f64) -> Result<(), E>) -> Result<(), E> {
        let [rif, base, knee] = NAMED;
        put(rif, self.rif.into())?;
        if let Some(capacity) = self.capacity {
            put(base, capacity.base_us.into())?;
            put(knee, capacity.knee.into())?;
        }
        match &self.backend {
            Some(backend) => backend.named().try_for_each(|(name, value)| put(name, value)),
            None => Ok(()),
        }
    }

    /// Returns the value of [`Format::header`].
    pub fn header(&self, format: Format) -> String {
        let mut text = String::with_capacity(256);
        // Writing to a String cannot fail.
        let _ = match format {
            Format::Text => self.write_text(&mut text),
            Format::Json => self.write_json(&mut text),
            Format::Binary => return self.encode().base64(),
        };
        text
    }

    fn encode(&self) -> Encoded {
        let mut message = Encoded::default();
        for (of, micro) in self.utilizations() {
            if let Some(micro) = micro {
                message.double(of.number(), micro as f64 / 1e6);
            }
        }
        message.double(RPS_FRACTIONAL, self.rates.ended_milli as f64 / 1e3);
        message.double(EPS, self.rates.failed_milli as f64 / 1e3);
        let _ = self.named(|name, value| {
            message.named(name, value);
            Ok::<_, Infallible>(())
        });
        message
    }

    fn write_text(&self, text: &mut String) -> fmt::Result {
        text.push_str("TEXT ");
        let mut separator = "";
        self.each(|field, value| {
            match field {
                MetricName::Own(name) => write!(text, "{separator}{name}={value}")?,
                MetricName::Named(name) => write!(text, "{separator}named_metrics.{name}={value}")?,
            }
            separator = ",";
            Ok(())
        })
    }

    fn write_json(&self, text: &mut String) -> fmt::Result {
        text.push_str("JSON {");
        let mut named = false;
        self.each(|field, value| match field {
            MetricName::Own(name) => write!(text, "\"{name}\":{value},"),
            MetricName::Named(name) => {
                let opens = if named { "," } else { "\"named_metrics\":{" };
                named = true;
                write!(text, "{opens}\"{name}\":{value}")
            }
        })?;
        text.push_str("}}");
        Ok(())
    }
}

/// Name of a metric: a field of ORCA, or one of the named metrics.
enum MetricName<'a> {
    Own(&'static str),
    Named(&'a str),
}

/// Value of a metric.
enum Amount {
    /// A count of parts, and the number of parts in one unit, a power of ten.
    Fixed(u64, u64),
    /// A number within the bounds of [`backend`].
    Number(f64),
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (parts, unit) = match *self {
            Self::Fixed(parts, unit) => (parts, unit),
            Self::Number(number) => return write!(f, "{number}"),
        };
        write!(f, "{}", parts / unit)?;
        match (unit, parts % unit) {
            (_, 0) => Ok(()),
            (1000, rest) => write!(f, ".{rest:03}"),
            (_, rest) => write!(f, ".{rest:06}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(capacity: Option<Capacity>) -> LoadReport {
        let (rif, latency_us, endpoint, probe_endpoint) = (3, Some(50_000), None, None);
        LoadReport { rif, away: 0, latency_us, capacity, endpoint, probe_endpoint, failing: 0, up_s: None }
    }

    fn rates(rif: u64) -> Window {
        Window { ended_milli: 12_500, failed_milli: 40, rif_micro: rif * 1_000_000 }
    }

    fn knee(knee: u16, open: bool) -> Option<Capacity> {
        Some(Capacity { open, ..Capacity::new(40_000, knee) })
    }

    #[test]
    fn a_report_is_written_in_every_format() {
        let report = OrcaReport::new(&load(knee(8, false)), rates(3), None);
        assert_eq!(
            report.header(Format::Text),
            "TEXT application_utilization=0.375000,rps_fractional=12.500,eps=0.040,named_metrics.prequal_rif=3,\
             named_metrics.prequal_base_latency_us=40000,named_metrics.prequal_knee=8"
        );
        let json = report.header(Format::Json);
        let json: serde_json::Value = serde_json::from_str(json.strip_prefix("JSON ").unwrap()).unwrap();
        let named =
            serde_json::json!({ "prequal_rif": 3, "prequal_base_latency_us": 40000, "prequal_knee": 8 });
        assert_eq!(
            json,
            serde_json::json!({
                "application_utilization": 0.375, "rps_fractional": 12.5, "eps": 0.04, "named_metrics": named
            })
        );
        let binary = BackendReport::parse_binary(report.header(Format::Binary).as_bytes()).unwrap();
        assert_eq!(binary.utilization_micro(), Some(375_000));
        let unknown = OrcaReport::new(&load(None), Window::default(), None);
        assert_eq!(unknown.header(Format::Text), "TEXT rps_fractional=0,eps=0,named_metrics.prequal_rif=3");
        assert_eq!(
            unknown.header(Format::Json),
            r#"JSON {"rps_fractional":0,"eps":0,"named_metrics":{"prequal_rif":3}}"#
        );
    }

    #[test]
    fn the_backends_own_utilisation_replaces_ours_and_is_passed_on() {
        let ours = OrcaReport::new(&load(knee(8, false)), rates(4), None);
        let with = |text: &str| {
            let backend = BackendReport::parse(text.as_bytes()).unwrap();
            OrcaReport { backend: Some(Arc::new(backend)), ..ours.clone() }.header(Format::Text)
        };
        let rates = "rps_fractional=12.500,eps=0.040,named_metrics.prequal_rif=3,\
                     named_metrics.prequal_base_latency_us=40000,named_metrics.prequal_knee=8";
        for (says, expected) in [
            ("application_utilization=0.25", format!("application_utilization=0.250000,{rates}")),
            // Prequal's application_utilization is left out: readers would prefer it to the backend's
            // cpu_utilization.
            ("cpu_utilization=0.25,eps=9", format!("cpu_utilization=0.250000,{rates}")),
            (
                "application_utilization=0,cpu_utilization=2",
                format!("application_utilization=0,cpu_utilization=2,{rates}"),
            ),
            // The backend reports no usable utilisation, so Prequal's is sent.
            (
                "mem_utilization=0.5,named_metrics.kv=0.5,named_metrics.prequal_rif=0",
                format!(
                    "application_utilization=0.500000,mem_utilization=0.500000,{rates},named_metrics.kv=0.5"
                ),
            ),
        ] {
            assert_eq!(with(&format!("TEXT {says}")), format!("TEXT {expected}"), "{says}");
        }
        let backend =
            BackendReport::parse(b"TEXT cpu_utilization=0.25,named_metrics.a/b:c.d-e=-1.5").unwrap();
        let report = OrcaReport { backend: Some(Arc::new(backend)), ..ours };
        let json: serde_json::Value =
            serde_json::from_str(report.header(Format::Json).strip_prefix("JSON ").unwrap()).unwrap();
        assert_eq!(
            (&json["cpu_utilization"], &json["named_metrics"]["a/b:c.d-e"]),
            (&0.25.into(), &(-1.5).into())
        );
        assert!(json["application_utilization"].is_null());
    }

    #[test]
    fn without_a_known_knee_the_limit_is_used() {
        for (capacity, limit, expected) in [
            (None, None, None),
            (None, Some(0), None),
            (None, Some(10), Some(400_000)),
            (knee(8, false), Some(10), Some(500_000)),
            (knee(8, false), None, Some(500_000)),
            (knee(8, true), None, Some(500_000)),
            (knee(8, true), Some(10), Some(400_000)),
            (knee(8, true), Some(4), Some(500_000)),
            (knee(2, false), Some(10), Some(2_000_000)),
        ] {
            let report = OrcaReport::new(&load(capacity), rates(4), limit);
            assert_eq!(report.utilization_micro, expected, "{capacity:?} {limit:?}");
        }
    }
}
