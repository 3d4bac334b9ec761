//! The agent's log. Each class of failures gets at most one line a second. The line gives the number of failures that
//! were left out before it. `/metrics` has the exact counts.
//!
//! While the process serves, a separate thread writes the lines, so that a slow reader of standard error does not hold
//! anything up.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::Write as _;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};

use crate::lines::Lines;

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Writes lines to standard error. Clones share the log.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// `None`: nothing is written.
    format: Option<LogFormat>,
    /// Replica named in the lines, if the process has several.
    replica: Option<Arc<str>>,
    classes: Arc<Mutex<BTreeMap<&'static str, Class>>>,
    /// Inner `None`: the thread could not be started.
    lines: Arc<OnceLock<Option<Lines>>>,
}

#[derive(Debug)]
struct Class {
    logged: Instant,
    left_out: u64,
}

impl Log {
    /// Creates a log of this format.
    pub fn new(format: LogFormat) -> Self {
        Self { format: Some(format), ..Self::default() }
    }

    /// Returns the same log, but its lines name `replica` and its failures are counted separately.
    pub(crate) fn of(self, replica: Option<Arc<str>>) -> Self {
        match replica {
            Some(_) => Self { replica, classes: Arc::default(), ..self },
            None => self,
        }
    }

    /// Logs an event that happens once, when the process starts or ends. The line has been written when this returns.
    pub fn say(&self, message: &str) {
        if let Some(format) = self.format {
            write_now(&line(format, None, "agent", message, 0));
        }
    }

    /// Logs an event that happens occasionally.
    #[cfg(feature = "tls")]
    pub(crate) fn note(&self, message: &str) {
        self.write("agent", message, 0);
    }

    /// Waits briefly until the lines so far are written.
    pub(crate) async fn flush(&self) {
        if let Some(Some(lines)) = self.lines.get() {
            lines.flush().await;
        }
    }

    /// Logs the reason for a failure, unless another failure of its class was just logged.
    pub(crate) fn failure<T: Display>(&self, class: &'static str, message: impl FnOnce() -> T) {
        if self.format.is_none() {
            return;
        }
        let now = Instant::now();
        let left_out = {
            let mut classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
            match classes.get_mut(class) {
                Some(class) if now.saturating_duration_since(class.logged) < PAUSE => {
                    class.left_out += 1;
                    return;
                }
                known => {
                    let left_out = known.map_or(0, |class| class.left_out);
                    classes.insert(class, Class { logged: now, left_out: 0 });
                    left_out
                }
            }
        };
        self.write(class, &message().to_string(), left_out);
    }

    fn write(&self, class: &str, message: &str, left_out: u64) {
        let Some(format) = self.format else { return };
        let line = line(format, self.replica.as_deref(), class, message, left_out);
        match self.lines.get_or_init(|| Lines::start("log", std::io::stderr, || ()).ok()) {
            // If there is no room, the line is lost. The counts are on the metrics page.
            Some(lines) => drop(lines.put(line)),
            None => write_now(&line),
        }
    }
}

fn write_now(line: &str) {
    // `eprintln!` would panic if standard error has no reader.
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn line(format: LogFormat, replica: Option<&str>, class: &str, message: &str, left_out: u64) -> String {
    match format {
        LogFormat::Text => {
            let class = if class == "agent" { String::new() } else { format!("{class}: ") };
            let rest = if left_out > 0 { format!(" ({left_out} more not logged)") } else { String::new() };
            let replica = replica.map(|replica| format!("{replica}: ")).unwrap_or_default();
            format!("probe-agent: {replica}{class}{message}{rest}")
        }
        LogFormat::Json => {
            let mut line = stamped(replica);
            line.insert("class".to_owned(), class.into());
            line.insert("message".to_owned(), message.into());
            if left_out > 0 {
                line.insert("suppressed".to_owned(), left_out.into());
            }
            Value::Object(line).to_string()
        }
    }
}

/// Returns `ts`, in seconds since the epoch, and the replica, if any.
pub(crate) fn stamped(replica: Option<&str>) -> Map<String, Value> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    let ts = ("ts".to_owned(), Value::from(ms as f64 / 1e3));
    let replica = replica.map(|replica| ("replica".to_owned(), replica.into()));
    [ts].into_iter().chain(replica).collect()
}

/// Minimum time between two lines of a class.
const PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_give_the_number_left_out_and_json_is_valid() {
        assert_eq!(line(LogFormat::Text, None, "agent", "ends", 0), "probe-agent: ends");
        assert_eq!(
            line(LogFormat::Text, Some("[::1]:1"), "tls", "bad", 7),
            "probe-agent: [::1]:1: tls: bad (7 more not logged)"
        );
        let json: Value =
            serde_json::from_str(&line(LogFormat::Json, Some("a"), "tls", "a \"b\"\n", 7)).unwrap();
        assert_eq!(
            (&json["replica"], &json["class"], &json["message"], &json["suppressed"]),
            (&"a".into(), &"tls".into(), &"a \"b\"\n".into(), &7.into())
        );
        assert!(json["ts"].as_f64().unwrap() > 1e9);
    }

    #[test]
    fn a_suppressed_failure_does_not_format_its_message() {
        let log = Log::new(LogFormat::Text);
        let mut asked = 0;
        for class in ["one", "two"] {
            for _ in 0..100 {
                log.failure(class, || {
                    asked += 1;
                    "what a test says"
                });
            }
        }
        assert!((2..=4).contains(&asked), "{asked}");
        Log::default().failure("one", || -> &str { unreachable!("nothing is written") });
    }
}
