//! The figures of an inference service: time to first token, time per output token, and the share of good requests.

use std::time::Duration;

use crate::stats::{Sample, Summary};

/// The limits that a request must meet to be good, in addition to being answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slo {
    pub(super) first_token: Duration,
    /// Mean time from one token to the next.
    pub(super) per_token: Duration,
}

/// The figures of one policy.
pub(super) struct TokenFigures {
    /// Times to first token, from the due time.
    pub(super) first_token: Summary,
    /// Mean times between the tokens of a request.
    pub(super) per_token: Summary,
    /// Times from the due time to the end of the answer.
    pub(super) whole: Summary,
    /// Share of good requests.
    pub(super) good: f64,
}

impl TokenFigures {
    pub(super) fn of<'a>(samples: impl Iterator<Item = &'a Sample> + Clone, slo: Slo) -> Self {
        let with = |time: fn(&Sample) -> Option<Duration>| {
            let timed: Vec<Sample> =
                samples.clone().map(|sample| Sample { latency: time(sample), ..*sample }).collect();
            Summary::of(&timed, |_| false)
        };
        let good = |sample: &&Sample| {
            first_token(sample).is_some_and(|time| time <= slo.first_token)
                && per_token(sample).is_some_and(|time| time <= slo.per_token)
        };
        let whole = with(|sample| sample.latency);
        Self {
            first_token: with(first_token),
            per_token: with(per_token),
            good: samples.clone().filter(good).count() as f64 / whole.samples as f64,
            whole,
        }
    }
}

/// The time to the first token; `None` if the request failed, even if it failed later.
fn first_token(sample: &Sample) -> Option<Duration> {
    sample.latency.and(sample.first_byte)
}

/// The time per token after the first; zero if there is only one.
fn per_token(sample: &Sample) -> Option<Duration> {
    let rest = sample.latency?.saturating_sub(sample.first_byte?);
    Some(rest / sample.generated.saturating_sub(1).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(first_ms: u64, whole_ms: u64, generated: u32) -> Sample {
        Sample {
            first_byte: Some(Duration::from_millis(first_ms)),
            latency: Some(Duration::from_millis(whole_ms)),
            generated,
            ..Sample::default()
        }
    }

    #[test]
    fn a_good_request_keeps_both_limits() {
        let slo = Slo { first_token: Duration::from_millis(500), per_token: Duration::from_millis(50) };
        let late = sample(501, 600, 10);
        let slow = sample(100, 1001, 19);
        let broken_off = Sample { latency: None, ..sample(100, 0, 10) };
        let samples = [sample(500, 950, 10), sample(20, 20, 1), late, slow, broken_off];
        let figures = TokenFigures::of(samples.iter(), slo);
        assert_eq!(figures.good, 0.4);
        assert_eq!(figures.first_token.quantile_ms(0.6), 500.0);
        assert_eq!(figures.per_token.quantile_ms(0.6), 50.0);
        assert_eq!(figures.whole.quantile_ms(0.8).round(), 1001.0);
        assert_eq!((figures.first_token.failed, figures.whole.failed), (1, 1));
    }
}
