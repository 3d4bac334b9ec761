//! Decides which requests go to replicas without an agent. Membership (`members.rs`) decides which replicas those are.
//!
//! While agents are rolled out or rolled back, some replicas report and others do not. Choosing only among those that
//! report would leave the others idle, and a few replicas would get the requests of the whole fleet. Therefore each
//! agentless replica gets its fair share. Among them, this module chooses the one with the fewest of this worker's
//! requests in flight, relative to its weight, as in Envoy's `least_request`. Where agentless replicas are the
//! majority, the proxy's own policy places all requests.
//!
//! If nothing answers a replica's probes, only the proxy's own policy can reveal that it has no agent, so unanswered
//! probes leave some requests to that policy. But the probes of a dead or hung replica go unanswered too, and the
//! policy might send a request there. `probing.rs` therefore reports only those unanswered probes that no silent
//! replica explains.

use std::mem;

use rand::Rng;

use crate::client::members::{Members, Placement};
use crate::shared::endpoint::Endpoint;
use crate::shared::time::Micros;

/// Minimum time between two requests left to the proxy's own policy to find agentless replicas, microseconds. It
/// doubles with each such request that finds none, because a replica whose probes are not answered may also be dead.
const EXPLORE_US: u64 = 500_000;
/// Maximum to which this time doubles, microseconds. After twice this long without such a request, the minimum applies
/// again.
const EXPLORE_MAX_US: u64 = 60_000_000;
/// Minimum number of other requests between two such requests.
const EXPLORE_EVERY: u32 = 64;

/// Who chooses the replica of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Chooser {
    /// The pool, among the replicas that report.
    Pool,
    /// This module, which gives the request to this agentless replica.
    Agentless(Endpoint),
    /// The proxy's own policy, which may choose and so reveal a replica without an agent.
    Explorer,
    /// The proxy's own policy, because most replicas have no agent.
    Proxy,
}

/// One worker's knowledge of the agentless replicas.
#[derive(Debug, Default)]
pub(super) struct Agentless {
    /// This worker's requests in flight to each agentless replica that has any.
    in_flight: Vec<(Endpoint, u32)>,
    /// Whether a probe has gone unanswered since `explored`.
    unanswered: bool,
    /// When a request was last left to the proxy's policy to find agentless replicas.
    explored: Micros,
    /// Minimum time from `explored` to the next such request, microseconds.
    wait_us: u64,
    /// Number of requests since `explored`.
    requests: u32,
    /// Whether the most recent request left to the proxy's policy is still unanswered.
    exploring: bool,
}

impl Agentless {
    /// Records that a probe was not answered. Only the proxy's own policy can show whether a replica without an agent
    /// is the reason.
    pub(super) fn probe_unanswered(&mut self) {
        self.unanswered = true;
    }

    /// Records that a request is left to the proxy's policy: the exploring request.
    pub(super) fn explorer_sent(&mut self) {
        self.exploring = true;
    }

    /// Records that the exploring request was answered or has ended. Returns whether it was still unanswered.
    pub(super) fn explorer_ended(&mut self) -> bool {
        mem::take(&mut self.exploring)
    }

    /// Records that the replica that got the exploring request did not answer it. That explains the unanswered probes.
    pub(super) fn explained(&mut self) {
        self.unanswered = false;
    }

    /// Records that a replica was found to have no agent. There may be more.
    pub(super) fn found(&mut self) {
        self.wait_us = EXPLORE_US;
    }

    /// Decides who chooses. `unexplained` is true if some replica of a known fleet has neither reported nor been found
    /// agentless. `usable` is true if an agentless replica may be chosen.
    pub(super) fn chooser(
        &mut self,
        members: &Members,
        unexplained: bool,
        now: Micros,
        usable: impl Fn(Endpoint) -> bool,
        rng: &mut impl Rng,
    ) -> Chooser {
        self.requests = self.requests.saturating_add(1);
        if (unexplained || self.unanswered) && self.explores(now) {
            return Chooser::Explorer;
        }
        let count = members.agentless();
        if count == 0 {
            return Chooser::Pool;
        }
        if count > members.count().saturating_sub(members.unheard()) {
            return Chooser::Proxy;
        }
        let weight: u32 = members.without_agent().map(|(_, weight)| u32::from(weight)).sum();
        let all = weight + members.count() * u32::from(Placement::UNIT);
        if rng.random_range(0..all) >= weight {
            return Chooser::Pool;
        }
        let load = |(replica, weight): (Endpoint, u16)| {
            (self.in_flight_to(replica) + 1) * u32::from(Placement::UNIT) * 256 / u32::from(weight.max(1))
        };
        let usable = members.without_agent().filter(|(replica, _)| usable(*replica));
        let least = usable.map(|member| (load(member), rng.random::<u32>(), member.0)).min();
        least.map_or(Chooser::Pool, |(_, _, replica)| Chooser::Agentless(replica))
    }

    fn explores(&mut self, now: Micros) -> bool {
        let since = now.distance(self.explored);
        // While the previous exploring request is unanswered, its replica may hang, and the next one might hang there
        // too.
        let waits = self.exploring && since < EXPLORE_MAX_US;
        if self.requests <= EXPLORE_EVERY || since < self.wait_us || waits {
            return false;
        }
        self.wait_us = if since > 2 * EXPLORE_MAX_US {
            EXPLORE_US
        } else {
            (self.wait_us * 2).clamp(EXPLORE_US, EXPLORE_MAX_US)
        };
        (self.unanswered, self.explored, self.requests) = (false, now, 0);
        true
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

    /// Records that a request to an agentless replica has ended.
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
