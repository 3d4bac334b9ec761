//! Runs the cells of an experiment (point × policy × seed) on as many threads as the machine has cores. Each run is
//! reduced to its metrics immediately, because samples are large.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::balancer::SimArm;
use super::engine;
use super::measure::{Latencies, RunRecord};
use super::scenario::SimScenario;

/// One figure of a run.
#[derive(Clone, Copy)]
pub(crate) struct Metric {
    pub(crate) name: &'static str,
    pub(crate) of: fn(&SimScenario, &RunRecord, &Latencies) -> f64,
}

/// One value of the quantity that an experiment varies.
#[derive(Clone)]
pub(crate) struct Point {
    pub(crate) label: String,
    pub(crate) scenario: SimScenario,
    pub(crate) arms: Vec<(String, SimArm)>,
}

/// All seeds of one policy at one point.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    pub(crate) point: String,
    pub(crate) arm: String,
    /// One row per seed, one value per metric.
    pub(crate) values: Vec<(u64, Vec<f64>)>,
}

impl Cell {
    /// The values of one metric over the seeds.
    pub(crate) fn series(&self, metric: usize) -> Vec<f64> {
        self.values.iter().map(|(_, values)| values[metric]).collect()
    }

    pub(crate) fn median(&self, metric: usize) -> f64 {
        crate::stats::median(self.series(metric))
    }
}

/// Runs the tasks on as many threads as the machine has cores; the results are in the order of the tasks.
pub(crate) fn in_parallel<T: Sync, R: Send>(tasks: &[T], run: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::with_capacity(tasks.len()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(tasks.len().max(1));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(task) = tasks.get(index) else { break };
                    let result = run(task);
                    results.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Runs every point under each of its arms with every seed. The order of the result does not depend on the threads.
pub(crate) fn run(
    points: &[Point],
    metrics: &[Metric],
    seeds: &[u64],
    say: impl Fn(&str) + Sync,
) -> Vec<Cell> {
    let mut cells = Vec::new();
    let mut tasks = Vec::new();
    for point in points {
        for (name, arm) in &point.arms {
            for seed in seeds {
                tasks.push((cells.len(), &point.scenario, arm, *seed));
            }
            cells.push(Cell { point: point.label.clone(), arm: name.clone(), values: Vec::new() });
        }
    }
    let finished = AtomicUsize::new(0);
    let results = in_parallel(&tasks, |(_, scenario, arm, seed)| {
        let run = engine::run(scenario, arm, *seed);
        let latencies = run.latencies();
        let values: Vec<f64> = metrics.iter().map(|metric| (metric.of)(scenario, &run, &latencies)).collect();
        let done = finished.fetch_add(1, Ordering::Relaxed) + 1;
        say(&format!("{done}/{} runs", tasks.len()));
        values
    });
    for ((cell, _, _, seed), values) in tasks.into_iter().zip(results) {
        cells[cell].values.push((seed, values));
    }
    cells
}

/// Latency quantiles, failures, probes, RIF: the metrics of nearly every experiment, in this order.
pub(crate) const STANDARD: [Metric; 8] = [
    Metric { name: "p50_ms", of: |_, _, latencies| latencies.ms(0.5) },
    Metric { name: "p90_ms", of: |_, _, latencies| latencies.ms(0.9) },
    Metric { name: "p99_ms", of: |_, _, latencies| latencies.ms(0.99) },
    Metric { name: "p99.9_ms", of: |_, _, latencies| latencies.ms(0.999) },
    Metric { name: "failed", of: |_, _, latencies| latencies.failed() },
    Metric { name: "probes_per_query", of: |_, run, _| run.probes_per_query() },
    Metric { name: "rif_p50", of: |_, run, _| run.rif(0.5) },
    Metric { name: "rif_p99", of: |_, run, _| run.rif(0.99) },
];
pub(crate) const P50: usize = 0;
pub(crate) const P90: usize = 1;
pub(crate) const P99: usize = 2;
pub(crate) const P999: usize = 3;
pub(crate) const FAILED: usize = 4;
pub(crate) const PROBES: usize = 5;
pub(crate) const RIF99: usize = 7;

/// The standard metrics, followed by `more`.
pub(crate) fn standard_and(more: &[Metric]) -> Vec<Metric> {
    STANDARD.iter().chain(more).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::plans::{ours, paper};
    use crate::sim::scenario::Spare;

    #[test]
    fn results_keep_the_order_of_the_tasks() {
        let tasks: Vec<u64> = (0..50).collect();
        // The first tasks take the longest.
        let results = in_parallel(&tasks, |task| {
            let spun =
                (0..(50 - task) * 10_000).fold(0u64, |sum, i| std::hint::black_box(sum.wrapping_add(i)));
            (*task, spun > 0)
        });
        assert!(results.iter().map(|(task, _)| *task).eq(tasks));
    }

    /// Trap 10 (`crates/prequal-core/tests/traps.rs` has the others): state that one arm leaves behind affects the
    /// figures of the next.
    #[test]
    fn trap_10_the_figures_of_an_arm_do_not_depend_on_the_arms_before_it() {
        let mut scenario = SimScenario::testbed(8, 1.2, Spare::None);
        (scenario.warm_up, scenario.measured) = (0.5, 2.0);
        let arms = [
            ("RR", SimArm::RoundRobin),
            ("paper", SimArm::Prequal(paper())),
            ("ours", SimArm::Prequal(ours())),
            ("LL", SimArm::LeastLoaded),
        ];
        let figures = |arms: &[(&str, SimArm)]| {
            let arms = arms.iter().map(|(name, arm)| ((*name).to_owned(), arm.clone())).collect();
            let points = [Point { label: String::new(), scenario: scenario.clone(), arms }];
            run(&points, &STANDARD, &[1, 2], |_| ())
        };
        let together = figures(&arms);
        assert_ne!(together[1].values, together[2].values, "two arms, two results");
        for (arm, among_others) in arms.iter().zip(&together) {
            assert_eq!(figures(std::slice::from_ref(arm))[0].values, among_others.values, "{}", arm.0);
        }
    }
}
