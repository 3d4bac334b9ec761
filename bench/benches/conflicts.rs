//! Measures how often workers that share one pool conflict. A write fails if another worker wrote first. The worker
//! then retries, and gives up after eight tries.
//!
//! The first part runs in virtual time: every worker has a thread and a balancer, requests arrive at random (Poisson),
//! and every transaction takes the same time from read to write. Only the worker that is due first runs, so a run
//! repeats exactly. In the second part, real threads handle requests without a pause, as fast as the cores allow; its
//! numbers depend on this machine.

mod served;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::Instant;

use prequal_core::client::members::Target;
use prequal_core::client::reply::Reply;
use prequal_core::client::settings::{ChoiceSettings, ClusterConfig, Shim};
use prequal_core::client::store::{Cas, SharedData, Store};
use prequal_core::client::{Balancer, Count, Counters, Request};
use prequal_core::config::Profile;
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;
use prequal_core::wire::report::LoadReport;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Exp};

use served::Served;

const WORKERS: [usize; 4] = [1, 4, 16, 64];
const RATES: [f64; 2] = [1000.0, 5000.0];
const TRANSACTIONS_US: [u64; 3] = [5, 10, 20];
const FLEET: u16 = 16;
/// Interval between two ticks of a worker.
const TICK_US: u64 = 250_000;
/// The workers start one after the other within this time.
const START_US: u64 = 100_000;
/// Approximate number of requests that all workers together serve after that time.
const REQUESTS: f64 = 20_000.0;
const ANSWER_US: u64 = 10_000;
const REPLY_US: u64 = 1000;
/// Number of requests of all real threads together.
const HAMMERED: usize = 200_000;

/// Bytes by key, each with the version number of its last write.
#[derive(Default)]
struct Values(HashMap<String, (Vec<u8>, u32)>, u32);

impl Values {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        self.0.get(key).map_or((None, None), |(bytes, number)| (Some(bytes.clone()), Some(*number)))
    }

    fn set(&mut self, key: &str, bytes: &[u8], number: Option<u32>) -> bool {
        let value = self.0.entry(key.into()).or_default();
        if number.is_some_and(|number| number != 0 && number != value.1) {
            return false;
        }
        self.1 += 1;
        *value = (bytes.into(), self.1);
        true
    }
}

/// The store for real threads: the thread that holds the lock runs.
#[derive(Clone, Copy)]
struct Locked<'a>(&'a Mutex<Values>);

impl SharedData for Locked<'_> {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        self.0.lock().unwrap().get(key)
    }

    fn set(&self, key: &str, bytes: &[u8], number: Option<u32>) -> bool {
        self.0.lock().unwrap().set(key, bytes, number)
    }
}

/// The store for virtual time: the worker that is due first runs.
struct Turns {
    state: Mutex<(Values, Vec<u64>)>,
    turns: Vec<Condvar>,
}

/// One worker's view of the store, and its time.
#[derive(Clone, Copy)]
struct Seat<'a> {
    turns: &'a Turns,
    id: usize,
    now: &'a Cell<u64>,
    transaction_us: u64,
}

impl Seat<'_> {
    /// Waits until all other workers are past this worker's time, then runs `act`.
    fn turn<T>(&self, act: impl FnOnce(&mut Values) -> T) -> T {
        let first = |due: &[u64]| (0..due.len()).min_by_key(|id| due[*id]).unwrap_or(0);
        let mut state = self.turns.state.lock().unwrap();
        state.1[self.id] = self.now.get();
        let next = first(&state.1);
        if next != self.id {
            self.turns.turns[next].notify_one();
            state = self.turns.turns[self.id].wait_while(state, |state| first(&state.1) != self.id).unwrap();
        }
        act(&mut state.0)
    }
}

impl SharedData for Seat<'_> {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        self.turn(|values| values.get(key))
    }

    fn set(&self, key: &str, bytes: &[u8], number: Option<u32>) -> bool {
        self.now.set(self.now.get() + self.transaction_us);
        self.turn(|values| values.set(key, bytes, number))
    }
}

/// Writes retried, and writes given up.
#[derive(Default)]
struct Conflicts(Cell<u64>, Cell<u64>);

impl Counters for Conflicts {
    fn count(&self, what: Count) {
        if let Count::Shared { conflicts, given_up, .. } = what {
            self.0.set(self.0.get() + u64::from(conflicts));
            self.1.set(self.1.get() + u64::from(given_up));
        }
    }
}

enum Event {
    Request,
    Answer(Request),
    Reply(Option<Target>),
    Tick,
}

struct Worker<S: Store> {
    balancer: Balancer<S, Conflicts>,
    rng: SmallRng,
    requests: u64,
}

impl<S: Store> Worker<S> {
    fn new(store: &S, id: usize) -> Self {
        let config = ClusterConfig {
            cluster: "service".into(),
            probe_cluster: "probes".into(),
            pool: Profile::Default.pool_settings(),
            probe: Profile::Default.probe_settings(),
            choice: ChoiceSettings::default(),
            endpoints: (0..FLEET).map(replica).collect(),
        };
        let balancer = Balancer::new(config, Shim::StatefulSession, store, Conflicts::default(), micros(0));
        Self { balancer, rng: SmallRng::seed_from_u64(id as u64), requests: 0 }
    }

    fn report(&mut self, endpoint: Endpoint) -> LoadReport {
        let text = format!("{};10000;{endpoint}", self.rng.random_range(0..8));
        LoadReport::parse(text).expect("well-formed")
    }

    /// Handles `event`; returns the events that follow, with their delays.
    fn happen(&mut self, now: u64, event: Event) -> Vec<(u64, Event)> {
        let at = micros(now);
        match event {
            Event::Request => {
                self.requests += 1;
                let request = self.balancer.begin(at, &[], true, &mut self.rng);
                let targets = self.balancer.targets(request.pick.probes, at, &mut self.rng);
                let replies = targets.into_iter().map(|target| (REPLY_US, Event::Reply(target)));
                replies.chain([(ANSWER_US, Event::Answer(request))]).collect()
            }
            Event::Answer(mut request) => {
                let served = request.pick.replica.unwrap_or_else(|| replica(0));
                let (load, proxy) = (self.report(served), Served(at, served));
                self.balancer.response(at, &mut request, false, Some(Ok(load)), &proxy);
                self.balancer.settle(at, &mut self.rng);
                self.balancer.ended(request, true, false, &proxy);
                Vec::new()
            }
            Event::Reply(asked) => {
                let named = asked.map_or_else(|| replica(0), |target| target.replica);
                let reply = Reply { report: Ok(self.report(named)), host: None };
                self.balancer.replied(at, asked, false, Ok(reply));
                self.balancer.settle(at, &mut self.rng);
                Vec::new()
            }
            Event::Tick => {
                self.balancer.tick(at, &mut self.rng);
                vec![(TICK_US, Event::Tick)]
            }
        }
    }
}

/// Requests, writes retried, and writes given up.
type Totals = [u64; 3];

fn totals<S: Store>(worker: &Worker<S>) -> Totals {
    let Conflicts(again, given_up) = worker.balancer.counters();
    [worker.requests, again.get(), given_up.get()]
}

fn replica(number: u16) -> Endpoint {
    let [high, low] = number.to_be_bytes();
    SocketAddr::from((Ipv4Addr::new(10, 0, high, low), 8080)).into()
}

fn micros(us: u64) -> Micros {
    Micros::from_millis(1_700_000_000_000).plus(us)
}

/// Runs `work` in `workers` threads; returns the sum of their totals.
fn all(workers: usize, work: impl Fn(usize) -> Totals + Sync) -> Totals {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..workers).map(|id| scope.spawn(move || work(id))).collect();
        threads.into_iter().fold([0; 3], |sum, thread| {
            let one = thread.join().expect("a worker panicked");
            [0, 1, 2].map(|part| sum[part] + one[part])
        })
    })
}

fn in_virtual_time(workers: usize, rate: f64, transaction_us: u64) -> Totals {
    let state = Mutex::new((Values::default(), (0..workers as u64).map(|id| id * 1000).collect()));
    let turns = Turns { state, turns: (0..workers).map(|_| Condvar::new()).collect() };
    all(workers, |id| {
        let now = Cell::new(id as u64 * 1000);
        let seat = Seat { turns: &turns, id, now: &now, transaction_us };
        let mut worker = Worker::new(&Cas { data: seat, prefix: "bench".into() }, id);
        let between = Exp::new(rate / 1e6).expect("a rate");
        let end = START_US + (REQUESTS * 1e6 / rate) as u64 / workers as u64;
        let mut events = BTreeMap::from([((worker.rng.random_range(0..TICK_US), 0), Event::Tick)]);
        let (mut arrival, mut number) = (now.get() as f64, 0);
        while now.get() < end {
            if events.first_key_value().is_none_or(|((at, _), _)| arrival as u64 <= *at) {
                events.insert((arrival as u64, number), Event::Request);
                arrival += between.sample(&mut worker.rng);
            }
            let Some(((at, _), event)) = events.pop_first() else { break };
            now.set(now.get().max(at));
            for (after, event) in worker.happen(now.get(), event) {
                number += 1;
                events.insert((now.get() + after, number), event);
            }
            number += 1;
        }
        seat.turns.state.lock().unwrap().1[id] = u64::MAX;
        seat.turns.turns.iter().for_each(Condvar::notify_one);
        totals(&worker)
    })
}

/// Runs real threads that handle requests without a pause.
fn hammered(workers: usize) -> (Totals, f64) {
    let values = Mutex::new(Values::default());
    let began = Instant::now();
    let totals = all(workers, |id| {
        let mut worker = Worker::new(&Cas { data: Locked(&values), prefix: "bench".into() }, id);
        for step in 0..HAMMERED / workers {
            let now = (step * workers * 10) as u64;
            for (_, event) in worker.happen(now, Event::Request) {
                worker.happen(now, event);
            }
        }
        totals(&worker)
    });
    (totals, began.elapsed().as_secs_f64() * 1e6 / totals[0] as f64)
}

fn shares([requests, again, given_up]: Totals) -> String {
    let requests = requests.max(1) as f64;
    format!("{:>8.3} % {:>8.4} %", again as f64 / requests * 100.0, given_up as f64 / requests * 100.0)
}

fn main() {
    // This benchmark does not use criterion, so it has to skip test runs, and runs of other benchmarks, by itself.
    let args: Vec<String> = std::env::args().skip(1).collect();
    let fits = |arg: &String| arg == "--bench" || "conflicts".contains(arg.as_str());
    if !args.iter().any(|arg| arg == "--bench") || !args.iter().all(fits) {
        return;
    }
    println!("writes retried and writes given up, per request; a fleet of {FLEET}\n");
    println!("workers  requests/s each{}", TRANSACTIONS_US.map(|us| format!("{us:>19} µs")).concat());
    for workers in WORKERS {
        for rate in RATES {
            let cells = TRANSACTIONS_US.map(|us| format!("  {}", shares(in_virtual_time(workers, rate, us))));
            println!("{workers:>7}  {rate:>15}{}", cells.concat());
        }
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    println!("\nas fast as {cores} cores allow\n\nworkers  µs per request");
    for workers in WORKERS {
        let (totals, us) = hammered(workers);
        println!("{workers:>7}  {us:>14.2}  {}", shares(totals));
    }
}
