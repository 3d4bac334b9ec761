//! Cooldowns: after a failure or refusal, a replica gets no requests for a fixed time. While Envoy refuses most
//! choices, steering as a whole pauses. [`crate::client::ejection`] decides which replicas are ejected for their
//! behaviour over time.

use super::PoolState;
use crate::shared::endpoint::Endpoint;
use crate::shared::time::{Micros, Stamp};

/// Maximum number of replicas that cool down at once.
pub(super) const MAX_COOLDOWNS: usize = 8;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Cooldown {
    endpoint: Endpoint,
    at: Stamp,
    for_ms: u32,
}

impl PoolState {
    /// Records that Envoy refused the chosen replica, which then cools down for `for_ms`. When most choices are
    /// refused, steering pauses.
    pub fn refused(&mut self, endpoint: Endpoint, now: Micros, for_ms: u32) {
        self.cool_down(endpoint, now, for_ms);
        self.refusals_per_pick += REFUSAL_WEIGHT;
        if self.refusals_per_pick > 0.5 {
            (self.paused, self.paused_at, self.refusals_per_pick) = (1, now.stamp(), 0.0);
        }
    }

    /// Removes a replica that failed, and ignores its reports for `for_ms`.
    pub fn cool_down(&mut self, endpoint: Endpoint, now: Micros, for_ms: u32) {
        self.forget(endpoint);
        let stamp = now.stamp();
        let count = self.cooldown_count as usize;
        let known = self.cooldowns.iter().take(count).position(|cooldown| cooldown.endpoint == endpoint);
        // A full table drops its oldest cooldown, which costs at most one diverted request.
        let index = known.unwrap_or_else(|| {
            if count < MAX_COOLDOWNS {
                self.cooldown_count += 1;
                return count;
            }
            let age = |cooldown: &Cooldown| stamp.distance_ms(cooldown.at);
            self.cooldowns
                .iter()
                .enumerate()
                .max_by_key(|(_, cooldown)| age(cooldown))
                .map_or(0, |(index, _)| index)
        });
        if let Some(slot) = self.cooldowns.get_mut(index) {
            *slot = Cooldown { endpoint, at: stamp, for_ms };
        }
    }

    /// Ends a cooldown, because the replica has served a request.
    pub fn end_cooldown(&mut self, endpoint: Endpoint) {
        let count = self.cooldown_count as usize;
        if let Some(index) =
            self.cooldowns.iter().take(count).position(|cooldown| cooldown.endpoint == endpoint)
        {
            self.cooldowns.swap(index, count - 1);
            self.cooldown_count -= 1;
        }
    }

    pub(super) fn is_cooling_down(&self, endpoint: Endpoint, now: Stamp) -> bool {
        self.cooldowns
            .iter()
            .take(self.cooldown_count as usize)
            .any(|cooldown| cooldown.endpoint == endpoint && now.distance_ms(cooldown.at) < cooldown.for_ms)
    }

    pub(super) fn is_paused(&mut self, now: Stamp) -> bool {
        if self.paused == 1 && now.distance_ms(self.paused_at) >= PAUSE_MS {
            self.paused = 0;
        }
        self.paused == 1
    }
}

/// Weight of one pick in the share of refused choices: about eleven refusals in a row pause steering.
pub(super) const REFUSAL_WEIGHT: f32 = 1.0 / 16.0;
/// Length of a pause in steering, milliseconds.
const PAUSE_MS: u32 = 1000;
