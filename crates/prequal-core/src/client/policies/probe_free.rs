//! What rules without probes need besides a policy: a mapping from the cluster's replicas, which come and go, to the
//! policy's numbers, and a schedule for finding new replicas. The membership decides which replicas exist.

use std::collections::HashMap;

use rand::RngCore;

use super::peak_ewma::{PeakEwma, Scan};
use super::zuul::Zuul;
use super::{Done, Elastic};
use crate::shared::endpoint::Endpoint;
use crate::shared::time::Micros;

/// Time after a change of the membership during which new replicas are searched for more often, microseconds.
const GROWING_US: u64 = 2_000_000;
/// How many times more often they are searched for during that time.
const GROWING_FACTOR: u64 = 16;

/// Decides which requests are left to Envoy's own policy, to find new replicas.
#[derive(Clone, Copy, Debug, Default)]
pub struct Explorer {
    changed: Micros,
    sent: Micros,
}

impl Explorer {
    /// Records that the membership has changed.
    pub fn changed(&mut self, now: Micros) {
        self.changed = now;
    }

    /// Whether to leave this request to Envoy's own policy; one request is due every `every_us` microseconds.
    pub fn is_due(&mut self, now: Micros, every_us: u64) -> bool {
        let growing = now.distance(self.changed) < GROWING_US;
        let every_us = if growing { every_us / GROWING_FACTOR } else { every_us };
        let due = now.distance(self.sent) >= every_us;
        if due {
            self.sent = now;
        }
        due
    }
}

/// A policy without probes, over the replicas of one cluster.
pub struct ProbeFree {
    policy: Box<dyn Elastic + Send>,
    seats: Vec<Endpoint>,
    numbers: HashMap<Endpoint, usize>,
}

impl ProbeFree {
    /// Creates Peak EWMA with two choices, as in Finagle.
    pub fn peak_ewma() -> Self {
        Self::new(PeakEwma::empty(Scan::TwoChoices))
    }

    /// Creates Zuul's choice of two; see [`Zuul::new`].
    pub fn zuul(max_in_flight: u32) -> Self {
        Self::new(Zuul::empty(max_in_flight))
    }

    fn new(policy: impl Elastic + Send + 'static) -> Self {
        Self { policy: Box::new(policy), seats: Vec::new(), numbers: HashMap::new() }
    }

    /// Adopts the membership, and keeps what is known about replicas that stay. Returns whether anything changed.
    pub fn set_members(&mut self, members: impl Iterator<Item = Endpoint>) -> bool {
        let mut gone = self.numbers.clone();
        let mut changed = false;
        for member in members {
            if gone.remove(&member).is_none() && !self.numbers.contains_key(&member) {
                self.numbers.insert(member, self.seats.len());
                self.seats.push(member);
                self.policy.join();
                changed = true;
            }
        }
        // Replicas leave in the order of their numbers, so that the same events always result in the same numbers.
        let leaving: Vec<Endpoint> =
            self.seats.iter().filter(|seat| gone.contains_key(seat)).copied().collect();
        leaving.iter().for_each(|replica| self.leave(*replica));
        changed || !leaving.is_empty()
    }

    fn leave(&mut self, replica: Endpoint) {
        let Some(number) = self.numbers.remove(&replica) else { return };
        self.policy.leave(number);
        self.seats.swap_remove(number);
        if let Some(moved) = self.seats.get(number) {
            self.numbers.insert(*moved, number);
        }
    }

    /// Chooses a replica for a request that is sent at once; `None` with fewer than two members.
    pub fn pick(&mut self, now: Micros, rng: &mut dyn RngCore) -> Option<Endpoint> {
        if self.seats.len() < 2 {
            return None;
        }
        let number = self.policy.pick(now, rng);
        self.seats.get(number).copied()
    }

    /// Records that a request that [`Self::pick`] placed has ended. A request to a replica that has left is ignored.
    pub fn done(&mut self, replica: Endpoint, now: Micros, done: &Done) {
        if let Some(number) = self.numbers.get(&replica) {
            self.policy.done(*number, now, done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::outcome::Outcome;
    use rand::{SeedableRng, rngs::SmallRng};

    fn replica(n: u16) -> Endpoint {
        format!("10.0.0.1:{}", 1000 + n).parse().unwrap()
    }

    fn replicas(numbers: &[u16]) -> impl Iterator<Item = Endpoint> + '_ {
        numbers.iter().map(|n| replica(*n))
    }

    fn took(ms: u64) -> Done {
        Done { latency_us: ms * 1000, outcome: Outcome::Success, rif: Some(0), utilisation: None }
    }

    /// Counts how often each of five replicas is chosen when every request ends before the next. The first replica is
    /// slow.
    fn shares(policy: &mut ProbeFree, picks: u64) -> [u32; 5] {
        let mut rng = SmallRng::seed_from_u64(5);
        let mut counts = [0; 5];
        for pick in 0..picks {
            let now = Micros::from_millis(1000 + pick);
            let chosen = policy.pick(now, &mut rng).unwrap();
            let number = usize::from(chosen.port() - 1000);
            counts[number] += 1;
            policy.done(chosen, now, &took(if number == 0 { 500 } else { 5 }));
        }
        counts
    }

    #[test]
    fn exploration_is_frequent_after_a_change_and_survives_a_clock_step() {
        const SECOND: u64 = 1_000_000;
        let sent = |explorer: &mut Explorer, from_s: u64| -> usize {
            let times = (0..1000).map(|ms| Micros(from_s * SECOND + ms * 1000));
            times.filter(|now| explorer.is_due(*now, SECOND / 10)).count()
        };
        let mut explorer = Explorer::default();
        explorer.changed(Micros(7200 * SECOND));
        let growing = sent(&mut explorer, 7200);
        assert!((130..=160).contains(&growing), "{growing}");
        assert_eq!(sent(&mut explorer, 7202), 10);
        // The clock steps back an hour: the change counts as long past, not as still to come.
        assert_eq!(sent(&mut explorer, 3600), 10);
        assert_eq!(sent(&mut explorer, 7300), 10);
    }

    #[test]
    fn with_fewer_than_two_members_no_replica_is_chosen() {
        let mut rng = SmallRng::seed_from_u64(1);
        for mut policy in [ProbeFree::peak_ewma(), ProbeFree::zuul(10)] {
            assert_eq!(policy.pick(Micros(0), &mut rng), None);
            assert!(policy.set_members(replicas(&[1])));
            assert_eq!(policy.pick(Micros(0), &mut rng), None);
            assert!(policy.set_members(replicas(&[1, 2])) && !policy.set_members(replicas(&[2, 1])));
            assert!(policy.pick(Micros(0), &mut rng).is_some());
            policy.done(replica(9), Micros(0), &took(1));
        }
    }

    #[test]
    fn statistics_stay_with_their_replica_when_members_change() {
        let mut policy = ProbeFree::peak_ewma();
        policy.set_members(replicas(&[0, 1, 2, 3]));
        shares(&mut policy, 100);
        // Numbers change when replicas leave, and a newcomer is not mistaken for the slow replica.
        policy.set_members(replicas(&[3, 0, 4]));
        let counts = shares(&mut policy, 300);
        assert!(counts[0] <= 3 && counts[1] + counts[2] == 0 && counts[4] >= 50, "{counts:?}");
    }

    #[test]
    fn zuul_sees_what_replicas_report() {
        let mut policy = ProbeFree::zuul(10);
        policy.set_members(replicas(&[0, 1]));
        for (n, utilisation) in [(0, 0.8), (1, 0.1)] {
            policy.done(replica(n), Micros(0), &Done { utilisation: Some(utilisation), ..took(1) });
        }
        let mut rng = SmallRng::seed_from_u64(2);
        assert_eq!(policy.pick(Micros(1), &mut rng), Some(replica(1)));
    }
}
