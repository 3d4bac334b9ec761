//! oha: an open loop, up to its number of connections.
//!
//! A queue releases requests at the rate, and any idle connection takes the next one. If all are busy, requests wait in
//! the queue; with `--latency-correction` latency is measured from the instant at which a request entered it, so
//! nothing is omitted. There are as many connections as requests per second, so that none waits unless the requests of
//! a whole second are in flight. The queue's timer has a resolution of a millisecond.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::order::{Order, Record, TIMEOUT, parsed};

pub(super) fn send(order: &Order) -> Result<Vec<Record>> {
    order.run(
        Command::new("oha")
            .args(["--no-tui", "--latency-correction", "--output-format=csv", "--output=requests.csv"])
            .arg(format!("-q={}", order.per_second))
            .arg(format!("-c={}", order.per_second))
            .arg(format!("-n={}", order.requests()))
            .arg(format!("-t={}s", TIMEOUT.as_secs()))
            .arg(order.url()),
    )?;
    records(&order.read("requests.csv")?, order)
}

/// Reads the report. It leaves out requests without an answer, so each of the missing ones counts as failed at the end
/// of the run.
fn records(text: &str, order: &Order) -> Result<Vec<Record>> {
    let mut lines = text.lines();
    let header = lines.next().unwrap_or_default();
    ensure!(header == HEADER, "oha's report has the columns `{header}`, not `{HEADER}`");
    let mut records = parsed(lines, record)?;
    let end = order.length.saturating_sub(Duration::from_nanos(1));
    let failed = Record { sent: end, latency: None };
    records.resize(records.len().max(order.requests()), failed);
    Ok(records)
}

const HEADER: &str = "request-start,DNS,DNS+dialup,Response-delay,request-duration,bytes,status";

fn record(line: &str) -> Result<Record> {
    let columns: Vec<&str> = line.split(',').collect();
    let [sent, .., latency, _, status] = columns[..] else { anyhow::bail!("too few columns") };
    let seconds = |name: &'static str, text: &str| -> Result<Duration> {
        Duration::try_from_secs_f64(text.parse().context(name)?).context(name)
    };
    let latency = seconds("request-duration", latency)?;
    Ok(Record { sent: seconds("request-start", sent)?, latency: (status == "200").then_some(latency) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_and_missing_ones_failed() {
        let order = Order {
            target: ([127, 0, 0, 1], 1).into(),
            per_second: 2,
            length: Duration::from_secs(2),
            folder: std::path::PathBuf::new(),
        };
        let text = format!(
            "{HEADER}\n0.001,0,0.0002,0.05,0.0525,3,200\n0.5,0,0,0.001,0.002,9,503\n1,0,0,0.05,0.05,3,200\n"
        );
        let records = records(&text, &order).unwrap();
        let ms = Duration::from_millis;
        assert_eq!(records[0], Record { sent: ms(1), latency: Some(Duration::from_micros(52_500)) });
        assert_eq!(records[1].latency, None);
        assert_eq!(records.len(), 4);
        assert!(records[3].latency.is_none() && (ms(1999)..ms(2000)).contains(&records[3].sent));
        assert!(super::records("a,b\n", &order).is_err());
    }
}
