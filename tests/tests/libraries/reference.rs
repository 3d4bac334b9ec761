//! The core's own tracker as the reference for a trace.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use prequal_core::server::replica::Replica;
use prequal_core::server::tracker::{Ticket, TrackerConfig, Visit};
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::outcome::Outcome;
use prequal_core::shared::time::Micros;
use prequal_core::wire::orca::Format;

use crate::plan;
use crate::trace::{ENDPOINT, Kind, Trace, What};

/// Plays `trace`; returns the lines that a library must write.
pub(crate) fn play(trace: &Trace) -> Result<Vec<String>> {
    let endpoint: Endpoint = ENDPOINT.parse()?;
    let mut replica = Replica::new(TrackerConfig::default(), Some(Micros(trace.begin)));
    replica.count_rates(Micros(trace.begin), trace.window_us);
    let mut requests: BTreeMap<u32, (Ticket, Outcome)> = BTreeMap::new();
    let mut lines = Vec::new();
    for event in &trace.events {
        let now = Micros(event.at);
        match event.what {
            What::Start(id) => {
                requests.insert(id, (replica.start(now), Outcome::Success));
            }
            What::Probe => lines.push(replica.report(now, endpoint, None, None).to_string()),
            What::Head(id, kind) => {
                let (ticket, outcome) = requests.get_mut(&id).context("no such request")?;
                let mut leaving = Some(ticket.visit());
                match kind {
                    Kind::Ok => {}
                    Kind::Fail => *outcome = Outcome::Failure,
                    Kind::Stream => {
                        replica.tracker.streaming(ticket, now);
                        (*outcome, leaving) = (Outcome::Streaming, None);
                    }
                }
                lines.push(both_reports(&mut replica, trace, now, endpoint, leaving)?);
            }
            What::Wait(id) => replica.tracker.client_waits(visit(&requests, id)?, now),
            What::Back(id) => replica.tracker.client_is_back(visit(&requests, id)?, now),
            What::Finish(id) => {
                let (ticket, outcome) = requests.remove(&id).context("no such request")?;
                replica.finish(ticket, now, outcome);
            }
            What::Abort(id) => {
                let (ticket, _) = requests.remove(&id).context("no such request")?;
                replica.finish(ticket, now, Outcome::Aborted);
            }
        }
    }
    Ok(lines)
}

fn visit(requests: &BTreeMap<u32, (Ticket, Outcome)>, id: u32) -> Result<Visit> {
    Ok(requests.get(&id).context("no such request")?.0.visit())
}

/// The traces cover a run of fast responses that restarts the estimate, and runs that must not.
#[test]
fn the_estimate_starts_anew_when_healed_but_not_because_of_many_slots() -> Result<()> {
    let falls = |name: &str| -> Result<bool> {
        let trace = plan::traces().into_iter().find(|trace| trace.name == name).context("no such trace")?;
        let base = |line: &String| {
            line.split([';', '\t']).find_map(|part| part.trim().strip_prefix("base=")?.parse().ok())
        };
        let bases: Vec<f64> = play(&trace)?.iter().filter_map(base).collect();
        // Not the first ones, which are estimated from a few requests.
        Ok(bases.windows(2).skip(100).any(|pair| pair[1] < pair[0] / 2.0))
    };
    assert!(falls("healed")?);
    assert!(!falls("many slots")?);
    Ok(())
}

/// The traces cover steady latencies and varying ones, and both certain and uncertain estimates.
#[test]
fn only_requests_that_take_the_same_time_are_reported_as_steady_and_make_estimates_certain() -> Result<()> {
    for (name, expected) in
        [("constant", true), ("one by one", true), ("many slots", false), ("plain", false)]
    {
        let trace = plan::traces().into_iter().find(|trace| trace.name == name).context("no such trace")?;
        let lines = play(&trace)?;
        let known: Vec<_> = lines.iter().filter(|line| line.contains(";knee=")).skip(100).collect();
        let steady = known.iter().filter(|line| line.contains(";steady=1")).count();
        let share = steady as f64 / known.len() as f64;
        assert!(if expected { share > 0.9 } else { share < 0.1 }, "{name}: {share}");
        let uncertain =
            known.iter().filter(|line| line.contains(";rse=")).count() as f64 / known.len() as f64;
        assert!(if expected { uncertain < 0.2 } else { uncertain > 0.9 }, "{name}: {uncertain}");
    }
    Ok(())
}

/// Both reports on a response.
fn both_reports(
    replica: &mut Replica,
    trace: &Trace,
    now: Micros,
    endpoint: Endpoint,
    leaving: Option<Visit>,
) -> Result<String> {
    let report = replica.report(now, endpoint, None, leaving);
    let limit = Some(trace.limit).filter(|limit| *limit > 0);
    let orca = replica.orca(now, &report, leaving.is_some(), limit).context("rates are counted")?;
    let format = if trace.json { Format::Json } else { Format::Text };
    Ok(format!("{report}\t{}", orca.header(format)))
}
