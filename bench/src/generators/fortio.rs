//! fortio: a closed loop with pacing.
//!
//! Each connection has its share of the rate, and sends its next request at its next due time after the previous
//! answer. Latency is measured from sending. A request that is still running at the next due time therefore hides the
//! wait of the request after it (coordinated omission), and with `-nocatchup` the later request is not sent at all.
//! Here every connection sends one request per second, so that this affects only requests that take longer than a
//! second. `-uniform` spreads the connections' due times evenly.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::order::{Order, Record, TIMEOUT, parsed};

pub(super) fn send(order: &Order) -> Result<Vec<Record>> {
    order.run(
        Command::new("fortio")
            .args(["load", "-quiet", "-uniform", "-nocatchup", "-access-log-file=requests.json"])
            .arg(format!("-qps={}", order.per_second))
            .arg(format!("-c={}", order.per_second))
            .arg(format!("-n={}", order.requests()))
            // No duration: with one, fortio stretches the intervals so that the last request is due at the end of it.
            .arg("-t=-1s")
            .arg(format!("-timeout={}s", TIMEOUT.as_secs()))
            .arg(order.url()),
    )?;
    parsed(order.read("requests.json")?.lines(), record)
}

/// One line of the access log.
#[derive(Deserialize)]
struct LogLine {
    /// Seconds.
    latency: f64,
    /// Nanoseconds since 1970, when the request was sent.
    timestamp: u64,
    ok: bool,
}

fn record(line: &str) -> Result<Record> {
    let line: LogLine = serde_json::from_str(line)?;
    let latency = Duration::try_from_secs_f64(line.latency).context("latency")?;
    Ok(Record { sent: Duration::from_nanos(line.timestamp), latency: line.ok.then_some(latency) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read() {
        let line = |ok: bool| {
            format!(
                r#"{{"latency":0.052994,"timestamp":1795590862215498388,"thread":0,"iter":0,"ok":{ok},"details":"200"}}"#
            )
        };
        let expected = Record {
            sent: Duration::from_nanos(1_795_590_862_215_498_388),
            latency: Some(Duration::from_micros(52_994)),
        };
        assert_eq!(record(&line(true)).unwrap(), expected);
        assert_eq!(record(&line(false)).unwrap().latency, None);
        assert!(record(r#"{"latency":-1,"timestamp":1,"ok":true}"#).is_err());
    }
}
