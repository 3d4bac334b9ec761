//! The figures of the Prequal paper.

use super::*;

/// Factor by which quick runs may miss our own goals. They have one seed, and two runs of one rule with different seeds
/// differ by this much. The full runs, over three seeds, have no such margin.
const ONE_SEED: f64 = 1.02;

pub(super) fn calibration(length: RunLength) -> Experiment {
    // There is so much spare capacity that no query waits, so the latency is the work alone.
    let scenario =
        length.cut(SimScenario::testbed(100, 0.75, Spare::Antagonists { mean: 5.0, sd: 0.0, hobbled: 1.0 }));
    Experiment {
        name: "calibration",
        title: "the work of a query, without queueing",
        text: "Work is max(0, N(80, 80)) ms of one core, as in the paper (normal, standard deviation equal to the \
            mean, truncated at zero). The paper's four quantiles below the allocation are 80, 182, 265 and 325 ms.",
        x_label: "",
        points: vec![Point { label: "0.75x".to_owned(), scenario, arms: arms([("Random", SimArm::Random)]) }],
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

pub(super) fn fig6(length: RunLength) -> Experiment {
    let points = length.pick(&RAMP, &[0, 3, 5, 8]).into_iter().map(|load| Point {
        label: format!("{load}x"),
        scenario: SimScenario::testbed(100, load, NORMAL),
        arms: arms([
            ("WRR", SimArm::WeightedRoundRobin),
            (PAPER, SimArm::Prequal(paper())),
            (OURS, SimArm::Prequal(ours())),
            ("floor", SimArm::Floor),
        ]),
    });
    Experiment {
        name: "fig6",
        title: "load ramp (paper §5.1, figure 6)",
        text: "100 clients, 100 servers, load from 0.75 to 1.74 times the allocation, 5 s deadline. In the paper, \
            WRR's p99.9 times out from 1.03x, p99 from 1.27x and p90 from 1.57x, with more than 25 % errors at 1.74x. \
            Prequal has no errors; its p99.9 is about 325 ms up to 1.14x, 350 at 1.27x and about 700 at 1.74x. `floor` \
            is a greedy rule that knows every server's current queue, capacity and speed, which no policy can.",
        x_label: "load over allocation",
        points: points.collect(),
        metrics: standard_and(&[CPU_VARIATION]),
        columns: columns(&[("RIF p99", RIF99, whole), ("CPU, sd over mean", CPU, two)]),
        charts: vec![(P99, true), (P999, true), (FAILED, false)],
        judge: |cells| {
            vec![
                at_most("paper profile, failures at any step and seed", cells.worst(PAPER, FAILED), 0.0),
                at_least("WRR, failed share at 1.74x", cells.at("1.74x", "WRR", FAILED), 0.1),
                at_most("paper profile, p99.9 ms at 1.74x", cells.at("1.74x", PAPER, P999), 700.0),
                at_most("paper profile, p99.9 ms at 1.27x", cells.at("1.27x", PAPER, P999), 380.0),
                at_most("ours, failures at any step and seed", cells.worst(OURS, FAILED), 0.0),
                at_most("ours, p99.9 ms at 1.74x", cells.at("1.74x", OURS, P999), 420.0),
                at_most("ours, p99.9 ms at 1.27x", cells.at("1.27x", OURS, P999), 345.0),
                at_most("ours, probes per query at any step", cells.worst(OURS, PROBES), 0.8),
            ]
        },
    }
}

pub(super) fn fig7(length: RunLength) -> Experiment {
    let mut points = Vec::new();
    for load in length.pick(&[0.7, 0.9], &[1]) {
        let percent = load * 100.0;
        points.push(Point {
            label: format!("{percent} %"),
            scenario: SimScenario::testbed(100, load, HEAVY),
            arms: rules(),
        });
        points.push(Point {
            label: format!("{percent} %, half slow"),
            scenario: length.cut(SimScenario::half_slow(100, WORK_MS / 1.5, load, HEAVY)),
            arms: rules(),
        });
    }
    Experiment {
        name: "fig7",
        title: "selection rules (paper §5.2, figure 7)",
        text: "Nine rules of the paper, and CSWRR, Zuul, Peak EWMA, synchronous Prequal and ours, at 70 and 90 % of \
            the allocation, on equal servers and with every other server twice as slow. Antagonists are heavier than \
            in fig6: the paper's WRR also broke at a lower load here. In the paper, Random, RR, WRR and LL are bad at \
            90 %, LL-Po2C and YARP are in between, C3 and Prequal (Q = 0.75) are best and 3 to 8 % apart, and Linear \
            is much worse than either. The result for Linear does **not** reproduce in this model, nor did it in the \
            independent simulation: at λ = 0.5, RIF times 75 ms already outweighs latency.",
        x_label: "",
        points,
        metrics: standard_and(&[SLOW_SHARE]),
        columns: columns(&[("to slow half", OWN, percent)]),
        charts: vec![(P99, true), (P90, true)],
        judge: if length.quick {
            |cells| judge_fig7(cells, ONE_SEED)
        } else {
            |cells| judge_fig7(cells, 1.0)
        },
    }
}

/// Judges fig7; `noise` is the factor by which our own goals may be missed.
fn judge_fig7(cells: &Cells, noise: f64) -> Vec<Verdict> {
    let p99 = |arm: &str| capped(cells.at("90 %", arm, P99));
    let mut verdicts: Vec<Verdict> = [("Random", 5.0), ("RR", 5.0), ("WRR", 5.0), ("LL", 3.0)]
        .map(|(arm, goal)| {
            at_least(&format!("{arm}, p99 over the paper profile's at 90 %"), p99(arm) / p99(PAPER), goal)
        })
        .to_vec();
    let order = ["LL", "LL-Po2C", "YARP-Po2C", PAPER].map(p99);
    verdicts.push(Verdict::new(
        "p99 at 90 % in the order LL > LL-Po2C > YARP > paper profile",
        order.windows(2).all(|pair| pair[0] > pair[1]),
        order.map(ms).join(", "),
    ));
    let over_c3 = |point: &str| cells.at(point, OURS, P99) / cells.at(point, "C3", P99);
    verdicts.push(at_most("ours, p99 over C3's at 90 %", over_c3("90 %"), noise));
    if !over_c3("90 %, half slow").is_nan() {
        verdicts.push(at_most("ours, p99 over C3's, half slow (aim 0.68)", over_c3("90 %, half slow"), 0.75));
    }
    verdicts
}

/// From 4 down to 1/2 probes per query, in steps of √2.
fn probe_rates() -> [f64; 7] {
    [0, 1, 2, 3, 4, 5, 6].map(|step| 4.0 / 2f64.sqrt().powi(step))
}

pub(super) fn fig8(length: RunLength) -> Experiment {
    let points = length.pick(&probe_rates(), &[0, 4, 5, 6]).into_iter().map(|rate| {
        let fixed = move |pool: &mut PoolSettings| {
            pool.budget = Budget::Fixed { r_probe: rate };
            pool.r_remove = 0.25;
        };
        Point {
            label: two(rate),
            scenario: length.cut(SimScenario::testbed(100, 1.5, NORMAL)),
            arms: arms([(PAPER, paper_with(fixed)), (OURS, ours_with(fixed))]),
        }
    });
    Experiment {
        name: "fig8",
        title: "probing rate (paper §5.3, figure 8)",
        text: "1.5x load, r_remove 0.25, from 4 probes a query down to one half. In the paper, little changes \
            down to one probe a query, then latency and RIF jump; it gives no figures. Ours also has the \
            reports that responses carry anyway. Every step down to one probe stays within 15 % of the p99.9 at \
            4 probes, but the ratio of highest to lowest is 1.2, because 2.83 probes do better than 4 (with \
            2.83 or more probes, b_reuse is 1, so more probes only replace the pool's entries faster). The rise \
            towards one probe comes from choosing by latency: with Q = 0.6 the ratio is 1.11, and with RIF \
            alone 1.07. The model's constants do not change it (spare capacity of 1.0 instead of 0.95: 1.19; \
            load 1.45x: 1.18; twice the run length: 1.19). Nor do the interpretations that the paper leaves \
            open (hot if RIF > θ: 1.19; equation (1) with the configured instead of the measured rate: 1.18; \
            samples of at most 2 s: 1.21). Medians over 16 instead of 8 samples at or near the RIF reduce it to \
            1.14, but raise fig6's p99.9 at 1.27x from 374 to 384 ms, above its goal. All figures are from \
            three seeds.",
        x_label: "probes per query",
        points: points.collect(),
        metrics: standard_and(&[CPU_VARIATION, MEDIAN_THETA]),
        columns: columns(&[("RIF p99", RIF99, whole), ("θ p50", THETA, whole)]),
        charts: vec![(P999, false), (RIF99, false), (THETA, false)],
        judge: if length.quick {
            |cells| judge_fig8(cells, ONE_SEED)
        } else {
            |cells| judge_fig8(cells, 1.0)
        },
    }
}

/// Judges fig8; `noise` is the factor by which our own goal may be missed.
fn judge_fig8(cells: &Cells, noise: f64) -> Vec<Verdict> {
    let p999 = |rate: &str| cells.at(rate, PAPER, P999);
    let steps = ["4.00", "2.83", "2.00", "1.41", "1.00"].map(p999);
    let (low, high) = crate::stats::min_max(steps.into_iter().filter(|ms| !ms.is_nan()));
    let four = p999("4.00");
    vec![
        between("paper profile, lowest p99.9 from 4 to 1 probes over that at 4,", low / four, 0.85..=1.15),
        between("paper profile, highest p99.9 from 4 to 1 probes over that at 4,", high / four, 0.85..=1.15),
        at_most("paper profile, highest over lowest p99.9 from 4 to 1 probes", high / low, 1.15),
        at_least("paper profile, p99.9 at 0.71 over that at 1", p999("0.71") / p999("1.00"), 1.2),
        at_least("paper profile, p99.9 at 0.50 over that at 1", p999("0.50") / p999("1.00"), 1.6),
        at_most("ours, p99.9 ms at half a probe per query", cells.at("0.50", OURS, P999), 360.0 * noise),
    ]
}

pub(super) fn fig9(length: RunLength) -> Experiment {
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
            scenario: length.cut(SimScenario::half_slow(100, 30.0, 0.75, NORMAL)),
            arms: arms([(PAPER, paper_with(|pool| pool.q_rif = q_rif))]),
        })
        .collect();
    points.push(Point {
        label: "default".to_owned(),
        scenario: length.cut(SimScenario::half_slow(100, 30.0, 0.75, NORMAL)),
        arms: arms([
            (OURS, SimArm::Prequal(ours())),
            ("ours, fixed 3 probes", ours_with(|pool| pool.budget = Budget::Fixed { r_probe: 3.0 })),
            ("floor", SimArm::Floor),
        ]),
    });
    Experiment {
        name: "fig9",
        title: "RIF quantile, half of the fleet twice as slow (paper §5.3, figure 9)",
        text: "0.75x load, work of 30 ms on the fast half and 60 on the slow one, Q from 0 (RIF only) to 1 (latency \
            only). In the paper, p99 falls from 162 to 142 ms, p90 from 93 to 75 and p50 from 34.5 to 31 as Q goes \
            from 0 to 0.99; all rise sharply at 1. Ours runs with the same settings as in fig6.",
        x_label: "Q_RIF",
        points,
        metrics: standard_and(&[SLOW_SHARE, MEDIAN_THETA]),
        columns: columns(&[
            ("RIF p99", RIF99, whole),
            ("to slow half", OWN, percent),
            ("θ p50", THETA, whole),
        ]),
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
                at_most("ours, probes per query", cells.at("default", OURS, PROBES), 0.8),
            ]
        },
    }
}

const LAMBDAS: [f64; 13] = [0.0, 0.25, 0.5, 0.7, 0.769, 0.785, 0.8, 0.842, 0.868, 0.9, 0.95, 0.99, 1.0];

pub(super) fn fig10(length: RunLength) -> Experiment {
    let scenario = || length.cut(SimScenario::half_slow(100, WORK_MS / 1.5, 0.94, NORMAL));
    let mut points: Vec<Point> = length
        .pick(&LAMBDAS, &[0, 2, 9, 12])
        .into_iter()
        .map(|lambda| Point {
            label: format!("{lambda}"),
            scenario: scenario(),
            arms: arms([("Linear", SimArm::Prequal(Prequal { rule: linear(lambda), ..paper() }))]),
        })
        .collect();
    points.push(Point {
        label: "HCL".to_owned(),
        scenario: scenario(),
        arms: arms([
            (PAPER, SimArm::Prequal(paper())),
            (OURS, SimArm::Prequal(ours())),
            ("floor", SimArm::Floor),
        ]),
    });
    Experiment {
        name: "fig10",
        title: "linear combinations of latency and RIF (paper, appendix A)",
        text: "0.94x load, half of the fleet twice as slow, score (1−λ)·latency + λ·75 ms·RIF. In the paper, every \
            quantile improves monotonically up to λ = 1, and HCL beats all of them. Here λ = 0 is by far the worst and \
            HCL wins. The further improvement from 0.5 to 1 does not reproduce (flat within the spread).",
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
