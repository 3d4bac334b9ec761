//! This VM among those of one Envoy: its slot, its heartbeat, the replicas that it counts for.
//!
//! All of this is the VM's and not a root's: an update of the listener makes a second root in the same VM, whose requests and
//! the first one's count together.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use prequal_core::endpoint::Endpoint;
use prequal_core::inbound::slots::{Claim, HEARTBEAT_MS, MAX_SLOTS, Slots, can_judge};
use prequal_core::time::Micros;

use super::served::{Seats, Served};
use crate::host;
use crate::metrics::{BlobCounters, Counter, Gauge, label};
use crate::store::{seed, update};

/// How often a root of this role ticks.
pub(crate) const TICK: Duration = Duration::from_millis(HEARTBEAT_MS as u64);

/// Where the table lives. In Istio all plugins share one namespace. There has been one version: another needs other names of
/// gauges as well as another key, for each table gives out the slots from 0.
const TABLE: &str = "prequal/1/inbound/slots";

thread_local! {
    static VM: Rc<Vm> = Rc::new(Vm::new());
}

/// The state of this VM.
pub(crate) struct Vm {
    /// Of other namespaces the gauges are others': part of their names.
    pub(super) namespace: String,
    claim: Cell<Option<Claim>>,
    /// It counts, and has no slot: it tries again at every tick.
    slotless: Cell<bool>,
    ticked: Cell<Option<Micros>>,
    replicas: RefCell<Vec<Rc<Served>>>,
    /// Slots in use by all VMs, never less.
    used: Gauge,
    claimed: Counter,
    freed: Counter,
    lost: Counter,
    full: Counter,
    uncounted: Counter,
    blobs: BlobCounters,
}

impl Seats for Vm {
    fn slot(&self) -> Option<usize> {
        self.claim.get().map(|claim| claim.index)
    }

    fn used(&self) -> usize {
        let used = usize::try_from(self.used.get()).unwrap_or(MAX_SLOTS).min(MAX_SLOTS);
        used.max(self.slot().map_or(0, |slot| slot + 1))
    }
}

impl Vm {
    /// Only from a callback of a root or a stream.
    pub(crate) fn this() -> Rc<Self> {
        VM.with(Rc::clone)
    }

    fn new() -> Self {
        seed::<Slots>(TABLE);
        let vm_id = host::text_property(&["plugin_vm_id"]).unwrap_or_default();
        let namespace = if vm_id.is_empty() { String::new() } else { format!(".vm={}", label(&vm_id)) };
        let slots = |what| Counter::define(&format!("prequal_inbound_slots_total.result={what}"));
        Self {
            used: Gauge::define(&format!("prequal_inbound_slots{namespace}")),
            namespace,
            claim: Cell::default(),
            slotless: Cell::default(),
            ticked: Cell::default(),
            replicas: RefCell::default(),
            claimed: slots("claimed"),
            freed: slots("freed"),
            lost: slots("lost"),
            full: slots("full"),
            uncounted: Counter::define("prequal_inbound_uncounted_total"),
            blobs: BlobCounters::define("prequal_inbound_", ""),
        }
    }

    /// The replica `endpoint`; `None` if too many are counted.
    pub(super) fn served(&self, endpoint: Endpoint, now: Micros) -> Option<Rc<Served>> {
        if let Some(served) = self.find(endpoint) {
            return Some(served);
        }
        let ((table, listed), _) = update::<Slots, _>(TABLE, &self.blobs, |table| {
            let listed = table.list(endpoint);
            ((*table, listed), listed == Some(true))
        });
        if listed.is_none() {
            self.uncounted.one();
            return None;
        }
        self.meet(&table, now);
        self.find(endpoint)
    }

    fn find(&self, endpoint: Endpoint) -> Option<Rc<Served>> {
        self.replicas.borrow().iter().find(|served| served.endpoint == endpoint).cloned()
    }

    /// Makes sure that this VM has a slot, unless there is none. A VM claims at its first request: those of the main thread are
    /// configured too and serve none.
    pub(super) fn ensure_slot(&self, now: Micros) {
        if self.claim.get().is_none() && !self.slotless.get() {
            self.take_slot(now);
        }
    }

    fn take_slot(&self, now: Micros) {
        let ((claim, more), written) = update::<Slots, _>(TABLE, &self.blobs, |table| {
            let before = table.used();
            let claim = table.claim(now);
            ((claim, table.used() > before), claim.is_some())
        });
        let claim = claim.filter(|_| written);
        self.claim.set(claim);
        self.slotless.set(claim.is_none());
        match claim {
            // Added, not set: two VMs may claim at once.
            Some(_) => {
                self.used.add(u32::from(more));
                self.claimed.one();
                self.publish();
            }
            None => self.full.one(),
        }
    }

    /// Shows that this VM lives, takes the counts of dead ones away, and sets its own right.
    pub(super) fn tick(&self, now: Micros) {
        // Every root of the VM ticks; once is enough.
        let half = u64::from(HEARTBEAT_MS) * 500;
        if self.ticked.get().is_some_and(|at| now >= at && now.saturating_since(at) < half) {
            return;
        }
        let judge = can_judge(self.ticked.replace(Some(now)), now);
        let claim = self.claim.get();
        let ((table, kept, freed), written) = update::<Slots, _>(TABLE, &self.blobs, |table| {
            let kept = claim.is_some_and(|claim| table.renew(claim, now));
            let freed = if judge { table.expire(now) } else { 0 };
            ((*table, kept, freed), kept || freed > 0)
        });
        if written {
            self.freed.add(freed);
        }
        if claim.is_some() && !kept {
            // It hung, and was taken for dead.
            self.lost.one();
            self.claim.set(None);
            self.slotless.set(true);
        }
        self.meet(&table, now);
        for served in self.replicas.borrow().iter() {
            served.sweep(&table, self.used());
            served.sample(self, now);
        }
        if self.slotless.get() {
            self.take_slot(now);
        }
        self.publish();
    }

    /// Gets to know the replicas that the table lists.
    fn meet(&self, table: &Slots, now: Micros) {
        for endpoint in table.replicas() {
            if self.find(*endpoint).is_none() {
                let served = Served::new(*endpoint, &self.namespace, now);
                served.sweep(table, self.used());
                self.replicas.borrow_mut().push(Rc::new(served));
            }
        }
    }

    fn publish(&self) {
        for served in self.replicas.borrow().iter() {
            served.publish(self);
        }
    }
}
