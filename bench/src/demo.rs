//! `demo`: Prequal against Envoy's own policies in a few minutes, with a table, a plot and a verdict.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;

use crate::arm::Arm;
use crate::comparison::Comparison;
use crate::deployment::Deployment;
use crate::e2e;
use crate::plot::Panel;
use crate::scenario::topology_label;
use crate::table::ms;

/// Tails that differ by no more than this count as equal: timers and schedulers account for the difference.
const SAME_MS: f64 = 1.0;

/// Arguments of `demo`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Demo {
    /// One Envoy only and 10 s measured per policy instead of 20: about a minute
    #[arg(long)]
    quick: bool,
    /// Keep the Prequal deployment running afterwards, under load, until Ctrl-C
    #[arg(long)]
    keep: bool,
    /// Folder for the plot
    #[arg(long, default_value = "target/demo", value_name = "DIR")]
    out: PathBuf,
}

/// Runs the demo; the exit code says whether Prequal won.
pub(crate) async fn run(demo: &Demo) -> Result<ExitCode> {
    let begin = Instant::now();
    let (topologies, seconds): (&[usize], u64) = if demo.quick { (&[1], 10) } else { (&[1, 4], 20) };
    let scenario = e2e::ingress(Duration::from_secs(seconds));
    println!(
        "16 replicas, each behind its agent, and Envoys that share them; open loop.\n\
         {} runs of {} s, {seconds} s of them measured; every process restarted before each.",
        topologies.len() * scenario.arms.len(),
        scenario.judged.end.as_secs(),
    );
    let comparison = Comparison::run(scenario, 1, topologies).await?;
    println!();
    for envoys in topologies {
        println!("{}", comparison.tables(*envoys));
    }
    if demo.quick {
        println!("Quick run: {seconds} s measured per policy, so p99.9 is based on a few requests only.");
    }
    let plot = demo.out.join(if demo.quick { "ingress-quick.svg" } else { "ingress.svg" });
    let panels: Vec<Panel> = topologies.iter().map(|envoys| comparison.panel(*envoys)).collect();
    e2e::draw(&plot, "Prequal against Envoy's own policies", &panels)?;
    println!("Took {:.0} s.", begin.elapsed().as_secs_f64());

    let losses = losses(&comparison, topologies);
    if losses.is_empty() {
        println!(
            "Prequal won: no request failed, and none of Envoy's own policies had a better p99 or p99.9."
        );
    }
    for loss in &losses {
        println!("Prequal did not win: {loss}");
    }
    if demo.keep {
        keep().await?;
    }
    Ok(if losses.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// All reasons why Prequal did not win.
///
/// A baseline may equal Prequal's p99 within [`SAME_MS`]: a full scan sends almost exactly 1 % to the slow pair, so its
/// p99 may be a fast request or a slow one. At p99.9 Prequal has to be better.
fn losses(comparison: &Comparison, topologies: &[usize]) -> Vec<String> {
    let mut losses = Vec::new();
    for envoys in topologies {
        for prequal in comparison.of(Arm::Prequal, *envoys) {
            let place = topology_label(*envoys);
            let failed = prequal.failed();
            if failed > 0 {
                losses.push(format!("{failed} of its requests failed ({place})"));
            }
            for arm in Arm::BASELINES {
                for baseline in comparison.of(arm, *envoys) {
                    for (name, q, margin) in [("p99", 0.99, -SAME_MS), ("p99.9", 0.999, SAME_MS)] {
                        let (ours, theirs) = (prequal.judged.quantile_ms(q), baseline.judged.quantile_ms(q));
                        // NaN compares false and so counts as lost.
                        let won = ours + margin <= theirs;
                        if !won {
                            let (ours, theirs) = (ms(ours), ms(theirs));
                            losses.push(format!("{name} {ours} ms, {} {theirs} ms ({place})", arm.label()));
                        }
                    }
                }
            }
        }
    }
    losses
}

/// Runs a fresh Prequal deployment under the demo's load until Ctrl-C.
async fn keep() -> Result<()> {
    // Samples are kept until a run ends, so each run is bounded.
    let scenario = e2e::ingress(Duration::from_secs(60));
    let deployment = Deployment::start(Arm::Prequal, 1, scenario.workers(1), &scenario.fleet).await?;
    let listener = deployment.targets()[0];
    println!("\nLeft running, under the same load. Ctrl-C ends it.");
    println!("  requests: curl -i http://{listener}/");
    println!("  metrics:  curl -s http://{}/stats/prometheus | grep prequal", deployment.admin(0));
    let interrupted = tokio::signal::ctrl_c();
    tokio::pin!(interrupted);
    loop {
        let load = scenario.start_load(&deployment, scenario.judged.end, 0);
        tokio::select! {
            _ = load.finish() => {}
            _ = &mut interrupted => break,
        }
    }
    deployment.stop().await;
    Ok(())
}
