//! Settings of the client's side for one upstream cluster. [`crate::config`] reads them and has their defaults.

use super::policies::linear::Linear;
use super::pool::PoolSettings;
use super::sync_mode::SyncSettings;
use crate::shared::endpoint::Endpoint;
use crate::wire::hint::HintSource;
use crate::wire::orca::backend::Metric;

/// Settings of one upstream cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterConfig {
    /// Name of the serving cluster in Envoy.
    pub cluster: String,
    /// Name of the cluster that probes are sent through; it has the same endpoints as `cluster`.
    pub probe_cluster: String,
    /// Settings of the pool.
    pub pool: PoolSettings,
    /// Settings of the probes.
    pub probe: ProbeSettings,
    /// How a request finds its replica.
    pub choice: ChoiceSettings,
    /// Replicas listed by hand, for static fleets and tests. If empty, replicas are learned.
    pub endpoints: Vec<Endpoint>,
}

/// How probes are sent and which reports count.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeSettings {
    /// Time after which an unanswered probe counts as failed, milliseconds, 1 to 10 000. Envoy's timers are off by up
    /// to 4 ms in either direction.
    pub timeout_ms: u64,
    /// Time without a request after which one worker probes, milliseconds, 0 (off) to 3 600 000.
    pub idle_interval_ms: u32,
    /// Whether reports on responses count. If so, probes skip replicas that have reported recently, such as those just
    /// chosen.
    pub piggyback: bool,
}

/// How the choice reaches Envoy's host selection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Shim {
    /// `stateful_session` in header mode (default): honours health, outlier ejection and draining.
    StatefulSession,
    /// The `override_host` policy: ignores health.
    OverrideHost,
}

/// How the requests of a cluster find their replicas.
#[derive(Clone, Debug, PartialEq)]
pub struct ChoiceSettings {
    /// Rule by which the best replica is chosen.
    pub rule: Rule,
    /// Whether a request waits for its own probes.
    pub mode: Mode,
    /// Modes for named routes of Envoy.
    pub route_modes: Vec<(String, Mode)>,
    /// Settings of the synchronous mode.
    pub sync: SyncSettings,
    /// Source of the query hints that synchronous probes carry.
    pub hint: Option<HintSource>,
    /// Metric of replicas' own ORCA reports that a rule without probes uses as utilisation; `None`: such reports are
    /// not read.
    pub orca: Option<Metric>,
    /// Share of usable hosts below which a priority is in panic, per cent, 0 (never) to 100. Used only where the
    /// balancer is itself Envoy's policy (the native module).
    pub healthy_panic_threshold: u32,
    /// Whether requests are distributed by the weights of localities. Used only in the native module.
    pub locality_weighted: bool,
}

/// When a request is placed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Mode {
    /// At once, from the pool (default).
    Async,
    /// After its own probes ([`crate::client::sync_mode`]).
    Sync,
}

/// Rule by which the best replica is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// The lowest predicted latency, from the capacity that replicas report ([`crate::server::capacity`]; default).
    Predicted,
    /// Hot and cold, lexicographic (paper §4).
    Hcl,
    /// The lowest RIF: [`Self::Hcl`] at Q = 0.
    RifOnly,
    /// The lowest latency: [`Self::Hcl`] at Q = 1.
    LatencyOnly,
    /// A weighted sum of RIF and latency (paper, appendix A).
    Linear(Linear),
    /// C3's score, for a given number of clients.
    C3 {
        /// Number of clients that share the replicas, 1 to 100 000.
        clients: u32,
    },
    /// Finagle's Peak EWMA over the latencies of this worker's own requests; no probes.
    PeakEwma,
    /// Zuul's choice of two by three factors; no probes.
    Zuul {
        /// Number of requests in flight at which a replica counts as fully used, 1 to 100 000.
        max_in_flight: u32,
    },
}

impl Rule {
    /// Returns the rule's name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Predicted => "predicted",
            Self::Hcl => "hcl",
            Self::RifOnly => "rif_only",
            Self::LatencyOnly => "latency_only",
            Self::Linear(_) => "linear",
            Self::C3 { .. } => "c3",
            Self::PeakEwma => "peak_ewma",
            Self::Zuul { .. } => "zuul_choice_of_two",
        }
    }

    /// Whether `other` is the same rule, whatever its settings.
    pub(crate) fn is_like(self, other: Self) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }

    /// Whether the rule uses only the worker's own requests.
    pub fn is_probe_free(self) -> bool {
        matches!(self, Self::PeakEwma | Self::Zuul { .. })
    }

    /// Whether the rule must learn how each request ended.
    pub fn keeps_state(self) -> bool {
        self.is_probe_free() || matches!(self, Self::C3 { .. })
    }

    /// Sets the pool's `q_rif` if the rule is one of the extremes of the paper's rule, [`Self::RifOnly`] and
    /// [`Self::LatencyOnly`].
    pub(crate) fn apply(self, pool: &mut PoolSettings) {
        let q_rif = match self {
            Self::RifOnly => 0.0,
            Self::LatencyOnly => 1.0,
            _ => return,
        };
        pool.q_rif = q_rif;
    }
}

impl Default for ChoiceSettings {
    fn default() -> Self {
        Self {
            rule: Rule::Predicted,
            mode: Mode::Async,
            route_modes: Vec::new(),
            sync: SyncSettings::default(),
            hint: None,
            orca: None,
            healthy_panic_threshold: 50,
            locality_weighted: false,
        }
    }
}

impl ChoiceSettings {
    /// Whether any request may wait for its own probes.
    pub fn uses_sync(&self) -> bool {
        self.mode == Mode::Sync || self.route_modes.iter().any(|(_, mode)| *mode == Mode::Sync)
    }
}
