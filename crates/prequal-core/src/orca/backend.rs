//! What a backend says of itself in the format of ORCA: read, checked, and cut down to what a report of its sidecar may carry
//! on.
//!
//! Kept are the utilisations and the metrics that the backend names itself. Its rates are not: who reports for it counts requests
//! itself. A report that is broken or contradicts itself is dropped whole; of one that can be read, a metric that makes no sense is
//! left out.

use std::fmt;

use serde_json::Value;

mod binary;

/// Longest header that is read, bytes.
pub const MAX_REPORT: usize = 4096;
/// Most metrics that the backend names which are carried on.
pub const MAX_NAMED: usize = 16;
/// Longest name of such a metric, bytes.
pub const MAX_NAME: usize = 64;
/// Highest utilisation. More counts as this.
pub const MAX_UTILIZATION: f64 = 1000.0;
/// Highest amount of a metric that the backend names. It is left out beyond.
pub const MAX_VALUE: f64 = 1e15;
/// What a metric that the backend names is called in a report.
pub const NAMED_PREFIX: &str = "named_metrics.";
/// Names of our own, which a backend cannot speak in.
const OURS: &str = "prequal_";

/// A report of a backend.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BackendReport {
    /// By [`Utilization`], in millionths.
    utilization: [Option<u64>; 3],
    named: Vec<(Box<str>, f64)>,
    partial: bool,
}

/// What a utilisation is of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Utilization {
    /// Whatever the application is short of.
    Application,
    /// The processors.
    Cpu,
    /// Memory.
    Memory,
}

impl Utilization {
    /// All, in the order of reports.
    pub const ALL: [Self; 3] = [Self::Application, Self::Cpu, Self::Memory];

    /// The field of a report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Application => "application_utilization",
            Self::Cpu => "cpu_utilization",
            Self::Memory => "mem_utilization",
        }
    }

    /// The field as protobuf's JSON names it.
    fn json_name(self) -> &'static str {
        match self {
            Self::Application => "applicationUtilization",
            Self::Cpu => "cpuUtilization",
            Self::Memory => "memUtilization",
        }
    }
}

/// What of a backend's reports is its utilisation.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Metric {
    /// `application_utilization`, else `cpu_utilization`.
    Utilization,
    /// The metric that the backend calls so, and those where it is absent.
    Named(Box<str>),
}

impl Metric {
    /// What [`Self::parse`] reads.
    pub const FORM: &str = "\"utilization\", or \"named_metrics.NAME\" with a name of 1 to 64 bytes";

    /// `utilization`, or `named_metrics.NAME`.
    pub fn parse(text: &str) -> Option<Self> {
        if text == "utilization" {
            return Some(Self::Utilization);
        }
        let name = text.strip_prefix(NAMED_PREFIX)?;
        (1..=MAX_NAME).contains(&name.len()).then(|| Self::Named(name.into()))
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Utilization => f.write_str("utilization"),
            Self::Named(name) => write!(f, "{NAMED_PREFIX}{name}"),
        }
    }
}

/// Why a report is dropped whole.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum BackendError {
    /// Longer than [`MAX_REPORT`].
    #[error("the report is longer than {MAX_REPORT} bytes")]
    TooLong,
    /// No format that is known, or not in that format.
    #[error("the report is none: it must be `TEXT name=value,...`, `JSON {{...}}` or `BIN <base64>`")]
    Malformed,
    /// A metric or a report stands there twice.
    #[error("the report contradicts itself")]
    Contradictory,
}

impl BackendReport {
    /// Reads the report in a set of headers or trailers, if there is any: `text` are the values of [`super::HEADER`], `bin` those
    /// of [`super::HEADER_BIN`]. More than one report contradicts itself.
    pub fn read<'a>(
        mut text: impl Iterator<Item = &'a [u8]>,
        mut bin: impl Iterator<Item = &'a [u8]>,
    ) -> Option<Result<Self, BackendError>> {
        match (text.next(), bin.next()) {
            (None, None) => None,
            (Some(_), Some(_)) => Some(Err(BackendError::Contradictory)),
            _ if text.next().is_some() || bin.next().is_some() => Some(Err(BackendError::Contradictory)),
            (Some(header), None) => Some(Self::parse(header)),
            (None, Some(base64)) => Some(Self::parse_binary(base64)),
        }
    }

    /// Reads the value of [`super::HEADER`], as text, JSON or base64 of the binary message.
    ///
    /// # Errors
    /// [`BackendError`] for what is to be dropped whole.
    pub fn parse(header: &[u8]) -> Result<Self, BackendError> {
        if header.len() > MAX_REPORT {
            return Err(BackendError::TooLong);
        }
        let header = std::str::from_utf8(header).map_err(|_| BackendError::Malformed)?.trim();
        match header.split_once(' ') {
            Some(("TEXT", text)) => Self::of_text(text),
            Some(("JSON", text)) => Self::of_json(text),
            Some(("BIN", base64)) => Self::parse_binary(base64.as_bytes()),
            _ => Err(BackendError::Malformed),
        }
    }

    /// Reads the value of [`super::HEADER_BIN`].
    ///
    /// # Errors
    /// [`BackendError`] for what is to be dropped whole.
    pub fn parse_binary(base64: &[u8]) -> Result<Self, BackendError> {
        if base64.len() > MAX_REPORT {
            return Err(BackendError::TooLong);
        }
        let bytes = binary::base64(base64.trim_ascii()).ok_or(BackendError::Malformed)?;
        let message = binary::Message::decode(&bytes).ok_or(BackendError::Malformed)?;
        let mut report = Self::default();
        for (of, value) in [
            (Utilization::Application, message.application),
            (Utilization::Cpu, message.cpu),
            (Utilization::Memory, message.memory),
        ] {
            // What is absent is 0.
            if value != 0.0 {
                report.put(of, value);
            }
        }
        message.named.iter().for_each(|(name, value)| report.put_named(name, *value));
        Ok(report)
    }

    fn of_text(text: &str) -> Result<Self, BackendError> {
        let mut report = Self::default();
        let mut seen: Vec<&str> = Vec::new();
        for metric in text.split(',') {
            let (name, value) = metric.split_once('=').ok_or(BackendError::Malformed)?;
            let name = name.trim();
            if seen.contains(&name) {
                return Err(BackendError::Contradictory);
            }
            seen.push(name);
            let value = value.trim().parse().unwrap_or(f64::NAN);
            if let Some(name) = name.strip_prefix(NAMED_PREFIX) {
                report.put_named(name, value);
            } else if let Some(of) = Utilization::ALL.into_iter().find(|of| of.name() == name) {
                report.put(of, value);
            }
        }
        Ok(report)
    }

    fn of_json(text: &str) -> Result<Self, BackendError> {
        let Ok(Value::Object(object)) = serde_json::from_str(text) else {
            return Err(BackendError::Malformed);
        };
        let mut report = Self::default();
        for of in Utilization::ALL {
            match (object.get(of.name()), object.get(of.json_name())) {
                (Some(_), Some(_)) => return Err(BackendError::Contradictory),
                (Some(value), None) | (None, Some(value)) => report.put(of, number(value)),
                (None, None) => {}
            }
        }
        match (object.get("named_metrics"), object.get("namedMetrics")) {
            (Some(_), Some(_)) => return Err(BackendError::Contradictory),
            (Some(Value::Object(named)), None) | (None, Some(Value::Object(named))) => {
                named.iter().for_each(|(name, value)| report.put_named(name, number(value)));
            }
            (None, None) => {}
            _ => return Err(BackendError::Malformed),
        }
        Ok(report)
    }

    /// Puts a utilisation in, unless it is negative or no number. Above [`MAX_UTILIZATION`] it counts as that.
    pub fn put(&mut self, of: Utilization, value: f64) {
        if !value.is_finite() || value < 0.0 {
            self.partial = true;
            return;
        }
        self.partial |= value > MAX_UTILIZATION;
        let [application, cpu, memory] = &mut self.utilization;
        *match of {
            Utilization::Application => application,
            Utilization::Cpu => cpu,
            Utilization::Memory => memory,
        } = Some((value.min(MAX_UTILIZATION) * 1e6).round() as u64);
    }

    /// Puts a metric in that the backend names, unless it or its name is out of bounds, or there are [`MAX_NAMED`] already.
    pub fn put_named(&mut self, name: &str, value: f64) {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:/".contains(&byte);
        let sound = (1..=MAX_NAME).contains(&name.len())
            && name.bytes().all(is_plain)
            && !name.starts_with(OURS)
            && value.abs() <= MAX_VALUE;
        if sound && self.named.len() < MAX_NAMED {
            // Written out, what is smaller would be long.
            let value = if value.abs() < 1.0 { (value * 1e9).round() / 1e9 } else { value };
            // No zero with a sign.
            self.named.push((name.into(), value + 0.0));
        } else {
            self.partial = true;
        }
    }

    /// This is the utilisation, if it is there and not negative: the operator says so.
    pub fn go_by(&mut self, metric: &Metric) {
        let Metric::Named(name) = metric else { return };
        let found = self.named.iter().find(|(named, value)| *named == *name && *value >= 0.0);
        if let Some(value) = found.map(|(_, value)| *value) {
            self.put(Utilization::Application, value);
        }
    }

    /// Whether something was left out or cut down.
    pub fn is_partial(&self) -> bool {
        self.partial
    }

    /// A utilisation in millionths.
    pub fn of(&self, of: Utilization) -> Option<u64> {
        let [application, cpu, memory] = self.utilization;
        match of {
            Utilization::Application => application,
            Utilization::Cpu => cpu,
            Utilization::Memory => memory,
        }
    }

    /// The utilisation that those who balance by reports go by, in millionths: the application's, else the processors'. 0 is no
    /// utilisation beside one that is more.
    pub fn utilization_micro(&self) -> Option<u64> {
        let known = [self.of(Utilization::Application), self.of(Utilization::Cpu)];
        known.into_iter().flatten().find(|micro| *micro > 0).or(known.into_iter().flatten().next())
    }

    /// The metrics that the backend names.
    pub fn named(&self) -> impl Iterator<Item = (&str, f64)> {
        self.named.iter().map(|(name, value)| (&**name, *value))
    }
}

/// A number, or one in a text as protobuf's JSON has them.
fn number(value: &Value) -> f64 {
    let text = || value.as_str().and_then(|text| text.parse().ok());
    value.as_f64().or_else(text).unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests;
