//! The module's metrics, with the same names and labels as the WebAssembly filter's, so that one dashboard fits both.
//!
//! Threads count in memory ([`Tally`]), without a call to Envoy. The main thread passes the counts on
//! ([`Metrics::tell`]), because only that thread knows that Envoy's side still exists. The counts of an idle worker
//! therefore arrive as well.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prequal_core::client::ejection::Change;
use prequal_core::client::{Count, Counters, Tick, labels};

use crate::envoy::{Counter, Gauge, LbConfig};

/// Groups of counters with labels: name, label and its values. The index of a group's first counter is the sum of the
/// sizes of the groups before it.
const GROUPS: [(&str, &str, &[&str]); 7] = [
    ("picks", "branch", &labels::PICKS),
    ("reports", "result", &labels::REPORTS),
    ("outcomes", "class", &labels::OUTCOMES),
    ("probes", "result", &labels::PROBES),
    ("ejections", "reason", &labels::REASONS),
    ("returned", "reason", &labels::REASONS),
    ("probes", "result", &["sent", "undispatched"]),
];
const PICKS: usize = 0;
const REPORTS: usize = PICKS + labels::PICKS.len();
const OUTCOMES: usize = REPORTS + labels::REPORTS.len();
const PROBES: usize = OUTCOMES + labels::OUTCOMES.len();
const EJECTIONS: usize = PROBES + labels::PROBES.len();
const RETURNED: usize = EJECTIONS + labels::REASONS.len();
/// Probes that were sent.
pub(crate) const SENT: usize = RETURNED + labels::REASONS.len();
/// Probes that were not sent, because Envoy refused them or too many were in flight.
pub(crate) const UNDISPATCHED: usize = SENT + 1;

/// Counters without labels other than the cluster.
const SINGLE: [&str; 7] = [
    "diverted",
    "trials",
    "ejections_overflow",
    "cas_conflicts",
    "cas_giveups",
    "dropped_events",
    "members_refused",
];
const DIVERTED: usize = UNDISPATCHED + 1;
const TRIALS: usize = DIVERTED + 1;
const OVERFLOW: usize = TRIALS + 1;
const CONFLICTS: usize = OVERFLOW + 1;
const GIVEUPS: usize = CONFLICTS + 1;
const DROPPED: usize = GIVEUPS + 1;
const REFUSED: usize = DROPPED + 1;
const COUNTERS: usize = REFUSED + 1;

/// Metrics of one upstream cluster. Envoy lets a module define them only while it reads a configuration.
#[derive(Debug)]
pub(crate) struct Metrics {
    config: LbConfig,
    counters: Vec<Counter>,
    occupancy: Gauge,
    theta: Gauge,
    members: Gauge,
    ejected: Gauge,
    agentless: Gauge,
    panic: Gauge,
}

impl Metrics {
    /// Defines the metrics of a cluster, or finds them.
    pub(crate) fn define(config: LbConfig, cluster: &str) -> Self {
        let cluster = labels::value(cluster);
        let labelled = GROUPS.iter().flat_map(|(name, label, values)| {
            let cluster = &cluster;
            values.iter().map(move |value| {
                config.counter(&format!("prequal_{name}_total.cluster={cluster}.{label}={value}"))
            })
        });
        let single =
            SINGLE.iter().map(|name| config.counter(&format!("prequal_{name}_total.cluster={cluster}")));
        let gauge = |name: &str| config.gauge(&format!("prequal_{name}.cluster={cluster}"));
        Self {
            config,
            counters: labelled.chain(single).collect(),
            occupancy: gauge("pool_occupancy"),
            theta: gauge("theta_rif"),
            members: gauge("members"),
            ejected: gauge("ejected"),
            agentless: gauge("agentless"),
            panic: gauge("panic"),
        }
    }

    /// Passes to Envoy a thread's counts since the previous call of this function.
    pub(crate) fn tell(&self, tally: &Tally) {
        for (count, counter) in tally.0.iter().zip(&self.counters) {
            self.config.add(*counter, count.swap(0, Ordering::Relaxed));
        }
    }

    /// Sets the gauges.
    pub(crate) fn show(&self, tick: &Tick) {
        self.config.set(self.occupancy, tick.view.occupancy as u64);
        self.config.set(self.theta, u64::from(tick.view.theta.unwrap_or(0)));
        self.config.set(self.members, u64::from(tick.view.members));
        self.config.set(self.ejected, tick.ejected.into());
        self.config.set(self.agentless, tick.agentless.into());
        self.config.set(self.panic, tick.panic.into());
    }
}

/// One thread's counts that Envoy does not have yet.
#[derive(Clone, Debug)]
pub(crate) struct Tally(Arc<[AtomicU64; COUNTERS]>);

impl Tally {
    pub(crate) fn new() -> Self {
        Self(Arc::new([const { AtomicU64::new(0) }; COUNTERS]))
    }

    /// Whether only this handle is left.
    pub(crate) fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Adds one to a counter. Other modules do this only for counters that are not the balancer's own.
    pub(crate) fn one(&self, index: usize) {
        self.add(index, 1);
    }

    fn add(&self, index: usize, count: u32) {
        if let (Some(counter), 1..) = (self.0.get(index), count) {
            counter.fetch_add(count.into(), Ordering::Relaxed);
        }
    }
}

impl Counters for Tally {
    fn count(&self, what: Count) {
        match what {
            Count::Pick(branch) => self.one(PICKS + branch as usize),
            Count::Report(end) => self.one(REPORTS + labels::report(end)),
            Count::Outcome(class) => self.one(OUTCOMES + class as usize),
            Count::Probe(end) => self.one(PROBES + labels::probe(end)),
            Count::Ejection(Change::Ejected(reason)) => self.one(EJECTIONS + reason as usize),
            Count::Ejection(Change::Returned(reason)) => self.one(RETURNED + reason as usize),
            Count::Ejection(Change::None | Change::Noted) => {}
            Count::Trial => self.one(TRIALS),
            Count::Diverted => self.one(DIVERTED),
            Count::Overflow(lost) => self.add(OVERFLOW, lost),
            Count::Dropped(events) => self.add(DROPPED, events),
            Count::Refused(replicas) => self.add(REFUSED, replicas),
            Count::Shared { conflicts, given_up, .. } => {
                self.add(CONFLICTS, conflicts);
                self.add(GIVEUPS, given_up.into());
            }
        }
    }
}
