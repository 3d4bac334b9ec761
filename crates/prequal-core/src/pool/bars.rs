//! Replicas that are left alone for a fixed while after one failure or refusal, and steering as a whole while Envoy refuses
//! most choices. Who is passed over for what it did over time is decided in [`crate::exceptions`].

use super::PoolState;
use crate::endpoint::Endpoint;
use crate::time::{Micros, Stamp};

/// Replicas that can be barred at once.
pub(super) const MAX_BARRED: usize = 8;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Barred {
    endpoint: Endpoint,
    at: Stamp,
    for_ms: u32,
}

impl PoolState {
    /// Envoy would not use the replica when asked to: it is barred for `for_ms`. When most choices are refused, steering
    /// pauses.
    pub fn refused(&mut self, endpoint: Endpoint, now: Micros, for_ms: u32) {
        self.bar(endpoint, now, for_ms);
        self.refusals_per_pick += REFUSAL_WEIGHT;
        if self.refusals_per_pick > 0.5 {
            (self.paused, self.paused_at, self.refusals_per_pick) = (1, now.stamp(), 0.0);
        }
    }

    /// Forgets a replica and ignores its reports for `for_ms`: it failed.
    pub fn bar(&mut self, endpoint: Endpoint, now: Micros, for_ms: u32) {
        self.forget(endpoint);
        let stamp = now.stamp();
        let count = self.barred_count as usize;
        let known = self.barred.iter().take(count).position(|barred| barred.endpoint == endpoint);
        // A full table gives up its oldest ban: forgetting a ban costs one diverted request.
        let index = known.unwrap_or_else(|| {
            if count < MAX_BARRED {
                self.barred_count += 1;
                return count;
            }
            let age = |barred: &Barred| stamp.distance_ms(barred.at);
            self.barred.iter().enumerate().max_by_key(|(_, barred)| age(barred)).map_or(0, |(index, _)| index)
        });
        if let Some(slot) = self.barred.get_mut(index) {
            *slot = Barred { endpoint, at: stamp, for_ms };
        }
    }

    /// Lifts a bar: the replica has proved itself.
    pub fn unbar(&mut self, endpoint: Endpoint) {
        let count = self.barred_count as usize;
        if let Some(index) = self.barred.iter().take(count).position(|barred| barred.endpoint == endpoint) {
            self.barred.swap(index, count - 1);
            self.barred_count -= 1;
        }
    }

    pub(super) fn is_barred(&self, endpoint: Endpoint, now: Stamp) -> bool {
        self.barred
            .iter()
            .take(self.barred_count as usize)
            .any(|barred| barred.endpoint == endpoint && now.distance_ms(barred.at) < barred.for_ms)
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
