//! The definition of an end-to-end comparison as data, and one run of it.
//!
//! Each run starts its own processes, so that no state leaks from one arm to the next; latency is measured from the
//! instant at which a request was due. A run has up to three parts: the part before the judged one, while policies
//! still learn; the judged part; and, if a replica heals, the time in which its traffic must come back.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use prequal_testbed::cpu_time;

use crate::arm::Arm;
use crate::backends::Fleet;
use crate::closed;
use crate::deployment::{Counted, Deployment, ReplicaEvent};
use crate::load::{Arrivals, Keys, LoadRun, Plan, Spread};
use crate::recovery::{self, Recovery, Watch};
use crate::stats::{Sample, Summary};
use crate::streams::Streams;

/// One comparison: the fleet, the load, the faults with their times, and the goals.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    /// Printed before every verdict.
    pub(crate) name: String,
    /// Printed above tables and plots: fleet and load in words.
    pub(crate) title: String,
    pub(crate) fleet: Fleet,
    pub(crate) load: Load,
    /// Workers of a single Envoy; each of several Envoys has one.
    pub(crate) workers: u32,
    /// In the order of a pass.
    pub(crate) arms: Vec<Arm>,
    /// The part that is judged; earlier requests are reported separately.
    pub(crate) judged: Range<Duration>,
    /// Faults and their ends, in order.
    pub(crate) schedule: Vec<(Duration, ReplicaEvent)>,
    /// Number of idle streams that are open during the load.
    pub(crate) streams: usize,
    /// A request is good if it gets a 200 within this time.
    pub(crate) good_within: Duration,
    /// Replicas whose share is shown.
    pub(crate) marked: Option<Marked>,
    /// The replica whose traffic must come back after the last event of the schedule. Only Prequal's arms are watched.
    pub(crate) watch: Option<Watch>,
    pub(crate) goals: Vec<Goal>,
}

/// How requests arrive.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Load {
    /// At instants fixed in advance, over all Envoys together.
    Open { arrivals: Arrivals, keys: Option<Keys>, spread: Spread },
    /// Each of `connections` connections sends its next request as soon as the previous one is answered, through one
    /// Envoy.
    Closed { connections: usize },
}

impl Load {
    /// `per_second` requests per second, evenly spaced.
    pub(crate) fn constant(per_second: u32) -> Self {
        Self::Open { arrivals: Arrivals::Constant(per_second), keys: None, spread: Spread::InTurn }
    }

    /// `per_second` requests per second, independent of each other.
    pub(crate) fn poisson(per_second: u32) -> Self {
        Self::Open { arrivals: Arrivals::Poisson(per_second), keys: None, spread: Spread::InTurn }
    }
}

/// Replicas that are reported separately.
#[derive(Clone, Debug)]
pub(crate) struct Marked {
    pub(crate) replicas: Range<u16>,
    /// Label, phrased to follow "to".
    pub(crate) label: &'static str,
}

/// A goal for [`Arm::Prequal`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Goal {
    /// Minimum share of good requests.
    Good(f64),
    /// The watched replica has its traffic back in time, in every pass.
    Back,
    /// Maximum share of the marked replicas, in every pass.
    MarkedShare(f64),
    /// No request of any pass was refused by a full replica.
    NoneRejected,
    /// No request of any pass failed.
    NoneFailed,
    /// Maximum 99th percentile, ms.
    P99(f64),
    /// Maximum excess of the 99th percentile over round robin's median, ms, in every pass.
    P99AboveRoundRobinMedian(f64),
    /// Each baseline's 99.9th percentile is at least this many times Prequal's, in every pass.
    P999BelowBaselines(f64),
    /// Maximum of Envoy's CPU time per request relative to round robin's, comparing medians of the passes.
    CpuOfRoundRobin(f64),
    /// Minimum throughput, as a part of the answers per second of the arm `of`.
    Throughput { of: Arm, part: f64 },
    /// No quantile above that of the best of Envoy's own policies, apart from chance and the hop through the filter.
    NeverWorse,
    /// No quantile of this arm above that of the best of all arms that are not Prequal's, with the same allowances as
    /// [`Goal::NeverWorse`].
    NoWorseThanPeers(Arm),
    /// Median and 99th percentile not above this arm's, with the allowances of [`Goal::NeverWorse`].
    NoWorseThan(Arm),
    /// Maximum 99th percentile relative to that of the best of Envoy's own policies.
    P99OfBest(f64),
    /// Minimum part of its fair share that the least used replica gets, in every pass.
    LeastPart(f64),
    /// This arm, which uses hints, has more cache hits and a lower 99th percentile than [`Arm::Prequal`].
    BeatenByHint(Arm),
}

/// Name of a topology: the number of Envoys that share fleet and load.
pub(crate) fn topology_label(envoys: usize) -> String {
    numbered(envoys, "Envoy", "Envoys")
}

fn numbered(number: usize, one: &str, several: &str) -> String {
    match number {
        1 => format!("one {one}"),
        4 => format!("four {several}"),
        many => format!("{many} {several}"),
    }
}

/// Measurements of one run.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) arm: Arm,
    pub(crate) envoys: usize,
    /// Requests due before the judged part.
    pub(crate) before: Summary,
    pub(crate) judged: Summary,
    /// Requests due after the judged part.
    pub(crate) after: Summary,
    /// Answers per second of the judged part.
    pub(crate) per_second: f64,
    /// Probes sent per request of the judged part; `None` if the filter does not choose.
    pub(crate) probes_per_query: Option<f64>,
    /// Number of ejections in the judged part; `None` if the filter does not choose.
    pub(crate) ejections: Option<u64>,
    /// CPU time of all Envoys, or of the peers in their place, per request of the judged part.
    pub(crate) envoy_us: f64,
    /// CPU time of this process, the generator, as a share of the judged part's duration.
    pub(crate) generator_cpu: f64,
    /// Lateness of the generator: 99th percentile and maximum.
    pub(crate) late: (Duration, Duration),
    pub(crate) recovery: Option<Recovery>,
}

impl Measured {
    /// Failed requests of the whole run.
    pub(crate) fn failed(&self) -> usize {
        self.before.failed + self.judged.failed + self.after.failed
    }

    /// Rejected requests of the whole run.
    pub(crate) fn rejected(&self) -> usize {
        self.before.rejected + self.judged.rejected + self.after.rejected
    }
}

impl Scenario {
    /// What requests go through, for headings: `Envoy`, or `proxy` if there are peers among the arms.
    pub(crate) fn proxy(&self) -> &'static str {
        if self.arms.iter().any(|arm| matches!(arm, Arm::Peer(_))) { "proxy" } else { "Envoy" }
    }

    /// [`topology_label`], or the same with proxies if there are peers among the arms.
    pub(crate) fn topology(&self, envoys: usize) -> String {
        match self.proxy() {
            "proxy" => numbered(envoys, "proxy", "proxies"),
            _ => topology_label(envoys),
        }
    }

    /// Number of workers of each Envoy if there are `envoys`.
    pub(crate) fn workers(&self, envoys: usize) -> u32 {
        if envoys == 1 { self.workers } else { 1 }
    }

    /// Time at which the watched replica is healthy again.
    fn healed(&self) -> Duration {
        self.schedule.last().map_or(Duration::ZERO, |(at, _)| *at)
    }

    /// Time during which requests are sent.
    pub(crate) fn length(&self, arm: Arm) -> Duration {
        let watched = self.watch.as_ref().filter(|_| arm.is_prequal());
        self.judged.end.max(watched.map_or(Duration::ZERO, |watch| self.healed() + watch.length()))
    }

    /// Starts a deployment cold, runs the load on it, and takes it down.
    pub(crate) async fn run_cold(&self, arm: Arm, envoys: usize, seed: u64, step: &str) -> Result<Measured> {
        let started = Instant::now();
        let deployment = Deployment::start(arm, envoys, self.workers(envoys), &self.fleet).await?;
        println!(
            "{step} {}, {}: started in {:.1} s",
            arm.label(),
            self.topology(envoys),
            started.elapsed().as_secs_f64()
        );
        let measured = self.run_on(&deployment, arm, seed, step).await;
        deployment.stop().await;
        measured
    }

    /// Runs the load and the schedule on a deployment that has seen no load yet.
    pub(crate) async fn run_on(
        &self,
        deployment: &Deployment,
        arm: Arm,
        seed: u64,
        step: &str,
    ) -> Result<Measured> {
        let length = self.length(arm);
        let _streams = Streams::open(&deployment.targets(), self.streams).await?;
        let (begin, progress, samples) = match self.load {
            Load::Open { .. } => {
                let run = self.start_load(deployment, length, seed);
                let label = format!("{step} {}", arm.label());
                let progress = report_progress(run.progress.clone(), run.start, length, label);
                (run.start, Some(tokio::spawn(progress)), StartedLoad::Open(run))
            }
            Load::Closed { connections } => {
                let target = deployment.targets()[0];
                let run = tokio::spawn(closed::run(target, connections, length));
                (Instant::now(), None, StartedLoad::Closed(run))
            }
        };
        let outcome = tokio::try_join!(
            samples.finish(),
            account(deployment, begin, &self.judged),
            carry_out(deployment, begin, &self.schedule),
        );
        if let Some(progress) = progress {
            progress.abort();
        }
        let (samples, used, healed) = outcome?;

        let marked = |replica| self.marked.as_ref().is_some_and(|marked| marked.replicas.contains(&replica));
        let part = |part: &dyn Fn(Duration) -> bool| {
            Summary::of(samples.iter().filter(|sample| part(sample.due)), marked)
        };
        let judged = part(&|due| self.judged.contains(&due));
        let requests = judged.samples as f64;
        let seconds = (self.judged.end - self.judged.start).as_secs_f64();
        let watch = self.watch.as_ref().filter(|_| arm.is_prequal());
        Ok(Measured {
            arm,
            envoys: deployment.envoys(),
            before: part(&|due| due < self.judged.start),
            after: part(&|due| due >= self.judged.end),
            per_second: (judged.samples - judged.failed) as f64 / seconds,
            judged,
            probes_per_query: arm.is_prequal().then_some(used.counted.probes as f64 / requests),
            ejections: arm.is_prequal().then_some(used.counted.ejections),
            envoy_us: used.envoys.as_secs_f64() * 1e6 / requests,
            generator_cpu: used.generator.as_secs_f64() / seconds,
            late: lateness(&samples),
            recovery: watch.map(|watch| recovery::of(&samples, watch, self.fleet.len(), healed)),
        })
    }

    /// Starts the scenario's load for `length`.
    ///
    /// # Panics
    /// If the load is a closed loop.
    pub(crate) fn start_load(&self, deployment: &Deployment, length: Duration, seed: u64) -> LoadRun {
        let Load::Open { arrivals, keys, spread } = self.load else {
            panic!("a closed loop is not started like this")
        };
        let targets = deployment.targets();
        LoadRun::start(Plan { targets, spread, arrivals, length, body: bytes::Bytes::new(), keys, seed })
    }
}

enum StartedLoad {
    Open(LoadRun),
    Closed(tokio::task::JoinHandle<Result<Vec<Sample>>>),
}

impl StartedLoad {
    async fn finish(self) -> Result<Vec<Sample>> {
        match self {
            Self::Open(run) => Ok(run.finish().await),
            Self::Closed(run) => run.await?,
        }
    }
}

/// Resources that the judged part used.
struct Used {
    counted: Counted,
    envoys: Duration,
    generator: Duration,
}

async fn account(deployment: &Deployment, begin: Instant, judged: &Range<Duration>) -> Result<Used> {
    let read = || anyhow::Ok((deployment.counted()?, deployment.proxy_cpu()?, cpu_time(std::process::id())?));
    tokio::time::sleep_until((begin + judged.start).into()).await;
    let before = read()?;
    tokio::time::sleep_until((begin + judged.end).into()).await;
    let after = read()?;
    Ok(Used {
        counted: Counted {
            probes: after.0.probes - before.0.probes,
            ejections: after.0.ejections - before.0.ejections,
        },
        envoys: after.1.saturating_sub(before.1),
        generator: after.2.saturating_sub(before.2),
    })
}

/// Carries out the schedule; returns the time from the start of the run at which the last event was in effect.
async fn carry_out(
    deployment: &Deployment,
    begin: Instant,
    schedule: &[(Duration, ReplicaEvent)],
) -> Result<Duration> {
    let mut last = Duration::ZERO;
    for (at, event) in schedule {
        tokio::time::sleep_until((begin + *at).into()).await;
        tokio::task::block_in_place(|| deployment.apply(*event))?;
        last = begin.elapsed();
    }
    Ok(last)
}

/// Lateness of the generator: 99th percentile and maximum.
pub(crate) fn lateness(samples: &[Sample]) -> (Duration, Duration) {
    let mut late: Vec<Duration> = samples.iter().map(|sample| sample.late).collect();
    late.sort_unstable();
    let at = |index: usize| late.get(index).copied().unwrap_or_default();
    (at(late.len() * 99 / 100), at(late.len().saturating_sub(1)))
}

/// Prints a progress line every few seconds until it is aborted.
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
