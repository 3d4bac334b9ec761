//! Tests of each rule on an injected clock, and of conditions that must hold for any input.

use super::flights::{Flights, Landed};
use super::*;
use crate::client::pool::PoolState;
use crate::config::Profile;
use crate::server::failures::FailureShare;
use crate::shared::outcome::Outcome;
use proptest::prelude::*;
use rand::{Rng, SeedableRng, rngs::SmallRng};

const SETTINGS: EjectionSettings = EjectionSettings { failure_share: 0.1, wait_factor: 1.5 };

const UNRESPONSIVE: Event = Event::Unresponsive { trial: false, ordinary: true };

fn replica(n: u16) -> Endpoint {
    format!("10.0.0.1:{}", 1000 + n).parse().unwrap()
}

fn ms(ms: u64) -> Micros {
    Micros::from_millis(100_000 + ms)
}

fn load(rif: u32, latency_ms: u32) -> Load {
    Load::at_face_value(rif, Some(latency_ms * 1000))
}

fn good(trial: bool) -> Event {
    Event::Answered { latency_us: 50_000, in_time: Timing::InTime, trial }
}

fn bad(trial: bool) -> Event {
    Event::Failed { requests: 0.0, well: 9, trial }
}

/// The ejection table of a fleet of ten replicas, and the requests that one worker sends to the fleet.
struct Scene {
    table: EjectionTable,
    flights: Flights,
    rng: SmallRng,
}

impl Scene {
    fn new() -> Self {
        let mut table = EjectionTable::new();
        table.set_members(10, 0);
        Self { table, flights: Flights::new(), rng: SmallRng::seed_from_u64(5) }
    }

    fn tell(&mut self, at: u64, n: u16, event: Event) -> Change {
        self.table.apply(&SETTINGS, ms(at), replica(n), event)
    }

    fn heard(&mut self, at: u64, n: u16, failing: u16) -> Option<Load> {
        self.table.heard(&SETTINGS, ms(at), replica(n), failing, 0, Placement::even(0));
        self.table.admit(ms(at), replica(n), load(3, 2000))
    }

    /// Sends one request of 20 ms to a replica that fails `share` of its requests.
    fn request(&mut self, at: u64, n: u16, share: f64, trial: bool) -> Change {
        let failed = self.rng.random_bool(share);
        let flight = self.flights.sent(ms(at), replica(n), None, trial, true);
        let landed = self.flights.answered(&SETTINGS, flight, ms(at + 20), failed).unwrap();
        self.tell(at + 20, n, landed.event(failed, None))
    }

    /// Sends one request that fails, if at all, only after it was answered.
    fn late_request(&mut self, at: u64, n: u16, failed: bool) -> Change {
        let flight = self.flights.sent(ms(at), replica(n), None, false, true);
        let landed = self.flights.answered(&SETTINGS, flight, ms(at + 10), false).unwrap();
        let answered = self.tell(at + 10, n, landed.event(false, None));
        if !failed {
            return answered;
        }
        let failed = self.flights.failed_late(replica(n), ms(at + 15), false);
        self.tell(at + 15, n, failed)
    }

    /// Returns the trial that is due at `at`; repeats the random draw until a trial comes.
    fn trial(&mut self, at: u64) -> Option<Endpoint> {
        (0..100).find_map(|_| self.table.take_trial(&SETTINGS, ms(at), &mut self.rng)).map(|t| t.replica)
    }

    /// Number of requests, 20 ms apart, until the replica is ejected; at most 10 000, `None` if it never is.
    fn ejected_after(&mut self, share: f64) -> Option<usize> {
        (0..10_000).find(|i| matches!(self.request(*i as u64 * 20, 1, share, false), Change::Ejected(_)))
    }
}

#[test]
fn a_replica_that_fails_part_of_its_requests_is_ejected_within_tens_of_requests() {
    for (share, most) in [(1.0, 2), (0.5, 20), (0.3, 40)] {
        for seed in 0..20 {
            let mut scene = Scene::new();
            scene.rng = SmallRng::seed_from_u64(seed);
            // A long good history must not excuse the replica.
            for i in 0..500 {
                scene.request(i, 1, 0.0, false);
            }
            let after = scene.ejected_after(share).unwrap();
            assert!(after <= most * 3, "failing {share}, seed {seed}: after {after} requests");
        }
    }
}

#[test]
fn one_failure_in_a_thousand_does_not_eject() {
    for seed in 0..10 {
        let mut scene = Scene::new();
        scene.rng = SmallRng::seed_from_u64(seed);
        assert_eq!(scene.ejected_after(0.001), None, "seed {seed}");
    }
}

#[test]
fn failures_after_the_answer_also_count_as_a_share() {
    // Requests are 1 ms apart, so that nothing fades between two failures.
    for (every, count, expected) in
        [(1000, 20_000, false), (100, 20_000, false), (3, 100, true), (1, 2, true)]
    {
        let mut scene = Scene::new();
        let mut requests = 1..=count;
        let ejected =
            requests.any(|i| matches!(scene.late_request(i, 1, i % every == 0), Change::Ejected(_)));
        assert_eq!(ejected, expected, "one in {every}");
    }
}

#[test]
fn failures_are_forgiven_without_traffic() {
    let mut scene = Scene::new();
    assert_eq!(scene.tell(0, 1, bad(false)), Change::Noted);
    // Half a minute later the first failure no longer counts.
    assert_eq!(scene.tell(30_000, 1, bad(false)), Change::Noted);
    assert_eq!(scene.tell(30_100, 1, bad(false)), Change::Ejected(Reason::Failing));
    assert!(scene.table.expire(ms(200_000)));
    assert!(!scene.table.is_ejected(replica(1)));
}

#[test]
fn a_failing_replica_is_readmitted_after_a_streak_of_trials() {
    let mut scene = Scene::new();
    scene.tell(0, 1, bad(false));
    scene.tell(1, 1, bad(false));
    assert!(scene.table.is_ejected(replica(1)));
    assert_eq!(scene.heard(10, 1, 0), None, "its reports are not used");
    assert_eq!(scene.trial(900), None, "too soon");
    assert_eq!(scene.trial(1001), Some(replica(1)));
    assert_eq!(scene.trial(5000), None, "one at a time");
    // Answers to earlier requests prove nothing: a half-failing replica gives them too.
    assert_eq!(scene.tell(1010, 1, good(false)), Change::None);
    for i in 1..STREAK {
        let at = 1000 + u64::from(i) * 150;
        assert_eq!(scene.tell(at, 1, good(true)), Change::Noted);
        assert_eq!(scene.trial(at + 110), Some(replica(1)), "the next follows quickly");
    }
    assert_eq!(scene.tell(2000, 1, good(true)), Change::Returned(Reason::Failing));
    assert_eq!(scene.heard(2001, 1, 0).map(|l| l.latency_us), Some(Some(50_000)), "vouched for");
}

#[test]
fn back_off_doubles_up_to_eight_seconds_and_trials_never_end() {
    let mut scene = Scene::new();
    scene.tell(0, 1, bad(false));
    scene.tell(0, 1, bad(false));
    let mut at = 0;
    for wait in [1000, 2000, 4000, 8000, 8000, 8000] {
        scene.heard(at + 1, 1, 1000);
        assert_eq!(scene.trial(at + wait - 1), None);
        assert_eq!(scene.trial(at + wait), Some(replica(1)));
        at += wait;
        scene.tell(at, 1, bad(true));
    }
}

#[test]
fn a_replica_that_fails_half_its_requests_hardly_ever_passes() {
    let mut scene = Scene::new();
    let (mut requests, mut failures) = (0, 0);
    // For ten minutes: 50 requests/s while it is not ejected, trials while it is.
    for at in (0..600_000).step_by(20) {
        scene.heard(at, 1, 0);
        let ejected = scene.table.is_ejected(replica(1));
        if ejected && scene.trial(at).is_none() {
            continue;
        }
        requests += 1;
        let before = scene.table.records.first().map_or(0.0, |r| r.failed);
        scene.request(at, 1, 0.5, ejected);
        failures += usize::from(scene.table.records.first().is_some_and(|r| r.failed > before));
    }
    assert!(requests < 1500 && failures > 0, "{requests} of 30000 requests, {failures} failures");
}

#[test]
fn a_reported_failure_share_ejects_but_a_single_failure_does_not() {
    let mut scene = Scene::new();
    assert!(scene.heard(0, 1, 250).is_some());
    assert!(scene.heard(1, 1, 300).is_none());
    assert!(scene.table.is_ejected(replica(1)));
    // Trials succeed, but the replica goes on reporting failures: it gets only its trials.
    let mut at = 1001;
    for _ in 0..20 {
        scene.heard(at, 1, 300);
        assert_eq!(scene.trial(at), Some(replica(1)));
        scene.tell(at + 10, 1, good(true));
        at += 8020;
    }
    assert!(scene.table.is_ejected(replica(1)));
    scene.heard(at, 1, 50);
    assert!(!scene.table.is_ejected(replica(1)), "its reports now agree with the trials");
}

/// Simulates a fleet for half a minute. Each replica gets `rate` requests a second and fails its share of them. The
/// client judges the replicas by its own requests and by the replicas' reports. Returns the fraction of the last 20
/// seconds for which the client ejects each replica.
fn ejected_of_fleet(shares: &[f64], rate: u64, seed: u64) -> Vec<f64> {
    let replicas = shares.len() as u64;
    let mut scene = Scene::new();
    scene.rng = SmallRng::seed_from_u64(seed);
    scene.table.set_members(replicas as u32, 0);
    let settings = Profile::Default.pool_settings();
    let mut pool = PoolState::new();
    let mut own: Vec<FailureShare> = vec![FailureShare::default(); shares.len()];
    let mut ejected = vec![0.0; shares.len()];
    let (mut is_in, mut heard) = (vec![true; shares.len()], 0);
    let every_us = 1_000_000 / (rate * replicas);
    let warm = 10_000_000 / every_us;
    for i in 0..3 * warm {
        let (now, at) = (Micros(ms(0).0 + i * every_us), i * every_us / 1000);
        let mut changed = false;
        // Each replica reports three times a second.
        while heard * 333 < at * replicas {
            let (index, n) = ((heard % replicas) as usize, replica((heard % replicas) as u16));
            heard += 1;
            let (failing, even) = (own[index].per_mille(now), Placement::even(0));
            changed |=
                scene.table.heard(&SETTINGS, now, n, failing, pool.failing_beside(n), even) != Change::None;
            if let Some(load) = scene.table.admit(now, n, Load { failing, ..load(1, 20) }) {
                pool.record(&settings, now, n, load, even, &mut scene.rng);
            }
        }
        let trial = scene.table.take_trial(&SETTINGS, now, &mut scene.rng);
        let mut n = scene.rng.random_range(0..shares.len());
        while !is_in[n] {
            n = scene.rng.random_range(0..shares.len());
        }
        let n = trial.map_or(n, |trial| usize::from(trial.replica.port()) - 1000);
        let failed = scene.rng.random_bool(shares[n]);
        own[n].record(now, if failed { Outcome::Failure } else { Outcome::Success });
        let flight = scene.flights.sent(now, replica(n as u16), None, trial.is_some(), true);
        let landed = scene.flights.answered(&SETTINGS, flight, now, failed).unwrap();
        changed |= scene.tell(at, n as u16, landed.event(failed, None)) != Change::None;
        if changed {
            pool.exclude(&scene.table, now);
            is_in.fill(true);
            // Asking about each replica separately would take most of the test's time.
            let panics = scene.table.panics();
            let ejected = scene.table.reasons().filter(|(_, why)| why.is_some() && !panics);
            ejected.for_each(|(replica, _)| is_in[usize::from(replica.port()) - 1000] = false);
        }
        if i >= warm {
            ejected
                .iter_mut()
                .zip(&is_in)
                .filter(|(_, is_in)| !**is_in)
                .for_each(|(ejected, _)| *ejected += 1.0);
        }
    }
    ejected.iter().map(|ejected| ejected / (2 * warm) as f64).collect()
}

#[test]
fn a_replica_that_fails_like_the_others_is_readmitted_at_its_next_report() {
    for by_word in [false, true] {
        let mut scene = Scene::new();
        if by_word {
            scene.heard(0, 1, 600);
        } else {
            (0..3).for_each(|at| _ = scene.tell(at, 1, bad(false)));
        }
        assert!(scene.table.is_ejected(replica(1)));
        // Then all replicas turn out to fail, including those whose requests succeeded until now.
        for (at, n) in (10..82).zip((2..10).cycle()) {
            scene.tell(at, n, Event::Failed { requests: 0.0, well: 0, trial: false });
        }
        let others = if by_word { 550 } else { 0 };
        let reason = if by_word { Reason::Reported } else { Reason::Failing };
        let change = scene.table.heard(&SETTINGS, ms(600), replica(1), 600, others, Placement::even(0));
        assert_eq!(change, Change::Returned(reason));
        assert_eq!(scene.table.ejected(), 0);
    }
}

#[test]
fn a_replica_is_judged_against_the_others_in_every_size_of_fleet() {
    let mut wrong = Vec::new();
    for (size, rate) in [(2, 50), (3, 20), (5, 20), (10, 10), (10, 2), (100, 2)] {
        let mut check = |what: &str, shares: Vec<f64>, bad: usize, least: f64, most: f64| {
            let runs: Vec<Vec<f64>> = (0..2).map(|seed| ejected_of_fleet(&shares, rate, seed)).collect();
            let mean = |range: std::ops::Range<usize>| {
                let count = range.len().max(1) as f64;
                runs.iter().map(|ejected| ejected[range.clone()].iter().sum::<f64>() / count).sum::<f64>()
                    / 2.0
            };
            let (bads, goods) = (mean(0..bad), mean(bad..size));
            if (bad > 0 && bads < least) || goods > most {
                wrong.push(format!("{size} at {rate}/s, {what}: bad {bads:.3} ejected, others {goods:.3}"));
            }
        };
        let fleet = |bad: usize, share: f64, others: f64| -> Vec<f64> {
            (0..size).map(|n| if n < bad { share } else { others }).collect()
        };
        for alike in [0.05, 0.1, 0.3, 0.6, 1.0] {
            check(&format!("all fail {alike}"), fleet(0, 0.0, alike), 0, 0.0, 0.03);
        }
        check("one fails all", fleet(1, 1.0, 0.0), 1, 0.8, 0.01);
        check("one fails 0.3", fleet(1, 0.3, 0.0), 1, 0.5, 0.01);
        check("one fails 0.6, others 0.05", fleet(1, 0.6, 0.05), 1, 0.5, 0.03);
        check("half fail half", fleet(size / 2, 0.5, 0.0), size / 2, 0.6, 0.01);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn half_of_the_fleet_can_be_ejected_but_not_more() {
    let mut scene = Scene::new();
    for n in 0..5 {
        scene.tell(0, n, bad(false));
        scene.tell(0, n, bad(false));
    }
    assert_eq!(scene.table.ejected(), 5);
    scene.tell(0, 5, UNRESPONSIVE);
    assert_eq!(scene.table.ejected(), 0, "panic: all are let in");
    assert!(scene.heard(1, 5, 0).is_some());
    assert_eq!(scene.trial(60_000), None);
    // Ordinary answers readmit one of the six. This ends the panic, so the other five are ejected again.
    for _ in 0..STREAK {
        scene.tell(10, 4, good(false));
    }
    assert_eq!(scene.table.ejected(), 5);
    // A fleet of one is never ejected.
    scene.table.set_members(1, 0);
    assert_eq!(scene.table.ejected(), 0);
}

/// A worker that has seen enough answers of 100 ms for a limit of 200 ms.
fn warm() -> Scene {
    let mut scene = Scene::new();
    for i in 0..64 {
        let flight = scene.flights.sent(ms(i), replica(9), None, false, true);
        scene.flights.answered(&SETTINGS, flight, ms(i + 100), false);
    }
    scene
}

fn land(scene: &mut Scene, flight: flights::Flight, at: u64) -> Landed {
    scene.flights.answered(&SETTINGS, flight, ms(at), false).unwrap()
}

/// Returns the replica that is overdue at `at`. Looks twice, because a request counts as overdue only at the second
/// look.
fn late(flights: &mut Flights, at: Micros) -> Option<flights::Overdue> {
    flights.overdue(at).or_else(|| flights.overdue(at.plus(20_000)))
}

#[test]
fn an_unresponsive_replica_is_ejected_and_one_answer_in_time_readmits_it() {
    let mut scene = warm();
    let stuck = scene.flights.sent(ms(1000), replica(1), Some(100_000), false, true);
    assert_eq!(late(&mut scene.flights, ms(1199)), None);
    let overdue = late(&mut scene.flights, ms(1201)).unwrap();
    assert_eq!((overdue.replica, overdue.event()), (replica(1), UNRESPONSIVE));
    assert_eq!(late(&mut scene.flights, ms(1257)), None, "told once");
    assert_eq!(scene.tell(1201, 1, overdue.event()), Change::Ejected(Reason::Unresponsive));
    let landed = land(&mut scene, stuck, 3000);
    assert_eq!(landed.timing, Timing::Late);
    assert_eq!(
        scene.tell(3000, 1, landed.event(false, None)),
        Change::None,
        "a late answer is no sign of health"
    );
    scene.heard(3001, 1, 0);
    assert_eq!(scene.trial(3002), Some(replica(1)));
    let trial = scene.flights.sent(ms(3002), replica(1), None, true, true);
    let landed = land(&mut scene, trial, 3102);
    assert_eq!(scene.tell(3102, 1, landed.event(false, None)), Change::Returned(Reason::Unresponsive));
    assert_eq!(scene.heard(3103, 1, 0), Some(load(3, 100)), "its own reports still tell of the stall");
    assert_eq!(scene.heard(3103 + 15_000, 1, 0), Some(load(3, 2000)), "for a while");
}

#[test]
fn time_spent_uploading_does_not_count_as_waiting() {
    let mut scene = warm();
    let upload = scene.flights.sent(ms(1000), replica(1), Some(100_000), false, false);
    assert_eq!(late(&mut scene.flights, ms(5000)), None);
    scene.flights.completed(&upload, ms(5000));
    scene.flights.completed(&upload, ms(5100));
    assert_eq!(late(&mut scene.flights, ms(5150)), None);
    assert_eq!(late(&mut scene.flights, ms(5201)).map(|o| o.replica), Some(replica(1)), "now it does");
    let landed = land(&mut scene, upload, 5300);
    assert_eq!((landed.latency_us, landed.timing), (300_000, Timing::Narrow));
    // A request that is answered before its end is in time, and its duration does not affect the limit.
    for at in 0..300 {
        let upload = scene.flights.sent(ms(6000 + at), replica(1), Some(100_000), false, false);
        assert_eq!(land(&mut scene, upload, 9000 + at).timing, Timing::InTime);
    }
    let stuck = scene.flights.sent(ms(10_000), replica(2), Some(100_000), false, true);
    assert!(late(&mut scene.flights, ms(10_201)).is_some(), "the limit is as before");
    scene.flights.gone(stuck);
}

#[test]
fn an_overtaken_request_is_slow_not_unresponsive() {
    let mut scene = warm();
    let slow = scene.flights.sent(ms(1000), replica(1), Some(100_000), false, true);
    let quick = scene.flights.sent(ms(1010), replica(1), Some(100_000), false, true);
    land(&mut scene, quick, 1110);
    assert_eq!(late(&mut scene.flights, ms(1500)), None);
    land(&mut scene, slow, 2000);
    assert!(scene.flights.is_empty());
}

#[test]
fn a_worker_that_was_stalled_ejects_no_replica_for_it() {
    let mut scene = warm();
    let fine = scene.flights.sent(ms(1000), replica(1), Some(100_000), false, true);
    let stuck = scene.flights.sent(ms(1000), replica(2), Some(100_000), false, true);
    assert_eq!(scene.flights.overdue(ms(1100)), None);
    // Half a second later both look overdue; one answer waits in its socket.
    assert_eq!(scene.flights.overdue(ms(1600)), None);
    land(&mut scene, fine, 1601);
    assert_eq!(scene.flights.overdue(ms(1610)), None);
    assert_eq!(scene.flights.overdue(ms(1620)).map(|o| o.replica), Some(replica(2)));
    assert_eq!(scene.flights.overdue(ms(1700)), None);
    scene.flights.gone(stuck);
}

#[test]
fn a_replica_that_reports_a_higher_latency_has_a_longer_limit() {
    let mut scene = warm();
    let slow = scene.flights.sent(ms(1000), replica(1), Some(800_000), false, true);
    let unknown = scene.flights.sent(ms(1100), replica(2), None, false, true);
    assert_eq!(late(&mut scene.flights, ms(1100 + 780)), None);
    assert_eq!(late(&mut scene.flights, ms(1100 + 1000)).map(|o| o.replica), Some(replica(2)));
    assert_eq!(late(&mut scene.flights, ms(2101)), None);
    scene.flights.gone(unknown);
    let overdue = late(&mut scene.flights, ms(1000 + 8 * 200 + 250)).unwrap();
    scene.flights.gone(slow);
    // The replica had reported itself slow, so it is not vouched for: one quick answer does not prove that it is fast.
    scene.tell(3000, 1, overdue.event());
    assert_eq!(scene.tell(4000, 1, good(false)), Change::Returned(Reason::Unresponsive));
    assert_eq!(scene.heard(4001, 1, 0), Some(load(3, 2000)));
}

#[test]
fn a_trial_that_just_missed_its_limit_is_repeated_soon() {
    let mut scene = Scene::new();
    scene.tell(0, 1, UNRESPONSIVE);
    for at in [1000, 4000] {
        scene.heard(at, 1, 0);
        assert!(scene.trial(at + 1000).is_some());
        scene.tell(at + 1200, 1, Event::Unresponsive { trial: true, ordinary: true });
    }
    // The last failure postponed the next trial by four seconds. Then the answer to the failed trial came, a little
    // late.
    scene.tell(5250, 1, Event::Answered { latency_us: 200_000, in_time: Timing::Narrow, trial: true });
    scene.heard(5300, 1, 0);
    assert!(scene.trial(6250).is_some());
}

#[test]
fn a_late_answer_of_a_slow_replica_does_not_shorten_the_back_off() {
    // Returns the time at which the second trial may start.
    let next = |reported_us| {
        let mut scene = warm();
        scene.tell(1000, 1, UNRESPONSIVE);
        scene.heard(1001, 1, 0);
        assert!(scene.trial(2000).is_some());
        let trial = scene.flights.sent(ms(2000), replica(1), None, true, true);
        let overdue = late(&mut scene.flights, ms(2210)).unwrap();
        scene.tell(2210, 1, overdue.event());
        let landed = land(&mut scene, trial, 2800);
        scene.tell(2800, 1, landed.event(false, reported_us));
        scene.heard(2801, 1, 0);
        (2801..).find(|at| scene.trial(*at).is_some()).unwrap()
    };
    assert_eq!(next(None), 2210 + 2000);
    assert_eq!(next(Some(100_000)), 2210 + 2000, "most of its requests are quick: it was stuck");
    assert_eq!(next(Some(800_000)), 2210 + 8000);
}

#[test]
fn ordinary_variance_rarely_exceeds_the_limit() {
    // The workload of the paper's testbed: max(0, N(80, 80)) ms, one request after the other to each of 20 replicas.
    let mut scene = Scene::new();
    let mut trips = 0;
    for i in 0..20_000u64 {
        let normal: f64 = (0..12).map(|_| scene.rng.random::<f64>()).sum::<f64>() - 6.0;
        let work = (80.0 + 80.0 * normal).max(0.0) as u64;
        let flight = scene.flights.sent(ms(i * 400), replica((i % 20) as u16), Some(80_000), false, true);
        trips += usize::from(late(&mut scene.flights, ms(i * 400 + work)).is_some());
        land(&mut scene, flight, i * 400 + work);
    }
    assert!(trips < 20_000 / 100, "{trips}");
}

#[test]
fn a_stepping_clock_does_no_harm() {
    let mut scene = warm();
    let hour = 3_600_000;
    let flight = scene.flights.sent(ms(1000 + hour), replica(1), Some(100_000), false, true);
    // The clock steps back: the request counts as just sent, and is found once it really is late.
    assert_eq!(late(&mut scene.flights, ms(1000)), None);
    assert!(late(&mut scene.flights, ms(1250)).is_some());
    scene.flights.gone(flight);
    let flight = scene.flights.sent(ms(1000), replica(2), Some(100_000), false, true);
    assert!(late(&mut scene.flights, ms(1000 + hour)).is_some(), "a step forward: it looks an hour old");
    scene.tell(1000 + hour, 2, UNRESPONSIVE);
    scene.flights.gone(flight);
    scene.heard(1001 + hour, 2, 0);
    // The clock steps back again: the trial is due, in whichever direction the clock stepped.
    assert!(scene.trial(1000).is_some());
    scene.tell(1100, 2, good(true));
    assert!(!scene.table.is_ejected(replica(2)));
}

#[test]
fn half_of_a_thousand_replicas_can_be_ejected_while_the_rest_are_watched() {
    let mut table = EjectionTable::new();
    table.set_members(1000, 0);
    for n in 0..500 {
        table.apply(&SETTINGS, ms(0), replica(n), UNRESPONSIVE);
    }
    for n in 500..1000 {
        table.apply(&SETTINGS, ms(0), replica(n), bad(false));
    }
    assert_eq!((table.ejected(), table.records.len(), table.take_lost()), (500, 1000, 0));
}

#[test]
fn a_full_table_keeps_ejected_replicas_and_counts_lost_records() {
    let mut table = EjectionTable::new();
    table.set_members(10_000, 0);
    for n in 0..40 {
        table.apply(&SETTINGS, ms(0), replica(n), UNRESPONSIVE);
    }
    for n in 40..MAX_EJECTIONS as u16 + 20 {
        table.apply(&SETTINGS, ms(u64::from(n)), replica(n), bad(false));
    }
    assert_eq!((table.ejected(), table.records.len(), table.lost), (40, MAX_EJECTIONS, 20));
    let decoded = EjectionTable::decode(&table.encode()).unwrap();
    assert_eq!((decoded.ejected(), decoded.lost), (40, 0), "what others lost is theirs to count");
    for n in 2000..2000 + MAX_EJECTIONS as u16 {
        table.apply(&SETTINGS, ms(2000), replica(n), UNRESPONSIVE);
    }
    assert_eq!(table.ejected(), MAX_EJECTIONS);
    assert_eq!(
        table.take_lost(),
        20 + MAX_EJECTIONS as u32,
        "records of watched replicas, then replicas that should be ejected"
    );
}

#[test]
fn a_worker_remembers_each_of_a_thousand_replicas() {
    let mut scene = Scene::new();
    for round in 0..20 {
        for n in 0..1000 {
            let flight = scene.flights.sent(ms(round), replica(n), None, false, true);
            land(&mut scene, flight, round + 20);
        }
    }
    for n in 0..1000 {
        let flight = scene.flights.sent(ms(100), replica(n), None, false, true);
        let landed = scene.flights.answered(&SETTINGS, flight, ms(101), true).unwrap();
        assert!(landed.requests > 15.0, "replica {n}: {} good requests", landed.requests);
    }
    // Replicas that the worker no longer uses make room.
    for n in 1000..20_000 {
        let flight = scene.flights.sent(ms(u64::from(n) * 1000), replica(n), None, false, true);
        land(&mut scene, flight, u64::from(n) * 1000);
    }
    assert!(scene.flights.remembered() < 4000, "{}", scene.flights.remembered());
}

#[test]
fn a_replica_without_placement_gets_no_trial() {
    let mut scene = Scene::new();
    scene.tell(0, 1, UNRESPONSIVE);
    scene.heard(1, 1, 0);
    // Since then the policy has been sampled a thousand times, and no sample has met the replica.
    scene.table.set_members(10, 1000);
    assert_eq!(scene.trial(2000), None);
}

/// A fail-over: priority 0 has eight replicas, and they hang. Priority 1 has three.
#[test]
fn ejected_replicas_out_of_use_cause_no_panic() {
    for heard in [false, true] {
        let mut scene = Scene::new();
        scene.table.set_members(11, 1000);
        for n in 0..8 {
            scene.tell(0, n, UNRESPONSIVE);
            if heard {
                scene.table.heard(&SETTINGS, ms(1), replica(n), 0, 0, Placement::even(1000));
            }
        }
        assert!(scene.table.panics(), "most of the replicas in use hang");
        // Envoy uses priority 1, so no sample meets the replicas of priority 0 any longer.
        scene.table.set_members(3, 1031);
        assert!(!scene.table.panics());
        scene.tell(1000, 8, UNRESPONSIVE);
        assert!(scene.table.is_ejected(replica(8)) && scene.table.is_ejected(replica(0)), "heard: {heard}");
        assert_eq!(scene.table.ejected(), 1, "of the three in use");
        scene.table.heard(&SETTINGS, ms(1001), replica(8), 0, 0, Placement::even(1031));
        assert_eq!(scene.trial(2001), Some(replica(8)));
        // Envoy uses priority 0 again.
        scene.table.set_members(11, 1100);
        for n in 0..8 {
            scene.table.heard(&SETTINGS, ms(3000), replica(n), 0, 0, Placement::even(1100));
        }
        assert!(scene.table.panics());
    }
}

#[test]
fn with_the_rules_off_nothing_is_ejected() {
    let off = Profile::Paper.pool_settings().ejection;
    let mut table = EjectionTable::new();
    table.set_members(10, 0);
    let mut flights = Flights::new();
    for i in 0..1000 {
        let flight = flights.sent(ms(i * 10), replica(1), Some(100_000), false, true);
        let landed = flights.answered(&off, flight, ms(i * 10 + i), true).unwrap();
        assert_eq!(table.apply(&off, ms(i * 10), replica(1), landed.event(true, None)), Change::None);
        assert_eq!(flights.overdue(ms(i * 10)), None);
        assert_eq!(table.heard(&off, ms(i * 10), replica(1), 1000, 0, Placement::even(0)), Change::None);
    }
    assert_eq!(table.records.len(), 0);
}

#[test]
fn a_record_with_more_failures_than_requests_is_refused() {
    let mut scene = Scene::new();
    scene.tell(0, 1, bad(false));
    let record = &mut scene.table.records[0];
    record.failed = record.total + 0.5;
    assert!(matches!(EjectionTable::decode(&scene.table.encode()), Err(BlobError::Content)));
}

/// Bytes in which the highest value is more frequent than by chance, and counts within their bounds.
fn any_record() -> impl Strategy<Value = ([u8; size_of::<Record>()], (f32, f32))> {
    let byte = prop_oneof![3 => any::<u8>(), 1 => Just(u8::MAX)];
    let bytes = proptest::collection::vec(byte, size_of::<Record>());
    let counts = (0.0..=MEMORY, 0.0f32..=1.0).prop_map(|(total, share)| (total * share, total));
    (bytes.prop_map(|bytes| bytes.try_into().unwrap()), counts)
}

/// Does everything that a worker does with a table that it has read; the table written afterwards must be sound.
fn use_after(mut table: EjectionTable, now: Micros) {
    table.expire(now);
    for n in 0..8 {
        for (event, failing) in [(good(true), 1000), (bad(true), 0), (good(false), 100), (UNRESPONSIVE, 0)] {
            table.apply(&SETTINGS, now, replica(n), event);
            table.heard(&SETTINGS, now, replica(n), failing, 0, Placement::even(0));
        }
        table.admit(now, replica(n), load(0, 0));
    }
    table.take_trial(&SETTINGS, now, &mut SmallRng::seed_from_u64(5));
    assert!(EjectionTable::decode(&table.encode()).is_ok());
}

proptest! {
    #[test]
    fn bytes_from_outside_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = EjectionTable::decode(&bytes);
    }

    /// Any content behind a valid tag and length is refused or harmless.
    #[test]
    fn content_from_outside_never_panics(
        members in any::<u32>(),
        well in any::<u32>(),
        records in proptest::collection::vec(any_record(), 0..64),
        sound in proptest::bool::weighted(0.8),
        later in any::<u32>(),
    ) {
        let now = Micros(u64::from(later) * 1000);
        let mut table = EjectionTable { members, well, ..EjectionTable::new() };
        for (n, (bytes, (failed, total))) in (0u16..).zip(records) {
            let mut record: Record = bytemuck::pod_read_unaligned(&bytes);
            if sound {
                // Fields with bounds keep them; the others are arbitrary.
                (record.endpoint, record.failed, record.total) = (replica(n), failed, total);
                (record.reason, record.backoff_ms) = (record.reason % 4, record.backoff_ms % (MAX_BACKOFF_MS + 1));
            }
            if n % 2 == 0 {
                // Otherwise the record would be forgotten at once.
                (record.updated, record.since) = (now.stamp(), now.stamp());
            }
            table.records.push(record);
        }
        match EjectionTable::decode(&table.encode()) {
            Ok(table) => use_after(table, now),
            Err(error) => prop_assert!(error == BlobError::Content && !sound, "{}", error),
        }
    }

    /// A blob with one bit flipped is refused or harmless.
    #[test]
    fn a_damaged_blob_never_panics(at in 0usize..300, bit in 0u8..8, later in any::<u32>()) {
        let mut scene = Scene::new();
        for n in 0..4 {
            scene.tell(u64::from(n), n, bad(false));
            scene.tell(u64::from(n), n, bad(false));
        }
        let mut bytes = scene.table.encode().to_vec();
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        if let Ok(table) = EjectionTable::decode(&bytes) {
            use_after(table, Micros(u64::from(later) * 1000));
        }
    }

    /// After any events, the table decodes again and never excludes more than half of the fleet.
    #[test]
    fn random_events_stay_within_the_bounds(
        ops in proptest::collection::vec((0u16..80, 0u8..6, any::<u16>(), any::<bool>()), 0..300),
        members in 0u32..90,
    ) {
        let mut table = EjectionTable::new();
        table.set_members(members, 0);
        let mut rng = SmallRng::seed_from_u64(1);
        let mut now = 0u64;
        for (n, op, value, trial) in ops {
            now += u64::from(value) / 8;
            match op {
                0 | 1 => { table.apply(&SETTINGS, ms(now), replica(n), bad(trial)); }
                2 => { table.apply(&SETTINGS, ms(now), replica(n), Event::Unresponsive { trial, ordinary: !trial }); }
                3 => { table.apply(&SETTINGS, ms(now), replica(n), good(trial)); }
                4 => { table.heard(&SETTINGS, ms(now), replica(n), value, 0, Placement::even(0)); }
                _ => { table.take_trial(&SETTINGS, ms(now), &mut rng); table.expire(ms(now)); }
            }
            prop_assert!(table.ejected() * 2 <= members as usize);
            prop_assert!(EjectionTable::decode(&table.encode()).is_ok());
        }
    }
}

#[test]
fn most_fail_is_reported_only_while_most_of_the_fleet_fails() {
    let mut table = EjectionTable::new();
    table.set_members(4, 0);
    let mut fail = |n, requests| {
        let event = Event::Failed { requests, well: 0, trial: false };
        for _ in 0..4 {
            table.apply(&SETTINGS, ms(1000), replica(n), event);
        }
        table.most_fail(ms(1000))
    };
    assert!(!fail(0, 0.0) && !fail(1, 0.0), "half of it");
    assert!(!fail(2, 9.0), "one in ten");
    assert!(fail(3, 1.0), "one in two");
    assert!(!table.most_fail(ms(1000 + 11_000)), "not lately");
}

#[test]
fn an_old_table_stops_reporting_that_most_fail() {
    let mut table = EjectionTable::new();
    table.set_members(2, 0);
    for n in 0..2 {
        table.apply(&SETTINGS, ms(1000), replica(n), UNRESPONSIVE);
    }
    assert!(table.panics() && table.most_fail(ms(1000)));
    assert!(!table.most_fail(ms(1000 + 11_000)));
}
