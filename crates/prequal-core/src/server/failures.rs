//! Share of a replica's recent requests that failed through its own fault.
//!
//! The share is a ratio of two counts that fade together, with time and with newer requests. Consecutive-failure
//! counters rarely detect a replica that fails a third of its requests. A ratio detects it, while latency and RIF never
//! show it.
//!
//! | what | rule |
//! |---|---|
//! | old evidence | halves every [`HALF_LIFE_US`], and never weighs more than [`MAX_EVIDENCE`] requests |
//! | little evidence | the failures are divided by at least [`MIN_EVIDENCE`] requests: a single failure reads 250 ‰ |
//! | no traffic | after [`SILENCE_US`] without a response, failures also fade relative to responses, and reach zero |
//!
//! So at 50 requests/s, the reported share of a replica that begins to fail is 80 % of the true share after 2 s.
//! Without traffic, the reported share falls to a tenth after 18 s. The standard error of a share of 30 % is 4 points.
//!
//! Client aborts say nothing about the replica and are not counted. The caller decides what counts as a failure
//! ([`Outcome::Failure`]).

use crate::shared::outcome::Outcome;
use crate::shared::time::Micros;
use crate::wire::report::MAX_FAILING;

/// Half-life of evidence, microseconds.
///
/// The value is a compromise. With half-lives of 2, 5 and 10 s, the reported share of a replica that gets one request
/// every 2 s and fails them all is 250, 500 and 600 ‰ on average. If a replica failed half of 50 requests/s and has
/// recovered, its share is below 50 ‰ after 8, 18 and 35 s without traffic, and after 15, 32 and 55 s with one request
/// per second.
pub const HALF_LIFE_US: u64 = 5_000_000;
/// Time without a response beyond which silence begins, microseconds.
pub const SILENCE_US: u64 = 1_000_000;
/// Maximum weight of the recent requests, so that the failures of a busy replica show within its last hundred requests.
pub const MAX_EVIDENCE: f64 = 64.0;
/// Minimum number of requests by which the failures are divided.
pub const MIN_EVIDENCE: f64 = 4.0;

/// Decayed counts of responses and failures. Starts empty.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FailureShare {
    ended: f64,
    failed: f64,
    at: Micros,
}

impl FailureShare {
    /// Counts a request that has ended.
    pub fn record(&mut self, now: Micros, outcome: Outcome) {
        let failed = match outcome {
            Outcome::Success | Outcome::Streaming => 0.0,
            Outcome::Failure => 1.0,
            Outcome::Aborted => return,
        };
        let mut next = self.faded(now);
        let keep = ((MAX_EVIDENCE - 1.0) / next.ended).min(1.0);
        next.ended = next.ended * keep + 1.0;
        next.failed = next.failed * keep + failed;
        *self = next;
    }

    /// Returns the share of failures at `now`, per mille, 0 to [`MAX_FAILING`].
    pub fn per_mille(&self, now: Micros) -> u16 {
        if self.failed == 0.0 {
            return 0;
        }
        let Self { ended, failed, .. } = self.faded(now);
        let share = failed / ended.max(MIN_EVIDENCE);
        // `as` saturates, and a NaN would be 0.
        ((share * f64::from(MAX_FAILING)).round() as u16).min(MAX_FAILING)
    }

    fn faded(&self, now: Micros) -> Self {
        // The gap counts in either direction: after a step back of the clock, evidence is old, rather than fresh for
        // the length of the step.
        let gap = now.0.abs_diff(self.at.0);
        if gap == 0 {
            return *self;
        }
        let halved = |us: u64| (-(us as f64) / HALF_LIFE_US as f64).exp2();
        let by_time = halved(gap);
        let by_silence = if gap > SILENCE_US { halved(gap - SILENCE_US) } else { 1.0 };
        Self { ended: self.ended * by_time, failed: self.failed * by_time * by_silence, at: now }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    /// Records `rate` requests per second from second `from` to second `to`, a share of which fails at random.
    fn serve(share: &mut FailureShare, rng: &mut SmallRng, rate: u64, from: u64, to: u64, failing: f64) {
        for i in from * rate..to * rate {
            let outcome = if rng.random::<f64>() < failing { Outcome::Failure } else { Outcome::Success };
            share.record(Micros(i * 1_000_000 / rate), outcome);
        }
    }

    fn seconds(s: u64) -> Micros {
        Micros(s * 1_000_000)
    }

    #[test]
    fn a_share_is_read_within_seconds_at_any_rate() {
        // Means over many replicas; a single one is off by the noise of 64 requests.
        for (rate, within) in [(10, 15), (50, 5), (500, 1)] {
            for failing in [0.0, 0.3, 0.5, 1.0] {
                let mut rng = SmallRng::seed_from_u64(1);
                let read = |rng: &mut SmallRng| {
                    let mut share = FailureShare::default();
                    serve(&mut share, rng, rate, 0, 60, 0.0);
                    serve(&mut share, rng, rate, 60, 60 + within, failing);
                    f64::from(share.per_mille(seconds(60 + within)))
                };
                let mean = (0..200).map(|_| read(&mut rng)).sum::<f64>() / 200.0;
                let expected = failing * 1000.0;
                assert!(
                    (expected * 0.85..=expected * 1.05).contains(&mean),
                    "{rate}/s, {failing}: {mean} after {within} s"
                );
            }
        }
    }

    #[test]
    fn the_share_is_near_the_true_one_and_a_rare_error_hardly_counts() {
        let mut rng = SmallRng::seed_from_u64(2);
        for (failing, low, high) in [(0.3, 150, 450), (0.5, 340, 660), (0.01, 0, 80)] {
            let mut share = FailureShare::default();
            serve(&mut share, &mut rng, 50, 0, 10, failing);
            for second in 10..300 {
                serve(&mut share, &mut rng, 50, second, second + 1, failing);
                let read = share.per_mille(seconds(second + 1));
                assert!((low..=high).contains(&read), "{failing}: {read} in second {second}");
            }
        }
    }

    #[test]
    fn a_single_failure_after_idleness_counts_little_and_briefly() {
        let mut share = FailureShare::default();
        share.record(seconds(1000), Outcome::Failure);
        assert_eq!(share.per_mille(seconds(1000)), 250);
        assert!(share.per_mille(seconds(1006)) < 60);
        for _ in 0..3 {
            share.record(seconds(1000), Outcome::Failure);
        }
        assert_eq!(share.per_mille(seconds(1000)), 1000, "four are enough");
    }

    #[test]
    fn without_traffic_everything_is_forgiven() {
        let mut share = FailureShare::default();
        serve(&mut share, &mut SmallRng::seed_from_u64(3), 1000, 0, 60, 1.0);
        let read: Vec<u16> = [60, 61, 66, 71, 78, 100].map(|s| share.per_mille(seconds(s))).to_vec();
        assert!(read.is_sorted_by(|a, b| a >= b), "{read:?}");
        assert!(read[1] > 950 && (450..550).contains(&read[2]) && read[4] < 100, "{read:?}");
        assert!(read[5] <= 1, "{read:?}");
    }

    #[test]
    fn a_healed_replica_with_few_requests_is_forgiven_within_half_a_minute() {
        let mut rng = SmallRng::seed_from_u64(4);
        let mut share = FailureShare::default();
        serve(&mut share, &mut rng, 1000, 0, 60, 0.5);
        serve(&mut share, &mut rng, 2, 60, 90, 0.0);
        assert!(share.per_mille(seconds(90)) < 50, "{share:?}");
    }

    #[test]
    fn a_replica_that_fails_its_few_requests_is_not_forgiven() {
        let mut share = FailureShare::default();
        serve(&mut share, &mut SmallRng::seed_from_u64(5), 1, 0, 60, 1.0);
        assert!(share.per_mille(seconds(60)) > 800, "{share:?}");
    }

    #[test]
    fn aborts_do_not_count_and_streams_count_as_answers() {
        let mut share = FailureShare::default();
        for _ in 0..10 {
            share.record(seconds(1), Outcome::Failure);
            share.record(seconds(1), Outcome::Aborted);
        }
        assert_eq!(share.per_mille(seconds(1)), 1000);
        for _ in 0..10 {
            share.record(seconds(1), Outcome::Streaming);
        }
        assert_eq!(share.per_mille(seconds(1)), 500);
    }

    #[test]
    fn a_clock_step_resets_the_share() {
        for stepped in [seconds(10), seconds(1_000_000), Micros(u64::MAX)] {
            let mut share = FailureShare::default();
            serve(&mut share, &mut SmallRng::seed_from_u64(6), 100, 100_000, 100_010, 1.0);
            assert_eq!(share.per_mille(stepped), 0, "{stepped:?}");
            for _ in 0..20 {
                share.record(stepped, Outcome::Failure);
            }
            assert_eq!(share.per_mille(stepped), 1000);
        }
    }

    proptest! {
        #[test]
        fn the_share_is_bounded_after_any_events(events in proptest::collection::vec((any::<u64>(), 0u8..4), 0..200)) {
            let mut share = FailureShare::default();
            for (at, how) in events {
                let outcome = match how {
                    0 => Outcome::Success,
                    1 => Outcome::Failure,
                    2 => Outcome::Aborted,
                    _ => Outcome::Streaming,
                };
                share.record(Micros(at), outcome);
                prop_assert!(share.per_mille(Micros(at)) <= MAX_FAILING);
                prop_assert!(share.ended <= MAX_EVIDENCE && share.failed <= share.ended, "{:?}", share);
            }
        }
    }
}
