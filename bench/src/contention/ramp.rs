//! Runs one policy through the whole load ramp, with processes of its own that start cold.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use prequal_testbed::{Agent, Envoy};

use super::figures::StepFigures;
use super::machines::Machines;
use super::policy::Policy;
use super::scale::{REPLICAS, allocation, rate};
use super::spare::Course;
use crate::deployment::{start_agents, start_envoys};
use crate::load::{Arrivals, LoadRun, Plan, Spread};
use crate::stats::{Sample, Summary};

/// Time before the first step, at that step's load. Policies learn the replicas, and reported means settle.
pub(super) const WARM_UP: Duration = Duration::from_secs(8);
/// Start of each step, which is excluded from its figures.
pub(super) const SETTLING: Duration = Duration::from_secs(2);

/// The ramp that every policy goes through.
#[derive(Clone, Debug)]
pub(super) struct Ramp {
    /// Load of each step, relative to the allocation.
    pub(super) loads: Vec<f64>,
    /// Measured time of a step.
    pub(super) measured: Duration,
}

/// The figures of one step.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) figures: StepFigures,
    pub(super) samples: usize,
    /// CPU time of the replicas, relative to their allocation.
    pub(super) cpu: f64,
    /// Idle share of this machine's cores.
    pub(super) idle: f64,
    /// Lateness of the generator, 99th percentile.
    pub(super) late_ms: f64,
    /// Number of failed queries by HTTP status; 0 stands for no answer. Envoy answers 504 at the deadline.
    pub(super) failures: BTreeMap<u16, usize>,
}

impl Ramp {
    /// The instant at which the measured time of a step begins, from the start of the antagonists.
    pub(super) fn from(&self, step: usize) -> Duration {
        WARM_UP + (SETTLING + self.measured) * step as u32 + SETTLING
    }

    pub(super) fn length(&self) -> Duration {
        self.from(self.loads.len())
    }

    /// The antagonists' courses of a pass.
    pub(super) fn courses(&self, pass: u64) -> Vec<Course> {
        Course::of_all(REPLICAS, self.length(), pass)
    }

    /// Runs one policy. All policies of a pass get the same arrivals and antagonists.
    pub(super) async fn run(&self, policy: Policy, pass: u64) -> Result<Vec<Step>> {
        let courses = self.courses(pass);
        let mut deployment =
            tokio::task::spawn_blocking(move || RampDeployment::start(policy, courses, pass)).await??;
        let measured = self.run_on(&mut deployment, pass).await;
        tokio::task::spawn_blocking(move || drop(deployment)).await?;
        measured
    }

    async fn run_on(&self, deployment: &mut RampDeployment, pass: u64) -> Result<Vec<Step>> {
        deployment.machines.begin()?;
        let begin = Instant::now();
        let warm_up = deployment.load(self.loads[0], WARM_UP, pass);
        tokio::time::sleep_until((begin + WARM_UP).into()).await;
        let mut running = Vec::new();
        for (number, load) in self.loads.iter().enumerate() {
            let seed = pass * 100 + number as u64 + 1;
            let run = deployment.load(*load, SETTLING + self.measured, seed);
            let from = begin + self.from(number);
            tokio::time::sleep_until(from.into()).await;
            let before = CpuReading::read(&deployment.machines)?;
            tokio::time::sleep_until((from + self.measured).into()).await;
            let after = CpuReading::read(&deployment.machines)?;
            println!("  {load}x: {:.0} % of the machine idle", after.idle_since(&before) * 100.0);
            tokio::task::block_in_place(|| deployment.check())?;
            running.push((run, before, after));
        }
        warm_up.finish().await;
        let mut steps = Vec::new();
        for (run, before, after) in running {
            steps.push(self.step(&run.finish().await, &before, &after));
        }
        Ok(steps)
    }

    fn step(&self, samples: &[Sample], before: &CpuReading, after: &CpuReading) -> Step {
        let judged: Vec<&Sample> = samples.iter().filter(|sample| sample.due >= SETTLING).collect();
        let summary = Summary::of(judged.iter().copied(), |_| false);
        let mut late: Vec<Duration> = judged.iter().map(|sample| sample.late).collect();
        late.sort_unstable();
        let late = late.get(late.len() * 99 / 100).copied().unwrap_or_default();
        let mut failures = BTreeMap::new();
        for sample in judged.iter().filter(|sample| sample.latency.is_none()) {
            *failures.entry(sample.status.unwrap_or(0)).or_default() += 1;
        }
        let allocated = self.measured.as_secs_f64() * REPLICAS as f64 * allocation();
        Step {
            figures: StepFigures::of(
                |q| summary.quantile_ms(q),
                summary.failed as f64 / summary.samples as f64,
            ),
            samples: summary.samples,
            cpu: (after.replicas - before.replicas).as_secs_f64() / allocated,
            idle: after.idle_since(before),
            late_ms: late.as_secs_f64() * 1e3,
            failures,
        }
    }
}

/// The processes of one policy's run.
struct RampDeployment {
    envoys: Vec<Envoy>,
    _agents: Vec<Agent>,
    machines: Machines,
}

impl RampDeployment {
    fn start(policy: Policy, courses: Vec<Course>, seed: u64) -> Result<Self> {
        let machines = Machines::start(courses, seed)?;
        let agents = start_agents(&machines.addresses(), &policy.agent_args())?;
        let addresses: Vec<_> = agents.iter().map(Agent::addr).collect();
        let envoys = start_envoys(vec![policy.envoy(&addresses)?.concurrency(1)])?;
        Ok(Self { envoys, _agents: agents, machines })
    }

    /// Fails if an Envoy has ended, because its absence would look like a failure of the policy.
    fn check(&self) -> Result<()> {
        self.envoys.iter().try_for_each(|envoy| {
            let ready = envoy.admin_get("/ready");
            ready.map(drop).with_context(|| format!("Envoy has ended; its log:\n{}", envoy.log()))
        })
    }

    fn load(&self, load: f64, length: Duration, seed: u64) -> LoadRun {
        LoadRun::start(Plan {
            targets: self.envoys.iter().map(Envoy::addr).collect(),
            spread: Spread::InTurn,
            arrivals: Arrivals::Poisson(rate(load).round() as u32),
            length,
            body: Bytes::new(),
            keys: None,
            seed,
        })
    }
}

/// Counters at one instant.
struct CpuReading {
    replicas: Duration,
    idle: u64,
    all: u64,
}

impl CpuReading {
    fn read(machines: &Machines) -> Result<Self> {
        let stat = std::fs::read_to_string("/proc/stat")?;
        let (idle, all) = idle_of(&stat).context("reading the first line of /proc/stat")?;
        Ok(Self { replicas: machines.replica_cpu()?, idle, all })
    }

    fn idle_since(&self, before: &Self) -> f64 {
        (self.idle - before.idle) as f64 / (self.all - before.all).max(1) as f64
    }
}

/// Idle and total clock ticks of all cores, from the text of `/proc/stat`. Processes of low priority (`nice`) make way,
/// so their time counts as idle.
fn idle_of(stat: &str) -> Option<(u64, u64)> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
    // user, nice, system, idle, iowait, irq, softirq, steal; guest time, which follows, is part of user.
    let ticks: Vec<u64> = fields.take(8).map(|field| field.parse().ok()).collect::<Option<_>>()?;
    Some((ticks.get(1)? + ticks.get(3)? + ticks.get(4)?, ticks.iter().sum()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_priority_and_waiting_for_a_disk_are_idle_and_guests_count_once() {
        let stat = "cpu  100 10 50 700 40 5 15 80 90 9\ncpu0 1 2 3 4 5 6 7 8 9 10\n";
        assert_eq!(idle_of(stat), Some((750, 1000)));
        assert_eq!(idle_of("cpu  1 2 x\n"), None);
    }

    #[test]
    fn steps_follow_each_other_after_the_warm_up() {
        let ramp = Ramp { loads: vec![0.75, 1.0], measured: Duration::from_secs(10) };
        assert_eq!([ramp.from(0), ramp.from(1)].map(|at| at.as_secs()), [10, 22]);
        assert!(ramp.length() >= ramp.from(1) + ramp.measured);
    }
}
