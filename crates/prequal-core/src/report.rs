//! The wire form of a load report: one header, `x-prequal-load: <rif>;<latency_us or empty>;<ip:port>[;key=value]`, of which `probe`,
//! `fail` and `up` are known.
//!
//! Parsing accepts anything a hostile replica may send and answers with a bounded report or a reason. It does
//! not decide whether the report may be trusted: that needs to know who was asked (see the filter).

use std::fmt;

use crate::endpoint::Endpoint;

/// The steering header: names the chosen replica to the shim.
pub const HEADER_DEST: &str = "x-prequal-dest";
/// The combined report.
pub const HEADER_LOAD: &str = "x-prequal-load";
/// Requests in flight alone, for interoperation with other implementations.
pub const HEADER_RIF: &str = "x-prequal-rif";
/// Latency estimate alone, microseconds, for interoperation with other implementations.
pub const HEADER_LATENCY: &str = "x-prequal-latency-us";
/// The query hint of a synchronous probe.
pub const HEADER_HINT: &str = "x-prequal-hint";
/// The host that answered a probe: Envoy's word, put on the reply by the probe cluster's own filter.
pub const HEADER_HOST: &str = "x-prequal-host";
/// Where the agent answers probes.
pub const PROBE_PATH: &str = "/prequal/probe";
/// Longest accepted report header, bytes.
pub const MAX_REPORT: usize = 256;
/// Largest accepted RIF. More in flight on one replica is not believable.
pub const MAX_RIF: u32 = 1_000_000;
/// Largest accepted latency: one hour, in microseconds.
pub const MAX_LATENCY_US: u32 = 3_600_000_000;
/// Most that can fail, per mille.
pub const MAX_FAILING: u16 = 1000;

/// What a replica says of itself (paper §4, "Load signals").
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LoadReport {
    /// Requests in flight now, 0 to [`MAX_RIF`].
    pub rif: u32,
    /// Median recent latency at or near that RIF, microseconds; `None` when the replica has no sample.
    pub latency_us: Option<u32>,
    /// The replica's serving endpoint.
    pub endpoint: Option<Endpoint>,
    /// Where it answers probes, if elsewhere. Always a port of the same host as `endpoint`.
    pub probe_endpoint: Option<Endpoint>,
    /// How many of its recent requests failed (5xx, gRPC errors of the server's making), per mille, 0 to
    /// [`MAX_FAILING`]; `fail=` on the wire, absent for 0.
    pub failing: u16,
    /// How long ago it started, seconds; `up=` on the wire. `None`: long ago, or it does not say.
    pub up_s: Option<u32>,
}

impl LoadReport {
    /// Parses the combined header.
    ///
    /// # Errors
    /// One [`ReportError`] that names the first bad field.
    pub fn parse(text: &str) -> Result<Self, ReportError> {
        if text.len() > MAX_REPORT {
            return Err(ReportError::TooLong);
        }
        let mut fields = text.split(';');
        let rif = parse_rif(fields.next().unwrap_or_default())?;
        let latency_us = parse_latency(fields.next().ok_or(ReportError::Latency)?)?;
        let endpoint: Endpoint =
            fields.next().ok_or(ReportError::Endpoint)?.trim().parse().map_err(|_| ReportError::Endpoint)?;
        let mut report =
            Self { rif, latency_us, endpoint: Some(endpoint), probe_endpoint: None, failing: 0, up_s: None };
        for field in fields {
            match field.trim().split_once('=') {
                Some(("probe", value)) => {
                    let probe: Endpoint = value.parse().map_err(|_| ReportError::ProbeEndpoint)?;
                    // A replica may move its probes to another port, never to another host.
                    if !probe.same_host(&endpoint) {
                        return Err(ReportError::ProbeEndpoint);
                    }
                    report.probe_endpoint = Some(probe);
                }
                Some(("fail", value)) => report.failing = parse_failing(value)?,
                Some(("up", value)) => report.up_s = Some(parse_number(value).ok_or(ReportError::Up)?),
                _ => {}
            }
        }
        Ok(report)
    }

    /// Parses the pair of headers that other implementations send; it names no endpoint.
    ///
    /// # Errors
    /// One [`ReportError`] that names the first bad field.
    pub fn parse_pair(rif: &str, latency_us: Option<&str>) -> Result<Self, ReportError> {
        Ok(Self {
            rif: parse_rif(rif)?,
            latency_us: parse_latency(latency_us.unwrap_or_default())?,
            endpoint: None,
            probe_endpoint: None,
            failing: 0,
            up_s: None,
        })
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{};", self.rif)?;
        if let Some(latency) = self.latency_us {
            write!(f, "{latency}")?;
        }
        f.write_str(";")?;
        if let Some(endpoint) = self.endpoint {
            write!(f, "{endpoint}")?;
        }
        if let Some(probe) = self.probe_endpoint {
            write!(f, ";probe={probe}")?;
        }
        if self.failing > 0 {
            write!(f, ";fail={}", self.failing)?;
        }
        if let Some(up) = self.up_s {
            write!(f, ";up={up}")?;
        }
        Ok(())
    }
}

fn parse_number(text: &str) -> Option<u32> {
    // `u32::from_str` accepts a leading `+`; the wire does not.
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

fn parse_rif(text: &str) -> Result<u32, ReportError> {
    parse_number(text.trim()).filter(|rif| *rif <= MAX_RIF).ok_or(ReportError::Rif)
}

fn parse_latency(text: &str) -> Result<Option<u32>, ReportError> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(None);
    }
    match parse_number(text) {
        Some(latency) if latency <= MAX_LATENCY_US => Ok(Some(latency)),
        _ => Err(ReportError::Latency),
    }
}

fn parse_failing(text: &str) -> Result<u16, ReportError> {
    let failing = parse_number(text).and_then(|failing| u16::try_from(failing).ok());
    failing.filter(|failing| *failing <= MAX_FAILING).ok_or(ReportError::Failing)
}

/// Why a report was dropped. The label of each variant is the one used in metrics.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ReportError {
    /// Longer than [`MAX_REPORT`].
    #[error("report is longer than {MAX_REPORT} bytes")]
    TooLong,
    /// RIF absent, not a number, or out of range.
    #[error("RIF must be a whole number from 0 to {MAX_RIF}")]
    Rif,
    /// Latency absent, not a number, or out of range.
    #[error("latency must be empty or a whole number of microseconds up to {MAX_LATENCY_US}")]
    Latency,
    /// No `ip:port` where the replica's own endpoint belongs.
    #[error("endpoint must be an `ip:port`")]
    Endpoint,
    /// `probe=` is no `ip:port` of the same host.
    #[error("`probe` must be an `ip:port` of the endpoint's host")]
    ProbeEndpoint,
    /// `fail=` not a number, or out of range.
    #[error("`fail` must be a whole number per mille up to {MAX_FAILING}")]
    Failing,
    /// `up=` not a number, or out of range.
    #[error("`up` must be a whole number of seconds below 2^32")]
    Up,
}

impl ReportError {
    /// Short stable label for metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::TooLong => "too_long",
            Self::Rif => "bad_rif",
            Self::Latency => "bad_latency",
            Self::Endpoint => "bad_endpoint",
            Self::ProbeEndpoint => "bad_probe_endpoint",
            Self::Failing => "bad_fail",
            Self::Up => "bad_up",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_report_round_trips() {
        for text in [
            "3;50123;127.0.0.1:80",
            "0;;[::1]:8080",
            "1;2;10.0.0.1:80;probe=10.0.0.1:9000",
            "1;2;10.0.0.1:80;probe=10.0.0.1:9000;fail=1000;up=0",
        ] {
            assert_eq!(LoadReport::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn unknown_fields_are_ignored() {
        let report = LoadReport::parse("3;5;127.0.0.1:80;age=7;x").unwrap();
        assert_eq!((report.rif, report.latency_us), (3, Some(5)));
    }

    #[test]
    fn each_bad_field_is_named() {
        for (text, error) in [
            ("", ReportError::Rif),
            (";5;127.0.0.1:80", ReportError::Rif),
            ("-1;5;127.0.0.1:80", ReportError::Rif),
            ("+1;5;127.0.0.1:80", ReportError::Rif),
            ("1000001;5;127.0.0.1:80", ReportError::Rif),
            ("99999999999999999999;5;127.0.0.1:80", ReportError::Rif),
            ("NaN;5;127.0.0.1:80", ReportError::Rif),
            ("1", ReportError::Latency),
            ("1;x;127.0.0.1:80", ReportError::Latency),
            ("1;3600000001;127.0.0.1:80", ReportError::Latency),
            ("1;-4;127.0.0.1:80", ReportError::Latency),
            ("1;5", ReportError::Endpoint),
            ("1;5;", ReportError::Endpoint),
            ("1;5;example.com:80", ReportError::Endpoint),
            ("1;5;127.0.0.1:80;probe=", ReportError::ProbeEndpoint),
            ("1;5;127.0.0.1:80;probe=127.0.0.2:80", ReportError::ProbeEndpoint),
            ("1;5;127.0.0.1:80;fail=1001", ReportError::Failing),
            ("1;5;127.0.0.1:80;fail=-1", ReportError::Failing),
            ("1;5;127.0.0.1:80;up=4294967296", ReportError::Up),
            ("1;5;127.0.0.1:80;up=", ReportError::Up),
            // Two header lines joined by a comma are no endpoint: the report is dropped, not guessed.
            ("1;5;127.0.0.1:80, 1;5;127.0.0.1:80", ReportError::Endpoint),
        ] {
            assert_eq!(LoadReport::parse(text), Err(error), "{text}");
        }
        assert_eq!(LoadReport::parse(&"1".repeat(10_000)), Err(ReportError::TooLong));
    }

    proptest! {
        #[test]
        fn no_text_panics_and_what_parses_prints_back(text in "\\PC{0,300}") {
            if let Ok(report) = LoadReport::parse(&text) {
                prop_assert_eq!(LoadReport::parse(&report.to_string()), Ok(report));
            }
        }
    }
}
