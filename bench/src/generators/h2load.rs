//! h2load: a closed loop with pacing.
//!
//! Each connection has a rate of its own and at most one request in flight. Latency is measured from sending, so a
//! request that is still running at the next due time hides the wait of the request after it (coordinated omission).
//! Here every connection sends one request per second, so that this affects only requests that take longer than a
//! second.
//!
//! Connections keep the phase at which they were opened, so they are opened evenly over the first second. h2load's
//! timers have a resolution of a millisecond: 500 requests/s are evenly spaced, but 1280 come in groups of five, which
//! wait longer in busy replicas.
//!
//! Two other ways were tried and do not give a constant rate. A few connections with many requests in flight send
//! bursts, because h2load looks at its clock every 10 ms. With a script of due times (`--timing-script-file`) every
//! delay of its timer is added to all later due times, so that 500 requests/s become fewer than 400.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::order::{Order, Record, TIMEOUT, parsed};

pub(super) fn send(order: &Order) -> Result<Vec<Record>> {
    let (connections, every_ms) = opened(order.per_second);
    order.run(
        Command::new("h2load")
            .args(["--h1", "--threads=1", "--rps=1", "--log-file=requests.tsv"])
            .arg(format!("--clients={}", order.per_second))
            .arg(format!("--requests={}", order.requests()))
            .arg(format!("--rate={connections}"))
            .arg(format!("--rate-period={every_ms}ms"))
            .arg(format!("--connection-inactivity-timeout={}", TIMEOUT.as_secs()))
            .arg(order.url()),
    )?;
    parsed(order.read("requests.tsv")?.lines(), record)
}

/// Returns how many connections to open at a time, and the period in milliseconds, so that `count` connections take a
/// second. h2load accepts only whole milliseconds; this is the shortest period that is right to within 3 %.
fn opened(count: u32) -> (u32, u32) {
    let at_a_time = |ms: u32| (f64::from(count * ms) / 1e3).round();
    let close = |ms: &u32| (at_a_time(*ms) * 1e3 / f64::from(count * ms) - 1.0).abs() <= 0.03;
    let ms = (1..=1000).find(close).unwrap_or(1000);
    (at_a_time(ms) as u32, ms)
}

/// Reads the columns: send time in microseconds since 1970, status (-1 if the stream failed), latency in microseconds.
fn record(line: &str) -> Result<Record> {
    let mut columns = line.split('\t');
    let mut next = |name| columns.next().with_context(|| format!("no {name}"));
    let sent: u64 = next("time")?.parse().context("time")?;
    let status: i32 = next("status")?.parse().context("status")?;
    let latency: u64 = next("latency")?.parse().context("latency")?;
    Ok(Record {
        sent: Duration::from_micros(sent),
        latency: (status == 200).then_some(Duration::from_micros(latency)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_opened_over_one_second() {
        assert_eq!(opened(500), (1, 2));
        assert_eq!(opened(1000), (1, 1));
        // Five every 4 ms are 1250 a second.
        assert_eq!(opened(1280), (5, 4));
        assert_eq!(opened(3), (1, 324));
    }

    #[test]
    fn records_are_read() {
        let expected = Record {
            sent: Duration::from_micros(1_795_590_848_396_386),
            latency: Some(Duration::from_micros(55_030)),
        };
        assert_eq!(record("1795590848396386\t200\t55030").unwrap(), expected);
        assert_eq!(record("1795590848396386\t-1\t55030").unwrap().latency, None);
        assert_eq!(record("1795590848396386\t503\t55030").unwrap().latency, None);
        assert!(record("1795590848396386\t200").is_err());
    }
}
