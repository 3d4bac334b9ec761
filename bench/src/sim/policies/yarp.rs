//! YARP-Po2C (paper §5.2): all replicas are polled for their RIF, every 500 ms in the paper's test and every 15 s in
//! YARP. Of two random replicas, the one with the lower polled RIF serves. YARP draws with replacement; ties go to the
//! first.

use prequal_core::client::policies::Policy;
use prequal_core::shared::time::Micros;
use rand::{Rng, RngCore};

use super::SimPolicy;

/// Polling interval of the paper's test, milliseconds: about as many reports per second as Prequal's probes bring.
pub(crate) const PAPER_POLL_MS: u64 = 500;

/// Chooses the lower polled RIF of two random replicas.
#[derive(Clone, Debug)]
pub(crate) struct Yarp {
    polled: Vec<u32>,
}

impl Yarp {
    /// Creates the policy over `replicas` replicas, at least one, all taken as idle until polled.
    pub(crate) fn new(replicas: usize) -> Self {
        Self { polled: vec![0; replicas.max(1)] }
    }

    fn rif(&self, replica: usize) -> u32 {
        self.polled.get(replica).copied().unwrap_or(0)
    }
}

impl Policy for Yarp {
    fn pick(&mut self, _now: Micros, rng: &mut dyn RngCore) -> usize {
        let n = self.polled.len();
        let (first, second) = (rng.random_range(0..n), rng.random_range(0..n));
        if self.rif(second) < self.rif(first) { second } else { first }
    }
}

impl SimPolicy for Yarp {
    fn polled(&mut self, replica: usize, _now: Micros, rif: u32) {
        if let Some(slot) = self.polled.get_mut(replica) {
            *slot = rif;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::shares;
    use super::*;

    #[test]
    fn the_busier_replica_serves_only_if_both_draws_hit_it() {
        let mut policy = Yarp::new(2);
        policy.polled(1, Micros(0), 5);
        let counts = shares(&mut policy, 2, 4000);
        assert!((900..1100).contains(&counts[1]), "a quarter of the draws: {counts:?}");
    }
}
