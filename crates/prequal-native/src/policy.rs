//! The load-balancing policy: one object for each configuration, and one for each thread, which chooses hosts.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use prequal_core::client::settings::ClusterConfig;
use prequal_core::config::FilterConfig;
use prequal_core::shared::endpoint::Endpoint;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::attempt::{self, EndingsRef};
use crate::clock;
use crate::detour::{self, DetourRef};
use crate::envoy::{self, Lb, LbConfig, Retry};
use crate::hosts::{Hosts, Place};
use crate::metrics::Metrics;
use crate::prober;
use crate::worker::{Worker, WorkerRef};

/// One configuration of the policy.
pub(crate) struct PolicyConfig {
    clusters: Vec<(ClusterConfig, Arc<Metrics>)>,
    /// The main thread, on which Envoy reads configurations. Its policy objects serve no requests.
    main: ThreadId,
}

impl PolicyConfig {
    /// Reads the configuration, which has the same format as the WebAssembly filter's.
    ///
    /// # Errors
    /// Every problem, each with its field.
    pub(crate) fn read(host: LbConfig, text: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(text).map_err(|_| "the configuration is not UTF-8".to_owned())?;
        let clusters = FilterConfig::parse_native(text).map_err(|errors| errors.to_string())?.clusters;
        let define = |cluster: ClusterConfig| {
            let metrics = Arc::new(Metrics::define(host, &cluster.cluster));
            (cluster, metrics)
        };
        let clusters = clusters.into_iter().map(define).collect();
        Ok(Self { clusters, main: thread::current().id() })
    }

    /// Creates the policy of one thread for the cluster.
    pub(crate) fn policy(&self, cluster: &str) -> Policy {
        let found = self.clusters.iter().find(|(config, _)| config.cluster == cluster);
        let main = thread::current().id() == self.main;
        let worker = found.map(|(config, metrics)| {
            let worker = Rc::new(RefCell::new(Worker::new(config.clone(), clock::now())));
            if main {
                prober::add(&worker, metrics);
            }
            worker
        });
        if main && worker.is_none() {
            envoy::warn(&format!(
                "prequal: `clusters` does not list \"{cluster}\", so its requests are balanced without load reports"
            ));
        }
        if main && !prober::is_running() {
            envoy::warn("prequal: no bootstrap extension of Prequal is configured, so no probes are sent");
        }
        let choice = found.map(|(config, _)| config.choice.clone()).unwrap_or_default();
        Policy {
            worker,
            main,
            panic_threshold: choice.healthy_panic_threshold,
            locality_weighted: choice.locality_weighted,
            hosts: Hosts::default(),
            detour: detour::of(cluster),
            endings: attempt::endings_of(cluster),
            rng: SmallRng::from_os_rng(),
        }
    }
}

/// The policy of one cluster on one thread.
pub(crate) struct Policy {
    /// `None` if the configuration does not list the cluster.
    worker: Option<WorkerRef>,
    main: bool,
    /// Envoy's `healthy_panic_threshold`, per cent.
    panic_threshold: u32,
    locality_weighted: bool,
    hosts: Hosts,
    detour: DetourRef,
    endings: EndingsRef,
    rng: SmallRng,
}

impl Policy {
    /// Handles a change of the host set: hosts, health, weights or priorities.
    pub(crate) fn hosts_changed(&mut self, lb: Lb<'_>) {
        self.hosts = Hosts::new(&lb.levels(self.locality_weighted), self.panic_threshold);
        let others = self.hosts.take_others();
        self.detour.borrow_mut().set(self.hosts.total(), &others);
        // Envoy updates the main thread first. The workers adopt what the main thread writes.
        if let (Some(worker), true) = (&self.worker, self.main) {
            worker.borrow_mut().set_fleet(self.hosts.fleet());
            if prober::is_running() {
                prober::wake();
            } else {
                worker.borrow_mut().follow_fleet(clock::now());
            }
        }
    }

    /// Chooses a host for one attempt; `None` if there is none.
    pub(crate) fn choose(&mut self, lb: Lb<'_>, retry: Retry<'_>) -> Option<Place> {
        let Some(worker) = self.worker.clone() else { return Some(self.fall_back(lb, retry)?.0) };
        let (request, wake) = worker.borrow_mut().begin(clock::now());
        #[cfg(feature = "crash-test")]
        retry.crash_on_demand();
        let chosen =
            request.pick.replica.and_then(|replica| Some((self.hosts.place(replica)?, Some(replica))));
        let usable = chosen.filter(|(place, _)| !retry.refuses(*place));
        let placed = usable.or_else(|| self.fall_back(lb, retry));
        let served_by = placed.and_then(|(_, endpoint)| endpoint);
        attempt::chosen(&worker, &self.endings, request, served_by, placed.is_some());
        if wake {
            prober::wake();
        }
        Some(placed?.0)
    }

    /// Chooses by weight and requests in flight alone, like Envoy's least_request. If a retry must not use the host,
    /// this chooses again, as often as Envoy's policies do.
    fn fall_back(&mut self, lb: Lb<'_>, retry: Retry<'_>) -> Option<(Place, Option<Endpoint>)> {
        let Self { hosts, rng, .. } = self;
        let mut draw = || hosts.fall_back(rng, |place| lb.in_flight(place));
        let mut placed = draw()?;
        for _ in 0..retry.tries() {
            if !retry.refuses(placed.0) {
                break;
            }
            placed = draw()?;
        }
        Some(placed)
    }
}

impl Drop for Policy {
    fn drop(&mut self) {
        if let Some(worker) = &self.worker {
            attempt::forget(worker);
            prober::remove(worker);
        }
        detour::remove(&self.detour);
    }
}
