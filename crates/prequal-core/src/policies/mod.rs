//! Policies that Prequal is compared with, each with its own name, source and constants.
//!
//! | module | policy | source |
//! |---|---|---|
//! | [`uniform`] | Random, Round Robin | paper §5.2 |
//! | [`weighted`] | Weighted Round Robin, q/u | paper §2; gRPC A58 for the error penalty |
//! | [`least_loaded`] | Least Loaded, LL-Po2C | paper §5.2 (NGINX, Envoy) |
//! | [`yarp`] | YARP-Po2C | paper §5.2; Microsoft YARP |
//! | [`peak_ewma`] | Peak EWMA, Po2C and full scan | Finagle |
//! | [`zuul`] | choice-of-2 of three factors | Netflix, "Rethinking Netflix's Edge Load Balancing" |
//! | [`linear`], [`c3`] | scoring rules on Prequal's pool | paper §5.2 and appendix A; C3 (NSDI '15) |
//!
//! All groups but the last implement [`Policy`] over replicas numbered from 0. For the policies that the filter offers,
//! [`fleet`] names the replicas, which come and go. Linear and C3 rank the entries of a [`crate::pool::PoolState`]
//! instead. Synchronous Prequal has its own module, [`crate::sync`].

use rand::RngCore;

use crate::time::Micros;
use crate::tracker::Outcome;

pub mod c3;
pub mod fleet;
pub mod least_loaded;
pub mod linear;
pub mod peak_ewma;
pub mod uniform;
pub mod weighted;
pub mod yarp;
pub mod zuul;

/// A policy of one client: takes events, and returns the number of a replica.
pub trait Policy {
    /// Chooses a replica for a request that is sent at once.
    fn pick(&mut self, now: Micros, rng: &mut dyn RngCore) -> usize;

    /// Records that a request of this client has ended by a response, a failure or a deadline.
    fn done(&mut self, _replica: usize, _now: Micros, _done: &Done) {}

    /// Records a replica's own load, as polled.
    fn polled(&mut self, _replica: usize, _now: Micros, _rif: u32) {}

    /// Records a replica's own throughput and CPU use, which the replica has smoothed.
    fn utilisation(&mut self, _replica: usize, _now: Micros, _report: &Utilisation) {}
}

/// A policy whose replicas come and go.
pub trait Elastic: Policy {
    /// Adds a replica of which nothing is known, under the next number.
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
    /// Number of requests in flight that the replica put on its response.
    pub rif: Option<u32>,
    /// Utilisation that it put there; 1 is full.
    pub utilisation: Option<f64>,
}

/// Report of a replica to weighted round robin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Utilisation {
    /// Responses per second, errors included.
    pub qps: f64,
    /// Errors per second.
    pub eps: f64,
    /// CPU use divided by allocation; above 1 when the replica bursts.
    pub cpu: f64,
}

/// Returns two distinct numbers below `n`, or the same number twice if `n` is 1.
fn two_distinct(n: usize, rng: &mut dyn RngCore) -> (usize, usize) {
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
