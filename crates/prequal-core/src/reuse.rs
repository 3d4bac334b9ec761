//! Equation (1): how many requests one report may serve.

use rand::Rng;

/// `b_reuse = max{1, (1+δ) / ((1 − m/n)·r_probe − r_remove)}` (paper §4, equation (1)), at most `cap`.
///
/// `m` is the pool size, `n` the number of replicas, the rates are per request and `r_probe` counts every report
/// that arrives. The paper gives no value where the denominator is not positive (every fleet with n ≤ m):
/// there the reports do not pile up, and `cap` is the answer.
pub fn reuse_budget(m: f64, n: f64, r_probe: f64, r_remove: f64, delta: f64, cap: f64) -> f64 {
    let denominator = (1.0 - m / n) * r_probe - r_remove;
    // Written so that NaN (n = 0) takes the cap too.
    if denominator > 0.0 { ((1.0 + delta) / denominator).clamp(1.0, cap) } else { cap }
}

/// Rounds to a neighbouring whole number at random, keeping the mean (paper §4).
pub fn round_randomly(value: f64, rng: &mut impl Rng) -> u32 {
    let floor = value.floor();
    floor as u32 + u32::from(rng.random::<f64>() < value - floor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{SeedableRng, rngs::SmallRng};

    #[test]
    fn equation_one_as_a_table() {
        for (m, n, r_probe, r_remove, delta, expected) in [
            (16.0, 100.0, 3.0, 1.0, 1.0, 2.0 / 1.52), // the paper's baseline, 1.316
            (16.0, 100.0, 4.0, 0.25, 1.0, 1.0),       // 2 / 3.11 < 1
            (16.0, 100.0, 2.0, 0.25, 1.0, 2.0 / 1.43), // fig. 8
            (16.0, 100.0, 1.0, 0.25, 1.0, 2.0 / 0.59), // fig. 8
            (16.0, 100.0, 0.5, 0.25, 1.0, 2.0 / 0.17), // fig. 8, its lowest rate
            (16.0, 100.0, 1.0, 1.0, 1.0, 64.0),       // denominator < 0
            (16.0, 16.0, 3.0, 0.0, 1.0, 64.0),        // n = m
            (16.0, 16.0, 3.0, 1.0, 1.0, 64.0),
            (16.0, 4.0, 3.0, 1.0, 1.0, 64.0),  // n < m
            (16.0, 24.0, 3.0, 1.0, 1.0, 64.0), // denominator exactly 0
            (16.0, 25.0, 3.0, 1.0, 1.0, 2.0 / 0.08),
            (2.0, 4.0, 4.0, 1.0, 1.0, 2.0),
            (16.0, 1000.0, 3.0, 1.0, 3.0, 4.0 / 1.952),
            (16.0, 0.0, 3.0, 1.0, 1.0, 64.0), // nothing learned yet
        ] {
            let got = reuse_budget(m, n, r_probe, r_remove, delta, 64.0);
            assert!(
                (got - expected).abs() < 1e-9,
                "m={m} n={n} r_probe={r_probe} r_remove={r_remove}: {got}"
            );
        }
    }

    #[test]
    fn rounding_keeps_the_mean() {
        let mut rng = SmallRng::seed_from_u64(1);
        let total: u32 = (0..100_000).map(|_| round_randomly(2.0 / 1.52, &mut rng)).sum();
        let mean = f64::from(total) / 1e5;
        assert!((mean - 2.0 / 1.52).abs() < 0.01, "{mean}");
        assert_eq!(round_randomly(3.0, &mut rng), 3);
    }
}
