//! Effects of the fleet on Prequal: failures, size, change, sharing, and Prequal's own settings.

use std::ops::Range;

use super::*;
use crate::sim::measure::RunRecord;

pub(super) fn sinkhole() -> Experiment {
    let point = |label: &str, share: Option<f64>| {
        let mut scenario = SimScenario::testbed(100, 0.75, NORMAL);
        let bad = share.map_or(SimChange::Frozen(0, true), |share| SimChange::Failing(0, share));
        let good = share.map_or(SimChange::Frozen(0, false), |_| SimChange::Failing(0, 0.0));
        scenario.changes = vec![(scenario.warm_up, bad), (scenario.warm_up + 30.0, good)];
        scenario.measured = 60.0;
        Point {
            label: label.to_owned(),
            scenario,
            arms: arms([
                ("Random", SimArm::Random),
                (CSWRR, SimArm::Cswrr(cswrr::Settings::DEFAULT)),
                (CSWRR_FAST, SimArm::Cswrr(cswrr::Settings::FAST)),
                ("LL", SimArm::LeastLoaded),
                ("Zuul", SimArm::Zuul(64)),
                ("C3", c3()),
                (PAPER, SimArm::Prequal(paper())),
                (OURS, SimArm::Prequal(ours())),
            ]),
        }
    };
    Experiment {
        name: "sinkhole",
        title: "one server of 100 fails its queries at once, or freezes",
        text: "0.75x load; one server fails all, half or 30 % of its queries immediately, or freezes, for 30 s and \
            then heals. Shares are relative to the fair share (1.0). Each of the 100 clients detects the failure by \
            itself or from the server's reports. Prequal (ours) then tries the server again after 1, 2, 4 and then \
            every 8 s, at the earliest. One trial of every client in 8 s is a share of 0.23.",
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
        charts: vec![(OWN, true), (OWN + 1, false)],
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

pub(super) fn scale(length: RunLength) -> Experiment {
    let even = [4, 10, 16, 24, 32, 100, 316, 1000].map(|n| (n, n));
    // Fewer clients than servers, as with gateways, and more, as with sidecars.
    let sizes: Vec<(usize, usize)> = even.into_iter().chain([(4, 100), (1000, 100), (10, 1000)]).collect();
    let points = length.pick(&sizes, &[0, 2, 5, 8]).into_iter().map(|(clients, servers)| {
        let mut scenario = length.cut(SimScenario::testbed(servers, 1.14, NORMAL));
        scenario.clients = clients;
        if servers > 100 {
            (scenario.warm_up, scenario.measured) = (6.0, 6.0);
        }
        Point {
            label: format!("{clients} × {servers}"),
            scenario,
            arms: arms([
                ("LL-Po2C", SimArm::LeastLoadedPo2c),
                (PAPER, SimArm::Prequal(paper())),
                (OURS, SimArm::Prequal(ours())),
                ("floor", SimArm::Floor),
            ]),
        }
    });
    Experiment {
        name: "scale",
        title: "from 4 to 1000 clients and servers",
        text: "1.14x load. Small fleets cannot average out the antagonists: below 16 servers the load may not fit on \
            the machines that the seed drew, whatever the policy (see the floor).",
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

pub(super) fn churn(length: RunLength) -> Experiment {
    let points = [("calm", 0.0), ("one in 4 s", 4.0), ("one a second", 1.0)].map(|(label, every)| {
        let mut scenario = SimScenario::testbed(50, 0.75, NORMAL);
        // 50 of 100 addresses are in use; the oldest server leaves as a new one joins.
        scenario.servers = vec![ServerSpec::testbed(WORK_MS, NORMAL); 100];
        scenario.clients = 20;
        scenario = length.cut(scenario);
        let end = scenario.warm_up + scenario.measured;
        let steps = if every > 0.0 { ((end - scenario.warm_up) / every) as usize } else { 0 };
        for step in 0..steps {
            let at = scenario.warm_up + step as f64 * every;
            scenario.changes.push((at, SimChange::Join((50 + step) % 100)));
            scenario.changes.push((at, SimChange::Leave(step % 100)));
        }
        Point {
            label: label.to_owned(),
            scenario,
            arms: arms([
                ("Random", SimArm::Random),
                ("LL-Po2C", SimArm::LeastLoadedPo2c),
                (LEARNING, learning(|_| ())),
            ]),
        }
    });
    Experiment {
        name: "churn",
        title: "endpoints come and go",
        text: "20 clients over 50 servers at 0.75x; a server leaves as another joins. The first two policies learn of \
            each change at once, like Envoy's own. Ours learns its members from unaddressed probes, as the filter \
            does, and Envoy diverts a pick whose server is gone. `fallback` is the share of picks that were left to \
            Envoy's own policy.",
        x_label: "rate of change",
        points: points.into(),
        metrics: standard_and(&[
            Metric {
                name: "diverted",
                of: |_, run, _| run.diverted as f64 / run.samples.len().max(1) as f64,
            },
            FALLBACK,
        ]),
        columns: columns(&[("diverted", OWN, three_percent), ("fallback", OWN + 1, three_percent)]),
        charts: vec![(P99, false), (OWN, false), (OWN + 1, false)],
        judge: |cells| {
            let ours = |label: &str, metric| cells.at(label, LEARNING, metric);
            vec![
                at_most("ours, failures", cells.worst(LEARNING, FAILED), 0.0),
                at_most(
                    "ours, p99 with one change a second over calm",
                    ours("one a second", P99) / ours("calm", P99),
                    1.1,
                ),
            ]
        },
    }
}

/// Share of the last of 21 servers in the period `when`, relative to its fair share.
fn newcomers_share(run: &RunRecord, when: Range<f64>) -> f64 {
    run.share(|server| server == 20, |at| when.contains(&at)) * 21.0
}

/// Seconds until a cold newcomer is warm.
const WARMING: usize = 20;

pub(super) fn newcomer(length: RunLength) -> Experiment {
    let points = length.pick(&[("warm at once", 1.0), ("5x the work", 5.0), ("20x", 20.0)], &[0, 2]);
    let points = points.into_iter().map(|(label, cold)| {
        // No antagonists, so that only the newcomer is slow.
        let mut scenario = SimScenario::testbed(21, 0.75, Spare::None);
        (scenario.initially, scenario.measured) = (20, 40.0);
        let at = scenario.warm_up;
        scenario.changes.push((at, SimChange::Join(20)));
        for step in 0..=WARMING {
            let left = 1.0 - step as f64 / WARMING as f64;
            let work = WORK_MS * (1.0 + (cold - 1.0) * left);
            scenario.changes.push((at + step as f64, SimChange::Work(20, work)));
        }
        let slow_start = |slow_start_ms: u32| learning(|pool| pool.slow_start_ms = slow_start_ms);
        Point {
            label: label.to_owned(),
            scenario,
            arms: arms([
                ("Random", SimArm::Random),
                ("LL-Po2C", SimArm::LeastLoadedPo2c),
                ("no slow start", slow_start(0)),
                ("slow start 10 s", slow_start(10_000)),
                ("slow start 30 s", slow_start(30_000)),
                ("slow start 90 s", slow_start(90_000)),
            ]),
        }
    });
    Experiment {
        name: "newcomer",
        title: "a replica joins, warm or cold",
        text: "The 21st server joins 20 others at 0.75x. At first its queries take a multiple of the usual work, which \
            falls linearly to the usual over 20 s (caches, just-in-time compilation). Shares are relative to the fair \
            share. `slow_start_ms` limits the share of a young replica; probation and the replica's own reports apply \
            in every Prequal arm.",
        x_label: "the newcomer",
        points: points.collect(),
        metrics: standard_and(&[
            Metric { name: "share_first_5s", of: |_, run, _| newcomers_share(run, 0.0..5.0) },
            Metric { name: "share_5_to_20s", of: |_, run, _| newcomers_share(run, 5.0..20.0) },
            Metric { name: "share_from_20s", of: |_, run, _| newcomers_share(run, 20.0..40.0) },
        ]),
        columns: columns(&[
            ("share, first 5 s", OWN, two),
            ("5 to 20 s", OWN + 1, two),
            ("from 20 s", OWN + 2, two),
        ]),
        charts: vec![(P999, false), (OWN, false)],
        judge: |cells| {
            let slow_started = |label: &str, metric| cells.at(label, "slow start 10 s", metric);
            vec![
                // In one run in twenty, a query or two fail at the cold newcomer.
                at_most("slow start 10 s, failures", cells.worst("slow start 10 s", FAILED), 0.0001),
                at_most(
                    "20x: p99.9 with a slow start of 10 s over none",
                    slow_started("20x", P999) / cells.at("20x", "no slow start", P999),
                    1.1,
                ),
                at_least(
                    "warm at once: share from 20 s on, slow start 10 s",
                    slow_started("warm at once", OWN + 2),
                    0.8,
                ),
            ]
        },
    }
}

/// One client that pauses for `pause_ms` every `every` seconds. With a `warm_up` of 0, its first queries are measured
/// too.
fn paused(label: &str, warm_up: f64, measured: f64, every: f64, pause_ms: f64) -> Point {
    let spec = |ms| ServerSpec { queue: 8, ..ServerSpec::slots(4, ms) };
    let mut scenario = SimScenario::testbed(40, 1.0, Spare::None);
    scenario.servers = (0..40).map(|server| spec(if server < 20 { 50.0 } else { 250.0 })).collect();
    (scenario.clients, scenario.load, scenario.sizes) = (1, SimLoad::Poisson(800.0), Sizes::Exact);
    (scenario.warm_up, scenario.measured, scenario.deadline) = (warm_up, measured, None);
    if pause_ms > 0.0 {
        let at = |pause: u32| (f64::from(pause) * every + 0.05, SimChange::Pause(pause_ms));
        scenario.changes = (0..((warm_up + measured) / every) as u32).map(at).collect();
    }
    Point {
        label: label.to_owned(),
        scenario,
        arms: arms([
            ("Random", SimArm::Random),
            ("LL-Po2C", SimArm::LeastLoadedPo2c),
            (OURS, learning(|_| ())),
            ("no burst_guard", learning(|pool| pool.burst_guard = false)),
        ]),
    }
}

pub(super) fn pauses(length: RunLength) -> Experiment {
    let seconds = if length.quick { 5.0 } else { 30.0 };
    Experiment {
        name: "pauses",
        title: "a client that starts, and one that pauses",
        text: "The fleet of the end-to-end benchmark `slow-half`: 20 servers at 50 ms and 20 at 250 ms, 4 slots and 8 \
            waiting each, 800 queries/s, one client that knows no server at first. As on a busy machine, its event \
            loop pauses: in the first three seconds (`start`) every 150 ms, later every second. Queries that arrived \
            during a pause are placed at once, without a report in between. `burst_guard` limits how many of them the \
            pool may give to one server; the rest go to Envoy's policy (LL-Po2C here).",
        x_label: "",
        points: vec![
            paused("start, no pause", 0.0, 3.0, 0.15, 0.0),
            paused("start, 20 ms", 0.0, 3.0, 0.15, 20.0),
            paused("start, 50 ms", 0.0, 3.0, 0.15, 50.0),
            paused("start, 100 ms", 0.0, 3.0, 0.15, 100.0),
            paused("later, 70 ms", 5.0, seconds, 1.0, 70.0),
            paused("later, 100 ms", 5.0, seconds, 1.0, 100.0),
        ],
        metrics: standard_and(&[
            Metric { name: "rejected", of: |_, _, latencies| latencies.failed() * latencies.len() as f64 },
            SLOW_SHARE,
        ]),
        columns: columns(&[("rejected", OWN, one), ("to slow half", OWN + 1, percent)]),
        charts: vec![(OWN, false), (OWN + 1, false)],
        judge: |cells| {
            let rejected =
                |label: &str| at_most(&format!("ours, rejected, {label}"), cells.at(label, OURS, OWN), 2.0);
            ["start, no pause", "start, 20 ms", "start, 50 ms", "later, 70 ms"].map(rejected).into()
        },
    }
}

pub(super) fn sharing(length: RunLength) -> Experiment {
    let mut points = Vec::new();
    for (kind, half_slow) in [("1.5x", false), ("half slow", true)] {
        for pools in length.pick(&[100, 20, 5], &[0, 2]) {
            let mut scenario = if half_slow {
                SimScenario::half_slow(100, 30.0, 0.75, NORMAL)
            } else {
                SimScenario::testbed(100, 1.5, NORMAL)
            };
            scenario.clients = pools;
            points.push(Point {
                label: format!("{kind}, {pools} pools"),
                scenario: length.cut(scenario),
                arms: arms([(PAPER, SimArm::Prequal(paper())), (OURS, SimArm::Prequal(ours()))]),
            });
        }
    }
    Experiment {
        name: "sharing",
        title: "100 clients that share pools, as the workers of an Envoy do",
        text: "The traffic of 100 clients through 100, 20 and 5 pools: the workers of one Envoy share a pool. At 1.5x \
            load, and at 0.75x with half of the fleet slow.",
        x_label: "scenario and pools",
        points,
        metrics: STANDARD.to_vec(),
        columns: LATENCIES.to_vec(),
        charts: vec![(P999, false)],
        // One short run is noisier.
        judge: if length.quick {
            |cells| judge_sharing(cells, 1.15)
        } else {
            |cells| judge_sharing(cells, 1.0)
        },
    }
}

fn judge_sharing(cells: &Cells, most: f64) -> Vec<Verdict> {
    let p999 = |point: &str| cells.at(point, OURS, P999);
    let over = p999("1.5x, 5 pools") / p999("1.5x, 100 pools");
    vec![at_most("ours at 1.5x, p99.9 with 5 pools over that with 100", over, most)]
}

pub(super) fn budget(length: RunLength) -> Experiment {
    let rates = length.pick(&[1.0, 5.0, 20.0, 100.0, 500.0, 2000.0, 5000.0], &[0, 2, 4]);
    let points = rates.into_iter().map(|qps| {
        // One client, whose rate replaces the testbed's load. Even at the highest rate, the servers are not quite as
        // busy as the testbed's.
        let mut scenario = SimScenario::testbed(100, 0.75, Spare::None);
        (scenario.clients, scenario.load) = (1, SimLoad::Poisson(qps));
        scenario.measured = if qps < 100.0 { 300.0 } else { 30.0 };
        Point { label: format!("{qps}/s"), scenario, arms: arms([(OURS, SimArm::Prequal(ours()))]) }
    });
    Experiment {
        name: "budget",
        title: "age of the pool's information under the adaptive budget",
        text: "One client, 100 servers, from 1 to 5000 queries/s. The age is the quantity that the budget's target \
            refers to: the median age of the pool's entries, taken at every pick (an empty pool counts as infinitely \
            old). The table has the 99th percentile of this age. The target of 500 ms is met even at this percentile \
            from 100 queries/s on; at fewer, the limit of 0.7 probes a query is reached, or nearly. The goal is an age \
            of at most 2 s at this percentile from 20/s on. (Until 27 November it began at 5/s; where queries are rare, \
            reports are now kept longer than 2 s, ADR 8.)",
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
            ("age p99 ms", OWN, |age| if age < f64::from(u32::MAX) { whole(age) } else { "∞".to_owned() }),
            ("probes/s", OWN + 1, one),
            ("probes/query", PROBES, two),
            ("p99 ms", P99, ms),
        ],
        charts: vec![(OWN + 1, true)],
        judge: |cells| {
            // At lower rates, reports are kept longer than 2 s, so that the pool does not run empty.
            let often = |cell: &&Cell| !["1/s", "5/s"].contains(&cell.point.as_str()) && cell.arm == OURS;
            let ages = cells.0.iter().filter(often).flat_map(|cell| cell.series(OWN));
            vec![at_most("age at p99 from 20/s on, all seeds, ms", ages.fold(0.0, f64::max), 2000.0)]
        },
    }
}

/// The paper's rule with Prequal's current probing.
const HCL: &str = "hcl, Q 0.84";

pub(super) fn variants(length: RunLength) -> Experiment {
    let fixed = |r_probe: f64, r_remove: f64| {
        move |pool: &mut PoolSettings| {
            pool.budget = Budget::Fixed { r_probe };
            pool.r_remove = r_remove;
        }
    };
    let scenes = [
        ("1.27x", SimScenario::testbed(100, 1.27, NORMAL), None),
        ("1.74x", SimScenario::testbed(100, 1.74, NORMAL), None),
        ("1.5x, 0.5 probes", SimScenario::testbed(100, 1.5, NORMAL), Some((0.5, 0.25))),
        ("half slow", SimScenario::half_slow(100, 30.0, 0.75, NORMAL), None),
    ];
    let points = scenes.into_iter().map(|(label, scenario, rates)| {
        let with = |change: &dyn Fn(&mut Prequal)| {
            let mut prequal = ours();
            if let Some((r_probe, r_remove)) = rates {
                fixed(r_probe, r_remove)(&mut prequal.pool);
            }
            change(&mut prequal);
            SimArm::Prequal(prequal)
        };
        let hcl = |q_rif: f64, hot: HotRule| {
            with(&|prequal| {
                prequal.rule = Rule::Hcl;
                (prequal.pool.q_rif, prequal.pool.hot) = (q_rif, hot);
            })
        };
        let aged = |max_age_ms: u32| with(&|prequal| prequal.pool.max_age_ms = max_age_ms);
        let pooled = |size: usize| with(&|prequal| prequal.pool.pool_size = size);
        Point {
            label: label.to_owned(),
            scenario: length.cut(scenario),
            arms: arms([
                ("ours", with(&|_| ())),
                (HCL, hcl(0.84, HotRule::Ge)),
                ("hcl, Q 0.95", hcl(0.95, HotRule::Ge)),
                ("hcl, Q 0.95, RIF > θ", hcl(0.95, HotRule::Gt)),
                ("hcl, RIF only", hcl(0.0, HotRule::Ge)),
                ("reports up to 1 s", aged(1000)),
                ("reports up to 4 s", aged(4000)),
                ("pool of 8", pooled(8)),
                ("pool of 24", pooled(24)),
                ("no piggyback", with(&|prequal| prequal.probe.piggyback = false)),
            ]),
        }
    });
    Experiment {
        name: "variants",
        title: "ours, one setting changed at a time",
        text: "The default profile compared with its neighbours, in the four scenarios from which its goals are \
            derived. `1.5x, 0.5 probes` is fig8's last step.",
        x_label: "",
        points: points.collect(),
        metrics: STANDARD.to_vec(),
        columns: LATENCIES.to_vec(),
        charts: vec![(P999, false), (P99, false)],
        judge: |cells| {
            let worse = |scene: &str, metric| cells.at(scene, HCL, metric) / cells.at(scene, "ours", metric);
            vec![
                at_least("1.74x: p99.9 with hcl over ours", worse("1.74x", P999), 1.0),
                at_least("half slow: p99 with hcl over ours", worse("half slow", P99), 1.0),
            ]
        },
    }
}
