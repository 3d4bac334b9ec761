//! The experiments: their runs, what the sources state about them, and the goals.

use std::ops::RangeInclusive;

use prequal_core::client::policies::linear::{ALPHA_US, Linear};
use prequal_core::client::policies::peak_ewma::Scan;
use prequal_core::client::pool::{Budget, HotRule, PoolSettings};
use prequal_core::client::settings::{ProbeSettings, Rule};
use prequal_core::client::sync_mode::SyncSettings;
use prequal_core::config::Profile;

use super::balancer::{Fallback, Prequal, SimArm};
use super::grid::{Cell, FAILED, Metric, P50, P90, P99, P999, PROBES, Point, RIF99, STANDARD, standard_and};
use super::measure::quantile;
use super::policies::cswrr;
use super::report::{Verdict, ms, percent};
use super::scenario::*;

mod fleet;
mod fleets;
mod moving;
mod others;
mod paper;
mod random;
mod sidecars;
pub(crate) mod sources;
mod weights;

/// One experiment, ready to run.
pub(crate) struct Experiment {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) text: &'static str,
    pub(crate) x_label: &'static str,
    pub(crate) points: Vec<Point>,
    pub(crate) metrics: Vec<Metric>,
    /// Header, metric and format of the table's columns.
    pub(crate) columns: Vec<FigureColumn>,
    /// Metrics to draw, and whether the axis is logarithmic.
    pub(crate) charts: Vec<(usize, bool)>,
    pub(crate) judge: fn(&Cells) -> Vec<Verdict>,
}

/// The cells of an experiment, found by the names of point and policy.
pub(crate) struct Cells(pub(crate) Vec<Cell>);

impl Cells {
    /// Median over the seeds; NaN for a cell that was not run.
    fn at(&self, point: &str, arm: &str, metric: usize) -> f64 {
        self.0.iter().find(|c| c.point == point && c.arm == arm).map_or(f64::NAN, |c| c.median(metric))
    }

    /// The worst value of an arm over all seeds and points.
    fn worst(&self, arm: &str, metric: usize) -> f64 {
        let series = self.0.iter().filter(|c| c.arm == arm).flat_map(|c| c.series(metric));
        series.fold(f64::NEG_INFINITY, f64::max)
    }
}

/// Lengths of the runs.
#[derive(Clone, Copy)]
pub(crate) struct RunLength {
    pub(crate) quick: bool,
}

impl RunLength {
    fn cut(self, mut scenario: SimScenario) -> SimScenario {
        if self.quick {
            (scenario.warm_up, scenario.measured) = (10.0, 20.0);
        }
        scenario
    }

    fn pick<T: Clone>(self, full: &[T], quick: &[usize]) -> Vec<T> {
        if self.quick { quick.iter().map(|i| full[*i].clone()).collect() } else { full.to_vec() }
    }
}

/// Names, in the order of the report.
pub(crate) const NAMES: [&str; 28] = [
    "calibration",
    "fig6",
    "fig7",
    "fig8",
    "fig9",
    "fig10",
    "finagle",
    "ingress",
    "netflix",
    "sinkhole",
    "smallfleet",
    "scale",
    "churn",
    "newcomer",
    "pauses",
    "sharing",
    "budget",
    "variants",
    "fleets",
    "random",
    "heldout",
    "unseen",
    "moving",
    "cold",
    "weights",
    "sidecars",
    "plbsim",
    "speed",
];

/// Experiments that `all --quick` leaves out: they would delay CI, or fail it on goals that are known to be missed.
pub(crate) const NOT_IN_CI: [&str; 7] =
    ["random", "heldout", "unseen", "moving", "cold", "weights", "sidecars"];

pub(crate) fn plan(name: &str, length: RunLength) -> Option<Experiment> {
    Some(match name {
        "calibration" => paper::calibration(length),
        "fig6" => paper::fig6(length),
        "fig7" => paper::fig7(length),
        "fig8" => paper::fig8(length),
        "fig9" => paper::fig9(length),
        "fig10" => paper::fig10(length),
        "finagle" => others::finagle(),
        "ingress" => others::ingress(length),
        "netflix" => others::netflix(length),
        "sinkhole" => fleet::sinkhole(),
        "smallfleet" => others::smallfleet(length),
        "scale" => fleet::scale(length),
        "churn" => fleet::churn(length),
        "pauses" => fleet::pauses(length),
        "newcomer" => fleet::newcomer(length),
        "sharing" => fleet::sharing(length),
        "budget" => fleet::budget(length),
        "variants" => fleet::variants(length),
        "fleets" => fleets::fleets(length),
        "random" => random::random(length),
        "heldout" => random::heldout(length),
        "unseen" => random::unseen(length),
        "moving" => moving::moving(length),
        "cold" => moving::cold(length),
        "weights" => weights::weights(length),
        "sidecars" => sidecars::sidecars(length),
        _ => return None,
    })
}

// --- policies

const PAPER: &str = "Prequal (paper)";
const OURS: &str = "Prequal (ours)";
const SMALL: &str = "Prequal (profile small)";
const LEARNING: &str = "Prequal (ours, learning)";
const RIF_ONLY: &str = "RIF only";
const FLOOR: &str = "floor";
const CSWRR: &str = "CSWRR";
const CSWRR_FAST: &str = "CSWRR (fast)";

/// Prequal under the paper's profile: Q = 2^(−1/4), 3 probes a query, and no reports on responses.
pub(crate) fn paper() -> Prequal {
    Prequal {
        pool: Profile::Paper.pool_settings(),
        probe: ProbeSettings { idle_interval_ms: 0, ..Profile::Paper.probe_settings() },
        rule: Rule::Hcl,
        sync: None,
        paper_tracker: true,
        learn: false,
        fallback: Fallback::Random,
    }
}

fn paper_with(change: impl FnOnce(&mut PoolSettings)) -> SimArm {
    let mut prequal = paper();
    change(&mut prequal.pool);
    SimArm::Prequal(prequal)
}

/// The shipped default profile; replicas are known from the start, as in the paper's tests.
pub(crate) fn ours() -> Prequal {
    Prequal {
        pool: Profile::Default.pool_settings(),
        probe: Profile::Default.probe_settings(),
        rule: Rule::Predicted,
        sync: None,
        paper_tracker: false,
        learn: false,
        fallback: Fallback::LeastRequest,
    }
}

/// The profile for fleets of up to 16.
fn small() -> Prequal {
    Prequal { pool: Profile::Small.pool_settings(), ..ours() }
}

fn ours_with(change: impl FnOnce(&mut PoolSettings)) -> SimArm {
    let mut prequal = ours();
    change(&mut prequal.pool);
    SimArm::Prequal(prequal)
}

/// The shipped profile without initial knowledge: replicas are learned from unaddressed probes, as in the filter.
fn learning(change: impl FnOnce(&mut PoolSettings)) -> SimArm {
    let mut prequal = Prequal { learn: true, ..ours() };
    prequal.pool.verified_probes = true;
    change(&mut prequal.pool);
    SimArm::Prequal(prequal)
}

fn arms<const N: usize>(list: [(&str, SimArm); N]) -> Vec<(String, SimArm)> {
    list.into_iter().map(|(name, arm)| (name.to_owned(), arm)).collect()
}

fn c3() -> SimArm {
    SimArm::Prequal(Prequal { rule: Rule::C3 { clients: 1 }, paper_tracker: false, ..paper() })
}

/// Every rule, with its best settings if it has settings. The paper's rule has Q = 0.75, as in the paper's figure 7.
/// The floor is last.
fn rules() -> Vec<(String, SimArm)> {
    arms([
        ("Random", SimArm::Random),
        ("RR", SimArm::RoundRobin),
        ("WRR", SimArm::WeightedRoundRobin),
        (CSWRR, SimArm::Cswrr(cswrr::Settings::DEFAULT)),
        (CSWRR_FAST, SimArm::Cswrr(cswrr::Settings::FAST)),
        ("LL", SimArm::LeastLoaded),
        ("LL-Po2C", SimArm::LeastLoadedPo2c),
        ("YARP-Po2C", SimArm::Yarp),
        ("Zuul", SimArm::Zuul(64)),
        ("Peak EWMA", SimArm::PeakEwma(Scan::TwoChoices)),
        ("Linear", SimArm::Prequal(Prequal { rule: linear(0.5), ..paper() })),
        ("C3", c3()),
        ("Prequal sync", sync()),
        (PAPER, paper_with(|pool| pool.q_rif = 0.75)),
        (OURS, SimArm::Prequal(ours())),
        (FLOOR, SimArm::Floor),
    ])
}

fn linear(lambda: f64) -> Rule {
    Rule::Linear(Linear { lambda, alpha_us: ALPHA_US })
}

fn sync() -> SimArm {
    SimArm::Prequal(Prequal { sync: Some(SyncSettings::default()), ..paper() })
}

// --- columns and goals

/// Header, metric and format.
pub(crate) type FigureColumn = (&'static str, usize, fn(f64) -> String);

const LATENCIES: [FigureColumn; 6] = [
    ("p50 ms", P50, ms),
    ("p90 ms", P90, ms),
    ("p99 ms", P99, ms),
    ("p99.9 ms", P999, ms),
    ("failed", FAILED, percent),
    ("probes/query", PROBES, two),
];

pub(crate) fn two(value: f64) -> String {
    format!("{value:.2}")
}

fn three_percent(value: f64) -> String {
    format!("{:.3} %", value * 100.0)
}

fn whole(value: f64) -> String {
    format!("{value:.0}")
}

/// Milliseconds, with one decimal below 100.
fn tenths(value: f64) -> String {
    if value < 99.95 { one(value) } else { ms(value) }
}

fn one(value: f64) -> String {
    format!("{value:.1}")
}

fn columns(more: &[FigureColumn]) -> Vec<FigureColumn> {
    LATENCIES.iter().chain(more).copied().collect()
}

/// The first metric after the standard ones.
const OWN: usize = STANDARD.len();
/// Metrics that some experiments add: CPU in fig6, θ in fig8 and fig9.
const CPU: usize = OWN;
const THETA: usize = OWN + 1;

fn at_most(what: &str, got: f64, goal: f64) -> Verdict {
    Verdict::new(format!("{what} at most {goal}"), got <= goal, format!("{got:.4}"))
}

fn at_least(what: &str, got: f64, goal: f64) -> Verdict {
    Verdict::new(format!("{what} at least {goal}"), got >= goal, format!("{got:.4}"))
}

/// Rounds off the spurious digits that a multiplication adds.
fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn between(what: &str, got: f64, goal: RangeInclusive<f64>) -> Verdict {
    let range = format!("{what} from {} to {}", round(*goal.start()), round(*goal.end()));
    Verdict::new(range, goal.contains(&got), format!("{got:.4}"))
}

/// Counts a timeout as 5 s, the time after which the query was given up, so that ratios stay finite. NaN stays NaN.
fn capped(ms: f64) -> f64 {
    if ms > 5000.0 { 5000.0 } else { ms }
}

/// Variation of CPU use between servers, and the median of θ, the RIF that separates cold replicas from hot ones.
const CPU_VARIATION: Metric = Metric { name: "cpu_variation", of: |_, run, _| run.cpu_variation() };
const MEDIAN_THETA: Metric = Metric { name: "theta_p50", of: |_, run, _| run.theta() };

/// Share of the queries that go to servers slower than the fastest; NaN if no server is slower.
const SLOW_SHARE: Metric = Metric {
    name: "slow_share",
    of: |scenario, run, _| {
        let fastest = scenario.servers.iter().map(|s| s.work_ms).fold(f64::INFINITY, f64::min);
        let is_slow = |server: &ServerSpec| server.work_ms > fastest;
        if !scenario.servers.iter().any(is_slow) {
            return f64::NAN;
        }
        run.share(|server| scenario.servers.get(server).is_some_and(is_slow), |_| true)
    },
};

/// Share of Prequal's picks that were left to Envoy's own policy.
const FALLBACK: Metric = Metric {
    name: "fallback",
    of: |_, run, _| run.branches[2] as f64 / run.branches.iter().sum::<u64>().max(1) as f64,
};
