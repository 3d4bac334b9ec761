//! The end-to-end scenarios that are judged. Each file defines a scenario, or a family of them, and its goals.

mod affinity;
mod cpu_bound;
mod ingress;
mod never_worse;
mod peers;
mod rules;
mod sinkhole;
mod slow_half;
mod stall;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Subcommand, ValueEnum};

use crate::comparison::Comparison;
use crate::goals::Goals;
use crate::passes::Length;
use crate::plot::{self, Panel};
use crate::scenario::{Load, Scenario};

pub(crate) use ingress::scenario as ingress;
pub(crate) use never_worse::equal;
pub(crate) use peers::{Peers, run as peers};
#[cfg(test)]
pub(crate) use stall::scenario as stall;

/// Excluded at the start of a run without a fault: a policy is still learning which replicas are slow.
pub(crate) const FIRST: Duration = Duration::from_secs(2);

#[derive(Subcommand)]
pub(crate) enum EndToEnd {
    /// The demo's scenario, long: 14 replicas answer in 50 ms, 2 in 800 ms
    Ingress(ingress::Ingress),
    /// One of 11 replicas takes 2 s for half of the run, then heals
    Stall(Length),
    /// One of 10 replicas fails fast: it rejects a share of its requests, rejects all, or refuses connections
    Sinkhole(sinkhole::Sinkhole),
    /// Half of 40 replicas take five times as long, and all have little room for waiting requests
    SlowHalf(Length),
    /// Four replicas that use up the CPU, in a closed loop: the filter's cost in throughput
    CpuBound(Length),
    /// Eight replicas with a cache each: hit rate and tail against ring hash
    Affinity(Length),
    /// Every selection rule through the same filter, in the scenarios `ingress` and `stall`
    Rules(Length),
    /// 16 identical replicas at 80 % load, exponential times: never worse than the best of Envoy's own policies
    Equal(never_worse::RunArgs),
    /// 10 identical replicas at 90 % load, exponential times: p99 a fifth below the best of Envoy's own policies
    #[command(name = "equal-90")]
    Equal90(never_worse::RunArgs),
    /// 8 replicas at 70 % load, one request in ten takes twenty times as long: never worse
    Mix(never_worse::RunArgs),
    /// 8 replicas, and 8 half as fast, at 80 % load: never worse
    Generations(never_worse::RunArgs),
    /// 14 replicas with 4 slots and 2 with one: never worse
    Queue(never_worse::RunArgs),
    /// 12 replicas at 90 % load, all requests identical: never worse
    Constant(never_worse::RunArgs),
    /// Four idle replicas and 400 requests: every replica gets some
    Idle(never_worse::RunArgs),
    /// Any fleet, with replicas, slots, service times and load from options: never worse
    Fleet(never_worse::Any),
}

/// Number of Envoys that share the load.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Topologies {
    #[value(name = "1")]
    One,
    #[value(name = "4")]
    Four,
    Both,
}

impl Topologies {
    fn list(self) -> &'static [usize] {
        match self {
            Self::One => &[1],
            Self::Four => &[4],
            Self::Both => &[1, 4],
        }
    }
}

/// Runs one scenario; the exit code says whether every goal was reached.
pub(crate) async fn run(what: &EndToEnd) -> Result<ExitCode> {
    match what {
        EndToEnd::Ingress(ingress) => ingress::run(ingress).await,
        EndToEnd::Stall(length) => {
            compare("stall", vec![stall::scenario(length.seconds(60))], length, 3).await
        }
        EndToEnd::Sinkhole(sinkhole) => sinkhole::run(sinkhole).await,
        EndToEnd::SlowHalf(length) => {
            let scenario = slow_half::scenario(length.seconds(60));
            compare("slow-half", vec![scenario], length, 3).await
        }
        EndToEnd::CpuBound(length) => {
            let scenarios = cpu_bound::scenarios(length.seconds(20));
            compare("cpu-bound", scenarios, length, 5).await
        }
        EndToEnd::Affinity(length) => {
            let scenario = affinity::scenario(length.seconds(60));
            compare("affinity", vec![scenario], length, 3).await
        }
        EndToEnd::Rules(length) => rules::run(length).await,
        EndToEnd::Equal(run) => never_worse(equal, run, 60).await,
        EndToEnd::Equal90(run) => never_worse(never_worse::equal_90, run, 60).await,
        EndToEnd::Mix(run) => never_worse(never_worse::mix, run, 60).await,
        EndToEnd::Generations(run) => never_worse(never_worse::generations, run, 60).await,
        EndToEnd::Queue(run) => never_worse(never_worse::queue, run, 60).await,
        EndToEnd::Constant(run) => never_worse(never_worse::constant, run, 60).await,
        EndToEnd::Idle(run) => never_worse(never_worse::idle, run, 20).await,
        EndToEnd::Fleet(fleet) => {
            fleet.check()?;
            never_worse(|seconds| never_worse::any(fleet, seconds), &fleet.run, 60).await
        }
    }
}

/// Runs one of the fleets without a fault in the requested topologies.
async fn never_worse(
    scenario: impl Fn(Duration) -> Scenario,
    run: &never_worse::RunArgs,
    seconds: u64,
) -> Result<ExitCode> {
    let mut scenario = Scenario { workers: run.workers, ..scenario(run.length.seconds(seconds)) };
    if let Load::Open { spread, .. } = &mut scenario.load {
        *spread = run.spread;
    }
    let (name, topologies) = (scenario.name.clone(), run.envoys.list());
    let comparisons = measure(run.length.choose(vec![scenario])?, run.length.passes(3), topologies).await?;
    report(&name, &comparisons, topologies, &run.length.out)
}

/// Runs scenarios one after the other through one Envoy, then prints tables, plot and verdicts.
async fn compare(name: &str, scenarios: Vec<Scenario>, length: &Length, passes: u64) -> Result<ExitCode> {
    let comparisons = measure(length.choose(scenarios)?, length.passes(passes), &[1]).await?;
    report(name, &comparisons, &[1], &length.out)
}

async fn measure(scenarios: Vec<Scenario>, passes: usize, topologies: &[usize]) -> Result<Vec<Comparison>> {
    let mut comparisons = Vec::new();
    for scenario in scenarios {
        comparisons.push(Comparison::run(scenario, passes, topologies).await?);
    }
    println!();
    Ok(comparisons)
}

fn report(name: &str, comparisons: &[Comparison], topologies: &[usize], out: &Path) -> Result<ExitCode> {
    let mut goals = Goals::default();
    let mut panels: Vec<Panel> = Vec::new();
    for comparison in comparisons {
        for envoys in topologies {
            println!("{}", comparison.tables(*envoys));
            goals.judge(comparison, *envoys);
            panels.push(comparison.panel(*envoys));
        }
    }
    draw(&out.join(format!("{name}.svg")), name, &panels)?;
    Ok(goals.print())
}

/// Writes a plot and prints its path.
pub(crate) fn draw(path: &Path, title: &str, panels: &[Panel]) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    plot::write(path, title, panels)?;
    println!("Plot of the first pass: {}\n", path.display());
    Ok(())
}
