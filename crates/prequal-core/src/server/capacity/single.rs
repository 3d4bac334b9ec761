//! Detects that a replica serves one request at a time.
//!
//! The fit knows how many requests are in flight, but not which of them are served. Clients that take turns send a
//! replica its second request when the first one is nearly done. The second one then hardly waits, so the fit concludes
//! that two requests are served as fast as one. The time between departures shows the difference. If requests are
//! served one by one, a request that arrived behind another one begins when that one leaves. From then on it takes as
//! long as a request that arrives alone. If two are served at once, the second one leaves sooner. Only if it begins just
//! before the first one leaves does it leave hardly sooner; then it makes no difference how many are served at once.

use super::{ASSUMED, Row};
use crate::shared::time::Micros;

/// Fading sums over the requests that arrived while others were in flight.
#[derive(Debug, Default)]
pub(super) struct OneByOne {
    /// Times of the last departure but one, and of the last one.
    departures: (Micros, Micros),
    /// Number of good responses to such requests, and the time from the departure before each response, but at most
    /// from its request's arrival.
    followed: f64,
    took: f64,
}

impl OneByOne {
    /// Records that a request, whatever its outcome, has left.
    pub(super) fn left(&mut self, now: Micros) {
        self.departures = (self.departures.1, now);
    }

    /// Records the good response to a request that arrived while others were in flight, and that has just left.
    pub(super) fn answered(&mut self, now: Micros, weight: f64, latency_us: u32) {
        let (before, last) = self.departures;
        // With several workers, results may arrive late; then the departure before this one is not known.
        if last == now {
            self.followed += weight;
            self.took += f64::from(latency_us).min(now.saturating_since(before) as f64) * weight;
        }
    }

    /// Whether requests are served one by one. `alone` has the requests that arrived alone. Where service times vary
    /// widely, this cannot be told: one slot may work on a long request while the other one serves many short ones, one
    /// after the other.
    pub(super) fn is_evident(&self, alone: &Row, weight: f64) -> bool {
        if self.followed.min(alone.met) < ENOUGH * weight {
            return false;
        }
        let mean = alone.took / alone.met;
        let squared = (alone.squares / alone.met / (mean * mean) - 1.0).max(0.0);
        let variation = squared + ASSUMED * weight / alone.met;
        let error = (variation * weight * (1.0 / self.followed + 1.0 / alone.met)).sqrt();
        variation <= VARIED && self.took / self.followed >= mean * (1.0 - error.clamp(ERROR.0, ERROR.1))
    }

    /// Divides the sums by `weight`.
    pub(super) fn scale(&mut self, weight: f64) {
        self.followed /= weight;
        self.took /= weight;
    }
}

/// Minimum number of requests of each kind.
const ENOUGH: f64 = 3.0;
/// Squared coefficient of variation of the service times above which they vary widely.
const VARIED: f64 = 0.5;
/// Bounds of the relative error of the comparison; its standard error is used between them.
const ERROR: (f64, f64) = (0.05, 0.2);
