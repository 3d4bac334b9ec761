//! Detects that requests share one core.
//!
//! Clients that choose replicas in turn send a replica its second request when the first one is nearly done. On a shared
//! core, the second one then takes little longer than alone, so the fit concludes that two requests are served as fast
//! as one. Busy periods show the difference. A busy period lasts from an arrival at the idle replica until the replica
//! is idle again. If one core does all the work, the period lasts as long as its requests would take one by one, in
//! whichever order they are served. With two cores it is shorter. The gain is small only if the second request begins
//! just before the first one leaves; then it does not matter how many are served at once.
//!
//! This holds only where requests take equally long: otherwise those that are alone in their busy period are shorter
//! than the others.

use super::single::{ENOUGH, ERROR, error_of};
use super::{ASSUMED, Row};
use crate::shared::time::Micros;

/// Squared coefficient of variation of the times of lone requests, beyond which requests do not take equally long.
const EQUAL: f64 = 0.1;
/// The same for the times of all requests, which sharing makes longer.
const SIMILAR: f64 = 0.2;

/// Fading sums over the busy periods whose requests were all answered well.
#[derive(Debug, Default)]
pub(super) struct OneCore {
    current: Period,
    /// Number of periods with one request, and the sums of their times and of the squares of these.
    alone: f64,
    alone_took: f64,
    alone_squares: f64,
    /// Number of requests in periods with several, and the sum of the times of these periods.
    together: f64,
    together_took: f64,
}

/// A busy period.
#[derive(Clone, Copy, Debug, Default)]
struct Period {
    began: Micros,
    /// When a request last left.
    left_at: Micros,
    /// Highest number of requests at the server.
    most: u32,
    left: u32,
    /// Number of good responses.
    answered: u32,
}

impl OneCore {
    /// Records that the number of requests at the server changes from `before` to `after`.
    pub(super) fn moved(&mut self, now: Micros, weight: f64, before: u32, after: u32) {
        if before == 0 && after > 0 {
            // The response to the last request is counted after its departure, so only now is the period complete.
            self.count(weight);
            self.current = Period { began: now, left_at: now, ..Period::default() };
        }
        self.current.most = self.current.most.max(after);
        if after < before {
            self.current.left_at = now;
            self.current.left = self.current.left.wrapping_add(before - after);
        }
    }

    /// Records that a request which left to wait for its client is back, beside `others`.
    pub(super) fn came_back(&mut self, now: Micros, others: u32) {
        if others == 0 {
            // The period goes on. The wait was no work.
            self.current.began.0 += now.saturating_since(self.current.left_at);
        }
        self.current.left = self.current.left.saturating_sub(1);
        self.current.most = self.current.most.max(others + 1);
    }

    /// Records a good response to a request that took `latency_us`. A request that arrived before the period does not
    /// count: its client has kept it waiting.
    pub(super) fn answered(&mut self, now: Micros, latency_us: u32) {
        if now.saturating_since(self.current.began) >= latency_us.into() {
            self.current.answered = self.current.answered.wrapping_add(1);
        }
    }

    /// Counts the period that has ended.
    fn count(&mut self, weight: f64) {
        let Period { began, left_at, most, left, answered, .. } = self.current;
        if left != answered || left == 0 {
            return;
        }
        let took = left_at.saturating_since(began) as f64;
        if most == 1 {
            self.alone += weight;
            self.alone_took += took * weight;
            self.alone_squares += took * took * weight;
        } else {
            self.together += f64::from(left) * weight;
            self.together_took += took * weight;
        }
    }

    /// Whether requests share one core. `all` has all good responses, and `level` requests are at the server now. With
    /// `leaving`, one of them is about to leave.
    pub(super) fn is_evident(&self, now: Micros, level: u32, all: &Row, weight: f64, leaving: bool) -> bool {
        if self.alone < ENOUGH * weight || self.alone_took <= 0.0 {
            return false;
        }
        let mean = self.alone_took / self.alone;
        let (mut together, mut together_took) = (self.together, self.together_took);
        // The current period counts as far as it has come. Otherwise, the first requests that meet would seem to be on
        // two cores until the period ends. But it does not count if it has lasted longer than one core needs for its
        // requests: one of them hangs.
        let Period { began, left_at, most, left, answered } = self.current;
        let ended = if level > 0 { now } else { left_at };
        let took = ended.saturating_since(began) as f64;
        let leaves = left.wrapping_add(leaving.into());
        if most > 1
            && left == answered
            && leaves > 0
            && took <= f64::from(left.wrapping_add(level)) * mean * (1.0 + ERROR.1)
        {
            together += f64::from(leaves) * weight;
            together_took += took * weight;
        }
        // Where requests take equally long, one response in such a period is enough.
        if together < weight {
            return false;
        }
        let squared = (self.alone_squares / self.alone / (mean * mean) - 1.0).max(0.0);
        let variation = squared + ASSUMED * weight / self.alone;
        let error = error_of(variation * weight, together, self.alone);
        let similar = all.squares * all.met <= (1.0 + SIMILAR) * all.took * all.took;
        similar && variation <= EQUAL && together_took / together >= mean * (1.0 - error)
    }

    /// Forgets the periods so far. The current one will not count, because the response that led here is not counted.
    pub(super) fn start_anew(&mut self) {
        *self = Self { current: self.current, ..Self::default() };
    }

    /// Divides the sums by `weight`.
    pub(super) fn scale(&mut self, weight: f64) {
        for sum in [
            &mut self.alone,
            &mut self.alone_took,
            &mut self.alone_squares,
            &mut self.together,
            &mut self.together_took,
        ] {
            *sum /= weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs busy periods, each given by the times at which its requests arrive (true) and are answered, first come, first
    /// answered.
    fn over(periods: &[&[(u64, bool)]]) -> OneCore {
        let mut core = OneCore::default();
        let mut began = 0;
        for period in periods {
            began += 1000;
            let mut arrived = std::collections::VecDeque::new();
            for (at, arrives) in *period {
                let (now, level) = (Micros(began + at), arrived.len() as u32);
                if *arrives {
                    core.moved(now, 1.0, level, level + 1);
                    arrived.push_back(at);
                } else {
                    core.moved(now, 1.0, level, level - 1);
                    core.answered(now, (at - arrived.pop_front().unwrap()) as u32);
                }
            }
        }
        core
    }

    fn is_evident(periods: &[&[(u64, bool)]]) -> bool {
        over(periods).is_evident(Micros(0), 0, &SIMILAR_TIMES, 1.0, false)
    }

    const ALONE: &[(u64, bool)] = &[(0, true), (100, false)];

    #[test]
    fn periods_as_long_as_their_requests_one_by_one_are_evidence() {
        // Both orders: a queue before one slot, and a core that two requests share.
        for together in [
            &[(0, true), (30, true), (100, false), (200, false)],
            &[(0, true), (30, true), (170, false), (200, false)],
        ] {
            assert!(is_evident(&[ALONE, ALONE, ALONE, together]));
            assert!(!is_evident(&[ALONE, ALONE, together]), "too few were alone");
        }
        assert!(!is_evident(&[ALONE; 9]), "no two were together");
    }

    #[test]
    fn shorter_periods_and_unequal_requests_are_not() {
        let two_cores = &[(0, true), (30, true), (100, false), (130, false)];
        assert!(!is_evident(&[ALONE, ALONE, ALONE, two_cores]));
        let one_core = &[(0, true), (30, true), (170, false), (200, false)];
        let short = &[(0, true), (20, false)];
        assert!(!is_evident(&[ALONE, short, ALONE, short, one_core]));
        // The lone requests are equal, but some others take much longer.
        let all = Row { met: 10.0, took: 1900.0, squares: 1_090_000.0, ..Row::default() };
        assert!(!over(&[ALONE, ALONE, ALONE, one_core]).is_evident(Micros(0), 0, &all, 1.0, false));
    }

    /// All good responses, where requests take about equally long.
    const SIMILAR_TIMES: Row = Row { time: 0.0, left: 0.0, met: 10.0, took: 1200.0, squares: 156_000.0 };

    #[test]
    fn the_current_period_counts_as_far_as_it_has_come() {
        for (first, second, shared) in [(170, 200, true), (100, 130, false)] {
            let mut core = over(&[ALONE, ALONE, ALONE]);
            core.moved(Micros(9000), 1.0, 0, 1);
            core.moved(Micros(9030), 1.0, 1, 2);
            let (first, second) = (Micros(9000 + first), Micros(9000 + second));
            assert!(core.is_evident(first, 2, &SIMILAR_TIMES, 1.0, true), "the first one leaves");
            core.moved(first, 1.0, 2, 1);
            core.answered(first, (first.0 - 9000) as u32);
            assert_eq!(core.is_evident(second, 1, &SIMILAR_TIMES, 1.0, true), shared);
            core.moved(second, 1.0, 1, 0);
            core.answered(second, (second.0 - 9030) as u32);
            assert_eq!(core.is_evident(Micros(9999), 0, &SIMILAR_TIMES, 1.0, false), shared);
        }
    }

    #[test]
    fn a_request_that_hangs_is_not_mistaken_for_one_that_shares_a_core() {
        let mut core = over(&[ALONE, ALONE, ALONE]);
        core.moved(Micros(9000), 1.0, 0, 1);
        core.moved(Micros(9150), 1.0, 1, 2);
        assert!(!core.is_evident(Micros(9250), 2, &SIMILAR_TIMES, 1.0, true));
    }

    #[test]
    fn a_wait_for_the_client_neither_ends_a_period_nor_counts_as_work() {
        for (first, second, shared) in [(170, 200, true), (100, 130, false)] {
            let mut core = over(&[ALONE, ALONE, ALONE]);
            // The first request waits for 500 µs while it is alone, and the second one for 1 µs before it ends.
            core.moved(Micros(9000), 1.0, 0, 1);
            core.moved(Micros(9010), 1.0, 1, 0);
            core.came_back(Micros(9510), 0);
            core.moved(Micros(9530), 1.0, 1, 2);
            core.moved(Micros(9500 + first), 1.0, 2, 1);
            core.answered(Micros(9500 + first), first as u32);
            core.moved(Micros(9499 + second), 1.0, 1, 0);
            core.came_back(Micros(9500 + second), 0);
            core.moved(Micros(9501 + second), 1.0, 1, 0);
            core.answered(Micros(9501 + second), (second - 30) as u32);
            assert_eq!(core.is_evident(Micros(9999), 0, &SIMILAR_TIMES, 1.0, false), shared);
        }
    }

    #[test]
    fn a_request_that_returns_in_another_period_does_not_count_there() {
        let mut core = OneCore::default();
        core.moved(Micros(1000), 1.0, 0, 1);
        core.moved(Micros(1040), 1.0, 1, 0);
        core.moved(Micros(2000), 1.0, 0, 1);
        core.came_back(Micros(2010), 1);
        core.moved(Micros(2020), 1.0, 2, 1);
        core.answered(Micros(2020), 1050);
        core.moved(Micros(2100), 1.0, 1, 0);
        core.answered(Micros(2100), 100);
        core.moved(Micros(3000), 1.0, 0, 1);
        assert!((core.alone, core.together) == (0.0, 0.0));
    }

    #[test]
    fn a_period_counts_only_if_all_its_requests_were_answered_well() {
        let mut core = over(&[ALONE, ALONE, ALONE]);
        core.moved(Micros(8900), 1.0, 0, 1);
        core.moved(Micros(9000), 1.0, 1, 2);
        core.moved(Micros(9100), 1.0, 2, 1);
        core.answered(Micros(9100), 200);
        core.moved(Micros(9200), 1.0, 1, 0);
        core.moved(Micros(9300), 1.0, 0, 1);
        assert_eq!((core.alone, core.together), (3.0, 0.0), "one was not answered");
        core.start_anew();
        assert!((core.alone, core.together) == (0.0, 0.0));
    }
}
