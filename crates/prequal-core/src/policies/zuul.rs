//! Netflix Zuul's choice of two ("Rethinking Netflix's Edge Load Balancing"): client health, server utilisation and
//! client utilisation, on statistics that decay linearly to zero over 30 s.
//!
//! The post names the factors and not their weights. Here each is a share from 0 to 1 and they are added: error
//! rate, reported RIF over the replica's maximum, local RIF over the same maximum. The thresholds of the filter are
//! unpublished too: 50 % errors, 90 % utilisation, 5 attempts.

use rand::{Rng, RngCore};

use super::least_loaded::InFlight;
use super::{Done, Policy};
use crate::time::Micros;
use crate::tracker::Outcome;

/// Statistics decay linearly to zero over this time, microseconds.
pub const DECAY_US: u64 = 30_000_000;
const MAX_ERRORS: f64 = 0.5;
const MAX_UTILISATION: f64 = 0.9;
const ATTEMPTS: usize = 5;
/// Weight of a new outcome in the rolling error rate.
const ERROR_WEIGHT: f64 = 0.1;

/// Choice of two by three factors.
#[derive(Clone, Debug)]
pub struct Zuul {
    /// Requests in flight at which a replica counts as fully used.
    max_in_flight: f64,
    stats: Vec<Stats>,
    in_flight: InFlight,
}

#[derive(Clone, Copy, Debug, Default)]
struct Stats {
    errors: f64,
    errors_at: Micros,
    utilisation: f64,
    utilisation_at: Micros,
    answered: bool,
}

fn decayed(value: f64, at: Micros, now: Micros) -> f64 {
    value * (1.0 - now.saturating_since(at) as f64 / DECAY_US as f64).max(0.0)
}

impl Zuul {
    /// Over `replicas` replicas, at least one, each configured for `max_in_flight` requests, at least one.
    pub fn new(replicas: usize, max_in_flight: u32) -> Self {
        Self {
            max_in_flight: f64::from(max_in_flight.max(1)),
            stats: vec![Stats::default(); replicas.max(1)],
            in_flight: InFlight::new(replicas),
        }
    }

    fn factors(&self, replica: usize, now: Micros) -> (f64, f64, f64) {
        let stats = self.stats.get(replica).copied().unwrap_or_default();
        let local = f64::from(self.in_flight.of(replica)) / self.max_in_flight;
        (
            decayed(stats.errors, stats.errors_at, now),
            decayed(stats.utilisation, stats.utilisation_at, now),
            local,
        )
    }

    fn score(&self, replica: usize, now: Micros) -> f64 {
        let (errors, utilisation, local) = self.factors(replica, now);
        errors + utilisation + local
    }

    fn viable(&self, replica: usize, now: Micros) -> bool {
        let (errors, utilisation, _) = self.factors(replica, now);
        // Probation: one request in flight until the first answer.
        let probation = self.stats.get(replica).is_none_or(|stats| !stats.answered);
        errors <= MAX_ERRORS
            && utilisation <= MAX_UTILISATION
            && !(probation && self.in_flight.of(replica) > 0)
    }

    /// A random replica that passes the filter, or after [`ATTEMPTS`] any.
    fn draw(&self, now: Micros, other_than: Option<usize>, rng: &mut dyn RngCore) -> usize {
        let mut drawn = 0;
        for _ in 0..ATTEMPTS {
            drawn = rng.random_range(0..self.stats.len());
            if Some(drawn) != other_than && self.viable(drawn, now) {
                break;
            }
        }
        drawn
    }
}

impl Policy for Zuul {
    fn pick(&mut self, now: Micros, rng: &mut dyn RngCore) -> usize {
        let first = self.draw(now, None, rng);
        let second = self.draw(now, Some(first), rng);
        let chosen = if self.score(second, now) < self.score(first, now) { second } else { first };
        self.in_flight.start(chosen);
        chosen
    }

    fn done(&mut self, replica: usize, now: Micros, done: &Done) {
        self.in_flight.end(replica);
        let Some(stats) = self.stats.get_mut(replica) else { return };
        let failed = f64::from(u8::from(done.outcome == Outcome::Failure));
        let before = decayed(stats.errors, stats.errors_at, now);
        stats.errors = before + (failed - before) * ERROR_WEIGHT;
        stats.errors_at = now;
        stats.answered |= failed == 0.0;
        if let Some(rif) = done.rif {
            stats.utilisation = f64::from(rif) / self.max_in_flight;
            stats.utilisation_at = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::shares;
    use super::*;

    fn answer(policy: &mut Zuul, replica: usize, rif: u32) {
        policy.done(replica, Micros(0), &Done { latency_us: 1, outcome: Outcome::Success, rif: Some(rif) });
    }

    #[test]
    fn the_less_utilised_replica_serves_until_the_statistics_have_decayed() {
        let mut policy = Zuul::new(2, 100);
        answer(&mut policy, 0, 80);
        answer(&mut policy, 1, 10);
        assert_eq!(shares(&mut policy, 2, 20), [0, 20]);
        assert!((policy.factors(0, Micros(DECAY_US / 2)).1 - 0.4).abs() < 1e-9, "80 % is 40 % after 15 s");
        assert_eq!(policy.factors(0, Micros(DECAY_US)).1, 0.0);
    }

    #[test]
    fn an_untried_replica_gets_one_request() {
        let mut policy = Zuul::new(10, 100);
        for replica in 0..9 {
            answer(&mut policy, replica, 10);
        }
        let untried = shares(&mut policy, 10, 1000)[9];
        assert!((1..=5).contains(&untried), "on probation, but for the best effort of the filter: {untried}");
    }
}
