//! The selection rules that keep their own state in each worker: what a worker learns from its own requests is not
//! shared (`docs/reference/configuration.md`). The predicted, hot/cold and linear rules need only the pool.
//!
//! The rules without probes learn the membership from requests that the proxy's own policy places. For this purpose, a
//! request is occasionally not steered.

use rand::Rng;

use crate::client::members::Members;
use crate::client::policies::Done;
use crate::client::policies::c3::C3;
use crate::client::policies::probe_free::{Explorer, ProbeFree};
use crate::client::pool::{Branch, Candidate, Pick, Ranking};
use crate::client::settings::Rule;
use crate::shared::endpoint::Endpoint;
use crate::shared::outcome::Outcome;
use crate::shared::time::Micros;
use crate::wire::report::LoadReport;

/// A worker's knowledge of one cluster beyond the pool.
pub(super) struct Rules {
    state: RuleState,
    explorer: Explorer,
}

enum RuleState {
    None,
    C3(C3),
    ProbeFree(ProbeFree),
}

impl Rules {
    pub(super) fn new(rule: Rule) -> Self {
        let state = match rule {
            Rule::C3 { clients } => RuleState::C3(C3::new(clients as usize)),
            Rule::PeakEwma => RuleState::ProbeFree(ProbeFree::peak_ewma()),
            Rule::Zuul { max_in_flight } => RuleState::ProbeFree(ProbeFree::zuul(max_in_flight)),
            Rule::Predicted | Rule::Hcl | Rule::RifOnly | Rule::LatencyOnly | Rule::Linear(_) => {
                RuleState::None
            }
        };
        Self { state, explorer: Explorer::default() }
    }

    /// Calls `with` with the ranking that `rule` uses.
    pub(super) fn ranked<T>(&self, rule: Rule, with: impl FnOnce(Ranking<'_>) -> T) -> T {
        match (rule, &self.state) {
            (Rule::Linear(linear), _) => {
                with(Ranking::Scored(&|candidate: &Candidate| linear.score(candidate)))
            }
            (_, RuleState::C3(c3)) => with(Ranking::Scored(&|candidate: &Candidate| c3.score(candidate))),
            (Rule::Predicted, _) => with(Ranking::Predicted),
            _ => with(Ranking::HotCold),
        }
    }

    /// Adopts the membership.
    pub(super) fn set_members(&mut self, members: &Members, now: Micros) {
        match &mut self.state {
            RuleState::ProbeFree(policy) => {
                if policy.set_members(members.endpoints_in_use()) {
                    self.explorer.changed(now);
                }
            }
            RuleState::C3(c3) => c3.retain(|replica| members.contains(replica)),
            RuleState::None => {}
        }
    }

    /// Chooses without a pool. One request every `explore_ms` is left to the proxy's own policy, to find new replicas.
    pub(super) fn pick(&mut self, now: Micros, explore_ms: u32, rng: &mut impl Rng) -> Pick {
        let replica = match &mut self.state {
            RuleState::ProbeFree(policy) if !self.explorer.is_due(now, u64::from(explore_ms) * 1000) => {
                policy.pick(now, rng)
            }
            _ => None,
        };
        let branch = if replica.is_some() { Branch::Scored } else { Branch::Fallback };
        Pick { replica, branch, ..Pick::default() }
    }

    /// Records that a request is sent to the replica.
    pub(super) fn sent(&mut self, replica: Option<Endpoint>) {
        if let (RuleState::C3(c3), Some(replica)) = (&mut self.state, replica) {
            c3.sent(replica);
        }
    }

    /// Records a report that is valid for the replica.
    pub(super) fn reported(&mut self, replica: Endpoint, report: &LoadReport) {
        if let RuleState::C3(c3) = &mut self.state {
            c3.reported(replica, report.rif, report.latency_us);
        }
    }

    pub(super) fn done(&mut self, replica: Endpoint, now: Micros, done: &Done) {
        match &mut self.state {
            RuleState::C3(c3) => {
                let answered = (done.outcome == Outcome::Success).then_some(done.latency_us);
                c3.done(replica, answered);
            }
            RuleState::ProbeFree(policy) => policy.done(replica, now, done),
            RuleState::None => {}
        }
    }
}
