//! The cooldown: a replica is left alone for a fixed while after one failure or refusal, and steering as a whole while
//! Envoy refuses most choices. Who is ejected for what it did over time is decided in [`crate::ejection`].

use super::PoolState;
use crate::endpoint::Endpoint;
use crate::time::{Micros, Stamp};

/// Replicas that can cool down at once.
pub(super) const MAX_COOLDOWNS: usize = 8;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Cooldown {
    endpoint: Endpoint,
    at: Stamp,
    for_ms: u32,
}

impl PoolState {
    /// Envoy would not use the replica when asked to: it cools down for `for_ms`. When most choices are refused,
    /// steering pauses.
    pub fn refused(&mut self, endpoint: Endpoint, now: Micros, for_ms: u32) {
        self.cool_down(endpoint, now, for_ms);
        self.refusals_per_pick += REFUSAL_WEIGHT;
        if self.refusals_per_pick > 0.5 {
            (self.paused, self.paused_at, self.refusals_per_pick) = (1, now.stamp(), 0.0);
        }
    }

    /// Forgets a replica and ignores its reports for `for_ms`: it failed.
    pub fn cool_down(&mut self, endpoint: Endpoint, now: Micros, for_ms: u32) {
        self.forget(endpoint);
        let stamp = now.stamp();
        let count = self.cooldown_count as usize;
        let known = self.cooldowns.iter().take(count).position(|cooldown| cooldown.endpoint == endpoint);
        // A full table gives up its oldest cooldown: forgetting one costs one diverted request.
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

    /// Ends a cooldown: the replica has proved itself.
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

/// Weight of one pick in the share of refused choices: some eleven refusals in a row pause steering.
pub(super) const REFUSAL_WEIGHT: f32 = 1.0 / 16.0;
/// How long steering pauses.
const PAUSE_MS: u32 = 1000;
