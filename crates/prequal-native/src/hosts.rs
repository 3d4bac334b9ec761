//! The hosts that Envoy's built-in policies would use now, and the share of the requests that each is meant to get.
//!
//! A built-in policy draws in four steps: a priority, then healthy or degraded hosts, then a locality, then a host by
//! weight. Here these steps become one: a host's share is the product of the probabilities of all steps. One pool
//! therefore serves all priorities and localities in use. Envoy lets a module's policy name only healthy hosts. The
//! others are for [`crate::detour`].

use std::collections::HashMap;

use prequal_core::shared::endpoint::Endpoint;
use rand::Rng;

use crate::shares::{Counts, Load, loads, locality_weight};

/// Weight of an average host in the balancer's unit.
const UNIT: f64 = 16.0;

/// The hosts of one priority.
#[derive(Clone, Debug, Default)]
pub(crate) struct Level {
    /// All hosts, in Envoy's order.
    pub(crate) hosts: Vec<Host>,
    /// Weights of the localities, which [`Host::locality`] indexes; empty if localities do not count.
    pub(crate) localities: Vec<u32>,
}

/// A host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host {
    /// `None` for a host without an IP address, such as a Unix socket. Only the fallback uses such a host.
    pub(crate) endpoint: Option<Endpoint>,
    /// Weight in the configuration, at least 1.
    pub(crate) weight: u32,
    pub(crate) health: Health,
    /// Index of its locality.
    pub(crate) locality: usize,
}

/// Health of a host, as Envoy's policies see it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Health {
    Healthy,
    /// Usable, if healthy hosts do not suffice.
    Degraded,
    /// Not usable, except in panic.
    Unhealthy,
}

/// Position of a host, by which a policy names the host to Envoy.
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
    /// The healthy hosts.
    all: Vec<(Place, Option<Endpoint>)>,
    /// Sums of the shares up to each host of `all`; the last one is the total.
    sums: Vec<f64>,
    weights: Vec<f64>,
    /// The other hosts, with their shares.
    others: Vec<(Endpoint, f64)>,
}

impl Level {
    fn counts(&self) -> Counts {
        let of = |health| self.hosts.iter().filter(|host| host.health == health).count();
        Counts { total: self.hosts.len(), healthy: of(Health::Healthy), degraded: of(Health::Degraded) }
    }

    /// Shares out `load` among the hosts that are `usable`, by the weights of the localities and of the hosts. Returns
    /// the share of each host.
    fn share(&self, load: usize, localities: &[u32], usable: impl Fn(&Host) -> bool + Copy) -> Vec<f64> {
        if load == 0 {
            return vec![0.0; self.hosts.len()];
        }
        #[derive(Clone, Copy, Default)]
        struct Group {
            total: usize,
            usable: usize,
            weight: f64,
        }
        let mut groups = vec![Group::default(); localities.len().max(1)];
        // Without localities, all hosts are in one group.
        let index = |host: &Host| if localities.is_empty() { 0 } else { host.locality };
        for host in &self.hosts {
            if let Some(group) = groups.get_mut(index(host)) {
                group.total += 1;
                if usable(host) {
                    group.usable += 1;
                    group.weight += f64::from(host.weight);
                }
            }
        }
        let weights = localities.iter().copied().chain((localities.is_empty()).then_some(1));
        let weights = groups.iter().zip(weights);
        let weights: Vec<f64> =
            weights.map(|(group, weight)| locality_weight(weight, group.usable, group.total)).collect();
        let total: f64 = weights.iter().sum();
        if total == 0.0 && !localities.is_empty() {
            // No locality with a weight has a usable host, so localities do not count.
            return self.share(load, &[], usable);
        }
        let share = |host: &Host| {
            let (Some(group), Some(weight)) = (groups.get(index(host)), weights.get(index(host))) else {
                return 0.0;
            };
            match usable(host) {
                true => load as f64 * weight / total * f64::from(host.weight) / group.weight,
                false => 0.0,
            }
        };
        self.hosts.iter().map(share).collect()
    }

    /// Returns each host's share of all requests.
    fn shares(&self, load: Load) -> Vec<f64> {
        if load.panic {
            // Envoy then ignores localities as well.
            return self.share(load.healthy + load.degraded, &[], |_| true);
        }
        let healthy = self.share(load.healthy, &self.localities, |host| host.health == Health::Healthy);
        let degraded = self.share(load.degraded, &self.localities, |host| host.health == Health::Degraded);
        healthy.iter().zip(degraded).map(|(healthy, degraded)| healthy + degraded).collect()
    }
}

impl Hosts {
    /// Indexes the hosts of all priorities. `panic_threshold` is Envoy's `healthy_panic_threshold`, per cent.
    pub(crate) fn new(levels: &[Level], panic_threshold: u32) -> Self {
        let counts: Vec<Counts> = levels.iter().map(Level::counts).collect();
        let mut hosts = Self::default();
        for ((priority, level), load) in levels.iter().enumerate().zip(loads(&counts, panic_threshold)) {
            let mut healthy = 0;
            for ((index, host), share) in level.hosts.iter().enumerate().zip(level.shares(load)) {
                let place = Place { priority: priority as u32, healthy, index };
                healthy += u32::from(host.health == Health::Healthy);
                if share > 0.0 {
                    hosts.add(host, place, share);
                }
            }
        }
        hosts
    }

    fn add(&mut self, host: &Host, place: Place, share: f64) {
        if host.health == Health::Healthy {
            if let Some(endpoint) = host.endpoint {
                self.places.insert(endpoint, place);
            }
            self.all.push((place, host.endpoint));
            self.sums.push(self.total() + share);
            self.weights.push(share);
        } else if let Some(endpoint) = host.endpoint {
            self.others.push((endpoint, share));
        }
    }

    /// Returns the share of all requests that goes to the healthy hosts, per cent.
    pub(crate) fn total(&self) -> f64 {
        self.sums.last().copied().unwrap_or(0.0)
    }

    /// Takes the hosts in use that are not healthy, each with its share in the unit of [`Self::total`].
    pub(crate) fn take_others(&mut self) -> Vec<(Endpoint, f64)> {
        std::mem::take(&mut self.others)
    }

    /// Returns where the endpoint is; `None` if Envoy would not use it now.
    pub(crate) fn place(&self, endpoint: Endpoint) -> Option<Place> {
        self.places.get(&endpoint).copied()
    }

    /// Returns the endpoints in use, each with its weight in units of 1/16 of the mean.
    pub(crate) fn fleet(&self) -> Vec<(Endpoint, u16)> {
        let mean = self.total() / self.all.len().max(1) as f64;
        let weight = |share: f64| (share / mean * UNIT).round().clamp(1.0, 4096.0) as u16;
        let hosts = self.all.iter().zip(&self.weights);
        hosts.filter_map(|((_, endpoint), share)| Some(((*endpoint)?, weight(*share)))).collect()
    }

    /// Chooses a host without load reports: draws two hosts by weight, and takes the one with fewer requests in flight,
    /// according to `in_flight`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    fn endpoint(n: u16) -> Endpoint {
        std::net::SocketAddr::from(([10, 0, 0, 1], n)).into()
    }

    /// One host for each weight, at successive ports from `first`, all with this health and locality.
    fn hosts(first: u16, health: Health, locality: usize, weights: &[u32]) -> Vec<Host> {
        let host = |(offset, weight): (usize, &u32)| {
            let endpoint = Some(endpoint(first + offset as u16));
            Host { endpoint, weight: *weight, health, locality }
        };
        weights.iter().enumerate().map(host).collect()
    }

    /// A priority without localities: `healthy` hosts at ports from `first`, then `unhealthy` ones, all of weight 1.
    fn level(first: u16, healthy: usize, unhealthy: usize) -> Level {
        let mut all = hosts(first, Health::Healthy, 0, &vec![1; healthy]);
        all.extend(hosts(first + healthy as u16, Health::Unhealthy, 0, &vec![1; unhealthy]));
        Level { hosts: all, localities: Vec::new() }
    }

    /// The weights of the healthy hosts, and the others with their shares, both rounded.
    fn summary(levels: &[Level]) -> (Vec<f64>, Vec<(Endpoint, f64)>) {
        let round = |share: f64| (share * 10.0).round() / 10.0;
        let mut hosts = Hosts::new(levels, 50);
        let others = hosts.take_others().into_iter().map(|(endpoint, share)| (endpoint, round(share)));
        (hosts.weights.iter().copied().map(round).collect(), others.collect())
    }

    #[test]
    fn a_hosts_weight_includes_its_prioritys_share() {
        let mut first = level(1, 0, 2);
        first.hosts.extend(hosts(3, Health::Healthy, 0, &[1, 3]));
        let hosts = Hosts::new(&[first, level(11, 1, 0)], 50);
        // 70 % of the requests go to the first priority: a quarter of them to one healthy host, and three quarters to
        // the other. The mean of the three hosts' shares is a third, and a weight of 16 stands for the mean.
        let weights: Vec<u16> = hosts.fleet().into_iter().map(|(_, weight)| weight).collect();
        assert_eq!(weights, [8, 25, 14]);
        let equal = Hosts::new(&[level(1, 5, 0)], 50);
        assert!(equal.fleet().iter().all(|(_, weight)| *weight == 16));
    }

    #[test]
    fn only_healthy_hosts_of_priorities_in_use_have_a_place() {
        let hosts = Hosts::new(&[level(1, 3, 0), level(11, 3, 0)], 50);
        assert_eq!(hosts.place(endpoint(2)), Some(Place { priority: 0, healthy: 1, index: 1 }));
        assert_eq!(hosts.place(endpoint(12)), None);
        let mut second = level(10, 0, 1);
        second.hosts.extend(level(11, 3, 0).hosts);
        let moved = Hosts::new(&[level(1, 0, 3), second], 50);
        assert_eq!(moved.place(endpoint(2)), None);
        assert_eq!(moved.place(endpoint(12)), Some(Place { priority: 1, healthy: 1, index: 2 }));
    }

    #[test]
    fn degraded_hosts_are_the_others() {
        let mut level = level(1, 2, 0);
        level.hosts.extend(hosts(11, Health::Degraded, 0, &[1, 3]));
        assert_eq!(summary(&[level]), (vec![35.0, 35.0], vec![(endpoint(11), 7.5), (endpoint(12), 22.5)]));
    }

    #[test]
    fn in_panic_every_host_has_its_share() {
        let others = vec![(endpoint(2), 25.0), (endpoint(3), 25.0), (endpoint(4), 25.0)];
        assert_eq!(summary(&[level(1, 1, 3)]), (vec![25.0], others));
        assert_eq!(summary(&[level(1, 0, 1)]), (vec![], vec![(endpoint(1), 100.0)]));
        // With a threshold of 0 there is no panic.
        assert!(Hosts::new(&[level(1, 1, 3)], 0).take_others().is_empty());
    }

    #[test]
    fn localities_share_by_weight_and_availability() {
        let mut level = Level { hosts: hosts(1, Health::Healthy, 0, &[1, 1]), localities: vec![1, 2] };
        level.hosts.extend(hosts(11, Health::Healthy, 1, &[1, 3]));
        assert_eq!(summary(&[level.clone()]), (vec![16.7, 16.7, 16.7, 50.0], vec![]));
        // Half of the second locality is healthy, so its weight is 0.7 times 2.
        level.hosts.extend(hosts(21, Health::Unhealthy, 1, &[1, 1]));
        assert_eq!(summary(&[level.clone()]), (vec![20.8, 20.8, 14.6, 43.8], vec![]));
        // A weight of 0 means no requests, unless no other host is left.
        level.localities = vec![0, 2];
        assert_eq!(summary(&[level.clone()]), (vec![25.0, 75.0], vec![]));
        level.localities = vec![0, 0];
        assert_eq!(summary(&[level]), (vec![16.7, 16.7, 16.7, 50.0], vec![]));
    }

    #[test]
    fn in_panic_localities_do_not_count() {
        let mut level = Level { hosts: hosts(1, Health::Healthy, 0, &[1]), localities: vec![1, 9] };
        level.hosts.extend(hosts(2, Health::Unhealthy, 1, &[1, 2]));
        assert_eq!(summary(&[level]), (vec![25.0], vec![(endpoint(2), 25.0), (endpoint(3), 50.0)]));
    }

    #[test]
    fn fallback_draws_by_weight_and_avoids_the_busy() {
        let mut rng = SmallRng::seed_from_u64(1);
        let level = Level { hosts: hosts(1, Health::Healthy, 0, &[1, 3]), localities: Vec::new() };
        let hosts = Hosts::new(&[level], 50);
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
