//! The verdicts: whether a generator agrees with ours, and whether the claims hold by its figures.

use super::generator::Generator;
use super::{Claim, Runs};
use crate::arm::Arm;
use crate::goals::{Goals, Limit, NEVER_WORSE, worst};
use crate::stats::Summary;
use crate::table::{ms, one};

/// How far two generators may differ, in either direction.
const SAME: [Limit; 4] = [
    Limit { name: "p50", q: 0.5, times: 1.05, or_more_ms: Some(2.0) },
    Limit { name: "p95", q: 0.95, times: 1.05, or_more_ms: Some(2.0) },
    Limit { name: "p99", q: 0.99, times: 1.05, or_more_ms: Some(2.0) },
    Limit { name: "p99.9", q: 0.999, times: 1.10, or_more_ms: Some(5.0) },
];
/// How far a generator's rate may be from the one it was asked for.
const RATE: f64 = 0.02;
/// Round robin's p99.9 must be at least this many times Prequal's.
const P999_FACTOR: f64 = 10.0;
/// Maximum excess of Prequal's p99 over its own median.
const P99_MARGIN_MS: f64 = 10.0;
/// A difference of ranks of up to this many standard deviations counts as chance.
const DEVIATIONS: f64 = 3.0;

/// How a generator's figures compare with ours.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Agreement {
    /// All within the limits.
    Agrees,
    /// Some are beyond the limits, but chance explains the difference.
    Chance,
    Differs,
}

impl Agreement {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Agrees => "agrees",
            Self::Chance => "within chance",
            Self::Differs => "differs",
        }
    }
}

/// The goals in words, to be printed before the first run.
pub(super) fn goals(fleet: Claim) -> String {
    let claim = match fleet {
        Claim::Demo => format!(
            "by every generator, in every pass: round robin's p99.9 is at least {P999_FACTOR} times Prequal's; Prequal's \
             p99 is at most {P99_MARGIN_MS} ms above its median; no request of Prequal's fails"
        ),
        Claim::Equal => {
            "by every generator: no quantile of Prequal's is worse than the best of the other policies' \
                         (p50 5 % or 1 ms, p99 5 %, p99.9 10 %)"
                .to_owned()
        }
    };
    format!(
        "Goals: every generator agrees with ours (p50, p95 and p99 within 5 % or 2 ms, p99.9 within 10 % or 5 ms, or by no \
         more than chance);\n{claim}."
    )
}

/// Judges every generator.
pub(super) fn judge(runs: &Runs, goals: &mut Goals) {
    for generator in &runs.generators {
        if *generator != Generator::Ours {
            for arm in &runs.scenario.arms {
                let (agreement, line) = agreement(runs, *arm, *generator);
                let line = format!("{} by {}: {line}", arm.label(), generator.name());
                goals.add(agreement != Agreement::Differs, line);
            }
        }
        for (reached, line) in claims(runs, *generator) {
            goals.add(reached, format!("by {}: {line}", generator.name()));
        }
    }
}

/// Compares one generator's medians over the passes with ours.
pub(super) fn agreement(runs: &Runs, arm: Arm, generator: Generator) -> (Agreement, String) {
    let (mut chance, mut differences) = (Vec::new(), Vec::new());
    let (sent, asked) = (runs.sent(arm, generator), f64::from(runs.asked()));
    // NaN compares false, so a generator without samples differs.
    let rate_reached = (sent / asked - 1.0).abs() <= RATE;
    if !rate_reached {
        differences.push(format!("{} requests/s, not {asked}", one(sent)));
    }
    for limit in SAME {
        let [theirs, ours] = [generator, Generator::Ours].map(|by| runs.quantile_ms(arm, by, limit.q));
        if limit.allows(theirs, ours) && limit.allows(ours, theirs) {
            continue;
        }
        let line = format!("{} {} ms against ours {}", limit.name, ms(theirs), ms(ours));
        let mut pairs = runs.of(arm, generator).zip(runs.of(arm, Generator::Ours));
        if pairs.all(|(theirs, ours)| by_chance(theirs, ours, limit.q)) {
            chance.push(line);
        } else {
            differences.push(line);
        }
    }
    if !differences.is_empty() {
        return (Agreement::Differs, format!("differs: {}", differences.join(", ")));
    }
    if !chance.is_empty() {
        return (Agreement::Chance, format!("agrees; within chance: {}", chance.join(", ")));
    }
    (Agreement::Agrees, "agrees".to_owned())
}

/// Whether two samples of one distribution could differ so much at `q`. Chance can move the rank of a quantile by
/// [`DEVIATIONS`] standard deviations up or down. The figure of each sample must lie between the other's figures at
/// these two ranks. Where the distribution has a step, as that of full scan has at 99 %, chance decides on which side
/// of the step a quantile is. Requests that wait for each other vary more than this assumes.
fn by_chance(one: &Summary, other: &Summary, q: f64) -> bool {
    let within = |one: &Summary, other: &Summary| {
        let requests = one.samples.min(other.samples) as f64;
        let ranks = DEVIATIONS * (2.0 * q * (1.0 - q) / requests).sqrt();
        let figure = one.quantile_ms(q);
        // With too few requests, or failures at this quantile, chance could explain anything.
        if q + ranks >= 1.0 || figure.is_infinite() {
            return false;
        }
        other.quantile_ms(q - ranks) <= figure && figure <= other.quantile_ms(q + ranks)
    };
    within(one, other) && within(other, one)
}

/// The verdicts on the claims by one generator's figures.
fn claims(runs: &Runs, generator: Generator) -> Vec<(bool, String)> {
    match runs.fleet {
        Claim::Demo => demo(runs, generator),
        Claim::Equal => NEVER_WORSE.map(|limit| not_worse(runs, generator, limit)).into(),
    }
}

fn demo(runs: &Runs, generator: Generator) -> Vec<(bool, String)> {
    let prequal = || runs.of(Arm::Prequal, generator);
    let pairs = prequal().zip(runs.of(Arm::RoundRobin, generator));
    let factor = -worst(pairs.map(|(ours, theirs)| -theirs.quantile_ms(0.999) / ours.quantile_ms(0.999)));
    let above = worst(prequal().map(|judged| judged.quantile_ms(0.99) - judged.quantile_ms(0.5)));
    let failed: usize = prequal().map(|judged| judged.failed).sum();
    vec![
        (
            factor >= P999_FACTOR,
            format!("p99.9 {} times below round robin's (at least {P999_FACTOR})", one(factor)),
        ),
        (
            above <= P99_MARGIN_MS,
            format!("p99 above the median by {} ms (at most {P99_MARGIN_MS} ms)", ms(above)),
        ),
        (failed == 0, format!("{failed} failed requests (none)")),
    ]
}

/// Compares medians over the passes with the best of Envoy's own policies.
fn not_worse(runs: &Runs, generator: Generator, limit: Limit) -> (bool, String) {
    let middle = |arm| runs.quantile_ms(arm, generator, limit.q);
    let ours = middle(Arm::Prequal);
    let others = runs.scenario.arms.iter().filter(|arm| !arm.is_prequal()).map(|arm| (middle(*arm), *arm));
    let Some((best, arm)) = others.min_by(|one, other| one.0.total_cmp(&other.0)) else {
        return (false, format!("{}: none of Envoy's own policies ran", limit.name));
    };
    let line =
        format!("{} {} ms, {:.3} times {}'s {}", limit.name, ms(ours), ours / best, arm.label(), ms(best));
    (limit.allows(ours, best), format!("{line} (at most {})", limit.text()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::GeneratorRun;
    use super::*;
    use crate::stats::Sample;

    const SECONDS: usize = 20;

    /// A run of 10 000 requests in which those of rank `from` and above take `slow` ms, and the others `fast` ms.
    fn run(arm: Arm, generator: Generator, fast: u64, from: usize, slow: u64) -> GeneratorRun {
        let sample = |rank| Sample {
            latency: Some(Duration::from_millis(if rank < from { fast } else { slow })),
            ..Sample::default()
        };
        let samples: Vec<Sample> = (0..500 * SECONDS).map(sample).collect();
        GeneratorRun { arm, generator, judged: Summary::of(&samples, |_| false) }
    }

    fn runs(runs: Vec<GeneratorRun>) -> Runs {
        let seconds = Duration::from_secs(SECONDS as u64);
        Runs { runs, ..Runs::new(Claim::Demo, Claim::Demo.scenario(seconds), &[Generator::Vegeta]) }
    }

    fn compared(fast: u64, from: usize, slow: u64) -> (Agreement, String) {
        let arm = Arm::FullScan;
        let ours = run(arm, Generator::Ours, 50, 9905, 800);
        agreement(&runs(vec![ours, run(arm, Generator::Vegeta, fast, from, slow)]), arm, Generator::Vegeta)
    }

    #[test]
    fn small_differences_agree() {
        assert_eq!(compared(52, 9905, 840), (Agreement::Agrees, "agrees".to_owned()));
        let (agreement, line) = compared(53, 9905, 800);
        assert_eq!(agreement, Agreement::Differs);
        assert_eq!(
            line,
            "differs: p50 53.0 ms against ours 50.0, p95 53.0 ms against ours 50.0, p99 53.0 ms against ours 50.0"
        );
    }

    #[test]
    fn a_step_may_be_on_either_side_of_a_quantile() {
        let (agreement, line) = compared(50, 9895, 800);
        assert_eq!(agreement, Agreement::Chance);
        assert_eq!(line, "agrees; within chance: p99 800.0 ms against ours 50.0");
        // Chance does not explain twice as many slow requests.
        assert_eq!(compared(50, 9800, 800).0, Agreement::Differs);
    }

    #[test]
    fn a_generator_that_misses_its_rate_differs() {
        let arm = Arm::FullScan;
        let ours = run(arm, Generator::Ours, 50, 9905, 800);
        let mut theirs = run(arm, Generator::Vegeta, 50, 9905, 800);
        let sample = Sample { latency: Some(Duration::from_millis(50)), ..Sample::default() };
        theirs.judged = Summary::of(&vec![sample; 490 * SECONDS - 100], |_| false);
        let (agreement, line) = agreement(&runs(vec![ours, theirs]), arm, Generator::Vegeta);
        assert_eq!(agreement, Agreement::Differs);
        assert!(line.starts_with("differs: 485.0 requests/s, not 500"), "{line}");
    }

    #[test]
    fn the_claims_hold_in_every_pass_or_not() {
        let by = Generator::Vegeta;
        let pass = |slow| [run(Arm::RoundRobin, by, 50, 8750, 800), run(Arm::Prequal, by, 50, 9905, slow)];
        let reached = |slow: [u64; 2]| {
            let verdicts = claims(&runs(slow.into_iter().flat_map(pass).collect()), by);
            verdicts.into_iter().map(|(reached, _)| reached).collect::<Vec<_>>()
        };
        assert_eq!(reached([60, 80]), [true, true, true]);
        assert_eq!(reached([60, 81]), [false, true, true]);
        let failed = Sample::default();
        let mut prequal = run(Arm::Prequal, by, 50, 9905, 60);
        prequal.judged = Summary::of(&[failed], |_| false);
        let verdicts = claims(&runs(vec![run(Arm::RoundRobin, by, 50, 8750, 800), prequal]), by);
        assert!(verdicts.iter().all(|(reached, _)| !reached), "{verdicts:?}");
    }
}
