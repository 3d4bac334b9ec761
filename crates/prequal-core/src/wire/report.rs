//! The wire form of a load report: one header, `x-prequal-load: <rif>;<latency_us or empty>;<ip:port>[;key=value]`. The
//! known keys are `probe`, `fail`, `up`, `base`, `knee`, `open`, `steady`, `rse` and `away`.
//!
//! The parser accepts any input that a hostile replica may send, and returns a bounded report or an error. It does not
//! decide whether the report may be trusted: that depends on which replica was probed or served the request, and is
//! decided by [`crate::client::Balancer`].

use std::fmt;

use crate::shared::capacity::Capacity;
use crate::shared::endpoint::Endpoint;
use crate::shared::time::MAX_LATENCY_US;

/// The steering header, which names the chosen replica to the shim: the part of Envoy that carries out the choice.
pub const HEADER_DEST: &str = "x-prequal-dest";
/// The combined report header.
pub const HEADER_LOAD: &str = "x-prequal-load";
/// Requests in flight alone, for interoperation with other implementations.
pub const HEADER_RIF: &str = "x-prequal-rif";
/// Latency estimate alone, microseconds, for interoperation with other implementations.
pub const HEADER_LATENCY: &str = "x-prequal-latency-us";
/// The query hint of a synchronous probe.
pub const HEADER_HINT: &str = "x-prequal-hint";
/// The host that answered a probe, according to Envoy: the probe cluster's own filter adds it to the reply.
pub const HEADER_HOST: &str = "x-prequal-host";
/// Reason why the agent itself answers with an error: [`UNSENT`] or [`UNANSWERED`]. Envoy's retry policy uses it.
pub const HEADER_FAILURE: &str = "x-prequal-failure";
/// The backend received no byte of the request, so any request may be sent again.
pub const UNSENT: &str = "unsent";
/// The backend's connection ended before a response, so only an idempotent request may be sent again.
pub const UNANSWERED: &str = "unanswered";
/// Path at which the agent answers probes.
pub const PROBE_PATH: &str = "/prequal/probe";
/// Maximum length of an accepted report header, bytes.
pub const MAX_REPORT: usize = 256;
/// Maximum accepted RIF. More requests in flight on one replica are not plausible.
pub const MAX_RIF: u32 = 1_000_000;
/// Maximum share of failed requests, per mille.
pub const MAX_FAILING: u16 = 1000;

/// A replica's report about itself (paper §4, "Load signals").
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LoadReport {
    /// Requests in flight now, 0 to [`MAX_RIF`].
    pub rif: u32,
    /// Number of those that the server is not working on, 0 to [`Self::rif`]: streams, very long requests, and requests
    /// that wait for their client. `away=` on the wire, absent for 0. A knee counts them, too, so earlier filters
    /// compare it with the RIF.
    pub away: u32,
    /// Median of recent latencies at or near that RIF, microseconds; `None` if the replica has no sample.
    pub latency_us: Option<u32>,
    /// Base latency and knee ([`crate::server::capacity`]). On the wire: `base=` (microseconds, 1 to
    /// [`MAX_LATENCY_US`]) and `knee=` (requests in flight, 1 to 65 535), both or neither, with `open=1` if the knee
    /// may be higher, `steady=1` if requests take almost the same time, and `rse=` with the relative standard error of
    /// the base latency (percent, 0 to 255, absent if 0). `None` if the replica has served nothing yet or does not
    /// report them.
    pub capacity: Option<Capacity>,
    /// The replica's serving endpoint.
    pub endpoint: Option<Endpoint>,
    /// Endpoint that answers probes, if it differs. Always a port of the same host as `endpoint`.
    pub probe_endpoint: Option<Endpoint>,
    /// Share of the replica's recent requests that failed (5xx, gRPC errors that are the server's fault), per mille, 0
    /// to [`MAX_FAILING`]; `fail=` on the wire, absent for 0.
    pub failing: u16,
    /// Time since the replica last became reachable, seconds; `up=` on the wire. `None` if that is long ago or not
    /// reported.
    pub up_s: Option<u32>,
}

impl LoadReport {
    /// Parses the combined header. It works on bytes and is small: every response has such a header, and with cold
    /// caches the size of the code determines the cost (`docs/results/performance.md`).
    ///
    /// # Errors
    /// One [`ReportError`] that names the first bad field.
    pub fn parse(header: impl AsRef<[u8]>) -> Result<Self, ReportError> {
        let header = header.as_ref();
        if header.len() > MAX_REPORT {
            return Err(ReportError::TooLong);
        }
        let mut report = Self::idle();
        let (mut base, mut knee) = (None, None);
        let (mut open, mut steady, mut rse) = (false, false, 0);
        for (index, field) in header.split(|byte| *byte == b';').map(<[u8]>::trim_ascii).enumerate() {
            match index {
                0 => report.rif = parse_rif(field)?,
                1 => report.latency_us = parse_latency(field)?,
                2 => report.endpoint = Some(Endpoint::parse(field).ok_or(ReportError::Endpoint)?),
                _ => {
                    if let Some(value) = field.strip_prefix(b"base=") {
                        base = Some(parse_number(value).unwrap_or(0));
                    } else if let Some(value) = field.strip_prefix(b"knee=") {
                        knee = Some(parse_number(value).unwrap_or(0));
                    } else if let Some(value) = field.strip_prefix(b"open=") {
                        open = value == b"1";
                    } else if let Some(value) = field.strip_prefix(b"steady=") {
                        steady = value == b"1";
                    } else if let Some(value) = field.strip_prefix(b"rse=") {
                        rse = parse_number(value).unwrap_or(u32::MAX);
                    } else if let Some(value) = field.strip_prefix(b"probe=") {
                        // A replica may move its probes to another port, never to another host.
                        let replica = report.endpoint;
                        let of_replica = |probe: &Endpoint| replica.is_some_and(|at| probe.same_host(&at));
                        let probe = Endpoint::parse(value).filter(of_replica);
                        report.probe_endpoint = Some(probe.ok_or(ReportError::ProbeEndpoint)?);
                    } else if let Some(value) = field.strip_prefix(b"fail=") {
                        report.failing = parse_failing(value)?;
                    } else if let Some(value) = field.strip_prefix(b"away=") {
                        let away = parse_number(value).filter(|away| *away <= report.rif);
                        report.away = away.ok_or(ReportError::Capacity)?;
                    } else if let Some(value) = field.strip_prefix(b"up=") {
                        report.up_s = Some(parse_number(value).ok_or(ReportError::Up)?);
                    }
                }
            }
        }
        if report.endpoint.is_none() {
            return Err(if header.contains(&b';') { ReportError::Endpoint } else { ReportError::Latency });
        }
        let capacity = |(base_us, knee)| {
            let rse_percent = u8::try_from(rse).map_err(|_| ReportError::Capacity)?;
            Ok(Capacity { base_us, knee, open, steady, rse_percent })
        };
        report.capacity = parse_base_and_knee(base, knee)?.map(capacity).transpose()?;
        Ok(report)
    }

    /// Parses the pair of headers that other implementations send. The pair names no endpoint.
    ///
    /// # Errors
    /// One [`ReportError`] that names the first bad field.
    pub fn parse_pair(rif: &[u8], latency_us: Option<&[u8]>) -> Result<Self, ReportError> {
        Ok(Self {
            rif: parse_rif(rif.trim_ascii())?,
            latency_us: parse_latency(latency_us.unwrap_or_default().trim_ascii())?,
            ..Self::idle()
        })
    }

    /// Returns the report of an idle replica that reports nothing else.
    fn idle() -> Self {
        Self {
            rif: 0,
            away: 0,
            latency_us: None,
            capacity: None,
            endpoint: None,
            probe_endpoint: None,
            failing: 0,
            up_s: None,
        }
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
        if self.away > 0 {
            write!(f, ";away={}", self.away)?;
        }
        if let Some(Capacity { base_us, knee, open, steady, rse_percent }) = self.capacity {
            write!(f, ";base={base_us};knee={knee}")?;
            if open {
                f.write_str(";open=1")?;
            }
            if steady {
                f.write_str(";steady=1")?;
            }
            if rse_percent > 0 {
                write!(f, ";rse={rse_percent}")?;
            }
        }
        Ok(())
    }
}

/// Parses one or more digits and nothing else. Not inlined, as it is called for every field.
#[inline(never)]
fn parse_number(digits: &[u8]) -> Option<u32> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u32, |number, byte| {
        let digit = byte.is_ascii_digit().then(|| byte - b'0')?;
        number.checked_mul(10)?.checked_add(digit.into())
    })
}

fn parse_rif(digits: &[u8]) -> Result<u32, ReportError> {
    parse_number(digits).filter(|rif| *rif <= MAX_RIF).ok_or(ReportError::Rif)
}

fn parse_latency(digits: &[u8]) -> Result<Option<u32>, ReportError> {
    if digits.is_empty() {
        return Ok(None);
    }
    let latency = parse_number(digits).filter(|latency| *latency <= MAX_LATENCY_US);
    latency.map(Some).ok_or(ReportError::Latency)
}

fn parse_failing(digits: &[u8]) -> Result<u16, ReportError> {
    let failing = parse_number(digits).and_then(|failing| u16::try_from(failing).ok());
    failing.filter(|failing| *failing <= MAX_FAILING).ok_or(ReportError::Failing)
}

/// Combines base latency and knee. Both or neither must be present, because one alone has no meaning.
fn parse_base_and_knee(base: Option<u32>, knee: Option<u32>) -> Result<Option<(u32, u16)>, ReportError> {
    let (base_us, knee) = match (base, knee) {
        (None, None) => return Ok(None),
        (Some(base_us), Some(knee)) => (base_us, u16::try_from(knee).map_err(|_| ReportError::Capacity)?),
        _ => return Err(ReportError::Capacity),
    };
    let sound = (1..=MAX_LATENCY_US).contains(&base_us) && knee > 0;
    if sound { Ok(Some((base_us, knee))) } else { Err(ReportError::Capacity) }
}

/// Why a report was dropped. The label of each variant is the one used in metrics.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ReportError {
    /// The report is longer than [`MAX_REPORT`].
    #[error("report is longer than {MAX_REPORT} bytes")]
    TooLong,
    /// RIF is absent, is not a number, or is out of range.
    #[error("RIF must be a whole number from 0 to {MAX_RIF}")]
    Rif,
    /// Latency is absent, is not a number, or is out of range.
    #[error("latency must be empty or a whole number of microseconds up to {MAX_LATENCY_US}")]
    Latency,
    /// The replica's endpoint is absent or is not an `ip:port`.
    #[error("endpoint must be an `ip:port`")]
    Endpoint,
    /// `probe=` is not an `ip:port` of the same host.
    #[error("`probe` must be an `ip:port` of the endpoint's host")]
    ProbeEndpoint,
    /// `fail=` is not a number, or is out of range.
    #[error("`fail` must be a whole number per mille up to {MAX_FAILING}")]
    Failing,
    /// `up=` is not a number, or is out of range.
    #[error("`up` must be a whole number of seconds below 2^32")]
    Up,
    /// `base=` or `knee=` is alone, or one of `base=`, `knee=`, `rse=` (0 to 255) and `away=` (0 to the RIF) is not a
    /// number or out of range.
    #[error(
        "`base` must be 1 to {MAX_LATENCY_US} microseconds, `knee` 1 to 65535 requests, both together, `rse` 0 to 255 percent, and `away` at most the RIF"
    )]
    Capacity,
}

impl ReportError {
    /// Returns the short, stable label for metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::TooLong => "too_long",
            Self::Rif => "bad_rif",
            Self::Latency => "bad_latency",
            Self::Endpoint => "bad_endpoint",
            Self::ProbeEndpoint => "bad_probe_endpoint",
            Self::Failing => "bad_fail",
            Self::Up => "bad_up",
            Self::Capacity => "bad_capacity",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[test]
    fn a_report_round_trips() {
        for text in [
            "3;50123;127.0.0.1:80",
            "0;;[::1]:8080",
            "1;2;10.0.0.1:80;probe=10.0.0.1:9000",
            "1;2;10.0.0.1:80;probe=10.0.0.1:9000;fail=1000;up=0",
            "1;2;10.0.0.1:80;base=1;knee=65535",
            "1;2;10.0.0.1:80;base=1;knee=3;open=1",
            "1;2;10.0.0.1:80;base=1;knee=3;steady=1",
            "1;2;10.0.0.1:80;base=1;knee=3;open=1;steady=1",
            "1;2;10.0.0.1:80;base=1;knee=3;rse=255",
            "7;;10.0.0.1:80;away=7",
            "7;2;10.0.0.1:80;away=5;base=1;knee=6",
        ] {
            assert_eq!(LoadReport::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn unknown_fields_are_ignored() {
        let report = LoadReport::parse("3;5;127.0.0.1:80;age=7;x").unwrap();
        assert_eq!((report.rif, report.latency_us), (3, Some(5)));
        // `rse` says nothing without a capacity.
        for text in ["3;5;127.0.0.1:80;rse=7", "3;5;127.0.0.1:80;rse=x"] {
            assert_eq!(LoadReport::parse(text).unwrap().capacity, None, "{text}");
        }
        let certain = LoadReport::parse("3;5;127.0.0.1:80;base=5;knee=2;rse=0").unwrap();
        assert_eq!(certain.to_string(), "3;5;127.0.0.1:80;base=5;knee=2");
        // `open` and `steady` qualify a knee, and only the value 1 sets them.
        for text in ["3;5;127.0.0.1:80;open=1;steady=1", "3;5;127.0.0.1:80;base=5;knee=2;open=yes;steady=yes"]
        {
            assert!(
                !LoadReport::parse(text)
                    .unwrap()
                    .capacity
                    .is_some_and(|capacity| capacity.open || capacity.steady),
                "{text}"
            );
        }
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
            ("1;5;127.0.0.1:80;away=2", ReportError::Capacity),
            ("1;5;127.0.0.1:80;away=", ReportError::Capacity),
            ("1;5;127.0.0.1:80;base=5", ReportError::Capacity),
            ("1;5;127.0.0.1:80;knee=5", ReportError::Capacity),
            ("1;5;127.0.0.1:80;base=0;knee=5", ReportError::Capacity),
            ("1;5;127.0.0.1:80;base=5;knee=0", ReportError::Capacity),
            ("1;5;127.0.0.1:80;base=5;knee=65536", ReportError::Capacity),
            ("1;5;127.0.0.1:80;base=3600000001;knee=5", ReportError::Capacity),
            ("1;5;127.0.0.1:80;base=NaN;knee=5", ReportError::Capacity),
            ("1;5;127.0.0.1:80;base=-5;knee=5", ReportError::Capacity),
            ("1;5;127.0.0.1:80;base=5;knee=5;rse=256", ReportError::Capacity),
            ("1;5;127.0.0.1:80;base=5;knee=5;rse=-1", ReportError::Capacity),
            // Two header lines joined by a comma are not an endpoint: the report is dropped rather than guessed.
            ("1;5;127.0.0.1:80, 1;5;127.0.0.1:80", ReportError::Endpoint),
        ] {
            assert_eq!(LoadReport::parse(text), Err(error), "{text}");
        }
        assert_eq!(LoadReport::parse("1".repeat(10_000)), Err(ReportError::TooLong));
    }

    proptest! {
        #[test]
        fn no_input_panics_and_parsed_reports_print_back(header in prop_oneof![
            vec(any::<u8>(), 0..300),
            "[0-9]{1,8} ?;[0-9]{0,11};(1[0-9]{0,2}\\.){3}[0-9]{1,3}:[0-9]{1,5}(;(fail|up|away|base|knee|open|steady|rse|x)=[0-9]{0,4}|;probe=[0-9.:]{0,20}){0,3}"
                .prop_map(String::into_bytes),
        ]) {
            if let Ok(report) = LoadReport::parse(&header) {
                prop_assert_eq!(LoadReport::parse(report.to_string()), Ok(report));
            }
        }
    }
}
