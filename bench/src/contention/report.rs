//! Tables, plot and verdicts of a ramp.

use std::path::Path;

use anyhow::Result;

use super::figures::{P99, QUANTILES, StepFigures};
use super::policy::Policy;
use super::ramp::{Ramp, Step};
use super::scale::{DEADLINE, rate};
use crate::goals::Goals;
use crate::sim::plot::{self, Chart, Line};
use crate::stats::{median, min_max};
use crate::table::{self, percent, spread};

/// Below this idle share the machine is saturated: Envoy, agents and generator wait for a core, and latency includes
/// these waits.
const SATURATED: f64 = 0.05;
/// Maximum ratio at which a simulated and a measured quantile agree.
const AGREES: f64 = 1.5;

/// All runs of one policy: per pass, then per step.
#[derive(Clone)]
pub(super) struct PolicyRuns {
    pub(super) policy: Policy,
    pub(super) measured: Vec<Vec<Step>>,
    pub(super) simulated: Vec<Vec<StepFigures>>,
}

impl PolicyRuns {
    /// Measured values of one step, one per pass.
    fn real(&self, step: usize, value: impl Fn(&StepFigures) -> f64) -> Vec<f64> {
        self.measured.iter().map(|steps| value(&steps[step].figures)).collect()
    }

    /// Simulated values of one step, one per pass.
    fn simulated(&self, step: usize, value: impl Fn(&StepFigures) -> f64) -> Vec<f64> {
        self.simulated.iter().map(|steps| value(&steps[step])).collect()
    }

    /// Median p99 of a step; a failure counts as the deadline.
    fn p99(&self, step: usize) -> f64 {
        capped(median(self.real(step, p99)))
    }

    /// Least idle share of this machine in any pass; 1 without a pass.
    fn idle(&self, step: usize) -> f64 {
        self.measured.iter().map(|steps| steps[step].idle).fold(1.0, f64::min)
    }

    fn is_saturated(&self, step: usize) -> bool {
        self.idle(step) < SATURATED
    }

    /// Most failures in any pass.
    fn failed(&self, step: usize) -> f64 {
        min_max(self.real(step, failed)).1
    }
}

fn p99(figures: &StepFigures) -> f64 {
    figures.quantiles_ms[P99]
}

fn failed(figures: &StepFigures) -> f64 {
    figures.failed
}

/// A table per step.
pub(super) fn tables(ramp: &Ramp, runs: &[PolicyRuns]) -> String {
    let quantiles = QUANTILES.map(|(_, name)| format!("{name} ms"));
    let mut header = vec!["policy"];
    header.extend(quantiles.iter().map(String::as_str));
    header.extend(["failed", "CPU, share of allocation", "samples", "idle"]);
    let mut text = String::new();
    for (step, load) in ramp.loads.iter().enumerate() {
        let rows: Vec<Vec<String>> = runs.iter().flat_map(|runs| rows(runs, step)).collect();
        text +=
            &format!("{load} times the allocation, {:.0} queries/s{}\n\n", rate(*load), lateness(runs, step));
        text += &table::render(&header, &rows);
        text.push('\n');
    }
    if runs.iter().any(|runs| (0..ramp.loads.len()).any(|step| runs.is_saturated(step))) {
        text += "* This machine was saturated, so the row counts for no goal.\n";
    }
    text
}

/// The lateness of the generator in a step.
fn lateness(runs: &[PolicyRuns], step: usize) -> String {
    let late = runs.iter().flat_map(|runs| runs.measured.iter().map(|steps| steps[step].late_ms));
    late.reduce(f64::max).map_or_else(String::new, |late| format!("; generator's lateness p99 {late:.1} ms"))
}

/// The measured and the simulated row of a policy.
fn rows(runs: &PolicyRuns, step: usize) -> Vec<Vec<String>> {
    let label = runs.policy.label();
    let simulated = runs.simulated.iter().map(|steps| &steps[step]).collect::<Vec<_>>();
    if runs.measured.is_empty() {
        return vec![row(label, &simulated)];
    }
    let steps: Vec<&Step> = runs.measured.iter().map(|steps| &steps[step]).collect();
    let mut measured = row(label, &steps.iter().map(|step| &step.figures).collect::<Vec<_>>());
    measured.push(spread(&steps.iter().map(|step| step.cpu).collect::<Vec<_>>(), table::two));
    measured.push(steps.iter().map(|step| step.samples).sum::<usize>().to_string());
    let mark = if runs.is_saturated(step) { " *" } else { "" };
    measured.push(format!("{:.0} %{mark}", runs.idle(step) * 100.0));
    vec![measured, row("  simulated", &simulated)]
}

/// The figures of several passes.
fn row(label: &str, passes: &[&StepFigures]) -> Vec<String> {
    let series =
        |value: &dyn Fn(&StepFigures) -> f64| passes.iter().map(|pass| value(pass)).collect::<Vec<_>>();
    let mut row = vec![label.to_owned()];
    row.extend((0..QUANTILES.len()).map(|q| spread(&series(&|figures| figures.quantiles_ms[q]), whole_ms)));
    row.push(spread(&series(&failed), percent));
    row
}

/// Writes the plot: p99 over load, measured and simulated, and failures.
pub(super) fn draw(path: &Path, ramp: &Ramp, runs: &[PolicyRuns]) -> Result<()> {
    let chart = |title: &str, logarithmic: bool, values: &dyn Fn(&PolicyRuns, usize) -> Vec<f64>| Chart {
        title: title.to_owned(),
        x_label: "load over allocation".to_owned(),
        points: ramp.loads.iter().map(|load| format!("{load}x")).collect(),
        lines: runs.iter().map(|runs| line(runs, ramp.loads.len(), values)).collect(),
        logarithmic,
        ceiling: logarithmic.then_some(deadline_ms()),
        format: if logarithmic { whole_ms } else { |share| format!("{:.0} %", share * 100.0) },
    };
    let mut charts = vec![
        chart("p99 ms, measured", true, &|runs, step| runs.real(step, p99)),
        chart("p99 ms, simulated", true, &|runs, step| runs.simulated(step, p99)),
        chart("failed, measured", false, &|runs, step| runs.real(step, failed)),
        chart("failed, simulated", false, &|runs, step| runs.simulated(step, failed)),
    ];
    if runs.iter().all(|runs| runs.measured.is_empty()) {
        charts.retain(|chart| chart.title.ends_with("simulated"));
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    plot::write(path, "Load ramp over contended CPU (paper, figure 6)", &charts)?;
    println!("Plot: {}\n", path.display());
    Ok(())
}

fn line(runs: &PolicyRuns, steps: usize, values: &dyn Fn(&PolicyRuns, usize) -> Vec<f64>) -> Line {
    let value = |step| {
        let values = values(runs, step);
        let (low, high) = min_max(values.iter().copied());
        (median(values), low, high)
    };
    Line { label: runs.policy.label().to_owned(), values: (0..steps).map(value).collect() }
}

/// Compares the shape of the ramp with the paper's figure 6, and the simulator with the measurement.
///
/// A goal is left out if it needs a step or a policy that was left out, or figures of a saturated machine.
pub(super) fn judge(ramp: &Ramp, runs: &[PolicyRuns]) -> Goals {
    let mut goals = Goals::default();
    let steps = || 0..ramp.loads.len();
    // A policy's runs and the step with this load, if they count.
    let at = |policy, load: f64| {
        let step = steps().find(|step| ramp.loads[*step] == load)?;
        let of = runs.iter().find(|runs| runs.policy == policy);
        of.filter(|runs| !runs.is_saturated(step)).map(|runs| (runs, step))
    };
    let alike = Policy::ALL.iter().filter_map(|policy| at(*policy, 0.75));
    let alike: Vec<f64> = alike.map(|(runs, step)| runs.p99(step)).collect();
    if alike.len() > 1 {
        let (low, high) = min_max(alike);
        let range = format!("{} to {} ms", whole_ms(low), whole_ms(high));
        goals.add(high <= low * 1.25, format!("at 0.75x all p99 are alike: {range} (at most 1.25 times)"));
    }
    if let Some((wrr, step)) = at(Policy::Wrr, 1.74) {
        let failed = wrr.failed(step);
        let line = format!("{} fails at 1.74x: {} (more than none)", wrr.policy.label(), percent(failed));
        goals.add(failed > 0.0, line);
    }
    for policy in [Policy::Prequal, Policy::Paper] {
        let name = policy.label();
        if let (Some((wrr, step)), Some((ours, _))) = (at(Policy::Wrr, 1.27), at(policy, 1.27)) {
            let [p99, theirs] = [ours, wrr].map(|runs| runs.p99(step));
            let line = format!(
                "{name}, p99 at 1.27x {} ms, {:.2} of {}'s {} (at most 0.5)",
                whole_ms(p99),
                p99 / theirs,
                wrr.policy.label(),
                whole_ms(theirs)
            );
            goals.add(p99 <= theirs * 0.5, line);
        }
        let moderate = ramp.loads.iter().filter(|load| **load < 1.6).filter_map(|load| at(policy, *load));
        if let Some(most) = moderate.map(|(runs, step)| runs.failed(step)).reduce(f64::max) {
            goals.add(most <= 0.0, format!("{name}, failures up to 1.57x: at most {} (none)", percent(most)));
        }
    }
    let (agree, all) = agreement(ramp, runs);
    let line = format!(
        "the simulator's p99 is within {AGREES} times the measured one: {agree} of {all} (at least 80 %)"
    );
    goals.add(all > 0 && agree * 10 >= all * 8, line);
    goals
}

/// Number of median p99 values on which the simulator agrees, and number of those compared.
fn agreement(ramp: &Ramp, runs: &[PolicyRuns]) -> (usize, usize) {
    let cells = runs.iter().flat_map(|runs| (0..ramp.loads.len()).map(move |step| (runs, step)));
    // Both sides are capped at the deadline, so cells beyond it on both sides would always agree.
    let counts = |(runs, step): &(&PolicyRuns, usize)| {
        let [measured, simulated] = [runs.real(*step, p99), runs.simulated(*step, p99)].map(median);
        !runs.is_saturated(*step) && measured.min(simulated) <= deadline_ms()
    };
    let counting: Vec<(&PolicyRuns, usize)> = cells.filter(counts).collect();
    let agrees = |(runs, step): &&(&PolicyRuns, usize)| {
        let ratio = capped(median(runs.simulated(*step, p99))) / runs.p99(*step);
        (1.0 / AGREES..=AGREES).contains(&ratio)
    };
    (counting.iter().filter(agrees).count(), counting.len())
}

fn deadline_ms() -> f64 {
    DEADLINE.as_secs_f64() * 1e3
}

fn capped(ms: f64) -> f64 {
    if ms > deadline_ms() { deadline_ms() } else { ms }
}

/// Whole milliseconds; `TO` beyond the deadline.
fn whole_ms(value: f64) -> String {
    if value.is_infinite() { "TO".to_owned() } else { format!("{value:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(policy: Policy, p99: f64, failed: f64, simulated: f64) -> PolicyRuns {
        let figures = |p99, failed| StepFigures { quantiles_ms: [80.0, 180.0, p99, p99], failed };
        let step = Step {
            figures: figures(p99, failed),
            samples: 1000,
            cpu: 1.27,
            idle: 0.3,
            late_ms: 1.0,
            failures: std::collections::BTreeMap::new(),
        };
        PolicyRuns { policy, measured: vec![vec![step]], simulated: vec![vec![figures(simulated, 0.0)]] }
    }

    fn verdicts(load: f64, runs: &[PolicyRuns]) -> Vec<(bool, String)> {
        let ramp = Ramp { loads: vec![load], measured: std::time::Duration::from_secs(10) };
        judge(&ramp, runs).lines
    }

    #[test]
    fn prequal_must_halve_the_tail_without_failures() {
        let with = |ours, failed| {
            verdicts(
                1.27,
                &[runs(Policy::Wrr, f64::INFINITY, 0.02, 4000.0), runs(Policy::Prequal, ours, failed, ours)],
            )
        };
        let reached =
            |lines: Vec<(bool, String)>| lines.iter().map(|(reached, _)| *reached).collect::<Vec<_>>();
        // The last verdict is on the simulator: its p99 must be within a factor of 1.5 of the measured one. A measured
        // failure counts as the deadline, and 4000 ms is close enough to that.
        assert_eq!(reached(with(2500.0, 0.0)), [true, true, true]);
        assert_eq!(reached(with(2600.0, 0.001)), [false, false, true]);
    }

    #[test]
    fn a_cell_beyond_the_deadline_on_both_sides_says_nothing_about_the_simulator() {
        let never = f64::INFINITY;
        let agreed = |runs: &[PolicyRuns]| verdicts(1.57, runs).pop().unwrap().1;
        let beyond = runs(Policy::Wrr, never, 0.5, never);
        assert!(agreed(std::slice::from_ref(&beyond)).contains("0 of 0"));
        let with = |policy, measured, simulated| [beyond.clone(), runs(policy, measured, 0.0, simulated)];
        assert!(agreed(&with(Policy::Paper, never, 2000.0)).contains("0 of 1"));
        assert!(agreed(&with(Policy::Paper, 300.0, 320.0)).contains("1 of 1"));
    }

    #[test]
    fn a_saturated_machine_counts_for_nothing() {
        let mut saturated = runs(Policy::Prequal, 9000.0, 0.5, 100.0);
        saturated.measured[0][0].idle = 0.01;
        let lines = verdicts(0.75, &[saturated]);
        assert!(matches!(&lines[..], [(false, line)] if line.contains("0 of 0")), "{lines:?}");
    }
}
