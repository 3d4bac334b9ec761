//! One upstream cluster on one thread of Envoy, and what Envoy's threads share about the cluster.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use prequal_core::client::pool::ProbesDue;
use prequal_core::client::settings::{ClusterConfig, Shim};
use prequal_core::client::{Balancer, Request, Tick};
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::metrics::{Metrics, Tally};
use crate::store::Shared;

/// Period of the work that is not urgent, microseconds. Envoy has no timers for policies, so a worker does it at the
/// next pick after the period; the main thread has a timer.
pub(crate) const TICK_US: u64 = 250_000;

/// What the threads share about one upstream cluster. It outlives configurations: after an update, the same pool
/// remains in use.
#[derive(Default)]
pub(crate) struct Common {
    /// Pool, membership, ejections.
    pub(crate) values: Shared,
    /// Probes that picks have asked for and the prober has not yet sent.
    due: AtomicU32,
    /// Whether the prober has been woken and has not yet taken what is due.
    woken: AtomicBool,
    /// The counts of every thread, in all configurations that still have requests in flight.
    tallies: Mutex<Vec<Tally>>,
}

impl Common {
    /// Returns what is shared about the cluster of this name.
    pub(crate) fn of(cluster: &str) -> Arc<Self> {
        static ALL: Mutex<Option<HashMap<String, Arc<Common>>>> = Mutex::new(None);
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.get_or_insert_default().entry(cluster.to_owned()).or_default())
    }

    /// Adds probes that are due. Returns true if the prober must be woken.
    pub(crate) fn ask(&self, probes: ProbesDue) -> bool {
        let count = probes.addressed + probes.discovery;
        if count == 0 {
            // This is the case for most picks. They must not write to memory that all threads share.
            return false;
        }
        self.due.fetch_add(count, Ordering::Relaxed);
        !self.woken.swap(true, Ordering::AcqRel)
    }

    /// Passes the counts of all threads to Envoy.
    fn tell(&self, metrics: &Metrics) {
        let mut tallies = self.tallies.lock().unwrap_or_else(PoisonError::into_inner);
        tallies.retain(|tally| {
            let in_use = !tally.is_abandoned();
            metrics.tell(tally);
            in_use
        });
    }

    /// Takes the probes that are due.
    pub(crate) fn take(&self) -> ProbesDue {
        self.woken.swap(false, Ordering::AcqRel);
        ProbesDue { addressed: self.due.swap(0, Ordering::AcqRel), discovery: 0 }
    }
}

/// One upstream cluster on one thread. The policy and the requests in flight share it.
pub(crate) struct Worker {
    pub(crate) balancer: Balancer<Shared, Tally>,
    pub(crate) rng: SmallRng,
    pub(crate) common: Arc<Common>,
    /// The fleet according to Envoy; only the main thread's worker knows it, after the first change of the host set.
    fleet: Option<Vec<(Endpoint, u16)>>,
    /// Whether the fleet has changed since it was last applied.
    fleet_changed: bool,
    ticked: Option<Micros>,
}

pub(crate) type WorkerRef = Rc<RefCell<Worker>>;

impl Worker {
    pub(crate) fn new(config: ClusterConfig, now: Micros) -> Self {
        let common = Common::of(&config.cluster);
        let tally = Tally::new();
        common.tallies.lock().unwrap_or_else(PoisonError::into_inner).push(tally.clone());
        // Only the WebAssembly filter needs a shim to carry out its choice.
        let balancer =
            Balancer::new(config, Shim::StatefulSession, &common.values, tally, now).with_known_fleet();
        Self {
            balancer,
            rng: SmallRng::from_os_rng(),
            common,
            fleet: None,
            fleet_changed: false,
            ticked: None,
        }
    }

    /// Name of the cluster.
    pub(crate) fn cluster(&self) -> &str {
        &self.balancer.config().cluster
    }

    /// Chooses a replica for one request. If the worker's tick is due, it comes first. The second value is whether to
    /// wake the prober.
    pub(crate) fn begin(&mut self, now: Micros) -> (Request, bool) {
        let mut wake = false;
        if self.ticked.is_none_or(|at| now.saturating_since(at) >= TICK_US) {
            let probes = self.tick(now).probes;
            wake = self.common.ask(probes);
        }
        let request = self.balancer.begin(now, &[], false, &mut self.rng);
        wake |= self.common.ask(request.pick.probes);
        (request, wake)
    }

    fn tick(&mut self, now: Micros) -> Tick {
        self.ticked = Some(now);
        self.balancer.tick(now, &mut self.rng)
    }

    /// Does the main thread's periodic work, which includes the metrics. Returns the idle probes that are due. Idle
    /// probes are sent while no requests arrive.
    pub(crate) fn tick_main(&mut self, metrics: &Metrics, now: Micros) -> ProbesDue {
        self.apply_fleet(now);
        let tick = self.tick(now);
        metrics.show(&tick);
        self.common.tell(metrics);
        tick.probes
    }

    /// Notes the fleet according to Envoy. It is applied once the current change is over, because Envoy may announce a
    /// change in parts.
    pub(crate) fn set_fleet(&mut self, fleet: Vec<(Endpoint, u16)>) {
        (self.fleet, self.fleet_changed) = (Some(fleet), true);
    }

    /// Applies the fleet if it has changed.
    pub(crate) fn follow_fleet(&mut self, now: Micros) {
        if self.fleet_changed {
            self.apply_fleet(now);
        }
    }

    /// Sets the membership to the fleet according to Envoy. Members that threads learn from responses and replies must
    /// not stay if Envoy does not have them.
    fn apply_fleet(&mut self, now: Micros) {
        self.fleet_changed = false;
        if let Some(fleet) = &mut self.fleet {
            self.balancer.set_fleet(now, fleet, &mut self.rng);
        }
    }
}
