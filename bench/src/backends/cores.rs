//! Cores that the requests of a replica share equally (processor sharing). This is only a calculation of when each
//! request ends; nothing here uses CPU time.

use std::time::{Duration, Instant};

/// The requests that share the cores.
///
/// Each of `n` requests gets a whole core, or `cores / n` of one if that is less. As in a queue, a request ends when it
/// should, not when this busy machine answers it. Until that time, a request keeps its share even if its client gives
/// up.
#[derive(Default)]
pub(super) struct SharedCores {
    cores: usize,
    /// The last update.
    at: Option<Instant>,
    /// Core time that a request present from the start would have received by then, seconds.
    served: f64,
    /// The values of `served` at which the requests end, in descending order.
    ends: Vec<f64>,
}

/// One of the requests: the value of `served` at which it ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Share(f64);

impl SharedCores {
    /// Adds a request that arrives `now` and needs `time` of a core.
    pub(super) fn add(&mut self, cores: usize, now: Instant, time: Duration) -> Share {
        self.advance(now);
        self.cores = cores.max(1);
        let end = self.served + time.as_secs_f64();
        let index = self.ends.partition_point(|other| *other > end);
        self.ends.insert(index, end);
        Share(end)
    }

    /// Returns the instant at which the request ends if no other one arrives; `None` if it has ended.
    pub(super) fn end(&mut self, share: Share, now: Instant) -> Option<Instant> {
        self.advance(now);
        let mut at = self.at.filter(|_| share.0 > self.served)?;
        let mut served = self.served;
        for (others, end) in self.ends.iter().enumerate().rev() {
            at += Duration::from_secs_f64(((end - served) * self.slowdown(others + 1)).max(0.0));
            served = *end;
            if *end >= share.0 {
                break;
            }
        }
        Some(at)
    }

    /// Lets the requests share the cores until `now`.
    fn advance(&mut self, now: Instant) {
        let mut left = now.saturating_duration_since(*self.at.get_or_insert(now)).as_secs_f64();
        while let Some(end) = self.ends.last() {
            let slowdown = self.slowdown(self.ends.len());
            let needed = (end - self.served) * slowdown;
            if needed > left {
                self.served += left / slowdown;
                break;
            }
            left -= needed;
            self.served = *end;
            self.ends.pop();
        }
        self.at = self.at.max(Some(now));
    }

    /// The factor by which sharing slows down each of `requests` requests.
    fn slowdown(&self, requests: usize) -> f64 {
        (requests as f64 / self.cores as f64).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_share_the_cores_equally() {
        let begin = Instant::now();
        let ms = |ms| Duration::from_millis(ms);
        let mut cores = SharedCores::default();
        let end = |cores: &mut SharedCores, share, at| {
            cores.end(share, begin + ms(at)).map(|end| (end - begin).as_secs_f64() * 1e3)
        };
        let near = |found: Option<f64>, expected: f64| {
            assert!(found.is_some_and(|found| (found - expected).abs() < 0.01), "{found:?}, not {expected}");
        };
        let long = cores.add(2, begin, ms(100));
        near(end(&mut cores, long, 0), 100.0);
        let other = cores.add(2, begin + ms(10), ms(100));
        near(end(&mut cores, long, 10), 100.0);
        // Three on two cores: 60 ms of work take 90 ms.
        let short = cores.add(2, begin + ms(20), ms(60));
        near(end(&mut cores, short, 20), 110.0);
        // Until then the long one has had 80 ms. Two requests do not slow each other down.
        near(end(&mut cores, long, 20), 130.0);
        near(end(&mut cores, other, 20), 140.0);
        assert_eq!(end(&mut cores, short, 111), None);
        near(end(&mut cores, long, 111), 130.0);
        // A busy machine that looks much later finds that all have ended on time.
        let next = cores.add(2, begin + ms(500), ms(5));
        near(end(&mut cores, next, 500), 505.0);
        assert_eq!(end(&mut cores, other, 500), None);
    }
}
