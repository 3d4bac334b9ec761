//! `sidecars`: compares many Envoys that each send few requests with one Envoy that sends them all. Also measures what
//! the many Envoys cost when idle.
//!
//! Each of many Envoys gets few responses, so its reports are old unless probes bring new ones. The goals limit both
//! the cost of old reports in the tail and the number of messages that fresh reports take.

mod fleet;
mod rest;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

use crate::arm::Arm;
use crate::comparison::Comparison;
use crate::deployment::Deployment;
use crate::e2e;
use crate::goals::Goals;
use crate::passes::{self, Length};
use crate::scenario::{Measured, Scenario, topology_label};
use crate::stats::median;
use crate::table::{self, one, percent, spread, two};

use fleet::Shape;

/// Goal for the 99th percentile of Prequal through many Envoys, relative to its own through one.
const TAIL: f64 = 1.2;
/// Goal for the messages that Prequal adds to a request.
const MESSAGES: f64 = 0.35;

/// Arguments of `sidecars`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Sidecars {
    /// Number of Envoys, each with one worker
    #[arg(long, default_value_t = 32, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(2..=100))]
    envoys: u16,
    /// Number of replicas, each with one slot and an agent
    #[arg(long, default_value_t = 32, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(4..=100))]
    replicas: u16,
    /// Requests per second of each Envoy; service times are chosen for a load of 70 %
    #[arg(long, default_value_t = 5.0, value_name = "RATE")]
    per_envoy: f64,
    /// Measured seconds at rest [default: as --seconds]
    #[arg(long, value_parser = clap::value_parser!(u64).range(4..))]
    rest_seconds: Option<u64>,
    /// Only this part
    #[arg(long)]
    only: Option<SidecarsPart>,
    #[command(flatten)]
    length: Length,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum SidecarsPart {
    /// Load on identical replicas
    Equal,
    /// Load on a fleet in which a quarter of the replicas take four times as long
    QuarterSlow,
    /// No load
    Rest,
}

impl Sidecars {
    fn wanted(&self, part: SidecarsPart) -> bool {
        self.only.is_none_or(|only| only == part)
    }

    fn shape(&self) -> Shape {
        Shape { envoys: self.envoys, replicas: self.replicas, per_envoy: self.per_envoy }
    }

    /// The fleets under load.
    fn scenarios(&self) -> Result<Vec<Scenario>> {
        let shape = self.shape();
        let seconds = self.length.seconds(60);
        let mut scenarios = Vec::new();
        if self.wanted(SidecarsPart::Equal) {
            scenarios.push(fleet::equal(shape, seconds)?);
        }
        if self.wanted(SidecarsPart::QuarterSlow) {
            scenarios.push(fleet::quarter_slow(shape, seconds)?);
        }
        self.length.choose(scenarios)
    }
}

/// Figures of a run in addition to those that every run records.
struct ExtraFigures {
    arm: Arm,
    envoys: usize,
    /// Probes among the messages that the agents got.
    probe_share: f64,
    /// The agents' CPU time per message.
    agent_us: f64,
    /// Resident memory of an Envoy.
    resident_mib: f64,
}

/// Runs every part; the exit code says whether every goal was reached.
pub(crate) async fn run(sidecars: &Sidecars) -> Result<ExitCode> {
    let scenarios = sidecars.scenarios()?;
    let many = usize::from(sidecars.envoys);
    let passes = sidecars.length.passes(3);
    let (mut goals, mut panels) = (Goals::default(), Vec::new());
    for scenario in &scenarios {
        let (comparison, used) = compare(scenario.clone(), many, passes).await?;
        println!();
        for envoys in [many, 1] {
            println!("{}", comparison.tables(envoys));
            panels.push(comparison.panel(envoys));
        }
        println!("{}", summary(&comparison, &used, many));
        judge(&comparison, many, &mut goals);
    }
    if !panels.is_empty() {
        e2e::draw(&sidecars.length.out.join("sidecars.svg"), "Many Envoys against one", &panels)?;
    }
    if sidecars.wanted(SidecarsPart::Rest) {
        let seconds = sidecars.rest_seconds.map_or_else(|| sidecars.length.seconds(60), Duration::from_secs);
        rest::run(&fleet::equal(sidecars.shape(), seconds)?, many, seconds, &mut goals).await?;
    }
    Ok(goals.print())
}

/// Runs every arm once per pass through many Envoys and through one.
async fn compare(scenario: Scenario, many: usize, passes: usize) -> Result<(Comparison, Vec<ExtraFigures>)> {
    println!("{}", scenario.title);
    let arms = scenario.arms.clone();
    let total = passes * 2 * arms.len();
    let mut comparison = Comparison { scenario, runs: Vec::new() };
    let mut used = Vec::new();
    for pass in 0..passes {
        for envoys in passes::order(2, pass).map(|index| [many, 1][index]) {
            for arm in passes::order(arms.len(), pass).map(|index| arms[index]) {
                let step = format!("[{}/{total}]", comparison.runs.len() + 1);
                // All arms of a pass get the same requests, and so do both topologies.
                let seed = pass as u64 + 1;
                let run = run_cold(&comparison.scenario, arm, envoys, seed, &step).await;
                let (run, resources) =
                    run.with_context(|| format!("{}, {}, pass {seed}", arm.label(), topology_label(envoys)))?;
                println!(
                    "  p50 {:.1} ms, p99 {:.1}, {} failed, {:.0} MiB per Envoy",
                    run.judged.quantile_ms(0.5),
                    run.judged.quantile_ms(0.99),
                    run.failed(),
                    resources.resident_mib,
                );
                comparison.runs.push(run);
                used.push(resources);
            }
        }
    }
    Ok((comparison, used))
}

/// Starts a deployment cold, runs the load on it, and takes it down.
async fn run_cold(
    scenario: &Scenario,
    arm: Arm,
    envoys: usize,
    seed: u64,
    step: &str,
) -> Result<(Measured, ExtraFigures)> {
    let started = Instant::now();
    let deployment = Deployment::start(arm, envoys, scenario.workers(envoys), &scenario.fleet).await?;
    println!(
        "{step} {}, {}: started in {:.1} s",
        arm.label(),
        topology_label(envoys),
        started.elapsed().as_secs_f64()
    );
    let outcome = measure(scenario, &deployment, arm, seed, step).await;
    deployment.stop().await;
    outcome
}

async fn measure(
    scenario: &Scenario,
    deployment: &Deployment,
    arm: Arm,
    seed: u64,
    step: &str,
) -> Result<(Measured, ExtraFigures)> {
    let work = || tokio::task::block_in_place(|| deployment.agents_work());
    let before = work()?;
    let measured = scenario.run_on(deployment, arm, seed, step).await?;
    let agents = work()?.since(before);
    let messages = agents.probes + agents.requests;
    let used = ExtraFigures {
        arm,
        envoys: deployment.envoys(),
        probe_share: agents.probes / messages,
        agent_us: agents.cpu.as_secs_f64() * 1e6 / messages,
        resident_mib: deployment.envoy_resident_kib()? / 1024.0,
    };
    Ok((measured, used))
}

/// Median over the passes of a quantile of one arm.
fn quantile_ms(comparison: &Comparison, arm: Arm, envoys: usize, q: f64) -> f64 {
    median(comparison.of(arm, envoys).map(|run| run.judged.quantile_ms(q)))
}

/// Ratio of an arm's quantile through many Envoys to its quantile through one.
fn of_one(comparison: &Comparison, arm: Arm, many: usize, q: f64) -> f64 {
    quantile_ms(comparison, arm, many, q) / quantile_ms(comparison, arm, 1, q)
}

/// The table that compares both topologies.
fn summary(comparison: &Comparison, used: &[ExtraFigures], many: usize) -> String {
    let mut rows = Vec::new();
    for envoys in [many, 1] {
        for arm in &comparison.scenario.arms {
            let of = |value: fn(&ExtraFigures) -> f64| -> Vec<f64> {
                used.iter().filter(|used| used.arm == *arm && used.envoys == envoys).map(value).collect()
            };
            let cpu: Vec<f64> = comparison.of(*arm, envoys).map(|run| run.envoy_us).collect();
            let extra: Vec<f64> =
                comparison.of(*arm, envoys).map(|run| run.probes_per_query.unwrap_or(0.0)).collect();
            let times = |q| if envoys == 1 { f64::NAN } else { of_one(comparison, *arm, many, q) };
            rows.push(vec![
                format!("{}, {}", arm.label(), topology_label(envoys)),
                two(times(0.5)),
                two(times(0.99)),
                two(times(0.999)),
                spread(&extra, two),
                spread(&of(|used| used.probe_share), percent),
                spread(&of(|used| used.agent_us), one),
                spread(&cpu, one),
                spread(&of(|used| used.resident_mib), one),
            ]);
        }
    }
    let header = [
        "policy",
        "p50 × one",
        "p99 × one",
        "p99.9 × one",
        "extra messages/req",
        "probes, of agents' messages",
        "agent µs/message",
        "Envoy µs/req",
        "Envoy MiB",
    ];
    table::render(&header, &rows) + "\n× one: relative to the same policy through one Envoy.\n"
}

/// Adds the verdicts on one fleet.
fn judge(comparison: &Comparison, many: usize, goals: &mut Goals) {
    if comparison.scenario.arms.contains(&Arm::Prequal) {
        let name = &comparison.scenario.name;
        let times = of_one(comparison, Arm::Prequal, many, 0.99);
        goals.add(
            times <= TAIL,
            format!(
                "{name}: p99 through {} {} times that through one (at most {TAIL})",
                topology_label(many),
                two(times)
            ),
        );
        let messages =
            median(comparison.of(Arm::Prequal, many).map(|run| run.probes_per_query.unwrap_or(f64::NAN)));
        goals.add(
            messages <= MESSAGES,
            format!("{name}: {} extra messages a request (at most {MESSAGES})", two(messages)),
        );
    }
    for envoys in [many, 1] {
        goals.judge(comparison, envoys);
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::stats::{Sample, Summary};

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        sidecars: Sidecars,
    }

    fn parsed(line: &str) -> Result<Sidecars, String> {
        let line = CommandLine::try_parse_from(std::iter::once("sidecars").chain(line.split_whitespace()));
        line.map(|line| line.sidecars).map_err(|error| error.to_string())
    }

    /// A run of Prequal in which every request took `ms`.
    fn run(envoys: usize, ms: u64, probes: f64) -> Measured {
        let sample = Sample { latency: Some(Duration::from_millis(ms)), ..Sample::default() };
        Measured {
            arm: Arm::Prequal,
            envoys,
            before: Summary::default(),
            judged: Summary::of(&[sample; 100], |_| false),
            after: Summary::default(),
            per_second: 100.0,
            probes_per_query: Some(probes),
            ejections: Some(0),
            envoy_us: 300.0,
            generator_cpu: 0.1,
            late: (Duration::ZERO, Duration::ZERO),
            recovery: None,
        }
    }

    #[test]
    fn many_envoys_are_compared_with_one() {
        let scenario = parsed("--arms prequal --only equal").unwrap().scenarios().unwrap().remove(0);
        let comparison = Comparison { scenario, runs: vec![run(32, 130, 0.7), run(1, 100, 0.1)] };
        assert!((of_one(&comparison, Arm::Prequal, 32, 0.99) - 1.3).abs() < 1e-9);
        let used = |envoys| ExtraFigures {
            arm: Arm::Prequal,
            envoys,
            probe_share: 0.4,
            agent_us: 100.0,
            resident_mib: 110.0,
        };
        let table = summary(&comparison, &[used(32), used(1)], 32);
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[2].starts_with("prequal, 32 Envoys") && lines[2].contains("1.30"), "{table}");
        assert!(lines[3].starts_with("prequal, one Envoy") && lines[3].contains('–'), "{table}");
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert!(parsed("--envoys 1").unwrap_err().contains("2..=100"));
        assert!(parsed("--replicas 2").unwrap_err().contains("4..=100"));
    }
}
