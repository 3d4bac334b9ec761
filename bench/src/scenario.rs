//! The scenario of every end-to-end comparison, and one run of it.
//!
//! 16 replicas, each behind its agent; 14 answer in 50 ms and 2 in 800 ms; 500 requests a second at a
//! constant rate, through one Envoy or spread evenly over four. The first two seconds of a run are kept
//! apart: there a policy is still learning who is slow. Every run starts its own processes, so that no
//! state leaks from one arm to the next.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::backends::Fleet;
use crate::deployment::Deployment;
use crate::load::{Plan, Run};
use crate::stats::{Sample, Summary};

/// Requests per second, over all Envoys together.
pub(crate) const PER_SECOND: u32 = 500;
/// The part of a run that is left out of the comparison.
pub(crate) const FIRST: Duration = Duration::from_secs(2);

/// The replicas of the scenario.
pub(crate) fn fleet() -> Fleet {
    Fleet { fast: 14, slow: 2, fast_ms: 50, slow_ms: 800, trivial: false }
}

/// What chooses the replica.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Arm {
    RoundRobin,
    LeastRequest,
    FullScan,
    Prequal,
}

impl Arm {
    /// In the order in which a pass runs them.
    pub(crate) const ALL: [Self; 4] = [Self::RoundRobin, Self::LeastRequest, Self::FullScan, Self::Prequal];
    /// Envoy's own policies.
    pub(crate) const BASELINES: [Self; 3] = [Self::RoundRobin, Self::LeastRequest, Self::FullScan];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::LeastRequest => "least_request (2 choices)",
            Self::FullScan => "least_request (full scan)",
            Self::Prequal => "prequal",
        }
    }
}

/// How many Envoys share the fleet and the load.
pub(crate) fn topology_label(envoys: usize) -> &'static str {
    if envoys == 1 { "one Envoy" } else { "four Envoys" }
}

/// What one run measured.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) arm: Arm,
    pub(crate) envoys: usize,
    /// The first two seconds.
    pub(crate) first: Summary,
    /// All that came after.
    pub(crate) rest: Summary,
    /// Probes sent per request after the first two seconds; `None` without Prequal.
    pub(crate) probes_per_query: Option<f64>,
    /// CPU time of all Envoys per request, after the first two seconds.
    pub(crate) envoy_us: f64,
}

/// Starts a deployment cold, runs the load for [`FIRST`] + `measured`, and takes it down.
pub(crate) async fn run_cold(arm: Arm, envoys: usize, measured: Duration, step: &str) -> Result<Measured> {
    let started = Instant::now();
    let deployment = Deployment::start(arm, envoys, &fleet()).await?;
    println!(
        "{step} {}, {}: started in {:.1} s",
        arm.label(),
        topology_label(envoys),
        started.elapsed().as_secs_f64()
    );
    let measured = run_on(&deployment, arm, measured, step).await?;
    deployment.stop().await;
    Ok(measured)
}

/// Runs the load on a deployment that has seen none yet.
pub(crate) async fn run_on(
    deployment: &Deployment,
    arm: Arm,
    measured: Duration,
    step: &str,
) -> Result<Measured> {
    let length = FIRST + measured;
    let load = start_load(deployment, length);
    let begin = load.start;
    let progress = tokio::spawn(report_progress(
        load.progress.clone(),
        begin,
        length,
        format!("{step} {}", arm.label()),
    ));

    tokio::time::sleep_until((begin + FIRST).into()).await;
    let probes_before = deployment.probes()?.sent;
    let cpu_before = deployment.envoy_cpu()?;
    let from = begin.elapsed();
    tokio::time::sleep_until((begin + length).into()).await;
    let cpu = deployment.envoy_cpu()?.saturating_sub(cpu_before);
    let sent = (begin.elapsed().min(length) - from).as_secs_f64() * f64::from(PER_SECOND);
    let probes = (deployment.probes()?.sent - probes_before) as f64;
    let samples = load.finish().await;
    progress.abort();

    let (first, rest) = split(&samples, deployment);
    Ok(Measured {
        arm,
        envoys: deployment.envoys(),
        first,
        rest,
        probes_per_query: (arm == Arm::Prequal).then_some(probes / sent),
        envoy_us: cpu.as_secs_f64() * 1e6 / sent,
    })
}

/// The scenario's load on a deployment, for as long as `length`.
pub(crate) fn start_load(deployment: &Deployment, length: Duration) -> Run {
    Run::start(Plan {
        targets: deployment.targets(),
        per_second: PER_SECOND,
        length,
        body: bytes::Bytes::new(),
    })
}

fn split(samples: &[Sample], deployment: &Deployment) -> (Summary, Summary) {
    let slow = |replica| deployment.backends.is_slow(replica);
    (
        Summary::of(samples.iter().filter(|sample| sample.due < FIRST), slow),
        Summary::of(samples.iter().filter(|sample| sample.due >= FIRST), slow),
    )
}

/// Prints a line every few seconds until it is aborted.
pub(crate) async fn report_progress(
    progress: std::sync::Arc<crate::load::Progress>,
    begin: Instant,
    length: Duration,
    label: String,
) {
    let every = Duration::from_secs(if length > Duration::from_secs(40) { 15 } else { 5 });
    let mut tick = tokio::time::interval_at((begin + every).into(), every);
    loop {
        tick.tick().await;
        println!(
            "  {label}: {:.0} of {:.0} s, {} answered, {} failed",
            begin.elapsed().as_secs_f64(),
            length.as_secs_f64(),
            progress.answered.load(Ordering::Relaxed),
            progress.failed.load(Ordering::Relaxed),
        );
    }
}
