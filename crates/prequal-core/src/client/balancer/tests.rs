use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use proptest::collection::vec;
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::seq::IndexedMutRandom;
use rand::{Rng, SeedableRng};

use super::journal::Update;
use super::*;
use crate::client::count::ProbeEnd;
use crate::client::ejection::{Change, EjectionSettings, Event, Reason};
use crate::client::members::{Placement, Target};
use crate::client::pool::{PoolState, ProbesDue};
use crate::client::reply::Reply;
use crate::client::settings::{ChoiceSettings, ClusterConfig, Rule, Shim};
use crate::client::store::{Cas, Memory, SharedData, Store};
use crate::client::sync_mode::{Answer, Ending};
use crate::config::Profile;
use crate::shared::endpoint::Endpoint;
use crate::shared::time::Micros;
use crate::wire::hint::HintSource;
use crate::wire::load::Load;
use crate::wire::report::{LoadReport, ReportError};

mod agentless;
mod race;

fn replica(n: u16) -> Endpoint {
    format!("10.0.0.1:{}", 1000 + n).parse().unwrap()
}

fn report(n: u16, rif: u32, latency_ms: u32) -> LoadReport {
    LoadReport::parse(format!("{rif};{};{}", latency_ms * 1000, replica(n))).unwrap()
}

fn target(n: u16) -> Target {
    Target { replica: replica(n), probe: replica(n) }
}

fn ms(ms: u64) -> Micros {
    Micros::from_millis(1_000_000 + ms)
}

fn rng() -> SmallRng {
    SmallRng::seed_from_u64(1)
}

/// A cluster with `n` replicas that are known from the start.
fn config(profile: Profile, n: u16) -> ClusterConfig {
    ClusterConfig {
        cluster: "service".into(),
        probe_cluster: "probes".into(),
        pool: profile.pool_settings(),
        probe: profile.probe_settings(),
        choice: ChoiceSettings::default(),
        endpoints: (0..n).map(replica).collect(),
    }
}

fn balancer<S: Store>(config: ClusterConfig, store: &S) -> Balancer<S, Counts> {
    Balancer::new(config, Shim::StatefulSession, store, Counts::default(), ms(0))
}

#[derive(Clone, Default)]
struct Counts(Rc<RefCell<Vec<Count>>>);

impl Counters for Counts {
    fn count(&self, what: Count) {
        self.0.borrow_mut().push(what);
    }
}

impl Counts {
    fn of(&self, what: Count) -> usize {
        self.0.borrow().iter().filter(|counted| **counted == what).count()
    }
}

/// Bytes by key, with the number of their last write.
type Values = HashMap<String, (Vec<u8>, u32)>;

/// Shared data of one host.
#[derive(Clone, Default)]
struct Host {
    values: Rc<RefCell<Values>>,
    writes: Rc<Cell<u32>>,
    /// Number of reads of the ejection table.
    looks: Rc<Cell<u32>>,
    /// Suffix of the keys to which writes are refused, and the number of writes still to be refused.
    refused: Rc<RefCell<(&'static str, u32)>>,
}

impl SharedData for Host {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        self.looks.set(self.looks.get() + u32::from(key.ends_with("ejections")));
        self.values.borrow().get(key).map_or((None, None), |(bytes, n)| (Some(bytes.clone()), Some(*n)))
    }

    fn set(&self, key: &str, bytes: &[u8], number: Option<u32>) -> bool {
        let (refused, times) = &mut *self.refused.borrow_mut();
        if *times > 0 && key.ends_with(*refused) {
            *times -= 1;
            return false;
        }
        let mut values = self.values.borrow_mut();
        if number.is_some_and(|n| n != 0 && values.get(key).is_some_and(|(_, now)| *now != n)) {
            return false;
        }
        self.writes.set(self.writes.get() + 1);
        values.insert(key.into(), (bytes.into(), self.writes.get()));
        true
    }
}

impl Host {
    fn store(&self) -> Cas<Self> {
        Cas { data: self.clone(), prefix: "test".into() }
    }
}

/// A proxy that gives these answers: time, replica that served, class and attempts.
struct Proxy(u64, Option<Endpoint>, Class, u64);

impl Witness for Proxy {
    fn now(&self) -> Micros {
        ms(self.0)
    }

    fn is_ours(&self) -> bool {
        true
    }

    fn served_by(&self) -> Option<Endpoint> {
        self.1
    }

    fn class(&self) -> Class {
        self.2
    }

    fn attempts(&self) -> u64 {
        self.3
    }
}

/// A proxy that must not be asked anything.
struct Silence;

impl Witness for Silence {
    fn now(&self) -> Micros {
        panic!("asked for the time")
    }

    fn is_ours(&self) -> bool {
        panic!("asked where it went")
    }

    fn served_by(&self) -> Option<Endpoint> {
        panic!("asked who served")
    }

    fn class(&self) -> Class {
        panic!("asked how it ended")
    }

    fn attempts(&self) -> u64 {
        panic!("asked how often it was sent")
    }
}

/// Answers one probe for each of `n` replicas.
fn probe_all<S: Store>(balancer: &mut Balancer<S, Counts>, n: u16, at: u64) {
    for n in 0..n {
        let reply = Reply { report: Ok(report(n, 0, 10 + u32::from(n))), host: Some(replica(n)) };
        balancer.replied(ms(at), Some(target(n)), false, Ok(reply));
    }
}

fn number(endpoint: Endpoint) -> u16 {
    endpoint.port() - 1000
}

/// Sends a request, which its replica answers or fails at once. Returns the number of the replica.
fn request<S: Store>(balancer: &mut Balancer<S, Counts>, at: u64, failed: bool) -> Option<u16> {
    let mut rng = SmallRng::seed_from_u64(at);
    let mut request = balancer.begin(ms(at), &[], true, &mut rng);
    let chosen = request.pick.replica.map(number);
    if let Some(n) = chosen {
        let told = Some(Ok(report(n, 1, 10)));
        balancer.response(ms(at + 5), &mut request, failed, told, &Silence);
        balancer.ended(request, true, failed, &Silence);
    }
    chosen
}

/// A response is known to other workers at once, unless its worker picks so often that its next pick comes soon, or the
/// workers' writes conflict.
#[test]
fn other_workers_learn_of_a_response_before_the_next_pick() {
    fn rif(worker: &mut Balancer<impl Store, Counts>, at: u64) -> u32 {
        let sum = |pool: &PoolState| pool.candidates(Micros(at)).map(|candidate| candidate.rif).sum();
        worker.journal.pool.update(|pool| (sum(pool), false)).result
    }
    // The time between the worker's picks and the time until the response, microseconds; the number of times that the
    // write of one of the last 16 transactions was repeated.
    for (gap, took, conflicts, known) in [
        (5000, 200, 0, true),
        (200, 200, 0, false),
        (200, 1500, 0, true),
        (1000, 0, 0, true),
        (5000, 200, 1, true),
        (5000, 200, 3, false),
    ] {
        let host = Host::default();
        let mut rng = rng();
        let [mut worker, mut other] = [(); 2].map(|()| balancer(config(Profile::Default, 4), &host.store()));
        probe_all(&mut worker, 4, 0);
        worker.tick(ms(1), &mut rng);
        *host.refused.borrow_mut() = ("pool", conflicts);
        let mut at = ms(2).0;
        let mut requests: Vec<_> = (0..4)
            .map(|_| {
                at += gap;
                worker.begin(Micros(at), &[], true, &mut rng)
            })
            .collect();
        at += took;
        let request = &mut requests[0];
        let served = number(request.pick.replica.unwrap());
        assert_eq!(rif(&mut other, at), 4);
        worker.response(Micros(at), request, false, Some(Ok(report(served, 0, 10))), &Silence);
        worker.settle(Micros(at), &mut rng);
        let case = format!("gap {gap} µs, took {took} µs, {conflicts} conflicts");
        assert_eq!(rif(&mut other, at), if known { 3 } else { 4 }, "{case}");
        worker.tick(Micros(at), &mut rng);
        assert_eq!(rif(&mut other, at), 3, "the next transaction applies it");
    }
}

/// A proxy that knows its hosts sets the fleet. Hosts that left are forgotten at once, however many there are. Other
/// workers use the new fleet from their next tick on.
#[test]
fn a_proxy_can_provide_the_membership() {
    let host = Host::default();
    let (mut main, mut other) = (
        balancer(config(Profile::Default, 0), &host.store()),
        balancer(config(Profile::Default, 0), &host.store()),
    );
    let mut rng = rng();
    let mut fleet: Vec<_> = (0..200).rev().map(|n| (replica(n), 16)).collect();
    main.set_fleet(ms(0), &mut fleet, &mut rng);
    for n in 0..100 {
        let asked = Some(target(n));
        let reply = Reply { report: Ok(report(n, 0, 5)), host: None };
        assert!(main.replied(ms(1), asked, false, Ok(reply)).is_some(), "replica {n} is a member");
        main.apply(ms(1), &mut rng);
    }
    other.tick(ms(2), &mut rng);
    assert_eq!(other.view(ms(2)).members, 200);
    let picked = other.begin(ms(3), &[], true, &mut rng).pick.replica.unwrap();
    assert!(fleet.iter().any(|(replica, _)| *replica == picked));

    let mut rest = vec![(replica(198), 16), (replica(199), 16), (replica(199), 16)];
    main.set_fleet(ms(10), &mut rest, &mut rng);
    assert_eq!(rest.len(), 2, "duplicates are dropped");
    let view = main.view(ms(10));
    assert_eq!((view.members, view.occupancy), (2, 0), "the entries of replicas that left are dropped");
    other.tick(ms(11), &mut rng);
    let pick = other.begin(ms(12), &[], true, &mut rng).pick;
    assert_eq!(pick.replica, None, "nothing is known yet of those that stayed: {pick:?}");
    assert_eq!(main.counters().of(Count::Dropped(1)), 0);
}

#[test]
fn a_successful_request_costs_one_transaction() {
    let host = Host::default();
    let mut balancer = balancer(config(Profile::Default, 3), &host.store());
    probe_all(&mut balancer, 3, 0);
    let before = host.writes.get();
    for at in 1..=10 {
        assert!(request(&mut balancer, at, false).is_some());
    }
    assert_eq!(host.writes.get(), before + 10);
    let counts = balancer.counters();
    assert_eq!(counts.of(Count::Report(ReportEnd::Used)), 10);
    assert_eq!(counts.of(Count::Outcome(Class::Answer)), 10);
    assert_eq!(counts.of(Count::Shared { conflicts: 1, given_up: false, replaced: 0 }), 0);
}

#[test]
fn a_failure_whose_write_was_abandoned_counts_once() {
    let host = Host::default();
    let mut balancer = balancer(config(Profile::Default, 4), &host.store());
    probe_all(&mut balancer, 4, 0);
    // The failed replica is watched from now on, so every transaction looks at the table.
    assert!(request(&mut balancer, 1, true).is_some());
    *host.refused.borrow_mut() = ("pool", 100);
    assert!(request(&mut balancer, 2, false).is_some(), "steered, though the write is lost");
    let given_up = |count: &Count| matches!(count, Count::Shared { given_up: true, .. });
    assert_eq!(balancer.counters().0.borrow().iter().filter(|count| given_up(count)).count(), 1);
    *host.refused.borrow_mut() = ("", 0);
    let ejected = balancer.tick(ms(3), &mut rng()).ejected;
    assert_eq!(ejected, 0, "the failure counts once");
    assert!(!balancer.journal.waits());
}

#[test]
fn invalid_replies_count_as_samples_of_the_policy() {
    let mut config = config(Profile::Default, 4);
    config.pool.verified_probes = true;
    let mut balancer = balancer(config, &Host::default().store());
    for (at, n) in (0..100).zip((0..4).cycle()) {
        let report = if n < 2 { Ok(report(n, 0, 10)) } else { Err(ProbeEnd::BadReport(ReportError::Rif)) };
        balancer.replied(ms(at), None, false, Ok(Reply { report, host: Some(replica(n)) }));
    }
    let members = balancer.membership.members();
    let weights = [0, 1, 2, 3].map(|n| members.placement(replica(n)).weight);
    assert_eq!(weights, [Placement::even(0).weight; 4]);
}

#[test]
fn no_probes_are_sent_if_the_write_is_abandoned() {
    let host = Host::default();
    let mut balancer = balancer(config(Profile::Default, 16), &host.store());
    balancer.tick(ms(0), &mut rng());
    *host.refused.borrow_mut() = ("pool", u32::MAX);
    for at in 1..=50 {
        let probes = balancer.begin(ms(at), &[], true, &mut rng()).pick.probes;
        assert!(probes.is_empty(), "the next request sends them again: {probes:?}");
        assert!(balancer.tick(ms(10_000 + at), &mut rng()).probes.is_empty(), "another worker sends them");
    }
    *host.refused.borrow_mut() = ("", 0);
    assert!(!balancer.tick(ms(20_000), &mut rng()).probes.is_empty());
    // Without answers, the probes would pause.
    probe_all(&mut balancer, 16, 20_001);
    assert!(!balancer.begin(ms(20_500), &[], true, &mut rng()).pick.probes.is_empty());
}

#[test]
fn an_ejection_that_was_not_written_is_not_counted() {
    let host = Host::default();
    let mut balancer = balancer(config(Profile::Default, 4), &host.store());
    balancer.tick(ms(0), &mut rng());
    *host.refused.borrow_mut() = ("ejections", 8);
    let ejected = Count::Ejection(Change::Ejected(Reason::Failing));
    for (at, told) in [(1, 0), (2, 1)] {
        let failed = Event::Failed { requests: 0.0, well: 3, trial: false };
        (0..2).for_each(|_| balancer.push(Update::Health(ms(at), replica(2), failed)));
        balancer.tick(ms(at), &mut rng());
        assert_eq!(balancer.counters().of(ejected), told);
    }
    assert_eq!(balancer.counters().of(Count::Shared { conflicts: 7, given_up: true, replaced: 0 }), 1);
}

#[test]
fn a_trial_whose_write_is_abandoned_does_not_start() {
    let host = Host::default();
    let mut balancer = balancer(config(Profile::Default, 4), &host.store());
    balancer.tick(ms(0), &mut rng());
    let failed =
        |at| Update::Health(ms(at), replica(2), Event::Failed { requests: 0.0, well: 3, trial: false });
    (1..=3).for_each(|at| balancer.push(failed(at)));
    assert_eq!(balancer.tick(ms(4), &mut rng()).ejected, 1);
    probe_all(&mut balancer, 4, 1100);
    balancer.tick(ms(1200), &mut rng());
    let mut rng = rng();
    let mut trials = |from: u64| {
        let mut tried = |at: &u64| {
            // This gives the transaction something to write even without a trial.
            balancer.push(failed(*at));
            balancer.begin(ms(*at), &[], true, &mut rng).pick.trial
        };
        (from..from + 50).filter(&mut tried).count()
    };
    *host.refused.borrow_mut() = ("ejections", u32::MAX);
    assert_eq!(trials(1300), 0, "otherwise, other workers and the next request would start the same trial");
    *host.refused.borrow_mut() = ("", 0);
    assert_eq!(trials(1400), 1);
}

/// No probe is answered here, so nothing but a request would bring a replica back.
#[test]
fn replicas_that_fail_no_more_than_the_others_keep_their_turns() {
    let mut balancer = balancer(config(Profile::Default, 16), &Memory);
    for n in 0..16 {
        let reply = Reply { report: Ok(report(n, 0, 10)), host: Some(replica(n)) };
        balancer.replied(ms(0), Some(target(n)), false, Ok(reply));
    }
    balancer.tick(ms(0), &mut rng());
    let mut rng = rng();
    let (mut served, mut failures) = ([0; 16], [0; 16]);
    for at in 1..=192 {
        let mut request = balancer.begin(ms(at), &[], true, &mut rng);
        let chosen = request.pick.replica.unwrap();
        let n = number(chosen);
        // The replicas are chosen in turn, so each of them fails at most once.
        let failed = at % 17 == 0;
        served[usize::from(n)] += 1;
        failures[usize::from(n)] += u32::from(failed);
        let proxy = Proxy(at, Some(chosen), Class::Answer, 1);
        balancer.response(ms(at), &mut request, failed, Some(Ok(report(n, 0, 10))), &proxy);
        balancer.ended(request, true, failed, &proxy);
    }
    assert_eq!((failures.iter().sum::<u32>(), failures.iter().max()), (11, Some(&1)));
    assert_eq!(served, [12; 16]);
}

/// At first all replicas fail, so none stands out. Then two of seven recover.
#[test]
fn replicas_that_fail_most_of_their_requests_leave_the_pool_even_if_none_is_ejected() {
    let mut balancer = balancer(config(Profile::Default, 7), &Memory);
    let (mut rng, mut good) = (rng(), 0);
    for at in 1..=200 {
        if at % 20 == 1 {
            // Probes bring all replicas back. Each of the five bad ones then fails one request.
            probe_all(&mut balancer, 7, at);
        }
        let mut request = balancer.begin(ms(at), &[], true, &mut rng);
        let Some(chosen) = request.pick.replica else { continue };
        let n = number(chosen);
        let failed = n < 5 || at <= 60;
        assert!(!failed || at <= 60 || at % 20 < 10, "replica {n} at {at}");
        good += u32::from(!failed);
        let proxy = Proxy(at, Some(chosen), Class::Answer, 1);
        balancer.response(ms(at), &mut request, failed, Some(Ok(report(n, 0, 10))), &proxy);
        balancer.ended(request, true, failed, &proxy);
    }
    assert!(good > 90, "{good} of 140 requests");
    assert_eq!(balancer.tick(ms(201), &mut rng).ejected, 0);
}

#[test]
fn a_request_that_fails_is_no_longer_in_flight() {
    for (failure_share, late) in [(0.0, false), (0.1, false), (0.1, true)] {
        let mut config = config(Profile::Default, 2);
        config.pool.ejection = EjectionSettings { failure_share, ..config.pool.ejection };
        let mut balancer = balancer(config, &Memory);
        probe_all(&mut balancer, 2, 0);
        let mut failing = balancer.begin(ms(1), &[], true, &mut rng());
        let reported = report(number(failing.pick.replica.unwrap()), 3, 10);
        balancer.response(ms(2), &mut failing, !late, Some(Ok(reported)), &Silence);
        balancer.ended(failing, true, true, &Proxy(3, None, Class::Answer, 1));
        balancer.apply(ms(4), &mut rng());
        let pool = balancer.journal.pool.update(|pool| (*pool, false)).result;
        let mut rifs: Vec<u32> = pool.candidates(ms(4)).map(|candidate| candidate.rif).collect();
        rifs.sort_unstable();
        // A report counts only if the response seemed to be good when its headers arrived.
        assert_eq!(rifs, [0, if late { 3 } else { 0 }], "{failure_share}");
    }
}

#[test]
fn probes_mostly_skip_replicas_with_fresh_reports_except_in_the_papers_profile() {
    // Half of the targets of a uniform sample are fresh.
    for (profile, expected) in [(Profile::Default, 0.02..0.05), (Profile::Paper, 0.45..0.55)] {
        let mut balancer = balancer(config(profile, 8), &Memory);
        // Half of the fleet is probed.
        probe_all(&mut balancer, 4, 0);
        balancer.tick(ms(1), &mut rng());
        let due = ProbesDue { addressed: 4, discovery: 1 };
        let (mut rng, mut fresh) = (rng(), 0);
        for _ in 0..500 {
            let targets = balancer.targets(due, ms(2), &mut rng);
            assert_eq!((targets.len(), targets.iter().flatten().count()), (5, 4));
            fresh += targets.iter().flatten().filter(|target| number(target.replica) < 4).count();
        }
        let share = fresh as f64 / (500.0 * 4.0);
        assert!(expected.contains(&share), "{profile:?}: {share}");
    }
}

/// How many of 500 probes, each `after_ms` after a pick, go to the replica that was chosen.
fn probes_of_the_chosen(after_ms: u64) -> usize {
    let mut balancer = balancer(config(Profile::Default, 5), &Memory);
    let mut rng = rng();
    let probe = |round| {
        let at = round * 600;
        // All reports are old enough for another probe.
        probe_all(&mut balancer, 5, at);
        let request = balancer.begin(ms(at + 250), &[], true, &mut rng);
        let chosen = request.pick.replica.expect("a pool");
        let due = ProbesDue { addressed: 1, discovery: 0 };
        let targets = balancer.targets(due, ms(at + 250 + after_ms), &mut rng);
        targets.iter().flatten().filter(|target| target.replica == chosen).count()
    };
    (0..500_u64).map(probe).sum()
}

#[test]
fn a_replica_is_not_probed_while_a_request_is_on_its_way_there() {
    let (with_the_request, later) = (probes_of_the_chosen(0), probes_of_the_chosen(300));
    assert_eq!(with_the_request, 0, "the reply would not count the request");
    assert!((70..130).contains(&later), "{later} of 500");
}

#[test]
fn the_ejection_table_is_read_only_after_changes() {
    let host = Host::default();
    let [mut worker, mut other] = [(); 2].map(|()| balancer(config(Profile::Default, 8), &host.store()));
    probe_all(&mut worker, 8, 0);
    worker.tick(ms(1), &mut rng());
    let eject = |worker: &mut Balancer<_, _>, at, n| {
        let unresponsive = Event::Unresponsive { trial: false, ordinary: true };
        worker.push(Update::Health(ms(at), replica(n), unresponsive));
        worker.begin(ms(at), &[], true, &mut rng());
    };
    let mut rng = rng();
    let mut chosen = |worker: &mut Balancer<_, _>, at, ejected: &[u16]| {
        let before = host.looks.get();
        for _ in 0..50 {
            let mut request = worker.begin(ms(at), &[], true, &mut rng);
            let served = request.pick.replica.map(number).expect("a pool");
            assert!(!ejected.contains(&served));
            // The report counts the request.
            let proxy = Proxy(at + 1, Some(replica(served)), Class::Answer, 1);
            worker.response(ms(at + 1), &mut request, false, Some(Ok(report(served, 1, 10))), &proxy);
            worker.ended(request, true, false, &proxy);
        }
        // Reports of an ejected replica are kept out of the pool as well.
        probe_all(worker, 8, at);
        worker.begin(ms(at), &[], true, &mut rng);
        host.looks.get() - before
    };
    // Replicas that have failed once are in the table as well, but answers do not change their records.
    let failed = Event::Failed { requests: 9.0, well: 6, trial: false };
    [0, 3, 4].iter().for_each(|n| worker.push(Update::Health(ms(2), replica(*n), failed)));
    eject(&mut worker, 2, 1);
    // The table records the first reports of an ejected replica, because they renew its placement.
    assert_eq!((chosen(&mut worker, 3, &[1]), chosen(&mut worker, 4, &[1])), (1, 0));
    assert_eq!((chosen(&mut other, 5, &[1]), chosen(&mut other, 6, &[1])), (1, 0));
    eject(&mut other, 7, 2);
    assert_eq!((chosen(&mut worker, 8, &[1, 2]), chosen(&mut worker, 9, &[1, 2])), (2, 0));
    assert!(chosen(&mut worker, 1100, &[]) > 0, "a trial is due");
}

#[test]
fn an_introduced_replica_that_is_ejected_gets_no_request() {
    let host = Host::default();
    let mut worker = balancer(config(Profile::Default, 8), &host.store());
    probe_all(&mut worker, 8, 0);
    let unresponsive = Event::Unresponsive { trial: false, ordinary: true };
    worker.push(Update::Health(ms(1), replica(9), unresponsive));
    worker.begin(ms(1), &[], true, &mut rng());
    for at in 2..100 {
        worker.push(Update::Introduce(ms(at), replica(9)));
        assert_ne!(worker.begin(ms(at), &[], true, &mut rng()).pick.replica, Some(replica(9)));
    }
}

#[test]
fn a_waiting_request_probes_no_ejected_replica() {
    let mut config = config(Profile::Default, 4);
    config.choice.sync.d = 4;
    let mut balancer = balancer(config, &Memory);
    probe_all(&mut balancer, 4, 0);
    balancer.tick(ms(1), &mut rng());
    let bad = replica(2);
    for at in [1, 2, 3] {
        balancer.push(Update::Health(ms(at), bad, Event::Failed { requests: 0.0, well: 3, trial: false }));
    }
    assert_eq!(balancer.tick(ms(4), &mut rng()).ejected, 1);
    let (asked, _) = balancer.ask(None, &mut rng());
    assert!(asked.len() == 3 && asked.iter().all(|target| target.replica != bad), "{asked:?}");
}

#[test]
fn a_request_with_a_hint_probes_its_homes_which_every_balancer_agrees_on() {
    let mut config = config(Profile::Default, 20);
    config.choice.sync.d = 3;
    let hints = HintSource { header: Some("x-session".into()), path_segment: None };
    let hint = |n: u8| hints.hint(Some(&[n]), None);
    let mut homes = [Vec::new(), Vec::new()];
    for (seed, homes) in (1..).zip(&mut homes) {
        let (mut balancer, mut rng) = (balancer(config.clone(), &Memory), SmallRng::seed_from_u64(seed));
        for n in 0..100 {
            let (asked, mut waiting) = balancer.ask(hint(n), &mut rng);
            assert!(asked.len() == 3 && asked[0] != asked[1] && !asked[..2].contains(&asked[2]), "{asked:?}");
            homes.push(asked[..2].to_vec());
            // The first home answers last.
            let mut ended = |target: Target| {
                let load = Load::at_face_value(0, None);
                let placement = Placement::even(0);
                waiting.ended(Some(Answer { replica: target.replica, load, placement, home: None }))
            };
            assert_eq!([2, 1, 0].map(|place| ended(asked[place])), [None, None, Some(Ending::Enough)]);
        }
    }
    assert_eq!(homes[0], homes[1]);
    config.choice.sync.d = 2;
    let mut two = balancer(config, &Memory);
    let others: Vec<Target> = (0..100).map(|_| two.ask(hint(0), &mut rng()).0[1]).collect();
    assert!(others.iter().any(|other| *other != homes[0][0][1]), "the second of two is drawn at random");
}

#[test]
fn after_a_diversion_or_failure_the_replica_cools_down() {
    for (class, attempts, diverted) in [(Class::Answer, 1, true), (Class::UpstreamFailure, 1, false)] {
        let mut balancer = balancer(config(Profile::Default, 3), &Memory);
        probe_all(&mut balancer, 3, 0);
        let request = balancer.begin(ms(1), &[], true, &mut rng());
        let chosen = request.pick.replica.unwrap();
        let served = if diverted { replica(9) } else { chosen };
        balancer.ended(request, false, false, &Proxy(2, Some(served), class, attempts));
        assert_eq!(balancer.counters().of(Count::Diverted), usize::from(diverted));
        assert_eq!(balancer.counters().of(Count::Outcome(class)), 1);
        probe_all(&mut balancer, 3, 3);
        for at in 4..20 {
            assert_ne!(balancer.begin(ms(at), &[], true, &mut rng()).pick.replica, Some(chosen));
        }
    }
}

#[test]
fn a_slow_upload_ejects_no_replica() {
    for (completed, ejected) in [(false, 0), (true, 1)] {
        let mut balancer = balancer(config(Profile::Default, 4), &Memory);
        probe_all(&mut balancer, 4, 0);
        for at in 1..=64 {
            let mut request = balancer.begin(ms(at), &[], true, &mut rng());
            let chosen = request.pick.replica.unwrap();
            let proxy = Proxy(at + 1, Some(chosen), Class::Answer, 1);
            balancer.response(
                ms(at + 5),
                &mut request,
                false,
                Some(Ok(report(number(chosen), 1, 10))),
                &proxy,
            );
            balancer.ended(request, true, false, &proxy);
        }
        let request = balancer.begin(ms(100), &[], false, &mut rng());
        if completed {
            balancer.completed(&request, &Proxy(110, None, Class::Answer, 1));
        }
        let seen = [500, 600, 700].map(|at| balancer.tick(ms(at), &mut rng()).ejected);
        assert_eq!(seen[2], ejected, "{seen:?}");
        balancer.ended(request, false, false, &Proxy(800, None, Class::ClientAbort, 1));
    }
}

#[test]
fn a_replica_that_serves_under_anothers_name_is_detected() {
    let mut balancer = balancer(config(Profile::Default, 3), &Memory);
    probe_all(&mut balancer, 3, 0);
    let mut lies = 0;
    for at in 1..40 {
        let mut request = balancer.begin(ms(at), &[], true, &mut rng());
        let Some(chosen) = request.pick.replica else { continue };
        let proxy = Proxy(at, Some(replica(9)), Class::Answer, 2);
        let told = report(number(chosen), 0, 1);
        balancer.response(ms(at), &mut request, false, Some(Ok(told)), &proxy);
        balancer.ended(request, true, false, &proxy);
        lies += 1;
        probe_all(&mut balancer, 3, at);
    }
    let counts = balancer.counters();
    let believed = counts.of(Count::Report(ReportEnd::Used));
    assert_eq!((believed, counts.of(Count::Report(ReportEnd::WrongEndpoint))), (15, lies - 15));
    assert_eq!(counts.of(Count::Diverted), lies - 15);
}

#[test]
fn one_worker_uses_what_another_learned() {
    let host = Host::default();
    let mut config = config(Profile::Default, 3);
    let mut first = balancer(config.clone(), &host.store());
    config.endpoints.clear();
    let mut second = balancer(config, &host.store());
    probe_all(&mut first, 3, 0);
    first.tick(ms(1), &mut rng());
    assert!(request(&mut second, 2, false).is_some());
    assert_eq!(second.tick(ms(3), &mut rng()).view.members, 3);
}

#[test]
fn a_worker_rests_while_the_cluster_is_idle() {
    let mut config = config(Profile::Default, 3);
    config.pool.verified_probes = true;
    let mut worker = balancer(config, &Memory);
    /// Ticks the worker at these times unless it rests, and answers its probes. Returns the number of ticks and the
    /// number of probes.
    fn ticks(worker: &mut Balancer<Memory, Counts>, times: std::ops::Range<u64>) -> (usize, u32) {
        let (mut awake, mut probes) = (0, 0);
        for at in times.step_by(250) {
            if worker.is_resting() {
                continue;
            }
            let due = worker.tick(ms(at), &mut rng()).probes;
            for n in 0..due.discovery as u16 {
                let reply = Reply { report: Ok(report(n, 0, 10)), host: Some(replica(n)) };
                worker.replied(ms(at + 1), None, false, Ok(reply));
            }
            (awake, probes) = (awake + 1, probes + due.discovery);
        }
        (awake, probes)
    }
    let (awake, probes) = ticks(&mut worker, 0..60_000);
    assert!(awake <= 48 && probes == 24, "until the last report is too old: {awake} ticks, {probes} probes");
    assert_eq!(ticks(&mut worker, 60_000..3_600_000), (0, 0));
    // A request that takes a minute is watched throughout.
    let request = worker.begin(ms(3_600_000), &[], true, &mut rng());
    assert_eq!(request.pick.probes.discovery, 8);
    probe_all(&mut worker, 3, 3_600_001);
    let request = [request, worker.begin(ms(3_600_002), &[], true, &mut rng())];
    assert_eq!(ticks(&mut worker, 3_600_250..3_660_250).0, 240);
    for request in request {
        worker.ended(request, true, false, &Proxy(3_660_250, Some(replica(1)), Class::Answer, 1));
    }
    let awake = ticks(&mut worker, 3_660_250..7_000_000).0;
    assert!(worker.is_resting(), "{awake}");
}

/// In a host with a single process, all threads use one balancer.
#[test]
fn threads_can_share_a_balancer_behind_a_lock() {
    for rule in [Rule::Predicted, Rule::PeakEwma] {
        let mut config = config(Profile::Default, 4);
        config.choice.rule = rule;
        let one = Balancer::new(config, Shim::StatefulSession, &Memory, (), ms(0));
        let shared = std::sync::Mutex::new(one);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let shared = &shared;
                scope.spawn(move || {
                    let mut rng = SmallRng::seed_from_u64(thread);
                    for at in 0..200 {
                        let request = shared.lock().unwrap().begin(ms(at), &[], true, &mut rng);
                        let proxy = Proxy(at + 5, Some(replica((at % 4) as u16)), Class::Answer, 1);
                        shared.lock().unwrap().ended(request, true, false, &proxy);
                    }
                });
            }
        });
        assert!(shared.into_inner().unwrap().flights.is_empty());
    }
}

#[test]
fn the_rules_without_probes_learn_from_unsteered_requests() {
    for rule in [Rule::PeakEwma, Rule::Zuul { max_in_flight: 64 }] {
        let mut config = config(Profile::Default, 0);
        config.choice.rule = rule;
        let mut balancer = balancer(config, &Memory);
        let (mut chosen, mut rng) = ([0; 3], rng());
        for at in 0..3000 {
            let request = balancer.begin(ms(at), &[], true, &mut rng);
            let n = request.pick.replica.map_or((at % 3) as u16, number);
            chosen[usize::from(n)] += usize::from(request.pick.replica.is_some());
            balancer.ended(request, true, false, &Proxy(at + 5, Some(replica(n)), Class::Answer, 1));
        }
        assert!(chosen.iter().all(|picks| *picks > 100), "{rule:?}: {chosen:?}");
    }
}

/// A request that the proxy sent to another cluster. Counts how often the balancer asked where it went.
struct Elsewhere {
    at: u64,
    asked: Cell<u32>,
}

impl Elsewhere {
    fn at(at: u64) -> Self {
        Self { at, asked: Cell::new(0) }
    }
}

impl Witness for Elsewhere {
    fn now(&self) -> Micros {
        ms(self.at)
    }

    fn is_ours(&self) -> bool {
        self.asked.set(self.asked.get() + 1);
        false
    }

    fn served_by(&self) -> Option<Endpoint> {
        panic!("asked who served")
    }

    fn class(&self) -> Class {
        panic!("asked how it ended")
    }

    fn attempts(&self) -> u64 {
        panic!("asked how often it was sent")
    }
}

#[test]
fn a_request_to_another_cluster_counts_against_no_replica() {
    for rule in [Rule::Predicted, Rule::C3 { clients: 1 }, Rule::PeakEwma, Rule::Zuul { max_in_flight: 8 }] {
        let mut config = config(Profile::Default, 2);
        config.choice.rule = rule;
        let mut balancer = balancer(config, &Memory);
        let (mut chosen, mut rng) = (0, rng());
        for at in 1..2000 {
            for n in 0..2 {
                let reply = Reply { report: Ok(report(n, 0, 5)), host: None };
                balancer.replied(ms(at), Some(target(n)), false, Ok(reply));
            }
            let request = balancer.begin(ms(at), &[], true, &mut rng);
            let picked = request.pick.replica;
            if at < 1000 && picked == Some(replica(0)) {
                balancer.ended(request, true, false, &Elsewhere::at(at + 5));
            } else {
                let served = picked.unwrap_or(replica(1));
                balancer.ended(request, true, false, &Proxy(at + 5, Some(served), Class::Answer, 1));
                chosen += u32::from(at >= 1000 && picked == Some(replica(0)));
            }
        }
        assert!(chosen > 300, "{rule:?}: {chosen}");
        assert!(balancer.flights.is_empty());
    }
}

/// Requests for another cluster that has the same replicas: the proxy carries out the choice there too, and the
/// response names the chosen replica.
#[test]
fn requests_for_another_cluster_with_the_same_replicas_are_noticed() {
    let mut balancer = balancer(config(Profile::Default, 4), &Memory);
    probe_all(&mut balancer, 4, 0);
    let (proxy, mut rng) = (Elsewhere::at(0), rng());
    for at in 1..=32 {
        let mut request = balancer.begin(ms(at), &[], true, &mut rng);
        let chosen = request.pick.replica.expect("a choice");
        let reported = Some(Ok(report(number(chosen), 0, 5)));
        balancer.response(ms(at), &mut request, false, reported, &proxy);
        assert_eq!(
            request.reported,
            request.ours.is_none(),
            "not counted once it is known to be for another cluster"
        );
        balancer.ended(request, true, false, &proxy);
    }
    assert_eq!(proxy.asked.get(), 2, "asked about one response in 16");
    assert!(balancer.flights.is_empty());
}

/// An event at one of two workers that share a store.
#[derive(Clone, Copy, Debug)]
enum Happens {
    Begin(bool),
    Upload,
    Response(bool, u16),
    End(bool, u16, u8),
    Reply(u16, u16, bool),
    Fail,
    Probe(u32),
    Tick,
    Step(i64),
    Refuse(u32),
    Damage,
    /// Values become empty, are cut in half, or get another version.
    Foreign(u8),
    /// The callbacks of a request that the worker never knew or no longer knows.
    Unknown,
}

fn happenings() -> impl Strategy<Value = Vec<(usize, Happens)>> {
    let one = prop_oneof![
        8 => any::<bool>().prop_map(Happens::Begin),
        2 => Just(Happens::Upload),
        8 => (any::<bool>(), 0..6u16).prop_map(|(failed, n)| Happens::Response(failed, n)),
        8 => (any::<bool>(), 0..6u16, 0..4u8).prop_map(|(whole, n, class)| Happens::End(whole, n, class)),
        8 => (0..6u16, 0..6u16, any::<bool>()).prop_map(|(asked, n, any)| Happens::Reply(asked, n, any)),
        1 => Just(Happens::Fail),
        2 => (0..20u32).prop_map(Happens::Probe),
        2 => Just(Happens::Tick),
        // Steps in milliseconds: ordinary ones, about an hour, and more than a stamp can hold.
        4 => prop_oneof![0..50i64, -4_000_000..4_000_000i64, -10_000_000_000..10_000_000_000i64]
            .prop_map(Happens::Step),
        1 => prop_oneof![0..20u32, Just(u32::MAX)].prop_map(Happens::Refuse),
        1 => Just(Happens::Damage),
        1 => (0..3u8).prop_map(Happens::Foreign),
        1 => Just(Happens::Unknown),
    ];
    vec((0..2usize, one), 0..300)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For any events in any order, nothing panics, every request ends once, and all counts balance.
    #[test]
    fn counts_are_correct_after_any_order_of_events(
        events in happenings(),
        profile in prop_oneof![Just(Profile::Default), Just(Profile::Paper), Just(Profile::Small)],
        rule in 0..5usize,
        verified in any::<bool>(),
    ) {
        let host = Host::default();
        let mut config = config(profile, 4);
        config.pool.verified_probes = verified;
        config.choice.rule = [
            Rule::Predicted,
            Rule::Hcl,
            Rule::C3 { clients: 2 },
            Rule::PeakEwma,
            Rule::Zuul { max_in_flight: 8 },
        ][rule];
        let mut rng = rng();
        let mut workers = [(); 2].map(|()| balancer(config.clone(), &host.store()));
        let (mut open, mut begun, mut unknown, mut replies) = ([const { Vec::new() }; 2], 0, 0, 0);
        let mut now = 10_000_000i64;
        let proxies = [Class::Answer, Class::UpstreamFailure, Class::ClientAbort, Class::Local];
        for (which, event) in events {
            let (worker, open) = (&mut workers[which], &mut open[which]);
            let at = now as u64;
            match event {
                Happens::Begin(whole) => {
                    open.push(worker.begin(ms(at), &[], whole, &mut rng));
                    begun += 1;
                }
                Happens::Upload => {
                    if let Some(request) = open.last() {
                        worker.completed(request, &Proxy(at, None, Class::Answer, 1));
                    }
                }
                Happens::Response(failed, n) => {
                    let told = rng.random_bool(0.8).then(|| Ok(report(n, 1, 5)));
                    let proxy = Proxy(at, Some(replica(n)), Class::Answer, 1);
                    if let Some(request) = open.last_mut() {
                        worker.response(ms(at), request, failed, told, &proxy);
                    }
                }
                Happens::End(whole, n, class) => {
                    let class = proxies[usize::from(class)];
                    let served = (n != 5).then(|| replica(n));
                    if !open.is_empty() {
                        let request = open.swap_remove(usize::from(n) % open.len());
                        worker.ended(request, whole, n == 3, &Proxy(at, served, class, u64::from(n)));
                    }
                }
                Happens::Reply(asked, n, anybody) => {
                    let reply = Reply { report: Ok(report(n, 2, 7)), host: Some(replica(n)) };
                    worker.replied(ms(at), (!anybody).then(|| target(asked)), false, Ok(reply));
                    replies += 1;
                }
                Happens::Fail => {
                    worker.replied(ms(at), Some(target(1)), false, Err(ProbeEnd::Timeout));
                    replies += 1;
                }
                Happens::Probe(addressed) => {
                    worker.targets(ProbesDue { addressed, discovery: 1 }, ms(at), &mut rng);
                    worker.ask(None, &mut rng);
                }
                Happens::Tick => {
                    worker.tick(ms(at), &mut rng);
                }
                Happens::Step(by) => now = (now + by).max(0),
                Happens::Refuse(times) => *host.refused.borrow_mut() = ("", times),
                Happens::Damage => {
                    for (bytes, _) in host.values.borrow_mut().values_mut() {
                        if let Some(byte) = bytes.choose_mut(&mut rng) {
                            *byte ^= 0x55;
                        }
                    }
                }
                Happens::Foreign(how) => {
                    for (bytes, _) in host.values.borrow_mut().values_mut() {
                        match how {
                            0 => bytes.clear(),
                            1 => bytes.truncate(bytes.len() / 2),
                            // The version is the last part of the tag.
                            _ => bytes.iter_mut().skip(4).take(1).for_each(|version| *version ^= 1),
                        }
                    }
                }
                Happens::Unknown => {
                    let mut request = Request::default();
                    let proxy = Proxy(at, Some(replica(1)), Class::Answer, 1);
                    worker.completed(&request, &proxy);
                    worker.response(ms(at), &mut request, true, Some(Ok(report(1, 1, 5))), &proxy);
                    worker.ended(request, true, true, &proxy);
                    unknown += 1;
                }
            }
        }
        let (mut picked, mut ended) = (0, 0);
        for (worker, open) in workers.iter_mut().zip(open) {
            for request in open {
                worker.ended(request, false, false, &Proxy(now as u64, None, Class::ClientAbort, 1));
            }
            prop_assert!(worker.flights.is_empty());
            let counts = worker.counters().0.borrow();
            picked += counts.iter().filter(|count| matches!(count, Count::Pick(_))).count();
            ended += counts.iter().filter(|count| matches!(count, Count::Outcome(_))).count();
            replies -= counts.iter().filter(|count| matches!(count, Count::Probe(_))).count() as i32;
        }
        prop_assert_eq!((picked, ended, replies), (begun, begun + unknown, 0));
    }
}
