//! The policies under test, and the mapping between the simulator's server numbers and the core's endpoints.

use prequal_core::client::policies::local_rif::LocalRif;
use prequal_core::client::policies::peak_ewma::{PeakEwma, Scan};
use prequal_core::client::policies::zuul::Zuul;
use prequal_core::client::pool::PoolSettings;
use prequal_core::client::reply::Reply;
use prequal_core::client::settings::{ChoiceSettings, ClusterConfig, Mode, ProbeSettings, Rule, Shim};
use prequal_core::client::store::Memory;
use prequal_core::client::sync_mode::SyncSettings;
use prequal_core::client::{Balancer as Core, Class, Witness};
use prequal_core::server::tracker::TrackerConfig;
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;
use prequal_core::wire::report::LoadReport;
use rand::Rng;
use rand::rngs::SmallRng;

use super::policies::SimPolicy;
use super::policies::cswrr::{Cswrr, Settings};
use super::policies::edf::Edf;
use super::policies::least_loaded::{LeastLoaded, LeastLoadedPo2c};
use super::policies::uniform::{Random, RoundRobin};
use super::policies::weighted::WeightedRoundRobin;
use super::policies::yarp::{PAPER_POLL_MS, Yarp};
use super::server::{Nanos, endpoint, micros};

/// A policy with its settings.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SimArm {
    Random,
    RoundRobin,
    WeightedRoundRobin,
    /// Envoy's `client_side_weighted_round_robin`, weighted by the reports on responses.
    Cswrr(Settings),
    LeastLoaded,
    LeastLoadedPo2c,
    Yarp,
    PeakEwma(Scan),
    /// The value is the replicas' configured maximum of requests in flight.
    Zuul(u32),
    Prequal(Prequal),
    /// A greedy rule that knows every server's current queue, capacity and speed, as no real policy can.
    Floor,
}

/// Prequal, or another rule on its pool.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Prequal {
    pub(crate) pool: PoolSettings,
    pub(crate) probe: ProbeSettings,
    /// The selection rule. C3 uses the scenario's number of clients.
    pub(crate) rule: Rule,
    /// Settings of the synchronous mode, if used.
    pub(crate) sync: Option<SyncSettings>,
    /// Whether servers estimate latency by the paper's rules only.
    pub(crate) paper_tracker: bool,
    /// Whether members are learned from unaddressed probes, as in the filter, instead of being known from the start.
    pub(crate) learn: bool,
    pub(crate) fallback: Fallback,
}

/// Places the queries for which the pool chooses no server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Fallback {
    /// A random server, as in the paper (§4).
    Random,
    /// `least_request` with two choices, as in the shipped configuration.
    LeastRequest,
}

/// How often a balancer polls, if at all.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Polling {
    None,
    Rif { every_ms: u64 },
    Utilisation,
}

impl SimArm {
    pub(crate) fn polling(&self) -> Polling {
        match self {
            Self::Yarp => Polling::Rif { every_ms: PAPER_POLL_MS },
            Self::WeightedRoundRobin => Polling::Utilisation,
            _ => Polling::None,
        }
    }

    /// The servers' latency estimator: the paper's for the paper's policies, else the shipped one. C3 needs the shipped
    /// one: an overloaded server answers only requests without work, so the paper's estimator would take it for the
    /// fastest.
    pub(crate) fn tracker(&self) -> TrackerConfig {
        match self {
            Self::Prequal(Prequal { paper_tracker: true, .. }) => {
                TrackerConfig { stall_factor: 0, ..TrackerConfig::default() }
            }
            _ => TrackerConfig::default(),
        }
    }

    /// Whether answers must carry the server's report.
    pub(crate) fn reads_answers(&self) -> bool {
        match self {
            Self::Zuul(_) => true,
            Self::Prequal(prequal) => prequal.probe.piggyback,
            _ => false,
        }
    }

    /// Whether answers must carry an ORCA report.
    pub(crate) fn reads_orca(&self) -> bool {
        matches!(self, Self::Cswrr(_))
    }
}

pub(crate) enum Balancer {
    Simple(Box<dyn SimPolicy>),
    /// With the client's own queries in flight, if [`Fallback::LeastRequest`] needs them.
    Prequal(Box<Core<Memory, ()>>, Option<LocalRif>),
    Floor,
}

impl Balancer {
    /// The balancer of one of `clients` clients over the servers with these `weights`, of which the first `known` exist.
    pub(crate) fn new(
        arm: &SimArm,
        clients: usize,
        weights: &[u32],
        known: usize,
        rng: &mut SmallRng,
    ) -> Self {
        let simple = |policy: Box<dyn SimPolicy>| Self::Simple(policy);
        let servers = weights.len();
        let weighted = weights.windows(2).any(|pair| pair[0] != pair[1]);
        match arm {
            SimArm::RoundRobin | SimArm::LeastLoaded if weighted => {
                simple(Box::new(Edf::new(weights, *arm == SimArm::LeastLoaded, rng)))
            }
            SimArm::Random => simple(Box::new(Random::new(servers))),
            SimArm::RoundRobin => simple(Box::new(RoundRobin::new(servers, rng.random_range(0..servers)))),
            SimArm::WeightedRoundRobin => {
                let phases = (0..servers).map(|_| rng.random()).collect();
                simple(Box::new(WeightedRoundRobin::new(phases, 0.0)))
            }
            SimArm::Cswrr(settings) => simple(Box::new(Cswrr::new(servers, *settings, micros(0), rng))),
            SimArm::LeastLoaded => simple(Box::new(LeastLoaded::new(servers, rng.random_range(0..servers)))),
            SimArm::LeastLoadedPo2c => simple(Box::new(LeastLoadedPo2c::new(servers))),
            SimArm::Yarp => simple(Box::new(Yarp::new(servers))),
            SimArm::PeakEwma(scan) => simple(Box::new(PeakEwma::new(servers, *scan))),
            SimArm::Zuul(most) => simple(Box::new(Zuul::new(servers, *most))),
            SimArm::Prequal(prequal) => {
                let config = prequal.config(clients, known);
                let core = Core::new(config, Shim::StatefulSession, &Memory, (), micros(0));
                let counts = prequal.fallback == Fallback::LeastRequest;
                Self::Prequal(Box::new(core), counts.then(|| LocalRif::new(servers)))
            }
            SimArm::Floor => Self::Floor,
        }
    }
}

impl Prequal {
    fn config(&self, clients: usize, known: usize) -> ClusterConfig {
        let rule = match self.rule {
            Rule::C3 { .. } => Rule::C3 { clients: clients as u32 },
            rule => rule,
        };
        let choice = ChoiceSettings {
            rule,
            mode: if self.sync.is_some() { Mode::Sync } else { Mode::Async },
            sync: self.sync.unwrap_or_default(),
            ..ChoiceSettings::default()
        };
        let mut pool = self.pool.clone();
        if !self.learn {
            pool.discovery_interval_ms = PoolSettings::NO_DISCOVERY;
        }
        ClusterConfig {
            cluster: String::new(),
            probe_cluster: String::new(),
            pool,
            probe: self.probe.clone(),
            choice,
            endpoints: (0..if self.learn { 0 } else { known }).map(endpoint).collect(),
        }
    }
}

/// Report by a client's Envoy on a query that has ended at `server`.
pub(crate) struct Proxy {
    pub(crate) now: Nanos,
    pub(crate) server: usize,
    pub(crate) class: Class,
}

impl Witness for Proxy {
    fn now(&self) -> Micros {
        micros(self.now)
    }

    fn is_ours(&self) -> bool {
        true
    }

    fn served_by(&self) -> Option<Endpoint> {
        Some(endpoint(self.server))
    }

    fn class(&self) -> Class {
        self.class
    }

    fn attempts(&self) -> u64 {
        1
    }
}

/// Puts a server's own address into its report.
pub(crate) fn named(server: usize, report: LoadReport) -> LoadReport {
    LoadReport { endpoint: Some(endpoint(server)), ..report }
}

/// Makes a server's report the reply to a probe.
pub(crate) fn reply(server: usize, report: LoadReport) -> Reply {
    Reply { report: Ok(named(server, report)), host: Some(endpoint(server)) }
}
