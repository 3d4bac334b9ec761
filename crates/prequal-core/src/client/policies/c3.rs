//! C3's scoring function (NSDI '15) on Prequal's pool, as the paper compares it (§5.2): q̂ = 1 + os·n + q̄ and
//! Ψ = (R̄ − 1/µ̄) + q̂³/µ̄, lowest first. C3's rate control is left out, as in the paper. Here os is the number of
//! outstanding requests and n the number of clients; q̄, R̄ and 1/µ̄ are the averages of RIF, client-side and
//! server-side response time.

use std::collections::HashMap;

use super::linear::ALPHA_US;
use crate::client::pool::Candidate;
use crate::shared::endpoint::Endpoint;

/// Weight of a new sample in every moving average (the public forks of Cassandra-C3).
pub const SAMPLE_WEIGHT: f64 = 0.9;

/// Default number of clients that share the replicas.
pub const DEFAULT_CLIENTS: u32 = 1;

/// Statistics that one client keeps of every replica.
#[derive(Clone, Debug, Default)]
pub struct C3 {
    /// Number of clients that share the replicas, n.
    clients: f64,
    replicas: HashMap<Endpoint, ReplicaStats>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ReplicaStats {
    outstanding: u32,
    /// Client-side response time, microseconds.
    response: Option<f64>,
    /// Server-side response time, microseconds.
    service: Option<f64>,
    /// Server-side RIF.
    queue: Option<f64>,
}

fn blend(average: &mut Option<f64>, sample: f64) {
    *average = Some(average.map_or(sample, |old| old + (sample - old) * SAMPLE_WEIGHT));
}

impl C3 {
    /// Creates the state of one of `clients` clients.
    pub fn new(clients: usize) -> Self {
        Self { clients: clients as f64, replicas: HashMap::new() }
    }

    /// Counts a request that is sent to the replica.
    pub fn sent(&mut self, replica: Endpoint) {
        self.replicas.entry(replica).or_default().outstanding += 1;
    }

    /// Records that a request has ended; `latency_us` is its latency if it was answered.
    pub fn done(&mut self, replica: Endpoint, latency_us: Option<u64>) {
        let state = self.replicas.entry(replica).or_default();
        state.outstanding = state.outstanding.saturating_sub(1);
        if let Some(latency) = latency_us {
            blend(&mut state.response, latency as f64);
        }
    }

    /// Records a replica's report.
    pub fn reported(&mut self, replica: Endpoint, rif: u32, latency_us: Option<u32>) {
        let state = self.replicas.entry(replica).or_default();
        blend(&mut state.queue, f64::from(rif));
        if let Some(latency) = latency_us {
            blend(&mut state.service, f64::from(latency));
        }
    }

    /// Forgets replicas for which `is_member` is false.
    pub fn retain(&mut self, is_member: impl Fn(Endpoint) -> bool) {
        self.replicas.retain(|replica, _| is_member(*replica));
    }

    /// Returns Ψ of a pool entry, microseconds.
    pub fn score(&self, candidate: &Candidate) -> f64 {
        let state = self.replicas.get(&candidate.endpoint).copied().unwrap_or_default();
        let service = state.service.unwrap_or(ALPHA_US);
        let response = state.response.unwrap_or(service);
        let queue = state.queue.unwrap_or(f64::from(candidate.rif));
        let q = 1.0 + f64::from(state.outstanding) * self.clients + queue;
        (response - service) + q * q * q * service
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_score_is_cubic_in_the_queue_and_counts_own_requests_for_all_clients() {
        let endpoint: Endpoint = "10.0.0.1:80".parse().unwrap();
        let candidate = Candidate { endpoint, rif: 2, latency_us: Some(1000), age_ms: 0 };
        let mut c3 = C3::new(10);
        c3.reported(endpoint, 2, Some(1000));
        assert_eq!(c3.score(&candidate), 27_000.0);
        c3.sent(endpoint);
        assert_eq!(c3.score(&candidate), 13f64.powi(3) * 1000.0);
        c3.done(endpoint, Some(1500));
        assert_eq!(c3.score(&candidate), 27_500.0);
        c3.reported(endpoint, 12, Some(1000));
        assert!(
            (c3.score(&candidate) - (500.0 + 12f64.powi(3) * 1000.0)).abs() < 1e-6,
            "0.9 of the new sample"
        );
    }
}
