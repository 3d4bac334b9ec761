//! Measures how many requests end at a replica per second, how many of them fail, and how many are in flight on
//! average.
//!
//! Load reports in the format of ORCA need these values ([`crate::wire::orca`]); this module does not decide what is
//! reported. All three are means over the same fading time: what happened one time constant ago counts 1/e. A window
//! with a sharp end would make traffic oscillate between equal replicas at 80 % load, because many requests leave such
//! a window at once.

use crate::shared::outcome::Outcome;
use crate::shared::time::Micros;
use crate::wire::orca::Window;

/// Default time constant, microseconds. Policies that renew their weights every second need it to span a few renewals.
pub const DEFAULT_WINDOW_US: u64 = 5_000_000;
/// Minimum time constant, microseconds.
pub const MIN_WINDOW_US: u64 = 100_000;
/// Step back of the clock beyond which the means are reset, microseconds; a smaller one is a late update.
const STEP_US: u64 = 1_000_000;
/// Maximum number of missed requests that are counted between two reads, as a safeguard against a wrong count.
const MAX_MISSED: u64 = 100_000;
/// Minimum time that the means cover, in time constants, so that the first request does not look like a flood.
const SHORTEST: f64 = 1.0 / 8.0;

/// Counts requests as they come and go.
#[derive(Debug)]
pub struct Rates {
    window_us: f64,
    rif: u32,
    latest: Micros,
    /// Requests that ended, and requests that failed; each weighs less the older it is.
    ended: f64,
    failed: f64,
    /// Microseconds that requests spent in flight, and microseconds that have passed, weighted likewise.
    busy_us: f64,
    passed_us: f64,
}

impl Rates {
    /// Creates the counts of an idle replica. The means fade with a time constant of `window_us`, at least
    /// [`MIN_WINDOW_US`].
    pub fn new(now: Micros, window_us: u64) -> Self {
        let window_us = window_us.max(MIN_WINDOW_US) as f64;
        Self { window_us, rif: 0, latest: now, ended: 0.0, failed: 0.0, busy_us: 0.0, passed_us: 0.0 }
    }

    /// Counts a request that has ended; `rif` are left in flight.
    pub fn ended(&mut self, now: Micros, rif: u32, outcome: Outcome) {
        self.moved(now, rif);
        self.ended += 1.0;
        if outcome == Outcome::Failure {
            self.failed += 1.0;
        }
    }

    /// Changes the time constant from now on. The means so far stay.
    pub fn set_window(&mut self, now: Micros, window_us: u64) {
        let window_us = window_us.max(MIN_WINDOW_US) as f64;
        if window_us != self.window_us {
            self.pass(now);
            // Sums over a shorter time are smaller; their ratios stay the same.
            let left = (window_us / self.window_us).min(1.0);
            for sum in [&mut self.ended, &mut self.failed, &mut self.busy_us, &mut self.passed_us] {
                *sum *= left;
            }
            self.window_us = window_us;
        }
    }

    /// Counts a request that ended at `at` on another worker. The caller has advanced the time to now ([`Self::pass`]).
    /// The number in flight stays as it is.
    pub fn heard(&mut self, at: Micros, outcome: Outcome) {
        let left = (-(self.latest.saturating_since(at) as f64) / self.window_us).exp();
        self.ended += left;
        if outcome == Outcome::Failure {
            self.failed += left;
        }
    }

    /// Counts `count` more requests that ended on other workers recently and whose outcomes are lost. They count as
    /// failed in the same proportion as the requests counted so far.
    pub fn missed(&mut self, count: u64) {
        let count = count.min(MAX_MISSED) as f64;
        if self.ended > 0.0 {
            self.failed += count * self.failed / self.ended;
        }
        self.ended += count;
    }

    /// Sets the number of requests in flight to `rif` from now on.
    pub fn moved(&mut self, now: Micros, rif: u32) {
        self.pass(now);
        self.rif = rif;
    }

    /// Returns the means as of now.
    pub fn over(&mut self, now: Micros) -> Window {
        self.means(now, 0.0)
    }

    /// Like [`Self::over`], with the request that is leaving now counted as ended. Otherwise a replica that rarely
    /// serves requests would report a rate of zero.
    pub fn over_with_leaving(&mut self, now: Micros) -> Window {
        self.means(now, 1.0)
    }

    fn means(&mut self, now: Micros, leaving: f64) -> Window {
        self.pass(now);
        let passed_us = self.passed_us.max(self.window_us * SHORTEST);
        // `as` saturates, and none of these values is negative.
        let per_us = |sum: f64, unit: f64| (sum / passed_us * unit).round() as u64;
        Window {
            ended_milli: per_us(self.ended + leaving, 1e9),
            failed_milli: per_us(self.failed, 1e9),
            rif_micro: per_us(self.busy_us, 1e6),
        }
    }

    /// Advances the time, with the same number in flight as before.
    pub fn pass(&mut self, now: Micros) {
        if now < self.latest {
            if self.latest.saturating_since(now) > STEP_US {
                *self = Self { rif: self.rif, ..Self::new(now, self.window_us as u64) };
            }
            return;
        }
        let passed = now.saturating_since(self.latest) as f64 / self.window_us;
        self.latest = now;
        // Remaining share of the past, and the weighted time since then.
        let (kept, new_us) = ((-passed).exp(), -(-passed).exp_m1() * self.window_us);
        self.ended *= kept;
        self.failed *= kept;
        self.busy_us = self.busy_us * kept + f64::from(self.rif) * new_us;
        self.passed_us = self.passed_us * kept + new_us;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    /// Records ten requests per second of 300 ms each until second `end`; every fifth request fails.
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
                rates.moved(Micros(at), rif);
            } else {
                rif -= 1;
                let outcome = if n % 5 == 0 { Outcome::Failure } else { Outcome::Success };
                rates.ended(Micros(at), rif, outcome);
            }
        }
    }

    fn near(got: u64, known: f64) -> bool {
        (got as f64 - known).abs() <= 0.05 * known
    }

    #[test]
    fn steady_load_is_reported_correctly_from_the_start() {
        for seconds in [8, 20, 100] {
            let mut rates = Rates::new(Micros(0), 4 * SECOND);
            steady(&mut rates, seconds);
            let Window { ended_milli, failed_milli, rif_micro } = rates.over(Micros(seconds * SECOND));
            assert!(near(ended_milli, 10_000.0), "{seconds}: {ended_milli}");
            assert!(near(failed_milli, 2_000.0), "{seconds}: {failed_milli}");
            assert!(near(rif_micro, 3e6), "{seconds}: {rif_micro}");
        }
    }

    #[test]
    fn a_request_that_hangs_is_in_flight_though_nothing_happens() {
        let mut rates = Rates::new(Micros(0), 4 * SECOND);
        rates.moved(Micros(0), 1);
        rates.ended(Micros(0), 2, Outcome::Success);
        assert_eq!(rates.over(Micros(1000)).ended_milli, 2_000, "one in the shortest time, half a second");
        let later = rates.over(Micros(3600 * SECOND));
        assert_eq!(later, Window { rif_micro: 2_000_000, ..Window::default() });
        rates.moved(Micros(3600 * SECOND), 0);
        assert_eq!(rates.over(Micros(3700 * SECOND)), Window::default());
    }

    #[test]
    fn a_rare_request_counts_in_the_report_on_its_own_response() {
        let mut rates = Rates::new(Micros(0), SECOND);
        let second = SECOND as f64;
        for n in 1..=3 {
            rates.moved(Micros(100 * n * SECOND), 1);
            let leaves = Micros(100 * n * SECOND + SECOND / 10);
            let Window { ended_milli, rif_micro, .. } = rates.over_with_leaving(leaves);
            // One request of 100 ms: the rate divided by the requests in flight is one per 100 ms.
            let latency = rif_micro as f64 / 1e6 / (ended_milli as f64 / 1e3);
            assert!((latency * second / 100_000.0 - 1.0).abs() < 0.06, "{latency} s");
            rates.ended(leaves, 0, Outcome::Success);
        }
    }

    #[test]
    fn past_load_decays_with_the_time_constant() {
        let mut rates = Rates::new(Micros(0), 4 * SECOND);
        steady(&mut rates, 100);
        rates.moved(Micros(100 * SECOND), 0);
        let before = rates.over(Micros(100 * SECOND));
        let after = rates.over(Micros(104 * SECOND));
        let kept = (-1f64).exp();
        assert!(near(after.ended_milli, before.ended_milli as f64 * kept), "{after:?}");
        assert!(near(after.failed_milli, before.failed_milli as f64 * kept), "{after:?}");
        assert!(near(after.rif_micro, before.rif_micro as f64 * kept), "{after:?}");
    }

    #[test]
    fn requests_that_ended_in_another_worker_count_the_same() {
        let (mut here, mut elsewhere) = (Rates::new(Micros(0), SECOND), Rates::new(Micros(0), SECOND));
        for n in 0..100 {
            let outcome = if n % 4 == 0 { Outcome::Failure } else { Outcome::Success };
            here.ended(Micros(n * SECOND / 10), 0, outcome);
            if n % 20 == 19 {
                // This worker reads only every two seconds.
                elsewhere.pass(Micros(n * SECOND / 10));
                (n - 19..=n).for_each(|n| {
                    let outcome = if n % 4 == 0 { Outcome::Failure } else { Outcome::Success };
                    elsewhere.heard(Micros(n * SECOND / 10), outcome);
                });
            }
        }
        let (here, there) = (here.over(Micros(10 * SECOND)), elsewhere.over(Micros(10 * SECOND)));
        assert!(near(there.ended_milli, here.ended_milli as f64), "{there:?} {here:?}");
        assert!(near(there.failed_milli, here.failed_milli as f64), "{there:?} {here:?}");
        elsewhere.missed(1000);
        let more = elsewhere.over(Micros(10 * SECOND));
        assert!(near(more.ended_milli, there.ended_milli as f64 + 1e6), "{more:?}");
        assert!(near(more.failed_milli * there.ended_milli, (there.failed_milli * more.ended_milli) as f64));
        for wrong in [Micros(u64::MAX), Micros(0)] {
            elsewhere.heard(wrong, Outcome::Success);
            elsewhere.missed(u64::MAX);
        }
        assert!(elsewhere.over(Micros(10 * SECOND)).ended_milli < 1_000_000_000);
    }

    #[test]
    fn a_new_time_constant_does_not_change_steady_means() {
        let mut rates = Rates::new(Micros(0), 20 * SECOND);
        steady(&mut rates, 100);
        rates.set_window(Micros(100 * SECOND), 2 * SECOND);
        assert!(near(rates.over(Micros(100 * SECOND)).ended_milli, 10_000.0));
        rates.moved(Micros(100 * SECOND), 0);
        let after = rates.over(Micros(104 * SECOND)).ended_milli;
        assert!(near(after, 10_000.0 * (-2f64).exp()), "{after}");
    }

    #[test]
    fn clock_steps_do_no_harm() {
        let mut rates = Rates::new(Micros(1000 * SECOND), SECOND);
        rates.ended(Micros(1000 * SECOND), 1, Outcome::Success);
        rates.ended(Micros(999 * SECOND + SECOND / 2), 2, Outcome::Success);
        let late = rates.over(Micros(1000 * SECOND)).ended_milli;
        assert_eq!(late, 16_000, "an update that comes late counts");
        rates.moved(Micros(10 * SECOND), 2);
        assert_eq!(rates.over(Micros(12 * SECOND)), Window { rif_micro: 2_000_000, ..Window::default() });
        rates.ended(Micros(u64::MAX), u32::MAX, Outcome::Failure);
        rates.ended(Micros(0), u32::MAX, Outcome::Failure);
        let _ = rates.over(Micros(u64::MAX));
    }
}
