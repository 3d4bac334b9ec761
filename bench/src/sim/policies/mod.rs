//! Policies for comparison only, each with its source and constants. `prequal_core::client::policies` has those that
//! the filter offers too.
//!
//! | module | policy | source |
//! |---|---|---|
//! | [`uniform`] | Random, Round Robin | paper §5.2 |
//! | [`weighted`] | Weighted Round Robin, q/u | paper §2; gRPC A58 for the error penalty |
//! | [`cswrr`] | Envoy's `client_side_weighted_round_robin` | Envoy 1.40 |
//! | [`edf`] | Envoy's `round_robin` and `least_request` with weights | Envoy 1.40 |
//! | [`least_loaded`] | Least Loaded, LL-Po2C | paper §5.2 (NGINX, Envoy) |
//! | [`yarp`] | YARP-Po2C | paper §5.2; Microsoft YARP |

use prequal_core::client::policies::Policy;
use prequal_core::client::policies::peak_ewma::PeakEwma;
use prequal_core::client::policies::zuul::Zuul;
use prequal_core::shared::time::Micros;

pub(crate) mod cswrr;
pub(crate) mod edf;
pub(crate) mod least_loaded;
pub(crate) mod uniform;
pub(crate) mod weighted;
pub(crate) mod yarp;

/// A policy of one simulated client, which may also learn from polls and reports.
pub(crate) trait SimPolicy: Policy {
    /// Records a replica's own load, as polled.
    fn polled(&mut self, _replica: usize, _now: Micros, _rif: u32) {}

    /// Records a replica's own throughput and CPU use, which the replica has smoothed.
    fn utilisation(&mut self, _replica: usize, _now: Micros, _report: &Utilisation) {}
}

impl SimPolicy for PeakEwma {}

impl SimPolicy for Zuul {}

/// Report of a replica to weighted round robin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Utilisation {
    /// Responses per second, errors included.
    pub(crate) qps: f64,
    /// Errors per second.
    pub(crate) eps: f64,
    /// CPU use divided by allocation; above 1 when the replica bursts.
    pub(crate) cpu: f64,
}

/// The replica whose deadline is earliest.
fn earliest(deadlines: &[f64]) -> usize {
    let first = deadlines.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1));
    first.map_or(0, |(replica, _)| replica)
}

#[cfg(test)]
mod tests {
    use super::*;
    use prequal_core::client::policies::Done;
    use prequal_core::shared::outcome::Outcome;
    use rand::{SeedableRng, rngs::SmallRng};

    /// Counts how often each of `n` replicas is chosen in `picks` requests that never end.
    pub(super) fn shares(policy: &mut impl Policy, n: usize, picks: usize) -> Vec<usize> {
        let mut rng = SmallRng::seed_from_u64(5);
        let mut counts = vec![0; n];
        for _ in 0..picks {
            counts[policy.pick(Micros(0), &mut rng)] += 1;
        }
        counts
    }

    pub(super) fn succeeded(latency_ms: u64) -> Done {
        Done { latency_us: latency_ms * 1000, outcome: Outcome::Success, rif: None, utilisation: None }
    }
}
