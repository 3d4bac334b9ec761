//! Settings of a pool. [`crate::config`] has their names, ranges and defaults.

use crate::client::ejection::EjectionSettings;

/// Maximum number of entries of a pool.
pub const MAX_POOL: usize = 128;
/// Size of the largest fleet that is kept whole even if its requests are rare.
const MAX_WHOLE: usize = 64;
/// Maximum number of RIFs in the history that θ is computed from.
pub const MAX_HISTORY: usize = 128;

/// Condition under which an entry counts as hot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum HotRule {
    /// RIF > θ (paper §4). In small fleets most RIFs tie with θ.
    Gt,
    /// RIF ≥ θ (paper §5.3).
    Ge,
}

/// Number of probes that a request triggers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// `r_probe` probes per request, where fractions accumulate (the paper's rule), plus discovery.
    Fixed {
        /// Probes per request, 0 to 16.
        r_probe: f64,
    },
    /// Only as many probes as keep half of the pool younger than the target, discovery included. Responses report only
    /// on replicas that were chosen. The others are explored by discovery probes, or, where Envoy does not vouch for
    /// those, by one pool's worth of addressed probes per `max_age_ms`. While every known replica is saturated and
    /// others are not known, each request sends as many probes as the upper bound allows.
    Adaptive {
        /// Target for the median age of the pool, milliseconds.
        target_age_ms: u32,
        /// Upper bound of all probes per request, 0 to 16. Probes that are not sent are saved.
        max_probes_per_query: f64,
    },
}

/// Checked settings of a pool; ranges are those of [`crate::config`].
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSettings {
    /// Maximum number of entries of a pool that cannot hold the whole fleet, 2 to [`MAX_POOL`]. With `scale_removal`
    /// and an adaptive budget the pool may be larger as long as all of its reports are fresh.
    pub pool_size: usize,
    /// Age at which a report stops counting, from its receipt, milliseconds. With an adaptive budget and rare requests,
    /// a report counts for four requests per replica, but for at most ten times this age.
    pub max_age_ms: u32,
    /// Quantile for θ, 0 (RIF only) to 1 (latency only).
    pub q_rif: f64,
    /// Condition under which an entry counts as hot.
    pub hot: HotRule,
    /// δ of equation (1).
    pub delta: f64,
    /// Removals per pick.
    pub r_remove: f64,
    /// Keeps a fleet of up to 64 replicas in the pool as a whole: then there is no selection bias to correct. Of a
    /// larger fleet, keeps up to [`MAX_POOL`] reports while all are fresh. Removes entries only from a full pool, and
    /// no more than arrive. The paper has no such bounds.
    pub scale_removal: bool,
    /// Upper bound of equation (1).
    pub reuse_cap: u32,
    /// Number of probes.
    pub budget: Budget,
    /// Interval between probes without an address, milliseconds, as far as the budget allows. These probes sample the
    /// cluster's policy and find new replicas. They are more frequent in a large fleet of n replicas (n/4 a second, at
    /// most 105, up to seven at once) and while replicas come into use (6n a second, at least 80 and at most 1000).
    pub discovery_interval_ms: u32,
    /// Whether Envoy vouches for the replica that answered a probe. If so, probes without an address provide loads too,
    /// and exploration needs no other probes.
    pub verified_probes: bool,
    /// Number of RIFs kept for θ, 8 to [`MAX_HISTORY`].
    pub rif_history: usize,
    /// Computes θ from replies to probes alone, as in the paper: chosen replicas report lower RIFs on responses than
    /// the fleet has. If false, all reports count, because the few probes alone provide hardly any RIFs.
    pub theta_of_probes: bool,
    /// Leaves some requests to Envoy's own policy. While the fleet is being discovered, these are the requests that
    /// would go to a replica with four requests in flight. Without this, the first two of 40 replicas would get all
    /// requests, and refuse those that exceed their queues. Later, these are the requests for which even the best
    /// replica has more than θ plus four in flight: Envoy's policy counts its own requests to every replica, whereas
    /// the pool, once a burst has used up its reports, covers only some replicas. The later rule does not apply to a
    /// pool that holds the whole fleet. The paper has no such rules.
    pub burst_guard: bool,
    /// Conditions under which a replica is ejected.
    pub ejection: EjectionSettings,
    /// Age at which a replica takes its full share, milliseconds, 0 (at once) to 3 600 000.
    pub slow_start_ms: u32,
}

impl PoolSettings {
    /// Value of `discovery_interval_ms` that turns these probes off, because the membership is known. Users cannot set
    /// it.
    pub const NO_DISCOVERY: u32 = 0;

    /// Maximum number of entries of a pool over `n` replicas (0 if none are known yet) whose oldest report has the age
    /// `oldest_ms`, milliseconds (`None` without a report).
    ///
    /// A pool that cannot hold the whole fleet grows as long as even its oldest report is fresh: requests are so
    /// frequent that their responses keep more entries up to date than `pool_size`. With a fixed number of probes it
    /// does not grow.
    pub(super) fn capacity(&self, n: u32, oldest_ms: Option<u32>) -> usize {
        let is_fresh = match self.budget {
            Budget::Adaptive { target_age_ms, .. } => {
                let fresh_ms = target_age_ms.saturating_mul(2).min(self.max_age_ms / 2);
                oldest_ms.is_none_or(|age| age < fresh_ms)
            }
            Budget::Fixed { .. } => false,
        };
        match n as usize {
            _ if self.scale_removal && is_fresh => MAX_POOL,
            n if self.scale_removal && n <= MAX_WHOLE => self.pool_size.max(n),
            _ => self.pool_size,
        }
    }

    /// Whether the pool holds a whole fleet of `n` replicas, whatever the age of its reports.
    pub(super) fn holds_whole(&self, n: u32) -> bool {
        self.scale_removal && (1..=MAX_WHOLE).contains(&(n as usize))
    }

    /// Number of entries that probes keep fresh in a pool over `n` replicas. Responses keep the others fresh: with a
    /// matching request rate, a fleet larger than `pool_size` needs no more probes.
    pub(super) fn attainable(&self, n: u32) -> usize {
        if n == 0 { self.pool_size } else { self.pool_size.min(n as usize) }
    }

    /// Traffic of a replica that started `up_s` seconds ago, relative to one that is not young, per cent.
    pub(super) fn share_at(&self, up_s: Option<u32>) -> u8 {
        match (up_s, self.slow_start_ms) {
            (None, _) | (_, 0) => FULL_SHARE,
            (Some(up_s), slow_start_ms) => {
                let share = u64::from(up_s) * 100_000 / u64::from(slow_start_ms);
                share.clamp(MIN_SHARE.into(), FULL_SHARE.into()) as u8
            }
        }
    }
}

/// Number of requests in flight, see [`PoolSettings::burst_guard`].
pub(super) const CROWD: u16 = 4;
/// Relative traffic of a replica that is not young, per cent.
pub(super) const FULL_SHARE: u8 = 100;
/// Minimum relative traffic of a young replica, per cent: it must be able to show that it answers.
const MIN_SHARE: u8 = 5;
