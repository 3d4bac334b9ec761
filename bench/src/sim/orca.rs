//! What a server tells in the format of ORCA: `rps_fractional`, `eps` and `application_utilization`, which is the requests
//! in flight on average, over the knee. All three are of the same time, which fades.
//!
//! By Little's law a weight of rate over utilisation is then the knee over the mean latency, the rate that saturates the
//! server. How the means are taken decides what the weights are worth. With the requests in flight at one instant, or the
//! means of a window of five seconds that ends sharply, traffic swings between equal servers at 80 % load.

use prequal_core::policies::Utilisation;

use super::server::Nanos;

/// Time constant of what fades, seconds. 10 and 20 change little.
const FADES: f64 = 5.0;

/// Counts the requests of one server.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orca {
    /// Answers and failures so far, each worth less the older it is.
    answered: f64,
    failed: f64,
    /// Seconds that requests have spent in flight, likewise.
    busy: f64,
    /// In flight since `updated`.
    rif: u32,
    updated: Nanos,
}

impl Orca {
    /// A request arrived.
    pub(crate) fn arrived(&mut self, now: Nanos) {
        self.catch_up(now);
        self.rif += 1;
    }

    /// A request left.
    pub(crate) fn left(&mut self, now: Nanos, failed: bool) {
        self.catch_up(now);
        self.rif = self.rif.saturating_sub(1);
        self.answered += 1.0;
        self.failed += f64::from(u8::from(failed));
    }

    /// What is told now by a server that serves `knee` requests at once; without that no utilisation.
    pub(crate) fn report(&mut self, now: Nanos, knee: Option<u16>) -> Utilisation {
        self.catch_up(now);
        Utilisation {
            qps: self.answered / FADES,
            eps: self.failed / FADES,
            cpu: knee.map_or(0.0, |knee| self.busy / FADES / f64::from(knee)),
        }
    }

    fn catch_up(&mut self, now: Nanos) {
        let kept = (-((now - self.updated) as f64) / 1e9 / FADES).exp();
        self.updated = now;
        for sum in [&mut self.answered, &mut self.failed, &mut self.busy] {
            *sum *= kept;
        }
        self.busy += f64::from(self.rif) * FADES * (1.0 - kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    /// Twenty requests a second of 100 ms, of which one in four fails.
    fn steady(seconds: u64) -> Orca {
        let mut orca = Orca::default();
        orca.arrived(0);
        for n in 1..seconds * 20 {
            orca.arrived(n * SECOND / 20);
            orca.left((n + 1) * SECOND / 20, n % 4 == 0);
        }
        orca
    }

    #[test]
    fn steady_load_is_told_as_it_is_and_its_weight_is_the_knee_over_the_latency() {
        let told = steady(60).report(60 * SECOND, Some(4));
        let near = |got: f64, known: f64| (got / known - 1.0).abs() < 0.03;
        assert!(near(told.qps, 20.0) && near(told.eps, 5.0) && near(told.cpu, 2.0 / 4.0), "{told:?}");
        assert!(near(told.qps / told.cpu, 4.0 / 0.1), "{told:?}");
    }

    #[test]
    fn what_was_fades_and_what_hangs_is_in_flight() {
        let mut orca = steady(60);
        let in_flight = f64::from(orca.rif);
        let later = orca.report(70 * SECOND, Some(1));
        let kept = (-2f64).exp();
        assert!((later.qps / (20.0 * kept) - 1.0).abs() < 0.03, "{later:?}");
        assert!((later.cpu / (in_flight + (2.0 - in_flight) * kept) - 1.0).abs() < 0.03, "{later:?}");
        assert_eq!(orca.report(3600 * SECOND, Some(1)).cpu, in_flight);
        assert_eq!(orca.report(3600 * SECOND, None).cpu, 0.0, "no knee, no utilisation");
    }
}
