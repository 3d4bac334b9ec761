//! The memory of each process over time, and whether it still grows.

use prequal_testbed::{Agent, Envoy};

use crate::process::resident_kib;

/// Maximum growth over the second half that counts as none, in KiB and as a part of the mean: allocators keep and
/// return pages.
const ALLOWED_KIB: f64 = 1024.0;
const ALLOWED_PART: f64 = 0.04;

/// Samples of several processes.
pub(super) struct MemorySeries(Vec<(String, u32, Samples)>);

impl MemorySeries {
    pub(super) fn new(agents: &[Agent], envoy: &Envoy) -> Self {
        let agents =
            agents.iter().enumerate().map(|(number, agent)| (format!("agent {number}"), agent.pid()));
        let processes = std::iter::once(("Envoy with the filter".to_owned(), envoy.pid())).chain(agents);
        Self(processes.map(|(name, pid)| (name, pid, Samples::default())).collect())
    }

    pub(super) fn sample(&mut self) {
        for (_, pid, samples) in &mut self.0 {
            // A process that has ended is detected elsewhere.
            if let Ok(kib) = resident_kib(*pid) {
                samples.0.push(kib as f64);
            }
        }
    }

    pub(super) fn finish(self) -> Vec<(String, Samples)> {
        self.0.into_iter().map(|(name, _, samples)| (name, samples)).collect()
    }
}

/// KiB at equal intervals.
#[derive(Debug, Default)]
pub(super) struct Samples(Vec<f64>);

impl Samples {
    pub(super) fn at_start_half_end(&self) -> [f64; 3] {
        let at = |index: usize| self.0.get(index).copied().unwrap_or(0.0);
        [at(0), at(self.0.len() / 2), at(self.0.len().saturating_sub(1))]
    }

    /// Rise of the least-squares line over the second half, from its beginning to its end, KiB.
    pub(super) fn growth(&self) -> f64 {
        let half = &self.0[self.0.len() / 2..];
        let count = half.len() as f64;
        let mean = half.iter().sum::<f64>() / count.max(1.0);
        let middle = (count - 1.0) / 2.0;
        let (mut along, mut square) = (0.0, 0.0);
        for (index, kib) in half.iter().enumerate() {
            let x = index as f64 - middle;
            along += x * (kib - mean);
            square += x * x;
        }
        if square > 0.0 { along / square * (count - 1.0) } else { 0.0 }
    }

    /// Maximum growth that counts as none, KiB.
    pub(super) fn allowed(&self) -> f64 {
        let mean = self.0.iter().sum::<f64>() / (self.0.len() as f64).max(1.0);
        ALLOWED_KIB.max(mean * ALLOWED_PART)
    }

    pub(super) fn is_flat(&self) -> bool {
        !self.0.is_empty() && self.growth() <= self.allowed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leak_in_the_second_half_is_detected_and_growth_at_the_start_is_not() {
        let line =
            |slope: f64| Samples((0..101).map(|second| 50_000.0 + slope * f64::from(second)).collect());
        assert!((line(10.0).growth() - 500.0).abs() < 1e-6);
        assert!(line(10.0).is_flat() && !line(100.0).is_flat());
        let start =
            Samples((0..100).map(|second: u32| 50_000.0 + 500.0 * f64::from(second.min(40))).collect());
        assert!(start.is_flat() && start.growth().abs() < 1e-6);
        assert!(!Samples::default().is_flat(), "nothing was measured");
    }
}
