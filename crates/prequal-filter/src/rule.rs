//! The selection rules that keep a state of their own, each worker for itself: what a worker learns from its own requests
//! is not shared (`docs/configuration.md`). Hot and cold, and the linear rule, need nothing but the pool.
//!
//! The rules without probes learn the membership from requests that Envoy's own policy places: now and then one goes out
//! unsteered.

use std::cell::{Cell, RefCell};

use prequal_core::config::{ClusterConfig, Rule};
use prequal_core::endpoint::Endpoint;
use prequal_core::members::{Evidence, Members, Standing};
use prequal_core::policies::Done;
use prequal_core::policies::c3::C3;
use prequal_core::policies::fleet::{Explorer, Fleet};
use prequal_core::policies::zuul::{HEADER_UTILISATION, parse_utilisation};
use prequal_core::pool::{Branch, Candidate, Pick, ProbesDue, Ranking};
use prequal_core::report::{HEADER_LOAD, LoadReport};
use prequal_core::time::Micros;
use prequal_core::tracker::Outcome;
use proxy_wasm::types::MapType;
use rand::rngs::SmallRng;

use crate::filter::Cluster;
use crate::host;
use crate::metrics::Class;
use crate::store::Store;

/// A worker looks for changes of the membership this often, microseconds.
const LOOK_EVERY_US: u64 = 100_000;

/// What a worker knows of one cluster beyond the pool.
pub(crate) struct RuleState {
    own: RefCell<Own>,
    members: RefCell<Members>,
    seen: Cell<Option<u32>>,
    looked: Cell<Option<Micros>>,
    explorer: RefCell<Explorer>,
}

enum Own {
    Nothing,
    C3(C3),
    Fleet(Fleet),
}

/// What a rule wants to know of one request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Watch {
    pub(crate) began: Micros,
    rif: Option<u32>,
    utilisation: Option<f64>,
}

impl RuleState {
    pub(crate) fn new(rule: Rule) -> Self {
        let own = match rule {
            Rule::C3 { clients } => Own::C3(C3::new(clients as usize)),
            Rule::PeakEwma => Own::Fleet(Fleet::peak_ewma()),
            Rule::Zuul { max_in_flight } => Own::Fleet(Fleet::zuul(max_in_flight)),
            Rule::Predicted | Rule::Hcl | Rule::RifOnly | Rule::LatencyOnly | Rule::Linear(_) => Own::Nothing,
        };
        Self {
            own: RefCell::new(own),
            members: RefCell::default(),
            seen: Cell::default(),
            looked: Cell::default(),
            explorer: RefCell::default(),
        }
    }

    /// Runs `with` under the order that `rule` puts replicas in.
    pub(crate) fn ranked<T>(&self, rule: Rule, with: impl FnOnce(Ranking<'_>) -> T) -> T {
        match (rule, &*self.own.borrow()) {
            (Rule::Linear(linear), _) => {
                with(Ranking::Scored(&|candidate: &Candidate| linear.score(candidate)))
            }
            (_, Own::C3(c3)) => with(Ranking::Scored(&|candidate: &Candidate| c3.score(candidate))),
            (Rule::Predicted, _) => with(Ranking::Predicted),
            _ => with(Ranking::HotCold),
        }
    }

    /// The membership, at most [`LOOK_EVERY_US`] old.
    pub(crate) fn with_members<T>(
        &self,
        cluster: &Cluster,
        now: Micros,
        with: impl FnOnce(&Members) -> T,
    ) -> T {
        let fresh = self.looked.get().is_some_and(|at| now.saturating_since(at) < LOOK_EVERY_US && now >= at);
        if !fresh {
            self.looked.set(Some(now));
            self.look(&cluster.store, cluster, now);
        }
        with(&self.members.borrow())
    }

    fn look(&self, store: &Store, cluster: &Cluster, now: Micros) {
        let Some((members, seen)) = store.members_since(&cluster.metrics, self.seen.get()) else { return };
        self.seen.set(seen);
        match &mut *self.own.borrow_mut() {
            Own::Fleet(fleet) => {
                if fleet.set_members(members.endpoints_in_use()) {
                    self.explorer.borrow_mut().changed(now);
                }
            }
            Own::C3(c3) => c3.retain(|replica| members.contains(replica)),
            Own::Nothing => {}
        }
        *self.members.borrow_mut() = members;
    }

    /// What is learned of the membership counts at once.
    pub(crate) fn look_again(&self) {
        self.looked.set(None);
    }

    /// Chooses without a pool.
    pub(crate) fn pick_without_probes(&self, cluster: &Cluster, now: Micros, rng: &mut SmallRng) -> Pick {
        self.with_members(cluster, now, |_| ());
        let replica = match &mut *self.own.borrow_mut() {
            Own::Fleet(fleet) if !self.is_explorer(&cluster.config, now) => fleet.pick(now, rng),
            _ => None,
        };
        Pick {
            latency_us: None,
            trial: false,
            replica,
            branch: if replica.is_some() { Branch::Scored } else { Branch::Fallback },
            verify: false,
            standing: Standing::even(0),
            probes: ProbesDue::default(),
        }
    }

    /// Whether this request goes where Envoy's own policy sends it, to find newcomers.
    fn is_explorer(&self, config: &ClusterConfig, now: Micros) -> bool {
        let every_us = u64::from(config.pool.discovery_interval_ms) * 1000;
        self.explorer.borrow_mut().is_due(now, every_us)
    }

    /// A request leaves for the replica.
    pub(crate) fn sent(&self, replica: Option<Endpoint>) {
        if let (Own::C3(c3), Some(replica)) = (&mut *self.own.borrow_mut(), replica) {
            c3.sent(replica);
        }
    }

    /// A report that may speak for the replica.
    pub(crate) fn reported(&self, replica: Endpoint, report: &LoadReport) {
        if let Own::C3(c3) = &mut *self.own.borrow_mut() {
            c3.reported(replica, report.rif, report.latency_us);
        }
    }

    fn done(&self, replica: Endpoint, now: Micros, done: &Done) {
        match &mut *self.own.borrow_mut() {
            Own::C3(c3) => {
                let answered = (done.outcome == Outcome::Success).then_some(done.latency_us);
                c3.done(replica, answered);
            }
            Own::Fleet(fleet) => fleet.done(replica, now, done),
            Own::Nothing => {}
        }
    }
}

impl Watch {
    /// Reads from the response what the rules without probes go by.
    pub(crate) fn response(&mut self) {
        let header = |name| host::header(MapType::HttpResponseHeaders, name);
        self.utilisation = header(HEADER_UTILISATION).and_then(|text| parse_utilisation(&text));
        self.rif = header(HEADER_LOAD).and_then(|text| LoadReport::parse(text).ok()).map(|report| report.rif);
    }

    /// The request has ended, in the words of the metrics: an answer that carries an error is an upstream failure. Only
    /// called where the cluster's rule keeps a state.
    pub(crate) fn ended(
        self,
        cluster: &Cluster,
        chosen: Option<Endpoint>,
        class: Option<Class>,
        attempts: u64,
    ) {
        let now = host::now();
        let probe_free = cluster.config.choice.rule.is_probe_free();
        let served = if probe_free { host::upstream_address() } else { chosen };
        let Some(chosen) = chosen else {
            // Envoy's own policy placed it: this is how members are found.
            if let (true, Some(served)) = (probe_free, served) {
                cluster.confirm(now, served, None, Evidence::Placed);
            }
            return;
        };
        let diverted = served.is_some_and(|served| served != chosen);
        let outcome = match class {
            Some(Class::Answer) if !diverted => Outcome::Success,
            Some(Class::ClientAbort | Class::Local) | None => Outcome::Aborted,
            // Not placed there at all is no failure either.
            _ if diverted && attempts <= 1 => Outcome::Aborted,
            _ => Outcome::Failure,
        };
        // What another replica reported is not this one's.
        let (rif, utilisation) = if diverted { (None, None) } else { (self.rif, self.utilisation) };
        let latency_us = now.saturating_since(self.began);
        cluster.rule.done(chosen, now, &Done { latency_us, outcome, rif, utilisation });
        if probe_free && diverted && attempts <= 1 {
            // Envoy would not use it, or it has left. If it comes back, Envoy's own policy will meet it.
            cluster.forget(now, chosen);
        }
    }
}
