//! One replica, as one worker knows it: its own requests in flight, the RIF of all workers, and the estimate that all
//! workers share.

use std::cell::{Cell, RefCell};

use prequal_core::client::labels;
use prequal_core::server::inbound::ended::{EndedLog, ReadPosition};
use prequal_core::server::inbound::slots::Slots;
use prequal_core::server::replica::Replica;
use prequal_core::server::tracker::{Present, Ticket, TrackerConfig, Visit};
use prequal_core::shared::blob::Blob;
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::outcome::Outcome;
use prequal_core::shared::time::Micros;
use prequal_core::wire::orca::OrcaReport;
use prequal_core::wire::report::{LoadReport, MAX_RIF};

use crate::metrics::{BlobCounters, Counter, Gauge};
use crate::store::{seed, update};

/// Maximum age of the data on other workers' requests when a report is made, microseconds.
const STALE_US: u64 = 100_000;

/// The VMs' slots, as far as the counts of a replica depend on them.
pub(super) trait SlotView {
    /// Returns the slot that this VM counts in.
    fn slot(&self) -> Option<usize>;

    /// Returns the number of slots that VMs may count in, from slot 0.
    fn used(&self) -> usize;
}

/// One replica.
pub(crate) struct Served {
    pub(super) endpoint: Endpoint,
    replica: RefCell<Replica>,
    log_key: String,
    seen: Cell<ReadPosition>,
    read: Cell<Micros>,
    probe_endpoint: Cell<Option<Endpoint>>,
    /// Requests in flight.
    in_flight: SlotGauges,
    /// Requests that are in flight but not at the replica: streams, and requests that wait for their client.
    away: SlotGauges,
    ended: [Counter; 4],
    probes: Counter,
    blobs: BlobCounters,
}

impl Served {
    pub(super) fn new(endpoint: Endpoint, namespace: &str, now: Micros) -> Self {
        let name = labels::value(&endpoint.to_string());
        let log_key = format!("prequal/{}/inbound/{endpoint}/ended", EndedLog::TAG.version());
        seed::<EndedLog>(&log_key);
        let served = Self {
            endpoint,
            replica: RefCell::new(Replica::new(TrackerConfig::default(), None)),
            log_key,
            seen: Cell::default(),
            read: Cell::default(),
            probe_endpoint: Cell::default(),
            in_flight: SlotGauges::new("in_flight", &name, namespace),
            away: SlotGauges::new("away", &name, namespace),
            ended: ["success", "failure", "aborted", "streaming"].map(|result| {
                Counter::define(&format!("prequal_inbound_requests_total.endpoint={name}.result={result}"))
            }),
            probes: Counter::define(&format!("prequal_inbound_probes_total.endpoint={name}")),
            blobs: BlobCounters::define("prequal_inbound_", &format!(".endpoint={name}")),
        };
        served.transact(now, |_, _| false);
        served
    }

    /// Handles the arrival of a request.
    pub(super) fn start(&self, vm: &impl SlotView, now: Micros) -> Ticket {
        // Requests that have ended on other workers are read before this one begins, because the estimate needs events
        // in order.
        self.read_ended(now);
        let others = self.present(vm);
        let ticket = self.replica.borrow_mut().start_behind(now, others);
        self.publish(vm);
        ticket
    }

    /// Marks the request as a stream: it stays in flight, but its age says nothing about the replica's speed.
    pub(super) fn streaming(&self, vm: &impl SlotView, ticket: &Ticket, now: Micros) {
        self.replica.borrow_mut().tracker.streaming(ticket, now);
        self.publish_away(vm);
    }

    /// Sets whether the request waits for its client.
    pub(super) fn set_client_waits(&self, vm: &impl SlotView, ticket: &Ticket, now: Micros, waits: bool) {
        {
            let tracker = &mut self.replica.borrow_mut().tracker;
            if waits {
                tracker.client_waits(ticket.visit(), now);
            } else {
                tracker.client_is_back(ticket.visit(), now);
            }
        }
        self.publish_away(vm);
    }

    /// Handles the end of a request. `up` is whether the replica is up, if known.
    pub(super) fn finish(
        &self,
        vm: &impl SlotView,
        now: Micros,
        ticket: Ticket,
        outcome: Outcome,
        up: Option<bool>,
    ) {
        let (present, away) = (self.present(vm), self.own_away());
        let ended = self.replica.borrow_mut().finish_among(ticket, now, outcome, present);
        if self.own_away() != away {
            self.publish_away(vm);
        }
        self.publish(vm);
        let [success, failure, aborted, streaming] = self.ended;
        match outcome {
            Outcome::Success => success,
            Outcome::Failure => failure,
            Outcome::Aborted => aborted,
            Outcome::Streaming => streaming,
        }
        .one();
        // An aborted request shows nothing about the replica, but the rates count it as ended.
        if outcome == Outcome::Aborted && !self.counts_rates() {
            return;
        }
        self.transact(now, |log, seen| {
            if let Some(up) = up {
                log.set_up(up, now);
            }
            log.append(seen, ended);
            true
        });
    }

    /// Returns the report for a response. `leaving` is the request that this response ends; the report does not count
    /// it. `leaving` is `None` if the request may stay in flight, as a stream does.
    pub(super) fn report(&self, vm: &impl SlotView, now: Micros, leaving: Option<Visit>) -> LoadReport {
        let read = self.read.get();
        if now < read || now.saturating_since(read) > STALE_US {
            self.read_ended(now);
        }
        self.report_now(vm, now, leaving)
    }

    /// Counts rates from now on, with this time constant, for [`Self::orca`].
    pub(super) fn count_rates(&self, now: Micros, window_ms: u32) {
        self.replica.borrow_mut().count_rates(now, u64::from(window_ms) * 1000);
    }

    /// Converts `report`, which was made just now, to ORCA format; `None` before [`Self::count_rates`]. `leaves` is
    /// true if the report goes on the response to a request that is about to end but still counts as in flight.
    pub(super) fn orca(
        &self,
        now: Micros,
        report: &LoadReport,
        leaves: bool,
        limit: Option<u32>,
    ) -> Option<OrcaReport> {
        self.replica.borrow_mut().orca(now, report, leaves, limit)
    }

    /// Keeps the rates accurate on a worker that serves few requests itself.
    pub(super) fn sample(&self, vm: &impl SlotView, now: Micros) {
        if self.counts_rates() {
            self.read_ended(now);
            let present = self.present(vm);
            self.replica.borrow_mut().sample(now, present.rif);
        }
    }

    fn counts_rates(&self) -> bool {
        self.replica.borrow().counts_rates()
    }

    /// Returns the report for a probe that arrived at the address `at` of this Envoy.
    pub(super) fn answer(&self, vm: &impl SlotView, now: Micros, at: Option<Endpoint>) -> LoadReport {
        self.probes.one();
        self.read_ended(now);
        if let Some(at) = at
            && self.probe_endpoint.get().unwrap_or(self.endpoint) != at
        {
            self.transact(now, |log, _| log.probed_at(self.endpoint, at));
        }
        self.report_now(vm, now, None)
    }

    fn report_now(&self, vm: &impl SlotView, now: Micros, leaving: Option<Visit>) -> LoadReport {
        let present = self.present(vm);
        self.replica.borrow_mut().report_at(now, present, self.endpoint, self.probe_endpoint.get(), leaving)
    }

    /// Publishes the number of requests in flight here to the other workers. The value is absolute, so it corrects
    /// any earlier error.
    pub(super) fn publish(&self, vm: &impl SlotView) {
        if let Some(slot) = vm.slot() {
            let rif = self.replica.borrow().tracker.rif();
            self.in_flight.get(slot).set(u64::from(rif));
        }
    }

    /// Clears the counts of VMs that no longer exist.
    pub(super) fn sweep(&self, table: &Slots, used: usize) {
        for slot in (0..used).filter(|slot| table.is_free(*slot)) {
            for gauge in [self.in_flight.get(slot), self.away.get(slot)] {
                if gauge.get() != 0 {
                    gauge.set(0);
                }
            }
        }
    }

    fn publish_away(&self, vm: &impl SlotView) {
        if let Some(slot) = vm.slot() {
            self.away.get(slot).set(self.own_away().into());
        }
    }

    fn own_away(&self) -> u32 {
        self.replica.borrow().tracker.present().away
    }

    /// Returns the requests in flight on all workers.
    fn present(&self, vm: &impl SlotView) -> Present {
        let own = vm.slot();
        let mut sum = self.replica.borrow().tracker.present();
        for slot in (0..vm.used()).filter(|slot| Some(*slot) != own) {
            let rif = self.in_flight.get(slot).get();
            // A VM with nothing in flight has nothing away.
            let away = if rif > 0 { self.away.get(slot).get() } else { 0 };
            sum.rif = add(sum.rif, rif);
            sum.away = add(sum.away, away);
        }
        sum
    }

    /// Reads the results of other workers' requests.
    fn read_ended(&self, now: Micros) {
        update::<EndedLog, _>(&self.log_key, &self.blobs, |log| (self.read_log(log, now), false));
    }

    fn read_log(&self, log: &EndedLog, now: Micros) {
        let mut seen = self.seen.get();
        {
            let mut replica = self.replica.borrow_mut();
            replica.pass(now);
            log.read(&mut seen, &mut replica);
        }
        self.seen.set(seen);
        self.read.set(now);
        self.probe_endpoint.set(log.probe_endpoint(self.endpoint));
    }

    /// Reads the log, and writes it if it was initialised here or `change` returns true.
    fn transact(&self, now: Micros, mut change: impl FnMut(&mut EndedLog, &mut ReadPosition) -> bool) {
        let (seen, written) = update::<EndedLog, _>(&self.log_key, &self.blobs, |log| {
            let begun = log.begin(&self.replica.borrow(), now);
            self.read_log(log, now);
            let mut seen = self.seen.get();
            let changed = change(log, &mut seen);
            (seen, begun || changed)
        });
        // An appended event must not be read again. If the write was lost in conflicts, the event was not appended.
        if written {
            self.seen.set(seen);
        }
    }
}

fn add(sum: u32, more: u64) -> u32 {
    u32::try_from(u64::from(sum).saturating_add(more)).unwrap_or(MAX_RIF).min(MAX_RIF)
}

/// Gauges of one replica, one for each slot. Each is defined at its first use.
struct SlotGauges {
    /// The parts of the gauges' names before and after the number of the slot.
    name: (String, String),
    gauges: RefCell<Vec<Gauge>>,
}

impl SlotGauges {
    fn new(metric: &str, endpoint: &str, namespace: &str) -> Self {
        let before = format!("prequal_inbound_{metric}.endpoint={endpoint}.slot=");
        Self { name: (before, namespace.to_owned()), gauges: RefCell::default() }
    }

    fn get(&self, slot: usize) -> Gauge {
        let mut gauges = self.gauges.borrow_mut();
        let (before, after) = &self.name;
        for number in gauges.len()..=slot {
            gauges.push(Gauge::define(&format!("{before}{number}{after}")));
        }
        gauges.get(slot).copied().unwrap_or_default()
    }
}
