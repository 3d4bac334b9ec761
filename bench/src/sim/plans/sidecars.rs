//! Compares many clients that each send few queries with one client that sends them all: the cost of old reports in the
//! tail, and the number of messages that fresh reports need.

use super::fleets::fleet;
use super::*;

/// Queries per second of each of many clients.
const EACH: f64 = 5.0;
/// Load as a fraction of what the servers can serve.
const LOAD: f64 = 0.7;
/// How many times longer a slow server takes.
const SLOWER: f64 = 4.0;
/// Goal for p99 through many clients, relative to that through one.
const TAIL: f64 = 1.2;
/// Goal for the number of messages added to a query.
const MESSAGES: f64 = 0.35;

/// The numbers of clients, and whether a quarter of the servers is slow. There are as many servers as clients.
fn sizes(length: RunLength) -> Vec<(usize, bool)> {
    let sizes = length.pick(&[32, 100, 1000], &[0]);
    [false, true].into_iter().flat_map(|slow| sizes.iter().map(move |size| (*size, slow))).collect()
}

fn label(clients: usize, servers: usize, slow: bool) -> String {
    format!("{clients} × {servers}{}", if slow { ", a quarter slow" } else { "" })
}

fn point(clients: usize, servers: usize, slow: bool) -> Point {
    let slow_ones = if slow { servers / 4 } else { 0 };
    let usual = servers - slow_ones;
    let qps = servers as f64 * EACH;
    let work_ms = LOAD * (usual as f64 + slow_ones as f64 / SLOWER) / qps * 1e3;
    let kinds = [(usual, 1, work_ms), (slow_ones, 1, work_ms * SLOWER)];
    let arms = arms([
        ("RR", SimArm::RoundRobin),
        ("LL-Po2C", SimArm::LeastLoadedPo2c),
        ("LL", SimArm::LeastLoaded),
        (OURS, SimArm::Prequal(ours())),
        (LEARNING, learning(|_| ())),
        (FLOOR, SimArm::Floor),
    ]);
    Point { arms, ..fleet(&label(clients, servers, slow), &kinds, Sizes::Exponential, qps).clients(clients) }
}

pub(super) fn sidecars(length: RunLength) -> Experiment {
    let mut points: Vec<Point> = sizes(length)
        .into_iter()
        .flat_map(|(size, slow)| [size, 1].map(|clients| point(clients, size, slow)))
        .collect();
    for point in points.iter_mut().filter(|_| length.quick) {
        (point.scenario.warm_up, point.scenario.measured) = (10.0, 20.0);
    }
    Experiment {
        name: "sidecars",
        title: "many clients with few queries each, against one",
        text: "As many clients as servers, five queries a second each, and one client with all of them (`1 ×`). The \
            servers have one slot and exponential times; the load is 70 %. `a quarter slow`: a quarter of the servers \
            take four times as long. `LL` and `LL-Po2C` see only their own client's queries, as Envoy's own policies \
            do. The floor knows every queue.",
        x_label: "",
        points,
        metrics: STANDARD.to_vec(),
        columns: LATENCIES.to_vec(),
        charts: vec![(P99, true), (PROBES, false)],
        judge,
    }
}

/// Judges every size that was run.
fn judge(cells: &Cells) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for (size, slow) in sizes(RunLength { quick: false }) {
        let (many, one) = (label(size, size, slow), label(1, size, slow));
        for arm in [OURS, LEARNING] {
            let messages = cells.at(&many, arm, PROBES);
            if messages.is_nan() {
                continue;
            }
            let tail = capped(cells.at(&many, arm, P99)) / capped(cells.at(&one, arm, P99));
            verdicts.push(at_most(&format!("{arm}, {many}: p99 over that of one client"), tail, TAIL));
            verdicts.push(at_most(&format!("{arm}, {many}: messages added to a query"), messages, MESSAGES));
        }
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_times_follow_from_the_load() {
        let ms = |slow| point(32, 32, slow).scenario.servers.iter().map(|s| s.work_ms).collect::<Vec<_>>();
        assert!(ms(false).iter().all(|ms| (ms - 140.0).abs() < 1e-9));
        let slow = ms(true);
        assert!((slow[0] - 113.75).abs() < 1e-9 && (slow[31] - 455.0).abs() < 1e-9, "{slow:?}");
        assert_eq!(slow.iter().filter(|ms| **ms > 400.0).count(), 8);
    }

    #[test]
    fn both_goals_are_judged_where_both_topologies_were_run() {
        let cell = |point: &str, p99: f64, probes: f64| {
            let mut values = vec![0.0; STANDARD.len()];
            (values[P99], values[PROBES]) = (p99, probes);
            Cell { point: point.to_owned(), arm: OURS.to_owned(), values: vec![(1, values)] }
        };
        let verdicts = judge(&Cells(vec![cell("32 × 32", 121.0, 0.3), cell("1 × 32", 100.0, 0.0)]));
        let reached: Vec<bool> = verdicts.iter().map(|verdict| verdict.reached).collect();
        assert_eq!(reached, [false, true], "{verdicts:?}");
    }
}
