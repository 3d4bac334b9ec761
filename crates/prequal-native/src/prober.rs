//! The bootstrap extension: sends the probes of all clusters from Envoy's main thread, and ticks there.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::{Arc, OnceLock};

use prequal_core::client::ProbeEnd;
use prequal_core::client::members::Target;
use prequal_core::client::pool::ProbesDue;
use prequal_core::client::reply::Reply;
use prequal_core::wire::headers::Headers;
use prequal_core::wire::report::{HEADER_DEST, PROBE_PATH};

use crate::clock;
use crate::envoy::{Bootstrap, Scheduler};
use crate::metrics::{Metrics, SENT, UNDISPATCHED};
use crate::worker::{TICK_US, Worker, WorkerRef};

/// Maximum number of probes in flight. Beyond this, the probe clusters are not answering and more probes would not
/// help.
const MAX_IN_FLIGHT: usize = 1024;
/// Period of the main thread's timer, milliseconds.
pub(crate) const TICK_MS: u64 = TICK_US / 1000;

/// Wakes the prober from any thread. It stays for the life of the process, as a bootstrap extension does.
static SCHEDULER: OnceLock<Scheduler> = OnceLock::new();

/// One cluster to probe for, with its metrics.
struct Probed {
    cluster: String,
    worker: Weak<RefCell<Worker>>,
    metrics: Arc<Metrics>,
}

thread_local! {
    /// The clusters to probe for, on the main thread.
    static CLUSTERS: RefCell<Vec<Probed>> = const { RefCell::new(Vec::new()) };
    /// The probes whose replies have not arrived, by the number that Envoy gave the call.
    static PROBES: RefCell<HashMap<u64, Probe>> = RefCell::new(HashMap::new());
}

/// A probe whose reply has not arrived.
struct Probe {
    worker: Weak<RefCell<Worker>>,
    target: Target,
}

/// Registers the prober of this process.
///
/// # Errors
/// If there is one already.
pub(crate) fn start(scheduler: Scheduler) -> Result<(), String> {
    SCHEDULER.set(scheduler).map_err(|_| "there is already a bootstrap extension of Prequal".to_owned())
}

/// Whether this process has a prober.
pub(crate) fn is_running() -> bool {
    SCHEDULER.get().is_some()
}

/// Wakes the prober, from any thread.
pub(crate) fn wake() {
    if let Some(scheduler) = SCHEDULER.get() {
        scheduler.commit();
    }
}

/// Adds a cluster to probe for, on the main thread. It replaces the entry of the cluster's previous configuration, and
/// is removed when its policy ends.
pub(crate) fn add(worker: &WorkerRef, metrics: &Arc<Metrics>) {
    let cluster = worker.borrow().cluster().to_owned();
    CLUSTERS.with_borrow_mut(|all| {
        all.retain(|probed| probed.cluster != cluster && probed.worker.strong_count() > 0);
        all.push(Probed { cluster, worker: Rc::downgrade(worker), metrics: Arc::clone(metrics) });
    });
}

/// Removes a cluster when its policy ends, because Envoy's side of the metrics may then end as well.
pub(crate) fn remove(worker: &WorkerRef) {
    let of_worker = |probed: &Probed| std::ptr::eq(probed.worker.as_ptr(), Rc::as_ptr(worker));
    CLUSTERS.with_borrow_mut(|all| all.retain(|probed| !of_worker(probed)));
}

/// Returns the clusters to probe for. Calls to Envoy may change the list, so it is not borrowed while the clusters are
/// in use.
fn clusters() -> Vec<(WorkerRef, Arc<Metrics>)> {
    let live = |probed: &Probed| Some((probed.worker.upgrade()?, Arc::clone(&probed.metrics)));
    CLUSTERS.with_borrow(|all| all.iter().filter_map(live).collect())
}

/// Does what threads have asked for: adopts changes of host sets, and sends the probes that are due.
pub(crate) fn serve(bootstrap: Bootstrap<'_>) {
    for (worker, _) in clusters() {
        worker.borrow_mut().follow_fleet(clock::now());
        let due = worker.borrow().common.take();
        send(bootstrap, &worker, due);
    }
}

/// Does the periodic work of every cluster.
pub(crate) fn tick(bootstrap: Bootstrap<'_>) {
    for (worker, metrics) in clusters() {
        let due = worker.borrow_mut().tick_main(&metrics, clock::now());
        send(bootstrap, &worker, due);
    }
}

fn send(bootstrap: Bootstrap<'_>, worker: &WorkerRef, due: ProbesDue) {
    if due.is_empty() {
        return;
    }
    // Envoy provides the membership, so nothing needs to be discovered. Discovery probes go to replicas without recent
    // reports instead.
    let due = ProbesDue { addressed: due.addressed + due.discovery, discovery: 0 };
    let (targets, cluster, timeout_ms) = {
        let mut guard = worker.borrow_mut();
        let Worker { balancer, rng, .. } = &mut *guard;
        let targets = balancer.targets(due, clock::now(), rng);
        (targets, balancer.config().probe_cluster.clone(), balancer.config().probe.timeout_ms)
    };
    for target in targets.into_iter().flatten() {
        let address = target.probe.to_string();
        let headers = [
            (":method", "GET"),
            (":path", PROBE_PATH),
            (":authority", "prequal"),
            (HEADER_DEST, address.as_str()),
        ];
        let full = PROBES.with_borrow(HashMap::len) >= MAX_IN_FLIGHT;
        // The hook for the reply may run during this call, so nothing may be borrowed here. In that case, Envoy also
        // refuses the call, and the hook finds no probe with the call's number.
        let number = (!full).then(|| bootstrap.call(&cluster, &headers, timeout_ms)).flatten();
        let worker_now = worker.borrow();
        let counters = worker_now.balancer.counters();
        match number {
            Some(number) => {
                counters.one(SENT);
                let probe = Probe { worker: Rc::downgrade(worker), target };
                PROBES.with_borrow_mut(|probes| probes.insert(number, probe));
            }
            None => counters.one(UNDISPATCHED),
        }
    }
}

/// Handles the reply to a call; `headers` is `None` if there was no reply.
pub(crate) fn replied(number: u64, headers: Option<&impl Headers>) {
    let Some(probe) = PROBES.with_borrow_mut(|probes| probes.remove(&number)) else { return };
    let Some(worker) = probe.worker.upgrade() else { return };
    let mut guard = worker.borrow_mut();
    let Worker { balancer, rng, .. } = &mut *guard;
    let now = clock::now();
    let verified = balancer.config().pool.verified_probes;
    let reply: Result<Reply, ProbeEnd> =
        headers.map_or(Err(ProbeEnd::Refused), |headers| Reply::read(headers, verified));
    balancer.replied(now, Some(probe.target), false, reply);
    // A pick would apply the reported load. The main thread makes no picks, so the load is applied here.
    balancer.apply(now, rng);
}
