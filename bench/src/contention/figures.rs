//! The figures of one step, measured or simulated.

/// The quantiles that are compared, and their names.
pub(super) const QUANTILES: [(f64, &str); 4] = [(0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9")];
/// Index of the 99th percentile in [`QUANTILES`].
pub(super) const P99: usize = 2;

/// Latencies and failures.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepFigures {
    /// Milliseconds; infinite where failures reach the quantile.
    pub(super) quantiles_ms: [f64; QUANTILES.len()],
    /// Share of the queries that failed or missed the deadline.
    pub(super) failed: f64,
}

impl StepFigures {
    pub(super) fn of(quantile_ms: impl Fn(f64) -> f64, failed: f64) -> Self {
        Self { quantiles_ms: QUANTILES.map(|(q, _)| quantile_ms(q)), failed }
    }
}
