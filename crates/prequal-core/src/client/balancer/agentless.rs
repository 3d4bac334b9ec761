//! The part of the requests that replicas without an agent get.
//!
//! While agents are rolled out or rolled back, some replicas report and others do not. Choosing only among those that
//! report would leave the others idle, and a few replicas would get the requests of the whole fleet. Therefore each agentless
//! replica gets its fair share, and among them the one with the fewest of this worker's requests in flight comes first, as
//! in Envoy's `least_request`. Where they are the majority, the proxy's own policy places all requests.

use rand::Rng;

use crate::client::members::{Members, Placement};
use crate::shared::endpoint::Endpoint;
use crate::shared::time::Micros;

/// Minimum time between two requests left to the proxy's own policy to find agentless replicas, microseconds.
const EXPLORE_US: u64 = 5_000_000;
/// Minimum number of other requests between them.
const EXPLORE_EVERY: u32 = 64;

/// Who chooses the replica of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Chooser {
    /// The pool, among the replicas that report.
    Pool,
    /// An agentless replica gets the request.
    Agentless(Endpoint),
    /// The proxy's own policy.
    Proxy,
}

/// One worker's knowledge of the agentless replicas.
#[derive(Debug, Default)]
pub(super) struct Agentless {
    /// This worker's requests in flight to each agentless replica that has any.
    in_flight: Vec<(Endpoint, u32)>,
    /// Whether a probe has ended without a report since the proxy's policy last placed a request.
    unanswered: bool,
    explored: Micros,
    /// Number of requests since then.
    requests: u32,
}

impl Agentless {
    /// Records that a probe ended without a report. Only the proxy's own policy can show whether a replica without an agent is
    /// the reason: the probe's reply does not always name the host.
    pub(super) fn probe_unanswered(&mut self) {
        self.unanswered = true;
    }

    /// Decides who chooses. `known_fleet` says whether the proxy provides the fleet; `usable` says whether an agentless replica
    /// may be chosen.
    pub(super) fn chooser(
        &mut self,
        members: &Members,
        known_fleet: bool,
        now: Micros,
        usable: impl Fn(Endpoint) -> bool,
        rng: &mut impl Rng,
    ) -> Chooser {
        self.requests = self.requests.saturating_add(1);
        let unexplained = self.unanswered || (known_fleet && members.have_unheard());
        if unexplained && self.requests > EXPLORE_EVERY && now.distance(self.explored) >= EXPLORE_US {
            (self.unanswered, self.explored, self.requests) = (false, now, 0);
            return Chooser::Proxy;
        }
        let count = members.agentless();
        if count == 0 {
            return Chooser::Pool;
        }
        if count > members.count() {
            return Chooser::Proxy;
        }
        let weight: u32 = members.without_agent().map(|(_, weight)| u32::from(weight)).sum();
        let all = weight + members.count() * u32::from(Placement::UNIT);
        if rng.random_range(0..all) >= weight {
            return Chooser::Pool;
        }
        let load = |(replica, weight): (Endpoint, u16)| {
            (self.in_flight_to(replica) + 1) * 4096 / u32::from(weight.max(1))
        };
        let usable = members.without_agent().filter(|(replica, _)| usable(*replica));
        let least = usable.map(|member| (load(member), rng.random::<u32>(), member.0)).min();
        least.map_or(Chooser::Pool, |(_, _, replica)| Chooser::Agentless(replica))
    }

    fn in_flight_to(&self, replica: Endpoint) -> u32 {
        self.in_flight.iter().find(|(known, _)| *known == replica).map_or(0, |(_, count)| *count)
    }

    /// Records that a request is sent to an agentless replica.
    pub(super) fn sent(&mut self, replica: Endpoint) {
        match self.in_flight.iter_mut().find(|(known, _)| *known == replica) {
            Some((_, count)) => *count = count.saturating_add(1).min(u16::MAX.into()),
            None => self.in_flight.push((replica, 1)),
        }
    }

    /// Records that such a request has ended.
    pub(super) fn ended(&mut self, replica: Endpoint) {
        if let Some(index) = self.in_flight.iter().position(|(known, _)| *known == replica)
            && let Some((_, count)) = self.in_flight.get_mut(index)
        {
            *count -= 1;
            if *count == 0 {
                self.in_flight.swap_remove(index);
            }
        }
    }
}
