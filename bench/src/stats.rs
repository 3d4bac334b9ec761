//! What one run measured, reduced to the numbers that are compared.
//!
//! Quantiles are taken from the sorted samples, not from a histogram: a run has some ten thousands of
//! them. A failed request ranks above every answered one, so failing early can never improve a tail.
//! Collecting the samples is the business of `load`.

use std::time::Duration;

/// Latencies above this miss the objective that the tables call "≤ 500 ms".
pub(crate) const OBJECTIVE: Duration = Duration::from_millis(500);

/// One request of the generator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// When it was due to be sent, from the start of the run.
    pub(crate) due: Duration,
    /// From the moment it was due until the end of the body, or `None` if it failed.
    pub(crate) latency: Option<Duration>,
    /// Number of the backend that answered, as it named itself.
    pub(crate) replica: Option<u16>,
}

/// The figures of one run, or of a part of one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    /// Sorted, failures excluded.
    latencies_ms: Vec<f64>,
    pub(crate) samples: usize,
    pub(crate) failed: usize,
    pub(crate) slow: usize,
}

impl Summary {
    /// Reduces `samples`; `slow` says which backends form the slow pair.
    pub(crate) fn of<'a>(samples: impl IntoIterator<Item = &'a Sample>, slow: impl Fn(u16) -> bool) -> Self {
        let mut summary = Self::default();
        for sample in samples {
            summary.samples += 1;
            match sample.latency {
                Some(latency) => summary.latencies_ms.push(latency.as_secs_f64() * 1e3),
                None => summary.failed += 1,
            }
            summary.slow += usize::from(sample.replica.is_some_and(&slow));
        }
        summary.latencies_ms.sort_by(f64::total_cmp);
        summary
    }

    /// The `q` quantile in ms (nearest rank); infinite where failures reach down to it, NaN without samples.
    pub(crate) fn quantile_ms(&self, q: f64) -> f64 {
        if self.samples == 0 {
            return f64::NAN;
        }
        // The small term keeps 0.999 × 10 000 at rank 9990 although the product is not exact.
        let rank = (q * self.samples as f64 - 1e-6).ceil().max(1.0) as usize;
        self.latencies_ms.get(rank - 1).copied().unwrap_or(f64::INFINITY)
    }

    /// Share of all requests answered within [`OBJECTIVE`].
    pub(crate) fn within_objective(&self) -> f64 {
        let limit = OBJECTIVE.as_secs_f64() * 1e3;
        self.latencies_ms.partition_point(|ms| *ms <= limit) as f64 / self.samples as f64
    }

    /// Share of all requests that the slow pair answered.
    pub(crate) fn slow_share(&self) -> f64 {
        self.slow as f64 / self.samples as f64
    }

    /// `(quantile, ms)` from the median outwards, for plotting: finer and finer towards 1.
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

/// Smallest and largest of a series that holds no NaN.
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
        Sample { due: Duration::ZERO, latency: ms.map(Duration::from_millis), replica: Some(replica) }
    }

    #[test]
    fn quantiles_are_nearest_rank() {
        let samples: Vec<Sample> = (1..=1000).map(|ms| sample(Some(ms), 0)).collect();
        let summary = Summary::of(&samples, |_| false);
        for (q, ms) in [(0.0, 1.0), (0.5, 500.0), (0.99, 990.0), (0.999, 999.0), (1.0, 1000.0)] {
            assert_eq!(summary.quantile_ms(q), ms, "quantile {q}");
        }
        assert_eq!(summary.within_objective(), 0.5);
    }

    #[test]
    fn failures_rank_above_every_answer() {
        let samples = [sample(Some(50), 0), sample(Some(51), 15), sample(None, 0), sample(Some(52), 0)];
        let summary = Summary::of(&samples, |replica| replica >= 14);
        assert_eq!((summary.samples, summary.failed, summary.slow), (4, 1, 1));
        assert_eq!(summary.quantile_ms(0.75), 52.0);
        assert_eq!(summary.quantile_ms(0.99), f64::INFINITY);
        assert_eq!(summary.within_objective(), 0.75);
    }

    #[test]
    fn nothing_measured_is_not_a_number() {
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
