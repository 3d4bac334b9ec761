//! One client's balancer: the core's types behind one face, and the adapter's part of Prequal (which replicas are
//! probed, what a reply or a response may tell) as the filter plays it.

use prequal_core::endpoint::Endpoint;
use prequal_core::exceptions::flights::{Flight, Flights};
use prequal_core::exceptions::{Change, Event, Exceptions};
use prequal_core::members::{Evidence, Members};
use prequal_core::policies::c3::C3;
use prequal_core::policies::least_loaded::{LeastLoaded, LeastLoadedPo2c};
use prequal_core::policies::linear::{ALPHA_US, Linear};
use prequal_core::policies::peak_ewma::{PeakEwma, Scan};
use prequal_core::policies::uniform::{Random, RoundRobin};
use prequal_core::policies::weighted::WeightedRoundRobin;
use prequal_core::policies::yarp::{PAPER_POLL_MS, Yarp};
use prequal_core::policies::zuul::Zuul;
use prequal_core::policies::{Done, Policy};
use prequal_core::pool::{Load, Pick, PoolSettings, PoolState, ProbesDue, Ranking};
use prequal_core::report::LoadReport;
use prequal_core::sync::{Answer, SyncSettings, Waiting};
use prequal_core::time::Micros;
use prequal_core::tracker::{Outcome, TrackerConfig};
use rand::Rng;
use rand::rngs::SmallRng;

use super::server::{Nanos, micros};

/// A policy with its settings.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Arm {
    Random,
    RoundRobin,
    WeightedRoundRobin,
    LeastLoaded,
    LeastLoadedPo2c,
    Yarp,
    PeakEwma(Scan),
    /// The replicas' configured maximum of requests in flight.
    Zuul(u32),
    Prequal(Prequal),
    Sync(SyncSettings, PoolSettings),
    /// Knows every server's queue, capacity and speed now: no policy can.
    Floor,
}

/// Prequal's asynchronous mode or another rule on its pool.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Prequal {
    pub(crate) pool: PoolSettings,
    pub(crate) rule: Rule,
    /// Reports on responses count.
    pub(crate) piggyback: bool,
    /// Probes pass over replicas heard of within this time, milliseconds.
    pub(crate) skip_fresh_ms: Option<u32>,
    /// Probe when no query came for this long, milliseconds; 0 is off.
    pub(crate) idle_ms: u32,
    /// Servers estimate by the paper's rules alone.
    pub(crate) paper_tracker: bool,
    /// Members are learned from probes without an address, as in the filter; else known from the start.
    pub(crate) learn: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rule {
    Predicted,
    HotCold,
    Linear(f64),
    C3,
}

/// How often a balancer polls, if it does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Polling {
    None,
    Rif { every_ms: u64 },
    Utilisation,
}

impl Arm {
    pub(crate) fn polling(&self) -> Polling {
        match self {
            Self::Yarp => Polling::Rif { every_ms: PAPER_POLL_MS },
            Self::WeightedRoundRobin => Polling::Utilisation,
            _ => Polling::None,
        }
    }

    /// What the servers estimate with: the paper's rules for the paper's policies. C3 needs ours: without it an
    /// overloaded server, whose only answers are those without work, looks the fastest.
    pub(crate) fn tracker(&self) -> TrackerConfig {
        match self {
            Self::Prequal(Prequal { paper_tracker: true, .. }) | Self::Sync(..) => {
                TrackerConfig { stall_factor: 0, ..TrackerConfig::default() }
            }
            _ => TrackerConfig::default(),
        }
    }

    /// Whether answers must carry the server's report.
    pub(crate) fn reads_answers(&self) -> bool {
        match self {
            Self::Zuul(_) => true,
            Self::Prequal(prequal) => prequal.piggyback,
            _ => false,
        }
    }
}

pub(crate) enum Balancer {
    Simple(Box<dyn Policy>),
    Prequal(Box<Client>),
    Sync(Box<SyncClient>),
    Floor,
}

pub(crate) struct Client {
    config: Prequal,
    pub(crate) pool: PoolState,
    members: Members,
    exceptions: Exceptions,
    flights: Flights,
    c3: Option<C3>,
}

pub(crate) struct SyncClient {
    pub(crate) settings: SyncSettings,
    config: PoolSettings,
    pool: PoolState,
    members: Members,
}

impl Balancer {
    /// The balancer of one of `clients` clients over `servers` servers, of which the first `known` exist.
    pub(crate) fn new(arm: &Arm, clients: usize, servers: usize, known: usize, rng: &mut SmallRng) -> Self {
        let simple = |policy: Box<dyn Policy>| Self::Simple(policy);
        match arm {
            Arm::Random => simple(Box::new(Random::new(servers))),
            Arm::RoundRobin => simple(Box::new(RoundRobin::new(servers, rng.random_range(0..servers)))),
            Arm::WeightedRoundRobin => {
                let phases = (0..servers).map(|_| rng.random()).collect();
                simple(Box::new(WeightedRoundRobin::new(phases, 0.0)))
            }
            Arm::LeastLoaded => simple(Box::new(LeastLoaded::new(servers, rng.random_range(0..servers)))),
            Arm::LeastLoadedPo2c => simple(Box::new(LeastLoadedPo2c::new(servers))),
            Arm::Yarp => simple(Box::new(Yarp::new(servers))),
            Arm::PeakEwma(scan) => simple(Box::new(PeakEwma::new(servers, *scan))),
            Arm::Zuul(most) => simple(Box::new(Zuul::new(servers, *most))),
            Arm::Prequal(config) => {
                let (pool, members) = fleet(if config.learn { 0 } else { known });
                let c3 = (config.rule == Rule::C3).then(|| C3::new(clients));
                Self::Prequal(Box::new(Client {
                    config: config.clone(),
                    pool,
                    members,
                    exceptions: Exceptions::new(),
                    flights: Flights::new(),
                    c3,
                }))
            }
            Arm::Sync(settings, config) => {
                let (pool, members) = fleet(known);
                Self::Sync(Box::new(SyncClient {
                    settings: *settings,
                    config: config.clone(),
                    pool,
                    members,
                }))
            }
            Arm::Floor => Self::Floor,
        }
    }

    pub(crate) fn done(&mut self, server: usize, now: Nanos, done: &Done) {
        match self {
            Self::Simple(policy) => policy.done(server, micros(now), done),
            Self::Prequal(client) => {
                if let Some(c3) = &mut client.c3 {
                    c3.done(endpoint(server), (done.outcome == Outcome::Success).then_some(done.latency_us));
                }
            }
            Self::Sync(_) | Self::Floor => {}
        }
    }
}

fn fleet(known: usize) -> (PoolState, Members) {
    let (mut pool, mut members) = (PoolState::new(), Members::default());
    for server in 0..known {
        members.observe(endpoint(server), None, Evidence::Served, micros(0));
    }
    pool.set_members(members.count(), members.samples(), micros(0));
    (pool, members)
}

impl Client {
    pub(crate) fn config(&self) -> &Prequal {
        &self.config
    }

    pub(crate) fn pick(&mut self, now: Nanos, rng: &mut SmallRng) -> Pick {
        let now = micros(now);
        while let Some(overdue) = self.flights.overdue(now) {
            self.told(now, overdue.replica, overdue.event());
        }
        let settings = &self.config.pool;
        if self.pool.has_exceptions() {
            let (members, samples) = self.pool.membership();
            self.exceptions.set_members(members);
            let trial = self.exceptions.take_trial(&settings.exceptions, now, samples, members, rng);
            self.pool.exclude(&self.exceptions, now);
            if let Some(trial) = trial {
                return self.pool.pick_trial(settings, trial, now);
            }
        }
        let pick = match (&self.c3, self.config.rule) {
            (Some(c3), _) => self.pool.pick_scored(settings, now, rng, |candidate| c3.score(candidate)),
            (None, Rule::Linear(lambda)) => self.pool.pick_scored(settings, now, rng, |candidate| {
                Linear { lambda, alpha_us: ALPHA_US }.score(candidate)
            }),
            (None, Rule::Predicted) => self.pool.pick_predicted(settings, now, rng),
            (None, _) => self.pool.pick(settings, now, rng),
        };
        if let (Some(c3), Some(chosen)) = (&mut self.c3, pick.replica) {
            c3.sent(chosen);
        }
        pick
    }

    /// A request goes to the replica that was picked.
    pub(crate) fn sent(&mut self, now: Nanos, pick: &Pick) -> Option<Flight> {
        Some(self.flights.sent(micros(now), pick.replica?, pick.latency_us, pick.trial))
    }

    /// It has ended, with an answer or without.
    pub(crate) fn landed(&mut self, flight: Flight, now: Nanos, failed: bool, reported_us: Option<u32>) {
        let now = micros(now);
        let settings = self.config.pool.exceptions;
        let Some(landed) = self.flights.answered(&settings, flight, now, failed) else { return };
        let averse = settings.error_aversion > 0.0;
        if if failed { averse } else { self.pool.has_exceptions() } {
            self.told(now, landed.replica, landed.event(failed, reported_us));
        }
        if failed && averse {
            self.pool.forget(landed.replica);
        }
    }

    /// The filter's tick.
    pub(crate) fn expire(&mut self, now: Nanos) {
        self.exceptions.expire(micros(now));
    }

    fn told(&mut self, now: Micros, replica: Endpoint, event: Event) {
        self.exceptions.set_members(self.pool.membership().0);
        let change = self.exceptions.apply(&self.config.pool.exceptions, now, replica, event);
        if change != Change::None {
            self.pool.exclude(&self.exceptions, now);
        }
    }

    /// The fallback chose: C3 counts its own requests wherever they go.
    pub(crate) fn fell_back(&mut self, server: usize) {
        if let Some(c3) = &mut self.c3 {
            c3.sent(endpoint(server));
        }
    }

    /// Whom to probe; with nobody to address every probe is one of discovery, as in the filter.
    pub(crate) fn targets(&mut self, due: ProbesDue, now: Nanos, rng: &mut SmallRng) -> (Vec<usize>, u32) {
        let now = micros(now);
        let pool = &self.pool;
        let skip = |replica: Endpoint| match self.config.skip_fresh_ms {
            Some(age) => pool.heard_within(replica, now, age),
            None => false,
        };
        let addressed: Vec<usize> = if due.addressed == 0 {
            Vec::new()
        } else {
            self.members.expire(now);
            self.members
                .sample(due.addressed as usize, rng, skip)
                .iter()
                .map(|target| server_of(target.replica))
                .collect()
        };
        // Without learning everybody is known: there is nobody to discover.
        let discovery = if !self.config.learn {
            0
        } else if addressed.is_empty() {
            due.discovery + due.addressed
        } else {
            due.discovery
        };
        (addressed, discovery)
    }

    /// A report of a server, from a probe or a response.
    pub(crate) fn reported(&mut self, server: usize, now: Nanos, report: &LoadReport, rng: &mut SmallRng) {
        let (replica, now) = (endpoint(server), micros(now));
        if let Some(c3) = &mut self.c3 {
            c3.reported(replica, report.rif, report.latency_us);
        }
        self.members.renew(replica, now);
        let mut load = Load::from(report);
        let standing = self.members.standing(replica);
        let settings = &self.config.pool.exceptions;
        if self.pool.has_exceptions() || settings.believes(report.failing) {
            self.exceptions.set_members(self.pool.membership().0);
            if self.exceptions.heard(settings, now, replica, report.failing, standing) != Change::None {
                self.pool.exclude(&self.exceptions, now);
            }
            let Some(admitted) = self.exceptions.admit(now, replica, load) else { return };
            load = admitted;
        }
        self.pool.record(&self.config.pool, now, replica, load, standing, rng);
    }

    /// The reply to a probe of `asked` (`None`: without address) came from `server`.
    pub(crate) fn probed(
        &mut self,
        asked: Option<usize>,
        server: usize,
        now: Nanos,
        report: &LoadReport,
        rng: &mut SmallRng,
    ) {
        if !self.config.learn {
            return self.reported(server, now, report, rng);
        }
        if let Some(gone) = asked.filter(|asked| *asked != server) {
            self.members.remove(endpoint(gone));
            self.pool.forget(endpoint(gone));
        }
        if asked != Some(server) {
            // The probe cluster's policy chose, and Envoy vouches for who answered.
            self.members.sample_met(endpoint(server), None, micros(now));
            self.pool.set_members(self.members.count(), self.members.samples(), micros(now));
        }
        self.reported(server, now, report, rng);
    }

    /// Envoy says that `server` served a request.
    pub(crate) fn confirmed(&mut self, server: usize, now: Nanos) {
        let (replica, now) = (endpoint(server), micros(now));
        if self.config.learn && self.members.confirm(replica, Evidence::Placed, now) {
            self.pool.unbar(replica);
            self.pool.set_members(self.members.count(), self.members.samples(), now);
        }
    }

    /// Envoy would not use the chosen server.
    pub(crate) fn diverted(&mut self, server: usize, now: Nanos) {
        self.pool.refused(endpoint(server), micros(now), BARRED_MS);
    }
}

impl SyncClient {
    pub(crate) fn targets(&self, rng: &mut SmallRng) -> Vec<usize> {
        self.members.sample(self.settings.d, rng, |_| false).iter().map(|t| server_of(t.replica)).collect()
    }

    /// A server's answer; answers fill the pool, as in the filter.
    pub(crate) fn answered(
        &mut self,
        server: usize,
        now: Nanos,
        report: &LoadReport,
        rng: &mut SmallRng,
    ) -> Answer {
        let replica = endpoint(server);
        let (load, standing) = (Load::from(report), self.members.standing(replica));
        self.pool.record(&self.config, micros(now), replica, load, standing, rng);
        Answer { replica, load, standing }
    }

    pub(crate) fn decide(&mut self, waiting: &Waiting, now: Nanos, rng: &mut SmallRng) -> Option<usize> {
        let answers = waiting.answers();
        let pick = self.pool.pick_among(&self.config, micros(now), answers, Ranking::HotCold, rng);
        pick.replica.map(server_of)
    }
}

/// As in the filter.
const BARRED_MS: u32 = 1000;

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
