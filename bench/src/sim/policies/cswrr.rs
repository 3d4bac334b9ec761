//! Envoy 1.40's `client_side_weighted_round_robin`, which weights replicas by the reports on their responses: the
//! weights, their validity, and the schedule derived from them.
//!
//! - A report sets the replica's weight to
//!   `rps_fractional / (application_utilization + penalty · eps / rps_fractional)`, truncated to a whole number. A
//!   report without requests or utilisation changes nothing.
//! - Weights take effect every `weight_update_period`. A weight is invalid until reports have arrived for
//!   `blackout_period`, and after `weight_expiration_period` without one. Without a valid weight, a replica gets the
//!   median of the others.
//! - With equal weights, replicas are picked in rotation. Otherwise the replica with the earliest deadline is next, and
//!   its deadline then moves by 1 / weight. When a weight changes, a new schedule begins, in the state that it would
//!   have after a fixed number of picks. This number is drawn once per client.
//!
//! Left out: workers that share their weights (a client here is an Envoy with one worker), slow start, out-of-band
//! reports, and `metric_names_for_computing_utilization`, which the agent does not need.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use prequal_core::client::policies::Policy;
use prequal_core::shared::time::Micros;
use rand::rngs::SmallRng;
use rand::{Rng, RngCore};

use super::{SimPolicy, Utilisation};

/// The policy's settings under their names in Envoy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) blackout_ms: u64,
    pub(crate) expiration_ms: u64,
    pub(crate) update_ms: u64,
    pub(crate) error_penalty: f64,
}

impl Settings {
    /// Envoy's defaults. The penalty is 1, as in Envoy's documentation; Envoy's code uses 0 if none is set.
    pub(crate) const DEFAULT: Self =
        Self { blackout_ms: 10_000, expiration_ms: 180_000, update_ms: 1000, error_penalty: 1.0 };
    /// The shortest update period that Envoy accepts, almost no blackout, and weights that expire soon.
    pub(crate) const FAST: Self =
        Self { blackout_ms: 1000, expiration_ms: 10_000, update_ms: 100, ..Self::DEFAULT };
}

/// The weight that one replica has reported, and the one in effect.
#[derive(Clone, Copy, Debug)]
struct Host {
    reported: u32,
    /// Time at which the current series of reports began.
    since: Option<Micros>,
    last: Micros,
    weight: u32,
}

/// The policy for one client's requests.
pub(crate) struct Cswrr {
    settings: Settings,
    hosts: Vec<Host>,
    next_update: Micros,
    turn: usize,
    picks: u64,
    /// `None` while all weights are equal.
    schedule: Option<Schedule>,
}

impl Cswrr {
    /// A policy over `replicas` replicas (at least one). Clients start at random points of the schedule and the period.
    pub(crate) fn new(replicas: usize, settings: Settings, now: Micros, rng: &mut SmallRng) -> Self {
        let host = Host { reported: 1, since: None, last: now, weight: 1 };
        Self {
            settings,
            hosts: vec![host; replicas.max(1)],
            next_update: now.plus(rng.random_range(0..settings.update_ms * 1000)),
            turn: rng.random_range(0..replicas.max(1)),
            // Envoy has the same limit.
            picks: rng.random_range(0..u64::from(u32::MAX / 10)),
            schedule: None,
        }
    }

    /// Updates weights and schedule if the timer is due.
    fn catch_up(&mut self, now: Micros) {
        if now < self.next_update {
            return;
        }
        let period = self.settings.update_ms * 1000;
        let at = self.next_update.plus(now.saturating_since(self.next_update) / period * period);
        self.next_update = at.plus(period);
        if self.update(at) {
            let weights: Vec<u32> = self.hosts.iter().map(|host| host.weight).collect();
            let equal = weights.windows(2).all(|pair| pair[0] == pair[1]);
            self.schedule = (!equal).then(|| Schedule::after(&weights, self.picks));
        }
    }

    /// Applies the valid weights; returns whether any weight changed.
    fn update(&mut self, now: Micros) -> bool {
        let Settings { blackout_ms, expiration_ms, .. } = self.settings;
        let mut valid = Vec::with_capacity(self.hosts.len());
        for host in &mut self.hosts {
            let Some(since) = host.since else { continue };
            if now.saturating_since(since) < blackout_ms * 1000 {
                continue;
            }
            if now.saturating_since(host.last) > expiration_ms * 1000 {
                host.since = None;
                continue;
            }
            valid.push(host.reported);
        }
        let median = median(&mut valid);
        let mut changed = false;
        for host in &mut self.hosts {
            let holds = host.since.is_some_and(|since| now.saturating_since(since) >= blackout_ms * 1000);
            let weight = if holds { host.reported } else { median }.max(1);
            changed |= weight != host.weight;
            host.weight = weight;
        }
        changed
    }
}

/// The median; for an even number of weights the mean of the middle two, and 1 if there are none.
fn median(weights: &mut [u32]) -> u32 {
    weights.sort_unstable();
    let middle = weights.len() / 2;
    match (weights.len() % 2, weights.get(middle)) {
        (_, None) => 1,
        (1, Some(weight)) => *weight,
        (_, Some(upper)) => ((u64::from(weights[middle - 1]) + u64::from(*upper)) / 2) as u32,
    }
}

/// The weight that a report gives.
fn weight(report: &Utilisation, error_penalty: f64) -> Option<u32> {
    let used = report.cpu + error_penalty * report.eps / report.qps;
    // `as` saturates.
    (report.qps > 0.0 && used > 0.0).then(|| (report.qps / used) as u32)
}

impl Policy for Cswrr {
    fn pick(&mut self, now: Micros, _rng: &mut dyn RngCore) -> usize {
        self.catch_up(now);
        match &mut self.schedule {
            Some(schedule) => schedule.next(),
            None => {
                self.turn = (self.turn + 1) % self.hosts.len();
                self.turn
            }
        }
    }
}

impl SimPolicy for Cswrr {
    fn utilisation(&mut self, replica: usize, now: Micros, report: &Utilisation) {
        self.catch_up(now);
        let Some((host, weight)) =
            self.hosts.get_mut(replica).zip(weight(report, self.settings.error_penalty))
        else {
            return;
        };
        (host.reported, host.last) = (weight, now);
        host.since = host.since.or(Some(now));
    }
}

/// The schedule: earliest deadline first.
struct Schedule {
    /// Deadline, order among equal deadlines, replica. For positive numbers the bits sort like the values.
    queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
    order: u64,
    weights: Vec<f64>,
}

impl Schedule {
    /// The schedule after `picks` picks. The picks that each replica has certainly got are computed at once, the rest
    /// are made one by one.
    fn after(weights: &[u32], picks: u64) -> Self {
        let weights: Vec<f64> = weights.iter().map(|weight| f64::from(*weight)).collect();
        let sum: f64 = weights.iter().sum();
        let mut made = 0;
        let queue = weights.iter().enumerate().map(|(replica, weight)| {
            let certain = (weight * picks as f64 / sum).floor();
            // Rounding may have included a pick that is not due yet.
            let certain =
                if certain > 0.0 && certain / weight >= picks as f64 / sum { certain - 1.0 } else { certain };
            made += certain as u64;
            Reverse((((certain + 1.0) / weight).to_bits(), replica as u64, replica))
        });
        let queue = queue.collect();
        let mut schedule = Self { queue, order: weights.len() as u64, weights };
        for _ in made..picks {
            schedule.next();
        }
        schedule
    }

    fn next(&mut self) -> usize {
        let Some(Reverse((deadline, _, replica))) = self.queue.pop() else { return 0 };
        let next = f64::from_bits(deadline) + 1.0 / self.weights[replica];
        self.queue.push(Reverse((next.to_bits(), self.order, replica)));
        self.order += 1;
        replica
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    const AT_ONCE: Settings =
        Settings { blackout_ms: 0, expiration_ms: 180_000, update_ms: 100, error_penalty: 1.0 };

    fn ms(ms: u64) -> Micros {
        Micros::from_millis(ms)
    }

    fn report(qps: f64, eps: f64, utilisation: f64) -> Utilisation {
        Utilisation { qps, eps, cpu: utilisation }
    }

    fn policy(replicas: usize, settings: Settings) -> Cswrr {
        Cswrr::new(replicas, settings, ms(0), &mut SmallRng::seed_from_u64(3))
    }

    /// Counts how often each replica is chosen in `picks` picks at `now`.
    fn shares(policy: &mut Cswrr, now: Micros, picks: usize) -> Vec<usize> {
        let mut rng = SmallRng::seed_from_u64(5);
        let mut counts = vec![0; policy.hosts.len()];
        for _ in 0..picks {
            counts[policy.pick(now, &mut rng)] += 1;
        }
        counts
    }

    fn weights(policy: &mut Cswrr, now: Micros) -> Vec<u32> {
        policy.catch_up(now);
        policy.hosts.iter().map(|host| host.weight).collect()
    }

    #[test]
    fn a_weight_is_requests_over_utilisation_as_a_whole_number() {
        for (reported, penalty, expected) in [
            (report(100.0, 0.0, 0.5), 1.0, Some(200)),
            (report(100.0, 50.0, 0.5), 1.0, Some(100)),
            (report(100.0, 50.0, 0.5), 0.0, Some(200)),
            // Errors alone count as utilisation, and a weight may be truncated to zero.
            (report(100.0, 100.0, 0.0), 1.0, Some(100)),
            (report(0.4, 0.0, 0.5), 1.0, Some(0)),
            (report(1.0, 0.0, 0.3), 1.0, Some(3)),
            (report(100.0, 0.0, 0.0), 1.0, None),
            (report(0.0, 0.0, 0.5), 1.0, None),
            (report(0.0, 1.0, 0.5), 1.0, None),
            (report(1e12, 0.0, 1e-6), 1.0, Some(u32::MAX)),
        ] {
            assert_eq!(weight(&reported, penalty), expected, "{reported:?}, {penalty}");
        }
    }

    #[test]
    fn traffic_follows_the_weights_from_the_next_update_on() {
        let mut policy = policy(3, AT_ONCE);
        for (replica, utilisation) in [(0, 0.5), (1, 0.25), (2, 0.5)] {
            policy.utilisation(replica, ms(1), &report(100.0, 0.0, utilisation));
        }
        assert!(policy.schedule.is_none(), "equal weights are picked in rotation");
        assert_eq!(shares(&mut policy, ms(1), 300), [100; 3]);
        assert_eq!(shares(&mut policy, ms(101), 400), [100, 200, 100]);
        // A weight of less than 1 counts as 1.
        policy.utilisation(1, ms(102), &report(0.1, 0.0, 0.5));
        assert_eq!(shares(&mut policy, ms(301), 401), [200, 1, 200]);
    }

    #[test]
    fn a_weight_is_valid_from_blackout_to_expiry_and_then_the_blackout_starts_again() {
        let settings = Settings { blackout_ms: 1000, expiration_ms: 5000, ..AT_ONCE };
        let mut policy = policy(5, settings);
        let others = |policy: &mut Cswrr, at| {
            for (replica, qps) in [(0, 10.0), (1, 20.0), (2, 30.0), (3, 50.0)] {
                policy.utilisation(replica, at, &report(qps, 0.0, 1.0));
            }
        };
        others(&mut policy, ms(0));
        assert_eq!(weights(&mut policy, ms(900)), [1; 5]);
        // A replica without reports gets the median: for an even number, the mean of the middle two.
        assert_eq!(weights(&mut policy, ms(1200)), [10, 20, 30, 50, 25]);
        policy.utilisation(4, ms(1300), &report(90.0, 0.0, 1.0));
        assert_eq!(weights(&mut policy, ms(2200)), [10, 20, 30, 50, 25]);
        assert_eq!(weights(&mut policy, ms(2500)), [10, 20, 30, 50, 90]);
        others(&mut policy, ms(4000));
        others(&mut policy, ms(6000));
        assert_eq!(weights(&mut policy, ms(6600)), [10, 20, 30, 50, 25]);
        policy.utilisation(4, ms(6700), &report(90.0, 0.0, 1.0));
        assert_eq!(weights(&mut policy, ms(7600)), [10, 20, 30, 50, 25]);
        assert_eq!(weights(&mut policy, ms(7900)), [10, 20, 30, 50, 90]);
    }

    #[test]
    fn a_schedule_after_a_number_of_picks_equals_one_that_was_picked_from() {
        for weights in [&[1, 2, 3][..], &[25, 75], &[7, 7, 1, 1000], &[3], &[5, 11, 13, 17, 4_000_000]] {
            for picks in [0, 1, 5, 23, 1000, 4321] {
                let mut picked = Schedule::after(weights, 0);
                for _ in 0..picks {
                    picked.next();
                }
                let mut started = Schedule::after(weights, picks);
                let next = |schedule: &mut Schedule| {
                    let mut counts = vec![0; weights.len()];
                    (0..200).for_each(|_| counts[schedule.next()] += 1);
                    counts
                };
                let (expected, got) = (next(&mut picked), next(&mut started));
                let near = expected.iter().zip(&got).all(|(a, b): (&i32, &i32)| a.abs_diff(*b) <= 1);
                assert!(near, "{weights:?} after {picks}: {got:?}, not {expected:?}");
            }
        }
    }
}
