//! The verdicts: which goals of a scenario were reached.
//!
//! A figure is the median over the passes unless stated otherwise; ratios and differences are taken between runs of the
//! same pass. A missed goal is printed with the measured value and makes the exit code nonzero.

use std::process::ExitCode;
use std::time::Duration;

use crate::arm::Arm;
use crate::comparison::Comparison;
use crate::scenario::{Goal, Measured};
use crate::stats::median;
use crate::table::{ms, one, percent, spread, two};

/// If the generator's p99 lateness exceeds this, the figures reflect the generator instead of the policy.
pub(crate) const LATE: Duration = Duration::from_millis(5);

/// Verdicts, in the order in which they were reached.
#[derive(Default)]
pub(crate) struct Goals {
    pub(crate) lines: Vec<(bool, String)>,
}

impl Goals {
    /// Adds the verdicts on one topology of a comparison.
    pub(crate) fn judge(&mut self, comparison: &Comparison, envoys: usize) {
        let place = format!("{}, {}", comparison.scenario.name, comparison.scenario.topology(envoys));
        for goal in &comparison.scenario.goals {
            for (reached, line) in verdicts(*goal, comparison, envoys) {
                self.lines.push((reached, format!("{place}: {line}")));
            }
        }
        let late = comparison.runs.iter().filter(|run| run.envoys == envoys).map(|run| run.late.0).max();
        if let Some(late) = late.filter(|late| *late > LATE) {
            let (late, limit) = (late.as_secs_f64() * 1e3, LATE.as_millis());
            let line = format!("{place}: generator {} ms late at its p99 (at most {limit} ms)", ms(late));
            self.lines.push((false, line));
        }
    }

    /// Adds a verdict on anything else.
    pub(crate) fn add(&mut self, reached: bool, line: String) {
        self.lines.push((reached, line));
    }

    /// Prints all verdicts; the exit code says whether every goal was reached.
    pub(crate) fn print(&self) -> ExitCode {
        if self.lines.is_empty() {
            println!("No goal applies to the policies that ran.");
            return ExitCode::SUCCESS;
        }
        for (reached, line) in &self.lines {
            print_verdict(*reached, line);
        }
        let missed = self.lines.iter().filter(|(reached, _)| !reached).count();
        println!("{} of {} goals reached.", self.lines.len() - missed, self.lines.len());
        if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Prints one verdict; returns `reached`.
pub(crate) fn print_verdict(reached: bool, line: &str) -> bool {
    println!("{}  {line}", if reached { "PASS" } else { "MISS" });
    reached
}

/// How far a quantile of Prequal may exceed the best of other policies.
#[derive(Clone, Copy)]
pub(crate) struct Limit {
    pub(crate) name: &'static str,
    pub(crate) q: f64,
    pub(crate) times: f64,
    /// An absolute excess of up to this is also accepted: for short times, the machine's noise exceeds the relative
    /// limit.
    pub(crate) or_more_ms: Option<f64>,
}

impl Limit {
    /// Whether `value` exceeds `base` by no more than the limit. An infinite value, which means that requests at this
    /// quantile failed, is never allowed.
    pub(crate) fn allows(self, value: f64, base: f64) -> bool {
        let allowed = self.or_more_ms.map_or(f64::NEG_INFINITY, |more| base + more).max(base * self.times);
        value.is_finite() && value <= allowed
    }

    /// The limit in words, to follow "at most".
    pub(crate) fn text(self) -> String {
        let more = self.or_more_ms.map_or_else(String::new, |more| format!(" or {more} ms more"));
        two(self.times) + &more
    }
}

/// The limit for p99.9 is wider, because fewer requests determine that quantile.
pub(crate) const NEVER_WORSE: [Limit; 3] = [
    Limit { name: "p50", q: 0.5, times: 1.05, or_more_ms: Some(1.0) },
    Limit { name: "p99", q: 0.99, times: 1.05, or_more_ms: None },
    Limit { name: "p99.9", q: 0.999, times: 1.10, or_more_ms: None },
];

/// Compares medians over the passes: that of `who` with the lowest of `policies`.
fn against_best(
    comparison: &Comparison,
    envoys: usize,
    limit: Limit,
    who: Arm,
    policies: &[Arm],
) -> (bool, String) {
    let Limit { name, q, .. } = limit;
    let middle = |arm| median(comparison.of(arm, envoys).map(|run| run.judged.quantile_ms(q)));
    let ours = middle(who);
    let others = policies.iter().map(|arm| (middle(*arm), *arm)).filter(|(value, _)| !value.is_nan());
    let Some((best, arm)) = others.min_by(|one, other| one.0.total_cmp(&other.0)) else {
        return (false, format!("{name} {} ms, and no other policy to compare with", ms(ours)));
    };
    // One more digit than the goals have.
    let ratio = format!("{:.3}", ours / best);
    let line = format!("{name} {} ms, {ratio} times {}'s {}", ms(ours), arm.label(), ms(best));
    (limit.allows(ours, best), format!("{line} (at most {})", limit.text()))
}

fn verdicts(goal: Goal, comparison: &Comparison, envoys: usize) -> Vec<(bool, String)> {
    let ours = || comparison.of(Arm::Prequal, envoys);
    let of = |value: &dyn Fn(&Measured) -> f64| ours().map(value).collect::<Vec<f64>>();
    let pairs = |arm, base| comparison.of(arm, envoys).zip(comparison.of(base, envoys));
    match goal {
        Goal::Good(limit) => {
            let good = of(&|run| run.judged.within(comparison.scenario.good_within));
            let line = format!("good {} (at least {})", spread(&good, percent), percent(limit));
            vec![(median(good) >= limit, line)]
        }
        Goal::Back => vec![back(comparison, envoys)],
        Goal::MarkedShare(limit) => {
            let label = comparison.scenario.marked.as_ref().map_or("", |marked| marked.label);
            let shares = of(&|run| run.judged.marked_share());
            let line = format!("share to {label} {} (at most {})", spread(&shares, percent), percent(limit));
            vec![(worst(shares) <= limit, line)]
        }
        Goal::NoneRejected => {
            let rejected: usize = ours().map(Measured::rejected).sum();
            vec![(rejected == 0, format!("{rejected} rejected requests (none)"))]
        }
        Goal::NoneFailed => {
            let failed: usize = ours().map(Measured::failed).sum();
            vec![(failed == 0, format!("{failed} failed requests (none)"))]
        }
        Goal::P99(limit) => {
            let p99 = of(&|run| run.judged.quantile_ms(0.99));
            let line = format!("p99 {} ms (at most {})", spread(&p99, ms), ms(limit));
            vec![(median(p99) <= limit, line)]
        }
        Goal::P99AboveRoundRobinMedian(limit) => {
            let above = worst(above_round_robin_median(comparison, envoys, 0.99));
            let above_text = ms(above);
            let line = format!("p99 above round robin's median by {above_text} ms (at most {limit} ms)");
            vec![(above <= limit, line)]
        }
        Goal::P999BelowBaselines(limit) => {
            let factor =
                |arm| {
                    -worst(pairs(Arm::Prequal, arm).map(|(ours, theirs)| {
                        -theirs.judged.quantile_ms(0.999) / ours.judged.quantile_ms(0.999)
                    }))
                };
            let line = |arm: Arm| {
                let factor = factor(arm);
                let line = format!("p99.9 {factor:.1} times below {} (at least {limit})", arm.label());
                (factor >= limit, line)
            };
            Arm::BASELINES.map(line).into()
        }
        Goal::CpuOfRoundRobin(limit) => {
            // CPU time varies from run to run on a shared machine.
            let cpu = |arm| median(comparison.of(arm, envoys).map(|run| run.envoy_us));
            let factor = cpu(Arm::Prequal) / cpu(Arm::RoundRobin);
            let line = format!("Envoy CPU per request {} times round robin's (at most {limit})", two(factor));
            vec![(factor <= limit, line)]
        }
        Goal::NeverWorse => {
            let against = |limit| against_best(comparison, envoys, limit, Arm::Prequal, &Arm::STOCK);
            NEVER_WORSE.map(against).into()
        }
        Goal::NoWorseThanPeers(who) => {
            let peers = comparison.scenario.arms.iter().copied().filter(|arm| !arm.is_prequal());
            let peers: Vec<Arm> = peers.collect();
            let against = |limit| {
                let (reached, line) = against_best(comparison, envoys, limit, who, &peers);
                (reached, format!("{}: {line}", who.label()))
            };
            NEVER_WORSE.map(against).into()
        }
        Goal::NoWorseThan(arm) => {
            let [p50, p99, _] = NEVER_WORSE;
            [p50, p99].map(|limit| against_best(comparison, envoys, limit, Arm::Prequal, &[arm])).into()
        }
        Goal::P99OfBest(times) => {
            let limit = Limit { name: "p99", q: 0.99, times, or_more_ms: None };
            vec![against_best(comparison, envoys, limit, Arm::Prequal, &Arm::STOCK)]
        }
        Goal::LeastPart(limit) => {
            let parts = of(&|run| run.judged.least_part(comparison.scenario.fleet.len()));
            let (shown, least) = (spread(&parts, percent), percent(limit));
            let line = format!("least used replica got {shown} of its fair share (at least {least})");
            vec![(-worst(parts.into_iter().map(|part| -part)) >= limit, line)]
        }
        Goal::BeatenByHint(arm) => {
            let hinted = |value: &dyn Fn(&Measured) -> f64| comparison.of(arm, envoys).map(value).collect();
            let hits = |run: &Measured| run.judged.hit_rate();
            let p99 = |run: &Measured| run.judged.quantile_ms(0.99);
            let (hits, p99): ([Vec<f64>; 2], [Vec<f64>; 2]) =
                ([hinted(&hits), of(&hits)], [hinted(&p99), of(&p99)]);
            let [with, without] = hits.each_ref().map(|values| spread(values, percent));
            let more = format!("{}: cache hits {with} (more than {without} without hint)", arm.label());
            let [with, without] = p99.each_ref().map(|values| spread(values, ms));
            let faster = format!("{}: p99 {with} ms (less than {without} ms without hint)", arm.label());
            let [hits, p99] = [hits, p99].map(|both| both.map(median));
            vec![(hits[0] > hits[1], more), (p99[0] < p99[1], faster)]
        }
        Goal::Throughput { of: arm, part } => {
            let parts = |who| -> Vec<f64> {
                pairs(who, arm).map(|(who, theirs)| who.per_second / theirs.per_second).collect()
            };
            let (ours, empty) = (parts(Arm::Prequal), parts(Arm::EmptyModule));
            let (shown, limit) = (spread(&ours, percent), percent(part));
            let mut line = format!("throughput {shown} of {} (at least {limit})", arm.label());
            if !empty.is_empty() {
                line += &format!(", {} {}", Arm::EmptyModule.label(), spread(&empty, percent));
            }
            vec![(median(ours) >= part, line)]
        }
    }
}

fn back(comparison: &Comparison, envoys: usize) -> (bool, String) {
    let recoveries = || comparison.of(Arm::Prequal, envoys).filter_map(|run| run.recovery.as_ref());
    let all: Option<Vec<f64>> = recoveries().map(|r| r.after.map(|after| after.as_secs_f64())).collect();
    let (part, within) = comparison
        .scenario
        .watch
        .as_ref()
        .map_or((f64::NAN, 0), |watch| (watch.part * 100.0, watch.within.as_secs()));
    let wanted = format!("{part:.0} % of its fair share within {within} s");
    let line = match &all {
        Some(seconds) => format!("healed replica back after {} s ({wanted})", spread(seconds, one)),
        None => {
            let missed = recoveries().filter(|recovery| recovery.after.is_none()).count();
            format!("healed replica not back in {missed} of {} passes ({wanted})", recoveries().count())
        }
    };
    (all.is_some_and(|seconds| !seconds.is_empty()), line)
}

/// Excess of Prequal's `q` quantile over round robin's median in the same pass, in ms.
pub(crate) fn above_round_robin_median(
    comparison: &Comparison,
    envoys: usize,
    q: f64,
) -> impl Iterator<Item = f64> {
    comparison
        .of(Arm::Prequal, envoys)
        .zip(comparison.of(Arm::RoundRobin, envoys))
        .map(move |(ours, theirs)| ours.judged.quantile_ms(q) - theirs.judged.quantile_ms(0.5))
}

/// The largest value; NaN if any value is NaN, or if there is none.
pub(crate) fn worst(values: impl IntoIterator<Item = f64>) -> f64 {
    let larger = |a: f64, b: f64| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) };
    values.into_iter().reduce(larger).unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::{Fleet, ReplicaSpec};
    use crate::peer::Peer;
    use crate::recovery::Recovery;
    use crate::scenario::Scenario;
    use crate::stats::{Sample, Summary};

    /// A pass in which the arm answers `good` of 1000 requests in time. It gives `per_second` answers a second.
    fn run(arm: Arm, good: usize, per_second: f64) -> Measured {
        let sample = |number: usize| Sample {
            latency: (number < good).then_some(Duration::from_millis(50)),
            ..Sample::default()
        };
        Measured {
            arm,
            envoys: 1,
            before: Summary::default(),
            judged: Summary::of(&(0..1000).map(sample).collect::<Vec<_>>(), |_| false),
            after: Summary::default(),
            per_second,
            probes_per_query: None,
            ejections: None,
            envoy_us: 200.0,
            generator_cpu: 0.1,
            late: (Duration::ZERO, Duration::ZERO),
            recovery: None,
        }
    }

    fn judged(goal: Goal, runs: Vec<Measured>) -> Vec<(bool, String)> {
        let scenario = Scenario { goals: vec![goal], ..crate::e2e::stall(Duration::from_secs(60)) };
        let mut goals = Goals::default();
        goals.judge(&Comparison { scenario, runs }, 1);
        goals.lines
    }

    fn reached(goal: Goal, runs: Vec<Measured>) -> bool {
        judged(goal, runs).iter().all(|(reached, _)| *reached)
    }

    #[test]
    fn good_answers_are_judged_by_the_median_pass() {
        let ours = |good: [usize; 3]| good.map(|good| run(Arm::Prequal, good, 1.0)).into();
        assert!(reached(Goal::Good(0.998), ours([999, 998, 900])));
        assert!(!reached(Goal::Good(0.998), ours([999, 997, 997])));
    }

    #[test]
    fn a_healed_replica_must_come_back_in_every_pass() {
        let with = |after| {
            let series = Vec::new();
            Measured { recovery: Some(Recovery { after, series }), ..run(Arm::Prequal, 1000, 1.0) }
        };
        let back = || with(Some(Duration::from_secs(3)));
        assert!(reached(Goal::Back, vec![back(), back()]));
        assert!(!reached(Goal::Back, vec![back(), with(None)]));
        assert!(!reached(Goal::Back, vec![run(Arm::Prequal, 1000, 1.0)]), "the replica was not watched");
    }

    #[test]
    fn throughput_compares_runs_of_the_same_pass() {
        let goal = Goal::Throughput { of: Arm::LeastRequest, part: 0.98 };
        // The machine slows down from pass to pass; Prequal has 99 %, 97.5 % and 98 % of the other arm's rate.
        let rates = [(495.0, 500.0), (390.0, 400.0), (294.0, 300.0)];
        let runs = |rates: &[(f64, f64)]| {
            let pair = |(ours, theirs): &(f64, f64)| {
                [run(Arm::LeastRequest, 1000, *theirs), run(Arm::Prequal, 1000, *ours)]
            };
            rates.iter().flat_map(pair).collect::<Vec<_>>()
        };
        assert!(reached(goal, runs(&rates)));
        assert!(!reached(goal, runs(&rates[1..2])));
    }

    /// A pass with these quantiles.
    fn with_quantiles(arm: Arm, p50: u64, p99: u64, p999: u64) -> Measured {
        let latency = |number| match number {
            0..=500 => p50,
            501..=990 => p99,
            _ => p999,
        };
        let sample = |number| Sample {
            latency: Some(Duration::from_millis(latency(number))),
            replica: Some(u16::from(number >= 700)),
            ..Sample::default()
        };
        let judged = Summary::of(&(0..1000).map(sample).collect::<Vec<_>>(), |_| false);
        Measured { judged, ..run(arm, 1000, 1.0) }
    }

    #[test]
    fn never_worse_is_judged_against_the_best_of_each_quantile() {
        let of = |arm, p50, p99, p999| with_quantiles(arm, p50, p99, p999);
        let with = |ours: [(u64, u64, u64); 3]| {
            let mut runs = vec![
                of(Arm::RoundRobin, 10, 300, 500),
                of(Arm::Random, 30, 200, 900),
                of(Arm::FullScan, 40, 400, 800),
            ];
            runs.extend(ours.map(|(p50, p99, p999)| of(Arm::Prequal, p50, p99, p999)));
            judged(Goal::NeverWorse, runs).into_iter().collect::<Vec<_>>()
        };
        // One pass of three is bad, but the median counts. A p50 of 11 ms exceeds 1.05 times the best p50, 10 ms. It is
        // allowed, because it is only 1 ms more than 10 ms.
        let lines = with([(11, 210, 550), (11, 210, 550), (90, 990, 990)]);
        assert!(lines.iter().all(|(reached, _)| *reached), "{lines:?}");
        let lines = with([(12, 211, 551), (12, 211, 551), (1, 1, 1)]);
        assert!(lines.iter().all(|(reached, _)| !reached), "{lines:?}");
        let text: Vec<&str> = lines.iter().map(|(_, line)| line.as_str()).collect();
        assert_eq!(
            text,
            [
                "stall, one Envoy: p50 12.0 ms, 1.200 times round_robin's 10.0 (at most 1.05 or 1 ms more)",
                "stall, one Envoy: p99 211.0 ms, 1.055 times random's 200.0 (at most 1.05)",
                "stall, one Envoy: p99.9 551.0 ms, 1.102 times round_robin's 500.0 (at most 1.10)",
            ]
        );
    }

    #[test]
    fn one_policy_can_be_the_limit_of_p50_and_p99() {
        let with = |p50, p99| {
            judged(
                Goal::NoWorseThan(Arm::LeastRequest),
                vec![
                    with_quantiles(Arm::LeastRequest, 40, 200, 500),
                    // These policies are better, but do not count.
                    with_quantiles(Arm::RingHash, 1, 1, 1),
                    with_quantiles(Arm::RoundRobin, 1, 1, 1),
                    with_quantiles(Arm::Prequal, p50, p99, 900),
                ],
            )
        };
        let verdicts =
            |lines: &[(bool, String)]| lines.iter().map(|(reached, _)| *reached).collect::<Vec<_>>();
        assert_eq!(verdicts(&with(42, 210)), [true, true]);
        assert_eq!(verdicts(&with(43, 210)), [false, true]);
        assert_eq!(verdicts(&with(42, 211)), [true, false]);
        let (_, line) = &with(43, 211)[1];
        assert_eq!(
            line,
            "stall, one Envoy: p99 211.0 ms, 1.055 times least_request (2 choices)'s 200.0 (at most 1.05)"
        );
        let alone = with_quantiles(Arm::Prequal, 1, 1, 1);
        assert!(!reached(Goal::NoWorseThan(Arm::LeastRequest), vec![alone]));
    }

    #[test]
    fn peers_are_all_arms_but_prequals_own() {
        let peer = Arm::Peer(Peer::HaproxyLeastconn);
        let lines = |ours: u64| {
            let scenario = Scenario {
                arms: vec![Arm::RoundRobin, peer, Arm::Prequal, Arm::Native],
                goals: vec![Goal::NoWorseThanPeers(Arm::Native)],
                ..crate::e2e::stall(Duration::from_secs(60))
            };
            let runs = vec![
                with_quantiles(Arm::RoundRobin, 40, 400, 400),
                with_quantiles(peer, 50, 200, 500),
                // The filter is Prequal as well, so it is not a peer of the native module.
                with_quantiles(Arm::Prequal, 1, 1, 1),
                with_quantiles(Arm::Native, 40, ours, 440),
            ];
            let mut goals = Goals::default();
            goals.judge(&Comparison { scenario, runs }, 1);
            goals.lines
        };
        assert!(lines(210).iter().all(|(reached, _)| *reached), "{:?}", lines(210));
        let (reached, line) = &lines(211)[1];
        assert!(!reached);
        assert_eq!(
            line,
            "stall, one proxy: prequal, native module: p99 211.0 ms, 1.055 times haproxy leastconn's 200.0 (at most 1.05)"
        );
    }

    #[test]
    fn a_goal_can_require_a_p99_below_the_best() {
        let of = |arm, p99| with_quantiles(arm, 1, p99, p99);
        let with = |ours| vec![of(Arm::LeastRequest, 100), of(Arm::Random, 200), of(Arm::Prequal, ours)];
        assert!(reached(Goal::P99OfBest(0.8), with(80)));
        assert!(!reached(Goal::P99OfBest(0.8), with(81)));
        let alone = judged(Goal::P99OfBest(0.8), vec![of(Arm::Prequal, 1)]);
        assert!(!alone[0].0 && alone[0].1.contains("no other policy"), "{alone:?}");
        let all_fail = vec![run(Arm::Random, 0, 1.0), run(Arm::Prequal, 0, 1.0)];
        assert!(!reached(Goal::P99OfBest(2.0), all_fail));
    }

    #[test]
    fn the_least_used_replica_counts_in_every_pass() {
        // Only two of the eleven replicas of `stall` got requests.
        let runs = || vec![with_quantiles(Arm::Prequal, 1, 1, 1)];
        assert!(!reached(Goal::LeastPart(0.01), runs()));
        let scenario = Scenario {
            fleet: Fleet::of(2, ReplicaSpec::sleeping(1)),
            goals: vec![Goal::LeastPart(0.6)],
            ..crate::e2e::stall(Duration::from_secs(60))
        };
        let mut goals = Goals::default();
        goals.judge(&Comparison { scenario, runs: runs() }, 1);
        assert!(goals.lines[0].0, "0.3 of 0.5: {}", goals.lines[0].1);
    }

    #[test]
    fn failures_count_outside_the_judged_part_too() {
        let failed = [Sample::default()];
        let after = Measured { after: Summary::of(&failed, |_| false), ..run(Arm::Prequal, 1000, 1.0) };
        assert!(!reached(Goal::NoneFailed, vec![after]));
    }

    #[test]
    fn a_late_generator_is_reported_as_a_miss() {
        let late = Duration::from_millis(6);
        let runs = vec![Measured { late: (late, late), ..run(Arm::RoundRobin, 1000, 1.0) }];
        let lines = judged(Goal::NoneFailed, runs);
        assert!(!lines[1].0 && lines[1].1.contains("generator 6.0 ms late"), "{}", lines[1].1);
    }
    #[test]
    fn a_run_without_samples_reaches_no_goal() {
        for goal in [
            Goal::Good(0.5),
            Goal::Back,
            Goal::MarkedShare(0.5),
            Goal::P99(1000.0),
            Goal::P99AboveRoundRobinMedian(1000.0),
            Goal::P999BelowBaselines(0.1),
            Goal::CpuOfRoundRobin(10.0),
            Goal::NeverWorse,
            Goal::NoWorseThan(Arm::LeastRequest),
            Goal::NoWorseThanPeers(Arm::Prequal),
            Goal::P99OfBest(10.0),
            Goal::LeastPart(0.1),
            Goal::BeatenByHint(Arm::Hinted(8)),
            Goal::Throughput { of: Arm::LeastRequest, part: 0.1 },
        ] {
            assert!(!reached(goal, Vec::new()), "{goal:?}");
        }
    }

    #[test]
    fn the_worst_of_values_with_a_nan_is_nan() {
        assert!(worst([1.0, f64::NAN, 2.0]).is_nan());
        assert_eq!(worst([1.0, 3.0, 2.0]), 3.0);
    }
}
