//! How many probes are due, with a request and without one. Whom they go to is decided by [`crate::members`], and who sends
//! them by the adapter.

use super::{Budget, PoolSettings, PoolState, ProbesDue};
use crate::time::{Micros, Stamp};

impl PoolState {
    /// Probes to send because no request came for `interval_ms`; none unless this caller took the lease.
    ///
    /// The caller writes the state back with compare-and-swap, so that one of several workers acts per interval.
    pub fn idle_probes(&mut self, settings: &PoolSettings, now: Micros, interval_ms: u32) -> ProbesDue {
        let stamp = now.stamp();
        let since_pick = stamp.distance_ms(self.last_pick);
        if since_pick < interval_ms || stamp.distance_ms(self.idle_probed) < interval_ms {
            return ProbesDue::default();
        }
        self.idle_probed = stamp;
        let pool = settings.attainable(self.available()) as u32;
        if settings.verified_probes {
            ProbesDue { addressed: 0, discovery: pool }
        } else {
            ProbesDue { addressed: pool, discovery: 1 }
        }
    }

    /// Replicas that the pool can hold; 0 while none are known.
    fn available(&self) -> u32 {
        self.members.saturating_sub(self.out.into()).max(self.members.min(1))
    }

    pub(super) fn probes_due(&mut self, settings: &PoolSettings, now: Stamp) -> ProbesDue {
        let credit = match settings.budget {
            Budget::Fixed { r_probe } => r_probe,
            Budget::Adaptive { target_age_ms, max_probes_per_query } => {
                let size = settings.attainable(self.available());
                let young =
                    self.entries().iter().filter(|e| now.distance_ms(e.received) <= target_age_ms).count();
                if young * 2 < size {
                    max_probes_per_query
                } else if settings.verified_probes {
                    0.0
                } else {
                    let elapsed = now.distance_ms(self.last_pick).min(settings.max_age_ms);
                    let explore = f64::from(elapsed) * size as f64 / f64::from(settings.max_age_ms.max(1));
                    explore.min(max_probes_per_query)
                }
            }
        };
        // Rounded deterministically (§4, footnote 7); the bound only matters after a configuration change.
        self.probe_credit = (self.probe_credit + credit as f32).min(32.0);
        let due = self.probe_credit.floor();
        self.probe_credit -= due;
        ProbesDue { addressed: due as u32, discovery: self.discovery_due(settings, now) }
    }

    /// Whatever the budget: replicas that get no requests are heard of in no other way. With reports on responses alone the
    /// first two that answer would get everything, and who is passed over no trial.
    fn discovery_due(&mut self, settings: &PoolSettings, now: Stamp) -> u32 {
        let growing = self.members == 0 || now.distance_ms(self.members_changed) < GROWING_MS;
        let members = f64::from(self.members);
        let rate = if growing {
            (members * 6.0).clamp(80.0, 1000.0)
        } else {
            (1000.0 / f64::from(settings.discovery_interval_ms.max(1))).max((members / 4.0).min(250.0))
        };
        let elapsed = f64::from(now.distance_ms(self.discovery_sent));
        let due = (elapsed * rate / 1000.0).min(MAX_DISCOVERY);
        if due < 1.0 {
            return 0;
        }
        self.discovery_sent = now;
        due as u32
    }
}

/// The policy is sampled eagerly until no replica has come into use for this long.
pub(super) const GROWING_MS: u32 = 2000;
/// Most probes of discovery that one pick sends.
const MAX_DISCOVERY: f64 = 8.0;
