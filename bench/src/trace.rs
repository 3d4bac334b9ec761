//! Replays a trace of a real inference service against replicas with continuous batching, under Envoy's policies and
//! ours.
//!
//! Arrivals and sizes are real (`trace/dataset.rs`); sessions are drawn, and service times come from a model of an
//! engine (`backends/engine.rs`). To measure enough requests, everything in the trace and in the engine runs
//! [`FAST_FORWARD`] times as fast as in reality. Envoy, the agents, probes and this machine's network run at their own
//! speed, so their times weigh more. In addition, a *speed-up* shortens the gaps between the arrivals, and so
//! multiplies the load.
//!
//! All policies of a pass get the same requests. Each pass replays the next part of the trace, and quantiles are taken
//! over the requests of all passes. This file has the runs; `trace/policy.rs` compares them.

mod dataset;
mod figures;
mod policy;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::arm::Arm;
use crate::backends::{Answers, EngineSpec, Fleet, ReplicaSpec, Service};
use crate::deployment::Deployment;
use crate::e2e::draw;
use crate::goals::Goals;
use crate::load::{Due, LoadRun};
use crate::passes::{self, Length};
use crate::scenario::{lateness, report_progress};
use crate::stats::Sample;
use crate::table::{ms, percent};
use dataset::{SESSIONS, Trace};
use figures::{Slo, TokenFigures};
use policy::{MeasuredReplay, PolicyFigures, judge, panel, table};

const REPLICAS: usize = 12;
/// How many times as fast as in reality the trace is replayed and the engines work.
const FAST_FORWARD: f64 = 4.0;
/// At real speed, these limits are 2 s and 200 ms. They are our choice: an idle engine needs 0.24 s for the trace's
/// median context and 1.2 s for its longest.
const SLO: Slo = Slo { first_token: Duration::from_millis(500), per_token: Duration::from_millis(50) };
/// Where the first pass begins: the trace's first three minutes are nearly idle.
const BEGIN: Duration = Duration::from_secs(180);
/// Excluded at the start of every run: caches fill, and Prequal finds its replicas.
const FIRST: Duration = Duration::from_secs(10);
/// Length of the part whose load is shown as the busiest.
const BUSIEST: Duration = Duration::from_secs(2);

const ARMS: [Arm; 8] = [
    Arm::RoundRobin,
    Arm::LeastRequest,
    Arm::FullScan,
    Arm::RingHash,
    Arm::Prequal,
    Arm::Inference,
    // The profile's default: 3 probes per request, of 12 replicas.
    Arm::InferenceHinted(3),
    Arm::InferenceHinted(8),
];

/// A trace of a real inference service against engines with continuous batching: time to first token, time per token.
#[derive(Args)]
pub(crate) struct Replay {
    /// Load relative to the trace's, comma-separated [default: 1,2,4; with --quick 2]
    #[arg(long, value_delimiter = ',', value_name = "TIMES")]
    speedup: Vec<f64>,
    /// Makes the first replica this many times as slow as the others
    #[arg(long, default_value_t = 1.0, value_name = "TIMES")]
    slow: f64,
    /// How the replicas stream their answers
    #[arg(long, value_enum, default_value_t = Answers::EventStream)]
    answers: Answers,
    #[command(flatten)]
    length: Length,
}

impl Replay {
    fn speedups(&self) -> Result<Vec<f64>> {
        let speedups = match (self.speedup.as_slice(), self.length.quick) {
            ([], false) => vec![1.0, 2.0, 4.0],
            ([], true) => vec![2.0],
            (chosen, _) => chosen.to_vec(),
        };
        if let Some(times) = speedups.iter().find(|times| !(0.1..=20.0).contains(*times)) {
            bail!("--speedup must be from 0.1 to 20, not {times}");
        }
        Ok(speedups)
    }

    fn fleet(&self, engine: EngineSpec) -> Result<Fleet> {
        ensure!((1.0..=100.0).contains(&self.slow), "--slow must be from 1 to 100, not {}", self.slow);
        let replica = |engine| ReplicaSpec::new(Service::Inference { engine, answers: self.answers });
        Ok(Fleet::of(1, replica(engine.faster(self.slow.recip()))).and(REPLICAS - 1, replica(engine)))
    }
}

/// Replays, prints and judges; the exit code says whether every goal was reached.
pub(crate) async fn run(args: &Replay) -> Result<ExitCode> {
    let arms = args.length.named("trace", &ARMS, Arm::label)?;
    let speedups = args.speedups()?;
    let length = FIRST + args.length.seconds(60);
    let passes = args.length.passes(3);

    let trace = Trace::read()?;
    let engine = EngineSpec::LLAMA2_70B.faster(FAST_FORWARD);
    let fleet = args.fleet(engine)?;
    println!("{}", describe());
    let (mut goals, mut panels) = (Goals::default(), Vec::new());
    for times in speedups {
        let mut runs = Vec::new();
        for pass in 0..passes {
            let covered = length.mul_f64(times * FAST_FORWARD);
            let window = BEGIN + covered * pass as u32..BEGIN + covered * (pass as u32 + 1);
            let requests = trace.part(&window, times * FAST_FORWARD);
            let (mean, busiest) = dataset::load(&requests, engine, REPLICAS, length, BUSIEST);
            println!(
                "Speed-up {times}, pass {} of {passes}: {} requests, minutes {:.1} to {:.1} of the trace, load {:.0} % (busiest {} s {:.0} %)",
                pass + 1,
                requests.len(),
                window.start.as_secs_f64() / 60.0,
                window.end.as_secs_f64() / 60.0,
                mean * 100.0,
                BUSIEST.as_secs(),
                busiest * 100.0,
            );
            for arm in passes::order(arms.len(), pass).map(|index| arms[index]) {
                let run = replay(arm, &fleet, requests.clone(), length).await;
                runs.push(run.with_context(|| format!("speed-up {times}, {}", arm.label()))?);
            }
        }
        let policies: Vec<PolicyFigures> =
            arms.iter().map(|arm| PolicyFigures::of(*arm, &runs, SLO)).collect();
        println!("\nSpeed-up {times}, all passes, judged part:\n\n{}", table(&policies));
        judge(&policies, &format!("speed-up {times}"), &mut goals);
        panels.push(panel(&policies, format!("time to first token, speed-up {times}, {REPLICAS} replicas")));
    }
    draw(&args.length.out.join("trace.svg"), "time to first token", &panels)?;
    Ok(goals.print())
}

/// Fleet and limits in words.
fn describe() -> String {
    let real = EngineSpec::LLAMA2_70B;
    format!(
        "{REPLICAS} replicas; everything runs {FAST_FORWARD} times as fast as this: iteration {:.0} ms + {:.2} ms per \
         sequence, prefill {:.2} ms per token, KV cache {} tokens, {:.0} % of a cached context shared.\n\
         {} sessions drawn by Zipf's law (exponent {}): the trace has none. Good: first token within {} ms, {} ms per token.\n",
        real.step_us / 1e3,
        real.sequence_us / 1e3,
        real.prefill_us / 1e3,
        real.kv_tokens,
        real.shared * 100.0,
        SESSIONS.count,
        SESSIONS.exponent,
        SLO.first_token.as_millis(),
        SLO.per_token.as_millis(),
    )
}

/// Starts a deployment cold, replays `requests` on it, and takes it down.
async fn replay(arm: Arm, fleet: &Fleet, requests: Vec<Due>, length: Duration) -> Result<MeasuredReplay> {
    let deployment = Deployment::start(arm, 1, 1, fleet).await?;
    let run = LoadRun::replay(deployment.targets(), requests);
    let progress = report_progress(run.progress.clone(), run.start, length, format!("  {}", arm.label()));
    let progress = tokio::spawn(progress);
    let mut samples = run.finish().await;
    progress.abort();
    let counted = deployment.counted();
    deployment.stop().await;
    let counted = counted?;
    let probes = counted.probes as f64 / samples.len() as f64;
    let late = lateness(&samples).0;
    samples.retain(|sample| sample.due >= FIRST);
    let ours = arm.is_prequal();
    let run = MeasuredReplay {
        arm,
        samples,
        probes_per_query: ours.then_some(probes),
        ejections: ours.then_some(counted.ejections),
        late,
    };
    let figures = TokenFigures::of(run.samples.iter(), SLO);
    println!(
        "  {}: first token p50 {} ms, p99 {} ms, good {}, {} failed{}",
        arm.label(),
        ms(figures.first_token.quantile_ms(0.5)),
        ms(figures.first_token.quantile_ms(0.99)),
        percent(figures.good),
        figures.whole.failed,
        failures(&run.samples),
    );
    Ok(run)
}

/// The failed requests by status, in parentheses; empty if there are none.
fn failures(samples: &[Sample]) -> String {
    let mut by_status: BTreeMap<String, usize> = BTreeMap::new();
    for sample in samples.iter().filter(|sample| sample.latency.is_none()) {
        let status =
            sample.status.map_or_else(|| "no complete answer".to_owned(), |status| status.to_string());
        let whose = if sample.replica.is_some() { " of a replica" } else { "" };
        *by_status.entry(status + whose).or_default() += 1;
    }
    let shown: Vec<String> = by_status.iter().map(|(status, number)| format!("{number} {status}")).collect();
    if shown.is_empty() { String::new() } else { format!(" ({})", shown.join(", ")) }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        replay: Replay,
    }

    #[test]
    fn the_first_replica_alone_can_be_made_slow() {
        let fleet = |slow| {
            let fleet =
                CommandLine::parse_from(["trace", "--slow", slow]).replay.fleet(EngineSpec::LLAMA2_70B)?;
            let step_us = |replica: &ReplicaSpec| match replica.service {
                Service::Inference { engine, .. } => engine.step_us.round(),
                _ => f64::NAN,
            };
            anyhow::Ok(fleet.0.iter().map(step_us).collect::<Vec<_>>())
        };
        let slow = fleet("3").unwrap();
        assert_eq!((slow.len(), slow[0], slow[1], slow[11]), (REPLICAS, 111_000.0, 37_000.0, 37_000.0));
        assert!(fleet("0.5").unwrap_err().to_string().contains("--slow must be from 1 to 100"));
    }
}
