//! The settings of a pool. Their names, ranges and defaults are in [`crate::config`].

use crate::ejection::EjectionSettings;

/// Maximum number of entries of a pool.
pub const MAX_POOL: usize = 64;
/// Most RIFs that θ looks back on.
pub const MAX_HISTORY: usize = 128;

/// When an entry counts as hot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum HotRule {
    /// RIF > θ (paper §4). Small fleets: most RIFs tie with θ.
    Gt,
    /// RIF ≥ θ (paper §5.3).
    Ge,
}

/// How many probes a request triggers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// `r_probe` a request, fractions accumulate (the paper's rule), and discovery besides.
    Fixed {
        /// Probes per request, 0 to 16.
        r_probe: f64,
    },
    /// Only as many as keep half of the pool younger than the target, discovery included. Responses tell only of replicas that were chosen:
    /// the others are explored by the probes of discovery, or, where Envoy does not vouch for those, by one pool's worth
    /// of addressed probes per `max_age_ms`.
    Adaptive {
        /// Target for the median age of the pool, milliseconds.
        target_age_ms: u32,
        /// Upper bound of all probes, 0 to 16. What is not sent is saved.
        max_probes_per_query: f64,
    },
}

/// Checked settings of a pool; ranges are those of [`crate::config`].
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSettings {
    /// Maximum number of entries of a pool that cannot hold the whole fleet, 2 to [`MAX_POOL`].
    pub pool_size: usize,
    /// Age from receipt at which a report stops counting, milliseconds.
    pub max_age_ms: u32,
    /// Quantile for θ, 0 (RIF only) to 1 (latency only).
    pub q_rif: f64,
    /// Which reading of "hot".
    pub hot: HotRule,
    /// δ of equation (1).
    pub delta: f64,
    /// Removals per pick.
    pub r_remove: f64,
    /// Keep a fleet of up to [`MAX_POOL`] replicas whole: there is no selection bias to undo then. In a larger fleet, remove
    /// only from a full pool, and no more entries than arrive. The paper has no such bounds.
    pub scale_removal: bool,
    /// Upper bound of equation (1).
    pub reuse_cap: u32,
    /// How many probes.
    pub budget: Budget,
    /// One probe without an address this often, milliseconds, so that the cluster's policy is sampled and newcomers are
    /// found, as far as the budget allows. More often in large fleets (n/4 a second, at most 105, up to seven at once), and while replicas
    /// come into use (80 a second or 6n, at most 1000).
    pub discovery_interval_ms: u32,
    /// Envoy vouches for the replica that answered a probe, so a probe without an address tells load too, and
    /// exploration needs no other.
    pub verified_probes: bool,
    /// RIFs kept for θ, 8 to [`MAX_HISTORY`].
    pub rif_history: usize,
    /// θ looks back on replies to probes alone, as in the paper: what chosen replicas report on responses is low for the
    /// fleet. With few probes it is all there is.
    pub theta_of_probes: bool,
    /// Envoy's own policy places what would go to a replica with four requests in flight while the fleet is being
    /// learned (at first two of 40 would get everything, and refuse what exceeds their queues), and what would go to one
    /// with more than θ and four where even the best is saturated: it counts its own requests, while a pool that a burst
    /// has used up spreads them over a sample. The paper has no such rule.
    pub burst_guard: bool,
    /// When a replica is ejected.
    pub ejection: EjectionSettings,
    /// Age at which a replica takes its full share, milliseconds, 0 (at once) to 3 600 000.
    pub slow_start_ms: u32,
}

impl PoolSettings {
    /// A value of `discovery_interval_ms`: no such probes, as the membership is known. No setting of a user's.
    pub const NO_DISCOVERY: u32 = 0;

    /// Maximum number of entries of a pool over `n` replicas; `n` = 0 means that none are known yet.
    pub(super) fn capacity(&self, n: u32) -> usize {
        match usize::try_from(n) {
            Ok(n) if self.scale_removal && n <= MAX_POOL => self.pool_size.max(n),
            _ => self.pool_size,
        }
    }

    /// Entries that probes keep fresh in a pool over `n` replicas. Responses keep the others fresh: a fleet that is larger than
    /// `pool_size` and has a request rate to match needs no more probes.
    pub(super) fn attainable(&self, n: u32) -> usize {
        if n == 0 { self.pool_size } else { self.pool_size.min(n as usize) }
    }

    /// Share of traffic of a replica that started `up_s` ago, per cent.
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

/// See [`PoolSettings::burst_guard`].
pub(super) const CROWD: u16 = 4;
/// Share of a replica that is not young, per cent.
pub(super) const FULL_SHARE: u8 = 100;
/// The least that a young replica gets: it must be seen to answer.
const MIN_SHARE: u8 = 5;
