//! The samples of one run, reduced to the figures that are compared.
//!
//! Quantiles are taken from the sorted samples instead of a histogram: a run has only tens of thousands of them. A
//! failed request ranks above every answered one, so that failing early can never improve a tail. `load` and `closed`
//! collect the samples.

use std::collections::BTreeMap;
use std::time::Duration;

/// One request of a generator.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    /// Time at which it was due, from the start of the run.
    pub(crate) due: Duration,
    /// How late the generator sent it.
    pub(crate) late: Duration,
    /// From the due time until the end of the body, or `None` if it failed (anything but a complete 200).
    pub(crate) latency: Option<Duration>,
    /// From the due time until the head of the answer, which a streaming replica sends with the first token.
    pub(crate) first_byte: Option<Duration>,
    /// Number of tokens in the answer; 0 if the replica is not an inference engine.
    pub(crate) generated: u32,
    /// Number of the replica that answered, from its response header.
    pub(crate) replica: Option<u16>,
    /// `None` if no complete answer arrived.
    pub(crate) status: Option<u16>,
    /// Whether a replica with a cache had the key.
    pub(crate) cache_hit: Option<bool>,
}

/// The figures of one run, or of a part of one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    /// Sorted, failures excluded.
    latencies_ms: Vec<f64>,
    pub(crate) samples: usize,
    pub(crate) failed: usize,
    /// Failed requests that a replica itself answered with a 503.
    pub(crate) rejected: usize,
    /// Requests that reached a marked replica, answered or not.
    pub(crate) marked: usize,
    /// Requests by the replica that they reached, answered or not.
    by_replica: BTreeMap<u16, usize>,
    hits: usize,
    looked_up: usize,
}

impl Summary {
    /// Reduces `samples`; `marked` selects the replicas that are reported separately.
    pub(crate) fn of<'a>(
        samples: impl IntoIterator<Item = &'a Sample>,
        marked: impl Fn(u16) -> bool,
    ) -> Self {
        let mut summary = Self::default();
        for sample in samples {
            summary.samples += 1;
            match sample.latency {
                Some(latency) => summary.latencies_ms.push(latency.as_secs_f64() * 1e3),
                None => summary.failed += 1,
            }
            summary.rejected += usize::from(sample.status == Some(503) && sample.replica.is_some());
            summary.marked += usize::from(sample.replica.is_some_and(&marked));
            if let Some(replica) = sample.replica {
                *summary.by_replica.entry(replica).or_default() += 1;
            }
            summary.looked_up += usize::from(sample.cache_hit.is_some());
            summary.hits += usize::from(sample.cache_hit == Some(true));
        }
        summary.latencies_ms.sort_by(f64::total_cmp);
        summary
    }

    /// The `q` quantile in ms (nearest rank); infinite if failures reach that quantile, NaN without samples.
    pub(crate) fn quantile_ms(&self, q: f64) -> f64 {
        if self.samples == 0 {
            return f64::NAN;
        }
        // The small term keeps 0.999 × 10 000 at rank 9990, although the product is inexact.
        let rank = (q * self.samples as f64 - 1e-6).ceil().max(1.0) as usize;
        self.latencies_ms.get(rank - 1).copied().unwrap_or(f64::INFINITY)
    }

    /// Share of all requests answered within `limit`.
    pub(crate) fn within(&self, limit: Duration) -> f64 {
        let limit = limit.as_secs_f64() * 1e3;
        self.latencies_ms.partition_point(|ms| *ms <= limit) as f64 / self.samples as f64
    }

    /// Share of all requests that the marked replicas got.
    pub(crate) fn marked_share(&self) -> f64 {
        self.marked as f64 / self.samples as f64
    }

    /// Number of requests of the least used of `replicas` replicas, relative to its fair share.
    pub(crate) fn least_part(&self, replicas: usize) -> f64 {
        let fair = self.samples as f64 / replicas as f64;
        let least =
            (0..replicas).map(|replica| self.by_replica.get(&(replica as u16)).copied().unwrap_or(0)).min();
        least.map_or(f64::NAN, |least| least as f64 / fair)
    }

    /// Share of hits among the requests that a replica with a cache answered.
    pub(crate) fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.looked_up as f64
    }

    /// `(quantile, ms)` from the median outwards for plotting, with increasing resolution towards 1.
    pub(crate) fn tail(&self) -> Vec<(f64, f64)> {
        let finest = (self.samples as f64).log10();
        let steps = (finest * 60.0) as usize;
        (0..=steps)
            .map(|step| 1.0 - 10f64.powf(-(step as f64) / 60.0))
            .filter(|q| *q >= 0.5)
            .map(|q| (q, self.quantile_ms(q)))
            .filter(|(_, ms)| ms.is_finite())
            .collect()
    }
}

/// Smallest and largest value of a series without NaN.
pub(crate) fn min_max(values: impl IntoIterator<Item = f64>) -> (f64, f64) {
    values.into_iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
}

/// The middle value, or the mean of the middle two; NaN for an empty series.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(ms: Option<u64>, replica: u16) -> Sample {
        Sample { latency: ms.map(Duration::from_millis), replica: Some(replica), ..Sample::default() }
    }

    #[test]
    fn quantiles_are_nearest_rank() {
        let samples: Vec<Sample> = (1..=1000).map(|ms| sample(Some(ms), 0)).collect();
        let summary = Summary::of(&samples, |_| false);
        for (q, ms) in [(0.0, 1.0), (0.5, 500.0), (0.99, 990.0), (0.999, 999.0), (1.0, 1000.0)] {
            assert_eq!(summary.quantile_ms(q), ms, "quantile {q}");
        }
        assert_eq!(summary.within(Duration::from_millis(500)), 0.5);
    }

    #[test]
    fn failures_rank_above_every_answer() {
        let samples = [sample(Some(50), 0), sample(Some(51), 15), sample(None, 0), sample(Some(52), 0)];
        let summary = Summary::of(&samples, |replica| replica >= 14);
        assert_eq!((summary.samples, summary.failed, summary.marked), (4, 1, 1));
        assert_eq!(summary.quantile_ms(0.75), 52.0);
        assert_eq!(summary.quantile_ms(0.99), f64::INFINITY);
        assert_eq!(summary.within(Duration::from_secs(1)), 0.75);
    }

    #[test]
    fn only_requests_that_a_replica_refused_count_as_rejected() {
        let by_backend = Sample { status: Some(503), replica: Some(1), ..Sample::default() };
        let by_envoy = Sample { status: Some(503), ..Sample::default() };
        let summary = Summary::of(&[by_backend, by_envoy, Sample::default()], |_| true);
        assert_eq!((summary.failed, summary.rejected, summary.marked), (3, 1, 1));
    }

    #[test]
    fn the_least_used_replica_may_have_no_requests() {
        let samples: Vec<Sample> = (0..12).map(|number| sample(Some(1), number % 3)).collect();
        let mut summary = Summary::of(&samples, |_| false);
        assert_eq!(summary.least_part(3), 1.0);
        assert_eq!(summary.least_part(4), 0.0);
        summary = Summary::of(&samples[..11], |_| false);
        assert!((summary.least_part(3) - 9.0 / 11.0).abs() < 1e-9);
        assert!(Summary::default().least_part(3).is_nan());
    }

    #[test]
    fn hits_count_among_lookups() {
        let looked_up = |hit| Sample { cache_hit: Some(hit), ..sample(Some(10), 0) };
        let samples = [looked_up(true), looked_up(true), looked_up(true), looked_up(false), sample(None, 0)];
        assert_eq!(Summary::of(&samples, |_| false).hit_rate(), 0.75);
    }

    #[test]
    fn figures_of_an_empty_run_are_nan() {
        let empty = Summary::of(&[], |_| true);
        assert!(empty.quantile_ms(0.5).is_nan());
        assert!(median([]).is_nan());
    }

    #[test]
    fn median_of_odd_and_even() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
