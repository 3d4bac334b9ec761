//! The discrete-event engine: one virtual clock, one queue of events, all randomness from seeds.
//!
//! Arrivals, work and antagonists have their own random streams, so every policy gets the same trace. Events at the
//! same nanosecond happen in the order in which they were scheduled, so the same seed gives the same output, byte for
//! byte.

use std::collections::{BinaryHeap, VecDeque};

use prequal_core::client::members::Target;
use prequal_core::client::policies::{Done, two_distinct};
use prequal_core::client::pool::{Branch, ProbesDue};
use prequal_core::client::settings::Mode;
use prequal_core::client::sync_mode::{Answer, Waiting};
use prequal_core::client::{Class, Request};
use prequal_core::server::tracker::Ticket;
use prequal_core::shared::outcome::Outcome;
use prequal_core::wire::report::LoadReport;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Exp1, Zipf};

use super::balancer::{Balancer, Polling, Prequal, Proxy, SimArm, named, reply};
use super::measure::{FAILED, RunRecord, SimSample};
use super::policies::Utilisation;
use super::policies::least_loaded::less_loaded;
use super::scenario::{SimChange, SimLoad, SimScenario, SimService};
use super::server::{Job, Nanos, Server, micros, server_of};

mod queue;

use queue::{Slab, Timed};

/// Runs `scenario` under `arm`.
pub(crate) fn run(scenario: &SimScenario, arm: &SimArm, seed: u64) -> RunRecord {
    let mut world = World::new(scenario, arm, seed);
    world.go();
    world.run
}

struct World<'a> {
    scenario: &'a SimScenario,
    now: Nanos,
    queue: BinaryHeap<Timed>,
    sequence: u64,
    /// Deadlines in ascending order, because every query has the same time limit. This is cheaper than the queue.
    deadlines: VecDeque<(Nanos, u32, u64)>,
    servers: Vec<Server>,
    alive: Vec<usize>,
    /// The order in which a probe cluster's round robin chooses the living servers, each as often as its weight says.
    rotation: Vec<usize>,
    /// Queries sent to each server and not finished there. Only the rule `Floor` uses them.
    assigned: Vec<u32>,
    balancers: Vec<Balancer>,
    /// Position of each client's probe cluster in its rotation.
    turns: Vec<usize>,
    polling: Polling,
    reads_answers: bool,
    reads_orca: bool,
    /// Whether clients have to learn the servers.
    learns: bool,
    queries: Slab<Query>,
    probes: Slab<Probe>,
    arrivals: u64,
    trace: SmallRng,
    /// Random stream for the queries of other clients (arrivals and sizes), and the position in their rotation.
    others: (SmallRng, usize),
    keys: Option<Zipf<f64>>,
    network: SmallRng,
    choice: SmallRng,
    from: Nanos,
    until: Nanos,
    /// The clients are paused until this time.
    paused_until: Nanos,
    run: RunRecord,
}

struct Query {
    id: u64,
    client: u32,
    server: u32,
    arrived: Nanos,
    at_server: Nanos,
    /// Work, as a multiple of the server's usual work.
    size: f64,
    /// Key that the query reads; 0 if there are no caches.
    key: u32,
    ticket: Option<Ticket>,
    /// Index of its sample, if it is measured.
    sample: Option<u32>,
    client_done: bool,
    server_done: bool,
    failed: bool,
    report: Option<LoadReport>,
    orca: Option<Utilisation>,
    waiting: Option<Waiting>,
    /// The balancer's own record of the request.
    request: Request,
}

struct Probe {
    client: u32,
    /// The replica that is probed; `None` for discovery.
    asked: Option<Target>,
    server: u32,
    /// The query that waits for this synchronous probe.
    query: Option<(u32, u64)>,
    report: Option<LoadReport>,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Arrival,
    /// A query of another client, by round robin.
    Other,
    /// A client starts to handle a query.
    Pick(u32, u32),
    AtServer(u32),
    Wake {
        server: u32,
        version: u32,
    },
    /// The delay of a query with [`SimService::Delay`] has passed.
    Served(u32),
    Answer(u32),
    ProbeAtServer(u32),
    ProbeReply(u32),
    SyncDeadline(u32, u64),
    Poll(u32),
    Tick,
    Second,
    Change(u32),
}

const SECOND: Nanos = 1_000_000_000;
/// The filter's tick.
const TICK: Nanos = SECOND / 4;

fn nanos(seconds: f64) -> Nanos {
    (seconds * 1e9) as Nanos
}

/// One-way delay through the network: 0.25 ms plus exponential jitter of 0.05 ms.
fn transit(rng: &mut SmallRng) -> Nanos {
    let jitter: f64 = Exp1.sample(rng);
    250_000 + (jitter * 50_000.0) as Nanos
}

/// An independent random stream for `what`, derived from the seed.
fn stream(seed: u64, what: u64) -> SmallRng {
    SmallRng::seed_from_u64(
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ what.wrapping_mul(0xd1b5_4a32_d192_ed03),
    )
}

impl<'a> World<'a> {
    fn new(scenario: &'a SimScenario, arm: &SimArm, seed: u64) -> Self {
        let n = scenario.servers.len();
        let mut choice = stream(seed, 3);
        let servers: Vec<Server> = (0..n)
            .map(|i| {
                let alive = i < scenario.initially;
                Server::new(
                    scenario.servers[i].clone(),
                    arm.tracker(),
                    alive,
                    stream(seed, 1000 + i as u64).random(),
                )
            })
            .collect();
        let weights: Vec<u32> = scenario.servers.iter().map(|server| server.weight).collect();
        let balancers: Vec<Balancer> = (0..scenario.clients)
            .map(|_| Balancer::new(arm, scenario.clients, &weights, scenario.initially, &mut choice))
            .collect();
        let from = nanos(scenario.warm_up);
        let mut world = Self {
            scenario,
            now: 0,
            queue: BinaryHeap::new(),
            sequence: 0,
            deadlines: VecDeque::new(),
            servers,
            alive: (0..scenario.initially).collect(),
            rotation: Vec::new(),
            assigned: vec![0; n],
            turns: (0..balancers.len()).map(|_| choice.random_range(0..n)).collect(),
            balancers,
            polling: arm.polling(),
            reads_answers: arm.reads_answers(),
            reads_orca: arm.reads_orca(),
            learns: matches!(arm, SimArm::Prequal(Prequal { learn: true, .. })),
            queries: Slab::default(),
            probes: Slab::default(),
            arrivals: 0,
            trace: stream(seed, 1),
            others: (stream(seed, 4), 0),
            keys: scenario.keys.and_then(|keys| Zipf::new(f64::from(keys.count), keys.exponent).ok()),
            network: stream(seed, 2),
            choice,
            from,
            paused_until: 0,
            until: from + nanos(scenario.measured),
            run: RunRecord::default(),
        };
        world.rotate();
        world.begin();
        world
    }

    fn begin(&mut self) {
        match self.scenario.load {
            SimLoad::Poisson(_) | SimLoad::Even(_) | SimLoad::Waves { .. } | SimLoad::Batches { .. } => {
                self.schedule_arrival();
            }
            SimLoad::Closed { users } => {
                for _ in 0..users {
                    let at = self.trace.random_range(0..SECOND / 100);
                    self.at(at, Event::Arrival);
                }
            }
        }
        self.schedule_other();
        self.at(TICK, Event::Tick);
        self.at(SECOND, Event::Second);
        if let Polling::Rif { every_ms } = self.polling {
            for client in 0..self.balancers.len() as u32 {
                let at = self.choice.random_range(0..every_ms * 1_000_000);
                self.at(at, Event::Poll(client));
            }
        }
        for (index, (at, _)) in self.scenario.changes.iter().enumerate() {
            self.at(nanos(*at), Event::Change(index as u32));
        }
    }

    fn at(&mut self, at: Nanos, event: Event) {
        self.sequence += 1;
        self.queue.push(Timed { at, sequence: self.sequence, event });
    }

    fn after(&mut self, delay: Nanos, event: Event) {
        self.at(self.now + delay, event);
    }

    fn go(&mut self) {
        loop {
            let next = self.queue.peek().map_or(Nanos::MAX, |timed| timed.at);
            if let Some((at, slot, id)) = self.deadlines.front().copied().filter(|(at, ..)| *at <= next) {
                self.deadlines.pop_front();
                self.now = at;
                self.missed(slot, id);
                continue;
            }
            // The queue is empty once arrivals and periodic events have stopped and the last queries have ended.
            let Some(Timed { at, event, .. }) = self.queue.pop() else { break };
            self.now = at;
            self.run.events += 1;
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Pick(..) | Event::Answer(_) | Event::ProbeReply(_) | Event::SyncDeadline(..)
                if self.now < self.paused_until =>
            {
                self.at(self.paused_until, event);
            }
            Event::Arrival => self.arrival(),
            Event::Other => self.other(),
            Event::Pick(query, client) => self.pick(query, client as usize),
            Event::AtServer(query) => self.at_server(query),
            Event::Wake { server, version } => self.wake(server as usize, version),
            Event::Served(query) => self.served(query),
            Event::Answer(query) => self.answer(query),
            Event::ProbeAtServer(probe) => self.probe_at_server(probe),
            Event::ProbeReply(probe) => self.probe_reply(probe),
            Event::SyncDeadline(query, id) => self.decide_sync(query, id),
            Event::Poll(client) => self.poll(client),
            Event::Tick => self.tick(),
            Event::Second => self.second(),
            Event::Change(index) => self.change(index as usize),
        }
    }

    fn measuring(&self) -> bool {
        (self.from..self.until).contains(&self.now)
    }

    // --- queries

    fn schedule_arrival(&mut self) {
        let gap = match self.scenario.load {
            SimLoad::Poisson(qps) => {
                let gap: f64 = Exp1.sample(&mut self.trace);
                gap / qps
            }
            SimLoad::Even(qps) => 1.0 / qps,
            SimLoad::Waves { low, high, seconds } => {
                let share: f64 = Exp1.sample(&mut self.trace);
                wave_gap(self.now as f64 / SECOND as f64, share, [low, high], seconds)
            }
            SimLoad::Batches { of, .. } if !self.arrivals.is_multiple_of(of) => 0.0,
            SimLoad::Batches { qps, of } => {
                let gap: f64 = Exp1.sample(&mut self.trace);
                gap * of as f64 / qps
            }
            SimLoad::Closed { .. } => return,
        };
        let at = self.now + nanos(gap);
        if at < self.until {
            self.at(at, Event::Arrival);
        }
    }

    fn arrival(&mut self) {
        if self.now >= self.until {
            return;
        }
        let client = self.trace.random_range(0..self.balancers.len()) as u32;
        let size = self.scenario.sizes.draw(&mut self.trace);
        let key = self.keys.map_or(0, |keys| keys.sample(&mut self.trace) as u32);
        self.schedule_arrival();
        let sample = self.measuring().then(|| {
            let at_ms = ((self.now - self.from) / 1_000_000) as u32;
            self.run.samples.push(SimSample { at_ms, latency_us: FAILED, server: u16::MAX });
            self.run.samples.len() as u32 - 1
        });
        let slot = self.query(client, size, key, sample);
        if let Some(deadline) = self.scenario.deadline {
            self.deadlines.push_back((self.now + nanos(deadline), slot, self.arrivals));
        }
        self.handle(Event::Pick(slot, client));
    }

    /// Adds a query that has just arrived.
    fn query(&mut self, client: u32, size: f64, key: u32, sample: Option<u32>) -> u32 {
        self.arrivals += 1;
        self.queries.insert(Query {
            id: self.arrivals,
            client,
            server: u32::MAX,
            arrived: self.now,
            at_server: 0,
            size,
            key,
            ticket: None,
            sample,
            client_done: false,
            server_done: false,
            failed: false,
            report: None,
            orca: None,
            waiting: None,
            request: Request::default(),
        })
    }

    fn schedule_other(&mut self) {
        if self.scenario.others > 0.0 {
            let gap: f64 = Exp1.sample(&mut self.others.0);
            self.after(nanos(gap / self.scenario.others), Event::Other);
        }
    }

    /// Sends a query of another client. No simulated client waits for its answer, so only the server notices it.
    fn other(&mut self) {
        if self.now >= self.until {
            return;
        }
        self.schedule_other();
        let size = self.scenario.sizes.draw(&mut self.others.0);
        let slot = self.query(u32::MAX, size, 0, None);
        if let Some(query) = self.queries.get(slot) {
            query.client_done = true;
        }
        self.others.1 += 1;
        self.send(slot, self.alive[self.others.1 % self.alive.len()]);
    }

    fn pick(&mut self, slot: u32, client: usize) {
        let now = self.now;
        match &mut self.balancers[client] {
            Balancer::Simple(policy) => {
                // Envoy's own discovery reports membership changes to these policies at once.
                let mut chosen = policy.pick(micros(now), &mut self.choice);
                let mut tries = 0;
                while !self.servers[chosen].alive && tries < 1000 {
                    let gone =
                        Done { latency_us: 0, outcome: Outcome::Aborted, rif: None, utilisation: None };
                    policy.done(chosen, micros(now), &gone);
                    chosen = policy.pick(micros(now), &mut self.choice);
                    tries += 1;
                }
                self.send(slot, chosen);
            }
            Balancer::Prequal(balancer, _) => {
                let Mode::Sync = balancer.config().choice.mode else { return self.place(slot, client, &[]) };
                let (targets, waiting) = balancer.ask(None, &mut self.choice);
                let settings = balancer.config().choice.sync;
                let id = self.queries.get(slot).map_or(0, |query| {
                    query.waiting = Some(waiting);
                    query.id
                });
                for target in targets {
                    self.send_probe(client, Some(target), Some((slot, id)));
                }
                self.after(Nanos::from(settings.deadline_ms) * 1_000_000, Event::SyncDeadline(slot, id));
            }
            Balancer::Floor => {
                let cost = |server: usize| {
                    let (jobs, state) = (self.assigned[server] as usize + 1, &self.servers[server]);
                    let rate = match state.spec.service {
                        // If all slots are in use, a new query waits, and it makes others wait. With twice the jobs,
                        // twice as many queries wait twice as long, so the ratio is squared.
                        SimService::Delay => (state.spec.slots as f64 / jobs as f64).min(1.0).powi(2),
                        SimService::Cpu { .. } => state.rate_among(jobs),
                    };
                    (state.spec.work_ms / rate, jobs as f64)
                };
                let least = self.alive.iter().map(|server| (cost(*server), *server));
                let chosen = least.min_by(|a, b| a.0.0.total_cmp(&b.0.0).then(a.0.1.total_cmp(&b.0.1)));
                if let Some((_, server)) = chosen {
                    self.send(slot, server);
                }
            }
        }
    }

    /// Sends a query to the server that its client's balancer picks, or else where the fallback places it.
    fn place(&mut self, slot: u32, client: usize, answers: &[Answer]) {
        let now = self.now;
        let Balancer::Prequal(balancer, own) = &mut self.balancers[client] else { return };
        let request = balancer.begin(micros(now), answers, true, &mut self.choice);
        let (pick, waited) = (request.pick, balancer.config().choice.mode == Mode::Sync);
        if self.from <= now {
            self.run.branches[match pick.branch {
                Branch::Cold | Branch::Sync | Branch::Scored | Branch::Trial => 0,
                Branch::Hot => 1,
                Branch::Fallback | Branch::Agentless => 2,
            }] += 1;
            let view = balancer.view(micros(now));
            self.run.ages_ms.push(view.median_age_ms.unwrap_or(u32::MAX));
            self.run.thetas.extend(view.theta);
        }
        let chosen = pick.replica.map(server_of);
        let alive = chosen.filter(|server| self.servers[*server].alive);
        self.run.diverted += u64::from(chosen.is_some() && alive.is_none());
        let server = alive.unwrap_or_else(|| {
            let Some(own) = own else { return self.alive[self.choice.random_range(0..self.alive.len())] };
            let (first, second) = two_distinct(self.alive.len(), &mut self.choice);
            less_loaded(own, (self.alive[first], self.alive[second]))
        });
        if let Some(own) = own {
            own.start(server);
        }
        if let Some(query) = self.queries.get(slot) {
            query.request = request;
        }
        self.send(slot, server);
        // If the query waited for replies to its own probes, these have filled the pool.
        let addressed = if waited { 0 } else { pick.probes.addressed };
        self.send_probes(client, ProbesDue { addressed, ..pick.probes });
    }

    fn send(&mut self, slot: u32, server: usize) {
        self.assigned[server] += 1;
        let delay = transit(&mut self.network);
        if let Some(query) = self.queries.get(slot) {
            query.server = server as u32;
            if let Some(sample) = query.sample {
                self.run.samples[sample as usize].server = server as u16;
            }
        }
        self.after(delay, Event::AtServer(slot));
    }

    fn at_server(&mut self, slot: u32) {
        let now = self.now;
        let Some(query) = self.queries.get(slot) else { return };
        let server = &mut self.servers[query.server as usize];
        query.ticket = Some(server.arrive(now));
        query.at_server = now;
        let refused = server.running >= server.spec.slots && server.waiting.len() >= server.spec.queue;
        let fails = server.spec.failing > 0.0 && self.choice.random::<f64>() < server.spec.failing;
        if refused || fails {
            query.failed = true;
            return self.finish(slot);
        }
        if server.running >= server.spec.slots {
            server.waiting.push_back(slot);
            return;
        }
        self.start(slot);
    }

    /// Begins serving a query that has a slot.
    fn start(&mut self, slot: u32) {
        let now = self.now;
        let Some(query) = self.queries.get(slot) else { return };
        let (index, size, key) = (query.server as usize, query.size, query.key);
        let server = &mut self.servers[index];
        server.advance(now);
        server.running += 1;
        let work = size * server.look_up(key) * server.spec.work_ms * 1e6;
        match server.spec.service {
            SimService::Delay => self.after(work as Nanos, Event::Served(slot)),
            SimService::Cpu { .. } => {
                server.add(now, Job::Query(slot), work);
                self.arm_wake(index);
            }
        }
    }

    fn arm_wake(&mut self, index: usize) {
        let server = &mut self.servers[index];
        if let Some(at) = server.wake_up(self.now) {
            let version = server.version;
            self.at(at, Event::Wake { server: index as u32, version });
        }
    }

    fn wake(&mut self, index: usize, version: u32) {
        let server = &mut self.servers[index];
        if server.version != version {
            return;
        }
        server.advance(self.now);
        server.woken();
        while let Some(job) = self.servers[index].pop_done() {
            match job {
                Job::Query(slot) => {
                    let extra = self.servers[index].spec.extra_ms;
                    if extra > 0.0 {
                        self.after((extra * 1e6) as Nanos, Event::Served(slot));
                    } else {
                        self.served(slot);
                    }
                }
                Job::Probe(probe) => self.reply(probe),
            }
        }
        self.arm_wake(index);
    }

    fn served(&mut self, slot: u32) {
        let Some(index) = self.queries.get(slot).map(|query| query.server as usize) else { return };
        if self.servers[index].frozen {
            // On a frozen server, the query ends only once the server has thawed.
            self.after(TICK, Event::Served(slot));
            return;
        }
        let now = self.now;
        self.servers[index].advance(now);
        self.servers[index].running -= 1;
        self.finish(slot);
        if let Some(next) = self.servers[index].waiting.pop_front() {
            self.start(next);
        }
    }

    /// A server finishes a query, successfully or not.
    fn finish(&mut self, slot: u32) {
        let now = self.now;
        let Some(query) = self.queries.get(slot) else { return };
        query.server_done = true;
        let index = query.server as usize;
        let server = &mut self.servers[index];
        self.assigned[index] -= 1;
        // As in the agent: the response headers carry the report, while the query still counts as in flight.
        if self.reads_answers && !query.client_done {
            query.report = Some(server.report(now, query.ticket.as_ref().map(Ticket::visit)));
        }
        if self.reads_orca && !query.client_done {
            query.orca = Some(server.orca(now, query.ticket.as_ref().map(Ticket::visit)));
        }
        if let Some(ticket) = query.ticket.take() {
            let outcome = if query.failed { Outcome::Failure } else { Outcome::Success };
            server.leave(ticket, now, outcome, query.at_server);
        }
        server.count(query.failed);
        if query.client_done {
            self.queries.remove(slot);
            return;
        }
        let delay = transit(&mut self.network);
        self.after(delay, Event::Answer(slot));
    }

    fn answer(&mut self, slot: u32) {
        let now = self.now;
        let Some(query) = self.queries.remove(slot) else { return };
        if query.client_done {
            return;
        }
        let (client, server) = (query.client as usize, query.server as usize);
        let latency_us = (now - query.arrived) / 1000;
        if let Some(sample) = query.sample.filter(|_| !query.failed) {
            self.run.samples[sample as usize].latency_us = latency_us as u32;
        }
        match &mut self.balancers[client] {
            Balancer::Simple(policy) => {
                let outcome = if query.failed { Outcome::Failure } else { Outcome::Success };
                let rif = query.report.map(|report| report.rif);
                if let Some(orca) = query.orca {
                    policy.utilisation(server, micros(now), &orca);
                }
                policy.done(server, micros(now), &Done { latency_us, outcome, rif, utilisation: None });
            }
            Balancer::Prequal(balancer, own) => {
                if let Some(own) = own {
                    own.end(server);
                }
                let proxy = Proxy { now, server, class: Class::Answer };
                let mut request = query.request;
                if let Some(report) = query.report {
                    let report = Some(Ok(named(server, report)));
                    balancer.response(micros(now), &mut request, query.failed, report, &proxy);
                }
                balancer.ended(request, true, query.failed, &proxy);
            }
            Balancer::Floor => {}
        }
        if let SimLoad::Closed { .. } = self.scenario.load {
            self.at(now, Event::Arrival);
        }
    }

    /// Handles the deadline of a query, which has failed if it is still unanswered.
    fn missed(&mut self, slot: u32, id: u64) {
        let now = self.now;
        let Some(query) = self.queries.get(slot).filter(|query| query.id == id) else { return };
        query.client_done = true;
        let (client, server) = (query.client as usize, query.server as usize);
        let latency_us = (now - query.arrived) / 1000;
        let done = Done { latency_us, outcome: Outcome::Failure, rif: None, utilisation: None };
        // The query's slot is freed later, when the server has finished or the answer arrives.
        let request = std::mem::take(&mut query.request);
        match &mut self.balancers[client] {
            Balancer::Simple(policy) => policy.done(server, micros(now), &done),
            Balancer::Prequal(balancer, own) => {
                if let Some(own) = own {
                    own.end(server);
                }
                let proxy = Proxy { now, server, class: Class::UpstreamFailure };
                balancer.ended(request, false, false, &proxy);
            }
            Balancer::Floor => {}
        }
    }

    // --- probes

    fn send_probes(&mut self, client: usize, due: ProbesDue) {
        if due.is_empty() {
            return;
        }
        let now = micros(self.now);
        let Balancer::Prequal(balancer, _) = &mut self.balancers[client] else { return };
        for target in balancer.targets(due, now, &mut self.choice) {
            // A client that knows all servers from the start sends no discovery probes.
            if target.is_some() || self.learns {
                self.send_probe(client, target, None);
            }
        }
    }

    fn send_probe(&mut self, client: usize, asked: Option<Target>, query: Option<(u32, u64)>) {
        if self.measuring() {
            *(if asked.is_some() { &mut self.run.probes } else { &mut self.run.discoveries }) += 1;
        }
        // If the addressed host is gone, or none is addressed, the probe cluster's own policy picks the server.
        let known = asked.map(|asked| server_of(asked.replica)).filter(|server| self.servers[*server].alive);
        let server = known.unwrap_or_else(|| {
            let turn = &mut self.turns[client];
            *turn += 1;
            self.rotation[*turn % self.rotation.len()]
        });
        let probe = self.probes.insert(Probe {
            client: client as u32,
            asked,
            server: server as u32,
            query,
            report: None,
        });
        let delay = transit(&mut self.network);
        self.after(delay, Event::ProbeAtServer(probe));
    }

    fn probe_at_server(&mut self, slot: u32) {
        let now = self.now;
        let Some(index) = self.probes.get(slot).map(|probe| probe.server as usize) else { return };
        if self.scenario.probe_cost_ms > 0.0 {
            self.servers[index].add(now, Job::Probe(slot), self.scenario.probe_cost_ms * 1e6);
            self.arm_wake(index);
        } else if self.servers[index].frozen {
            // A frozen server does not answer, and no event refers to this probe.
            self.probes.remove(slot);
        } else {
            self.reply(slot);
        }
    }

    fn reply(&mut self, slot: u32) {
        let now = self.now;
        let Some(probe) = self.probes.get(slot) else { return };
        let server = &mut self.servers[probe.server as usize];
        probe.report = Some(server.report(now, None));
        let delay = transit(&mut self.network);
        self.after(delay, Event::ProbeReply(slot));
    }

    fn probe_reply(&mut self, slot: u32) {
        let now = self.now;
        let Some(probe) = self.probes.remove(slot) else { return };
        let Some(report) = probe.report else { return };
        let (client, server) = (probe.client as usize, probe.server as usize);
        let Balancer::Prequal(balancer, _) = &mut self.balancers[client] else { return };
        let answer = balancer.replied(micros(now), probe.asked, false, Ok(reply(server, report)));
        let Some((query, id)) = probe.query else { return };
        let waiting = self.queries.get(query).filter(|query| query.id == id);
        let waiting = waiting.and_then(|query| query.waiting.as_mut());
        if waiting.is_some_and(|waiting| waiting.ended(answer).is_some()) {
            self.decide_sync(query, id);
        }
    }

    fn decide_sync(&mut self, slot: u32, id: u64) {
        let Some(query) = self.queries.get(slot).filter(|query| query.id == id) else { return };
        let Some(waiting) = query.waiting.take() else { return };
        let client = query.client as usize;
        self.place(slot, client, waiting.answers());
    }

    // --- periodic events

    fn poll(&mut self, client: u32) {
        let Polling::Rif { every_ms } = self.polling else { return };
        if self.now >= self.until {
            return;
        }
        if self.measuring() {
            self.run.polls += self.servers.len() as u64;
        }
        if let Balancer::Simple(policy) = &mut self.balancers[client as usize] {
            for (index, server) in self.servers.iter().enumerate() {
                policy.polled(index, micros(self.now), server.rif());
            }
        }
        self.after(every_ms * 1_000_000, Event::Poll(client));
    }

    fn tick(&mut self) {
        let now = self.now;
        let over = now >= self.until;
        for index in 0..self.servers.len() {
            if self.servers[index].has_antagonists() {
                self.servers[index].fluctuate(now, TICK as f64 / 1e9);
                self.arm_wake(index);
            }
            if self.measuring() {
                let rif = self.servers[index].rif() as usize;
                if self.run.rifs.len() <= rif {
                    self.run.rifs.resize(rif + 1, 0);
                }
                self.run.rifs[rif] += 1;
            }
        }
        if !over {
            for client in 0..self.balancers.len() {
                let Balancer::Prequal(balancer, _) = &mut self.balancers[client] else { break };
                let due = balancer.tick(micros(now), &mut self.choice).probes;
                self.send_probes(client, due);
            }
        }
        // Antagonists continue until the last query has ended.
        if !over || self.queries.items.len() > self.queries.free.len() {
            self.after(TICK, Event::Tick);
        }
    }

    fn second(&mut self) {
        let now = self.now;
        let mut reports = Vec::with_capacity(self.servers.len());
        for server in &mut self.servers {
            let cores = server.smooth(now, 1.0);
            let allocation = match server.spec.service {
                SimService::Cpu { cores, .. } => cores,
                // A thread pool's utilisation is relative to its slots; without a limit there is no utilisation.
                SimService::Delay if server.spec.slots < usize::MAX => server.spec.slots as f64,
                SimService::Delay => continue,
            };
            if (self.from..self.until).contains(&now) {
                self.run.utilisation.push((cores / allocation) as f32);
            }
            reports.push(Utilisation { qps: server.qps, eps: server.eps, cpu: server.cpu / allocation });
        }
        if self.polling == Polling::Utilisation {
            for balancer in &mut self.balancers {
                let Balancer::Simple(policy) = balancer else { continue };
                for (server, report) in reports.iter().enumerate() {
                    policy.utilisation(server, micros(now), report);
                }
            }
            if self.measuring() {
                self.run.polls += (self.servers.len() * self.balancers.len()) as u64;
            }
        }
        if now < self.until {
            self.after(SECOND, Event::Second);
        }
    }

    fn change(&mut self, index: usize) {
        let now = self.now;
        match self.scenario.changes[index].1 {
            SimChange::Work(server, ms) => self.servers[server].spec.work_ms = ms,
            SimChange::Failing(server, share) => self.servers[server].spec.failing = share,
            SimChange::Frozen(server, frozen) => {
                self.servers[server].advance(now);
                self.servers[server].frozen = frozen;
                self.arm_wake(server);
            }
            SimChange::Spare(server, spare) => {
                self.servers[server].set_spare(now, spare);
                self.arm_wake(server);
            }
            SimChange::Leave(server) => {
                self.servers[server].alive = false;
                self.alive.retain(|alive| *alive != server);
                self.rotate();
            }
            SimChange::Pause(ms) => self.paused_until = now + nanos(ms / 1e3),
            SimChange::Join(server) => {
                self.servers[server].alive = true;
                self.servers[server].starts(now);
                self.alive.push(server);
                self.rotate();
            }
        }
    }

    fn rotate(&mut self) {
        let weight = |server: usize| self.scenario.servers[server].weight;
        let rounds = self.alive.iter().map(|server| weight(*server)).max().unwrap_or(0);
        let round = |round| self.alive.iter().copied().filter(move |server| weight(*server) > round);
        self.rotation = (0..rounds).flat_map(round).collect();
    }
}

/// Returns the time from `now` until `share` more queries are expected. The rate alternates between the two `rates`,
/// each of which lasts `seconds`. All times are in seconds.
fn wave_gap(now: f64, mut share: f64, rates: [f64; 2], seconds: f64) -> f64 {
    let mut wave = (now / seconds) as usize;
    let mut from = now;
    loop {
        let (qps, end) = (rates[wave % 2], (wave + 1) as f64 * seconds);
        if share <= (end - from) * qps {
            return from + share / qps - now;
        }
        share -= ((end - from) * qps).max(0.0);
        (wave, from) = (wave + 1, end);
    }
}

#[cfg(test)]
mod tests;
