//! The experiments: what is run, what the source says of it, and the bars.

use std::ops::RangeInclusive;

use prequal_core::config::Profile;
use prequal_core::policies::peak_ewma::Scan;
use prequal_core::pool::{Budget, HotRule, PoolSettings};
use prequal_core::sync::SyncSettings;

use super::balancer::{Arm, Prequal, Rule};
use super::grid::{Cell, FAILED, Metric, P50, P90, P99, P999, PROBES, Point, RIF99, STANDARD, standard_and};
use super::measure::quantile;
use super::report::{Verdict, ms, percent};
use super::scenario::*;

/// One experiment, ready to run.
pub(crate) struct Plan {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) text: &'static str,
    pub(crate) x_label: &'static str,
    pub(crate) points: Vec<Point>,
    pub(crate) metrics: Vec<Metric>,
    /// Header, metric and format of the table's columns.
    pub(crate) columns: Vec<Column>,
    /// Metrics drawn, and whether on a logarithmic axis.
    pub(crate) charts: Vec<(usize, bool)>,
    pub(crate) judge: fn(&Cells) -> Vec<Verdict>,
}

/// The cells of an experiment by name.
pub(crate) struct Cells(pub(crate) Vec<Cell>);

impl Cells {
    /// Median over the seeds; NaN for a cell that was not run.
    fn at(&self, point: &str, arm: &str, metric: usize) -> f64 {
        self.0.iter().find(|c| c.point == point && c.arm == arm).map_or(f64::NAN, |c| c.median(metric))
    }

    /// The worst seed of an arm over all points.
    fn worst(&self, arm: &str, metric: usize) -> f64 {
        let series = self.0.iter().filter(|c| c.arm == arm).flat_map(|c| c.series(metric));
        series.fold(f64::NEG_INFINITY, f64::max)
    }
}

/// Run lengths.
#[derive(Clone, Copy)]
pub(crate) struct Length {
    pub(crate) quick: bool,
}

impl Length {
    fn cut(self, mut scenario: Scenario) -> Scenario {
        if self.quick {
            (scenario.warm_up, scenario.measured) = (10.0, 20.0);
        }
        scenario
    }

    fn pick<T: Clone>(self, full: &[T], quick: &[usize]) -> Vec<T> {
        if self.quick { quick.iter().map(|i| full[*i].clone()).collect() } else { full.to_vec() }
    }
}

/// Names in the order of the report.
pub(crate) const NAMES: [&str; 18] = [
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
    "sharing",
    "budget",
    "variants",
    "plbsim",
    "speed",
];

pub(crate) fn plan(name: &str, length: Length) -> Option<Plan> {
    Some(match name {
        "calibration" => calibration(length),
        "fig6" => fig6(length),
        "fig7" => fig7(length),
        "fig8" => fig8(length),
        "fig9" => fig9(length),
        "fig10" => fig10(length),
        "finagle" => finagle(length),
        "ingress" => ingress(length),
        "netflix" => netflix(length),
        "sinkhole" => sinkhole(length),
        "smallfleet" => smallfleet(length),
        "scale" => scale(length),
        "churn" => churn(length),
        "sharing" => sharing(length),
        "budget" => budget(length),
        "variants" => variants(length),
        _ => return None,
    })
}

// --- policies

const PAPER: &str = "Prequal (paper)";
const OURS: &str = "Prequal (ours)";
const SMALL: &str = "Prequal (profile small)";

/// Prequal under the paper profile: Q = 2^(−1/4), 3 probes a query, probes only.
pub(crate) fn paper() -> Prequal {
    Prequal {
        pool: Profile::Paper.pool_settings(),
        rule: Rule::HotCold,
        piggyback: false,
        skip_fresh_ms: None,
        idle_ms: 0,
        paper_tracker: true,
        learn: false,
    }
}

fn paper_with(change: impl FnOnce(&mut PoolSettings)) -> Arm {
    let mut prequal = paper();
    change(&mut prequal.pool);
    Arm::Prequal(prequal)
}

/// What ships as the default profile; replicas known from the start, as in the paper's tests.
pub(crate) fn ours() -> Prequal {
    Prequal {
        pool: Profile::Default.pool_settings(),
        rule: Rule::HotCold,
        piggyback: true,
        skip_fresh_ms: Some(Profile::Default.pool_settings().max_age_ms / 10),
        idle_ms: 1000,
        paper_tracker: false,
        learn: false,
    }
}

/// The profile for fleets of at most 16.
fn small() -> Prequal {
    let pool = Profile::Small.pool_settings();
    Prequal { skip_fresh_ms: Some(pool.max_age_ms / 10), pool, ..ours() }
}

fn ours_with(change: impl FnOnce(&mut PoolSettings)) -> Arm {
    let mut prequal = ours();
    change(&mut prequal.pool);
    Arm::Prequal(prequal)
}

fn arms<const N: usize>(list: [(&str, Arm); N]) -> Vec<(String, Arm)> {
    list.into_iter().map(|(name, arm)| (name.to_owned(), arm)).collect()
}

fn c3() -> Arm {
    Arm::Prequal(Prequal { rule: Rule::C3, paper_tracker: false, ..paper() })
}

fn sync() -> Arm {
    Arm::Sync(SyncSettings::default(), Profile::Paper.pool_settings())
}

// --- columns and bars

/// Header, metric and format.
pub(crate) type Column = (&'static str, usize, fn(f64) -> String);

const LATENCIES: [Column; 6] = [
    ("p50 ms", P50, ms),
    ("p90 ms", P90, ms),
    ("p99 ms", P99, ms),
    ("p99.9 ms", P999, ms),
    ("failed", FAILED, percent),
    ("probes/query", PROBES, two),
];

fn two(value: f64) -> String {
    format!("{value:.2}")
}

fn whole(value: f64) -> String {
    format!("{value:.0}")
}

fn one(value: f64) -> String {
    format!("{value:.1}")
}

fn columns(more: &[Column]) -> Vec<Column> {
    LATENCIES.iter().chain(more).copied().collect()
}

/// The first metric after the standard ones.
const OWN: usize = STANDARD.len();

fn at_most(what: &str, got: f64, bar: f64) -> Verdict {
    Verdict::new(format!("{what} at most {bar}"), got <= bar, format!("{got:.4}"))
}

fn at_least(what: &str, got: f64, bar: f64) -> Verdict {
    Verdict::new(format!("{what} at least {bar}"), got >= bar, format!("{got:.4}"))
}

fn between(what: &str, got: f64, bar: RangeInclusive<f64>) -> Verdict {
    let range = format!("{what} from {:.1} to {:.1}", bar.start(), bar.end());
    Verdict::new(range, bar.contains(&got), format!("{got:.4}"))
}

/// A time-out counts as the 5 s after which it was given up: ratios stay finite.
fn capped(ms: f64) -> f64 {
    ms.min(5000.0)
}

const SLOW_SHARE: Metric = Metric {
    name: "slow_share",
    of: |scenario, run, _| {
        let fastest = scenario.servers.iter().map(|s| s.work_ms).fold(f64::INFINITY, f64::min);
        run.share(|server| scenario.servers.get(server).is_some_and(|s| s.work_ms > fastest), |_| true)
    },
};

// --- the paper's testbed

fn calibration(length: Length) -> Plan {
    // So much spare capacity that nothing queues: what is left is the work itself.
    let scenario =
        length.cut(Scenario::testbed(100, 0.75, Spare::Antagonists { mean: 5.0, sd: 0.0, hobbled: 1.0 }));
    Plan {
        name: "calibration",
        title: "the work of a query, without queueing",
        text: "Work is max(0, N(80, 80)) ms of one core, as the paper draws it (normal, standard deviation equal to the \
            mean, truncated at zero). The paper's four quantiles below allocation are 80, 182, 265 and 325 ms.",
        x_label: "",
        points: vec![Point { label: "0.75x".to_owned(), scenario, arms: arms([("Random", Arm::Random)]) }],
        metrics: STANDARD.to_vec(),
        columns: LATENCIES.to_vec(),
        charts: Vec::new(),
        judge: |cells| {
            [("p50", P50, 80.0), ("p90", P90, 182.0), ("p99", P99, 265.0), ("p99.9", P999, 325.0)]
                .map(|(name, metric, paper)| {
                    let got = cells.at("0.75x", "Random", metric);
                    between(
                        &format!("{name} ms, within 2 % of the paper's {paper},"),
                        got,
                        paper * 0.98..=paper * 1.02,
                    )
                })
                .to_vec()
        },
    }
}

const RAMP: [f64; 9] = [0.75, 0.83, 0.93, 1.03, 1.14, 1.27, 1.41, 1.57, 1.74];

fn fig6(length: Length) -> Plan {
    let points = length.pick(&RAMP, &[0, 3, 5, 8]).into_iter().map(|load| Point {
        label: format!("{load}x"),
        scenario: Scenario::testbed(100, load, NORMAL),
        arms: arms([
            ("WRR", Arm::WeightedRoundRobin),
            (PAPER, Arm::Prequal(paper())),
            (OURS, Arm::Prequal(ours())),
            ("floor", Arm::Floor),
        ]),
    });
    Plan {
        name: "fig6",
        title: "load ramp (paper §5.1, figure 6)",
        text: "100 clients, 100 servers, load from 0.75 to 1.74 times the allocation, 5 s deadline. The paper: WRR's p99.9 \
            times out from 1.03x, p99 from 1.27x, p90 from 1.57x, more than 25 % errors at 1.74x; Prequal has no error \
            at all, p99.9 about 325 ms up to 1.14x, 350 at 1.27x, about 700 at 1.74x. `floor` is a greedy rule that knows \
            every server's queue, capacity and speed at this instant: no policy can.",
        x_label: "load over allocation",
        points: points.collect(),
        metrics: STANDARD.to_vec(),
        columns: columns(&[("RIF p99", RIF99, whole)]),
        charts: vec![(P99, true), (P999, true), (FAILED, false)],
        judge: |cells| {
            vec![
                at_most("paper profile, failures at any step and seed", cells.worst(PAPER, FAILED), 0.0),
                at_least("WRR, failed share at 1.74x", cells.at("1.74x", "WRR", FAILED), 0.1),
                at_most("paper profile, p99.9 ms at 1.74x", cells.at("1.74x", PAPER, P999), 700.0),
                at_most("paper profile, p99.9 ms at 1.27x", cells.at("1.27x", PAPER, P999), 380.0),
                at_most("ours, failures at any step and seed", cells.worst(OURS, FAILED), 0.0),
                at_most("ours, p99.9 ms at 1.74x", cells.at("1.74x", OURS, P999), 700.0),
                at_most("ours, p99.9 ms at 1.27x", cells.at("1.27x", OURS, P999), 380.0),
                at_most("ours, probes per query at any step", cells.worst(OURS, PROBES), 3.0),
            ]
        },
    }
}

fn fig7(length: Length) -> Plan {
    let rules = || {
        arms([
            ("Random", Arm::Random),
            ("RR", Arm::RoundRobin),
            ("WRR", Arm::WeightedRoundRobin),
            ("LL", Arm::LeastLoaded),
            ("LL-Po2C", Arm::LeastLoadedPo2c),
            ("YARP-Po2C", Arm::Yarp),
            ("Zuul", Arm::Zuul(64)),
            ("Peak EWMA", Arm::PeakEwma(Scan::TwoChoices)),
            ("Linear", Arm::Prequal(Prequal { rule: Rule::Linear(0.5), ..paper() })),
            ("C3", c3()),
            ("Prequal sync", sync()),
            (PAPER, paper_with(|pool| pool.q_rif = 0.75)),
            (OURS, Arm::Prequal(ours())),
            ("floor", Arm::Floor),
        ])
    };
    let mut points = Vec::new();
    for load in length.pick(&[0.7, 0.9], &[1]) {
        let percent = load * 100.0;
        points.push(Point {
            label: format!("{percent} %"),
            scenario: Scenario::testbed(100, load, HEAVY),
            arms: rules(),
        });
        points.push(Point {
            label: format!("{percent} %, half slow"),
            scenario: length.cut(Scenario::half_slow(100, WORK_MS / 1.5, load, HEAVY)),
            arms: rules(),
        });
    }
    Plan {
        name: "fig7",
        title: "selection rules (paper §5.2, figure 7)",
        text: "Nine rules of the paper, and Zuul, Peak EWMA, synchronous Prequal and ours, at 70 and 90 % of the allocation, \
            on equal servers and with every other server twice as slow. Antagonists are heavier than in fig6: the paper's \
            WRR also broke at a lower load here. The paper: Random, RR, WRR and LL bad at 90 %, LL-Po2C and YARP between, \
            C3 and Prequal (Q = 0.75) best and 3 to 8 % apart, Linear much worse than either. The last does **not** \
            reproduce in this model, nor did it in the independent simulation of the facts: RIF times 75 ms outweighs \
            latency at λ = 0.5 already.",
        x_label: "load over allocation",
        points,
        metrics: standard_and(&[SLOW_SHARE]),
        columns: columns(&[("to slow half", OWN, percent)]),
        charts: vec![(P90, true), (P99, true)],
        judge: |cells| {
            let p99 = |arm: &str| capped(cells.at("90 %", arm, P99));
            let mut verdicts: Vec<Verdict> = [("Random", 5.0), ("RR", 5.0), ("WRR", 5.0), ("LL", 3.0)]
                .map(|(arm, bar)| {
                    at_least(
                        &format!("{arm}, p99 over the paper profile's at 90 %"),
                        p99(arm) / p99(PAPER),
                        bar,
                    )
                })
                .to_vec();
            let order = ["LL", "LL-Po2C", "YARP-Po2C", PAPER].map(p99);
            verdicts.push(Verdict::new(
                "p99 at 90 % in the order LL > LL-Po2C > YARP > paper profile",
                order.windows(2).all(|pair| pair[0] > pair[1]),
                order.map(ms).join(", "),
            ));
            verdicts
        },
    }
}

/// 4 down to 1/2 probes per query in steps of √2.
fn probe_rates() -> [f64; 7] {
    [0, 1, 2, 3, 4, 5, 6].map(|step| 4.0 / 2f64.sqrt().powi(step))
}

fn fig8(length: Length) -> Plan {
    let points = length.pick(&probe_rates(), &[0, 4, 5, 6]).into_iter().map(|rate| {
        let fixed = move |pool: &mut PoolSettings| {
            pool.budget = Budget::Fixed { r_probe: rate };
            pool.r_remove = 0.25;
        };
        Point {
            label: two(rate),
            scenario: length.cut(Scenario::testbed(100, 1.5, NORMAL)),
            arms: arms([(PAPER, paper_with(fixed)), (OURS, ours_with(fixed))]),
        }
    });
    Plan {
        name: "fig8",
        title: "probing rate (paper §5.3, figure 8)",
        text: "1.5x load, r_remove 0.25, from 4 probes a query down to one half. The paper: little change down to one probe a \
            query, then latency and RIF jump. Ours adds the reports that responses carry anyway.",
        x_label: "probes per query",
        points: points.collect(),
        metrics: STANDARD.to_vec(),
        columns: columns(&[("RIF p99", RIF99, whole)]),
        charts: vec![(P999, false), (RIF99, false)],
        judge: |cells| {
            let p999 = |rate: &str| cells.at(rate, PAPER, P999);
            let flat =
                ["4.00", "2.83", "2.00", "1.41", "1.00"].map(p999).into_iter().filter(|ms| !ms.is_nan());
            let (low, high) = crate::stats::min_max(flat);
            vec![
                at_most("paper profile, highest over lowest p99.9 from 4 to 1 probes", high / low, 1.15),
                at_least("paper profile, p99.9 at 0.71 over that at 1", p999("0.71") / p999("1.00"), 1.2),
                at_least("paper profile, p99.9 at 0.50 over that at 1", p999("0.50") / p999("1.00"), 1.6),
                at_most("ours, p99.9 ms at half a probe per query", cells.at("0.50", OURS, P999), 390.0),
            ]
        },
    }
}

fn fig9(length: Length) -> Plan {
    let quantiles: Vec<f64> = std::iter::once(0.0)
        .chain((0..10).map(|step| 0.9f64.powi(10 - step)))
        .chain([0.99, 0.999, 1.0])
        .collect();
    let last = quantiles.len() - 1;
    let quantiles = length.pick(&quantiles, &[0, 9, last - 2, last]);
    let mut points: Vec<Point> = quantiles
        .into_iter()
        .map(|q_rif| Point {
            label: format!("{q_rif:.3}"),
            scenario: length.cut(Scenario::half_slow(100, 30.0, 0.75, NORMAL)),
            arms: arms([(PAPER, paper_with(|pool| pool.q_rif = q_rif))]),
        })
        .collect();
    points.push(Point {
        label: "default".to_owned(),
        scenario: length.cut(Scenario::half_slow(100, 30.0, 0.75, NORMAL)),
        arms: arms([
            (OURS, Arm::Prequal(ours())),
            ("ours, fixed 3 probes", ours_with(|pool| pool.budget = Budget::Fixed { r_probe: 3.0 })),
            ("floor", Arm::Floor),
        ]),
    });
    Plan {
        name: "fig9",
        title: "RIF quantile, half of the fleet twice as slow (paper §5.3, figure 9)",
        text: "0.75x load, work of 30 ms on the fast half and 60 on the slow one, Q from 0 (RIF only) to 1 (latency only). The \
            paper: p99 from 162 to 142 ms, p90 from 93 to 75, p50 from 34.5 to 31 as Q goes from 0 to 0.99, all sharply up \
            at 1. Ours is run with the very settings that fig6 is run with.",
        x_label: "Q_RIF",
        points,
        metrics: standard_and(&[SLOW_SHARE]),
        columns: columns(&[("RIF p99", RIF99, whole), ("to slow half", OWN, percent)]),
        charts: vec![(P99, true), (OWN, false)],
        judge: |cells| {
            let p99 = |q: &str| capped(cells.at(q, PAPER, P99));
            vec![
                at_least(
                    "paper profile, fall of p99 from Q = 0 to 0.99, share",
                    1.0 - p99("0.990") / p99("0.000"),
                    0.3,
                ),
                at_least("paper profile, p99 at Q = 1 over that at 0.99", p99("1.000") / p99("0.990"), 5.0),
                at_most("ours, p99 ms (aim 110)", cells.at("default", OURS, P99), 125.0),
                at_most("ours, probes per query", cells.at("default", OURS, PROBES), 3.0),
            ]
        },
    }
}

const LAMBDAS: [f64; 13] = [0.0, 0.25, 0.5, 0.7, 0.769, 0.785, 0.8, 0.842, 0.868, 0.9, 0.95, 0.99, 1.0];

fn fig10(length: Length) -> Plan {
    let scenario = || length.cut(Scenario::half_slow(100, WORK_MS / 1.5, 0.94, NORMAL));
    let mut points: Vec<Point> = length
        .pick(&LAMBDAS, &[0, 2, 9, 12])
        .into_iter()
        .map(|lambda| Point {
            label: format!("{lambda}"),
            scenario: scenario(),
            arms: arms([("Linear", Arm::Prequal(Prequal { rule: Rule::Linear(lambda), ..paper() }))]),
        })
        .collect();
    points.push(Point {
        label: "HCL".to_owned(),
        scenario: scenario(),
        arms: arms([(PAPER, Arm::Prequal(paper())), (OURS, Arm::Prequal(ours())), ("floor", Arm::Floor)]),
    });
    Plan {
        name: "fig10",
        title: "linear combinations of latency and RIF (paper, appendix A)",
        text: "0.94x load, half of the fleet twice as slow, score (1−λ)·latency + λ·75 ms·RIF. The paper: every quantile \
            improves monotonically up to λ = 1, and HCL beats all of them. Here λ = 0 is terrible and HCL wins; that the \
            gain goes on from 0.5 to 1 does not reproduce (flat within the spread).",
        x_label: "λ, and the hot/cold rule",
        points,
        metrics: STANDARD.to_vec(),
        columns: LATENCIES.to_vec(),
        charts: vec![(P99, true)],
        judge: |cells| {
            let linear = cells.0.iter().filter(|c| c.arm == "Linear").map(|c| c.median(P99));
            let (best, _) = crate::stats::min_max(linear);
            vec![at_most(
                "paper profile, p99 over that of the best λ",
                cells.at("HCL", PAPER, P99) / best,
                0.9,
            )]
        },
    }
}

// --- what others have tested

fn finagle(length: Length) -> Plan {
    let mut scenario = Scenario::testbed(11, 1.0, Spare::None);
    scenario.servers = vec![ServerSpec::new(167.0, Service::Delay); 11];
    scenario.clients = 1;
    scenario.load = Load::Poisson(1000.0);
    scenario.variation = 5.0 / 167.0;
    (scenario.warm_up, scenario.measured, scenario.deadline) = (10.0, 60.0, None);
    scenario.changes = vec![(25.0, Change::Work(0, 2000.0)), (55.0, Change::Work(0, 167.0))];
    let _ = length;
    Plan {
        name: "finagle",
        title: "one server of eleven answers in 2 s for half a minute (seed 001)",
        text: "One client, 1000 queries/s, pure delays of N(167, 5) ms, one server at 2 s from second 15 to 45 of 60. Success is \
            an answer within a second. The post: round robin 95 %, least loaded 99 %, peak EWMA 99.9 %. `healed` is the \
            healed server's share of the last 5 s (fair: 9.09 %).",
        x_label: "",
        points: vec![Point {
            label: "60 s".to_owned(),
            scenario,
            arms: arms([
                ("RR", Arm::RoundRobin),
                ("LL", Arm::LeastLoaded),
                ("LL-Po2C", Arm::LeastLoadedPo2c),
                ("Zuul", Arm::Zuul(64)),
                ("Peak EWMA", Arm::PeakEwma(Scan::TwoChoices)),
                ("Peak EWMA, full scan", Arm::PeakEwma(Scan::Full)),
                ("Prequal sync", sync()),
                (PAPER, Arm::Prequal(paper())),
                ("paper, hot if RIF > θ", paper_with(|pool| pool.hot = HotRule::Gt)),
                (OURS, Arm::Prequal(ours())),
                (SMALL, Arm::Prequal(small())),
            ]),
        }],
        metrics: standard_and(&[
            Metric { name: "success_1s", of: |_, _, latencies| latencies.within(1000.0) },
            Metric { name: "healed_share", of: |_, run, _| run.share(|server| server == 0, |at| at >= 55.0) },
            Metric { name: "late", of: |_, _, l| (1.0 - l.within(1000.0)) * l.len() as f64 },
        ]),
        columns: vec![
            ("success", OWN, three_percent),
            ("late queries", OWN + 2, whole),
            ("p99 ms", P99, ms),
            ("p99.9 ms", P999, ms),
            ("healed", OWN + 1, percent),
            ("probes/query", PROBES, two),
        ],
        charts: Vec::new(),
        judge: |cells| {
            let success = |arm: &str| cells.at("60 s", arm, OWN) * 100.0;
            vec![
                between("RR, success %", success("RR"), 95.2..=95.6),
                between("LL, success %", success("LL"), 99.4..=99.6),
                at_least("peak EWMA, success %", success("Peak EWMA"), 99.9),
                at_least("ours, success %", success(OURS), 99.9),
                at_least(
                    "ours, share of the healed server in the last 5 s, %",
                    cells.at("60 s", OURS, OWN + 1) * 100.0,
                    4.5,
                ),
            ]
        },
    }
}

fn three_percent(value: f64) -> String {
    format!("{:.3} %", value * 100.0)
}

fn ingress(length: Length) -> Plan {
    let points = [1, 4].map(|clients| {
        let mut scenario = Scenario::testbed(16, 1.0, Spare::None);
        let delay = |server: usize| ServerSpec::new(if server < 14 { 50.0 } else { 800.0 }, Service::Delay);
        scenario.servers = (0..16).map(delay).collect();
        (scenario.clients, scenario.load, scenario.variation) = (clients, Load::Poisson(500.0), 0.0);
        (scenario.warm_up, scenario.measured, scenario.deadline) =
            (20.0, if length.quick { 60.0 } else { 300.0 }, None);
        Point {
            label: format!("{clients} client{}", if clients == 1 { "" } else { "s" }),
            scenario,
            arms: arms([
                ("RR", Arm::RoundRobin),
                ("LL", Arm::LeastLoaded),
                ("LL-Po2C", Arm::LeastLoadedPo2c),
                ("Zuul", Arm::Zuul(64)),
                ("Peak EWMA", Arm::PeakEwma(Scan::TwoChoices)),
                ("Prequal sync", sync()),
                (PAPER, Arm::Prequal(paper())),
                ("paper, hot if RIF > θ", paper_with(|pool| pool.hot = HotRule::Gt)),
                (OURS, Arm::Prequal(ours())),
                (SMALL, Arm::Prequal(small())),
            ]),
        }
    });
    Plan {
        name: "ingress",
        title: "16 servers, two of them sixteen times as slow (seed 003)",
        text: "Pure delays of 50 ms, 800 on two servers, 500 queries/s. The post (p99 / p99.9): round robin 807 / 835 ms, \
            least connections 802 / 809, Prequal 81 / 127.",
        x_label: "",
        points: points.into(),
        metrics: standard_and(&[SLOW_SHARE]),
        columns: columns(&[("to slow pair", OWN, three_percent)]),
        charts: Vec::new(),
        judge: |cells| {
            vec![
                at_least("RR, p99 ms with 1 client", cells.at("1 client", "RR", P99), 800.0),
                at_most("ours, p99 ms with 1 client", cells.at("1 client", OURS, P99), 55.0),
                at_most("ours, p99 ms with 4 clients", cells.at("4 clients", OURS, P99), 55.0),
            ]
        },
    }
}

fn netflix(length: Length) -> Plan {
    let point = |label: &str, factor: f64, extra_ms: f64| {
        let mut scenario = Scenario::testbed(40, 1.0, Spare::None);
        scenario.servers = (0..40)
            .map(|server| {
                let slow = server >= 20;
                let mut spec = ServerSpec::new(
                    if slow { 10.0 * factor } else { 10.0 },
                    Service::Cpu { cores: 4.0, spare: Spare::None },
                );
                spec.extra_ms = if slow { extra_ms } else { 0.0 };
                (spec.slots, spec.queue) = (50, 0);
                spec
            })
            .collect();
        scenario.clients = 200;
        scenario.load = Load::Poisson(4000.0);
        Point {
            label: label.to_owned(),
            scenario: length.cut(scenario),
            arms: arms([
                ("RR", Arm::RoundRobin),
                ("WRR", Arm::WeightedRoundRobin),
                ("LL", Arm::LeastLoaded),
                ("LL-Po2C", Arm::LeastLoadedPo2c),
                ("Zuul", Arm::Zuul(50)),
                ("C3", c3()),
                (PAPER, Arm::Prequal(paper())),
                (OURS, Arm::Prequal(ours())),
            ]),
        }
    };
    Plan {
        name: "netflix",
        title: "half of the origin is slow (seed 002)",
        text: "200 balancers, 4000 queries/s, 20 + 20 servers of 4 cores and 50 slots; beyond those a query is refused. The post \
            says only that Zuul's choice of two sent about 15 % to the slow half; the work, the thresholds and Zuul's \
            weights are unpublished, and this model's Zuul does not get there.",
        x_label: "",
        points: vec![point("4x CPU", 4.0, 0.0), point("2x CPU + 100 ms", 2.0, 100.0)],
        metrics: standard_and(&[SLOW_SHARE]),
        columns: columns(&[("to slow half", OWN, percent)]),
        charts: Vec::new(),
        judge: |cells| {
            vec![
                at_most(
                    "paper profile, share to the slow half (4x CPU)",
                    cells.at("4x CPU", PAPER, OWN),
                    0.15,
                ),
                at_most("ours, share to the slow half (4x CPU)", cells.at("4x CPU", OURS, OWN), 0.15),
                at_most("ours, failures", cells.worst(OURS, FAILED), 0.0),
            ]
        },
    }
}

fn sinkhole(length: Length) -> Plan {
    let point = |label: &str, share: Option<f64>| {
        let mut scenario = Scenario::testbed(100, 0.75, NORMAL);
        let bad = share.map_or(Change::Frozen(0, true), |share| Change::Failing(0, share));
        let good = share.map_or(Change::Frozen(0, false), |_| Change::Failing(0, 0.0));
        scenario.changes = vec![(scenario.warm_up, bad), (scenario.warm_up + 30.0, good)];
        scenario.measured = 60.0;
        Point {
            label: label.to_owned(),
            scenario,
            arms: arms([
                ("Random", Arm::Random),
                ("LL", Arm::LeastLoaded),
                ("Zuul", Arm::Zuul(64)),
                ("C3", c3()),
                (PAPER, Arm::Prequal(paper())),
                (OURS, Arm::Prequal(ours())),
            ]),
        }
    };
    let _ = length;
    Plan {
        name: "sinkhole",
        title: "one server of 100 fails its queries at once, or freezes",
        text: "0.75x load; one server fails all, half or 30 % of its queries immediately, or does nothing at all, for 30 s and \
            then heals. Shares are over the fair one (1.0). Each of the 100 clients finds out by itself or from the server's \
            reports, and tries again every 8 s at the latest: that alone is a share of 0.2.",
        x_label: "",
        points: vec![
            point("fails all", Some(1.0)),
            point("fails half", Some(0.5)),
            point("fails 30 %", Some(0.3)),
            point("frozen", None),
        ],
        metrics: standard_and(&[
            Metric {
                name: "share_failing",
                of: |scenario, run, _| run.share(|s| s == 0, |at| at < 30.0) * scenario.servers.len() as f64,
            },
            Metric {
                name: "share_healed",
                of: |scenario, run, _| run.share(|s| s == 0, |at| at >= 50.0) * scenario.servers.len() as f64,
            },
        ]),
        columns: vec![
            ("share while failing", OWN, two),
            ("share 20 s after healing", OWN + 1, two),
            ("failed", FAILED, percent),
            ("p99 ms", P99, ms),
        ],
        charts: Vec::new(),
        judge: |cells| {
            let points = ["fails all", "fails half", "fails 30 %"];
            let failing = points.map(|point| {
                at_most(&format!("ours, share while it {point}"), cells.at(point, OURS, OWN), 0.5)
            });
            let healed = points.map(|point| {
                let share = cells.at(point, OURS, OWN + 1);
                at_least(&format!("ours, share 20 s after healing, {point}"), share, 0.5)
            });
            [failing, healed].concat()
        },
    }
}

fn smallfleet(length: Length) -> Plan {
    let costs = length.pick(&[0.0, 0.1, 0.5, 1.0], &[0, 2]).into_iter().map(|cost| {
        let mut scenario = Scenario::testbed(4, 1.0, Spare::None);
        let core = Service::Cpu { cores: 1.0, spare: Spare::None };
        scenario.servers =
            (0..4).map(|server| ServerSpec::new(if server == 3 { 16.0 } else { 4.0 }, core)).collect();
        (scenario.clients, scenario.load, scenario.variation) = (1, Load::Closed { users: 30 }, 0.0);
        (scenario.deadline, scenario.probe_cost_ms) = (None, cost);
        Point {
            label: format!("{cost} ms"),
            scenario: length.cut(scenario),
            arms: arms([
                ("RR", Arm::RoundRobin),
                ("LL", Arm::LeastLoaded),
                ("Peak EWMA", Arm::PeakEwma(Scan::TwoChoices)),
                (PAPER, Arm::Prequal(paper())),
                (OURS, Arm::Prequal(ours())),
                (SMALL, Arm::Prequal(small())),
            ]),
        }
    });
    Plan {
        name: "smallfleet",
        title: "what probes cost four CPU-bound servers (seed 003)",
        text: "4 servers of one core, one four times as slow, 30 users in a closed loop, 4 ms of work, against the CPU that a \
            probe costs a server. Seed 003 saw Prequal 25 % below round robin in such a test. Throughput is what counts in \
            a closed loop.",
        x_label: "CPU per probe",
        points: costs.collect(),
        metrics: standard_and(&[Metric {
            name: "throughput",
            of: |scenario, run, _| run.samples.len() as f64 / scenario.measured,
        }]),
        columns: vec![
            ("queries/s", OWN, one),
            ("p50 ms", P50, one),
            ("p99 ms", P99, one),
            ("probes/query", PROBES, two),
        ],
        charts: vec![(OWN, false)],
        judge: |cells| {
            let over_ll = |arm: &str| cells.at("0.5 ms", arm, OWN) / cells.at("0.5 ms", "LL", OWN);
            vec![
                at_least("paper profile, throughput over LL's at 0.5 ms a probe", over_ll(PAPER), 0.75),
                at_least("ours, throughput over LL's at 0.5 ms a probe", over_ll(OURS), 0.9),
            ]
        },
    }
}

// --- scale, churn, sharing, budget

fn scale(length: Length) -> Plan {
    let sizes = length.pick(&[4, 10, 16, 24, 32, 100, 316, 1000], &[0, 2, 5]);
    let points = sizes.into_iter().map(|n| {
        let mut scenario = length.cut(Scenario::testbed(n, 1.14, NORMAL));
        if n > 100 {
            (scenario.warm_up, scenario.measured) = (6.0, 6.0);
        }
        Point {
            label: format!("{n} × {n}"),
            scenario,
            arms: arms([
                ("LL-Po2C", Arm::LeastLoadedPo2c),
                (PAPER, Arm::Prequal(paper())),
                (OURS, Arm::Prequal(ours())),
                ("floor", Arm::Floor),
            ]),
        }
    });
    Plan {
        name: "scale",
        title: "from 4 to 1000 clients and servers",
        text: "1.14x load. Small fleets cannot average the antagonists away: below 16 servers the load may simply not fit on the \
            machines that the seed drew, whatever the policy (see the floor).",
        x_label: "clients × servers",
        points: points.collect(),
        metrics: standard_and(&[Metric { name: "events", of: |_, run, _| run.events as f64 }]),
        columns: columns(&[("events", OWN, whole)]),
        charts: vec![(P99, true)],
        judge: |cells| {
            let mut verdicts =
                vec![at_most("ours, failures at 100 × 100", cells.at("100 × 100", OURS, FAILED), 0.0)];
            if !cells.at("1000 × 1000", OURS, FAILED).is_nan() {
                verdicts.push(at_most(
                    "ours, failures at 1000 × 1000",
                    cells.at("1000 × 1000", OURS, FAILED),
                    0.0,
                ));
            }
            verdicts
        },
    }
}

fn churn(length: Length) -> Plan {
    let points = [("calm", 0.0), ("one in 4 s", 4.0), ("one a second", 1.0)].map(|(label, every)| {
        let mut scenario = Scenario::testbed(50, 0.75, NORMAL);
        // 50 of 100 addresses are in use; the oldest leaves as a new one joins.
        scenario.servers = vec![ServerSpec::testbed(WORK_MS, NORMAL); 100];
        scenario.clients = 20;
        scenario = length.cut(scenario);
        let end = scenario.warm_up + scenario.measured;
        let steps = if every > 0.0 { ((end - scenario.warm_up) / every) as usize } else { 0 };
        for step in 0..steps {
            let at = scenario.warm_up + step as f64 * every;
            scenario.changes.push((at, Change::Join((50 + step) % 100)));
            scenario.changes.push((at, Change::Leave(step % 100)));
        }
        let verified = PoolSettings { verified_probes: true, ..ours().pool };
        let learning = Prequal { learn: true, pool: verified, ..ours() };
        Point {
            label: label.to_owned(),
            scenario,
            arms: arms([
                ("Random", Arm::Random),
                ("LL-Po2C", Arm::LeastLoadedPo2c),
                ("Prequal (ours, learning)", Arm::Prequal(learning)),
            ]),
        }
    });
    Plan {
        name: "churn",
        title: "endpoints come and go",
        text: "20 clients over 50 servers at 0.75x; a server leaves as another joins. The first two policies are told at once, as \
            Envoy's own are; ours learns its members from probes without an address, as the filter does, and a pick whose \
            server is gone is diverted by Envoy. `fallback` is the share of picks that were left to Envoy's own policy.",
        x_label: "rate of change",
        points: points.into(),
        metrics: standard_and(&[
            Metric {
                name: "diverted",
                of: |_, run, _| run.diverted as f64 / run.samples.len().max(1) as f64,
            },
            Metric {
                name: "fallback",
                of: |_, run, _| run.branches[2] as f64 / run.branches.iter().sum::<u64>().max(1) as f64,
            },
        ]),
        columns: columns(&[("diverted", OWN, three_percent), ("fallback", OWN + 1, three_percent)]),
        charts: Vec::new(),
        judge: |cells| {
            let ours = |label: &str, metric| cells.at(label, "Prequal (ours, learning)", metric);
            vec![
                at_most("ours, failures", cells.worst("Prequal (ours, learning)", FAILED), 0.0),
                at_most(
                    "ours, p99 with one change a second over calm",
                    ours("one a second", P99) / ours("calm", P99),
                    1.1,
                ),
            ]
        },
    }
}

fn sharing(length: Length) -> Plan {
    let mut points = Vec::new();
    for (kind, half_slow) in [("1.5x", false), ("half slow", true)] {
        for pools in length.pick(&[100, 20, 5], &[0, 2]) {
            let mut scenario = if half_slow {
                Scenario::half_slow(100, 30.0, 0.75, NORMAL)
            } else {
                Scenario::testbed(100, 1.5, NORMAL)
            };
            scenario.clients = pools;
            points.push(Point {
                label: format!("{kind}, {pools} pools"),
                scenario: length.cut(scenario),
                arms: arms([(PAPER, Arm::Prequal(paper())), (OURS, Arm::Prequal(ours()))]),
            });
        }
    }
    Plan {
        name: "sharing",
        title: "100 clients share pools, which is what shared data buys",
        text: "The traffic of 100 clients through 100, 20 and 5 pools: the workers of one Envoy share a pool. At 1.5x load, and \
            with half of the fleet slow at 0.75x.",
        x_label: "scenario and pools",
        points,
        metrics: STANDARD.to_vec(),
        columns: LATENCIES.to_vec(),
        charts: vec![(P999, false)],
        judge: |cells| {
            vec![at_most(
                "ours at 1.5x, p99.9 with 5 pools over that with 100",
                cells.at("1.5x, 5 pools", OURS, P999) / cells.at("1.5x, 100 pools", OURS, P999),
                1.0,
            )]
        },
    }
}

fn budget(length: Length) -> Plan {
    let rates = length.pick(&[1.0, 5.0, 20.0, 100.0, 500.0, 2000.0, 5000.0], &[0, 2, 4]);
    let points = rates.into_iter().map(|qps| {
        // One Envoy among many: the servers are as busy as the testbed's, this client's share varies.
        let mut scenario = Scenario::testbed(100, 0.75, Spare::None);
        (scenario.clients, scenario.load) = (1, Load::Poisson(qps));
        scenario.measured = if qps < 100.0 { 300.0 } else { 30.0 };
        Point { label: format!("{qps}/s"), scenario, arms: arms([(OURS, Arm::Prequal(ours()))]) }
    });
    Plan {
        name: "budget",
        title: "age of the pool's information under the adaptive budget",
        text: "One client, 100 servers, from 1 to 5000 queries/s. The age is what the budget's target means: the median \
            age of the pool's entries, taken at every pick (no entry counts as infinitely old); the target is 500 ms.",
        x_label: "queries per second",
        points: points.collect(),
        metrics: standard_and(&[
            Metric {
                name: "age_p99_ms",
                of: |_, run, _| {
                    let ages: Vec<f64> = run.ages_ms.iter().map(|age| f64::from(*age)).collect();
                    quantile(&ages, 0.99)
                },
            },
            Metric { name: "probes_per_s", of: |scenario, run, _| run.probes as f64 / scenario.measured },
        ]),
        columns: vec![
            ("age p99 ms", OWN, whole),
            ("probes/s", OWN + 1, one),
            ("probes/query", PROBES, two),
            ("p99 ms", P99, ms),
        ],
        charts: vec![(OWN + 1, true)],
        judge: |cells| {
            vec![at_most("age at p99 over all rates and seeds, ms", cells.worst(OURS, OWN), 500.0)]
        },
    }
}

fn variants(length: Length) -> Plan {
    let fixed = |r_probe: f64, r_remove: f64| {
        move |pool: &mut PoolSettings| {
            pool.budget = Budget::Fixed { r_probe };
            pool.r_remove = r_remove;
        }
    };
    let scenes = [
        ("1.27x", Scenario::testbed(100, 1.27, NORMAL), None),
        ("1.74x", Scenario::testbed(100, 1.74, NORMAL), None),
        ("1.5x, 0.5 probes", Scenario::testbed(100, 1.5, NORMAL), Some((0.5, 0.25))),
        ("half slow", Scenario::half_slow(100, 30.0, 0.75, NORMAL), None),
    ];
    let points = scenes.into_iter().map(|(label, scenario, rates)| {
        let with = |change: &dyn Fn(&mut Prequal)| {
            let mut prequal = ours();
            if let Some((r_probe, r_remove)) = rates {
                fixed(r_probe, r_remove)(&mut prequal.pool);
            }
            change(&mut prequal);
            Arm::Prequal(prequal)
        };
        let band = |latency_band: f64, q_rif: f64| {
            with(&|prequal| (prequal.pool.latency_band, prequal.pool.q_rif) = (latency_band, q_rif))
        };
        Point {
            label: label.to_owned(),
            scenario: length.cut(scenario),
            arms: arms([
                ("ours", with(&|_| ())),
                ("band 1, Q 0.84", band(1.0, 0.84)),
                ("band 1, Q 0.95", band(1.0, 0.95)),
                ("band 1.3", band(1.3, 0.95)),
                ("band 2", band(2.0, 0.95)),
                ("Q 0.84", band(1.5, 0.84)),
                ("Q 0.99", band(1.5, 0.99)),
                ("hot if RIF > θ", with(&|prequal| prequal.pool.hot = HotRule::Gt)),
                ("no piggyback", with(&|prequal| prequal.piggyback = false)),
                ("paper's estimator", with(&|prequal| prequal.paper_tracker = true)),
                ("probes pass over nobody", with(&|prequal| prequal.skip_fresh_ms = None)),
            ]),
        }
    });
    Plan {
        name: "variants",
        title: "ours, one setting changed at a time",
        text: "The default profile against its neighbours, in the four scenarios that its bars come from. `1.5x, 0.5 probes` is \
            fig8's last step.",
        x_label: "scenario",
        points: points.collect(),
        metrics: STANDARD.to_vec(),
        columns: LATENCIES.to_vec(),
        charts: Vec::new(),
        judge: |cells| {
            let worse = |scene: &str, metric| {
                cells.at(scene, "band 1, Q 0.84", metric) / cells.at(scene, "ours", metric)
            };
            vec![
                at_least("1.74x: p99.9 without the band and at Q 0.84 over ours", worse("1.74x", P999), 1.0),
                at_least(
                    "half slow: p99 without the band and at Q 0.84 over ours",
                    worse("half slow", P99),
                    1.0,
                ),
            ]
        },
    }
}
