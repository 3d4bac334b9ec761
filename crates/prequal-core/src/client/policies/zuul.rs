//! Netflix Zuul's choice of two ("Rethinking Netflix's Edge Load Balancing"): client health, server utilisation and
//! client utilisation, from statistics that decay linearly to zero over 30 s.
//!
//! The post names the factors but not their weights. Here each factor is a share from 0 to 1, and they are added: the
//! error rate, the reported utilisation (else the reported RIF divided by the replica's maximum), and the local RIF
//! divided by the same maximum. The limits beyond which Zuul avoids a replica are unpublished too; here they are 50 %
//! errors and 90 % utilisation. At most 5 attempts are made to draw a replica within them.
//!
//! Left out: the warm-up during the first 90 s of a server's life. A new replica is on probation only until a request
//! has ended without a failure.

use rand::{Rng, RngCore};

use super::local_rif::LocalRif;
use super::{Done, Elastic, Policy};
use crate::shared::outcome::Outcome;
use crate::shared::time::Micros;

/// Header in which responses carry a replica's own utilisation.
pub const HEADER_UTILISATION: &str = "x-netflix.server.utilization";

/// Time over which statistics decay linearly to zero, microseconds.
pub const DECAY_US: u64 = 30_000_000;
/// Default number of requests in flight at which a replica counts as fully used.
pub const DEFAULT_MAX_IN_FLIGHT: u32 = 100;
const MAX_ERRORS: f64 = 0.5;
const MAX_UTILISATION: f64 = 0.9;
const ATTEMPTS: usize = 5;
/// Weight of a new outcome in the rolling error rate.
const ERROR_WEIGHT: f64 = 0.1;

/// Choice of two by three factors.
#[derive(Clone, Debug)]
pub struct Zuul {
    /// Number of requests in flight at which a replica counts as fully used.
    max_in_flight: f64,
    stats: Vec<Stats>,
    in_flight: LocalRif,
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
    value * (1.0 - now.distance(at) as f64 / DECAY_US as f64).max(0.0)
}

impl Zuul {
    /// Creates the policy over `replicas` replicas, at least one, each configured for `max_in_flight` requests, at
    /// least one.
    pub fn new(replicas: usize, max_in_flight: u32) -> Self {
        Self {
            max_in_flight: f64::from(max_in_flight.max(1)),
            stats: vec![Stats::default(); replicas.max(1)],
            in_flight: LocalRif::new(replicas),
        }
    }

    /// Creates the policy without replicas; call [`Elastic::join`] before the first pick.
    pub fn empty(max_in_flight: u32) -> Self {
        Self {
            max_in_flight: f64::from(max_in_flight.max(1)),
            stats: Vec::new(),
            in_flight: LocalRif::empty(),
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
        // On probation, that is, until a request has ended without a failure, a replica gets one request at a time.
        let probation = self.stats.get(replica).is_none_or(|stats| !stats.answered);
        errors <= MAX_ERRORS
            && utilisation <= MAX_UTILISATION
            && !(probation && self.in_flight.of(replica) > 0)
    }

    /// Draws a random replica that passes the filter, or any replica after [`ATTEMPTS`] attempts.
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
        let by_rif = done.rif.map(|rif| f64::from(rif) / self.max_in_flight);
        if let Some(utilisation) = done.utilisation.or(by_rif) {
            stats.utilisation = utilisation;
            stats.utilisation_at = now;
        }
    }
}

impl Elastic for Zuul {
    fn join(&mut self) {
        self.stats.push(Stats::default());
        self.in_flight.join();
    }

    fn leave(&mut self, replica: usize) {
        if replica < self.stats.len() {
            self.stats.swap_remove(replica);
        }
        self.in_flight.leave(replica);
    }
}

/// Parses the value of [`HEADER_UTILISATION`], `<current>[, target=<target>]`: the current share of the replica's
/// capacity. A number above 1 or with a `%` is a percentage. Returns `None` for anything else, and for a share above
/// 10.
pub fn parse_utilisation(text: &str) -> Option<f64> {
    let current = text.split(',').next()?.trim();
    let (number, per_cent) = match current.strip_suffix('%') {
        Some(number) => (number.trim_end(), true),
        None => (current, false),
    };
    let plain = !number.is_empty() && number.len() <= 16;
    let value: f64 = if plain && number.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        number.parse().ok()?
    } else {
        return None;
    };
    let share = if per_cent || value > 1.0 { value / 100.0 } else { value };
    (share <= 10.0).then_some(share)
}

#[cfg(test)]
mod tests {
    use super::super::tests::shares;
    use super::*;

    fn answer(policy: &mut Zuul, replica: usize, rif: u32) {
        policy.done(
            replica,
            Micros(0),
            &Done { latency_us: 1, outcome: Outcome::Success, rif: Some(rif), utilisation: None },
        );
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
    fn after_a_clock_step_the_statistics_still_decay() {
        let mut policy = Zuul::new(1, 100);
        let stepped = Micros(3600 * 1_000_000);
        for utilisation in [None, Some(0.8)] {
            let done = Done { latency_us: 1, outcome: Outcome::Failure, rif: None, utilisation };
            policy.done(0, stepped, &done);
        }
        let (errors, utilisation, _) = policy.factors(0, stepped);
        assert!(errors > 0.1 && utilisation == 0.8, "{errors}, {utilisation}");
        // Steps back by an hour, and by exactly the decay time.
        for now in [Micros(0), Micros(stepped.0 - DECAY_US)] {
            assert_eq!(policy.factors(0, now), (0.0, 0.0, 0.0), "at {now:?}");
        }
        assert!(policy.factors(0, Micros(stepped.0 - DECAY_US / 2)).0 < errors * 0.6);
    }

    #[test]
    fn a_reported_utilisation_outweighs_the_rif() {
        let mut policy = Zuul::new(2, 100);
        let done = Done { latency_us: 1, outcome: Outcome::Success, rif: Some(1), utilisation: Some(0.7) };
        policy.done(0, Micros(0), &done);
        assert_eq!(policy.factors(0, Micros(0)).1, 0.7);
    }

    #[test]
    fn utilisation_is_read_as_share_or_per_cent() {
        for (text, share) in [
            ("0.25", Some(0.25)),
            ("25%", Some(0.25)),
            ("25, target=80", Some(0.25)),
            (" 0.5 , target=0.9", Some(0.5)),
            ("0", Some(0.0)),
            ("1", Some(1.0)),
            ("150", Some(1.5)),
            ("1001", None),
            ("-1", None),
            ("NaN", None),
            ("inf", None),
            ("1e3", None),
            ("", None),
            ("%", None),
            (".", None),
        ] {
            assert_eq!(parse_utilisation(text), share, "{text}");
        }
    }

    #[test]
    fn an_untried_replica_gets_one_request() {
        let mut policy = Zuul::new(10, 100);
        for replica in 0..9 {
            answer(&mut policy, replica, 10);
        }
        let untried = shares(&mut policy, 10, 1000)[9];
        assert!((1..=5).contains(&untried), "one on probation, more only if no draw is viable: {untried}");
    }
}
