//! Selection rules other than Prequal's own, each with its source and constants. A cluster can be configured to use
//! one.
//!
//! | module | policy | source |
//! |---|---|---|
//! | [`peak_ewma`] | Peak EWMA, with two choices or a full scan | Finagle |
//! | [`zuul`] | choice of two by three factors | Netflix, "Rethinking Netflix's Edge Load Balancing" |
//! | [`linear`], [`c3`] | scores of the entries in Prequal's pool | paper §5.2 and appendix A; C3 (NSDI '15) |
//!
//! The first two need no probes. They implement [`Policy`] over replicas numbered from 0, and [`probe_free`] maps the
//! cluster's replicas, which come and go, to those numbers. The simulator has further policies, for comparison only.

use rand::RngCore;

use crate::shared::outcome::Outcome;
use crate::shared::time::Micros;

pub mod c3;
pub mod linear;
pub mod local_rif;
pub mod peak_ewma;
pub mod probe_free;
pub mod zuul;

/// A policy of one client: takes events, and returns the number of a replica.
pub trait Policy {
    /// Chooses a replica for a request that is sent at once.
    fn pick(&mut self, now: Micros, rng: &mut dyn RngCore) -> usize;

    /// Records that a request of this client has ended by a response, a failure or a deadline.
    fn done(&mut self, _replica: usize, _now: Micros, _done: &Done) {}
}

/// A policy whose replicas come and go.
pub trait Elastic: Policy {
    /// Adds a replica without history under the next number.
    fn join(&mut self);

    /// Removes a replica; the last one takes its number.
    fn leave(&mut self, replica: usize);
}

/// How a request ended, as its client saw it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Done {
    /// Time from sending to the end, microseconds.
    pub latency_us: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// Number of requests in flight that the replica reported on its response.
    pub rif: Option<u32>,
    /// Utilisation that it reported there; 1 is full.
    pub utilisation: Option<f64>,
}

/// Returns two distinct numbers below `n`, or the same number twice if `n` is 1.
pub fn two_distinct(n: usize, rng: &mut dyn RngCore) -> (usize, usize) {
    use rand::Rng;
    let first = rng.random_range(0..n);
    if n == 1 {
        return (first, first);
    }
    let second = rng.random_range(0..n - 1);
    (first, if second >= first { second + 1 } else { second })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rand::{SeedableRng, rngs::SmallRng};

    /// Counts how often each of `n` replicas is chosen in `picks` requests that never end.
    pub(crate) fn shares(policy: &mut impl Policy, n: usize, picks: usize) -> Vec<usize> {
        let mut rng = SmallRng::seed_from_u64(5);
        let mut counts = vec![0; n];
        for _ in 0..picks {
            counts[policy.pick(Micros(0), &mut rng)] += 1;
        }
        counts
    }

    pub(crate) fn answered(latency_ms: u64) -> Done {
        Done { latency_us: latency_ms * 1000, outcome: Outcome::Success, rif: None, utilisation: None }
    }

    #[test]
    fn two_choices_are_distinct_and_uniform() {
        let mut rng = SmallRng::seed_from_u64(1);
        let mut seen = [0; 3];
        for _ in 0..3000 {
            let (a, b) = two_distinct(3, &mut rng);
            assert_ne!(a, b);
            seen[a] += 1;
            seen[b] += 1;
        }
        assert!(seen.iter().all(|count| (1850..2150).contains(count)), "{seen:?}");
        assert_eq!(two_distinct(1, &mut rng), (0, 0));
    }
}
