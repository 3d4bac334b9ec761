//! The agent's log: a line for a failure, and for further ones of its class at most one a second, with the number of
//! those left out. `/metrics` has the exact counts.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};

/// How lines are written.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// A JSON object a line.
    Json,
}

/// Writes lines to standard error. Cloning shares.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// `None`: nothing is written.
    format: Option<LogFormat>,
    classes: Arc<Mutex<BTreeMap<&'static str, Class>>>,
}

#[derive(Debug)]
struct Class {
    said: Instant,
    left_out: u64,
}

impl Log {
    /// A log of this format.
    pub fn new(format: LogFormat) -> Self {
        Self { format: Some(format), ..Self::default() }
    }

    /// Logs something that happens once.
    pub fn say(&self, message: &str) {
        self.write("agent", message, 0);
    }

    /// Logs why something failed, unless another failure of its class has just been logged.
    pub(crate) fn failure<T: Display>(&self, class: &'static str, message: impl FnOnce() -> T) {
        if self.format.is_none() {
            return;
        }
        let now = Instant::now();
        let left_out = {
            let mut classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
            match classes.get_mut(class) {
                Some(class) if now.saturating_duration_since(class.said) < PAUSE => {
                    class.left_out += 1;
                    return;
                }
                known => {
                    let left_out = known.map_or(0, |class| class.left_out);
                    classes.insert(class, Class { said: now, left_out: 0 });
                    left_out
                }
            }
        };
        self.write(class, &message().to_string(), left_out);
    }

    fn write(&self, class: &str, message: &str, left_out: u64) {
        if let Some(format) = self.format {
            let line = line(format, class, message, left_out) + "\n";
            // `eprintln!` would panic, and with it a request or the accept loop, once standard error has no reader.
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }
}

fn line(format: LogFormat, class: &str, message: &str, left_out: u64) -> String {
    match format {
        LogFormat::Text => {
            let class = if class == "agent" { String::new() } else { format!("{class}: ") };
            let rest = if left_out > 0 { format!(" ({left_out} more not logged)") } else { String::new() };
            format!("probe-agent: {class}{message}{rest}")
        }
        LogFormat::Json => {
            let mut line = stamped();
            line.insert("class".to_owned(), class.into());
            line.insert("message".to_owned(), message.into());
            if left_out > 0 {
                line.insert("suppressed".to_owned(), left_out.into());
            }
            Value::Object(line).to_string()
        }
    }
}

/// `ts`: seconds since the epoch.
pub(crate) fn stamped() -> Map<String, Value> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    Map::from_iter([("ts".to_owned(), Value::from(ms as f64 / 1e3))])
}

/// Between two lines of a class.
const PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_what_was_left_out_and_json_is_json() {
        assert_eq!(line(LogFormat::Text, "agent", "ends", 0), "probe-agent: ends");
        assert_eq!(line(LogFormat::Text, "tls", "bad", 7), "probe-agent: tls: bad (7 more not logged)");
        let json: Value = serde_json::from_str(&line(LogFormat::Json, "tls", "a \"b\"\n", 7)).unwrap();
        assert_eq!(
            (&json["class"], &json["message"], &json["suppressed"]),
            (&"tls".into(), &"a \"b\"\n".into(), &7.into())
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
