//! Equation (1): how many requests one report may serve.

use rand::Rng;

/// `b_reuse = max{1, (1+δ) / ((1 − m/n)·r_probe − r_remove)}` (paper §4, equation (1)), at most `cap`.
///
/// `m` is the pool size and `n` the number of replicas. The rates are per request, and `r_probe` counts every report
/// that arrives. The paper gives no value where the denominator is not positive (every fleet with n ≤ m). In those
/// cases reports do not accumulate, and the result is `cap`.
pub fn reuse_budget(m: f64, n: f64, r_probe: f64, r_remove: f64, delta: f64, cap: f64) -> f64 {
    let denominator = (1.0 - m / n) * r_probe - r_remove;
    // Written so that NaN (n = 0) also yields the cap.
    if denominator > 0.0 { ((1.0 + delta) / denominator).clamp(1.0, cap) } else { cap }
}

/// Rounds up or down at random so that the mean is preserved (paper §4).
pub fn round_randomly(value: f64, rng: &mut impl Rng) -> u32 {
    let floor = value.floor();
    floor as u32 + u32::from(rng.random::<f64>() < value - floor)
}
