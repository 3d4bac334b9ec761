//! One simulated server: processor sharing or plain delay. The agent's own types count its requests.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use prequal_core::server::rates::DEFAULT_WINDOW_US;
use prequal_core::server::replica::Replica;
use prequal_core::server::tracker::{Ticket, TrackerConfig, Visit};
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::outcome::Outcome;
use prequal_core::shared::time::Micros;
use prequal_core::wire::report::LoadReport;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand_distr::{Distribution, StandardNormal};

use super::cache::Cache;
use super::policies::Utilisation;
use super::scenario::{FLUCTUATION, ServerSpec, SimService, Spare};

/// Nanoseconds of virtual time.
pub(crate) type Nanos = u64;

/// The owner of a piece of CPU work.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Job {
    Query(u32),
    /// A probe that costs CPU; the number is the engine's.
    Probe(u32),
}

/// One event at a server's tracker.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Logged {
    Arrived,
    Left {
        arrived: Nanos,
        outcome: Outcome,
    },
    /// `held` is the simulator's own count of queries, without those that are leaving.
    Reported {
        report: LoadReport,
        leaving: Option<Visit>,
        held: usize,
    },
}

pub(crate) struct Server {
    pub(crate) spec: ServerSpec,
    replica: Replica,
    cache: Cache,
    /// The tracker's inputs and outputs.
    #[cfg(test)]
    pub(crate) log: Vec<(Nanos, Logged)>,
    pub(crate) alive: bool,
    pub(crate) frozen: bool,
    /// Distinguishes the current wake-up from those made obsolete by later arrivals.
    pub(crate) version: u32,
    /// Jobs, ordered by the value of `served` (nanoseconds of one core) at which they end.
    jobs: BinaryHeap<Reverse<(Nanos, u64, Job)>>,
    sequence: u64,
    /// Service that each running job has received since the beginning.
    served: f64,
    updated: Nanos,
    /// Time for which the pending wake-up is scheduled.
    scheduled: Option<Nanos>,
    pub(crate) waiting: VecDeque<u32>,
    pub(crate) running: usize,
    machine: MachineCapacity,
    /// Core-nanoseconds or slot-nanoseconds used.
    used: f64,
    used_before: f64,
    answers: u64,
    errors: u64,
    /// Smoothed values for weighted round robin: answers/s, errors/s, cores.
    pub(crate) qps: f64,
    pub(crate) eps: f64,
    pub(crate) cpu: f64,
}

/// The part of the machine's capacity that the server can use.
struct MachineCapacity {
    rng: SmallRng,
    base: f64,
    fluctuation: f64,
    /// Cores within the allocation and beyond it.
    capacity: f64,
}

impl Server {
    pub(crate) fn new(spec: ServerSpec, tracker: TrackerConfig, alive: bool, seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let (mut base, mut fluctuation) = (0.0, 0.0);
        if let SimService::Cpu { spare: Spare::Antagonists { mean, sd, .. }, .. } = spec.service {
            let mut normal = || -> f64 { StandardNormal.sample(&mut rng) };
            base = mean + sd * normal();
            fluctuation = FLUCTUATION.0 * normal();
        }
        // The replica started long ago: `ORIGIN_US` has passed since.
        let mut replica = Replica::new(tracker, Some(Micros(0)));
        replica.count_rates(Micros(0), DEFAULT_WINDOW_US);
        let mut server = Self {
            spec,
            replica,
            cache: Cache::default(),
            #[cfg(test)]
            log: Vec::new(),
            alive,
            frozen: false,
            version: 0,
            jobs: BinaryHeap::new(),
            sequence: 0,
            served: 0.0,
            updated: 0,
            scheduled: None,
            waiting: VecDeque::new(),
            running: 0,
            machine: MachineCapacity { rng, base, fluctuation, capacity: 0.0 },
            used: 0.0,
            used_before: 0.0,
            answers: 0,
            errors: 0,
            qps: 0.0,
            eps: 0.0,
            cpu: 0.0,
        };
        server.set_capacity();
        server
    }

    /// Requests in flight as the tracker counts them.
    pub(crate) fn rif(&self) -> u32 {
        self.replica.tracker.rif()
    }

    /// Starts the server now, cold.
    pub(crate) fn starts(&mut self, now: Nanos) {
        self.replica.set_up(Some(micros(now)));
    }

    /// Looks up `key`, which the server remembers from now on. Returns the query's work as a multiple of the usual.
    pub(crate) fn look_up(&mut self, key: u32) -> f64 {
        self.spec.cache.as_ref().map_or(1.0, |spec| self.cache.look_up(spec, key))
    }

    /// Counts the arrival of a query.
    pub(crate) fn arrive(&mut self, now: Nanos) -> Ticket {
        #[cfg(test)]
        self.log.push((now, Logged::Arrived));
        self.replica.start(micros(now))
    }

    /// Counts the end of a query that arrived at `arrived`.
    pub(crate) fn leave(&mut self, ticket: Ticket, now: Nanos, outcome: Outcome, _arrived: Nanos) {
        #[cfg(test)]
        self.log.push((now, Logged::Left { arrived: _arrived, outcome }));
        self.replica.finish(ticket, micros(now), outcome);
    }

    /// Returns the report for a probe that arrives now, or for the response to a query that is `leaving`.
    pub(crate) fn report(&mut self, now: Nanos, leaving: Option<Visit>) -> LoadReport {
        // The address is a placeholder: the engine identifies servers by number.
        let report = self.replica.report(micros(now), endpoint(0), None, leaving);
        #[cfg(test)]
        self.log.push((now, Logged::Reported { report, leaving, held: self.running + self.waiting.len() }));
        report
    }

    /// The ORCA report on the response to a query that is `leaving`, as the agent makes it.
    pub(crate) fn orca(&mut self, now: Nanos, leaving: Option<Visit>) -> Utilisation {
        let report = self.replica.report(micros(now), endpoint(0), None, leaving);
        let orca = self.replica.orca(micros(now), &report, leaving.is_some(), None);
        let orca = orca.expect("rates are counted from the start");
        Utilisation {
            qps: orca.rates.ended_milli as f64 / 1e3,
            eps: orca.rates.failed_milli as f64 / 1e3,
            cpu: orca.utilization_micro.unwrap_or(0) as f64 / 1e6,
        }
    }

    /// Whether antagonists vary the capacity.
    pub(crate) fn has_antagonists(&self) -> bool {
        matches!(self.spec.service, SimService::Cpu { spare: Spare::Antagonists { .. }, .. })
    }

    /// Advances the antagonists by `step` seconds.
    pub(crate) fn fluctuate(&mut self, now: Nanos, step: f64) {
        self.advance(now);
        let (sd, tau) = FLUCTUATION;
        let keep = (-step / tau).exp();
        let normal: f64 = StandardNormal.sample(&mut self.machine.rng);
        self.machine.fluctuation = self.machine.fluctuation * keep + sd * (1.0 - keep * keep).sqrt() * normal;
        self.set_capacity();
    }

    /// Sets the capacity beyond the allocation, in allocations.
    pub(crate) fn set_spare(&mut self, now: Nanos, spare: f64) {
        self.advance(now);
        self.machine.base = spare;
        self.set_capacity();
    }

    fn set_capacity(&mut self) {
        if let SimService::Cpu { cores, .. } = self.spec.service {
            self.machine.capacity = cores * (1.0 + (self.machine.base + self.machine.fluctuation).max(0.0));
        }
    }

    /// Cores that each job gets.
    fn rate(&self) -> f64 {
        self.rate_among(self.jobs.len())
    }

    /// Cores that each of `jobs` would get.
    pub(crate) fn rate_among(&self, jobs: usize) -> f64 {
        if self.frozen {
            0.0
        } else if jobs as f64 <= self.machine.capacity {
            1.0
        } else if let SimService::Cpu { spare: Spare::Antagonists { hobbled, .. }, .. } = self.spec.service {
            hobbled * self.machine.capacity / jobs as f64
        } else {
            self.machine.capacity / jobs as f64
        }
    }

    /// Accounts for service up to `now`.
    pub(crate) fn advance(&mut self, now: Nanos) {
        let step = (now - self.updated) as f64 * self.rate();
        self.served += step;
        self.used += match self.spec.service {
            SimService::Cpu { .. } => step * self.jobs.len() as f64,
            SimService::Delay => step * self.running as f64,
        };
        self.updated = now;
    }

    /// Adds `work` core-nanoseconds.
    pub(crate) fn add(&mut self, now: Nanos, job: Job, work: f64) {
        self.advance(now);
        self.sequence += 1;
        self.jobs.push(Reverse(((self.served + work) as Nanos, self.sequence, job)));
    }

    /// Removes and returns the next job whose work is done.
    pub(crate) fn pop_done(&mut self) -> Option<Job> {
        let Reverse((end, _, job)) = *self.jobs.peek()?;
        // The tolerance is a nanosecond, because wake-ups are rounded up to whole nanoseconds.
        if end as f64 > self.served + 1.0 {
            return None;
        }
        self.jobs.pop();
        Some(job)
    }

    /// Returns the time of the next wake-up; `None` if the pending one is still right or there is nothing to wait for.
    pub(crate) fn wake_up(&mut self, now: Nanos) -> Option<Nanos> {
        let rate = self.rate();
        let next =
            self.jobs.peek().filter(|_| rate > 0.0).map(|Reverse((end, ..))| {
                now + ((*end as f64 - self.served).max(0.0) / rate).ceil() as Nanos
            });
        if next == self.scheduled {
            return None;
        }
        self.scheduled = next;
        self.version = self.version.wrapping_add(1);
        next
    }

    /// Notes that the pending wake-up has occurred.
    pub(crate) fn woken(&mut self) {
        self.scheduled = None;
    }

    pub(crate) fn count(&mut self, failed: bool) {
        self.answers += 1;
        self.errors += u64::from(failed);
    }

    /// Updates the smoothed statistics, `step` seconds after the last update. Returns the cores used since.
    pub(crate) fn smooth(&mut self, now: Nanos, step: f64) -> f64 {
        const WEIGHT: f64 = 0.1;
        self.advance(now);
        let cores = (self.used - self.used_before) / (step * 1e9);
        self.used_before = self.used;
        for (smoothed, value) in [
            (&mut self.qps, self.answers as f64 / step),
            (&mut self.eps, self.errors as f64 / step),
            (&mut self.cpu, cores),
        ] {
            *smoothed += (value - *smoothed) * WEIGHT;
        }
        (self.answers, self.errors) = (0, 0);
        cores
    }
}

/// Converts virtual time to the time type of the core.
pub(crate) fn micros(now: Nanos) -> Micros {
    // Offset from zero, because a zeroed stamp in a new pool would look current.
    Micros(now / 1000).plus(ORIGIN_US)
}

const ORIGIN_US: u64 = 1_000_000_000;

/// The address of a simulated server: 10.x.y.z:80 with its number.
pub(crate) fn endpoint(server: usize) -> Endpoint {
    let [_, a, b, c] = (server as u32).to_be_bytes();
    std::net::SocketAddr::from(([10, a, b, c], 80)).into()
}

pub(crate) fn server_of(endpoint: Endpoint) -> usize {
    match endpoint.socket_addr().ip() {
        std::net::IpAddr::V4(ip) => (u32::from(ip) & 0x00ff_ffff) as usize,
        std::net::IpAddr::V6(_) => usize::MAX,
    }
}
