//! Policies side by side at one speed-up: table, curves and verdicts.

use std::time::Duration;

use super::figures::{Slo, TokenFigures};
use crate::arm::Arm;
use crate::goals::{Goals, LATE};
use crate::plot::{Curve, Panel};
use crate::stats::Sample;
use crate::table::{self, count, ms, percent, two};

/// The policies that use neither reports nor the request's key.
const BASELINES: [Arm; 3] = [Arm::RoundRobin, Arm::LeastRequest, Arm::FullScan];
/// Goal: `profile: inference` has at most this many times the best baseline's p99 of the time to first token.
const OF_BEST: f64 = 1.05;

/// A policy is not compared if more than this share of its requests failed. The model's engines refuse nothing, so such
/// failures have another cause.
const BROKEN: f64 = 0.01;

/// The measurements of one run.
pub(super) struct MeasuredReplay {
    pub(super) arm: Arm,
    /// Requests that were due in the judged part.
    pub(super) samples: Vec<Sample>,
    /// Probes per request of the whole run; `None` if the filter does not choose.
    pub(super) probes_per_query: Option<f64>,
    /// Ejections in the whole run, for any reason.
    pub(super) ejections: Option<u64>,
    /// The generator's lateness at its 99th percentile.
    pub(super) late: Duration,
}

/// One policy at one speed-up, all passes together.
pub(super) struct PolicyFigures {
    arm: Arm,
    figures: TokenFigures,
    /// Mean over the passes.
    probes_per_query: f64,
    ejections: f64,
    late: Duration,
}

impl PolicyFigures {
    pub(super) fn of(arm: Arm, runs: &[MeasuredReplay], slo: Slo) -> Self {
        let own = || runs.iter().filter(move |run| run.arm == arm);
        let sum = |value: fn(&MeasuredReplay) -> Option<f64>| {
            own().map(|run| value(run).unwrap_or(f64::NAN)).sum::<f64>()
        };
        Self {
            arm,
            figures: TokenFigures::of(own().flat_map(|run| &run.samples), slo),
            probes_per_query: sum(|run| run.probes_per_query) / own().count() as f64,
            ejections: sum(|run| run.ejections.map(|number| number as f64)),
            late: own().map(|run| run.late).max().unwrap_or_default(),
        }
    }

    /// Whether so many requests failed that something other than the policy went wrong: a comparison would mean
    /// nothing.
    fn broke(&self) -> bool {
        let whole = &self.figures.whole;
        whole.failed as f64 > whole.samples as f64 * BROKEN
    }

    fn first_token_p99(&self) -> f64 {
        self.figures.first_token.quantile_ms(0.99)
    }
}

/// The figures of all policies at one speed-up.
pub(super) fn table(policies: &[PolicyFigures]) -> String {
    let header = [
        "policy",
        "TTFT p50 ms",
        "p95",
        "p99",
        "TPOT p50 ms",
        "p99",
        "end p50 ms",
        "p99",
        "prefix hits",
        "good",
        "probes/query",
        "ejections",
        "failed",
        "requests",
    ];
    let row = |policy: &PolicyFigures| {
        let TokenFigures { first_token, per_token, whole, good } = &policy.figures;
        vec![
            policy.arm.label().to_owned(),
            ms(first_token.quantile_ms(0.5)),
            ms(first_token.quantile_ms(0.95)),
            ms(first_token.quantile_ms(0.99)),
            ms(per_token.quantile_ms(0.5)),
            ms(per_token.quantile_ms(0.99)),
            ms(whole.quantile_ms(0.5)),
            ms(whole.quantile_ms(0.99)),
            percent(whole.hit_rate()),
            percent(*good),
            two(policy.probes_per_query),
            count(policy.ejections),
            whole.failed.to_string(),
            whole.samples.to_string(),
        ]
    };
    table::render(&header, &policies.iter().map(row).collect::<Vec<_>>())
}

/// Adds the verdicts on one speed-up.
pub(super) fn judge(policies: &[PolicyFigures], place: &str, goals: &mut Goals) {
    for policy in policies.iter().filter(|policy| policy.broke()) {
        let (failed, samples) = (policy.figures.whole.failed, policy.figures.whole.samples);
        let line =
            format!("{place}: {} failed {failed} of {samples}, so it is not compared", policy.arm.label());
        goals.add(false, line);
    }
    let of = |arm: Arm| policies.iter().find(|policy| policy.arm == arm && !policy.broke());
    let baselines = BASELINES.into_iter().filter_map(of);
    let best = baselines.min_by(|one, other| one.first_token_p99().total_cmp(&other.first_token_p99()));
    if let Some((ours, best)) = of(Arm::Inference).zip(best) {
        let (p99, bound) = (ours.first_token_p99(), best.first_token_p99());
        let line = format!(
            "{place}: {} TTFT p99 {} ms, {:.3} times {}'s {} (at most {OF_BEST})",
            ours.arm.label(),
            ms(p99),
            p99 / bound,
            best.arm.label(),
            ms(bound),
        );
        goals.add(p99.is_finite() && p99 <= bound * OF_BEST, line);
    }
    let hinted =
        policies.iter().filter(|policy| matches!(policy.arm, Arm::InferenceHinted(_)) && !policy.broke());
    for (ours, ring) in hinted.filter_map(|ours| Some(ours).zip(of(Arm::RingHash))) {
        let (good, bound) = (ours.figures.good, ring.figures.good);
        let line = format!(
            "{place}: {} good {} (at least {}'s {})",
            ours.arm.label(),
            percent(good),
            ring.arm.label(),
            percent(bound),
        );
        goals.add(good >= bound, line);
    }
    if let Some(late) = policies.iter().map(|policy| policy.late).max().filter(|late| *late > LATE) {
        let limit = LATE.as_millis();
        let line = format!(
            "{place}: generator {} ms late at its p99 (at most {limit} ms)",
            ms(late.as_secs_f64() * 1e3)
        );
        goals.add(false, line);
    }
}

/// The times to first token at one speed-up.
pub(super) fn panel(policies: &[PolicyFigures], title: String) -> Panel {
    let curve = |policy: &PolicyFigures| Curve {
        label: policy.arm.label().to_owned(),
        points: policy.figures.first_token.tail(),
    };
    Panel { title, curves: policies.iter().map(curve).collect() }
}
