//! Envoy's `round_robin` and `least_request` where endpoints differ in weight: the replica with the earliest deadline is
//! next, and its deadline then moves by 1 / weight (*earliest deadline first*). For `least_request`, the weight is divided
//! by the number of the client's own queries in flight to the replica plus one. Envoy ignores `selection_method` then.
//!
//! Left out: other values of `active_request_bias`, slow start, priorities and localities.

use prequal_core::client::policies::local_rif::LocalRif;
use prequal_core::client::policies::{Done, Policy};
use prequal_core::shared::time::Micros;
use rand::rngs::SmallRng;
use rand::{Rng as _, RngCore};

use super::{SimPolicy, earliest};

/// The policy for one client's queries.
#[derive(Clone, Debug)]
pub(crate) struct Edf {
    weights: Vec<f64>,
    deadlines: Vec<f64>,
    rif: LocalRif,
    /// Whether the queries in flight count.
    by_load: bool,
}

impl Edf {
    /// Creates the policy over one replica per weight. Clients start at random points of their schedules.
    pub(crate) fn new(weights: &[u32], by_load: bool, rng: &mut SmallRng) -> Self {
        let weights: Vec<f64> = weights.iter().map(|weight| f64::from(*weight)).collect();
        let deadlines = weights.iter().map(|weight| rng.random::<f64>() / weight).collect();
        let rif = LocalRif::new(weights.len());
        Self { weights, deadlines, rif, by_load }
    }
}

impl Policy for Edf {
    fn pick(&mut self, _now: Micros, _rng: &mut dyn RngCore) -> usize {
        let chosen = earliest(&self.deadlines);
        let load = if self.by_load { f64::from(self.rif.of(chosen)) } else { 0.0 };
        self.deadlines[chosen] += (load + 1.0) / self.weights[chosen];
        self.rif.start(chosen);
        chosen
    }

    fn done(&mut self, replica: usize, _now: Micros, _done: &Done) {
        self.rif.end(replica);
    }
}

impl SimPolicy for Edf {}

#[cfg(test)]
mod tests {
    use super::super::tests::{shares, succeeded};
    use super::*;
    use rand::SeedableRng as _;

    #[test]
    fn replicas_share_by_weight_and_a_busy_one_gets_less() {
        let mut rng = SmallRng::seed_from_u64(1);
        assert_eq!(shares(&mut Edf::new(&[3, 1], false, &mut rng), 2, 400), [300, 100]);
        let mut policy = Edf::new(&[3, 1], true, &mut rng);
        let mut counts = [0; 2];
        for _ in 0..4000 {
            let chosen = policy.pick(Micros(0), &mut rng);
            counts[chosen] += 1;
            // The first replica keeps two queries, the second none.
            if chosen == 1 || policy.rif.of(0) > 2 {
                policy.done(chosen, Micros(0), &succeeded(1));
            }
        }
        let share = f64::from(counts[0]) / 4000.0;
        assert!((0.49..0.51).contains(&share), "3 / (2 + 1) is as much as 1: {counts:?}");
    }
}
