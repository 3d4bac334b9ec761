//! Weighted Round Robin as the paper's baseline: the weight of a replica is q/u (§2), where q is its recent queries per
//! second and u its recent CPU utilisation. The error penalty is that of gRPC A58:
//! weight = qps / (u + penalty · eps / qps).

use prequal_core::client::policies::Policy;
use prequal_core::shared::time::Micros;
use rand::RngCore;

use super::{SimPolicy, Utilisation, earliest};

/// Round robin with weights from reported utilisation, in the order of earliest virtual deadlines, as in Envoy and
/// gRPC.
#[derive(Clone, Debug)]
pub(crate) struct WeightedRoundRobin {
    error_penalty: f64,
    /// `None` until a replica has a valid weight. Until then it gets the median of the others (gRPC A58).
    weights: Vec<Option<f64>>,
    deadlines: Vec<f64>,
}

impl WeightedRoundRobin {
    /// Creates the policy over one replica per phase. `phases`, each in [0, 1), spread the clients; without phases, all
    /// clients would begin with the same replica. An `error_penalty` of 0 ignores errors, which is right only to
    /// reproduce the paper's baseline; 1 is gRPC's default.
    pub(crate) fn new(phases: Vec<f64>, error_penalty: f64) -> Self {
        Self { error_penalty, weights: vec![None; phases.len()], deadlines: phases }
    }

    fn weight(&self, replica: usize) -> f64 {
        self.weights.get(replica).copied().flatten().unwrap_or_else(|| {
            let mut known: Vec<f64> = self.weights.iter().flatten().copied().collect();
            known.sort_by(f64::total_cmp);
            known.get(known.len() / 2).copied().unwrap_or(1.0)
        })
    }
}

impl Policy for WeightedRoundRobin {
    fn pick(&mut self, _now: Micros, _rng: &mut dyn RngCore) -> usize {
        let chosen = earliest(&self.deadlines);
        let step = 1.0 / self.weight(chosen);
        if let Some(deadline) = self.deadlines.get_mut(chosen) {
            *deadline += step;
        }
        chosen
    }
}

impl SimPolicy for WeightedRoundRobin {
    fn utilisation(&mut self, replica: usize, _now: Micros, report: &Utilisation) {
        let weight = report.qps / (report.cpu + self.error_penalty * report.eps / report.qps);
        let valid = (weight.is_finite() && weight > 0.0).then_some(weight);
        let now = self.deadlines.iter().copied().fold(f64::INFINITY, f64::min);
        let (Some(slot), Some(deadline)) = (self.weights.get_mut(replica), self.deadlines.get_mut(replica))
        else {
            return;
        };
        // Rescale the rest of the replica's turn; otherwise a new weight would take effect only one turn later.
        if let (Some(before), Some(after)) = (*slot, valid) {
            *deadline = now + (*deadline - now) * before / after;
        }
        *slot = valid;
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::shares;
    use super::*;

    #[test]
    fn traffic_is_proportional_to_q_over_u() {
        let mut policy = WeightedRoundRobin::new(vec![0.0; 3], 0.0);
        for (replica, cpu) in [(0, 0.5), (1, 0.5), (2, 1.0)] {
            policy.utilisation(replica, Micros(0), &Utilisation { qps: 100.0, eps: 50.0, cpu });
        }
        assert_eq!(shares(&mut policy, 3, 500), [200, 200, 100], "twice the CPU per query, half the traffic");
    }

    #[test]
    fn errors_count_only_with_a_penalty() {
        for (penalty, expected) in [(0.0, [150, 150]), (1.0, [200, 100])] {
            let mut policy = WeightedRoundRobin::new(vec![0.0; 2], penalty);
            for (replica, eps) in [(0, 0.0), (1, 50.0)] {
                policy.utilisation(replica, Micros(0), &Utilisation { qps: 100.0, eps, cpu: 0.5 });
            }
            assert_eq!(shares(&mut policy, 2, 300), expected, "penalty {penalty}");
        }
    }

    #[test]
    fn a_replica_without_a_valid_weight_gets_the_median() {
        let mut policy = WeightedRoundRobin::new(vec![0.0; 4], 1.0);
        for replica in 0..3 {
            policy.utilisation(replica, Micros(0), &Utilisation { qps: 100.0, eps: 0.0, cpu: 0.5 });
        }
        policy.utilisation(3, Micros(0), &Utilisation { qps: 0.0, eps: 0.0, cpu: 0.0 });
        assert_eq!(shares(&mut policy, 4, 400), [100; 4]);
    }
}
