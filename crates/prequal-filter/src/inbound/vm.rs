//! This VM among the VMs of one Envoy: its slot, its heartbeat, and the replicas that it counts for.
//!
//! All of this belongs to the VM and not to a root. An update of the listener creates a second root in the same VM,
//! and the requests of both roots count together.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use prequal_core::client::labels;
use prequal_core::server::inbound::slots::{Claim, HEARTBEAT_MS, MAX_SLOTS, Slots, can_judge};
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;

use super::served::{Served, SlotView};
use crate::host;
use crate::metrics::{BlobCounters, Counter, Gauge};
use crate::store::{seed, update};

/// Period at which a root of this role ticks.
pub(crate) const TICK: Duration = Duration::from_millis(HEARTBEAT_MS as u64);

/// Key of the slot table. Its prefix is needed because in Istio all plugins share one namespace. The table has had one
/// version so far. A new version needs a new key and new gauge names, because each table assigns slots from 0.
const TABLE: &str = "prequal/1/inbound/slots";

thread_local! {
    static VM: Rc<Vm> = Rc::new(Vm::new());
}

/// The state of this VM.
pub(crate) struct Vm {
    /// Suffix of the gauges' names. It depends on this VM's namespace of shared data, so that each namespace has its
    /// own gauges.
    pub(super) namespace: String,
    claim: Cell<Option<Claim>>,
    /// Whether this VM counts requests but has no slot. It then tries to get one at every tick.
    slotless: Cell<bool>,
    ticked: Cell<Option<Micros>>,
    replicas: RefCell<Vec<Rc<Served>>>,
    /// Upper bound on the number of slots in use by all VMs.
    used: Gauge,
    claimed: Counter,
    freed: Counter,
    lost: Counter,
    full: Counter,
    uncounted: Counter,
    blobs: BlobCounters,
}

impl SlotView for Vm {
    fn slot(&self) -> Option<usize> {
        self.claim.get().map(|claim| claim.index)
    }

    fn used(&self) -> usize {
        let used = usize::try_from(self.used.get()).unwrap_or(MAX_SLOTS).min(MAX_SLOTS);
        used.max(self.slot().map_or(0, |slot| slot + 1))
    }
}

impl Vm {
    /// Returns this VM's state. Call it only from a callback of a root or a stream.
    pub(crate) fn this() -> Rc<Self> {
        VM.with(Rc::clone)
    }

    fn new() -> Self {
        seed::<Slots>(TABLE);
        let vm_id = host::text_property(&["plugin_vm_id"]).unwrap_or_default();
        let namespace =
            if vm_id.is_empty() { String::new() } else { format!(".vm={}", labels::value(&vm_id)) };
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

    /// Returns the replica `endpoint`; `None` if too many replicas are counted.
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
        self.learn(&table, now);
        self.find(endpoint)
    }

    fn find(&self, endpoint: Endpoint) -> Option<Rc<Served>> {
        self.replicas.borrow().iter().find(|served| served.endpoint == endpoint).cloned()
    }

    /// Makes sure that this VM has a slot, if one is available. A VM claims a slot at its first request, because the
    /// VMs of the main thread are also configured but serve no requests.
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
            // The gauge is incremented, not set, because two VMs may claim slots at the same time.
            Some(_) => {
                self.used.add(u32::from(more));
                self.claimed.one();
                self.publish();
            }
            None => self.full.one(),
        }
    }

    /// Shows that this VM is alive, clears the counts of dead VMs, and publishes its own counts again.
    pub(super) fn tick(&self, now: Micros) {
        // Every root of the VM ticks, but one tick per period is enough.
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
            // This VM hung and was presumed dead.
            self.lost.one();
            self.claim.set(None);
            self.slotless.set(true);
        }
        self.learn(&table, now);
        for served in self.replicas.borrow().iter() {
            served.sweep(&table, self.used());
            served.sample(self, now);
        }
        if self.slotless.get() {
            self.take_slot(now);
        }
        self.publish();
    }

    /// Adds the replicas that the table lists and this VM does not yet know.
    fn learn(&self, table: &Slots, now: Micros) {
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
