//! Random and Round Robin (paper §5.2).

use prequal_core::client::policies::Policy;
use prequal_core::shared::time::Micros;
use rand::{Rng, RngCore};

use super::SimPolicy;

/// Chooses a uniformly random replica.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    /// Number of replicas, at least 1.
    replicas: usize,
}

impl Random {
    /// Creates the policy over `replicas` replicas, at least one.
    pub(crate) fn new(replicas: usize) -> Self {
        Self { replicas: replicas.max(1) }
    }
}

impl Policy for Random {
    fn pick(&mut self, _now: Micros, rng: &mut dyn RngCore) -> usize {
        rng.random_range(0..self.replicas)
    }
}

impl SimPolicy for Random {}

/// Chooses the next replica in cyclic order.
#[derive(Clone, Debug)]
pub(crate) struct RoundRobin {
    replicas: usize,
    last: usize,
}

impl RoundRobin {
    /// Creates the policy over `replicas` replicas, at least one; `start` is where this client begins.
    pub(crate) fn new(replicas: usize, start: usize) -> Self {
        Self { replicas: replicas.max(1), last: start }
    }
}

impl Policy for RoundRobin {
    fn pick(&mut self, _now: Micros, _rng: &mut dyn RngCore) -> usize {
        self.last = (self.last + 1) % self.replicas;
        self.last
    }
}

impl SimPolicy for RoundRobin {}

#[cfg(test)]
mod tests {
    use super::super::tests::shares;
    use super::*;

    #[test]
    fn round_robin_visits_all_in_order_and_random_all_alike() {
        assert_eq!(shares(&mut RoundRobin::new(4, 2), 4, 6), [2, 1, 1, 2], "3, 0, 1, 2, 3, 0");
        assert!(shares(&mut Random::new(4), 4, 4000).iter().all(|count| (900..1100).contains(count)));
    }
}
