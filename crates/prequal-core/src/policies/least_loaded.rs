//! Least Loaded and its power-of-two-choices form (paper §5.2; NGINX, Envoy): chooses the lowest client-local RIF.

use rand::RngCore;

use super::{Done, Policy, two_distinct};
use crate::time::Micros;

/// Requests of this client in flight, per replica.
#[derive(Clone, Debug)]
pub(crate) struct InFlight(Vec<u32>);

impl InFlight {
    pub(crate) fn new(replicas: usize) -> Self {
        Self(vec![0; replicas.max(1)])
    }

    pub(crate) fn nobody() -> Self {
        Self(Vec::new())
    }

    pub(crate) fn join(&mut self) {
        self.0.push(0);
    }

    pub(crate) fn leave(&mut self, replica: usize) {
        if replica < self.0.len() {
            self.0.swap_remove(replica);
        }
    }

    pub(crate) fn of(&self, replica: usize) -> u32 {
        self.0.get(replica).copied().unwrap_or(0)
    }

    pub(crate) fn start(&mut self, replica: usize) {
        if let Some(count) = self.0.get_mut(replica) {
            *count += 1;
        }
    }

    pub(crate) fn end(&mut self, replica: usize) {
        if let Some(count) = self.0.get_mut(replica) {
            *count = count.saturating_sub(1);
        }
    }

    pub(crate) fn replicas(&self) -> usize {
        self.0.len()
    }
}

/// Chooses the lowest client-local RIF of all replicas. Ties go to the next one after the last chosen replica, in
/// cyclic order.
#[derive(Clone, Debug)]
pub struct LeastLoaded {
    in_flight: InFlight,
    last: usize,
}

impl LeastLoaded {
    /// Creates the policy over `replicas` replicas, at least one; `start` is where this client begins.
    pub fn new(replicas: usize, start: usize) -> Self {
        Self { in_flight: InFlight::new(replicas), last: start }
    }
}

impl Policy for LeastLoaded {
    fn pick(&mut self, _now: Micros, _rng: &mut dyn RngCore) -> usize {
        let n = self.in_flight.replicas();
        // `min_by_key` keeps the first of equals.
        let cyclic = (1..=n).map(|step| (self.last + step) % n);
        self.last = cyclic.min_by_key(|replica| self.in_flight.of(*replica)).unwrap_or(0);
        self.in_flight.start(self.last);
        self.last
    }

    fn done(&mut self, replica: usize, _now: Micros, _done: &Done) {
        self.in_flight.end(replica);
    }
}

/// Chooses the less loaded of two random replicas.
#[derive(Clone, Debug)]
pub struct LeastLoadedPo2c {
    in_flight: InFlight,
}

impl LeastLoadedPo2c {
    /// Creates the policy over `replicas` replicas, at least one.
    pub fn new(replicas: usize) -> Self {
        Self { in_flight: InFlight::new(replicas) }
    }
}

impl Policy for LeastLoadedPo2c {
    fn pick(&mut self, _now: Micros, rng: &mut dyn RngCore) -> usize {
        let (first, second) = two_distinct(self.in_flight.replicas(), rng);
        let chosen = if self.in_flight.of(second) < self.in_flight.of(first) { second } else { first };
        self.in_flight.start(chosen);
        chosen
    }

    fn done(&mut self, replica: usize, _now: Micros, _done: &Done) {
        self.in_flight.end(replica);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{answered, shares};
    use super::*;
    use rand::{SeedableRng, rngs::SmallRng};

    #[test]
    fn the_least_loaded_wins_and_ties_go_round() {
        let mut policy = LeastLoaded::new(3, 2);
        assert_eq!(shares(&mut policy, 3, 6), [2, 2, 2]);
        policy.done(1, Micros(0), &answered(1));
        assert_eq!(policy.pick(Micros(0), &mut SmallRng::seed_from_u64(1)), 1);
    }

    #[test]
    fn of_two_the_less_loaded_wins() {
        let counts = shares(&mut LeastLoadedPo2c::new(2), 2, 100);
        assert_eq!(counts, [50, 50], "with two replicas both are always compared");
    }
}
