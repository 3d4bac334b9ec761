//! The hosts that Envoy would use now, and the share of the requests that each is meant to get.
//!
//! A built-in policy of Envoy first draws a priority, then a host by weight. Here the two steps become one: each host's weight
//! includes its priority's share of the requests, so that one pool serves all priorities in use.

use std::collections::HashMap;

use prequal_core::shared::endpoint::Endpoint;
use rand::Rng;

/// Envoy's overprovisioning factor, per cent: a priority with fewer healthy hosts than 100/1.4 % passes on some requests.
const OVERPROVISIONING: usize = 140;
/// Weight of an average host in the balancer's unit.
const UNIT: f64 = 16.0;

/// The hosts of one priority, as Envoy lists them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Level {
    /// Number of hosts, healthy or not.
    pub(crate) total: usize,
    /// The healthy hosts, in Envoy's order.
    pub(crate) healthy: Vec<Host>,
}

/// A healthy host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host {
    /// `None` for a host without an IP address, such as a Unix socket: it takes part only in fallback.
    pub(crate) endpoint: Option<Endpoint>,
    /// Weight in the configuration, at least 1.
    pub(crate) weight: u32,
    /// Index among all hosts of its priority; Envoy's statistics use it.
    pub(crate) index: usize,
}

/// A host as Envoy wants it named.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Place {
    pub(crate) priority: u32,
    /// Index among the healthy hosts of the priority.
    pub(crate) healthy: u32,
    /// Index among all hosts of the priority.
    pub(crate) index: usize,
}

/// The hosts in use, indexed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hosts {
    places: HashMap<Endpoint, Place>,
    all: Vec<(Place, Option<Endpoint>)>,
    /// Sums of the shares up to each host of `all`; the last one is the total.
    sums: Vec<f64>,
    weights: Vec<f64>,
}

impl Hosts {
    /// Indexes the hosts of all priorities.
    pub(crate) fn new(levels: &[Level]) -> Self {
        let mut hosts = Self::default();
        let mut sum = 0.0;
        for ((priority, level), load) in levels.iter().enumerate().zip(loads(levels)) {
            if load == 0 {
                continue;
            }
            let total: f64 = level.healthy.iter().map(|host| f64::from(host.weight)).sum();
            for (healthy, host) in level.healthy.iter().enumerate() {
                let place = Place { priority: priority as u32, healthy: healthy as u32, index: host.index };
                let share = load as f64 * f64::from(host.weight) / total;
                if let Some(endpoint) = host.endpoint {
                    hosts.places.insert(endpoint, place);
                }
                sum += share;
                hosts.all.push((place, host.endpoint));
                hosts.sums.push(sum);
                hosts.weights.push(share);
            }
        }
        hosts
    }

    /// Returns where the endpoint is; `None` if Envoy would not use it now.
    pub(crate) fn place(&self, endpoint: Endpoint) -> Option<Place> {
        self.places.get(&endpoint).copied()
    }

    /// Returns the endpoints in use, each with its weight in units of 1/16 of the mean.
    pub(crate) fn fleet(&self) -> Vec<(Endpoint, u16)> {
        let total = self.sums.last().copied().unwrap_or(0.0);
        let mean = total / self.all.len().max(1) as f64;
        let weight = |share: f64| (share / mean * UNIT).round().clamp(1.0, 4096.0) as u16;
        let hosts = self.all.iter().zip(&self.weights);
        hosts.filter_map(|((_, endpoint), share)| Some(((*endpoint)?, weight(*share)))).collect()
    }

    /// Chooses a host without knowing its load: of two drawn by weight, the one with fewer requests in flight, according to
    /// `in_flight`.
    pub(crate) fn fall_back(
        &self,
        rng: &mut impl Rng,
        in_flight: impl Fn(Place) -> u64,
    ) -> Option<(Place, Option<Endpoint>)> {
        let total = *self.sums.last()?;
        let draw = |rng: &mut _| {
            let point = Rng::random_range(rng, 0.0..total);
            let index = self.sums.partition_point(|sum| *sum <= point).min(self.all.len() - 1);
            self.all.get(index).copied()
        };
        let (one, other) = (draw(rng)?, draw(rng)?);
        let fewer = one.0 == other.0 || in_flight(one.0) <= in_flight(other.0);
        Some(if fewer { one } else { other })
    }
}

/// Returns each priority's share of the requests, per cent, as Envoy computes it: by the share of healthy hosts times the
/// overprovisioning factor, the lowest priority number first.
fn loads(levels: &[Level]) -> Vec<usize> {
    let available: Vec<usize> = levels
        .iter()
        .map(|level| {
            let healthy = level.healthy.len();
            let available = (OVERPROVISIONING * healthy).checked_div(level.total).unwrap_or(0);
            // Rounding must not make a healthy host unavailable.
            available.min(100).max(healthy.min(1))
        })
        .collect();
    let total = available.iter().sum::<usize>().min(100);
    let mut left = 100;
    let mut loads: Vec<usize> = available
        .iter()
        .map(|available| {
            let load = (available * 100).checked_div(total).unwrap_or(0).min(left);
            left -= load;
            load
        })
        .collect();
    // What rounding left over goes to the first priority in use.
    if let Some(first) = loads.iter_mut().find(|load| **load > 0) {
        *first += left;
    }
    loads
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    fn endpoint(n: u16) -> Endpoint {
        std::net::SocketAddr::from(([10, 0, 0, 1], n)).into()
    }

    /// Hosts at ports from `first`, of which the first `healthy` are healthy, with these weights in turn.
    fn level(first: u16, total: usize, healthy: usize, weights: &[u32]) -> Level {
        let weights = weights.iter().cycle();
        let healthy = (0..healthy).zip(weights).map(|(index, weight)| Host {
            endpoint: Some(endpoint(first + index as u16)),
            weight: *weight,
            index,
        });
        Level { total, healthy: healthy.collect() }
    }

    #[test]
    fn priorities_share_as_in_envoys_documentation() {
        // Healthy hosts of two priorities, per cent, and the shares of the requests: the table in Envoy's documentation.
        for (one, other, shares) in [
            (100, 100, [100, 0]),
            (72, 72, [100, 0]),
            (71, 71, [99, 1]),
            (50, 50, [70, 30]),
            (25, 100, [35, 65]),
            (25, 25, [50, 50]),
            (0, 100, [0, 100]),
        ] {
            let levels = [level(1, 100, one, &[1]), level(1001, 100, other, &[1])];
            assert_eq!(loads(&levels), shares, "{one} and {other} % healthy");
        }
        assert_eq!(loads(&[level(1, 4, 0, &[1])]), [0]);
        assert_eq!(loads(&[level(1, 1000, 1, &[1])]), [100], "the only healthy host of many");
        assert_eq!(loads(&[]), [0; 0]);
    }

    #[test]
    fn a_hosts_weight_includes_its_prioritys_share() {
        let hosts = Hosts::new(&[level(1, 4, 2, &[1, 3]), level(11, 1, 1, &[1])]);
        // 70 % go to the first priority: a quarter and three quarters of that. The mean is a third.
        let weights: Vec<u16> = hosts.fleet().into_iter().map(|(_, weight)| weight).collect();
        assert_eq!(weights, [8, 25, 14]);
        let equal = Hosts::new(&[level(1, 5, 5, &[7])]);
        assert!(equal.fleet().iter().all(|(_, weight)| *weight == 16));
    }

    #[test]
    fn only_healthy_hosts_of_priorities_in_use_have_a_place() {
        let hosts = Hosts::new(&[level(1, 3, 3, &[1]), level(11, 3, 3, &[1])]);
        assert_eq!(hosts.place(endpoint(2)), Some(Place { priority: 0, healthy: 1, index: 1 }));
        assert_eq!(hosts.place(endpoint(12)), None);
        let moved = Hosts::new(&[level(1, 3, 0, &[1]), level(11, 3, 3, &[1])]);
        assert_eq!(moved.place(endpoint(2)), None);
        assert_eq!(moved.place(endpoint(12)), Some(Place { priority: 1, healthy: 1, index: 1 }));
    }

    #[test]
    fn fallback_draws_by_weight_and_avoids_the_busy() {
        let mut rng = SmallRng::seed_from_u64(1);
        let hosts = Hosts::new(&[level(1, 2, 2, &[1, 3])]);
        let mut counts = [0; 2];
        for _ in 0..8000 {
            counts[hosts.fall_back(&mut rng, |_| 0).unwrap().0.index] += 1;
        }
        assert!((1800..2200).contains(&counts[0]), "a quarter of 8000: {counts:?}");
        let busy = |place: Place| if place.index == 1 { 9 } else { 0 };
        let busy_picks = (0..1000).filter(|_| hosts.fall_back(&mut rng, busy).unwrap().0.index == 1).count();
        assert!((450..680).contains(&busy_picks), "only where it is drawn twice, 9/16: {busy_picks}");
        assert!(Hosts::default().fall_back(&mut rng, |_| 0).is_none());
    }
}
