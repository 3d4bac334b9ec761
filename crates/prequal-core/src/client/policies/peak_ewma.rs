//! Peak EWMA (Finagle): the moving average of a replica's round-trip time, multiplied by the requests in flight plus
//! one. The average jumps up to every peak and decays slowly.
//!
//! On a sample r after a gap t: w = e^(−t/τ); cost = r if r > cost, else cost·w + r·(1−w). Each read of the cost first
//! takes a sample r = 0. A replica with requests in flight and no sample costs [`PENALTY_NS`] plus their number.

use rand::RngCore;

use super::local_rif::LocalRif;
use super::{Done, Elastic, Policy, two_distinct};
use crate::shared::time::Micros;

/// Decay constant τ, seconds: Finagle's usual setting.
pub const TAU_S: f64 = 10.0;
/// Cost of an untried replica with requests in flight, nanoseconds: (2^63 − 1) >> 16.
pub const PENALTY_NS: f64 = ((i64::MAX as u64) >> 16) as f64;

/// Replicas that are compared.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scan {
    /// Two random replicas (Finagle).
    TwoChoices,
    /// All replicas.
    Full,
}

/// Peak EWMA over one client's requests.
#[derive(Clone, Debug)]
pub struct PeakEwma {
    scan: Scan,
    costs: Vec<Cost>,
    in_flight: LocalRif,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    ns: f64,
    at: Micros,
}

impl Cost {
    fn observe(&mut self, now: Micros, ns: f64) {
        let gap = now.saturating_since(self.at) as f64 / 1e6;
        self.at = now;
        let w = (-gap / TAU_S).exp();
        self.ns = if ns > self.ns { ns } else { self.ns * w + ns * (1.0 - w) };
    }
}

impl PeakEwma {
    /// Creates the policy over `replicas` replicas, at least one.
    pub fn new(replicas: usize, scan: Scan) -> Self {
        Self { scan, costs: vec![Cost::default(); replicas.max(1)], in_flight: LocalRif::new(replicas) }
    }

    /// Creates the policy without replicas; call [`Elastic::join`] before the first pick.
    pub fn empty(scan: Scan) -> Self {
        Self { scan, costs: Vec::new(), in_flight: LocalRif::empty() }
    }

    fn load(&mut self, replica: usize, now: Micros) -> f64 {
        let pending = f64::from(self.in_flight.of(replica));
        let Some(cost) = self.costs.get_mut(replica) else { return f64::INFINITY };
        cost.observe(now, 0.0);
        if cost.ns == 0.0 && pending > 0.0 { PENALTY_NS + pending } else { cost.ns * (pending + 1.0) }
    }
}

impl Policy for PeakEwma {
    fn pick(&mut self, now: Micros, rng: &mut dyn RngCore) -> usize {
        let n = self.costs.len();
        let chosen = match self.scan {
            Scan::TwoChoices => {
                let (first, second) = two_distinct(n, rng);
                if self.load(second, now) < self.load(first, now) { second } else { first }
            }
            Scan::Full => {
                let loads: Vec<f64> = (0..n).map(|replica| self.load(replica, now)).collect();
                let least = loads.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1));
                least.map_or(0, |(replica, _)| replica)
            }
        };
        self.in_flight.start(chosen);
        chosen
    }

    fn done(&mut self, replica: usize, now: Micros, done: &Done) {
        self.in_flight.end(replica);
        if let Some(cost) = self.costs.get_mut(replica) {
            cost.observe(now, done.latency_us as f64 * 1e3);
        }
    }
}

impl Elastic for PeakEwma {
    fn join(&mut self) {
        self.costs.push(Cost::default());
        self.in_flight.join();
    }

    fn leave(&mut self, replica: usize) {
        if replica < self.costs.len() {
            self.costs.swap_remove(replica);
        }
        self.in_flight.leave(replica);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{answered, shares};
    use super::*;

    #[test]
    fn a_peak_counts_at_once_and_decays_with_tau() {
        let mut policy = PeakEwma::new(2, Scan::Full);
        policy.done(0, Micros::from_millis(0), &answered(100));
        policy.done(0, Micros::from_millis(1), &answered(2000));
        assert_eq!(policy.load(0, Micros::from_millis(1)), 2e9);
        let later = policy.load(0, Micros::from_millis(10_001));
        assert!((later - 2e9 / std::f64::consts::E).abs() < 1e3, "{later}");
    }

    #[test]
    fn an_untried_busy_replica_costs_the_penalty() {
        let mut policy = PeakEwma::new(2, Scan::Full);
        policy.done(1, Micros(0), &answered(500));
        assert_eq!(shares(&mut policy, 2, 10), [1, 9]);
        assert_eq!(PENALTY_NS, 140_737_488_355_327.0);
    }
}
