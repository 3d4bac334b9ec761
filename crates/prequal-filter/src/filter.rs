//! State shared by the root and the streams of one worker: a balancer per upstream cluster, and the waiting requests.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use prequal_core::client::pool::ProbesDue;
use prequal_core::client::settings::{ClusterConfig, Mode, Shim};
use prequal_core::client::sync_mode::Answer;
use prequal_core::client::sync_mode::Waits;
use prequal_core::client::{Balancer, Request};
use prequal_core::config::FilterConfig;
use prequal_core::shared::time::Micros;
use prequal_core::wire::hint::HintHash;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::host;
use crate::metrics::Metrics;
use crate::store::{Blobs, blobs_of};

/// One generation of the filter on one worker. A configuration update creates a new generation beside it.
pub(crate) struct Filter {
    pub(crate) root_id: u32,
    pub(crate) shim: Shim,
    pub(crate) clusters: Vec<Cluster>,
    /// Whether the cluster of each request is looked up. This is set from the start if several clusters are configured.
    /// Otherwise it is set once a request has gone to a cluster that is not configured.
    pub(crate) look_up_cluster: Cell<bool>,
    pub(crate) rng: RefCell<SmallRng>,
    /// The request that asks to wait for its probes. Its stream stores it here and wakes the root.
    pub(crate) ask: Cell<Option<Ask>>,
    pub(crate) waits: RefCell<Waits<Waiter>>,
}

/// One upstream cluster.
pub(crate) struct Cluster {
    name: String,
    pub(crate) balancer: RefCell<Balancer<Blobs, Metrics>>,
    pub(crate) metrics: Metrics,
    /// Probes that picks have asked for and the root has not yet sent.
    pub(crate) probes_due: Cell<ProbesDue>,
}

/// The choice for a waiting request. The stream reads it once the request resumes.
pub(crate) type Placed = Rc<Cell<Option<Request>>>;

/// A request that asks to wait for its probes.
pub(crate) struct Ask {
    pub(crate) stream: u32,
    pub(crate) began: Micros,
    pub(crate) waiter: Waiter,
}

/// Data that the root needs about a waiting request.
pub(crate) struct Waiter {
    pub(crate) cluster: usize,
    pub(crate) hint: Option<HintHash>,
    /// Whether the client has sent the whole request.
    pub(crate) whole: bool,
    pub(crate) placed: Placed,
}

impl Filter {
    pub(crate) fn new(root_id: u32, root_name: &str, config: FilterConfig, now: Micros) -> Self {
        let shim = config.shim;
        let clusters = config.clusters.into_iter();
        let clusters: Vec<Cluster> =
            clusters.map(|cluster| Cluster::new(root_name, cluster, shim, now)).collect();
        // The root id and the address distinguish the roots of one VM. Workers, each with a VM of its own, are
        // distinguished by the microsecond in which they start.
        let seed = now.0 ^ (u64::from(root_id) << 48) ^ ((&raw const clusters as u64) << 20);
        Self {
            root_id,
            shim,
            look_up_cluster: Cell::new(clusters.len() > 1),
            clusters,
            rng: RefCell::new(SmallRng::seed_from_u64(seed)),
            ask: Cell::default(),
            waits: RefCell::default(),
        }
    }

    /// Returns the index of the cluster that the route of the current request names.
    pub(crate) fn routed_cluster(&self) -> Option<usize> {
        let name = host::text_property(&["xds", "cluster_name"])?;
        self.clusters.iter().position(|cluster| cluster.name == name)
    }

    /// Chooses a replica for one request of a cluster: among `answers` if the request has waited for them, otherwise
    /// from the pool. `whole` is true if the client has already sent the whole request.
    pub(crate) fn begin(&self, cluster: &Cluster, now: Micros, answers: &[Answer], whole: bool) -> Request {
        cluster.balancer.borrow_mut().begin(now, answers, whole, &mut *self.rng.borrow_mut())
    }

    /// Applies the pending updates to the pool, refreshes the gauges, and returns the idle probes that are due. Idle
    /// probes are sent while no requests arrive.
    pub(crate) fn tick(&self, cluster: &Cluster, now: Micros) -> ProbesDue {
        let tick = cluster.balancer.borrow_mut().tick(now, &mut *self.rng.borrow_mut());
        cluster.metrics.show(&tick);
        tick.probes
    }
}

impl Cluster {
    fn new(root_name: &str, config: ClusterConfig, shim: Shim, now: Micros) -> Self {
        let metrics = Metrics::define(&config.cluster);
        let store = blobs_of(root_name, &config.cluster);
        let name = config.cluster.clone();
        let balancer = Balancer::new(config, shim, &store, metrics.clone(), now);
        Self { name, balancer: RefCell::new(balancer), metrics, probes_due: Cell::default() }
    }

    /// Returns the mode of the request that is the effective context: whether it waits for probes of its own.
    pub(crate) fn mode(&self) -> Mode {
        let balancer = self.balancer.borrow();
        let choice = &balancer.config().choice;
        // The property is read only where routes can differ in mode.
        if choice.route_modes.is_empty() {
            return choice.mode;
        }
        let route = host::text_property(&["xds", "route_name"]);
        let own_mode = choice.route_modes.iter().find(|(name, _)| Some(name) == route.as_ref());
        own_mode.map_or(choice.mode, |(_, mode)| *mode)
    }
}
