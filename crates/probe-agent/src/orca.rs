//! Decides which responses carry a load report in ORCA format, and in which header. [`prequal_core::wire::orca`]
//! defines the contents of the report. `oob.rs` sends reports out of band.

use std::num::NonZeroU32;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use prequal_core::server::rates::DEFAULT_WINDOW_US;
use prequal_core::wire::orca::{Format, HEADER, HEADER_BIN, OrcaReport};

use crate::body;

/// Settings of load reports in ORCA format. Default: no reports.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Orca {
    /// Format of the report on responses. `None`: no report.
    pub format: Option<OrcaFormat>,
    /// Responses that carry the report. Default all.
    pub class: OrcaClass,
    /// Number of requests that the replica is meant to serve at once. `application_utilization` is relative to this
    /// number while the knee (the number of requests that the backend serves at once) is unknown. While the knee may be
    /// higher than estimated, the larger of this number and the estimate applies. Otherwise the estimate applies.
    /// `None`: always the estimate, once there is one.
    pub limit: Option<NonZeroU32>,
    /// Time constant of the moving averages of rates and utilisation, at least 100 ms. Default 5 s.
    pub window: Duration,
    /// Maximum number of out-of-band streams of reports. Default 0: the backend gets the calls to `OpenRcaService`.
    pub streams: u32,
}

impl Default for Orca {
    fn default() -> Self {
        let (format, class, limit) = (None, OrcaClass::All, None);
        Self { format, class, limit, window: Duration::from_micros(DEFAULT_WINDOW_US), streams: 0 }
    }
}

/// Format of a report on a response.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[cfg_attr(feature = "proxy", derive(clap::ValueEnum))]
pub enum OrcaFormat {
    /// `endpoint-load-metrics: TEXT name=value,...`
    Text,
    /// `endpoint-load-metrics: JSON {...}`
    Json,
    /// `endpoint-load-metrics-bin: <base64 of the protobuf message>`
    Binary,
}

/// Responses that carry a report.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[cfg_attr(feature = "proxy", derive(clap::ValueEnum))]
pub enum OrcaClass {
    /// All responses.
    #[default]
    All,
    /// gRPC responses.
    Grpc,
    /// All other responses.
    Http,
}

impl Orca {
    /// Returns whether any report was asked for.
    pub(crate) fn is_on(&self) -> bool {
        self.format.is_some() || self.streams > 0
    }

    pub(crate) fn limit(&self) -> Option<u32> {
        self.limit.map(NonZeroU32::get)
    }

    /// Returns the format of the report that a response with these headers carries.
    pub(crate) fn format_for(&self, response: &HeaderMap) -> Option<OrcaFormat> {
        let format = self.format?;
        let wanted = match self.class {
            OrcaClass::All => true,
            OrcaClass::Grpc => body::is_grpc(response),
            OrcaClass::Http => !body::is_grpc(response),
        };
        wanted.then_some(format)
    }
}

/// Puts `report` on a response, or in its trailers. Replaces the backend's own report there, because two reports would
/// contradict each other.
pub(crate) fn stamp(response: &mut HeaderMap, report: &OrcaReport, format: OrcaFormat) {
    response.remove(&LOAD_METRICS);
    response.remove(&LOAD_METRICS_BIN);
    let (name, format) = match format {
        OrcaFormat::Text => (LOAD_METRICS, Format::Text),
        OrcaFormat::Json => (LOAD_METRICS, Format::Json),
        OrcaFormat::Binary => (LOAD_METRICS_BIN, Format::Binary),
    };
    if let Ok(value) = HeaderValue::from_maybe_shared(Bytes::from(report.header(format))) {
        response.insert(name, value);
    }
}

pub(crate) const LOAD_METRICS: HeaderName = HeaderName::from_static(HEADER);
pub(crate) const LOAD_METRICS_BIN: HeaderName = HeaderName::from_static(HEADER_BIN);

/// The messages of `xds/data/orca/v3/orca_load_report.proto` and `xds/service/orca/v3/orca.proto`, reduced to the
/// fields in use.
#[cfg(feature = "proxy")]
pub(crate) mod proto {
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    use prequal_core::wire::orca::OrcaReport;
    use prost::Message;

    /// `xds.data.orca.v3.OrcaLoadReport`.
    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct OrcaLoadReport {
        #[prost(double, tag = "1")]
        pub(crate) cpu_utilization: f64,
        #[prost(double, tag = "2")]
        pub(crate) mem_utilization: f64,
        #[prost(double, tag = "6")]
        pub(crate) rps_fractional: f64,
        #[prost(double, tag = "7")]
        pub(crate) eps: f64,
        #[prost(btree_map = "string, double", tag = "8")]
        pub(crate) named_metrics: BTreeMap<String, f64>,
        #[prost(double, tag = "9")]
        pub(crate) application_utilization: f64,
    }

    /// `xds.service.orca.v3.OrcaLoadReportRequest`. The names of request costs are left out: the agent reports no
    /// costs.
    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct OrcaLoadReportRequest {
        #[prost(message, optional, tag = "1")]
        pub(crate) report_interval: Option<Duration>,
    }

    /// `google.protobuf.Duration`.
    #[derive(Clone, Copy, PartialEq, Message)]
    pub(crate) struct Duration {
        #[prost(int64, tag = "1")]
        pub(crate) seconds: i64,
        #[prost(int32, tag = "2")]
        pub(crate) nanos: i32,
    }

    impl From<&OrcaReport> for OrcaLoadReport {
        fn from(report: &OrcaReport) -> Self {
            let mut named_metrics = BTreeMap::new();
            let _ = report.named(|name, value| {
                named_metrics.insert(name.to_owned(), value);
                Ok::<_, Infallible>(())
            });
            // Absent values are 0.
            let [application_utilization, cpu_utilization, mem_utilization] =
                report.utilizations().map(|(_, micro)| micro.unwrap_or(0) as f64 / 1e6);
            Self {
                cpu_utilization,
                mem_utilization,
                rps_fractional: report.rates.ended_milli as f64 / 1e3,
                eps: report.rates.failed_milli as f64 / 1e3,
                named_metrics,
                application_utilization,
            }
        }
    }
}

#[cfg(all(test, feature = "proxy"))]
mod tests {
    use super::*;
    use base64::Engine as _;
    use http::header;
    use prequal_core::shared::capacity::Capacity;
    use prequal_core::wire::orca::Window;
    use prost::Message as _;

    fn report() -> OrcaReport {
        OrcaReport {
            utilization_micro: Some(375_000),
            rates: Window { ended_milli: 12_500, failed_milli: 40, rif_micro: 3_000_000 },
            rif: 3,
            capacity: Some(Capacity::new(40_000, 8)),
            backend: None,
        }
    }

    #[test]
    fn the_report_of_the_agent_replaces_that_of_the_backend() {
        for format in [OrcaFormat::Text, OrcaFormat::Json, OrcaFormat::Binary] {
            let mut response = HeaderMap::new();
            response.append(LOAD_METRICS, HeaderValue::from_static("TEXT cpu_utilization=0.1"));
            response.append(LOAD_METRICS, HeaderValue::from_static("TEXT cpu_utilization=0.2"));
            response.append(LOAD_METRICS_BIN, HeaderValue::from_static("AAAA"));
            stamp(&mut response, &report(), format);
            assert_eq!(response.len(), 1);
            let binary = format == OrcaFormat::Binary;
            let value = &response[if binary { LOAD_METRICS_BIN } else { LOAD_METRICS }];
            if binary {
                let bytes = base64::engine::general_purpose::STANDARD.decode(value).unwrap();
                let sent = proto::OrcaLoadReport::decode(&bytes[..]).unwrap();
                assert_eq!(
                    (sent.application_utilization, sent.rps_fractional, sent.eps),
                    (0.375, 12.5, 0.04)
                );
                let named: Vec<_> =
                    sent.named_metrics.iter().map(|(name, value)| (name.as_str(), *value)).collect();
                assert_eq!(
                    named,
                    [("prequal_base_latency_us", 40000.0), ("prequal_knee", 8.0), ("prequal_rif", 3.0)]
                );
            } else {
                assert!(value.to_str().unwrap().contains("rps_fractional"), "{value:?}");
            }
        }
    }

    #[test]
    fn only_selected_responses_carry_a_report() {
        let grpc = HeaderMap::from_iter([(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/grpc+proto"),
        )]);
        let plain = HeaderMap::new();
        for (class, expected) in [
            (OrcaClass::All, [true, true]),
            (OrcaClass::Grpc, [true, false]),
            (OrcaClass::Http, [false, true]),
        ] {
            let orca = Orca { format: Some(OrcaFormat::Text), class, ..Orca::default() };
            assert_eq!(
                [&grpc, &plain].map(|headers| orca.format_for(headers).is_some()),
                expected,
                "{class:?}"
            );
            assert!(Orca { format: None, ..orca }.format_for(&plain).is_none());
        }
    }
}
