use std::collections::{BinaryHeap, VecDeque};

use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::server::tracker::{Ended, Present, Ticket, Tracker, TrackerConfig};
use crate::shared::outcome::Outcome;

fn ms(ms: u64) -> Micros {
    Micros::from_millis(1_000_000 + ms)
}

fn tracker() -> Tracker {
    Tracker::new(TrackerConfig::default())
}

/// Serves `seconds` of Poisson arrivals at `per_s` with `slots` slots and a queue. `end` gives the outcome of each
/// request.
fn serve(
    slots: usize,
    per_s: f64,
    seconds: f64,
    mut service_ms: impl FnMut(&mut SmallRng) -> f64,
    end: impl Fn(u64) -> Outcome,
) -> (Tracker, Micros) {
    let mut rng = SmallRng::seed_from_u64(7);
    let mut tracker = tracker();
    let us = |seconds: f64| 1_000_000_000 + (seconds * 1e6) as u64;
    let (mut arrival, mut number) = (0.0, 0);
    // End times of the requests that are served, and the requests that wait.
    let mut running: BinaryHeap<std::cmp::Reverse<(u64, u64)>> = BinaryHeap::new();
    let mut open: std::collections::HashMap<u64, (Ticket, f64)> = std::collections::HashMap::new();
    let mut waiting: VecDeque<u64> = VecDeque::new();
    loop {
        while let Some(std::cmp::Reverse((at, done))) = running.peek().copied()
            && at <= us(arrival)
        {
            running.pop();
            let (ticket, _) = open.remove(&done).unwrap();
            tracker.finish(ticket, Micros(at), end(done));
            if let Some(next) = waiting.pop_front() {
                running.push(std::cmp::Reverse((at + (open[&next].1 * 1e3) as u64, next)));
            }
        }
        if arrival > seconds {
            return (tracker, Micros(us(arrival)));
        }
        number += 1;
        let took = service_ms(&mut rng);
        open.insert(number, (tracker.start(Micros(us(arrival))), took));
        if running.len() < slots {
            running.push(std::cmp::Reverse((us(arrival) + (took * 1e3) as u64, number)));
        } else {
            waiting.push_back(number);
        }
        arrival += -(1.0 - rng.random::<f64>()).ln() / per_s;
    }
}

fn exponential(mean_ms: f64) -> impl FnMut(&mut SmallRng) -> f64 {
    move |rng| -(1.0 - rng.random::<f64>()).ln() * mean_ms
}

fn always(_: u64) -> Outcome {
    Outcome::Success
}

#[track_caller]
fn assert_near(capacity: Capacity, base_ms: f64, within: f64, knees: std::ops::RangeInclusive<u16>) {
    let base = f64::from(capacity.base_us) / 1000.0;
    assert!((base / base_ms - 1.0).abs() < within && knees.contains(&capacity.knee), "{capacity:?}");
}

#[test]
fn a_queue_behind_four_slots_has_its_knee_at_four() {
    for load in [0.7, 0.9] {
        let (mut tracker, now) = serve(4, load * 100.0, 60.0, exponential(40.0), always);
        assert_near(tracker.capacity(now).unwrap(), 40.0, 0.2, 3..=5);
    }
}

#[test]
fn constant_service_times_do_not_distort_the_knee() {
    let (mut tracker, now) = serve(4, 90.0, 60.0, |_| 40.0, always);
    assert_near(tracker.capacity(now).unwrap(), 40.0, 0.25, 3..=5);
}

#[test]
fn few_slots_with_constant_service_times_have_their_knee_at_their_number() {
    for slots in 1..=3 {
        for load in [0.3, 0.5, 0.7] {
            let per_s = load * 50.0 * f64::from(slots);
            let (mut tracker, now) = serve(slots as usize, per_s, 30.0, |_| 20.0, always);
            assert_near(tracker.capacity(now).unwrap(), 20.0, 0.1, slots..=slots);
        }
    }
}

/// A client that chooses replicas in turn sends the second request when the first one is nearly done.
#[test]
fn a_second_request_that_hardly_waits_does_not_look_like_a_second_slot() {
    for (slots, after_ms, knee) in [(1, 19, 1), (1, 10, 1), (2, 10, 2), (2, 15, 2)] {
        // Libraries report that a request waits for its client while they write its response.
        for waits_us in [0, 4, 200] {
            let mut tracker = tracker();
            let finish = |tracker: &mut Tracker, ticket: Ticket, at: Micros| {
                if waits_us > 0 {
                    tracker.client_waits(ticket.visit(), Micros(at.0 - waits_us - 1));
                    tracker.client_is_back(ticket.visit(), Micros(at.0 - 1));
                }
                tracker.finish(ticket, at, Outcome::Success);
            };
            for round in 0..100 {
                let at = |after: u64| ms(round * 60 + after);
                let first = tracker.start(at(0));
                let second = tracker.start(at(after_ms));
                finish(&mut tracker, first, at(20));
                let end = if slots == 1 { 40 } else { after_ms + 20 };
                finish(&mut tracker, second, at(end));
            }
            assert_near(tracker.capacity(ms(6000)).unwrap(), 20.0, 0.05, knee..=knee);
        }
    }
}

/// Knees that a replica reports after each of its answers. The number of requests that its clients keep in flight is in
/// the range `in_flight`, and changes with every 20th request.
fn knees(slots: u16, service_ms: f64, in_flight: std::ops::RangeInclusive<usize>) -> Vec<u16> {
    let (mut service, mut knees) = (exponential(service_ms), Vec::new());
    for seed in 0..10 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut tracker = tracker();
        let mut now = ms(0).0;
        let mut ends = vec![now; slots.into()];
        let mut open: Vec<(u64, Ticket)> = Vec::new();
        let mut wanted = *in_flight.start();
        for request in 0..3000 {
            wanted = if request % 20 == 0 { rng.random_range(in_flight.clone()) } else { wanted };
            while open.len() >= wanted {
                open.sort_by_key(|(end, _)| *end);
                let (end, ticket) = open.remove(0);
                now = now.max(end);
                tracker.finish(ticket, Micros(now), Outcome::Success);
                knees.push(tracker.capacity(Micros(now)).unwrap().knee);
            }
            now += rng.random_range(0..500);
            let slot = ends.iter_mut().min().unwrap();
            *slot = (*slot).max(now) + (service(&mut rng) * 1e3) as u64;
            open.push((*slot, tracker.start(Micros(now))));
        }
        open.into_iter().for_each(|(at, ticket)| _ = tracker.finish(ticket, Micros(at), Outcome::Aborted));
    }
    knees
}

fn share(knees: &[u16], counts: impl Fn(u16) -> bool) -> f64 {
    knees.iter().filter(|knee| counts(**knee)).count() as f64 / knees.len() as f64
}

#[test]
fn a_replica_that_is_always_saturated_seldom_shows_a_knee() {
    for (slots, in_flight, most) in [(1, 3..=6, 0.06), (4, 10..=14, 0.07), (4, 24..=26, 0.02)] {
        let false_ones = share(&knees(slots, 20.0, in_flight.clone()), |knee| knee > 2 * slots);
        assert!(false_ones < most, "{slots} slots, {in_flight:?}: {false_ones:.3}");
    }
}

#[test]
fn a_knee_among_many_requests_is_found_if_their_number_varies() {
    for (slots, service_ms, in_flight) in
        [(12, 200.0, 8..=20), (12, 100.0, 10..=20), (32, 150.0, 20..=40), (64, 100.0, 45..=75)]
    {
        let missed = share(&knees(slots, service_ms, in_flight.clone()), |knee| knee < slots / 2);
        assert!(missed < 0.03, "{slots} slots, {service_ms} ms, {in_flight:?}: {missed:.3}");
    }
}

/// Of many requests that arrive one after another, the fast ones answer first.
#[test]
fn the_first_responses_of_many_requests_do_not_look_like_a_recovery() {
    let (mut rng, mut service) = (SmallRng::seed_from_u64(3), exponential(100.0));
    let mut tracker = tracker();
    let mut lowest = u32::MAX;
    for burst in 0..300 {
        let mut ends: Vec<_> = (0..64)
            .map(|n| {
                let at = 1_000_000_000 + burst * 1_000_000 + n * 300;
                (at + (service(&mut rng) * 1e3) as u64, tracker.start(Micros(at)))
            })
            .collect();
        ends.sort_by_key(|(end, _)| *end);
        for (end, ticket) in ends {
            tracker.finish(ticket, Micros(end), Outcome::Success);
            let base_us = tracker.capacity(Micros(end)).unwrap().base_us;
            lowest = if burst > 5 { lowest.min(base_us) } else { lowest };
        }
    }
    assert!(lowest > 70_000, "100 ms on average, {lowest} us at the lowest");
}

#[test]
fn synchronised_requests_do_not_distort_the_knee() {
    let mut tracker = tracker();
    for batch in 0..200 {
        let at = 1_000_000_000 + batch * 50_000;
        let tickets: Vec<_> = (0..4).map(|n| tracker.start(Micros(at + n * 100))).collect();
        for (n, ticket) in (0..).zip(tickets) {
            tracker.finish(ticket, Micros(at + 40_000 + n * 100), Outcome::Success);
        }
    }
    assert_near(tracker.capacity(ms(10_000)).unwrap(), 40.0, 0.1, 4..=4);
}

#[test]
fn the_knee_of_an_unsaturated_replica_is_its_highest_rif() {
    let (mut tracker, now) = serve(usize::MAX, 200.0, 30.0, exponential(50.0), always);
    let capacity = tracker.capacity(now).unwrap();
    assert_near(capacity, 50.0, 0.2, 8..=30);
}

#[test]
fn a_replica_that_always_saturates_has_a_knee_of_one() {
    let (mut tracker, now) = serve(1, 30.0, 20.0, exponential(50.0), always);
    assert_near(tracker.capacity(now).unwrap(), 50.0, 0.2, 1..=2);
}

/// Serves pairs of requests, one pair a second from second `from` to second `to`, and four requests alone between two
/// pairs. A request alone takes `work_ms`. The second request of a pair arrives at 0.7 times that, and `ends_ms` says
/// when the two leave. With `waits`, each waits for its client for 1 ms just before it ends. Returns the base latency in
/// milliseconds and the knee.
fn pairs(
    tracker: &mut Tracker,
    (from, to): (u64, u64),
    work_ms: u64,
    ends_ms: [u64; 2],
    waits: bool,
) -> (u32, u16) {
    let end = |tracker: &mut Tracker, ticket: Ticket, at: u64| {
        if waits {
            tracker.client_waits(ticket.visit(), ms(at - 1));
            tracker.client_is_back(ticket.visit(), ms(at));
        }
        tracker.finish(ticket, ms(at), Outcome::Success);
    };
    for second in from..to {
        for alone in 1..=4 {
            let begins = second * 1000 + alone * 150;
            let ticket = tracker.start(ms(begins));
            end(tracker, ticket, begins + work_ms);
        }
        let begins = second * 1000 + 800;
        let first = tracker.start(ms(begins));
        let second = tracker.start(ms(begins + work_ms * 7 / 10));
        end(tracker, first, begins + ends_ms[0]);
        end(tracker, second, begins + ends_ms[1]);
    }
    let capacity = tracker.capacity(ms(to * 1000)).unwrap();
    ((capacity.base_us + 500) / 1000, capacity.knee)
}

/// On one core, each request of a pair slows the other down for 15 ms. On two cores, neither takes longer.
const ONE_CORE: [u64; 2] = [65, 100];
const TWO_CORES: [u64; 2] = [50, 85];

#[test]
fn requests_that_share_one_core_are_not_mistaken_for_requests_on_two() {
    for waits in [false, true] {
        let base_ms = if waits { 49 } else { 50 };
        assert_eq!(pairs(&mut tracker(), (0, 20), 50, ONE_CORE, waits), (base_ms, 1), "waits: {waits}");
        assert_eq!(pairs(&mut tracker(), (0, 20), 50, TWO_CORES, waits), (base_ms, 2), "waits: {waits}");
    }
}

#[test]
fn the_evidence_of_one_core_is_renewed_with_the_estimates() {
    // The weights have just been scaled down, as they are every 166 s.
    let mut grown = tracker();
    pairs(&mut grown, (0, 167), 50, ONE_CORE, false);
    assert_eq!(pairs(&mut grown, (167, 240), 50, TWO_CORES, false), (50, 2));
    // The estimates start anew when requests take less than half as long.
    let mut healed = tracker();
    pairs(&mut healed, (0, 60), 50, ONE_CORE, false);
    assert_eq!(pairs(&mut healed, (60, 80), 10, [13, 20], false), (10, 1));
}

#[test]
fn a_single_request_sets_the_base_latency_however_long_it_took() {
    for took in [1, 800, 30_000] {
        let mut tracker = tracker();
        assert_eq!(tracker.capacity(ms(0)), None);
        let ticket = tracker.start(ms(0));
        assert_eq!(tracker.capacity(ms(took)), None, "never a departure");
        tracker.finish(ticket, ms(took), Outcome::Success);
        let expected = Capacity { open: true, rse_percent: 100, ..Capacity::new(took as u32 * 1000, 1) };
        assert_eq!(tracker.capacity(ms(took + 100)), Some(expected));
        // With one response per hour, the last fit is kept.
        assert_eq!(tracker.capacity(ms(took + 3_600_000)), Some(expected));
    }
}

#[test]
fn a_replica_that_answers_one_request_an_hour_stays_known_and_in_use() {
    const HOUR_MS: u64 = 3_600_000;
    let settings = crate::config::Profile::Default.pool_settings();
    let replica =
        |n: u16| format!("10.0.0.1:{}", 1000 + n).parse::<crate::shared::endpoint::Endpoint>().unwrap();
    let mut rng = SmallRng::seed_from_u64(1);
    let mut pool = crate::client::pool::PoolState::new();
    let mut tracker = tracker();
    let (mut now, mut picked) = (0, 0);
    // Six weeks, so that the sums are rescaled many times; service times differ.
    for hour in 0..1000 {
        let took = [40, 30, 50, 15][hour % 4];
        let ticket = tracker.start(ms(now));
        tracker.finish(ticket, ms(now + took), Outcome::Success);
        // Between requests, it is probed from time to time.
        for asked in [took, took + 500, HOUR_MS / 2, HOUR_MS - 1] {
            let capacity = tracker.capacity(ms(now + asked)).expect("known from the first answer on");
            assert_eq!(
                (u64::from(capacity.base_us), capacity.knee),
                (took * 1000, 1),
                "hour {hour}, {asked} ms"
            );
        }
        now += HOUR_MS;
        // Its clients, which also get reports of nine replicas with a higher knee, still send to it.
        pool.set_members(10, 0, ms(now));
        for n in 0..10 {
            let theirs = Capacity::new(40_000, 4);
            let capacity = if n == 0 { tracker.capacity(ms(now)) } else { Some(theirs) };
            let load =
                crate::wire::load::Load { capacity, ..crate::wire::load::Load::at_face_value(0, None) };
            let placement = crate::client::members::Placement::even(0);
            pool.record(&settings, ms(now), replica(n), load, placement, &mut rng);
        }
        let picks = (0..10).filter_map(|_| pool.pick_predicted(&settings, ms(now), &mut rng).replica);
        picked += picks.filter(|picked| *picked == replica(0)).count();
    }
    assert!(picked >= 1000, "{picked} of 10 000 requests, a tenth of them is fair");
}

/// Share of the reports from 12 to 30 s that say that latencies are steady.
fn steady(slots: usize, per_s: f64, mut service_ms: impl FnMut(&mut SmallRng) -> f64) -> f64 {
    let (mut count, mut steady) = (0, 0);
    for half in 24..60 {
        let (mut tracker, now) = serve(slots, per_s, f64::from(half) / 2.0, &mut service_ms, always);
        count += 1;
        steady += i32::from(tracker.capacity(now).unwrap().steady);
    }
    f64::from(steady) / f64::from(count)
}

/// One request in `every` takes `long_ms`, the others 10 ms.
fn rarely(every: u32, long_ms: f64) -> impl FnMut(&mut SmallRng) -> f64 {
    move |rng| if rng.random_range(0..every) == 0 { long_ms } else { 10.0 }
}

#[test]
fn latencies_are_steady_if_requests_take_almost_the_same_time() {
    // At 20, 50 and 90 % load, queues included.
    for per_s in [20.0, 50.0, 90.0] {
        assert_eq!(steady(4, per_s, |_| 40.0), 1.0, "identical, {per_s}/s");
        let alike = steady(4, per_s, |rng| rng.random_range(30.0..50.0));
        assert_eq!(alike, 1.0, "alike, {per_s}/s");
    }
    assert_eq!(steady(1, 2.5, |_| 200.0), 1.0, "one slot, few requests");
    assert_eq!(steady(8, 4.0, |_| 1000.0), 1.0, "eight slots, few requests");
    assert_eq!(steady(1, 0.2, |_| 40.0), 0.0, "too few requests to tell");
}

#[test]
fn latencies_stay_steady_while_too_few_requests_come_to_tell() {
    let (mut tracker, now) = serve(4, 50.0, 20.0, |_| 40.0, always);
    assert!(tracker.capacity(now).unwrap().steady);
    // Three minutes later, the earlier requests have faded, and one takes far longer.
    let late = Micros(now.0 + 180_000_000);
    let ticket = tracker.start(late);
    let end = Micros(late.0 + 400_000);
    tracker.finish(ticket, end, Outcome::Success);
    assert!(tracker.capacity(Micros(end.0 + 100_000)).unwrap().steady);
}

#[test]
fn latencies_are_not_steady_if_some_requests_take_longer() {
    for per_s in [20.0, 50.0, 90.0] {
        let exponential = steady(4, per_s, exponential(40.0));
        assert!(exponential < 0.1, "{per_s}/s: {exponential}");
    }
    // One in 20 and one in 100, four and 32 slots, 80 % load.
    for (every, long_ms) in [(20, 400.0), (100, 2000.0)] {
        let mean = (10.0 * f64::from(every - 1) + long_ms) / f64::from(every);
        for slots in [4, 32] {
            let per_s = 0.8 * slots as f64 / mean * 1e3;
            let share = steady(slots, per_s, rarely(every, long_ms));
            assert!(share < 0.1, "one in {every}, {slots} slots: {share}");
        }
    }
}

/// Mean of the reported relative standard errors over 60 replicas, and the true one: the standard deviation of their base
/// latencies, divided by the mean.
fn reported_and_true_error(slots: usize, per_s: f64, service_ms: impl Fn(&mut SmallRng) -> f64) -> [f64; 2] {
    let (mut reported, mut bases) = (Vec::new(), Vec::new());
    for seed in 0..60 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let (mut tracker, now) = serve(slots, per_s, 40.0, |_| service_ms(&mut rng), always);
        let capacity = tracker.capacity(now).unwrap();
        reported.push(f64::from(capacity.rse_percent) / 100.0);
        bases.push(f64::from(capacity.base_us));
    }
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let base = mean(&bases);
    let squares: Vec<f64> = bases.iter().map(|one| (one / base - 1.0).powi(2)).collect();
    [mean(&reported), mean(&squares).sqrt()]
}

#[test]
fn the_reported_error_is_the_spread_of_equal_replicas() {
    let mixed = |rng: &mut SmallRng| if rng.random_range(0..10) == 0 { 140.0 } else { 7.0 };
    // At 4, 20 and 40 % load.
    for (slots, each_per_s) in [(1, 2.0), (1, 10.0), (1, 20.0), (4, 2.0), (4, 10.0), (4, 20.0)] {
        let per_s = each_per_s * slots as f64;
        let exponential =
            reported_and_true_error(slots, per_s, |rng| -20.0 * (1.0 - rng.random::<f64>()).ln());
        for [reported, spread] in [exponential, reported_and_true_error(slots, per_s, mixed)] {
            let ratio = spread / reported;
            assert!((0.8..1.4).contains(&ratio), "{slots} slots, {per_s}/s: {reported}, not {spread}");
        }
    }
    assert!(reported_and_true_error(4, 40.0, |_| 20.0)[0] < 0.01, "requests that take the same time");
}

#[test]
fn levels_that_have_faded_away_do_not_disturb_the_error() {
    // Nothing waits. At the start the replica is idle, and then at least six requests are in flight for 90 minutes, so
    // the sums of the lower levels fade to zero.
    let mut rng = SmallRng::seed_from_u64(3);
    let (mut tracker, mut tickets) = (tracker(), Vec::new());
    for tenth in 0..54_000 {
        let at = ms(tenth * 100);
        for _ in 0..rng.random_range(0..3) {
            tickets.push(tracker.start(at));
        }
        // Each request ends with the same probability.
        let mut index = 0;
        while index < tickets.len() {
            if tickets.len() > 6 && rng.random_range(0..12) == 0 {
                tracker.finish(tickets.swap_remove(index), at, Outcome::Success);
            } else {
                index += 1;
            }
        }
        if tenth > 1000 {
            let capacity = tracker.capacity(at).unwrap();
            assert!(capacity.knee > 6 && capacity.rse_percent < 50, "{tenth}: {capacity:?}");
        }
    }
}

#[test]
fn an_estimate_does_not_become_less_certain_without_requests() {
    let (mut tracker, now) = serve(4, 50.0, 40.0, exponential(40.0), always);
    let error = |tracker: &mut Tracker, after_s: u64| {
        tracker.capacity(Micros(now.0 + after_s * 1_000_000)).unwrap().rse_percent
    };
    let at_first = error(&mut tracker, 1);
    assert!((3..=8).contains(&at_first), "{at_first}");
    for after_s in [5, 20, 60, 3600] {
        assert_eq!(error(&mut tracker, after_s), at_first, "{after_s} s");
    }
}

#[test]
fn errors_and_aborts_do_not_count_as_departures() {
    // Every other request fails at its end: the replica gives half as many good responses, and each costs twice the
    // time.
    let (mut tracker, now) = serve(4, 60.0, 60.0, exponential(40.0), |number| {
        if number % 2 == 0 { Outcome::Failure } else { Outcome::Success }
    });
    assert_near(tracker.capacity(now).unwrap(), 80.0, 0.25, 2..=5);
    let mut only_fails = self::tracker();
    for at in 0..100 {
        let ticket = only_fails.start(ms(at * 10));
        only_fails.finish(ticket, ms(at * 10), Outcome::Failure);
    }
    assert_eq!(only_fails.capacity(ms(2000)), None, "a replica that fails at once is not fast");
}

#[test]
fn streams_and_slow_clients_do_not_count_as_concurrency() {
    let alone = |held: usize| {
        let mut tracker = tracker();
        let streams: Vec<_> = (0..held).map(|_| tracker.start(ms(0))).collect();
        streams.iter().for_each(|ticket| tracker.streaming(ticket, ms(0)));
        for at in 1..200 {
            let ticket = tracker.start(ms(at * 100));
            let visit = ticket.visit();
            tracker.client_waits(visit, ms(at * 100 + 20));
            tracker.client_is_back(visit, ms(at * 100 + 70));
            tracker.finish(ticket, ms(at * 100 + 80), Outcome::Success);
        }
        let capacity = tracker.capacity(ms(20_000)).unwrap();
        for ticket in streams {
            tracker.finish(ticket, ms(20_000), Outcome::Streaming);
        }
        assert_eq!((tracker.rif(), tracker.latency(ms(20_000))), (0, Some(30_000)), "50 ms are the client's");
        capacity
    };
    assert_near(alone(0), 30.0, 0.02, 1..=1);
    // On the wire, the RIF includes streams, and so does the knee.
    assert_near(alone(300), 30.0, 0.02, 301..=301);
}

#[test]
fn slow_requests_are_forgotten_within_seconds() {
    let mut tracker = tracker();
    let mut now = 0;
    let mut run = |tracker: &mut Tracker, requests: u64, took: u64| {
        for _ in 0..requests {
            let ticket = tracker.start(ms(now));
            now += took;
            tracker.finish(ticket, ms(now), Outcome::Success);
        }
        tracker.capacity(ms(now)).unwrap().base_us
    };
    assert_eq!(run(&mut tracker, 60, 400), 400_000);
    let healed = run(&mut tracker, 20, 20);
    assert!((19_000..25_000).contains(&healed), "after 0.4 s: {healed}");
}

/// Returns the capacity of a replica with `slots` slots and a queue after `requests` requests. Its client keeps `held`
/// requests in flight, and one more from time to time.
fn held(slots: usize, held: usize, requests: usize) -> Capacity {
    let mut tracker = tracker();
    let mut rng = SmallRng::seed_from_u64(5);
    let mut ends: Vec<u64> = vec![1_000_000_000; slots];
    let mut open: Vec<(u64, Ticket)> = Vec::new();
    let mut now = 1_000_000_000;
    for request in 0..requests {
        let wanted = held + usize::from(request % 20 == 0);
        while open.len() >= wanted {
            open.sort_by_key(|(end, _)| *end);
            let (end, ticket) = open.remove(0);
            now = end;
            tracker.finish(ticket, Micros(end), Outcome::Success);
        }
        now += rng.random_range(0..500);
        let slot = ends.iter_mut().min().unwrap();
        *slot = (*slot).max(now) + 40_000;
        open.push((*slot, tracker.start(Micros(now))));
        tracker.capacity(Micros(now));
    }
    let capacity = tracker.capacity(Micros(now)).unwrap();
    for (at, ticket) in open {
        tracker.finish(ticket, Micros(at), Outcome::Aborted);
    }
    capacity
}

#[test]
fn a_replica_is_open_while_requests_beyond_its_knee_do_not_wait() {
    // The client never sends enough for the replica to show more than its known capacity. The estimate must therefore
    // always let the client send more.
    let free = held(64, 5, 1000);
    assert!(free.knee == 6 || free.open && free.knee < 6, "{free:?}");
    let full = held(1, 2, 1000);
    assert!(!full.open, "{full:?}");
    let (mut queue, now) = serve(4, 90.0, 60.0, exponential(40.0), always);
    assert!(!queue.capacity(now).unwrap().open);
    let (mut none, now) = serve(usize::MAX, 200.0, 60.0, exponential(50.0), always);
    assert!(none.capacity(now).unwrap().open);
}

#[test]
fn a_saturated_replica_that_grows_raises_its_knee_after_a_while() {
    let mut tracker = tracker();
    let mut now = 0;
    let mut pairs = |tracker: &mut Tracker, pairs: u64, second_took: u64| {
        for _ in 0..pairs {
            let (one, other) = (tracker.start(ms(now)), tracker.start(ms(now)));
            tracker.finish(one, ms(now + 40), Outcome::Success);
            tracker.finish(other, ms(now + second_took), Outcome::Success);
            now += second_took + 10;
        }
        tracker.capacity(ms(now)).unwrap()
    };
    let full = pairs(&mut tracker, 100, 80);
    assert!(full.knee == 1 && !full.open, "{full:?}");
    let mut alone = |seconds: u64| {
        for _ in 0..seconds * 20 {
            let ticket = tracker.start(ms(now));
            now += 40;
            tracker.finish(ticket, ms(now), Outcome::Success);
            now += 10;
        }
        tracker.capacity(ms(now)).unwrap().open
    };
    assert_eq!([alone(2), alone(30)], [false, true]);
}

#[test]
fn a_stall_that_is_over_is_forgotten_at_once() {
    let mut tracker = tracker();
    let run = |tracker: &mut Tracker, from: u64, answers: u64| {
        for at in (from..).step_by(30).take(answers as usize) {
            let ticket = tracker.start(ms(at));
            tracker.finish(ticket, ms(at + 20), Outcome::Success);
            tracker.capacity(ms(at + 20));
        }
        tracker.capacity(ms(from + 30 * answers)).unwrap().base_us
    };
    assert_eq!(run(&mut tracker, 0, 300), 20_000);
    let stuck: Vec<_> = (0..8).map(|_| tracker.start(ms(9000))).collect();
    for ticket in stuck {
        tracker.finish(ticket, ms(19_000), Outcome::Success);
    }
    assert!(run(&mut tracker, 19_000, 1) > 100_000, "it counts until more has been answered");
    assert!(run(&mut tracker, 19_030, 20) < 25_000);
}

#[test]
fn with_mixed_requests_a_few_short_ones_do_not_lower_the_base_latency() {
    // Nine in ten requests take 10 ms, and one in ten takes 200 ms.
    let mut rng = SmallRng::seed_from_u64(9);
    let mut tracker = tracker();
    let (mut now, mut lowest) = (0, u32::MAX);
    for request in 0..30_000 {
        let ticket = tracker.start(ms(now));
        now += if rng.random::<f64>() < 0.1 { 200 } else { 10 };
        tracker.finish(ticket, ms(now), Outcome::Success);
        let base_us = tracker.capacity(ms(now)).unwrap().base_us;
        if request > 500 {
            lowest = lowest.min(base_us);
        }
    }
    assert!(lowest > 13_000, "29 ms on average, {lowest} us at the lowest");
}

#[test]
fn a_clock_step_distorts_the_estimate_for_at_most_a_minute() {
    for step in [-3_600_000i64, 3_600_000] {
        let mut tracker = tracker();
        let mut now = 10_000_000u64;
        for request in 0..2000u64 {
            let ticket = tracker.start(ms(now));
            if request == 1000 {
                now = now.checked_add_signed(step).unwrap();
            }
            now += 40;
            tracker.finish(ticket, ms(now), Outcome::Success);
            let base = tracker.capacity(ms(now)).unwrap().base_us;
            assert!(base <= 60_100_000, "{step}: {base}");
        }
        assert_near(tracker.capacity(ms(now)).unwrap(), 40.0, 0.15, 1..=1);
    }
}

/// A worker learns of others' departures late. Until then, a request of its own seems to have begun when it arrived.
#[test]
fn a_worker_that_shares_a_replica_does_not_take_two_slots_for_one() {
    let mut tracker = tracker();
    let with_others = |rif| Present { rif, away: 0 };
    for round in 0..100 {
        let at = |after: u64| ms(round * 100 + after);
        let alone = tracker.start(at(0));
        tracker.finish(alone, at(20), Outcome::Success);
        // Another worker's request is served from 30 to 50 ms, and this one beside it from 35 to 55.
        let beside = tracker.start_behind(at(35), with_others(1));
        tracker.finish_among(beside, at(55), Outcome::Success, with_others(1));
        let latency_us = 20_000;
        let (rif_at_arrival, arrived_as, level, outcome) = (0, 1, 2, Outcome::Success);
        tracker.record(Ended { at: at(50), rif_at_arrival, arrived_as, level, latency_us, outcome });
    }
    assert_near(tracker.capacity(ms(10_000)).unwrap(), 20.0, 0.1, 2..=2);
}

#[test]
fn workers_that_share_results_estimate_what_one_worker_would() {
    // Two workers share the requests of one queue. Each learns when the other's requests end.
    let mut rng = SmallRng::seed_from_u64(3);
    let mut workers = [tracker(), tracker()];
    let mut one = tracker();
    let mut slots: Vec<(u64, usize, Ticket, Ticket)> = Vec::new();
    let mut ends: Vec<u64> = vec![0; 4];
    let mut at = 0.0;
    while at < 60_000_000.0 {
        at += -(1.0 - rng.random::<f64>()).ln() * 12_500.0;
        let now = at as u64 + 1_000_000_000;
        slots.sort_by_key(|(end, ..)| *end);
        while slots.first().is_some_and(|(end, ..)| *end <= now) {
            let (end, worker, ticket, alone) = slots.remove(0);
            let rif = slots.len() as u32 + 1;
            let ended =
                workers[worker].finish_among(ticket, Micros(end), Outcome::Success, Present { rif, away: 0 });
            workers[1 - worker].record(ended);
            one.finish(alone, Micros(end), Outcome::Success);
        }
        let worker = rng.random_range(0..2);
        let took = (-(1.0 - rng.random::<f64>()).ln() * 40_000.0) as u64;
        let slot = (0..4).min_by_key(|slot| ends[*slot]).unwrap();
        ends[slot] = ends[slot].max(now) + took;
        let others = slots.len() as u32;
        let ticket = workers[worker].start_behind(Micros(now), Present { rif: others, away: 0 });
        slots.push((ends[slot], worker, ticket, one.start(Micros(now))));
    }
    let now = Micros(at as u64 + 1_000_000_000);
    let exact = one.capacity(now).unwrap();
    for worker in &mut workers {
        assert_near(
            worker.capacity(now).unwrap(),
            f64::from(exact.base_us) / 1e3,
            0.1,
            exact.knee - 1..=exact.knee + 1,
        );
    }
}

#[test]
fn a_worker_without_requests_learns_from_another_at_any_rate() {
    for gap in [50, 1000, 20_000] {
        let (mut busy, mut idle) = (tracker(), tracker());
        for request in 0..50 {
            let at = request * gap;
            let ticket = busy.start(ms(at));
            idle.record(busy.finish(ticket, ms(at + 40), Outcome::Success));
        }
        for worker in [&mut busy, &mut idle] {
            assert_near(worker.capacity(ms(50 * gap)).unwrap(), 40.0, 0.01, 1..=1);
        }
    }
}

#[test]
fn cost_is_flat_up_to_the_knee_and_square_beyond() {
    let capacity = Capacity::new(1000, 4);
    assert_eq!([0, 3, 7].map(|rif| capacity.cost(rif)), [1000.0, 1000.0, 4000.0]);
    assert_eq!([0, 3, 7].map(|rif| capacity.latency_us(rif)), [1000, 1000, 2000]);
    let liar = Capacity::new(MAX_LATENCY_US, 1);
    assert!(liar.cost(u32::MAX).is_finite() && liar.latency_us(u32::MAX) == MAX_LATENCY_US);
    let old_agent = Capacity::at_face_value(5000, 3);
    assert_eq!([0, 3, 4].map(|rif| old_agent.latency_us(rif)), [5000, 5000, 6250]);
}

proptest! {
    #[test]
    fn no_sequence_of_events_breaks_the_fit(
        events in proptest::collection::vec((0u8..6, 0u64..100_000_000, 0u32..2000, any::<bool>()), 1..300)
    ) {
        let mut levels = Levels::new();
        let mut now = 1_000_000_000_000u64;
        for (kind, step, level, back) in events {
            now = if back { now.saturating_sub(step) } else { now + step };
            match kind {
                0 => levels.moved(Micros(now), level, level.saturating_add(1)),
                1 => levels.moved(Micros(now), level, level.saturating_sub(1)),
                2 => levels.heard(Micros(now), level, level),
                3 => levels.served(Micros(now), level, level, step as u32),
                4 => levels.resume(Micros(now)),
                _ => {
                    if let Some(capacity) = levels.capacity(Micros(now), back) {
                        prop_assert!((1..=MAX_LATENCY_US).contains(&capacity.base_us));
                        prop_assert!((1..=MAX_KNEE).contains(&capacity.knee));
                    }
                }
            }
        }
    }
}
