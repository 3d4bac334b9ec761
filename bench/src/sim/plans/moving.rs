//! Fleets drawn at random in which something changes all the time, and short runs just after a cold start.
//!
//! Servers that crash, fail, join or leave are left out; `sinkhole`, `churn` and `newcomer` have them.

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use super::fleets::judged_ratio;
use super::random::{Drawn, FLEETS, drawn_from, judge, log_uniform, over_fleets};
use super::*;

/// Number of the last fleet of `unseen`.
const UNSEEN: u64 = 3 * FLEETS;
/// Highest load at the peak of a wave.
const PEAK: f64 = 0.95;
/// Longest pauses of a server, relative to the time between them: a server that stands still for longer cannot carry
/// its load.
const PAUSED: f64 = 0.05;
/// Seconds from one slowdown of the whole fleet to the next.
const SLOWDOWNS: f64 = 60.0;

/// Warm-up and measured seconds of a run just after a cold start.
const COLD: (f64, f64) = (4.0, 12.0);
/// A single run is starved if its quantile is this many times that of the best other policy's run.
const STARVED: f64 = 1.25;
/// Share of the runs that may be starved.
const FEW: f64 = 0.05;

pub(super) fn moving(length: RunLength) -> Experiment {
    over_fleets(
        moving_fleet,
        UNSEEN,
        length,
        "moving",
        "fleets drawn at random in which something changes all the time",
        "120 fleets of the generator of `random`, without its slow episodes. In each, one of these happens. The load rises and falls by up \
            to 50 % for 0.5 to 20 s (`waves`). Queries arrive in batches of 2 to twice the number of servers. Every \
            server pauses for 20 to 500 ms now and then, like a garbage collector. Every 2 to 20 s another server is 1.5 \
            to 10 times slower. Once a minute the whole fleet is 1.5 to 6 times slower for 1 to 8 s, like services with \
            one database. Or other clients, which use round robin, send half of the queries (`half by others`).",
    )
}

pub(super) fn cold(length: RunLength) -> Experiment {
    let plan = over_fleets(
        cold_fleet,
        UNSEEN + FLEETS,
        length,
        "cold",
        "short runs just after a cold start",
        "120 fleets of the generator of `random`, but without slow episodes. A run begins with an idle fleet of which \
            nothing is known. The first 4 s are not counted, the next 12 s are. So the estimates rest on few queries, and \
            a server whose first queries were unlucky could get none that would correct them. Medians over the seeds hide \
            a single such run. So the last goals are about single runs: each is compared with the run of the best policy \
            of Envoy that has the same arrivals.",
    );
    Experiment {
        judge: |cells| {
            let mut verdicts = judge(cells);
            verdicts.extend(
                [("p50", P50), ("p99", P99)].into_iter().filter_map(|quantile| starved(cells, quantile)),
            );
            verdicts
        },
        ..plan
    }
}

/// Draws a fleet in which something changes all the time. The same number always gives the same fleet.
fn moving_fleet(number: u64) -> Point {
    let rng = &mut SmallRng::seed_from_u64(number);
    let Drawn { mut point, load, .. } = drawn_from(rng, number);
    let SimScenario { servers, warm_up, measured, load: arrivals, others, changes, .. } = &mut point.scenario;
    let SimLoad::Poisson(qps) = *arrivals else { return point };
    let (from, until) = (*warm_up, *warm_up + *measured);
    let work_ms: Vec<f64> = servers.iter().map(|server| server.work_ms).collect();
    let n = work_ms.len();
    let what = match rng.random_range(0..6) {
        0 => {
            let rise = (PEAK / load - 1.0).clamp(0.05, 0.5);
            let seconds = log_uniform(rng, 0.5, 20.0);
            *arrivals = SimLoad::Waves { low: qps * (1.0 - rise), high: qps * (1.0 + rise), seconds };
            format!("waves ±{:.0} % {seconds:.1} s", rise * 100.0)
        }
        1 => {
            let of = log_uniform(rng, 2.0, 2.0 * n as f64).round() as u64;
            *arrivals = SimLoad::Batches { qps, of };
            format!("batches of {of}")
        }
        2 => {
            let (every, pause) = (log_uniform(rng, 1.0, 20.0), log_uniform(rng, 0.02, 0.5));
            let every = every.max(pause / PAUSED);
            for server in 0..n {
                let mut at = rng.random::<f64>() * every;
                while at < until {
                    changes.push((at, SimChange::Frozen(server, true)));
                    changes.push((at + pause, SimChange::Frozen(server, false)));
                    at += every * (0.5 + rng.random::<f64>());
                }
            }
            format!("pauses of {:.0} ms, every {every:.1} s", pause * 1e3)
        }
        3 => {
            let (every, times) = (log_uniform(rng, 2.0, 20.0), log_uniform(rng, 1.5, 10.0));
            for turn in 1..(until / every) as usize + 1 {
                let (at, server) = (every * turn as f64, turn % n);
                changes.push((at, SimChange::Work(server, work_ms[server] * times)));
                changes.push((at + every, SimChange::Work(server, work_ms[server])));
            }
            format!("another {times:.1}x every {every:.1} s")
        }
        4 => {
            let (times, seconds) = (log_uniform(rng, 1.5, 6.0), log_uniform(rng, 1.0, 8.0));
            let mut at = from + 5.0;
            while at < until {
                for (server, usual) in work_ms.iter().enumerate() {
                    changes.push((at, SimChange::Work(server, usual * times)));
                    changes.push((at + seconds, SimChange::Work(server, *usual)));
                }
                at += SLOWDOWNS;
            }
            format!("all {times:.1}x for {seconds:.1} s")
        }
        _ => {
            *others = qps / 2.0;
            *arrivals = SimLoad::Poisson(qps / 2.0);
            "half by others".to_owned()
        }
    };
    point.label += &format!(", {what}");
    point
}

/// Draws a fleet for a short run just after a cold start.
fn cold_fleet(number: u64) -> Point {
    let Drawn { mut point, .. } = drawn_from(&mut SmallRng::seed_from_u64(number), number);
    (point.scenario.warm_up, point.scenario.measured) = COLD;
    point
}

/// Judges single runs of [`OURS`]: for each fleet, against the runs with the same seeds of the policy that has the lowest
/// median. `None` without such runs.
fn starved(cells: &Cells, (name, metric): (&str, usize)) -> Option<Verdict> {
    let mut ratios: Vec<f64> = Vec::new();
    for ours in cells.0.iter().filter(|cell| cell.arm == OURS) {
        let others =
            cells.0.iter().filter(|cell| cell.point == ours.point && !cell.arm.starts_with("Prequal"));
        let Some(best) = others.min_by(|a, b| a.median(metric).total_cmp(&b.median(metric))) else {
            continue;
        };
        let ratio = |(seed, ours): &(u64, Vec<f64>)| {
            let (_, best) = best.values.iter().find(|(other, _)| other == seed)?;
            Some(judged_ratio(metric, ours[metric], best[metric])).filter(|ratio| !ratio.is_nan())
        };
        ratios.extend(ours.values.iter().filter_map(ratio));
    }
    ratios.sort_by(f64::total_cmp);
    let count = ratios.iter().filter(|ratio| **ratio > STARVED).count();
    let worst = ratios.last()?;
    Some(Verdict::new(
        format!("{OURS}, {name}: at most {:.0} % of single runs above {STARVED}x", FEW * 100.0),
        count as f64 <= FEW * ratios.len() as f64,
        format!("{count} of {}; median {:.2}x, worst {worst:.2}x", ratios.len(), quantile(&ratios, 0.5)),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_gives_the_same_changes_every_time_and_every_kind_occurs() {
        let mut kinds = Vec::new();
        for number in UNSEEN + 1..=UNSEEN + FLEETS {
            let (point, again) = (moving_fleet(number), moving_fleet(number));
            assert_eq!(format!("{:?}", point.scenario), format!("{:?}", again.scenario));
            let what = point.label.rsplit(", ").next().unwrap();
            let what = if what.starts_with("every") { "pauses" } else { what.split(' ').next().unwrap() };
            if !kinds.contains(&what.to_owned()) {
                kinds.push(what.to_owned());
            }
        }
        kinds.sort_unstable();
        assert_eq!(kinds, ["all", "another", "batches", "half", "pauses", "waves"]);
    }

    #[test]
    fn single_runs_are_compared_with_those_that_have_the_same_arrivals() {
        let cell = |arm: &str, p99s: [(u64, f64); 3]| {
            let values = |(seed, p99)| {
                let mut values = vec![0.0; STANDARD.len()];
                values[P99] = p99;
                (seed, values)
            };
            let values = p99s.map(values).into();
            Cell { point: "a".to_owned(), arm: arm.to_owned(), values }
        };
        let cells = Cells(vec![
            cell("RR", [(1, 100.0), (2, 200.0), (3, 300.0)]),
            cell("LL", [(1, 110.0), (2, 90.0), (3, 250.0)]),
            cell(OURS, [(3, 250.0), (2, 135.0), (1, 110.0)]),
        ]);
        assert!(starved(&Cells(Vec::new()), ("p99", P99)).is_none());
        let verdict = starved(&cells, ("p99", P99)).unwrap();
        assert!(!verdict.reached);
        assert_eq!(verdict.got, "1 of 3; median 1.00x, worst 1.50x", "LL has the lower median");
    }
}
