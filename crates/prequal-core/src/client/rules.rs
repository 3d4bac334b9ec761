//! The selection rules that keep their own state in each worker: what a worker learns from its own requests is not shared
//! (`docs/configuration.md`). The hot/cold rule and the linear rule need only the pool.
//!
//! The rules without probes learn the membership from requests that the proxy's own policy places: occasionally a request is
//! not steered.

use rand::Rng;

use crate::client::members::Members;
use crate::client::policies::Done;
use crate::client::policies::c3::C3;
use crate::client::policies::fleet::{Explorer, Fleet};
use crate::client::pool::{Branch, Candidate, Pick, Ranking};
use crate::client::settings::Rule;
use crate::shared::endpoint::Endpoint;
use crate::shared::outcome::Outcome;
use crate::shared::time::Micros;
use crate::wire::report::LoadReport;

/// A worker's knowledge of one cluster beyond the pool.
pub(super) struct Rules {
    own: Own,
    explorer: Explorer,
}

enum Own {
    Nothing,
    C3(C3),
    Fleet(Fleet),
}

impl Rules {
    pub(super) fn new(rule: Rule) -> Self {
        let own = match rule {
            Rule::C3 { clients } => Own::C3(C3::new(clients as usize)),
            Rule::PeakEwma => Own::Fleet(Fleet::peak_ewma()),
            Rule::Zuul { max_in_flight } => Own::Fleet(Fleet::zuul(max_in_flight)),
            Rule::Predicted | Rule::Hcl | Rule::RifOnly | Rule::LatencyOnly | Rule::Linear(_) => Own::Nothing,
        };
        Self { own, explorer: Explorer::default() }
    }

    /// Calls `with` with the ranking that `rule` uses.
    pub(super) fn ranked<T>(&self, rule: Rule, with: impl FnOnce(Ranking<'_>) -> T) -> T {
        match (rule, &self.own) {
            (Rule::Linear(linear), _) => {
                with(Ranking::Scored(&|candidate: &Candidate| linear.score(candidate)))
            }
            (_, Own::C3(c3)) => with(Ranking::Scored(&|candidate: &Candidate| c3.score(candidate))),
            (Rule::Predicted, _) => with(Ranking::Predicted),
            _ => with(Ranking::HotCold),
        }
    }

    /// Adopts the membership.
    pub(super) fn set_members(&mut self, members: &Members, now: Micros) {
        match &mut self.own {
            Own::Fleet(fleet) => {
                if fleet.set_members(members.endpoints_in_use()) {
                    self.explorer.changed(now);
                }
            }
            Own::C3(c3) => c3.retain(|replica| members.contains(replica)),
            Own::Nothing => {}
        }
    }

    /// Chooses without a pool. One request every `explore_ms` is left to the proxy's own policy, to find new replicas.
    pub(super) fn pick(&mut self, now: Micros, explore_ms: u32, rng: &mut impl Rng) -> Pick {
        let replica = match &mut self.own {
            Own::Fleet(fleet) if !self.explorer.is_due(now, u64::from(explore_ms) * 1000) => {
                fleet.pick(now, rng)
            }
            _ => None,
        };
        let branch = if replica.is_some() { Branch::Scored } else { Branch::Fallback };
        Pick { replica, branch, ..Pick::default() }
    }

    /// Records that a request is sent to the replica.
    pub(super) fn sent(&mut self, replica: Option<Endpoint>) {
        if let (Own::C3(c3), Some(replica)) = (&mut self.own, replica) {
            c3.sent(replica);
        }
    }

    /// Records a report that is valid for the replica.
    pub(super) fn reported(&mut self, replica: Endpoint, report: &LoadReport) {
        if let Own::C3(c3) = &mut self.own {
            c3.reported(replica, report.rif, report.latency_us);
        }
    }

    pub(super) fn done(&mut self, replica: Endpoint, now: Micros, done: &Done) {
        match &mut self.own {
            Own::C3(c3) => {
                let answered = (done.outcome == Outcome::Success).then_some(done.latency_us);
                c3.done(replica, answered);
            }
            Own::Fleet(fleet) => fleet.done(replica, now, done),
            Own::Nothing => {}
        }
    }
}
