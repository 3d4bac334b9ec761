//! What a library must do for real requests over HTTP: the headers, probes, and how each request counts.
//!
//! The application answers by path: `/ok`, `/empty`, `/missing` (404), `/error` (500), `/panic` (no answer), `/break`
//! (half of one), `/hang` (until the client leaves), `/events` (an event stream), `/large` (32 MiB of known length),
//! `/lies` (Prequal's headers), and all others (418). With `?ms=` it first waits for that time.

use std::io::Read as _;
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use prequal_core::wire::report::LoadReport;
use prequal_testbed::eventually;
use serde_json::Value;

use crate::http::{exchange, head_of, parsed, send};
use crate::subject::{PATIENCE, Subject};

/// Upper limit for the base latency after a request that takes 20 ms, in microseconds. A busy machine adds to it.
const QUICK_US: u32 = 300_000;

/// Checks everything on a server that has just started.
pub(crate) fn check(subject: &Subject) -> Result<()> {
    probes_of_a_newcomer(subject).context("a newcomer")?;
    responses(subject).context("responses")?;
    probes(subject).context("probes")?;
    in_flight(subject).context("requests in flight")?;
    slow_clients(subject).context("slow clients")?;
    ends(subject).context("how requests end")
}

fn probes_of_a_newcomer(subject: &Subject) -> Result<()> {
    let probe = subject.get("/prequal/probe")?;
    let up = probe.report()?.up_s.context("up")?;
    ensure!(probe.field("x-prequal-load")? == format!("0;;{};up={up}", subject.service), "{probe:?}");
    ensure!(probe.field("x-prequal-rif")? == "0" && !probe.has("x-prequal-latency-us"), "{probe:?}");
    ensure!(!probe.has("endpoint-load-metrics"), "{probe:?}");
    let json = exchange(subject.service, "GET", "/prequal/probe", &[("accept", "application/json")], b"")?;
    let json: Value = serde_json::from_str(&json.body).with_context(|| json.body.clone())?;
    for unknown in ["latency_us", "latency_median_ms", "base_us", "knee"] {
        ensure!(json.get(unknown) == Some(&Value::Null), "{json}");
    }
    Ok(())
}

fn responses(subject: &Subject) -> Result<()> {
    let before = (subject.ended)()?;
    let first = subject.get("/ok?ms=20")?;
    ensure!(first.status == 200 && first.body == "ok", "{first:?}");
    let report = first.report()?;
    ensure!(report.rif == 0 && report.latency_us.is_none(), "it is about to leave: {report}");
    let base = report.capacity.context("it counts as served")?;
    ensure!(base.knee == 1 && base.open && (20_000..QUICK_US).contains(&base.base_us), "{report}");
    let metrics = first.field("endpoint-load-metrics")?;
    ensure!(metrics.starts_with("TEXT application_utilization=0."), "{metrics}");
    for part in [",rps_fractional=", ",eps=0,", ",named_metrics.prequal_rif=0,"] {
        ensure!(metrics.contains(part), "{metrics}");
    }
    let empty = subject.get("/empty")?;
    ensure!(empty.status == 200 && empty.body.is_empty() && empty.report()?.rif == 0, "{empty:?}");
    let missing = subject.get("/missing")?;
    ensure!(missing.status == 404 && missing.report()?.failing == 0, "{missing:?}");
    let lies = subject.get("/lies")?;
    ensure!(lies.report().is_ok() && lies.field("endpoint-load-metrics")?.starts_with("TEXT "), "{lies:?}");
    ensure!(!lies.has("endpoint-load-metrics-bin"), "{lies:?}");
    subject.at_rest(before, [4, 0, 0, 0])
}

fn probes(subject: &Subject) -> Result<()> {
    let before = (subject.ended)()?;
    let probe = subject.get("/prequal/probe")?;
    let report = probe.report()?;
    let latency = report.latency_us.context("four samples")?.to_string();
    ensure!(probe.field("x-prequal-latency-us")? == latency, "{probe:?}");
    ensure!(probe.status == 200 && probe.body.is_empty(), "{probe:?}");
    ensure!(probe.field("cache-control")? == "no-store", "{probe:?}");
    let head = exchange(subject.service, "HEAD", "/prequal/probe?x=1", &[], b"")?;
    ensure!(head.status == 200 && head.report().is_ok(), "{head:?}");
    let json = exchange(
        subject.service,
        "GET",
        "/prequal/probe",
        &[("Accept", "text/html, application/json")],
        b"",
    )?;
    ensure!(json.field("content-type")?.starts_with("application/json"), "{json:?}");
    let (report, json): (LoadReport, Value) = (json.report()?, serde_json::from_str(&json.body)?);
    let capacity = report.capacity.context("capacity")?;
    ensure!(json["rif"] == 0 && json["latency_us"] == report.latency_us.context("a latency")?, "{json}");
    ensure!(json["base_us"] == capacity.base_us && json["knee"] == capacity.knee, "{json}");
    ensure!(json["open"] == capacity.open && json["steady"] == capacity.steady, "{json}");
    ensure!(json["rse_percent"] == capacity.rse_percent, "{json}");
    ensure!(json["failing"] == 0 && json["up_s"].is_u64(), "{json}");
    ensure!(json["endpoint"] == subject.service.to_string() && json["timestamp_ms"].is_u64(), "{json}");
    let post = exchange(subject.service, "POST", "/prequal/probe", &[], b"x")?;
    ensure!(post.status == 405 && post.field("allow")? == "GET, HEAD", "{post:?}");
    for path in ["/prequal/", "/prequal/probe/", "/prequal/ok"] {
        let answer = subject.get(path)?;
        ensure!(answer.status == 404 && answer.body == "not found\n", "{path}: {answer:?}");
    }
    for path in ["/prequal", "/prequalx/probe", "/%70requal/probe"] {
        ensure!(subject.get(path)?.status == 418, "{path} belongs to the application");
    }
    subject.at_rest(before, [3, 0, 0, 0])
}

fn in_flight(subject: &Subject) -> Result<()> {
    let before = (subject.ended)()?;
    let three: Vec<TcpStream> =
        (0..3).map(|_| send(subject.service, "GET", "/ok?ms=400", &[], b"")).collect::<Result<_>>()?;
    eventually("three in flight", PATIENCE, || (subject.probe().ok()?.rif == 3).then_some(()));
    for mut tcp in three {
        let mut bytes = Vec::new();
        tcp.read_to_end(&mut bytes)?;
        let report = parsed(&bytes)?.report()?;
        ensure!(report.rif < 3, "{report}");
    }
    subject.at_rest(before, [3, 0, 0, 0])
}

/// The time that a response waits for its client does not count as the server's time.
fn slow_clients(subject: &Subject) -> Result<()> {
    let before = (subject.ended)()?;
    let base_us = || anyhow::Ok(subject.probe()?.capacity.context("a capacity")?.base_us);
    let base_before = base_us()?;
    let mut slow = send(subject.service, "GET", "/large", &[], b"")?;
    ensure!(head_of(&mut slow)?.report()?.rif == 1, "a large download stays");
    std::thread::sleep(Duration::from_millis(1500));
    ensure!(subject.probe()?.rif == 1);
    let length = std::io::copy(&mut slow, &mut std::io::sink())?;
    ensure!(length == 32 << 20, "{length}");
    subject.at_rest(before, [1, 0, 0, 0])?;
    // Eleven responses before this one took 0.1 s on average. If the wait counted, the base latency would double.
    let base = base_us()?;
    ensure!(base <= base_before + 50_000, "{base} us after {base_before}");
    Ok(())
}

fn ends(subject: &Subject) -> Result<()> {
    let before = (subject.ended)()?;
    let mut events = send(subject.service, "GET", "/events", &[], b"")?;
    let head = head_of(&mut events)?;
    ensure!(head.report()?.rif == 1, "a stream does not leave soon: {head:?}");
    let hangs = send(subject.service, "GET", "/hang", &[], b"")?;
    eventually("two in flight", PATIENCE, || (subject.probe().ok()?.rif == 2).then_some(()));
    drop((events, hangs));
    subject.at_rest(before, [0, 0, 1, 1])?;
    ensure!(subject.probe()?.failing == 0, "neither is a failure");

    let error = subject.get("/error")?;
    ensure!(error.status == 500 && error.report().is_ok(), "{error:?}");
    subject.at_rest(before, [0, 1, 1, 1])?;
    let once = subject.probe()?.failing;
    ensure!((1..=250).contains(&once), "{once}");
    // A server may answer 500 on behalf of an application that panics.
    let panics = subject.get("/panic");
    ensure!(panics.is_err() || panics.is_ok_and(|answer| answer.status == 500), "an answer");
    subject.at_rest(before, [0, 2, 1, 1])?;
    let mut breaks = send(subject.service, "GET", "/break", &[], b"")?;
    ensure!(head_of(&mut breaks)?.status == 200);
    let mut rest = Vec::new();
    let _ = breaks.read_to_end(&mut rest);
    subject.at_rest(before, [0, 3, 1, 1])?;
    ensure!(subject.probe()?.failing > once, "three of the last");
    Ok(())
}
