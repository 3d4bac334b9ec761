//! Detects that a replica serves one request at a time.
//!
//! The fit knows how many requests are in flight, but not which of them are served. Clients that choose replicas in
//! turn send a replica its second request when the first one is nearly done. The second one then hardly waits, so the
//! fit concludes that two requests are served as fast as one. The time between departures shows the difference. If
//! requests are served one by one, a request that arrived behind another one begins when that one leaves. From then on
//! it takes as long as a request that arrives alone. If two are served at once, the second one leaves sooner. The gain
//! is small only if it begins just before the first one leaves; then it does not matter how many are served at once.
//!
//! This module says only whether the knee is 1; the fit finds every other knee. A single core that requests share is not
//! recognised here, because a request on such a core begins at once; `one_core.rs` recognises it.

use super::{ASSUMED, Row};
use crate::shared::time::Micros;

/// Fading sums over the requests that arrived while others were in flight.
#[derive(Debug, Default)]
pub(super) struct OneByOne {
    /// Times of the last departure but one, and of the last one, as far as they are known.
    departures: (Option<Micros>, Option<Micros>),
    /// Number of good responses to such requests, and the sum of their times, each from the previous departure or from
    /// the request's own arrival, whichever is later.
    followed: f64,
    took: f64,
    /// Whether other workers serve requests too. This worker learns of their departures too late to judge.
    pub(super) shared: bool,
}

impl OneByOne {
    /// Records that a request has left the server, whatever its outcome, or waits for its client.
    pub(super) fn left(&mut self, now: Micros) {
        self.departures = (self.departures.1, Some(now));
    }

    /// Records that a request which left at `left_at` to wait for its client is back. Then that was no departure, and the
    /// wait was no work. If another request has left since, the departures stay as they are.
    pub(super) fn came_back(&mut self, now: Micros, left_at: Micros) {
        let (before, last) = self.departures;
        if last == Some(left_at) {
            let wait = now.saturating_since(left_at);
            self.departures = (None, before.map(|before| Micros(before.0.saturating_add(wait))));
        }
    }

    /// Records that another worker has served a request.
    pub(super) fn share(&mut self) {
        self.shared = true;
    }

    /// Records the good response to a request that arrived while others were in flight, and that has just left.
    pub(super) fn answered(&mut self, now: Micros, weight: f64, latency_us: u32) {
        // A request that was still waiting for its client when it ended had left the server earlier.
        if let (Some(before), Some(last)) = self.departures
            && last == now
        {
            self.followed += weight;
            self.took += f64::from(latency_us).min(now.saturating_since(before) as f64) * weight;
        }
    }

    /// Whether requests are served one by one. `alone` has the requests that arrived alone. False if service times vary
    /// widely: while one slot works on a long request, another may serve many short ones in turn, which looks the same.
    pub(super) fn is_evident(&self, alone: &Row, weight: f64) -> bool {
        if self.shared || self.followed.min(alone.met) < ENOUGH * weight || alone.took <= 0.0 {
            return false;
        }
        let mean = alone.took / alone.met;
        let squared = (alone.squares / alone.met / (mean * mean) - 1.0).max(0.0);
        let variation = squared + ASSUMED * weight / alone.met;
        let error = error_of(variation * weight, self.followed, alone.met);
        variation <= VARIED && self.took / self.followed >= mean * (1.0 - error)
    }

    /// Forgets the requests so far, but not when the last ones left.
    pub(super) fn start_anew(&mut self) {
        (self.followed, self.took) = (0.0, 0.0);
    }

    /// Divides the sums by `weight`.
    pub(super) fn scale(&mut self, weight: f64) {
        self.followed /= weight;
        self.took /= weight;
    }
}

/// Returns the relative error of the comparison of two means over `one` and `other` requests: their standard error, within
/// bounds. `variation` is the squared coefficient of variation.
pub(super) fn error_of(variation: f64, one: f64, other: f64) -> f64 {
    (variation * (1.0 / one + 1.0 / other)).sqrt().clamp(ERROR.0, ERROR.1)
}

/// Minimum number of requests of each kind.
pub(super) const ENOUGH: f64 = 3.0;
/// Squared coefficient of variation of the service times above which they vary widely.
const VARIED: f64 = 0.5;
/// Bounds of [`error_of`].
pub(super) const ERROR: (f64, f64) = (0.05, 0.2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_count_only_if_the_departure_before_theirs_is_known() {
        let mut single = OneByOne::default();
        single.left(Micros(50));
        single.answered(Micros(50), 1.0, 20);
        assert_eq!(single.followed, 0.0, "nothing had left before");
        single.left(Micros(60));
        single.answered(Micros(60), 1.0, 20);
        assert_eq!((single.followed, single.took), (1.0, 10.0));
        single.answered(Micros(70), 1.0, 20);
        assert_eq!(single.followed, 1.0, "it had left earlier, to wait for its client");
        single.start_anew();
        single.left(Micros(75));
        single.answered(Micros(75), 1.0, 20);
        assert_eq!(
            (single.followed, single.took),
            (1.0, 15.0),
            "the departure before a fresh start is known"
        );
    }

    #[test]
    fn a_wait_for_the_client_is_no_departure() {
        let mut single = OneByOne::default();
        single.left(Micros(50));
        single.left(Micros(60));
        single.came_back(Micros(64), Micros(60));
        single.left(Micros(70));
        single.answered(Micros(70), 1.0, 40);
        assert_eq!((single.followed, single.took), (1.0, 16.0), "from 50 to 70, but for the wait");
        single.left(Micros(80));
        single.left(Micros(90));
        single.came_back(Micros(95), Micros(80));
        single.left(Micros(96));
        single.answered(Micros(96), 1.0, 40);
        assert_eq!((single.followed, single.took), (2.0, 22.0), "another request has left during the wait");
    }
}
