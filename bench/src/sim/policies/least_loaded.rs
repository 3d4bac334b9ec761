//! Least Loaded and its power-of-two-choices form (paper §5.2; NGINX, Envoy): chooses the lowest client-local RIF.

use prequal_core::client::policies::local_rif::LocalRif;
use prequal_core::client::policies::{Done, Policy, two_distinct};
use prequal_core::shared::time::Micros;
use rand::RngCore;

use super::SimPolicy;

/// Chooses the lowest client-local RIF of all replicas. Ties go to the next one after the last chosen replica, in
/// cyclic order.
#[derive(Clone, Debug)]
pub(crate) struct LeastLoaded {
    rif: LocalRif,
    last: usize,
}

impl LeastLoaded {
    /// Creates the policy over `replicas` replicas, at least one; `start` is where this client begins.
    pub(crate) fn new(replicas: usize, start: usize) -> Self {
        Self { rif: LocalRif::new(replicas), last: start }
    }
}

impl Policy for LeastLoaded {
    fn pick(&mut self, _now: Micros, _rng: &mut dyn RngCore) -> usize {
        let n = self.rif.replicas();
        // `min_by_key` keeps the first of equals.
        let cyclic = (1..=n).map(|step| (self.last + step) % n);
        self.last = cyclic.min_by_key(|replica| self.rif.of(*replica)).unwrap_or(0);
        self.rif.start(self.last);
        self.last
    }

    fn done(&mut self, replica: usize, _now: Micros, _done: &Done) {
        self.rif.end(replica);
    }
}

impl SimPolicy for LeastLoaded {}

/// Chooses the less loaded of two random replicas.
#[derive(Clone, Debug)]
pub(crate) struct LeastLoadedPo2c {
    rif: LocalRif,
}

impl LeastLoadedPo2c {
    /// Creates the policy over `replicas` replicas, at least one.
    pub(crate) fn new(replicas: usize) -> Self {
        Self { rif: LocalRif::new(replicas) }
    }
}

impl Policy for LeastLoadedPo2c {
    fn pick(&mut self, _now: Micros, rng: &mut dyn RngCore) -> usize {
        let chosen = less_loaded(&self.rif, two_distinct(self.rif.replicas(), rng));
        self.rif.start(chosen);
        chosen
    }

    fn done(&mut self, replica: usize, _now: Micros, _done: &Done) {
        self.rif.end(replica);
    }
}

impl SimPolicy for LeastLoadedPo2c {}

/// Returns the less loaded of two replicas, the first if they are equal.
pub(crate) fn less_loaded(rif: &LocalRif, (first, second): (usize, usize)) -> usize {
    if rif.of(second) < rif.of(first) { second } else { first }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{shares, succeeded};
    use super::*;
    use rand::{SeedableRng, rngs::SmallRng};

    #[test]
    fn the_least_loaded_wins_and_ties_go_round() {
        let mut policy = LeastLoaded::new(3, 2);
        assert_eq!(shares(&mut policy, 3, 6), [2, 2, 2]);
        policy.done(1, Micros(0), &succeeded(1));
        assert_eq!(policy.pick(Micros(0), &mut SmallRng::seed_from_u64(1)), 1);
    }

    #[test]
    fn of_two_the_less_loaded_wins() {
        let counts = shares(&mut LeastLoadedPo2c::new(2), 2, 100);
        assert_eq!(counts, [50, 50], "with two replicas both are always compared");
    }
}
