//! Reads and checks a backend's own load report in the format of ORCA, and reduces it to what the report of its sidecar
//! may carry.
//!
//! The utilisations and the metrics that the backend names itself are kept. Its rates are not, because the sidecar
//! counts requests itself. A report that is malformed or contradicts itself is dropped. From a report that can be read,
//! only metrics that make no sense are left out.

use std::fmt;

use serde_json::Value;

pub(super) mod binary;

/// Maximum length of a header or message that is read, bytes.
pub const MAX_REPORT: usize = 4096;
/// Maximum number of named metrics of the backend that are kept.
pub const MAX_NAMED: usize = 16;
/// Maximum length of such a metric's name, bytes.
pub const MAX_NAME: usize = 64;
/// Maximum utilisation. Higher values count as this.
pub const MAX_UTILIZATION: f64 = 1000.0;
/// Maximum absolute value of a named metric. A metric beyond it is left out.
pub const MAX_VALUE: f64 = 1e15;
/// Prefix of a named metric in a report.
pub const NAMED_PREFIX: &str = "named_metrics.";
/// Prefix of Prequal's own names, which a backend cannot use.
const OURS: &str = "prequal_";

/// Load report of a backend.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BackendReport {
    /// Indexed by [`Utilization`], in millionths.
    utilization: [Option<u64>; 3],
    named: Vec<(Box<str>, f64)>,
    partial: bool,
}

/// The resource that a utilisation is about.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Utilization {
    /// The resource that the application is short of.
    Application,
    /// The processors.
    Cpu,
    /// Memory.
    Memory,
}

impl Utilization {
    /// All utilisations, in the order of reports.
    pub const ALL: [Self; 3] = [Self::Application, Self::Cpu, Self::Memory];

    /// Returns the name of the field in a report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Application => "application_utilization",
            Self::Cpu => "cpu_utilization",
            Self::Memory => "mem_utilization",
        }
    }

    /// Returns the number of the field in the protobuf message.
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Application => 9,
            Self::Cpu => 1,
            Self::Memory => 2,
        }
    }

    /// Returns the name of the field in protobuf's JSON.
    fn json_name(self) -> &'static str {
        match self {
            Self::Application => "applicationUtilization",
            Self::Cpu => "cpuUtilization",
            Self::Memory => "memUtilization",
        }
    }
}

/// Metric of a backend's reports that is taken as its utilisation.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Metric {
    /// `application_utilization`, else `cpu_utilization`.
    Utilization,
    /// The metric of this name; if it is absent, the same as [`Self::Utilization`].
    Named(Box<str>),
}

impl Metric {
    /// Forms that [`Self::parse`] accepts.
    pub const FORM: &str = "\"utilization\", or \"named_metrics.NAME\" with a name of 1 to 64 bytes";

    /// Parses `utilization` or `named_metrics.NAME`.
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

/// Why a whole report is dropped.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum BackendError {
    /// Longer than [`MAX_REPORT`].
    #[error("the report is longer than {MAX_REPORT} bytes")]
    TooLong,
    /// The format is unknown, or the report does not follow it.
    #[error(
        "the report is malformed: `endpoint-load-metrics` must be `TEXT name=value,...`, `JSON {{...}}` or \
         `BIN <base64>`; the `-bin` header and a stream must hold an OrcaLoadReport message"
    )]
    Malformed,
    /// A metric or a report occurs twice.
    #[error("the report contradicts itself")]
    Contradictory,
}

impl BackendReport {
    /// Reads the report in a set of headers or trailers, if there is one. `text` holds the values of [`super::HEADER`],
    /// and `bin` those of [`super::HEADER_BIN`]. More than one report is a contradiction.
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
    /// [`BackendError`] if the whole report must be dropped.
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
    /// [`BackendError`] if the whole report must be dropped.
    pub fn parse_binary(base64: &[u8]) -> Result<Self, BackendError> {
        if base64.len() > MAX_REPORT {
            return Err(BackendError::TooLong);
        }
        let bytes = binary::base64(base64.trim_ascii()).ok_or(BackendError::Malformed)?;
        Self::decode(&bytes)
    }

    /// Reads the binary message itself, as a stream of reports carries it.
    ///
    /// # Errors
    /// [`BackendError`] if the whole report must be dropped.
    pub fn decode(message: &[u8]) -> Result<Self, BackendError> {
        if message.len() > MAX_REPORT {
            return Err(BackendError::TooLong);
        }
        let message = binary::Message::decode(message).ok_or(BackendError::Malformed)?;
        let mut report = Self::default();
        for (of, value) in [
            (Utilization::Application, message.application),
            (Utilization::Cpu, message.cpu),
            (Utilization::Memory, message.memory),
        ] {
            // An absent field is 0.
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

    /// Sets a utilisation, unless it is negative or not finite. A value above [`MAX_UTILIZATION`] counts as that.
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

    /// Adds a metric named by the backend, unless its value or name is out of bounds, or there are [`MAX_NAMED`]
    /// already.
    pub fn put_named(&mut self, name: &str, value: f64) {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:/".contains(&byte);
        let sound = (1..=MAX_NAME).contains(&name.len())
            && name.bytes().all(is_plain)
            && !name.starts_with(OURS)
            && value.abs() <= MAX_VALUE;
        if sound && self.named.len() < MAX_NAMED {
            // A value below 1 can have very many digits when written out, so it is rounded.
            let value = if value.abs() < 1.0 { (value * 1e9).round() / 1e9 } else { value };
            // Turns −0 into 0.
            self.named.push((name.into(), value + 0.0));
        } else {
            self.partial = true;
        }
    }

    /// Uses the metric that the operator configured as the utilisation, if it is present and not negative.
    pub fn go_by(&mut self, metric: &Metric) {
        let Metric::Named(name) = metric else { return };
        let found = self.named.iter().find(|(named, value)| *named == *name && *value >= 0.0);
        if let Some(value) = found.map(|(_, value)| *value) {
            self.put(Utilization::Application, value);
        }
    }

    /// Whether a metric was left out or reduced.
    pub fn is_partial(&self) -> bool {
        self.partial
    }

    /// Returns a utilisation in millionths.
    pub fn of(&self, of: Utilization) -> Option<u64> {
        let [application, cpu, memory] = self.utilization;
        match of {
            Utilization::Application => application,
            Utilization::Cpu => cpu,
            Utilization::Memory => memory,
        }
    }

    /// Returns the utilisation that load-balancing policies use, in millionths: the application's, else the CPU's. If
    /// one is 0 and the other is greater, the greater is used.
    pub fn utilization_micro(&self) -> Option<u64> {
        let known = [self.of(Utilization::Application), self.of(Utilization::Cpu)];
        known.into_iter().flatten().find(|micro| *micro > 0).or(known.into_iter().flatten().next())
    }

    /// Returns the metrics that the backend names.
    pub fn named(&self) -> impl Iterator<Item = (&str, f64)> {
        self.named.iter().map(|(name, value)| (&**name, *value))
    }
}

/// Reads a number, or a number in a string, as in protobuf's JSON.
fn number(value: &Value) -> f64 {
    let text = || value.as_str().and_then(|text| text.parse().ok());
    value.as_f64().or_else(text).unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests;
