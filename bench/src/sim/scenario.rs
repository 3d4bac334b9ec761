//! The definition of a simulation: servers, load, work, network, and events. Times are seconds of virtual time.

use rand::Rng;
use rand::rngs::SmallRng;
use rand_distr::{Distribution as _, Exp1, StandardNormal};

use crate::load::Keys;

/// Cores of one server's allocation: 10 % of a machine of 64 hardware threads. With a mean work of 86.7 ms, 0.75x
/// corresponds to 5.5 k queries/s and 1.74x to 12.9 k; the paper has 5.6 k and 13 k.
pub(crate) const ALLOCATION: f64 = 6.4;
/// Mean and standard deviation of the normal distribution of work, milliseconds of one core. Truncated at zero, it
/// gives p50/p90/p99/p99.9 of 80/182.5/266/327 ms without queueing; the paper's are 80/182/265/325.
pub(crate) const WORK_MS: f64 = 80.0;

/// One point of an experiment. Every policy is run on the same one.
#[derive(Clone, Debug)]
pub(crate) struct SimScenario {
    pub(crate) servers: Vec<ServerSpec>,
    /// Servers that exist from the beginning; the rest join by [`SimChange::Join`].
    pub(crate) initially: usize,
    /// Clients, each with a balancer of its own.
    pub(crate) clients: usize,
    pub(crate) load: SimLoad,
    /// Queries per second that other clients send to the same servers by round robin. They are not included in any
    /// figure.
    pub(crate) others: f64,
    pub(crate) sizes: Sizes,
    /// The keys of queries, if servers have caches.
    pub(crate) keys: Option<Keys>,
    /// Seconds excluded from every figure.
    pub(crate) warm_up: f64,
    pub(crate) measured: f64,
    /// Seconds after which an unanswered query fails. Its server continues to work on it; otherwise WRR would not fail
    /// as it does in the paper.
    pub(crate) deadline: Option<f64>,
    /// CPU that a server spends on one probe, milliseconds.
    pub(crate) probe_cost_ms: f64,
    pub(crate) changes: Vec<(f64, SimChange)>,
}

/// How queries arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SimLoad {
    /// Independent arrivals, queries per second over all clients.
    Poisson(f64),
    /// The same rate at even intervals.
    Even(f64),
    /// Independent arrivals. The rate alternates between `low` and `high` queries per second, for `seconds` each.
    Waves { low: f64, high: f64, seconds: f64 },
    /// Independent arrivals of `of` queries at the same instant, `qps` queries per second over all clients.
    Batches { qps: f64, of: u64 },
    /// Each user sends its next query once the previous one has been answered.
    Closed { users: usize },
}

/// Work of the queries, as a multiple of the server's [`ServerSpec::work_ms`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Sizes {
    /// All queries are equal.
    Exact,
    /// `work_ms` is the mean before truncation at zero, `variation` the standard deviation relative to it.
    Normal { variation: f64 },
    /// `work_ms` is the mean.
    Exponential,
    /// `work_ms` is the median, `sigma` the standard deviation of the logarithm.
    LogNormal { sigma: f64 },
    /// The share `rare` of the queries is uniform in one range, the rest in another, both in units of `work_ms`.
    Mix { rare: f64, long: (f64, f64), usual: (f64, f64) },
}

impl Sizes {
    /// The size of one query.
    pub(crate) fn draw(&self, rng: &mut SmallRng) -> f64 {
        match *self {
            Self::Exact => {
                // Draw anyway, so that queries arrive at the same instants with and without variation.
                let _: f64 = StandardNormal.sample(rng);
                1.0
            }
            Self::Normal { variation } => {
                let normal: f64 = StandardNormal.sample(rng);
                (1.0 + variation * normal).max(0.0)
            }
            Self::Exponential => Exp1.sample(rng),
            Self::LogNormal { sigma } => {
                let normal: f64 = StandardNormal.sample(rng);
                (sigma * normal).exp()
            }
            Self::Mix { rare, long, usual } => {
                let (low, high) = if rng.random::<f64>() < rare { long } else { usual };
                low + (high - low) * rng.random::<f64>()
            }
        }
    }
}

/// A server's cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CacheSpec {
    /// Number of keys; the least recently used is evicted.
    pub(crate) entries: usize,
    /// Work of a query whose key is not remembered, relative to one whose key is.
    pub(crate) miss: f64,
}

/// One server.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ServerSpec {
    /// Work of a query, milliseconds of one core, or its delay. [`Sizes`] defines the distribution.
    pub(crate) work_ms: f64,
    /// Time added to every answer without using CPU, milliseconds.
    pub(crate) extra_ms: f64,
    pub(crate) service: SimService,
    /// Queries served at a time; more wait.
    pub(crate) slots: usize,
    /// Queries that may wait for a slot; more are refused at once.
    pub(crate) queue: usize,
    /// Share of queries that fail at once.
    pub(crate) failing: f64,
    pub(crate) cache: Option<CacheSpec>,
    /// Weight of the endpoint in the clients' Envoys, at least 1.
    pub(crate) weight: u32,
}

/// How a server spends its time on a query.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SimService {
    /// Processor sharing: at most one core per query, within the allocation and the machine's spare capacity.
    Cpu { cores: f64, spare: Spare },
    /// Each query takes a fixed time, regardless of other queries being served.
    Delay,
}

/// Capacity of a server's machine beyond the allocation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Spare {
    None,
    /// Antagonists come and go: the spare capacity is max(0, N(mean, sd) + OU) allocations, where the normal part is
    /// drawn once per machine. A replica above its allocation on a full machine keeps the share `hobbled` of its speed.
    Antagonists {
        mean: f64,
        sd: f64,
        hobbled: f64,
    },
}

/// Standard deviation and time constant (s) of the antagonists' fluctuation, an Ornstein-Uhlenbeck process.
pub(crate) const FLUCTUATION: (f64, f64) = (0.15, 5.0);

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SimChange {
    /// New mean work of a server, milliseconds.
    Work(usize, f64),
    /// New share of queries that fail at once.
    Failing(usize, f64),
    /// `true` stops all progress on the server, `false` resumes it.
    Frozen(usize, bool),
    /// New spare capacity of a server's machine, in allocations.
    Spare(usize, f64),
    /// The server finishes its queries and gets no new ones.
    Leave(usize),
    Join(usize),
    /// The clients' event loops pause for this many milliseconds; events that arrive meanwhile wait, in order.
    Pause(f64),
}

impl ServerSpec {
    /// The paper's testbed server.
    pub(crate) fn testbed(work_ms: f64, spare: Spare) -> Self {
        Self::new(work_ms, SimService::Cpu { cores: ALLOCATION, spare })
    }

    pub(crate) fn new(work_ms: f64, service: SimService) -> Self {
        Self {
            work_ms,
            extra_ms: 0.0,
            service,
            slots: usize::MAX,
            queue: usize::MAX,
            failing: 0.0,
            cache: None,
            weight: 1,
        }
    }

    /// Gives it `times` as many slots, or cores.
    pub(crate) fn grow(&mut self, times: u32) {
        self.slots = self.slots.saturating_mul(times as usize);
        if let SimService::Cpu { cores, .. } = &mut self.service {
            *cores *= f64::from(times);
        }
    }

    /// Serves `slots` queries at a time, each for its own time; all others wait in order of arrival.
    pub(crate) fn slots(slots: usize, work_ms: f64) -> Self {
        Self { slots, ..Self::new(work_ms, SimService::Delay) }
    }
}

impl SimScenario {
    /// The paper's testbed (§5): `n` servers, as many clients, 5 s deadline, at `load` times the allocation.
    pub(crate) fn testbed(n: usize, load: f64, spare: Spare) -> Self {
        Self::over(vec![ServerSpec::testbed(WORK_MS, spare); n], load)
    }

    /// The testbed with every odd server slow: it takes twice `fast_ms`. `load` is relative to an even spread.
    pub(crate) fn half_slow(n: usize, fast_ms: f64, load: f64, spare: Spare) -> Self {
        let work = |server: usize| fast_ms * (1 + server % 2) as f64;
        Self::over((0..n).map(|server| ServerSpec::testbed(work(server), spare)).collect(), load)
    }

    fn over(servers: Vec<ServerSpec>, load: f64) -> Self {
        let cores: f64 = servers.len() as f64 * ALLOCATION;
        let work: f64 = servers.iter().map(|server| server.work_ms).sum::<f64>() / servers.len() as f64;
        let qps = load * cores / (work * TRUNCATED_MEAN / 1e3);
        Self {
            initially: servers.len(),
            clients: servers.len(),
            servers,
            load: SimLoad::Poisson(qps),
            others: 0.0,
            sizes: Sizes::Normal { variation: 1.0 },
            keys: None,
            warm_up: 15.0,
            measured: 45.0,
            deadline: Some(5.0),
            probe_cost_ms: 0.0,
            changes: Vec::new(),
        }
    }
}

/// Mean of max(0, N(1, 1)): Φ(1) + φ(1).
pub(crate) const TRUNCATED_MEAN: f64 = 1.083_315_470_587_686;
/// Antagonists of the load ramp. The lower tail of the distribution (1 % of machines have nothing to spare) determines
/// where WRR breaks, and the mean determines where Prequal's tail rises.
pub(crate) const NORMAL: Spare = Spare::Antagonists { mean: 0.95, sd: 0.32, hobbled: 0.95 };
/// Heavier antagonists, for the comparison of selection rules, in which WRR broke at a lower load (paper §5.2).
pub(crate) const HEAVY: Spare = Spare::Antagonists { mean: 0.45, sd: 0.45, hobbled: 0.9 };

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;
    use crate::sim::measure::quantile;

    /// Mean, and the quantiles 0.5 and 0.99, of 200 000 draws.
    fn drawn(sizes: Sizes) -> [f64; 3] {
        let mut rng = SmallRng::seed_from_u64(1);
        let drawn: Vec<f64> = (0..200_000).map(|_| sizes.draw(&mut rng)).collect();
        let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
        [mean, quantile(&drawn, 0.5), quantile(&drawn, 0.99)]
    }

    #[test]
    fn sizes_have_the_moments_of_their_distributions() {
        let mix = Sizes::Mix { rare: 0.1, long: (10.0, 30.0), usual: (0.5, 1.5) };
        let certain = Sizes::Mix { rare: 0.05, long: (80.0, 80.0), usual: (1.0, 1.0) };
        for (sizes, known) in [
            (Sizes::Exact, [1.0, 1.0, 1.0]),
            (Sizes::Normal { variation: 1.0 }, [TRUNCATED_MEAN, 1.0, 1.0 + 2.3263]),
            (Sizes::Exponential, [1.0, 2f64.ln(), 100f64.ln()]),
            (Sizes::LogNormal { sigma: 1.0 }, [0.5f64.exp(), 1.0, 2.3263f64.exp()]),
            // 0.9 of the queries are below 1.5, so the median is at 5/9 of their range and p99 at 9/10 of the other
            // range.
            (mix, [0.9 + 0.1 * 20.0, 0.5 + 5.0 / 9.0, 10.0 + 0.9 * 20.0]),
            (certain, [0.95 + 0.05 * 80.0, 1.0, 80.0]),
        ] {
            let got = drawn(sizes);
            let near = got.iter().zip(known).all(|(got, known)| (got / known - 1.0).abs() < 0.02);
            assert!(near, "{sizes:?}: {got:?}, not {known:?}");
        }
    }
}
