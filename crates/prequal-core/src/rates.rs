//! How many requests a second arrive at a replica, how many fail, and how many are in flight on average: over a window
//! that slides in eight steps.
//!
//! Load reports in the format of ORCA need these ([`crate::orca`]); nothing here decides what is reported. Counts are exact
//! over the stretch that they cover, which is between 7/8 of the window and the window. Nothing is computed while requests come
//! and go but sums: the steps that time has passed are caught up with at the next event, which is exact because
//! nothing changed in between.

use crate::time::Micros;
use crate::tracker::Outcome;

/// Steps in which the window slides.
const MARKS: usize = 8;
/// Shortest window, microseconds.
pub const MIN_WINDOW_US: u64 = 100_000;
/// A step back of the clock by more than this starts anew, microseconds; less is an update that comes late.
const STEP_US: u64 = 1_000_000;

/// What has been counted since the start. Sums wrap; only differences are used.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    arrived: u64,
    failed: u64,
    /// Microseconds that requests spent in flight.
    busy_us: u64,
}

/// Counts requests as they come and go.
#[derive(Debug)]
pub struct Rates {
    step_us: u64,
    rif: u32,
    latest: Micros,
    totals: Totals,
    /// The totals as they were at the last steps, in a ring; `next` is the oldest.
    marks: [(Micros, Totals); MARKS],
    next: usize,
    next_at: Micros,
}

/// What a window has shown.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Window {
    /// Requests that arrived, in thousandths a second.
    pub arrived_milli: u64,
    /// Requests that failed by the replica's own making, in thousandths a second.
    pub failed_milli: u64,
    /// Requests in flight on average, in millionths.
    pub rif_micro: u64,
}

impl Rates {
    /// An idle replica, and rates over `window_us`, at least [`MIN_WINDOW_US`].
    pub fn new(now: Micros, window_us: u64) -> Self {
        let step_us = window_us.max(MIN_WINDOW_US) / MARKS as u64;
        let marks = [(now, Totals::default()); MARKS];
        let totals = Totals::default();
        Self { step_us, rif: 0, latest: now, totals, marks, next: 0, next_at: now.plus(step_us) }
    }

    /// A request arrived; with it `rif` are in flight.
    pub fn arrived(&mut self, now: Micros, rif: u32) {
        self.moved(now, rif);
        self.totals.arrived = self.totals.arrived.wrapping_add(1);
    }

    /// A request ended; `rif` are left.
    pub fn ended(&mut self, now: Micros, rif: u32, outcome: Outcome) {
        self.moved(now, rif);
        if outcome == Outcome::Failure {
            self.totals.failed = self.totals.failed.wrapping_add(1);
        }
    }

    /// `rif` are in flight from now on.
    pub fn moved(&mut self, now: Micros, rif: u32) {
        self.advance(now);
        self.rif = rif;
    }

    /// What the window that ends now shows.
    pub fn over(&mut self, now: Micros) -> Window {
        self.advance(now);
        let (since, before) = self.marks.get(self.next).copied().unwrap_or((now, self.totals));
        // The first request of all is no flood.
        let elapsed = self.latest.saturating_since(since).max(self.step_us);
        let rate = |now: u64, before: u64, unit: u64| {
            let scaled = u128::from(now.wrapping_sub(before)) * u128::from(unit) / u128::from(elapsed);
            u64::try_from(scaled).unwrap_or(u64::MAX)
        };
        let Totals { arrived, failed, busy_us } = self.totals;
        Window {
            arrived_milli: rate(arrived, before.arrived, 1_000_000_000),
            failed_milli: rate(failed, before.failed, 1_000_000_000),
            rif_micro: rate(busy_us, before.busy_us, 1_000_000),
        }
    }

    fn advance(&mut self, now: Micros) {
        if now < self.latest {
            if self.latest.saturating_since(now) > STEP_US {
                *self = Self { rif: self.rif, ..Self::new(now, self.step_us * MARKS as u64) };
            }
            return;
        }
        if now >= self.next_at {
            self.step(now);
        }
        self.credit(now);
    }

    /// Not inlined: few events come first in their step.
    #[inline(never)]
    fn step(&mut self, now: Micros) {
        // After a long silence only the last window matters.
        let window_us = self.step_us * MARKS as u64;
        let behind = now.saturating_since(self.next_at);
        if behind > window_us {
            self.next_at = self.next_at.plus((behind - window_us) / self.step_us * self.step_us);
        }
        // Bounded, because time saturates at its end.
        for _ in 0..=MARKS + 1 {
            if now < self.next_at {
                break;
            }
            self.credit(self.next_at);
            if let Some(mark) = self.marks.get_mut(self.next) {
                *mark = (self.next_at, self.totals);
            }
            self.next = (self.next + 1) % MARKS;
            self.next_at = self.next_at.plus(self.step_us);
        }
    }

    fn credit(&mut self, until: Micros) {
        let busy = until.saturating_since(self.latest).wrapping_mul(u64::from(self.rif));
        self.totals.busy_us = self.totals.busy_us.wrapping_add(busy);
        self.latest = until;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    /// Ten requests a second of 300 ms each, of which every fifth fails, from the 0th to the `end`th second.
    fn steady(rates: &mut Rates, end: u64) {
        let mut events: Vec<(u64, bool, u64)> = (0..end * 10)
            .flat_map(|n| [(n * SECOND / 10, true, n), (n * SECOND / 10 + 300_000, false, n)])
            .filter(|(at, ..)| *at <= end * SECOND)
            .collect();
        events.sort();
        let mut rif = 0;
        for (at, arrives, n) in events {
            if arrives {
                rif += 1;
                rates.arrived(Micros(at), rif);
            } else {
                rif -= 1;
                let outcome = if n % 5 == 0 { Outcome::Failure } else { Outcome::Success };
                rates.ended(Micros(at), rif, outcome);
            }
        }
    }

    #[test]
    fn steady_load_is_told_as_it_is() {
        let mut rates = Rates::new(Micros(0), 4 * SECOND);
        steady(&mut rates, 20);
        let window = rates.over(Micros(20 * SECOND));
        assert_eq!(window, Window { arrived_milli: 10_000, failed_milli: 2_000, rif_micro: 3_000_000 });
    }

    #[test]
    fn a_request_that_hangs_is_in_flight_though_nothing_happens() {
        let mut rates = Rates::new(Micros(0), 4 * SECOND);
        rates.arrived(Micros(0), 1);
        rates.arrived(Micros(0), 2);
        let first = rates.over(Micros(1000));
        assert_eq!(first.arrived_milli, 4_000, "two in the shortest stretch, half a second");
        let later = rates.over(Micros(3600 * SECOND));
        assert_eq!(later, Window { rif_micro: 2_000_000, ..Window::default() });
        rates.ended(Micros(3600 * SECOND), 0, Outcome::Aborted);
        assert_eq!(rates.over(Micros(3610 * SECOND)), Window::default());
    }

    #[test]
    fn the_window_is_as_long_as_it_says() {
        let window_us = 4 * SECOND;
        for at in (0..40).map(|n| n * SECOND / 10 + 7) {
            let mut rates = Rates::new(Micros(0), window_us);
            rates.arrived(Micros(at), 1);
            rates.ended(Micros(at), 0, Outcome::Failure);
            let forgets = (0..)
                .map(|n| at + n * SECOND / 100)
                .find(|now| rates.over(Micros(*now)) == Window::default());
            let kept = forgets.unwrap() - at;
            assert!(
                (window_us * 7 / 8 - SECOND / 100..=window_us + SECOND / 100).contains(&kept),
                "{at}: {kept}"
            );
        }
    }

    #[test]
    fn clocks_that_step_do_no_harm() {
        let mut rates = Rates::new(Micros(1000 * SECOND), SECOND);
        rates.arrived(Micros(1000 * SECOND), 1);
        rates.arrived(Micros(999 * SECOND + SECOND / 2), 2);
        assert_eq!(
            rates.over(Micros(1000 * SECOND)).arrived_milli,
            16_000,
            "an update that comes late counts"
        );
        rates.moved(Micros(10 * SECOND), 2);
        assert_eq!(rates.over(Micros(12 * SECOND)), Window { rif_micro: 2_000_000, ..Window::default() });
        rates.arrived(Micros(u64::MAX), u32::MAX);
        rates.arrived(Micros(0), u32::MAX);
        let _ = rates.over(Micros(u64::MAX));
    }
}
