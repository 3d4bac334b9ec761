//! Fleets drawn at random: how often, and by how much, is Prequal worse than the best of Envoy's own policies?
//!
//! `random` has the fleets that the rule has been changed for. `heldout` has the next ones, which served to compare
//! later versions of the rule. `unseen` has the ones after those, which led to no change of the rule. `moving.rs` has
//! fleets in which something changes all the time, and short runs just after a cold start.
//! Faults other than a slow server are left out; `finagle`, `sinkhole` and `churn` have them.

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};

use super::super::plot::{Chart, Line};
use super::fleets::{MIX, fleet, judged_ratio};
use super::*;

/// Number of fleets of an experiment.
pub(super) const FLEETS: u64 = 120;
/// Highest number of queries per second, so that a run takes seconds.
const MAX_QPS: f64 = 8000.0;
/// Number of queries after the warm-up that a run should have.
const QUERIES: f64 = 40_000.0;

/// Quantiles that are judged: name, metric, and the highest allowed multiple of the best of Envoy's policies.
const JUDGED: [(&str, usize, f64); 3] = [("p50", P50, 1.05), ("p99", P99, 1.05), ("p99.9", P999, 1.1)];
/// Share of the fleets that must be within that multiple.
const GOAL: f64 = 0.9;
/// Percentiles over the fleets that the chart shows.
const SHOWN: [(&str, f64); 7] = [
    ("best", 0.0),
    ("10 %", 0.1),
    ("25 %", 0.25),
    ("median", 0.5),
    ("75 %", 0.75),
    ("90 %", 0.9),
    ("worst", 1.0),
];

/// Draws a value between `low` and `high`; its logarithm is uniform.
pub(super) fn log_uniform(rng: &mut SmallRng, low: f64, high: f64) -> f64 {
    (low.ln() + (high / low).ln() * rng.random::<f64>()).exp()
}

/// How a server works on several queries at a time.
#[derive(Clone, Copy)]
enum Kind {
    Slots(usize),
    Cores(f64),
    /// Serves everything at once, like a server that only waits for other servers.
    Unlimited,
}

/// Draws a fleet in which nothing changes, except that one server may be slow for 15 s. The same number always gives
/// the same fleet.
pub(super) fn drawn(number: u64) -> Point {
    let Drawn { mut point, episode, .. } = drawn_from(&mut SmallRng::seed_from_u64(number), number);
    if let Some(times) = episode {
        point.label += &format!(", one {times:.0}x for 15 s");
        point = point.slowed(1, times, 10.0, 15.0);
    }
    point
}

pub(super) struct Drawn {
    pub(super) point: Point,
    /// Share of what the fleet can serve.
    pub(super) load: f64,
    /// How many times slower a server is for 15 s, if one is.
    episode: Option<f64>,
}

/// Draws a fleet, without carrying out the slow episode.
pub(super) fn drawn_from(rng: &mut SmallRng, number: u64) -> Drawn {
    let servers = log_uniform(rng, 2.0, 128.0).round() as usize;
    let kind = match rng.random_range(0..10) {
        0..=5 => Kind::Slots(*[1, 2, 4, 8, 16].choose(rng).unwrap_or(&1)),
        6..=7 => Kind::Cores(*[1.0, 2.0, 4.0].choose(rng).unwrap_or(&1.0)),
        _ => Kind::Unlimited,
    };
    let (sizes, of_sizes, mean) = match rng.random_range(0..5) {
        0 => (Sizes::Exact, "exactly", 1.0),
        1 => (Sizes::Exponential, "exp", 1.0),
        2 => (Sizes::LogNormal { sigma: 0.5 }, "lognormal σ 0.5", 0.125f64.exp()),
        3 => (Sizes::LogNormal { sigma: 1.2 }, "lognormal σ 1.2", 0.72f64.exp()),
        _ => (MIX, "mix", 2.9),
    };
    let mut work_ms = log_uniform(rng, 2.0, 200.0);
    let load = 0.2 + 0.7 * rng.random::<f64>();
    let clients = *[1, 1, 1, 2, 4, 16].choose(rng).unwrap_or(&1);
    // In half of the fleets some of the servers are slower than the others.
    let (slow, times) = if rng.random::<bool>() {
        let share = 0.1 + 0.4 * rng.random::<f64>();
        ((share * servers as f64).ceil() as usize, log_uniform(rng, 1.3, 10.0))
    } else {
        (0, 1.0)
    };
    // In one of six, a server is slow for 15 s.
    let episode = (rng.random_range(0..6) == 0).then(|| log_uniform(rng, 2.0, 20.0));

    // Queries per second that the fleet can serve if `work_ms` is the usual work of a query. A server without a limit
    // counts as if it served four queries at a time.
    let capacity = |work_ms: f64| {
        let at_once = match kind {
            Kind::Slots(slots) => slots as f64,
            Kind::Cores(cores) => cores,
            Kind::Unlimited => 4.0,
        };
        let equal = (servers - slow) as f64 + slow as f64 / times;
        equal * at_once / (work_ms * mean) * 1e3
    };
    work_ms *= (load * capacity(work_ms) / MAX_QPS).max(1.0);
    let qps = load * capacity(work_ms);

    let slots = match kind {
        Kind::Slots(slots) => slots,
        Kind::Cores(_) | Kind::Unlimited => usize::MAX,
    };
    let (of_kind, of_load) = match kind {
        Kind::Slots(slots) => (format!("× {slots}"), format!("{:.0} %", load * 100.0)),
        Kind::Cores(cores) => (format!("of {cores:.0} cores"), format!("{:.0} %", load * 100.0)),
        Kind::Unlimited => ("no queues".to_owned(), format!("{qps:.0}/s")),
    };
    let mut label =
        format!("#{number}: {servers} {of_kind}, {of_sizes} {work_ms:.0}, {of_load}, {clients} cl.");
    if slow > 0 {
        label += &format!(", {slow} {times:.1}x");
    }
    let kinds = [(servers - slow, slots, work_ms), (slow, slots, work_ms * times)];
    let mut point = fleet(&label, &kinds, sizes, qps).clients(clients);
    if let Kind::Cores(cores) = kind {
        for server in &mut point.scenario.servers {
            server.service = SimService::Cpu { cores, spare: Spare::None };
        }
    }
    point.scenario.measured = (QUERIES / qps).clamp(40.0, 2000.0);
    Drawn { point, load, episode }
}

pub(super) fn random(length: RunLength) -> Experiment {
    over_fleets(
        drawn,
        0,
        length,
        "random",
        "fleets drawn at random, against Envoy's own policies",
        "120 fleets from a random generator. Each has 2 to 128 servers, with 1 to 16 slots, with 1 to 4 shared cores, \
            or without a limit; one of five distributions of work; 2 to 200 ms; 20 to 90 % load; 1 to 16 clients. In half \
            of the fleets 10 to 50 % of the servers are 1.3 to 10 times slower than the others, and in one of six fleets \
            one server is 2 to 20 times slower for 15 s. The labels have the form of those in `fleets`; `cl.` means \
            clients. For each fleet and quantile, the figure is divided by the best figure of Envoy's policies, which \
            are random, round robin, least request (full scan and two choices), and client-side WRR with default and \
            with fast settings. The plot shows how this ratio is distributed over the fleets.",
    )
}

pub(super) fn heldout(length: RunLength) -> Experiment {
    over_fleets(
        drawn,
        FLEETS,
        length,
        "heldout",
        "more fleets drawn at random, run only after the rule was changed",
        "The next 120 fleets of the generator of `random`. They were run for the first time after the last change \
            that `random` had led to. These fleets have since been used to compare later versions of the rule.",
    )
}

pub(super) fn unseen(length: RunLength) -> Experiment {
    over_fleets(
        drawn,
        2 * FLEETS,
        length,
        "unseen",
        "yet more fleets drawn at random, which played no part in any choice",
        "The 120 fleets after those of `heldout`. The rule has been changed since they were first run, \
            but not because of them.",
    )
}

/// The experiment with the fleets after number `before`.
pub(super) fn over_fleets(
    fleet: fn(u64) -> Point,
    before: u64,
    length: RunLength,
    name: &'static str,
    title: &'static str,
    text: &'static str,
) -> Experiment {
    let fleets = if length.quick { FLEETS / 10 } else { FLEETS };
    let arms = arms([
        ("Random", SimArm::Random),
        ("RR", SimArm::RoundRobin),
        (CSWRR, SimArm::Cswrr(cswrr::Settings::DEFAULT)),
        (CSWRR_FAST, SimArm::Cswrr(cswrr::Settings::FAST)),
        ("LL", SimArm::LeastLoaded),
        ("LL-Po2C", SimArm::LeastLoadedPo2c),
        (OURS, SimArm::Prequal(ours())),
        (LEARNING, learning(|_| ())),
    ]);
    Experiment {
        name,
        title,
        text,
        x_label: "",
        points: (before + 1..=before + fleets)
            .map(|number| Point { arms: arms.clone(), ..fleet(number) })
            .collect(),
        metrics: STANDARD.to_vec(),
        columns: vec![
            ("p50 ms", P50, tenths),
            ("p90 ms", P90, tenths),
            ("p99 ms", P99, tenths),
            ("p99.9 ms", P999, tenths),
            ("failed", FAILED, percent),
            ("probes/query", PROBES, two),
        ],
        charts: Vec::new(),
        judge,
    }
}

/// For every fleet, its label and the value of an arm over that of the best of Envoy's policies, in ascending order. A
/// policy counts as Envoy's if it is not Prequal.
fn ratios<'a>(cells: &'a Cells, arm: &str, metric: usize) -> Vec<(f64, &'a str)> {
    let own = cells.0.iter().filter(|cell| cell.arm == arm);
    let ratio = |cell: &'a Cell| {
        let others =
            cells.0.iter().filter(|other| other.point == cell.point && !other.arm.starts_with("Prequal"));
        let best = others.map(|other| other.median(metric)).min_by(f64::total_cmp)?;
        Some((judged_ratio(metric, cell.median(metric), best), &*cell.point))
    };
    let mut ratios: Vec<(f64, &str)> = own.filter_map(ratio).filter(|(ratio, _)| !ratio.is_nan()).collect();
    ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
    ratios
}

/// The value below which `share` of the ratios are.
fn at_share(ratios: &[(f64, &str)], share: f64) -> f64 {
    let index = (share * ratios.len().saturating_sub(1) as f64).round() as usize;
    ratios.get(index).map_or(f64::NAN, |(ratio, _)| *ratio)
}

pub(super) fn judge(cells: &Cells) -> Vec<Verdict> {
    let judged = [OURS, LEARNING].into_iter().flat_map(|arm| JUDGED.map(|judged| (arm, judged)));
    let verdict = |(arm, (name, metric, within)): (&str, (&str, usize, f64))| {
        let ratios = ratios(cells, arm, metric);
        let (worst, whose) = ratios.last()?;
        let good = ratios.iter().filter(|(ratio, _)| *ratio <= within).count();
        let what = format!(
            "{arm}, {name}: in {:.0} % of the fleets within {:.0} % of Envoy's best policy",
            GOAL * 100.0,
            (within - 1.0) * 100.0
        );
        let got = format!(
            "{good} of {}; median {:.2}x, worst {worst:.2}x ({whose})",
            ratios.len(),
            at_share(&ratios, 0.5)
        );
        Some(Verdict::new(what, good as f64 >= GOAL * ratios.len() as f64, got))
    };
    judged.filter_map(verdict).collect()
}

/// The distribution over the fleets of each policy's ratio to the best of Envoy's, one chart per quantile.
pub(super) fn charts(cells: &Cells) -> Vec<Chart> {
    let chart = |(name, metric, _): (&str, usize, f64)| {
        let line = |arm: &&str| {
            let ratios = ratios(cells, arm, metric);
            let value = |(_, share): &(&str, f64)| {
                let ratio = at_share(&ratios, *share);
                (ratio, ratio, ratio)
            };
            Line { label: (*arm).to_owned(), values: SHOWN.iter().map(value).collect() }
        };
        // `weights` has only some of the policies.
        let arms = [OURS, LEARNING, "RR", CSWRR, "LL", "LL-Po2C"];
        let run = arms.iter().filter(|arm| cells.0.iter().any(|cell| cell.arm == **arm));
        Chart {
            title: format!("{name} over that of Envoy's best policy"),
            x_label: "fleets, from the best for the policy to the worst".to_owned(),
            points: SHOWN.map(|(label, _)| label.to_owned()).into(),
            lines: run.map(line).collect(),
            logarithmic: true,
            ceiling: Some(10.0),
            format: |times| format!("{times:.2}x"),
        }
    };
    JUDGED.map(chart).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_gives_the_same_fleet_every_time_and_all_are_within_the_stated_ranges() {
        let mut seen = Vec::new();
        for number in 1..=3 * FLEETS {
            let (point, again) = (drawn(number), drawn(number));
            assert_eq!(format!("{:?}", point.scenario), format!("{:?}", again.scenario));
            let servers = point.scenario.servers.len();
            assert!((2..=128).contains(&servers), "{}", point.label);
            let SimLoad::Poisson(qps) = point.scenario.load else { panic!("{}", point.label) };
            assert!(qps <= MAX_QPS * 1.001, "{}: {qps} queries/s", point.label);
            assert!(!seen.contains(&point.label), "{}", point.label);
            seen.push(point.label);
        }
    }

    #[test]
    fn each_quantile_is_compared_with_the_best_policy_for_it_and_the_worst_fleet_is_named() {
        let cell = |point: &str, arm: &str, [p50, p99, p999]: [f64; 3]| {
            let mut values = vec![0.0; STANDARD.len()];
            (values[P50], values[P99], values[P999]) = (p50, p99, p999);
            Cell { point: point.to_owned(), arm: arm.to_owned(), values: vec![(1, values)] }
        };
        let cells = Cells(vec![
            cell("a", "RR", [10.0, 100.0, 400.0]),
            cell("a", "LL", [12.0, 90.0, 500.0]),
            cell("a", OURS, [11.0, 99.0, 200.0]),
            cell("b", "RR", [10.0, 100.0, 400.0]),
            cell("b", OURS, [20.0, 80.0, 800.0]),
        ]);
        let verdicts = judge(&cells);
        let got: Vec<&str> = verdicts.iter().map(|verdict| &*verdict.got).collect();
        assert_eq!(
            got,
            [
                "1 of 2; median 2.00x, worst 2.00x (b)",
                "1 of 2; median 1.10x, worst 1.10x (a)",
                "1 of 2; median 2.00x, worst 2.00x (b)"
            ]
        );
        assert!(verdicts.iter().all(|verdict| !verdict.reached));
    }
}
