//! Several workers race over one store. Each is a thread with its own balancer.
//!
//! Only one thread runs at a time. Before each read and each write of the store, the seed decides whether another
//! thread gets its turn, so a run repeats exactly. After every event the test compares the stored state with the
//! actions of the workers. The benchmark `conflicts` measures how often writes conflict in practice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rand::seq::IndexedRandom;

use super::*;
use crate::client::ejection::EjectionTable;
use crate::client::pool::{Budget, Candidate, PoolState};
use crate::client::sync_mode::Answer;
use crate::shared::blob::Blob;

const FLEET: u16 = 16;
/// The first four replicas misbehave until half of the race is over: they fail, hang, are refused by the proxy, or fail
/// and leave.
const FAILS: u16 = 0;
const HANGS: u16 = 1;
const REFUSED: u16 = 2;
const LEFT: u16 = 3;
const GOOD: std::ops::Range<u16> = 4..FLEET;
const R_PROBE: f64 = 0.75;

/// The store, and the wake-ups by which threads take turns.
struct Race {
    state: Mutex<State>,
    turns: Vec<Condvar>,
}

struct State {
    rng: SmallRng,
    /// Probability that another thread gets its turn.
    switching: f64,
    turn: usize,
    running: Vec<usize>,
    /// Time, milliseconds.
    now: u64,
    values: BTreeMap<String, (Vec<u8>, u32)>,
    writes: u32,
    /// Keys that each worker has read during its current event.
    read: BTreeSet<(usize, String)>,
    truth: Truth,
}

/// The true course of the race, to compare with the stored state.
#[derive(Default)]
struct Truth {
    reports: Vec<Reported>,
    /// Replicas chosen, and when, milliseconds.
    chosen: Vec<(Endpoint, u64)>,
    /// Number of requests that each replica has failed.
    failed: BTreeMap<Endpoint, u32>,
    /// Number of the report behind each pool entry when the pool was last written.
    entries: BTreeMap<Endpoint, usize>,
    /// Number of compared pool entries for which requests had been sent since the report.
    compensated: u32,
    /// Writes of the pool, by worker.
    written: Vec<u32>,
    /// Requests whose pick was written to the pool.
    picks: u32,
    /// Total number of addressed probes that were due with requests.
    addressed: u32,
    /// Time in milliseconds at which a tick last returned probes.
    idle: Option<u64>,
    /// Writes refused because another worker had written since the read.
    refused: u32,
    /// Replicas whose records were dropped while they were ejected.
    vanished: usize,
}

/// A report. Its latency identifies it: the number of earlier reports plus one, in microseconds.
#[derive(Default)]
struct Reported {
    rif: u32,
    /// Requests sent because of it.
    sent: u32,
    /// Time at which a response brought it, milliseconds; `None` for a probe.
    response_at: Option<u64>,
    recorded: bool,
}

/// One worker's place in the race.
#[derive(Clone, Copy)]
struct Seat<'a> {
    race: &'a Race,
    id: usize,
}

impl<'a> Seat<'a> {
    fn state(self) -> MutexGuard<'a, State> {
        // If another thread has panicked, the test shows that panic.
        self.race.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// May pass the turn to another thread, then waits until it is this thread's turn.
    fn step(self) -> MutexGuard<'a, State> {
        let mut state = self.state();
        let State { rng, switching, .. } = &mut *state;
        if rng.random_bool(*switching) {
            state.pass(self.race);
        }
        self.wait(state)
    }

    fn wait(self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let turn = &self.race.turns[self.id];
        turn.wait_while(state, |state| state.turn != self.id).unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn pass(&mut self, race: &Race) {
        if let Some(next) = self.running.choose(&mut self.rng) {
            self.turn = *next;
            race.turns[*next].notify_one();
        }
    }

    fn blob<B: Blob>(&self, name: &str) -> B {
        B::decode(&self.values[&format!("race/{name}")].0).unwrap()
    }

    /// Returns the pool's entries, each with the number of its report.
    fn entries(&self, now: u64) -> Vec<(usize, Candidate)> {
        let pool: PoolState = self.blob("pool");
        let numbered =
            pool.candidates(ms(now)).filter_map(|entry| Some((entry.latency_us? as usize - 1, entry)));
        numbered.collect()
    }

    /// Checks that the pool adds to a report's RIF the requests sent since. If a response brought the report, another
    /// worker may have sent requests before the report was recorded. Requests that fail are subtracted, whether or not
    /// the report counts them.
    fn compare(&mut self) {
        for (number, entry) in self.entries(self.now) {
            let reported = &self.truth.reports[number];
            let meanwhile = reported.response_at.map_or(0, |response_at| {
                let later =
                    |(replica, at): &&(Endpoint, u64)| *replica == entry.endpoint && *at >= response_at;
                self.truth.chosen.iter().filter(later).count() as u32
            });
            let failed = self.truth.failed.get(&entry.endpoint).map_or(0, |failed| i64::from(*failed));
            let sent = i64::from(reported.sent) - failed..=i64::from(reported.sent + meanwhile);
            let added = i64::from(entry.rif) - i64::from(reported.rif);
            assert!(sent.contains(&added), "report {number} of {}: {added}, not {sent:?}", entry.endpoint);
            self.truth.compensated += u32::from(reported.sent > 0);
        }
    }

    /// Checks the pool after a write: no report may be recorded twice.
    fn pool_written(&mut self) {
        let mut entries = BTreeMap::new();
        for (number, entry) in self.entries(self.now) {
            let reported = &mut self.truth.reports[number];
            let stays = self.truth.entries.get(&entry.endpoint) == Some(&number);
            assert!(stays || !reported.recorded, "report {number} is recorded again");
            reported.recorded = true;
            entries.insert(entry.endpoint, number);
        }
        self.truth.entries = entries;
    }
}

impl SharedData for Seat<'_> {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        let mut state = self.step();
        state.read.insert((self.id, key.into()));
        state.values.get(key).map_or((None, None), |(bytes, number)| (Some(bytes.clone()), Some(*number)))
    }

    fn set(&self, key: &str, bytes: &[u8], number: Option<u32>) -> bool {
        let mut state = self.step();
        if number.is_some_and(|number| state.values.get(key).is_some_and(|(_, now)| *now != number)) {
            let read = state.read.contains(&(self.id, key.into()));
            // A worker that has not read the key guessed the number. A wrong guess costs a read but is not a conflict.
            state.truth.refused += u32::from(read);
            return false;
        }
        let known = state.values.contains_key(key);
        if known && key == "race/ejections" {
            let before: EjectionTable = state.blob("ejections");
            let after = EjectionTable::decode(bytes).unwrap();
            let kept: Vec<Endpoint> = after.reasons().map(|(replica, _)| replica).collect();
            let gone = before.reasons().filter(|(replica, why)| why.is_some() && !kept.contains(replica));
            state.truth.vanished += gone.count();
        }
        state.writes += 1;
        let number = state.writes;
        state.values.insert(key.into(), (bytes.into(), number));
        if known && key == "race/pool" {
            state.truth.written[self.id] += 1;
            state.pool_written();
        }
        true
    }
}

/// Gives the turn away for good, even if the worker panics.
struct Leave<'a>(Seat<'a>);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.running.retain(|id| *id != self.0.id);
        state.pass(self.0.race);
    }
}

/// A request in flight, and whether its response has begun.
struct Open(Request, bool);

struct Worker<'a> {
    seat: Seat<'a>,
    balancer: Balancer<Cas<Seat<'a>>, Counts>,
    rng: SmallRng,
    open: Vec<Open>,
    probes: Vec<Option<Target>>,
    /// Reports that wait in the balancer.
    waiting: Vec<(usize, Endpoint)>,
    begun: usize,
    ended: usize,
    replies: usize,
    /// Whether one replica has left.
    left: bool,
    /// Whether the bad replicas have recovered.
    healed: bool,
}

impl<'a> Worker<'a> {
    fn new(seat: Seat<'a>, config: ClusterConfig, seed: u64) -> Self {
        let store = Cas { data: seat, prefix: "race".into() };
        Self {
            seat,
            balancer: balancer(config, &store),
            rng: SmallRng::seed_from_u64(seed),
            open: Vec::new(),
            probes: Vec::new(),
            waiting: Vec::new(),
            begun: 0,
            ended: 0,
            replies: 0,
            left: false,
            healed: false,
        }
    }

    /// Runs `events` random events one after another, then ends all requests, then only ticks.
    fn run(&mut self, events: u32) {
        for event in 0..events {
            (self.left, self.healed) = (event > events / 4, event > events / 2);
            match self.rng.random_range(0..20) {
                0..6 => self.begin(),
                6..12 => self.response(),
                12..17 => self.end(),
                17..19 => self.reply(),
                _ => self.tick(),
            }
        }
        while !self.open.is_empty() {
            self.end();
        }
        // This worker has no more requests. While no worker has any, probes are due at intervals.
        (0..events / 4).for_each(|_| self.tick());
        for _ in 0..100 {
            self.tick();
        }
        assert!(self.waiting.is_empty(), "reports never arrive");
    }

    /// Begins an event. Returns the time, and how many pool writes and counts the worker has so far.
    fn event(&mut self) -> (u64, u32, usize) {
        let mut state = self.seat.step();
        state.compare();
        state.read.retain(|(id, _)| *id != self.seat.id);
        // With longer steps, probes may go unanswered for a second, and probing would pause.
        state.now += self.rng.random_range(5..12);
        (state.now, state.truth.written[self.seat.id], self.balancer.counters().0.borrow().len())
    }

    fn counted(&self, since: usize, what: impl Fn(&Count) -> bool) -> bool {
        self.balancer.counters().0.borrow()[since..].iter().any(what)
    }

    /// Whether the chosen replica is `bad` and still misbehaves.
    fn is(&self, bad: u16, chosen: Option<Endpoint>) -> bool {
        !self.healed && chosen == Some(replica(bad))
    }

    fn fails(&self, chosen: Option<Endpoint>) -> bool {
        self.is(FAILS, chosen) || self.is(LEFT, chosen)
    }

    fn good(&mut self) -> Endpoint {
        replica(self.rng.random_range(GOOD))
    }

    fn make_report(&mut self, endpoint: Endpoint, response_at: Option<u64>) -> (usize, LoadReport) {
        let rif = self.rng.random_range(0..30);
        let reports = &mut self.seat.state().truth.reports;
        reports.push(Reported { rif, response_at, ..Reported::default() });
        let reported = LoadReport::parse(format!("{rif};{};{endpoint}", reports.len())).unwrap();
        (reports.len() - 1, reported)
    }

    /// Records that the balancer has accepted a report.
    fn believed(&mut self, since: usize, number: usize, endpoint: Endpoint) {
        if !self.counted(since, |count| matches!(count, Count::Dropped(1..))) {
            self.waiting.push((number, endpoint));
        }
    }

    /// Checks after an event's transaction that every waiting report is recorded. The report of `chosen` may be used
    /// up. Returns whether the worker wrote the pool.
    fn transacted(&mut self, before: u32, chosen: Option<Endpoint>) -> bool {
        let state = self.seat.state();
        if state.truth.written[self.seat.id] == before {
            return false;
        }
        let journal = &self.balancer.journal;
        for (index, (number, endpoint)) in self.waiting.iter().enumerate() {
            let last = self.waiting[index + 1..].iter().all(|(_, later)| later != endpoint);
            let admitted = !journal.watched || !journal.table.is_ejected(*endpoint);
            let good = GOOD.contains(&super::number(*endpoint)) && chosen != Some(*endpoint);
            if last && admitted && good {
                assert!(state.truth.reports[*number].recorded, "report {number} of {endpoint} is lost");
            }
        }
        self.waiting.clear();
        true
    }

    fn begin(&mut self) {
        let mut answers = Vec::new();
        if self.rng.random_bool(0.1) {
            let (targets, _) = self.balancer.ask(None, &mut self.rng);
            answers.extend(targets.into_iter().filter_map(|target| self.answer(Some(target))));
        }
        let (now, written, _) = self.event();
        let request = self.balancer.begin(ms(now), &answers, true, &mut self.rng);
        let pick = request.pick;
        self.begun += 1;
        let written = self.transacted(written, pick.replica);
        {
            let mut state = self.seat.state();
            let entries = state.entries(now);
            let entry = entries.iter().find(|(_, entry)| Some(entry.endpoint) == pick.replica);
            if let (true, Some((number, _))) = (written, entry) {
                state.truth.reports[*number].sent += 1;
            }
            state.truth.chosen.extend(pick.replica.map(|replica| (replica, now)));
            state.truth.picks += u32::from(written);
            state.truth.addressed += pick.probes.addressed;
            let Truth { addressed, picks, .. } = state.truth;
            assert_eq!(addressed, (f64::from(picks) * R_PROBE) as u32, "probes for {picks} requests");
        }
        self.probes.extend(self.balancer.targets(pick.probes, ms(now), &mut self.rng));
        self.open.push(Open(request, false));
    }

    fn response(&mut self) {
        let (now, _, since) = self.event();
        let Some(index) = self.open.iter().position(|Open(_, begun)| !begun) else { return };
        let chosen = self.open[index].0.pick.replica;
        if self.is(HANGS, chosen) {
            return;
        }
        let served = chosen.filter(|_| !self.is(REFUSED, chosen)).unwrap_or_else(|| self.good());
        let failed = self.fails(chosen);
        if failed {
            *self.seat.state().truth.failed.entry(served).or_default() += 1;
        }
        let (number, reported) = self.make_report(served, Some(now));
        let proxy = Proxy(now, Some(served), Class::Answer, 1);
        let Open(request, begun) = &mut self.open[index];
        self.balancer.response(ms(now), request, failed, Some(Ok(reported)), &proxy);
        *begun = true;
        if !failed && self.counted(since, |count| *count == Count::Report(ReportEnd::Used)) {
            self.believed(since, number, served);
        }
    }

    /// Ends a request, perhaps before its response.
    fn end(&mut self) {
        let (now, ..) = self.event();
        if self.open.is_empty() {
            return;
        }
        let Open(request, begun) = self.open.swap_remove(self.rng.random_range(0..self.open.len()));
        let chosen = request.pick.replica;
        let fails = self.fails(chosen);
        let class = if fails { Class::UpstreamFailure } else { Class::ClientAbort };
        self.balancer.ended(request, begun, fails, &Proxy(now, chosen, class, 1));
        self.ended += 1;
    }

    /// Answers a random open probe, if there is one.
    fn reply(&mut self) {
        if self.probes.is_empty() {
            return;
        }
        let asked = self.probes.swap_remove(self.rng.random_range(0..self.probes.len()));
        self.answer(asked);
    }

    fn answer(&mut self, asked: Option<Target>) -> Option<Answer> {
        let named = asked.map(|target| target.replica);
        let leaves = self.left && self.is(LEFT, named);
        if leaves {
            // The replica is forgotten in a transaction of its own: the table would not show a replica that one
            // transaction both ejects and forgets.
            self.tick();
        }
        let (now, _, since) = self.event();
        self.replies += 1;
        if self.is(HANGS, named) {
            return self.balancer.replied(ms(now), asked, false, Err(ProbeEnd::Timeout));
        }
        let named = named.filter(|_| !leaves).unwrap_or_else(|| self.good());
        let (number, report) = self.make_report(named, None);
        let answer =
            self.balancer.replied(ms(now), asked, false, Ok(Reply { report: Ok(report), host: None }));
        if answer.is_some() {
            self.believed(since, number, named);
        }
        if leaves {
            self.tick();
        }
        answer
    }

    fn tick(&mut self) {
        let (now, written, _) = self.event();
        let tick = self.balancer.tick(ms(now), &mut self.rng);
        self.transacted(written, None);
        if !tick.probes.is_empty() {
            let before = self.seat.state().truth.idle.replace(now);
            let interval = u64::from(self.balancer.config().probe.idle_interval_ms);
            assert!(before.is_none_or(|before| now.abs_diff(before) >= interval), "{before:?}, {now}");
        }
    }

    /// Checks that the counts match the events.
    fn balance(&self) {
        let counts = self.balancer.counters().0.borrow();
        let count = |what: fn(&Count) -> bool| counts.iter().filter(|count| what(count)).count();
        assert_eq!(count(|count| matches!(count, Count::Pick(_))), self.begun);
        assert_eq!(count(|count| matches!(count, Count::Outcome(_))), self.ended);
        assert_eq!(count(|count| matches!(count, Count::Probe(_))), self.replies);
        assert_eq!((self.begun, self.open.len()), (self.ended, 0));
        assert!(self.balancer.flights.is_empty());
    }
}

/// The outcome of a race.
#[derive(Debug, Default, Eq, PartialEq)]
struct RaceEnd {
    vanished: usize,
    conflicts: u32,
    given_up: u32,
    opened: usize,
    closed: usize,
    compensated: u32,
}

fn race(workers: usize, events: u32, switching: f64, rule: Rule) -> RaceEnd {
    let (seed, mut config) = (2, config(Profile::Default, FLEET));
    config.choice.rule = rule;
    // Reports that wait for a long time must not be too old when they arrive.
    config.pool.max_age_ms = 3_600_000;
    config.pool.budget = Budget::Fixed { r_probe: R_PROBE };
    let state = State {
        rng: SmallRng::seed_from_u64(seed),
        switching: 0.0,
        turn: 0,
        running: (0..workers).collect(),
        now: 0,
        values: BTreeMap::new(),
        writes: 0,
        read: BTreeSet::new(),
        truth: Truth { written: vec![0; workers], ..Truth::default() },
    };
    let turns = (0..workers).map(|_| Condvar::new()).collect();
    let race = Race { state: Mutex::new(state), turns };
    // Two workers that create the store at once may each create a new one.
    drop(Worker::new(Seat { race: &race, id: 0 }, config.clone(), seed));
    race.state.lock().unwrap().switching = switching;
    let counts: Vec<Vec<Count>> = std::thread::scope(|scope| {
        let run = |id| {
            let (config, seat) = (config.clone(), Seat { race: &race, id });
            scope.spawn(move || {
                let _leave = Leave(seat);
                drop(seat.wait(seat.state()));
                let mut worker = Worker::new(seat, config, seed + 1000 * id as u64);
                worker.run(events);
                worker.balance();
                worker.balancer.counters().0.take()
            })
        };
        let threads: Vec<_> = (0..workers).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut state = race.state.into_inner().unwrap();
    state.compare();
    let Truth { compensated, vanished, .. } = state.truth;
    let mut end = RaceEnd { compensated, vanished, ..RaceEnd::default() };
    for count in counts.iter().flatten() {
        match count {
            Count::Shared { conflicts, given_up, replaced } => {
                assert_eq!(*replaced, 0);
                (end.conflicts, end.given_up) =
                    (end.conflicts + conflicts, end.given_up + u32::from(*given_up));
            }
            Count::Ejection(Change::Ejected(_)) => end.opened += 1,
            Count::Ejection(Change::Returned(_)) => end.closed += 1,
            _ => {}
        }
    }
    assert_eq!(end.conflicts + end.given_up, state.truth.refused);
    let out = state.blob::<EjectionTable>("ejections").reasons().filter(|(_, why)| why.is_some()).count();
    assert_eq!(end.opened, end.closed + vanished + out, "each has returned, lost its record or stayed out");
    end
}

#[test]
fn racing_workers_lose_no_update_and_apply_none_twice() {
    let (mut vanished, mut closed) = (0, 0);
    for (workers, events, switching, rule) in [
        (1, 1600, 1.0, Rule::Predicted),
        (2, 1200, 0.1, Rule::Hcl),
        (4, 1000, 0.5, Rule::C3 { clients: 4 }),
        (16, 300, 1.0, Rule::Predicted),
    ] {
        let end = race(workers, events, switching, rule);
        assert!(end.compensated > 1000, "{workers}: {end:?}");
        assert_eq!(end.conflicts > 0, workers > 1, "{workers}: {end:?}");
        assert!(end.given_up > 0 || workers < 16, "{workers}: {end:?}");
        (vanished, closed) = (vanished + end.vanished, closed + end.closed);
    }
    assert!(vanished > 0 && closed > 0, "{vanished}, {closed}");
}

#[test]
fn the_same_seed_repeats_a_race() {
    let end = || race(3, 100, 0.5, Rule::Predicted);
    assert_eq!(end(), end());
}
