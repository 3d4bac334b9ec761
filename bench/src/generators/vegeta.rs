//! vegeta: an open loop.
//!
//! A pacer releases requests at the rate and starts another worker whenever all are busy, up to `-max-workers`
//! (default: no limit), so a slow answer delays no other request. Latency is measured from the instant at which a
//! worker sends. vegeta's own lateness is not counted, but vegeta sends overdue requests at once. There is no
//! coordinated omission.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::order::{Order, Record, TIMEOUT, parsed};

pub(super) fn send(order: &Order) -> Result<Vec<Record>> {
    std::fs::write(order.folder.join("targets"), format!("GET {}\n", order.url()))?;
    order.run(
        Command::new("vegeta")
            .args(["attack", "-targets=targets", "-output=results.bin"])
            .arg(format!("-rate={}/1s", order.per_second))
            .arg(format!("-duration={}s", order.length.as_secs()))
            .arg(format!("-timeout={}s", TIMEOUT.as_secs())),
    )?;
    order.run(Command::new("vegeta").args(["encode", "-to=csv", "-output=results.csv", "results.bin"]))?;
    parsed(order.read("results.csv")?.lines(), record)
}

/// Reads the first three columns: send time in nanoseconds since 1970, status (0 without a complete answer), latency in
/// nanoseconds.
fn record(line: &str) -> Result<Record> {
    let mut columns = line.split(',');
    let mut next = |name| columns.next().with_context(|| format!("no {name}"));
    let sent: u64 = next("time")?.parse().context("time")?;
    let status: u16 = next("status")?.parse().context("status")?;
    let latency: u64 = next("latency")?.parse().context("latency")?;
    Ok(Record {
        sent: Duration::from_nanos(sent),
        latency: (status == 200).then_some(Duration::from_nanos(latency)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read() {
        let good = "1795590867324325972,200,52136661,0,0,,,,0,GET,http://127.0.0.1:1/,Q29udA==";
        let expected = Record {
            sent: Duration::from_nanos(1_795_590_867_324_325_972),
            latency: Some(Duration::from_nanos(52_136_661)),
        };
        assert_eq!(record(good).unwrap(), expected);
        let failed =
            r#"17,0,9,0,0,"Get ""http://127.0.0.1:1/"": dial tcp 127.0.0.1:1: connection refused",,,0,GET,,"#;
        assert_eq!(record(failed).unwrap().latency, None);
        assert_eq!(record("17,503,9,0,0,503 Service Unavailable,,,0,GET,,").unwrap().latency, None);
        let error = format!("{:#}", record("17,x,9").unwrap_err());
        assert!(error.starts_with("status: "), "{error}");
    }
}
