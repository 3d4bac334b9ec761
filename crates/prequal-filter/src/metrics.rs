//! Counters and gauges in Envoy's stats. Label values are part of the name; the shipped configuration turns them into
//! Prometheus labels with `stats_tags`.

use std::cell::Cell;
use std::rc::Rc;

use prequal_core::client::ejection::Change;
use prequal_core::client::sync_mode::Ending;
use prequal_core::client::{Count, Counters, Tick, labels};
use proxy_wasm::hostcalls;
use proxy_wasm::types::MetricType;

/// A counter. If the metric could not be defined, nothing is counted and balancing continues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counter(Option<u32>);

impl Counter {
    /// Defines the counter, or finds it: the same name denotes the same metric in all VMs.
    pub(crate) fn define(name: &str) -> Self {
        Self(define(MetricType::Counter, name))
    }

    pub(crate) fn add(self, count: u32) {
        if let (Some(id), 1..) = (self.0, count) {
            let _ = hostcalls::increment_metric(id, i64::from(count));
        }
    }

    pub(crate) fn one(self) {
        self.add(1);
    }
}

/// A counter that collects counts and passes them to Envoy at the tick.
#[derive(Debug)]
struct Tally {
    counter: Counter,
    pending: Cell<u32>,
}

impl Tally {
    fn new(counter: Counter) -> Self {
        Self { counter, pending: Cell::new(0) }
    }

    fn one(&self) {
        self.pending.set(self.pending.get().saturating_add(1));
    }

    fn flush(&self) {
        self.counter.add(self.pending.take());
    }
}

/// Flushes the count when the configuration is replaced or Envoy exits.
impl Drop for Tally {
    fn drop(&mut self) {
        self.flush();
    }
}

/// Counters that every request adds to. Passing each count to Envoy immediately, instead of at the tick, would cost 1
/// to 3 % more CPU time per request (`docs/results/2026-11-23/filter-cost.md`).
#[derive(Debug)]
struct Requests {
    picks: [Tally; 7],
    reports: [Tally; 12],
    outcomes: [Tally; 4],
}

/// A gauge, which holds the last value written by any worker.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gauge(Option<u32>);

impl Gauge {
    /// Defines the gauge, or finds it.
    pub(crate) fn define(name: &str) -> Self {
        Self(define(MetricType::Gauge, name))
    }

    pub(crate) fn set(self, value: u64) {
        if let Some(id) = self.0 {
            let _ = hostcalls::record_metric(id, value);
        }
    }

    /// Returns the current value; zero if the gauge could not be defined.
    pub(crate) fn get(self) -> u64 {
        self.0.and_then(|id| hostcalls::get_metric(id).ok()).unwrap_or(0)
    }

    /// Adds to the value, which other workers may also be adding to.
    pub(crate) fn add(self, count: u32) {
        Counter(self.0).add(count);
    }
}

/// A histogram.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Histogram(Option<u32>);

impl Histogram {
    pub(crate) fn record(self, value: u64) {
        if let Some(id) = self.0 {
            let _ = hostcalls::record_metric(id, value);
        }
    }
}

/// How the wait of a synchronous request ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WaitEnd {
    Decided(Ending),
    /// No wait: fewer than two replicas are known, or no probe could be sent.
    Unasked,
    /// The request ended before the wait did.
    Aborted,
}

/// Results of transactions on shared data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlobCounters {
    conflicts: Counter,
    giveups: Counter,
    /// Blobs that did not decode.
    replaced: Counter,
}

impl BlobCounters {
    /// Defines the counters. `prefix` is the role's prefix of their names; `suffix` holds the labels.
    pub(crate) fn define(prefix: &str, suffix: &str) -> Self {
        let counter = |name: &str| Counter::define(&format!("{prefix}{name}_total{suffix}"));
        Self {
            conflicts: counter("cas_conflicts"),
            giveups: counter("cas_giveups"),
            replaced: counter("blob_replaced"),
        }
    }
}

impl Counters for BlobCounters {
    fn count(&self, what: Count) {
        if let Count::Shared { conflicts, given_up, replaced } = what {
            self.conflicts.add(conflicts);
            self.giveups.add(given_up.into());
            self.replaced.add(replaced);
        }
    }
}

/// Metrics of one upstream cluster.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    requests: Rc<Requests>,
    pub(crate) sent: Counter,
    /// Probes that were not sent: Envoy refused them (the circuit breaker was full, or there was no host or no such
    /// cluster), or too many were in flight.
    pub(crate) undispatched: Counter,
    probes: [Counter; 17],
    waits: [Counter; 5],
    /// Usable answers that were available at decisions.
    pub(crate) sync_answers: Counter,
    /// Time from the request to its decision, microseconds.
    pub(crate) sync_wait: Histogram,
    diverted: Counter,
    ejections: [Counter; 3],
    returned: [Counter; 3],
    trials: Counter,
    /// Number of records for which the ejection table had no room.
    overflow: Counter,
    blobs: BlobCounters,
    dropped_events: Counter,
    /// Replicas that the membership had no room for.
    refused_members: Counter,
    occupancy: Gauge,
    theta: Gauge,
    members: Gauge,
    /// Ejected replicas.
    ejected: Gauge,
    /// Replicas without an agent.
    agentless: Gauge,
    /// 1 while more than half of the replicas would be ejected, or have recently failed at least half of their
    /// requests. If more than half would be ejected, none is.
    panic: Gauge,
}

impl Metrics {
    /// Defines or finds the metrics of a cluster.
    pub(crate) fn define(cluster: &str) -> Self {
        let cluster = labels::value(cluster);
        let counter = |name: &str, label: &str| {
            Counter::define(&format!("prequal_{name}_total.cluster={cluster}{label}"))
        };
        let gauge = |name: &str| Gauge::define(&format!("prequal_{name}.cluster={cluster}"));
        let labelled = |name: &str, key: &str, value: &str| counter(name, &format!(".{key}={value}"));
        let tally = |name: &str, key: &str, value: &str| Tally::new(labelled(name, key, value));
        Self {
            requests: Rc::new(Requests {
                picks: labels::PICKS.map(|branch| tally("picks", "branch", branch)),
                reports: labels::REPORTS.map(|result| tally("reports", "result", result)),
                outcomes: labels::OUTCOMES.map(|class| tally("outcomes", "class", class)),
            }),
            sent: labelled("probes", "result", "sent"),
            undispatched: labelled("probes", "result", "undispatched"),
            probes: labels::PROBES.map(|result| labelled("probes", "result", result)),
            waits: ["enough", "all_ended", "deadline", "unasked", "aborted"]
                .map(|end| labelled("sync_waits", "end", end)),
            sync_answers: counter("sync_answers", ""),
            sync_wait: Histogram(define(
                MetricType::Histogram,
                &format!("prequal_sync_wait_us.cluster={cluster}"),
            )),
            diverted: counter("diverted", ""),
            ejections: labels::REASONS.map(|reason| labelled("ejections", "reason", reason)),
            returned: labels::REASONS.map(|reason| labelled("returned", "reason", reason)),
            trials: counter("trials", ""),
            overflow: counter("ejections_overflow", ""),
            blobs: BlobCounters::define("prequal_", &format!(".cluster={cluster}")),
            dropped_events: counter("dropped_events", ""),
            refused_members: counter("members_refused", ""),
            occupancy: gauge("pool_occupancy"),
            theta: gauge("theta_rif"),
            members: gauge("members"),
            ejected: gauge("ejected"),
            agentless: gauge("agentless"),
            panic: gauge("panic"),
        }
    }

    /// Passes to Envoy the counts since the previous flush.
    pub(crate) fn flush(&self) {
        let Requests { picks, reports, outcomes } = &*self.requests;
        picks.iter().chain(reports).chain(outcomes).for_each(Tally::flush);
    }

    /// Sets the gauges.
    pub(crate) fn show(&self, tick: &Tick) {
        self.occupancy.set(tick.view.occupancy as u64);
        self.theta.set(u64::from(tick.view.theta.unwrap_or(0)));
        self.members.set(u64::from(tick.view.members));
        self.ejected.set(tick.ejected.into());
        self.agentless.set(tick.agentless.into());
        self.panic.set(tick.panic.into());
    }

    pub(crate) fn waited(&self, end: WaitEnd) {
        let index = match end {
            WaitEnd::Decided(ending) => ending as usize,
            WaitEnd::Unasked => 3,
            WaitEnd::Aborted => 4,
        };
        one_of(&self.waits, index);
    }
}

impl Counters for Metrics {
    // Inlined because nearly every caller passes a variant that is known at compile time.
    #[inline(always)]
    fn count(&self, what: Count) {
        match what {
            Count::Pick(branch) => tally(&self.requests.picks, branch as usize),
            Count::Trial => self.trials.one(),
            Count::Probe(end) => one_of(&self.probes, labels::probe(end)),
            Count::Report(end) => tally(&self.requests.reports, labels::report(end)),
            Count::Outcome(class) => tally(&self.requests.outcomes, class as usize),
            Count::Diverted => self.diverted.one(),
            Count::Ejection(Change::Ejected(reason)) => one_of(&self.ejections, reason as usize),
            Count::Ejection(Change::Returned(reason)) => one_of(&self.returned, reason as usize),
            Count::Ejection(Change::None | Change::Noted) => {}
            Count::Overflow(lost) => self.overflow.add(lost),
            Count::Dropped(events) => self.dropped_events.add(events),
            Count::Refused(replicas) => self.refused_members.add(replicas),
            Count::Shared { .. } => self.blobs.count(what),
        }
    }
}

fn tally(tallies: &[Tally], index: usize) {
    if let Some(tally) = tallies.get(index) {
        tally.one();
    }
}

fn one_of(counters: &[Counter], index: usize) {
    if let Some(counter) = counters.get(index) {
        counter.one();
    }
}

fn define(kind: MetricType, name: &str) -> Option<u32> {
    hostcalls::define_metric(kind, name).ok()
}
