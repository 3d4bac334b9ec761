//! `e2e ingress`: the demo's scenario, long enough to be judged, and a verdict for each goal.
//!
//! Ratios and differences are taken between runs of the same pass. A goal that is missed is printed
//! with what was measured and makes the exit code non-zero.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::comparison::Comparison;
use crate::deployment::Deployment;
use crate::scenario::{
    Arm, FIRST, Measured, PER_SECOND, fleet, report_progress, run_cold, start_load, topology_label,
};
use crate::stats::{Sample, median};
use crate::table::{ms, one, percent};

/// Prequal's p99 may exceed round robin's median by this much.
const P99_MARGIN_MS: f64 = 5.0;
/// Prequal's p99.9 is to exceed round robin's median by at most this much (an aim, not a goal).
const P999_AIM_MS: f64 = 10.0;
/// How many times Prequal's p99.9 has to be below each baseline's.
const P999_FACTOR: f64 = 5.0;
/// Prequal's Envoy CPU per request against round robin's.
const CPU_FACTOR: f64 = 1.5;
/// A slow replica made fast has to have its share back after this long.
const RECOVERY: Duration = Duration::from_secs(30);
/// The part of its fair share that counts as having it back.
const RECOVERED_SHARE: f64 = 0.25;

/// Arguments of `e2e ingress`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Ingress {
    /// Passes over all policies
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    passes: u64,
    /// Measured seconds per run, after the first two
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// Length of the one long Prequal run; 0 leaves it out
    #[arg(long, default_value_t = 300)]
    steady_seconds: u64,
    /// How many Envoys share the load
    #[arg(long, default_value = "both")]
    envoys: Topologies,
    /// Folder for the plot
    #[arg(long, default_value = "target/bench", value_name = "DIR")]
    out: PathBuf,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Topologies {
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

/// Runs everything; the exit code says whether every goal was reached.
pub(crate) async fn run(ingress: &Ingress) -> Result<ExitCode> {
    let topologies = ingress.envoys.list();
    let seconds = Duration::from_secs(ingress.seconds);
    let comparison = Comparison::run(ingress.passes as usize, topologies, seconds).await?;
    let steady = if ingress.steady_seconds > 0 {
        Some(
            run_cold(Arm::Prequal, topologies[0], Duration::from_secs(ingress.steady_seconds), "[steady]")
                .await?,
        )
    } else {
        None
    };
    let mut goals = Goals::default();
    for envoys in topologies {
        recovery(&mut goals, *envoys).await?;
    }

    println!();
    for envoys in topologies {
        println!("{}", comparison.tables(*envoys));
        judge(&mut goals, &comparison, *envoys);
    }
    if let Some(steady) = &steady {
        println!(
            "Steady Prequal run of {} s, {}: p50 {} ms, p99 {} ms, p99.9 {} ms, slow pair {}, failed {}, samples {}\n",
            ingress.steady_seconds,
            topology_label(steady.envoys),
            ms(steady.rest.quantile_ms(0.5)),
            ms(steady.rest.quantile_ms(0.99)),
            ms(steady.rest.quantile_ms(0.999)),
            percent(steady.rest.slow_share()),
            steady.first.failed + steady.rest.failed,
            steady.rest.samples,
        );
        judge_steady(&mut goals, &comparison, steady);
    }
    let plot = ingress.out.join("ingress.svg");
    comparison.plot(&plot, topologies)?;
    println!("Plot of the first pass: {}\n", plot.display());
    Ok(goals.print())
}

/// Verdicts in the order in which they were reached.
#[derive(Default)]
struct Goals {
    lines: Vec<(bool, String)>,
}

impl Goals {
    fn add(&mut self, reached: bool, line: String) {
        self.lines.push((reached, line));
    }

    fn print(&self) -> ExitCode {
        for (reached, line) in &self.lines {
            println!("{}  {line}", if *reached { "PASS" } else { "MISS" });
        }
        let missed = self.lines.iter().filter(|(reached, _)| !reached).count();
        println!("{} of {} goals reached.", self.lines.len() - missed, self.lines.len());
        if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Largest share to the slow pair that is allowed.
fn slow_share_limit(envoys: usize) -> f64 {
    if envoys == 1 { 0.001 } else { 0.003 }
}

/// Prequal's run and the same pass's run of `arm`, for each pass.
fn pairs(comparison: &Comparison, arm: Arm, envoys: usize) -> impl Iterator<Item = (&Measured, &Measured)> {
    comparison.of(Arm::Prequal, envoys).zip(comparison.of(arm, envoys))
}

fn worst(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(f64::NEG_INFINITY, f64::max)
}

fn judge(goals: &mut Goals, comparison: &Comparison, envoys: usize) {
    let place = topology_label(envoys);
    let above_median = |q: f64| {
        worst(
            pairs(comparison, Arm::RoundRobin, envoys)
                .map(|(ours, theirs)| ours.rest.quantile_ms(q) - theirs.rest.quantile_ms(0.5)),
        )
    };
    let p99 = above_median(0.99);
    goals.add(
        p99 <= P99_MARGIN_MS,
        format!("{place}: p99 above round robin's median by {} ms (at most {P99_MARGIN_MS} ms)", ms(p99)),
    );
    for arm in Arm::BASELINES {
        let factor = -worst(
            pairs(comparison, arm, envoys)
                .map(|(ours, theirs)| -theirs.rest.quantile_ms(0.999) / ours.rest.quantile_ms(0.999)),
        );
        goals.add(
            factor >= P999_FACTOR,
            format!("{place}: p99.9 {factor:.1} times below {} (at least {P999_FACTOR})", arm.label()),
        );
    }
    let p999 = above_median(0.999);
    let aim = if p999 <= P999_AIM_MS { "met" } else { "not met" };
    println!("{place}: p99.9 above round robin's median by {} ms (aim: {P999_AIM_MS} ms, {aim})\n", ms(p999));

    let share = worst(comparison.of(Arm::Prequal, envoys).map(|run| run.rest.slow_share()));
    let limit = slow_share_limit(envoys);
    goals.add(
        share <= limit,
        format!("{place}: share to the slow pair {} (at most {})", percent(share), percent(limit)),
    );
    let failed: usize =
        comparison.of(Arm::Prequal, envoys).map(|run| run.first.failed + run.rest.failed).sum();
    goals.add(failed == 0, format!("{place}: {failed} failed requests (none)"));
    // CPU time scatters from run to run on a shared machine: medians over the passes are compared.
    let cpu = |arm| median(comparison.of(arm, envoys).map(|run| run.envoy_us));
    let cpu = cpu(Arm::Prequal) / cpu(Arm::RoundRobin);
    goals.add(
        cpu <= CPU_FACTOR,
        format!(
            "{place}: Envoy CPU per request {cpu:.2} times round robin's, medians of the passes (at most {CPU_FACTOR})"
        ),
    );
}

fn judge_steady(goals: &mut Goals, comparison: &Comparison, steady: &Measured) {
    let median = -worst(comparison.of(Arm::RoundRobin, steady.envoys).map(|run| -run.rest.quantile_ms(0.5)));
    let p99 = steady.rest.quantile_ms(0.99) - median;
    goals.add(
        p99 <= P99_MARGIN_MS,
        format!(
            "steady: p99 above round robin's lowest median by {} ms (at most {P99_MARGIN_MS} ms)",
            ms(p99)
        ),
    );
    let (share, limit) = (steady.rest.slow_share(), slow_share_limit(steady.envoys));
    goals.add(
        share <= limit,
        format!("steady: share to the slow pair {} (at most {})", percent(share), percent(limit)),
    );
    let failed = steady.first.failed + steady.rest.failed;
    goals.add(failed == 0, format!("steady: {failed} failed requests (none)"));
}

/// Makes one of the slow pair fast in mid-run and watches its share come back.
async fn recovery(goals: &mut Goals, envoys: usize) -> Result<()> {
    const BEFORE: Duration = Duration::from_secs(15);
    let fleet = fleet();
    let healed = fleet.fast;
    let fair = 1.0 / f64::from(fleet.fast + fleet.slow);
    let place = topology_label(envoys);

    let deployment = Deployment::start(Arm::Prequal, envoys, &fleet).await?;
    let length = FIRST + BEFORE + RECOVERY;
    let load = start_load(&deployment, length);
    let label = format!("[recovery] {place}");
    let progress = tokio::spawn(report_progress(load.progress.clone(), load.start, length, label.clone()));
    tokio::time::sleep_until((load.start + FIRST + BEFORE).into()).await;
    deployment.backends.set_delay(healed, Duration::from_millis(fleet.fast_ms)).await?;
    let healed_at = Instant::now().saturating_duration_since(load.start);
    let samples = load.finish().await;
    progress.abort();
    deployment.stop().await;

    let series: Vec<f64> = share_by_second(&samples, healed, healed_at, RECOVERY);
    // Judged on the last five seconds: a replica that comes and goes has not come back.
    let last = &series[series.len().saturating_sub(5)..];
    let share = last.iter().sum::<f64>() / last.len() as f64 / fair;
    let first =
        series.windows(5).position(|window| window.iter().sum::<f64>() / 5.0 >= fair * RECOVERED_SHARE);
    let shown: Vec<String> = series.iter().step_by(3).map(|share| one(share / fair * 100.0)).collect();
    println!("{label}: share of its fair share, %, every third second after: {}", shown.join(" "));
    let failed = samples.iter().filter(|sample| sample.latency.is_none()).count();
    let reached = match first {
        Some(second) => format!("reached within {} s", second + 5),
        None => "never reached".to_owned(),
    };
    goals.add(
        share >= RECOVERED_SHARE && failed == 0,
        format!(
            "{place}: slow replica made fast: {:.0} % of its fair share at the end of {} s ({:.0} % {reached}; at least {:.0} %), {failed} failed",
            share * 100.0,
            RECOVERY.as_secs(),
            RECOVERED_SHARE * 100.0,
            RECOVERED_SHARE * 100.0,
        ),
    );
    Ok(())
}

/// Share of the requests that `replica` answered, for each whole second after `from`.
fn share_by_second(samples: &[Sample], replica: u16, from: Duration, length: Duration) -> Vec<f64> {
    let mut hits = vec![0u32; length.as_secs() as usize];
    for sample in samples.iter().filter(|sample| sample.replica == Some(replica)) {
        let Some(after) = sample.due.checked_sub(from) else { continue };
        if let Some(count) = hits.get_mut(after.as_secs() as usize) {
            *count += 1;
        }
    }
    hits.into_iter().map(|count| f64::from(count) / f64::from(PER_SECOND)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_fall_into_seconds_after_the_change() {
        let sample = |ms: u64, replica: u16| Sample {
            due: Duration::from_millis(ms),
            latency: Some(Duration::from_millis(50)),
            replica: Some(replica),
        };
        let samples =
            [sample(500, 14), sample(1500, 14), sample(1600, 3), sample(2700, 14), sample(9000, 14)];
        let shares = share_by_second(&samples, 14, Duration::from_millis(1400), Duration::from_secs(3));
        let one = 1.0 / f64::from(PER_SECOND);
        assert_eq!(shares, [one, one, 0.0]);
    }
}
