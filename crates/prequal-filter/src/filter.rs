//! What the root and the streams of one worker share: a balancer per upstream cluster, and the requests that wait.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use prequal_core::client::{Balancer, Request, Waits};
use prequal_core::config::{ClusterConfig, FilterConfig, Mode, Shim};
use prequal_core::hint::Hint;
use prequal_core::pool::ProbesDue;
use prequal_core::sync::Answer;
use prequal_core::time::Micros;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::host;
use crate::metrics::Metrics;
use crate::store::{Blobs, blobs_of};

/// One generation of the filter on one worker. A configuration update makes a new one beside it.
pub(crate) struct Filter {
    pub(crate) root_id: u32,
    pub(crate) shim: Shim,
    pub(crate) clusters: Vec<Cluster>,
    /// Set once a request went to a cluster that is not configured: from then on the cluster is looked up first.
    pub(crate) look_up_cluster: Cell<bool>,
    pub(crate) rng: RefCell<SmallRng>,
    /// From the stream that wakes the root, to the root.
    pub(crate) ask: Cell<Option<Ask>>,
    pub(crate) waits: RefCell<Waits<Waiter>>,
}

/// One upstream cluster.
pub(crate) struct Cluster {
    name: String,
    pub(crate) balancer: RefCell<Balancer<Blobs, Metrics>>,
    pub(crate) metrics: Metrics,
    /// Probes that picks have asked for and the root has not sent yet.
    pub(crate) probes_due: Cell<ProbesDue>,
}

/// The choice for a request that waits; the stream looks here once it goes on.
pub(crate) type Placed = Rc<Cell<Option<Request>>>;

/// A request that wants to wait.
pub(crate) struct Ask {
    pub(crate) stream: u32,
    pub(crate) began: Micros,
    pub(crate) waiter: Waiter,
}

/// What the root needs to know of a request that waits.
pub(crate) struct Waiter {
    pub(crate) cluster: usize,
    pub(crate) hint: Option<Hint>,
    /// The client has sent all of it.
    pub(crate) whole: bool,
    pub(crate) placed: Placed,
}

impl Filter {
    pub(crate) fn new(root_id: u32, root_name: &str, config: FilterConfig, now: Micros) -> Self {
        let shim = config.shim;
        let clusters = config.clusters.into_iter();
        let clusters: Vec<Cluster> =
            clusters.map(|cluster| Cluster::new(root_name, cluster, shim, now)).collect();
        // Workers start within milliseconds of each other: time alone would give them one sequence.
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

    /// The index of the cluster that the route of the current request names.
    pub(crate) fn routed_cluster(&self) -> Option<usize> {
        let name = host::text_property(&["xds", "cluster_name"])?;
        self.clusters.iter().position(|cluster| cluster.name == name)
    }

    /// Chooses for one request of a cluster: among `answers` if it has waited for them, else from the pool. The client has
    /// sent a `whole` request, or is still at it.
    pub(crate) fn begin(&self, cluster: &Cluster, now: Micros, answers: &[Answer], whole: bool) -> Request {
        cluster.balancer.borrow_mut().begin(now, answers, whole, &mut *self.rng.borrow_mut())
    }

    /// Takes the waiting updates into the pool, refreshes the gauges, and says which probes are due for lack of requests.
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

    /// Whether the request that is the effective context waits for probes of its own.
    pub(crate) fn mode(&self) -> Mode {
        let balancer = self.balancer.borrow();
        let choice = &balancer.config().choice;
        // The property is read only where a route can differ.
        let of_route = (!choice.route_modes.is_empty()).then(|| host::text_property(&["xds", "route_name"]));
        let of_route = of_route.flatten();
        let of_route = of_route.and_then(|route| choice.route_modes.iter().find(|(name, _)| *name == route));
        of_route.map_or(choice.mode, |(_, mode)| *mode)
    }
}
