//! Error of the reported base latencies. Where requests are few and differ, equal replicas report different latencies
//! by chance, and without this estimate all clients would prefer the lucky ones.

use super::Entry;
use crate::shared::capacity::FADES_US;
use crate::shared::endpoint::Endpoint;

/// Weight of a new value in the moving average: the average covers some 256 reports.
const WEIGHT: f32 = 1.0 / 256.0;
/// Maximum square of the error that two reports can show. A larger difference counts as this one, because it
/// is a real change rather than noise.
const MAX_SQUARE: f32 = 1.0;

/// Mean square error of the reported base latencies, relative to the latency.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Noise {
    /// The mean, 0 to [`MAX_SQUARE`].
    pub(super) mean: f32,
    /// The largest recent square, which fades like the mean, and the replica that showed it.
    pub(super) largest: f32,
    loudest: Endpoint,
}

impl Noise {
    /// The error, relative to the latency, 0 to 1.
    pub(super) fn error(&self) -> f32 {
        self.mean.sqrt()
    }

    /// Learns from two successive reports of one replica.
    ///
    /// The reports of the loudest replica do not count until another replica is louder. If all are equally noisy, this
    /// leaves out one at random. If one replica's reports change wildly, it leaves out that one, so that the others are
    /// compared as closely as before.
    pub(super) fn reported(&mut self, old: &Entry, new: &Entry) {
        let Some(square) = square_between(old, new) else { return };
        self.largest -= self.largest * WEIGHT;
        if new.endpoint != self.loudest {
            self.mean += (square - self.mean) * WEIGHT;
        }
        if square >= self.largest {
            (self.largest, self.loudest) = (square, new.endpoint);
        }
    }

    /// Whether a blob may hold these values.
    pub(super) fn is_sound(&self) -> bool {
        [self.mean, self.largest].iter().all(|square| (0.0..=MAX_SQUARE).contains(square))
    }
}

/// Returns the square of the error of a replica's base latency, relative to the latency, as its two successive reports
/// show it; `None` if one of them has no base latency.
///
/// Estimates fade with the time constant τ ([`FADES_US`]), so if the replica has not changed, the mean square
/// difference of two estimates that are t apart is twice their variance times 1 − exp(−t/τ). Instead of 1 − exp(−t/τ),
/// t / (t + τ) is used, which is nearly the same and cheaper.
fn square_between(old: &Entry, new: &Entry) -> Option<f32> {
    let (before, after) = (old.capacity()?.base_us as f32, new.capacity()?.base_us as f32);
    let elapsed = new.received.distance_ms(old.received).max(1) as f32;
    let change = 2.0 * (after - before) / (after + before).max(1.0);
    let square = change * change / 2.0 * (elapsed + FADES_US as f32 / 1e3) / elapsed;
    Some(if square < MAX_SQUARE { square } else { MAX_SQUARE })
}
