//! Sliding windows over the load generator's results: pure, so that the numbers on the page can be tested.
//!
//! A request belongs to the second in which it *ended*, because its outcome is unknown before. A window covers
//! [`WINDOW`] whole seconds and is named by the last of them. A failed request counts as at least [`FAILED_US`], so
//! failing early never improves a tail.

use std::collections::VecDeque;

/// Seconds in a window.
pub(crate) const WINDOW: usize = 5;

/// Seconds kept.
pub(crate) const KEPT: usize = 300;

/// Minimum latency of a failed request, microseconds: Envoy's timeout in the demo's configuration.
pub(crate) const FAILED_US: u32 = 2_000_000;

/// Upper limit of replica numbers, exclusive.
pub(crate) const REPLICAS: usize = 100;

/// One request that ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    /// From the instant at which it was due to the end of its body, or to its failure.
    pub(crate) latency_us: u32,
    pub(crate) ok: bool,
    /// The replica that answered, if the response named it.
    pub(crate) replica: Option<u16>,
}

#[derive(Clone, Debug, Default)]
struct Second {
    /// One latency per request; failed requests count as at least [`FAILED_US`].
    latencies_us: Vec<u32>,
    failed: u32,
    /// Number of answers by replica.
    answered: Vec<(u16, u32)>,
}

/// The results of one side, second by second.
#[derive(Clone, Debug)]
pub(crate) struct Windows {
    seconds: VecDeque<Second>,
    /// Number of the first second kept.
    first: u64,
    pub(crate) ok: u64,
    pub(crate) failed: u64,
}

/// The figures of one window.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Figures {
    /// The last second of the window.
    pub(crate) second: u64,
    pub(crate) samples: usize,
    /// Failures in the whole window.
    pub(crate) failed: u32,
    /// Failures in its last second.
    pub(crate) failed_now: u32,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) p999_ms: f64,
    /// Answers by replica, without replicas that gave none.
    pub(crate) answered: Vec<(u16, u32)>,
}

impl Windows {
    pub(crate) fn new() -> Self {
        Self { seconds: VecDeque::new(), first: 0, ok: 0, failed: 0 }
    }

    /// Records a request that ended in `second`. If that second is no longer kept, the request counts only in the
    /// totals.
    pub(crate) fn record(&mut self, second: u64, outcome: Outcome) {
        if outcome.ok {
            self.ok += 1;
        } else {
            self.failed += 1;
        }
        if second < self.first {
            return;
        }
        self.reach(second);
        let Some(entry) = self.seconds.get_mut((second - self.first) as usize) else { return };
        if !outcome.ok {
            entry.failed += 1;
        }
        let latency = if outcome.ok { outcome.latency_us } else { outcome.latency_us.max(FAILED_US) };
        entry.latencies_us.push(latency);
        if let Some(replica) = outcome.replica.filter(|replica| usize::from(*replica) < REPLICAS) {
            match entry.answered.iter_mut().find(|(number, _)| *number == replica) {
                Some((_, count)) => *count += 1,
                None => entry.answered.push((replica, 1)),
            }
        }
    }

    /// Windows that end with a second after `since` and before `now`, oldest first; at most [`KEPT`].
    pub(crate) fn since(&mut self, since: u64, now: u64) -> Vec<Figures> {
        if now > 0 {
            self.reach(now - 1);
        }
        let begin = (since + 1).max(self.first + WINDOW as u64 - 1);
        (begin..now).filter_map(|second| self.window(second)).collect()
    }

    fn window(&self, second: u64) -> Option<Figures> {
        let last = usize::try_from(second.checked_sub(self.first)?).ok()?;
        let start = (last + 1).checked_sub(WINDOW)?;
        let seconds = || self.seconds.range(start..=last.min(self.seconds.len().saturating_sub(1)));
        let mut latencies: Vec<u32> = seconds().flat_map(|s| s.latencies_us.iter().copied()).collect();
        latencies.sort_unstable();
        let mut answered: Vec<(u16, u32)> = Vec::new();
        for (replica, count) in seconds().flat_map(|s| s.answered.iter().copied()) {
            match answered.iter_mut().find(|(number, _)| *number == replica) {
                Some((_, sum)) => *sum += count,
                None => answered.push((replica, count)),
            }
        }
        answered.sort_unstable();
        Some(Figures {
            second,
            samples: latencies.len(),
            failed: seconds().map(|s| s.failed).sum(),
            failed_now: self.seconds.get(last).map_or(0, |s| s.failed),
            p50_ms: quantile_ms(&latencies, 500),
            p99_ms: quantile_ms(&latencies, 990),
            p999_ms: quantile_ms(&latencies, 999),
            answered,
        })
    }

    /// Extends the range up to `second`, dropping seconds older than [`KEPT`].
    fn reach(&mut self, second: u64) {
        let kept = KEPT as u64;
        if second >= self.first + self.seconds.len() as u64 + kept {
            self.seconds.clear();
            self.first = second;
        }
        while self.first + self.seconds.len() as u64 <= second {
            self.seconds.push_back(Second::default());
        }
        while self.seconds.len() > KEPT {
            self.seconds.pop_front();
            self.first += 1;
        }
    }
}

/// Nearest rank; 0 without samples.
fn quantile_ms(sorted_us: &[u32], per_mille: usize) -> f64 {
    let rank = (sorted_us.len() * per_mille).div_ceil(1000).max(1);
    sorted_us.get(rank - 1).map_or(0.0, |us| f64::from(*us) / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok(ms: u32, replica: u16) -> Outcome {
        Outcome { latency_us: ms * 1000, ok: true, replica: Some(replica) }
    }

    #[test]
    fn a_window_is_five_whole_seconds() {
        let mut windows = Windows::new();
        for second in 0..6 {
            for ms in 1..=200 {
                windows.record(second, ok(ms, (second % 2) as u16));
            }
        }
        // Second 5 has not ended: not a window yet.
        let figures = windows.since(0, 5);
        assert_eq!(figures.len(), 1, "seconds 0 to 4 and nothing else");
        assert_eq!((figures[0].second, figures[0].samples), (4, 1000));
        assert_eq!((figures[0].p50_ms, figures[0].p99_ms, figures[0].p999_ms), (100.0, 198.0, 200.0));
        assert_eq!(figures[0].answered, [(0, 600), (1, 400)]);
        assert_eq!(windows.since(4, 6).len(), 1);
    }

    #[test]
    fn a_failure_never_improves_a_tail() {
        let mut windows = Windows::new();
        for second in 0..5 {
            for _ in 0..9 {
                windows.record(second, ok(10, 1));
            }
            windows.record(second, Outcome { latency_us: 900, ok: false, replica: None });
        }
        let figures = windows.since(0, 5);
        assert_eq!((figures[0].failed, figures[0].failed_now), (5, 1));
        assert_eq!((figures[0].p50_ms, figures[0].p99_ms), (10.0, 2000.0));
        assert_eq!((windows.ok, windows.failed), (45, 5));
    }

    #[test]
    fn old_seconds_are_dropped_and_a_window_without_requests_is_empty() {
        let mut windows = Windows::new();
        windows.record(0, ok(1, 1));
        windows.record(10_000, ok(1, 1));
        windows.record(3, ok(1, 1));
        assert_eq!(windows.ok, 3, "in the totals");
        let figures = windows.since(0, 10_020);
        assert!(figures.len() <= KEPT);
        assert_eq!(figures.last().map(|f| (f.samples, f.p99_ms)), Some((0, 0.0)));
    }
}
