//! Synchronous mode (paper §4): no pool. A request asks `d` replicas, waits for `d − 1` answers or the deadline, and
//! the rule of [`crate::pool`] chooses among those that came. θ comes from the RIFs of earlier answers.
//!
//! The adapter sends the probes, keeps the request waiting, and falls back to the asynchronous pool when
//! nobody answered in time.

use rand::Rng;

use crate::endpoint::Endpoint;
use crate::pool::{Branch, Candidate, PoolSettings, PoolState};
use crate::time::Micros;

/// Most replicas that one request asks.
pub const MAX_PROBES: usize = 16;

/// Settings of the synchronous mode.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SyncSettings {
    /// Probes per request, 2 to [`MAX_PROBES`]. Default 3 (the paper: 3 to 5).
    pub d: usize,
    /// A request waits no longer than this, milliseconds. Default 3.
    pub deadline_ms: u32,
}

impl Default for SyncSettings {
    fn default() -> Self {
        Self { d: 3, deadline_ms: 3 }
    }
}

/// One waiting request.
#[derive(Clone, Debug)]
pub struct Waiting {
    needed: usize,
    answers: Vec<Candidate>,
}

impl Waiting {
    /// A request that has asked `asked` replicas: decides on all but one of their answers, at least one.
    pub fn new(asked: usize) -> Self {
        Self { needed: asked.saturating_sub(1).max(1), answers: Vec::with_capacity(asked.min(MAX_PROBES)) }
    }

    /// Takes an answer in; true when enough have come and [`Self::decide`] is due.
    pub fn answer(&mut self, endpoint: Endpoint, rif: u32, latency_us: Option<u32>) -> bool {
        if self.answers.len() < MAX_PROBES {
            self.answers.push(Candidate { endpoint, rif, latency_us, age_ms: 0 });
        }
        self.answers.len() >= self.needed
    }

    /// Chooses among the answers so far: all are in, or the deadline has passed. `None` when nobody answered.
    pub fn decide(
        &self,
        pool: &mut PoolState,
        settings: &PoolSettings,
        now: Micros,
        rng: &mut impl Rng,
    ) -> Option<(Endpoint, Branch)> {
        pool.choose(settings, now, &self.answers, rng)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Profile;
    use rand::{SeedableRng, rngs::SmallRng};

    fn replica(n: u16) -> Endpoint {
        format!("10.0.0.1:{}", 1000 + n).parse().unwrap()
    }

    fn decide(waiting: &Waiting, q_rif: f64) -> Option<(Endpoint, Branch)> {
        let settings = PoolSettings { q_rif, ..Profile::Paper.pool_settings() };
        let mut pool = PoolState::new();
        pool.set_members(100, 0, Micros(0));
        waiting.decide(&mut pool, &settings, Micros::from_millis(5), &mut SmallRng::seed_from_u64(1))
    }

    #[test]
    fn all_but_one_answer_are_enough() {
        let mut waiting = Waiting::new(3);
        assert!(!waiting.answer(replica(1), 0, None));
        assert!(waiting.answer(replica(2), 0, None));
        assert!(Waiting::new(1).answer(replica(1), 0, None));
    }

    #[test]
    fn the_rule_is_that_of_the_pool() {
        let mut waiting = Waiting::new(4);
        waiting.answer(replica(1), 9, Some(5_000));
        waiting.answer(replica(2), 2, Some(40_000));
        waiting.answer(replica(3), 3, Some(30_000));
        assert_eq!(decide(&waiting, 0.9), Some((replica(3), Branch::Cold)), "the hot one is passed over");
        assert_eq!(decide(&waiting, 0.0), Some((replica(2), Branch::Hot)), "RIF only");
        assert_eq!(decide(&waiting, 1.0), Some((replica(1), Branch::Cold)), "latency only");
        assert_eq!(decide(&Waiting::new(3), 0.5), None);
    }
}
