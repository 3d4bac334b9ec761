//! Detects from single recent responses what a fit over seconds is slow to see.
//!
//! [`FastRun`] detects that a replica is faster than its fit suggests. [`Beyond`] detects that requests beyond the knee
//! do not wait. Neither measures how fast a replica is or where its knee is; the fit does that.

use super::Capacity;
use crate::shared::time::Micros;

/// Detects that a replica has become faster than its fit suggests: it has recovered, or a stall is over.
///
/// A response is fast if it takes less than half of the base latency. Where requests differ, many responses are fast. A
/// run of fast responses is too long to be due to chance once its probability is below e^−[`CERTAIN`]. Requests that
/// arrive beyond the knee do not count. If they did, in a fleet without spare capacity, the estimate would be reset in
/// each short lull, which would attract the next burst.
///
/// Of many requests in flight, the fast ones are the first to answer. So a run without a slow response proves little in
/// its first moments. The number of its fast responses must also be improbable for the time that requests have spent
/// at the server ([`Self::worked`]), given the fit.
#[derive(Debug)]
pub(super) struct FastRun {
    /// Moving average of the share of fast responses.
    usual: f64,
    /// When the first request of the run arrived.
    since: Micros,
    answers: f64,
    took_us: f64,
    /// Time that requests have spent at the server since the first request of the run arrived, microseconds; see
    /// [`Self::worked`].
    worked_us: f64,
}

impl Default for FastRun {
    fn default() -> Self {
        Self { usual: FAST_SHARE.0, since: Micros(0), answers: 0.0, took_us: 0.0, worked_us: 0.0 }
    }
}

impl FastRun {
    /// Adds to the time that requests have spent at the server. At most as many requests count at a time as the knee.
    pub(super) fn worked(&mut self, us: f64) {
        self.worked_us += us;
    }

    /// Records a response that left while `level` requests were in flight, itself included. Returns whether the run is
    /// too long to be due to chance.
    pub(super) fn answered(
        &mut self,
        now: Micros,
        fit: Capacity,
        level: u32,
        arrived_as: u32,
        latency_us: u32,
    ) -> bool {
        if arrived_as > fit.knee.into() {
            return false;
        }
        let arrived = Micros(now.0.saturating_sub(latency_us.into()));
        let fast = latency_us < fit.base_us / 2;
        self.usual += (f64::from(u8::from(fast)) - self.usual) / REMEMBERED;
        if !fast {
            // A request that is older than the run does not contradict it.
            if arrived >= self.since {
                self.answers = 0.0;
            }
            return false;
        }
        if self.answers == 0.0 {
            (self.since, self.took_us) = (arrived, 0.0);
            // The current level stands for the levels since the request arrived, which are not known here.
            self.worked_us = f64::from(latency_us.max(1)) * f64::from(level.min(fit.knee.into()).max(1));
        }
        self.answers += 1.0;
        self.took_us += f64::from(latency_us);
        // Most runs are shorter than `SHORTEST`, and need no logarithm.
        let usual = self.usual.clamp(FAST_SHARE.0, FAST_SHARE.1);
        self.answers >= SHORTEST
            && self.answers * -usual.ln() > CERTAIN
            && self.surprise(usual * self.worked_us / f64::from(fit.base_us)) > CERTAIN
    }

    /// Returns s such that the probability of at least this many fast responses is at most e^−s where `expected` are
    /// expected (Chernoff's bound for a Poisson distribution); 0 if there are no more than expected.
    fn surprise(&self, expected: f64) -> f64 {
        let times = self.answers / expected;
        if times > 1.0 { self.answers * (times.ln() - 1.0) + expected } else { 0.0 }
    }

    /// Returns the number of responses in the run and the time they took, and begins the next run.
    pub(super) fn take(&mut self) -> (f64, f64) {
        (std::mem::take(&mut self.answers), self.took_us)
    }
}

/// Detects whether requests that arrive beyond the knee wait, as they would if the knee were real.
///
/// The fit cannot tell this where the level hardly changes, for example where a client keeps the level at the knee by
/// sending whenever there is room. Here each response counts by itself, so new responses soon outvote slow older ones.
#[derive(Debug, Default)]
pub(super) struct Beyond {
    /// Moving average of the latency of requests that arrived up to the knee, microseconds; 0 before the first.
    unhindered_us: f64,
    /// Moving average of the share of requests beyond the knee that were delayed by at least half of what a queue would
    /// add.
    hindered: f64,
    /// Time of the last response to a request beyond the knee.
    at: Micros,
}

impl Beyond {
    pub(super) fn answered(&mut self, now: Micros, fit: Capacity, arrived_as: u32, latency_us: u32) {
        let (latency_us, crowding) = (f64::from(latency_us), fit.crowding(arrived_as.saturating_sub(1)));
        if crowding <= 1.0 {
            let first = self.unhindered_us == 0.0;
            self.unhindered_us += (latency_us - self.unhindered_us) / if first { 1.0 } else { REMEMBERED };
            return;
        }
        let base_us = if self.unhindered_us > 0.0 { self.unhindered_us } else { f64::from(fit.base_us) };
        let hindered = f64::from(u8::from(latency_us >= base_us * (1.0 + crowding) / 2.0));
        let share = self.hindered_at(now);
        (self.hindered, self.at) = (share + (hindered - share) / REMEMBERED, now);
    }

    /// Returns the share of hindered requests, which decreases with its age. Old evidence is forgotten, so that a
    /// replica that is never sent requests beyond its knee is tried again.
    fn hindered_at(&self, now: Micros) -> f64 {
        let age = now.saturating_since(self.at) as f64 / FORGOTTEN_US;
        self.hindered * (1.0 - age).max(0.0)
    }

    pub(super) fn is_open(&self, now: Micros) -> bool {
        self.hindered_at(now) < SELDOM_HINDERED
    }
}

/// A run of fast responses must be less probable than e to the power of minus this.
const CERTAIN: f64 = 12.0;
/// Number of responses below which no run is that improbable: each adds at most −ln 0.3.
const SHORTEST: f64 = 10.0;
/// Bounds of the usual share of fast responses.
const FAST_SHARE: (f64, f64) = (0.3, 0.99);
/// Number of responses over which [`FastRun`] and [`Beyond`] average.
const REMEMBERED: f64 = 32.0;
/// Share of [`Beyond::hindered`] requests below which there is room for more beyond the knee. With exponential service
/// times, the share is at least 0.44 in a queue, and at most 0.29 without one.
const SELDOM_HINDERED: f64 = 0.35;
/// Age at which [`Beyond`] no longer counts, microseconds.
const FORGOTTEN_US: f64 = 30e6;
