//! The record of a run, and its reduction to figures.

/// Latency of a query that failed or missed its deadline.
pub(crate) const FAILED: u32 = u32::MAX;

/// One query in the measured time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SimSample {
    /// Milliseconds from the end of the warm-up to its arrival.
    pub(crate) at_ms: u32,
    /// Time from arrival to the answer at the client, or [`FAILED`].
    pub(crate) latency_us: u32,
    pub(crate) server: u16,
}

/// Raw record of one run.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunRecord {
    pub(crate) samples: Vec<SimSample>,
    /// Addressed probes in the measured time.
    pub(crate) probes: u64,
    /// Discovery probes in the measured time.
    pub(crate) discoveries: u64,
    /// Polls in the measured time; a poll of *n* servers counts *n* times.
    pub(crate) polls: u64,
    /// Number of picks by branch (cold, hot, fallback), and number of picks whose replica was gone.
    pub(crate) branches: [u64; 3],
    pub(crate) diverted: u64,
    /// Number of samples by server RIF, taken at every tick of the filter (250 ms).
    pub(crate) rifs: Vec<u64>,
    /// Cores used relative to cores allocated, one value per server and second.
    pub(crate) utilisation: Vec<f32>,
    /// Median age of the pool's entries at each pick, milliseconds.
    pub(crate) ages_ms: Vec<u32>,
    /// θ at every pick that had one.
    pub(crate) thetas: Vec<u16>,
    /// Events handled, warm-up included.
    pub(crate) events: u64,
}

impl RunRecord {
    /// Latencies in ascending order, failures last.
    pub(crate) fn latencies(&self) -> Latencies {
        Latencies::new(self.samples.iter().map(|sample| sample.latency_us).collect())
    }

    /// Of the queries that arrive in `window` (seconds), the share whose server satisfies `server`.
    pub(crate) fn share(&self, server: impl Fn(usize) -> bool, window: impl Fn(f64) -> bool) -> f64 {
        let inside = self.samples.iter().filter(|s| window(f64::from(s.at_ms) / 1e3));
        let (mut all, mut hits) = (0u64, 0u64);
        for sample in inside {
            all += 1;
            hits += u64::from(server(usize::from(sample.server)));
        }
        hits as f64 / all.max(1) as f64
    }

    /// Quantile of the sampled server RIFs.
    pub(crate) fn rif(&self, q: f64) -> f64 {
        let total: u64 = self.rifs.iter().sum();
        let mut seen = 0;
        let at = self.rifs.iter().position(|count| {
            seen += count;
            seen as f64 >= q * total as f64
        });
        at.map_or(f64::NAN, |rif| rif as f64)
    }

    /// Standard deviation of the servers' utilisation per second, relative to its mean.
    pub(crate) fn cpu_variation(&self) -> f64 {
        let n = self.utilisation.len() as f64;
        let mean = self.utilisation.iter().map(|u| f64::from(*u)).sum::<f64>() / n;
        let square = self.utilisation.iter().map(|u| (f64::from(*u) - mean).powi(2)).sum::<f64>() / n;
        square.sqrt() / mean
    }

    /// Median θ at the picks.
    pub(crate) fn theta(&self) -> f64 {
        let thetas: Vec<f64> = self.thetas.iter().map(|theta| f64::from(*theta)).collect();
        quantile(&thetas, 0.5)
    }

    /// Addressed and discovery probes per query.
    pub(crate) fn probes_per_query(&self) -> f64 {
        (self.probes + self.discoveries) as f64 / self.samples.len().max(1) as f64
    }
}

/// Sorted latencies.
#[derive(Clone, Debug, Default)]
pub(crate) struct Latencies(Vec<u32>);

impl Latencies {
    pub(crate) fn new(mut us: Vec<u32>) -> Self {
        us.sort_unstable();
        Self(us)
    }

    /// Nearest rank, milliseconds; infinite if failures reach that quantile, NaN without samples.
    pub(crate) fn ms(&self, q: f64) -> f64 {
        let rank = (q * self.0.len() as f64 - 1e-6).ceil().max(1.0) as usize;
        match self.0.get(rank - 1) {
            None => f64::NAN,
            Some(&FAILED) => f64::INFINITY,
            Some(us) => f64::from(*us) / 1e3,
        }
    }

    /// Share of failures.
    pub(crate) fn failed(&self) -> f64 {
        let answered = self.0.partition_point(|us| *us != FAILED);
        (self.0.len() - answered) as f64 / self.0.len().max(1) as f64
    }

    /// Share answered within `ms`.
    pub(crate) fn within(&self, ms: f64) -> f64 {
        self.0.partition_point(|us| *us != FAILED && f64::from(*us) <= ms * 1e3) as f64
            / self.0.len().max(1) as f64
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Quantile of any series, nearest rank; NaN when empty.
pub(crate) fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (q * sorted.len() as f64 - 1e-6).ceil().max(1.0) as usize;
    sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_rank_last() {
        let latencies = Latencies::new(vec![FAILED, 1000, 3000, 2000]);
        assert_eq!((latencies.ms(0.5), latencies.ms(0.75), latencies.ms(0.99)), (2.0, 3.0, f64::INFINITY));
        assert_eq!((latencies.failed(), latencies.within(2.0)), (0.25, 0.5));
        assert!(Latencies::default().ms(0.5).is_nan());
    }
}
