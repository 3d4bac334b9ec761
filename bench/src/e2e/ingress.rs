//! The demo's scenario, long enough to be judged: two slow replicas among many.
//!
//! 16 replicas, each behind its agent; 14 answer in 50 ms and 2 in 800 ms; 500 requests a second at a constant rate,
//! through one Envoy or spread evenly over four.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

use super::{FIRST, Topologies, draw};
use crate::arm::Arm;
use crate::backends::{Change, Fleet, ReplicaSpec, Service};
use crate::comparison::Comparison;
use crate::deployment::ReplicaEvent;
use crate::goals::{Goals, above_round_robin_median, worst};
use crate::passes::Length;
use crate::plot::Panel;
use crate::recovery::Watch;
use crate::scenario::{Goal, Load, Marked, Scenario, topology_label};
use crate::stats::min_max;
use crate::table::ms;

const FAST: u16 = 14;
const SLOW: u16 = 2;
const FAST_MS: u64 = 50;
/// Maximum excess of Prequal's p99 over round robin's median.
const P99_MARGIN_MS: f64 = 5.0;
/// Desired maximum excess of Prequal's p99.9 over round robin's median (an aim, not a goal).
const P999_AIM_MS: f64 = 10.0;
/// Each baseline's p99.9 must be at least this many times Prequal's.
const P999_FACTOR: f64 = 5.0;
/// Maximum of Prequal's Envoy CPU per request, relative to round robin's.
const CPU_FACTOR: f64 = 1.5;

/// Arguments of `e2e ingress`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Ingress {
    #[command(flatten)]
    length: Length,
    /// Length of the one long Prequal run, seconds; 0 skips it
    #[arg(long, default_value_t = 300)]
    steady_seconds: u64,
    /// Number of Envoys that share the load
    #[arg(long, default_value = "both")]
    envoys: Topologies,
}

/// A run of `seconds` after [`FIRST`], without goals.
pub(crate) fn scenario(seconds: Duration) -> Scenario {
    let sleeping = ReplicaSpec::sleeping;
    Scenario {
        name: "ingress".to_owned(),
        title: "14 replicas at 50 ms and 2 at 800 ms, 500 requests/s".to_owned(),
        fleet: Fleet::of(usize::from(FAST), sleeping(FAST_MS)).and(usize::from(SLOW), sleeping(800)),
        load: Load::constant(500),
        workers: 1,
        arms: Arm::USUAL.to_vec(),
        judged: FIRST..FIRST + seconds,
        schedule: Vec::new(),
        streams: 0,
        good_within: Duration::from_millis(500),
        marked: Some(Marked { replicas: FAST..FAST + SLOW, label: "the slow pair" }),
        watch: None,
        goals: Vec::new(),
    }
}

/// Maximum share of the slow pair.
fn slow_share(envoys: usize) -> Goal {
    Goal::MarkedShare(if envoys == 1 { 0.001 } else { 0.003 })
}

/// One of the slow pair becomes fast after 15 s; Prequal only.
fn healing() -> Scenario {
    let seconds = Duration::from_secs(15);
    let healed = FIRST + seconds;
    let fast = Change::Service(Service::Sleep { ms: FAST_MS });
    Scenario {
        name: "ingress, slow replica made fast".to_owned(),
        arms: vec![Arm::Prequal],
        schedule: vec![(healed, ReplicaEvent::Backend(FAST, fast))],
        // The same goal as in `sinkhole.rs`. Trials find the healed replica. At this rate, one request in 4000 is a
        // trial of a replica that looks far slower, and the two slow replicas share these trials.
        watch: Some(Watch { replica: FAST, within: Duration::from_secs(10), part: 0.5 }),
        goals: vec![Goal::Back, Goal::NoneFailed],
        ..scenario(seconds)
    }
}

/// Runs everything; the exit code says whether every goal was reached.
pub(super) async fn run(ingress: &Ingress) -> Result<ExitCode> {
    let topologies = ingress.envoys.list();
    let length = &ingress.length;
    let scenario = scenario(length.seconds(60));
    let scenario = Scenario { arms: length.named(&scenario.name, &scenario.arms, Arm::label)?, ..scenario };
    let mut comparison = Comparison::run(scenario, length.passes(3), topologies).await?;
    let steady = match ingress.steady_seconds {
        0 => None,
        seconds => Some(steady(Duration::from_secs(seconds), topologies[0]).await?),
    };
    let healing = Comparison::run(healing(), 1, topologies).await?;

    println!();
    let mut goals = Goals::default();
    for envoys in topologies {
        println!("{}", comparison.tables(*envoys));
        comparison.scenario.goals = vec![
            Goal::P99AboveRoundRobinMedian(P99_MARGIN_MS),
            Goal::P999BelowBaselines(P999_FACTOR),
            slow_share(*envoys),
            Goal::NoneFailed,
            Goal::CpuOfRoundRobin(CPU_FACTOR),
        ];
        goals.judge(&comparison, *envoys);
        let p999 = worst(above_round_robin_median(&comparison, *envoys, 0.999));
        let aim = if p999 <= P999_AIM_MS { "met" } else { "not met" };
        let place = topology_label(*envoys);
        println!(
            "{place}: p99.9 above round robin's median by {} ms (aim: {P999_AIM_MS} ms, {aim})\n",
            ms(p999)
        );
    }
    if let Some(mut steady) = steady {
        println!("{}", steady.tables(topologies[0]));
        // No round robin runs beside a steady run, so use the lowest of round robin's medians over the passes.
        let medians = comparison.of(Arm::RoundRobin, topologies[0]).map(|run| run.judged.quantile_ms(0.5));
        steady.scenario.goals.push(Goal::P99(min_max(medians).0 + P99_MARGIN_MS));
        goals.judge(&steady, topologies[0]);
    }
    for envoys in topologies {
        goals.judge(&healing, *envoys);
    }
    let panels: Vec<Panel> = topologies.iter().map(|envoys| comparison.panel(*envoys)).collect();
    draw(&length.out.join("ingress.svg"), "ingress", &panels)?;
    Ok(goals.print())
}

/// One long run of Prequal.
async fn steady(seconds: Duration, envoys: usize) -> Result<Comparison> {
    let scenario = Scenario {
        name: "ingress, steady".to_owned(),
        arms: vec![Arm::Prequal],
        goals: vec![slow_share(envoys), Goal::NoneFailed],
        ..scenario(seconds)
    };
    Comparison::run(scenario, 1, &[envoys]).await
}
