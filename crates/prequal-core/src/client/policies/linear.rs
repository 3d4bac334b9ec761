//! Linear(λ) (paper, appendix A): score = (1−λ)·latency + λ·α·RIF on Prequal's pool, lowest first.

use crate::client::pool::Candidate;

/// α of the paper: the median latency of a replica with one request in flight, microseconds.
pub const ALPHA_US: f64 = 75_000.0;

/// A linear combination of latency and RIF.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Linear {
    /// λ, the weight of RIF, 0 (latency only) to 1 (RIF only). The paper's "Linear" rule is 0.5.
    pub lambda: f64,
    /// α, the latency equivalent of one request in flight, microseconds. The paper's is [`ALPHA_US`].
    pub alpha_us: f64,
}

impl Linear {
    /// Returns the score of a pool entry. An unknown latency counts as zero, so that the replica is tried.
    pub fn score(&self, candidate: &Candidate) -> f64 {
        let latency = f64::from(candidate.latency_us.unwrap_or(0));
        (1.0 - self.lambda) * latency + self.lambda * self.alpha_us * f64::from(candidate.rif)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_are_latency_only_and_rif_only() {
        let endpoint = "10.0.0.1:80".parse().unwrap();
        let candidate = Candidate { endpoint, rif: 3, latency_us: Some(80_000), age_ms: 0 };
        for (lambda, expected) in [(0.0, 80_000.0), (0.5, 152_500.0), (1.0, 225_000.0)] {
            assert_eq!(Linear { lambda, alpha_us: ALPHA_US }.score(&candidate), expected, "λ = {lambda}");
        }
    }
}
