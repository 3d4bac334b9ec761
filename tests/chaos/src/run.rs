//! One run: load, a quiet time, one fault or a pair, the wait for recovery, and counters at rest. This module measures
//! the outcome; `verdict` judges it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::bed::{Bed, REPLICAS};
use crate::fault::{Fault, Site};
use crate::load::{Load, Sample};

/// Load before the fault begins.
const QUIET: Duration = Duration::from_secs(2);
/// Time over which a replica's share is measured, long enough to rule out chance.
const WINDOW: Duration = Duration::from_secs(2);
/// Resolution of the recovery time.
const STEP: Duration = Duration::from_millis(500);
/// A replica has its traffic back once it gets this part of its fair share.
const PART: f64 = 0.25;
/// Time within which every replica must have its traffic back, as in the docker-compose demo.
pub(crate) const BACK: Duration = Duration::from_secs(45);
/// On a healthy service, a request of any kind takes less than this.
const LATE: Duration = Duration::from_millis(1500);
/// Maximum time to wait for recovery if replicas need not have their traffic back.
const RECOVERY: Duration = Duration::from_secs(20);
/// Maximum time that counters may take to balance without load.
const REST: Duration = Duration::from_secs(10);

/// The outcome of one run.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) requests: usize,
    /// Errors that are the fault's own.
    pub(crate) own: usize,
    /// All other errors, in order.
    pub(crate) errors: Vec<String>,
    /// Requests that took longer than [`LATE`].
    pub(crate) late: usize,
    /// Time from the end of the fault until no request fails or is late; `None` if that did not happen in the observed
    /// time.
    pub(crate) recovery: Option<Duration>,
    /// Time from the end of the fault until, in addition, every replica has its traffic back.
    pub(crate) back: Option<Duration>,
    /// A description of what had not recovered at the end of the wait.
    pub(crate) unwell: String,
    /// Counters that do not balance at rest.
    pub(crate) unbalanced: Vec<String>,
    /// Set if a fault could not be started or undone.
    pub(crate) broken: Option<String>,
}

/// Runs `faults` at the same time under `rate` requests a second. Afterwards it waits for the service to recover and,
/// if `waits_for_traffic`, for each replica to have its traffic back.
pub(crate) fn run(
    bed: &Bed,
    faults: &[&Fault],
    rate: u32,
    seed: u64,
    waits_for_traffic: bool,
) -> Result<Outcome> {
    bed.harm.clear();
    let (broken_before, open_before) = (broken(bed)?, bed.open()?);
    let load = Load::start(bed.edge().addr(), rate, seed);
    settle(&load, waits_for_traffic)?;
    let made = std::thread::scope(|scope| {
        let threads: Vec<_> = faults
            .iter()
            .enumerate()
            .map(|(index, fault)| scope.spawn(move || make(fault, &site(bed, index))))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("it panicked, see above"))))
            .collect::<Result<Vec<()>>>()
    });
    let ended = Instant::now();
    let mut outcome = Outcome::default();
    if let Err(error) = made {
        outcome.broken = Some(format!("{error:#}"));
    }
    watch(&load, ended, waits_for_traffic, &mut outcome);
    let samples = load.stop();
    outcome.requests = samples.len();
    outcome.late = samples.iter().filter(|sample| late(sample, Instant::now())).count();
    // Failures that backends caused on purpose are the fault's own; some were retried and so are not errors.
    let mut on_purpose = broken(bed).unwrap_or(broken_before).saturating_sub(broken_before);
    for sample in &samples {
        let Some(error) = &sample.error else { continue };
        if bed.harm.explains(sample) {
            outcome.own += 1;
        } else if on_purpose > 0 {
            on_purpose -= 1;
            outcome.own += 1;
        } else {
            let after = sample.begun.saturating_duration_since(ended).as_secs_f64()
                - ended.saturating_duration_since(sample.begun).as_secs_f64();
            let took = sample.ended.unwrap_or(ended).saturating_duration_since(sample.begun).as_millis();
            let replica = sample.replica.map_or(String::new(), |replica| format!(" of replica {replica}"));
            let kind = sample.kind.name();
            outcome.errors.push(format!("{kind}{replica} at {after:+.3} s, after {took} ms: {error}"));
        }
    }
    match bed.unbalanced(REST, outcome.back.is_some(), open_before) {
        Ok(unbalanced) => outcome.unbalanced = unbalanced,
        // The earlier error is the cause and has been reported.
        Err(error) => outcome.unbalanced.push(format!("{error:#}")),
    }
    Ok(outcome)
}

fn site(bed: &Bed, index: usize) -> Site<'_> {
    let first = index * 3;
    Site { bed, replicas: [first, first + 1, first + 2].map(|replica| replica % REPLICAS) }
}

/// Runs a fault from beginning to end.
fn make(fault: &Fault, site: &Site) -> Result<()> {
    let begun = (fault.begin)(site).with_context(|| format!("{} could not begin", fault.name));
    if begun.is_ok() {
        std::thread::sleep(fault.hold);
    }
    let ended = (fault.end)(site).with_context(|| format!("{} could not end", fault.name));
    begun.and(ended)
}

/// Waits until the service is healthy before a fault begins.
fn settle(load: &Load, waits_for_traffic: bool) -> Result<()> {
    std::thread::sleep(QUIET);
    let start = Instant::now();
    loop {
        let now = Instant::now();
        let well = |samples: &[&Sample], now| {
            in_time(samples, now).or_else(|| waits_for_traffic.then(|| starved(samples)).flatten())
        };
        let Err(unwell) = recovered(&load.samples(), now.checked_sub(WINDOW).unwrap_or(now), now, well)
        else {
            return Ok(());
        };
        ensure!(start.elapsed() < Duration::from_secs(60), "not healthy before the fault: {unwell}");
        std::thread::sleep(STEP);
    }
}

/// Waits until the service has recovered, and records how long that took.
fn watch(load: &Load, ended: Instant, waits_for_traffic: bool, outcome: &mut Outcome) {
    let limit = if waits_for_traffic { BACK } else { RECOVERY } + WINDOW + STEP;
    while ended.elapsed() < limit {
        std::thread::sleep(STEP / 2);
        let (samples, now) = (load.samples().clone(), Instant::now());
        outcome.recovery = recovered(&samples, ended, now, in_time).ok();
        match recovered(&samples, ended, now, |samples, now| {
            in_time(samples, now).or_else(|| starved(samples))
        }) {
            Ok(back) => outcome.back = Some(back),
            Err(unwell) => outcome.unwell = unwell,
        }
        if outcome.recovery.is_some() && (outcome.back.is_some() || !waits_for_traffic) {
            return;
        }
    }
}

fn broken(bed: &Bed) -> Result<u64> {
    bed.pods.iter().map(|pod| pod.broken()).sum()
}

fn late(sample: &Sample, now: Instant) -> bool {
    sample.ended.unwrap_or(now).saturating_duration_since(sample.begun) > LATE
}

/// Time after `ended` from which everything was healthy and stayed so until `now`, for at least [`WINDOW`]; otherwise
/// the problem.
fn recovered(
    samples: &[Sample],
    ended: Instant,
    now: Instant,
    unwell: impl Fn(&[&Sample], Instant) -> Option<String>,
) -> Result<Duration, String> {
    let windows = now.saturating_duration_since(ended).saturating_sub(WINDOW).as_millis() / STEP.as_millis();
    if now.saturating_duration_since(ended) < WINDOW {
        return Err("too early".to_owned());
    }
    let mut since = Err("too early".to_owned());
    for step in 0..=windows as u32 {
        let from = ended + STEP * step;
        let within: Vec<&Sample> =
            samples.iter().filter(|sample| (from..from + WINDOW).contains(&sample.begun)).collect();
        since = match (unwell(&within, now), since) {
            (None, Ok(since)) => Ok(since),
            (None, Err(_)) => Ok(STEP * step),
            (Some(unwell), _) => Err(unwell),
        };
    }
    since
}

/// Errors or lateness among these requests of one window.
fn in_time(samples: &[&Sample], now: Instant) -> Option<String> {
    if let Some(error) = samples.iter().find_map(|sample| sample.error.as_ref()) {
        return Some(format!("errors: {error}"));
    }
    let late = samples.iter().filter(|sample| late(sample, now)).count();
    if late > 0 {
        return Some(format!("{late} requests take longer than {} s", LATE.as_secs_f64()));
    }
    None
}

/// A replica that gets too few of these requests of one window.
fn starved(samples: &[&Sample]) -> Option<String> {
    let mut shares = [0_usize; REPLICAS];
    samples.iter().filter_map(|sample| sample.replica).for_each(|replica| shares[replica] += 1);
    let fair = shares.iter().sum::<usize>() as f64 / REPLICAS as f64;
    let short = shares.iter().enumerate().find(|(_, share)| **share as f64 <= fair * PART);
    short.map(|(replica, share)| {
        format!("replica {replica} gets {:.0} % of its fair share", 100.0 * *share as f64 / fair.max(1.0))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mix::Kind;

    /// 400 requests a second for ten seconds, to each replica in turn, changed by `wrong`.
    fn samples(start: Instant, wrong: impl Fn(f64, &mut Sample)) -> Vec<Sample> {
        let all = 0..4000_u32;
        let sample = |number: u32| {
            let begun = start + Duration::from_micros(2500) * number;
            let mut sample = Sample {
                kind: Kind::Http1,
                begun,
                ended: Some(begun + Duration::from_millis(10)),
                replica: Some(number as usize % REPLICAS),
                error: None,
            };
            wrong(f64::from(number) / 400.0, &mut sample);
            sample
        };
        all.map(sample).collect()
    }

    fn after(wrong: impl Fn(f64, &mut Sample)) -> Result<Duration, String> {
        let start = Instant::now();
        recovered(&samples(start, wrong), start, start + Duration::from_secs(10), |samples, now| {
            in_time(samples, now).or_else(|| starved(samples))
        })
    }

    #[test]
    fn a_service_that_was_always_healthy_has_recovered_at_once() {
        assert_eq!(after(|_, _| {}), Ok(Duration::ZERO));
    }

    #[test]
    fn recovery_is_after_the_last_error() {
        let error = |at, sample: &mut Sample| {
            if (3.1..3.2).contains(&at) {
                sample.error = Some("503".to_owned());
            }
        };
        assert_eq!(after(error), Ok(Duration::from_millis(3500)));
    }

    #[test]
    fn a_replica_without_its_share_is_not_recovered() {
        let starved = |at, sample: &mut Sample| {
            if at > 2.0 && sample.replica == Some(5) {
                sample.replica = Some(6);
            }
        };
        assert_eq!(after(starved), Err("replica 5 gets 0 % of its fair share".to_owned()));
    }

    #[test]
    fn a_request_that_is_still_in_flight_may_be_late() {
        let hung = |at, sample: &mut Sample| {
            if at > 8.0 && sample.replica == Some(1) {
                sample.ended = None;
            }
        };
        assert!(after(hung).unwrap_err().contains("take longer"));
    }
}
