//! Fleets of every kind that a rule must handle: few slots or many, equal or unequal servers, any distribution of work.
//!
//! Unless the label says otherwise, there is one client, as with a single gateway, and queries miss the deadline only
//! if a queue grows without end. Fleets of the independent simulation (docs/results/evaluation.md says what that is)
//! have its rates.

use super::super::plot::{Chart, Line};
use super::*;
use crate::load::Keys;
use crate::sim::measure::RunRecord;

/// Slots of a server without a queue: every query is served at once.
const NO_QUEUE: usize = usize::MAX;
/// One query in ten takes about twenty times as long as the others. The unit is the work of a server.
pub(super) const MIX: Sizes = Sizes::Mix { rare: 0.1, long: (10.0, 30.0), usual: (0.5, 1.5) };
/// One query in twenty takes 80 times as long as the others. The unit is 5 ms.
const RARE: Sizes = Sizes::Mix { rare: 0.05, long: (80.0, 80.0), usual: (1.0, 1.0) };

/// One query in 500 takes about a thousand times as long as the others, so each replica has one or two of them at any
/// time. The unit is 10 ms.
const RARE_LONG: Sizes = Sizes::Mix { rare: 0.002, long: (1000.0, 1000.0), usual: (0.8, 1.2) };

/// Each client sends five queries a second.
const SIDECARS: &str = "sidecars, 32 × 1, exp 100";

/// The paper's rule with Prequal's current probing and reports.
const HCL: &str = "Prequal (hcl)";

/// A fleet of several kinds of servers, each given as (count, slots, milliseconds), and its queries per second.
pub(super) fn fleet(label: &str, kinds: &[(usize, usize, f64)], sizes: Sizes, qps: f64) -> Point {
    let mut scenario = SimScenario::testbed(1, 1.0, Spare::None);
    let kind = |&(count, slots, ms): &(usize, usize, f64)| vec![ServerSpec::slots(slots, ms); count];
    scenario.servers = kinds.iter().flat_map(kind).collect();
    (scenario.initially, scenario.clients) = (scenario.servers.len(), 1);
    (scenario.load, scenario.sizes) = (SimLoad::Poisson(qps), sizes);
    (scenario.warm_up, scenario.measured, scenario.deadline) = (20.0, 60.0, Some(30.0));
    Point { label: label.to_owned(), scenario, arms: Vec::new() }
}

impl Point {
    fn with(mut self, change: impl FnOnce(&mut SimScenario)) -> Self {
        change(&mut self.scenario);
        self
    }

    pub(super) fn clients(self, clients: usize) -> Self {
        self.with(|scenario| scenario.clients = clients)
    }

    /// Makes the first `servers` servers `times` slower for `seconds`, from `after` seconds after the warm-up.
    pub(super) fn slowed(self, servers: usize, times: f64, after: f64, seconds: f64) -> Self {
        self.with(|scenario| {
            let from = scenario.warm_up + after;
            for (at, times) in [(from, times), (from + seconds, 1.0)] {
                let slow =
                    |server: usize| (at, SimChange::Work(server, scenario.servers[server].work_ms * times));
                scenario.changes.extend((0..servers).map(slow));
            }
        })
    }
}

/// A fleet as in [`fleet()`], whose `users` wait for each response before they send their next query.
fn closed(label: &str, kinds: &[(usize, usize, f64)], sizes: Sizes, users: usize) -> Point {
    fleet(&format!("{label}, {users} users"), kinds, sizes, 0.0)
        .with(|scenario| scenario.load = SimLoad::Closed { users })
}

/// A fleet as in [`fleet()`] with four clients, and alternately `low` and `high` queries per second.
fn waves(label: &str, kinds: &[(usize, usize, f64)], low: f64, high: f64) -> Point {
    fleet(label, kinds, Sizes::Exponential, 0.0).with(|scenario| {
        scenario.load = SimLoad::Waves { low, high, seconds: 10.0 };
        (scenario.measured, scenario.clients) = (200.0, 4);
    })
}

fn on_one_core(scenario: &mut SimScenario) {
    for server in &mut scenario.servers {
        server.service = SimService::Cpu { cores: 1.0, spare: Spare::None };
    }
}

/// All fleets, in the order of the report. `sources.rs` has the independent simulation's figures for some of them.
fn all() -> Vec<Point> {
    use Sizes::{Exact, Exponential, LogNormal};
    let equal = |label: &str, load: f64| fleet(label, &[(16, 4, 40.0)], Exponential, load * 1600.0);
    let two_slow = |label: &str, qps| fleet(label, &[(14, NO_QUEUE, 50.0), (2, NO_QUEUE, 800.0)], Exact, qps);
    let kinds: Vec<(usize, usize, f64)> =
        (0..24).map(|server| (1, 1 + server % 8, [40.0, 60.0, 80.0][server % 3])).collect();
    let shared =
        fleet("12 × 2 cores, lognormal σ 1.5", &[(12, NO_QUEUE, 20.0)], LogNormal { sigma: 1.5 }, 400.0);
    let flapping = fleet("10, no queues, one 12x now and then", &[(10, NO_QUEUE, 50.0)], Exact, 200.0);
    // Other clients send the same rate again by round robin, like an Envoy that does not have Prequal yet.
    let beside = |what: &str| {
        fleet(&format!("9, one {what}, healed, others"), &[(9, NO_QUEUE, 50.0)], Exact, 220.0)
            .clients(4)
            .with(|scenario| scenario.others = 220.0)
    };
    let newcomer = fleet("10 at 167, no queues, then 11", &[(11, NO_QUEUE, 167.0)], Exact, 1000.0);
    let caches = fleet("8 × 4 with caches", &[(8, 4, 10.0)], Exponential, 400.0);
    vec![
        equal("16 × 4, exp 40, 80 %", 0.8),
        equal("16 × 4, exp 40, 90 %", 0.9),
        equal("16 × 4, exp 40, 80 %, 4 clients", 0.8).clients(4),
        fleet("8 × 4, mix, 70 %", &[(8, 4, 10.0)], MIX, 772.0),
        fleet("8 at 40, 8 at 80, exp, 80 %", &[(8, 4, 40.0), (8, 4, 80.0)], Exponential, 960.0),
        fleet("16 × 4, exp 40, one 16x slower", &[(15, 4, 40.0), (1, 4, 640.0)], Exponential, 900.0),
        two_slow("14 at 50, 2 at 800, 500/s", 500.0),
        two_slow("14 at 50, 2 at 800, 20/s", 20.0).with(|scenario| scenario.measured = 300.0),
        fleet(
            "no queues, lognormal, one 3x",
            &[(15, NO_QUEUE, 50.0), (1, NO_QUEUE, 150.0)],
            LogNormal { sigma: 1.0 },
            500.0,
        ),
        fleet(SIDECARS, &[(32, 1, 100.0)], Exponential, 160.0).clients(32),
        equal("16 × 4, all 10x slower for 10 s", 0.08)
            .with(|scenario| scenario.measured = 120.0)
            .slowed(16, 10.0, 10.0, 10.0),
        fleet("14 × 4, 2 × 1, exp 40", &[(14, 4, 40.0), (2, 1, 40.0)], Exponential, 800.0),
        flapping.with(|scenario| {
            let change = |turn: u32| {
                let at = scenario.warm_up + 5.0 * f64::from(turn);
                (at, SimChange::Work(0, if turn.is_multiple_of(2) { 600.0 } else { 50.0 }))
            };
            scenario.changes = (0..12).map(change).collect();
        }),
        fleet("40 × 4, exp 60, four 3x slower", &[(36, 4, 60.0), (4, 4, 180.0)], Exponential, 1500.0)
            .clients(4),
        fleet("3 × 2, exp 40, 70 %", &[(3, 2, 40.0)], Exponential, 105.0),
        fleet("24, 1–8 slots, 40/60/80 ms", &kinds, Exponential, 1400.0),
        shared.clients(8).with(|scenario| {
            for server in &mut scenario.servers {
                server.service = SimService::Cpu { cores: 2.0, spare: Spare::None };
            }
        }),
        fleet("16 × 4, exactly 40, 90 %", &[(16, 4, 40.0)], Exact, 1440.0),
        fleet("12 × 4, exactly 40, 90 %", &[(12, 4, 40.0)], Exact, 1080.0),
        fleet("12 × 4, exactly 40, 90 %, 4 clients", &[(12, 4, 40.0)], Exact, 1080.0).clients(4),
        fleet("10 × 3, exp 20, 90 %", &[(10, 3, 20.0)], Exponential, 1350.0),
        fleet("12 × 4, lognormal σ 1, 48 %", &[(12, 4, 20.0)], LogNormal { sigma: 1.0 }, 699.0),
        fleet("6 × 4, one in twenty 400 ms", &[(6, 4, 5.0)], RARE, 504.0),
        fleet("8 clients, 16 × 1, exp 50, 50 %", &[(16, 1, 50.0)], Exponential, 160.0).clients(8),
        equal("one 3x slower, then healed", 0.4).slowed(1, 3.0, 0.0, 25.0),
        equal("one 16x slower, then healed", 0.4).slowed(1, 16.0, 0.0, 25.0),
        fleet("9 at 50, one 16x slower, then healed", &[(9, NO_QUEUE, 50.0)], Exact, 220.0)
            .slowed(1, 16.0, 0.0, 25.0),
        beside("16x slower").slowed(1, 16.0, 0.0, 25.0),
        beside("hangs").with(|scenario| {
            scenario.changes = [(0.0, true), (10.0, false)]
                .map(|(after, hangs)| (scenario.warm_up + after, SimChange::Frozen(0, hangs)))
                .into();
        }),
        newcomer.with(|scenario| {
            scenario.initially = 10;
            scenario.changes = vec![(scenario.warm_up, SimChange::Join(10))];
        }),
        fleet("12 × 4, exp 40, then 13, 80 %", &[(13, 4, 40.0)], Exponential, 960.0).with(|scenario| {
            scenario.initially = 12;
            scenario.changes = vec![(scenario.warm_up, SimChange::Join(12))];
        }),
        caches.with(|scenario| {
            for server in &mut scenario.servers {
                server.cache = Some(CacheSpec { entries: 300, miss: 10.0 });
            }
            scenario.keys = Some(Keys { count: 3000, exponent: 1.0 });
        }),
        fleet("30 × 2, mix, 75 %", &[(30, 2, 10.0)], MIX, 1552.0),
        fleet("60 × 2, mix, 75 %", &[(60, 2, 10.0)], MIX, 3104.0),
        fleet("60 × 2, exp 20, 75 %, 4 clients", &[(60, 2, 20.0)], Exponential, 4500.0).clients(4),
        fleet("10 × 4, exactly 20, batches of 60", &[(10, 4, 20.0)], Exact, 600.0)
            .with(|scenario| scenario.load = SimLoad::Batches { qps: 600.0, of: 60 }),
        fleet("16 × 4, exp 40, batches of 20, 60 %", &[(16, 4, 40.0)], Exponential, 960.0)
            .with(|scenario| scenario.load = SimLoad::Batches { qps: 960.0, of: 20 }),
        fleet("10 × 4, one in 500 takes 10 s", &[(10, 4, 10.0)], RARE_LONG, 650.0)
            .with(|scenario| scenario.measured = 120.0),
        fleet("10 × 1 core, exactly 20, 80 %", &[(10, NO_QUEUE, 20.0)], Exact, 400.0).with(on_one_core),
        fleet("10 × 1 core, exp 20, 80 %", &[(10, NO_QUEUE, 20.0)], Exponential, 400.0).with(on_one_core),
        fleet("10 × 1 core, lognormal σ 0.5, 70 %", &[(10, NO_QUEUE, 20.0)], LogNormal { sigma: 0.5 }, 309.0)
            .with(on_one_core),
        // Many slots: of the requests that arrive within a short time, the fast ones answer first.
        fleet("4 × 32, exp 150, 85 %", &[(4, 32, 150.0)], Exponential, 725.0),
        fleet("4 × 32, mix with a mean of 435, 85 %", &[(4, 32, 150.0)], MIX, 250.0)
            .with(|scenario| scenario.measured = 160.0),
        // One slot each.
        fleet("20 × 1, exactly 10, 70 %", &[(20, 1, 10.0)], Exact, 1400.0),
        fleet("14 × 1, lognormal σ 0.5, 75 %", &[(14, 1, 20.0)], LogNormal { sigma: 0.5 }, 463.0),
        fleet("5 at 20, 5 at 40, exactly, 80 %", &[(5, 1, 20.0), (5, 1, 40.0)], Exact, 300.0),
        // Closed loops, as from load generators with a fixed number of connections. Every replica is saturated.
        closed("8 × 4, exp 20", &[(8, 4, 20.0)], Exponential, 200),
        closed("8 × 4, exactly 20", &[(8, 4, 20.0)], Exact, 100),
        closed("8 × 1 core, exactly 10", &[(8, NO_QUEUE, 10.0)], Exact, 100).with(on_one_core),
        // Hardly any traffic: few reports are fresh, and slow replicas must not be forgotten.
        fleet("5 × 1, exactly 200, 3/s", &[(5, 1, 200.0)], Exact, 3.0)
            .with(|scenario| scenario.measured = 4000.0),
        fleet("14 at 50, 2 at 800, 2/s", &[(14, 4, 50.0), (2, 4, 800.0)], Exponential, 2.0)
            .with(|scenario| scenario.measured = 4000.0),
        fleet("6 at 50, 2 at 800, 1/s", &[(6, 4, 50.0), (2, 4, 800.0)], Exponential, 1.0)
            .with(|scenario| scenario.measured = 4000.0),
        fleet("8 at 50, 3 at 300, 16/s, 8 clients", &[(8, 1, 50.0), (3, 1, 300.0)], Exponential, 16.0)
            .with(|scenario| scenario.measured = 1000.0)
            .clients(8),
        // Traffic that comes and goes: after the quiet time, reports are few and old, and trials are overdue.
        waves("16 × 4, exp 40, 2/s and 80 %", &[(16, 4, 40.0)], 2.0, 1280.0),
        waves("8 at 40, 8 at 80, 2/s and 80 %", &[(8, 4, 40.0), (8, 4, 80.0)], 2.0, 960.0),
        waves("14 at 50, 2 at 800, 2/s and 500/s", &[(14, 4, 50.0), (2, 4, 800.0)], 2.0, 500.0),
        // Fleets for which a pool of 128 reports is large enough, but one of 24 is not. They have one client or a few.
        fleet("90 × 1, exp 140, 70 %", &[(90, 1, 140.0)], Exponential, 450.0),
        fleet("70 × 1, exp 140, 70 %, 2 clients", &[(70, 1, 140.0)], Exponential, 350.0).clients(2),
        fleet("90 × 1, exp 140, 70 %, 4 clients", &[(90, 1, 140.0)], Exponential, 450.0).clients(4),
        fleet("128 × 1, exp 140, 70 %, 8 clients", &[(128, 1, 140.0)], Exponential, 640.0).clients(8),
        fleet("100 × 2, exp 20, 75 %, 4 clients", &[(100, 2, 20.0)], Exponential, 7500.0).clients(4),
        fleet("100 × 2, mix, 75 %, 8 clients", &[(100, 2, 10.0)], MIX, 5173.0).clients(8),
        fleet("100 × 4, a quarter 3x, 2 clients", &[(75, 4, 40.0), (25, 4, 120.0)], Exponential, 5800.0)
            .clients(2),
    ]
}

/// Number of seconds from the change in which a server healed or joined until the first second in which the server gets
/// half of its fair share. Infinite if there is no such second, NaN if the scenario does not have exactly one such
/// server.
fn seconds_to_share(scenario: &SimScenario, run: &RunRecord) -> f64 {
    let (since, server) = match scenario.changes[..] {
        [(_, SimChange::Work(slowed, _)), (healed_at, SimChange::Work(healed, _))] if slowed == healed => {
            (healed_at, healed)
        }
        [(_, SimChange::Frozen(hung, true)), (healed_at, SimChange::Frozen(healed, false))]
            if hung == healed =>
        {
            (healed_at, healed)
        }
        [(joined_at, SimChange::Join(joined))] => (joined_at, joined),
        _ => return f64::NAN,
    };
    let from = since - scenario.warm_up;
    let half = 0.5 / scenario.servers.len() as f64;
    let seconds = 0..(scenario.measured - from) as u32;
    let back = seconds.map(f64::from).find(|after| {
        let second = from + after..from + after + 1.0;
        run.share(|other| other == server, |at| second.contains(&at)) >= half
    });
    back.map_or(f64::INFINITY, |after| after)
}

fn seconds(value: f64) -> String {
    if value.is_infinite() { "never".to_owned() } else { one(value) }
}

pub(super) fn fleets(length: RunLength) -> Experiment {
    let mut rules = rules();
    // Add the rules that the paper and the independent simulation compare on such fleets, and Prequal with the profile
    // for fleets of this size.
    let floor = rules.pop();
    let hcl = Prequal { rule: Rule::Hcl, ..ours() };
    rules.extend(arms([
        (RIF_ONLY, paper_with(|pool| pool.q_rif = 0.0)),
        (SMALL, SimArm::Prequal(small())),
        (LEARNING, learning(|_| ())),
        (HCL, SimArm::Prequal(hcl)),
    ]));
    rules.extend(floor);
    // With --quick, a few fleets are enough: an equal one, and one for each kind of inequality.
    let mut points = length.pick(&all(), &[0, 3, 4, 11, 18]);
    for point in &mut points {
        point.arms.clone_from(&rules);
        // Fleets that change, and those with long runs because of few queries, keep their duration.
        if length.quick && point.scenario.changes.is_empty() && point.scenario.measured <= 60.0 {
            (point.scenario.warm_up, point.scenario.measured) = (10.0, 15.0);
        }
    }
    Experiment {
        name: "fleets",
        title: "fleets of every kind",
        text: "The labels give servers × slots, the service time of a query in ms, and the load; further \
            queries wait in order, without limit. `exp` is exponential; `mix` is nine in ten queries of 5 to 15 \
            ms and one in ten of 100 to 300 (15 times as long with 32 slots); `no queues` serves everything at once. There is one client unless \
            the label says otherwise. `learning` is ours as the filter runs it: no server is known at first, \
            and clients learn them from discovery probes. `CSWRR` is Envoy's client_side_weighted_round_robin \
            on the agents' load reports; `CSWRR (fast)` has its shortest periods. In `24`, every number of \
            slots occurs with every speed, at 1400/s. `12 × 2 cores` is processor sharing with a median of 20 \
            ms, 8 clients and 400/s; `1 core` is the same with one core each. `with caches` has 3000 keys, of \
            which each server remembers 300; a miss costs 10 times a hit. `to its share` is the number of \
            seconds until a server gets half of its fair share: from the end of the 25 s in which it was slow, \
            or from its start if it joins the others (`then 11`). `others`: another client sends as many \
            queries again, by round robin. Two rates (`2/s and 80 %`) alternate every 10 s, with four \
            clients. `TO` is beyond 30 s.",
        x_label: "",
        points,
        metrics: standard_and(&[
            SLOW_SHARE,
            Metric { name: "share_s", of: |scenario, run, _| seconds_to_share(scenario, run) },
        ]),
        columns: vec![
            ("p50 ms", P50, tenths),
            ("p90 ms", P90, ms),
            ("p99 ms", P99, ms),
            ("p99.9 ms", P999, ms),
            ("failed", FAILED, percent),
            ("probes/query", PROBES, two),
            ("to slow ones", OWN, percent),
            ("to its share, s", OWN + 1, seconds),
        ],
        charts: Vec::new(),
        judge: if length.quick { |cells| judge(cells, 1.15) } else { |cells| judge(cells, WITHIN) },
    }
}

/// The quantiles that are judged.
const JUDGED: [(&str, usize); 3] = [("p50", P50), ("p99", P99), ("p99.9", P999)];
/// Goal, as a multiple of the best other rule.
const WITHIN: f64 = 1.05;

fn is_other(arm: &str) -> bool {
    ![SMALL, FLOOR].contains(&arm) && !arm.starts_with("Prequal (ours")
}

/// Caps a value at the deadline, beyond which all values are equally bad. NaN stays NaN.
fn given_up(ms: f64) -> f64 {
    if ms > 30_000.0 { 30_000.0 } else { ms }
}

/// The lowest value of the other rules at a point, and the name of the rule.
fn best_other<'a>(cells: &'a Cells, point: &str, metric: usize) -> Option<(f64, &'a str)> {
    let others = cells.0.iter().filter(|cell| cell.point == point && is_other(&cell.arm));
    let values = others.map(|cell| (given_up(cell.median(metric)), &*cell.arm));
    values.filter(|(value, _)| !value.is_nan()).min_by(|a, b| a.0.total_cmp(&b.0))
}

/// The ratio of a value to the best one, as it is judged. A difference of 1 ms in a median does not count: it is below
/// the accuracy of any measurement.
pub(super) fn judged_ratio(metric: usize, got: f64, best: f64) -> f64 {
    let ratio = got / best;
    if metric == P50 && got <= best + 1.0 { ratio.min(1.0) } else { ratio }
}

fn labels(cells: &Cells) -> Vec<&str> {
    let mut labels: Vec<&str> = Vec::new();
    for cell in &cells.0 {
        if !labels.contains(&&*cell.point) {
            labels.push(&cell.point);
        }
    }
    labels
}

fn judge(cells: &Cells, within: f64) -> Vec<Verdict> {
    let verdict = |point: &str| {
        let judged = JUDGED.iter().filter_map(|(name, metric)| {
            let got = given_up(cells.at(point, OURS, *metric));
            let (best, whose) = best_other(cells, point, *metric).filter(|_| !got.is_nan())?;
            let line = format!("{name} {} ms, {whose} {} ms, {:.2}x", tenths(got), tenths(best), got / best);
            Some((judged_ratio(*metric, got, best), line))
        });
        let (over, line) = judged.max_by(|a, b| a.0.total_cmp(&b.0))?;
        let percent = (within - 1.0) * 100.0;
        let what = format!("ours within {percent:.0} % of the best other in p50, p99 and p99.9, {point}");
        Some(Verdict::new(what, over <= within, line))
    };
    let mut verdicts: Vec<Verdict> = labels(cells).into_iter().filter_map(verdict).collect();
    let probes = cells.at(SIDECARS, LEARNING, PROBES);
    if !probes.is_nan() {
        verdicts.push(at_most("ours, learning, probes per query, sidecars", probes, 0.71));
    }
    verdicts
}

/// Values of some rules relative to the best rule other than Prequal's, with one row of dots per fleet.
pub(super) fn charts(cells: &Cells) -> Vec<Chart> {
    const SHOWN: [&str; 9] = [OURS, LEARNING, PAPER, RIF_ONLY, "C3", "LL", "RR", CSWRR, "Peak EWMA"];
    let chart = |(name, metric): &(&str, usize)| {
        let line = |point: &str| {
            let (best, _) = best_other(cells, point, *metric)?;
            let over = |arm: &&str| {
                let cell = cells.0.iter().find(|cell| cell.point == point && cell.arm == *arm);
                cell.map_or((f64::NAN, f64::NAN, f64::NAN), |cell| {
                    let (low, high) = crate::stats::min_max(cell.series(*metric));
                    (given_up(cell.median(*metric)) / best, given_up(low) / best, given_up(high) / best)
                })
            };
            Some(Line { label: point.to_owned(), values: SHOWN.iter().map(over).collect() })
        };
        Chart {
            title: format!("{name} over that of the best rule but ours"),
            x_label: String::new(),
            points: SHOWN.map(str::to_owned).into(),
            lines: labels(cells).into_iter().filter_map(line).collect(),
            logarithmic: true,
            ceiling: Some(10.0),
            format: |times| format!("{times:.2}x"),
        }
    };
    JUDGED.iter().map(chart).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::measure::SimSample;

    fn cell(arm: &str, [p50, p99, p999]: [f64; 3]) -> Cell {
        let mut values = vec![0.0; OWN + 2];
        (values[P50], values[P99], values[P999]) = (p50, p99, p999);
        Cell { point: "fleet".to_owned(), arm: arm.to_owned(), values: vec![(1, values)] }
    }

    #[test]
    fn the_worst_quantile_is_named_with_the_rule_that_is_best_at_it() {
        let others = || [cell("RR", [13.0, 120.0, f64::INFINITY]), cell("LL", [14.0, 110.0, 200.0])];
        let judged = |ours, floor| {
            let cells: Vec<Cell> =
                others().into_iter().chain([cell(OURS, ours), cell(FLOOR, floor)]).collect();
            let verdicts = judge(&Cells(cells), WITHIN);
            assert_eq!(verdicts.len(), 1);
            (verdicts[0].reached, verdicts[0].got.clone())
        };
        // The floor does not count as another rule, and a difference of 1 ms in the median is negligible.
        assert!(judged([14.0, 115.0, 209.0], [1.0; 3]).0);
        let (reached, got) = judged([14.1, 100.0, 100.0], [1.0; 3]);
        assert!(!reached && got.contains("p50 14.1 ms, RR 13.0 ms"), "{got}");
        let (reached, got) = judged([13.0, 120.0, 240.0], [1.0; 3]);
        assert!(!reached && got.contains("p99.9 240 ms, LL 200 ms, 1.20x"), "{got}");
        assert!(judge(&Cells(others().into()), WITHIN).is_empty(), "ours was not run");
    }

    #[test]
    fn a_healed_server_has_recovered_once_it_gets_half_of_its_share() {
        let point = all().into_iter().find(|point| point.label == "one 3x slower, then healed").unwrap();
        // 100 queries a second over 16 servers. With `slow`, the slow server gets one in ten from second 30 on, else
        // none.
        let server =
            |at_ms: u32, slow: bool| u16::from(!slow || at_ms < 30_000 || !at_ms.is_multiple_of(100));
        let run = |slow| {
            let at = (0..6000).map(|query| query * 10);
            let sample = at.map(|at_ms| SimSample { at_ms, latency_us: 1, server: server(at_ms, slow) });
            RunRecord { samples: sample.collect(), ..RunRecord::default() }
        };
        assert_eq!(seconds_to_share(&point.scenario, &run(true)), 5.0);
        assert_eq!(seconds_to_share(&point.scenario, &run(false)), f64::INFINITY);
        assert!(seconds_to_share(&all()[0].scenario, &run(true)).is_nan());
    }

    #[test]
    fn labels_are_distinct() {
        let points = all();
        for (index, point) in points.iter().enumerate() {
            assert!(points[..index].iter().all(|other| other.label != point.label), "{}", point.label);
            assert!(point.label.chars().count() <= 36, "{}: no room in the chart", point.label);
        }
    }
}
