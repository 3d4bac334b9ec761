use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use prequal_core::shared::time::Micros;

use crate::load::Keys;
use crate::sim::plans::{ours, paper};
use crate::sim::policies::cswrr;
use crate::sim::scenario::{CacheSpec, NORMAL, ServerSpec, Sizes, Spare};
use crate::sim::server::Logged;

/// Small and overloaded, so that queries queue, miss deadlines, fail and are refused.
fn scenario() -> SimScenario {
    let mut scenario = SimScenario::testbed(10, 1.6, NORMAL);
    scenario.servers[0].failing = 0.2;
    (scenario.servers[1].slots, scenario.servers[1].queue) = (8, 4);
    scenario.changes = vec![(3.0, SimChange::Frozen(2, true)), (4.0, SimChange::Frozen(2, false))];
    (scenario.warm_up, scenario.measured) = (1.0, 8.0);
    scenario
}

#[test]
fn the_same_seed_gives_the_same_run_and_a_different_seed_a_different_one() {
    let cswrr = SimArm::Cswrr(cswrr::Settings::FAST);
    for arm in
        [SimArm::Prequal(paper()), SimArm::Prequal(ours()), SimArm::WeightedRoundRobin, cswrr, SimArm::Yarp]
    {
        let (once, again) = (run(&scenario(), &arm, 7), run(&scenario(), &arm, 7));
        assert_eq!((&once.samples, once.events), (&again.samples, again.events), "{arm:?}");
        assert_ne!(once.samples, run(&scenario(), &arm, 8).samples);
    }
}

#[test]
fn every_policy_meets_the_same_arrivals() {
    let arrivals = |arm| -> Vec<u32> { run(&scenario(), &arm, 7).samples.iter().map(|s| s.at_ms).collect() };
    assert_eq!(arrivals(SimArm::Random), arrivals(SimArm::Prequal(paper())));
}

#[test]
fn every_query_ends_once_and_nothing_is_left_behind() {
    let scenario = scenario();
    let mut world = World::new(&scenario, &SimArm::Prequal(Prequal { learn: true, ..ours() }), 3);
    world.go();
    assert!(world.assigned.iter().all(|assigned| *assigned == 0), "{:?}", world.assigned);
    assert!(world.servers.iter().all(|server| server.rif() == 0 && server.running == 0));
    assert_eq!(world.queries.items.len(), world.queries.free.len());
    assert!(world.run.samples.iter().any(|sample| sample.latency_us == FAILED), "the test must see failures");
}

/// With the same requests, the agent reports what the simulated servers reported.
#[test]
fn the_agent_agrees_with_the_simulated_servers() {
    // Both estimators: the shipped one and the paper's.
    for arm in [SimArm::Prequal(ours()), SimArm::Prequal(paper())] {
        agent_agrees(&arm);
    }
}

fn agent_agrees(arm: &SimArm) {
    let scenario = scenario();
    let mut world = World::new(&scenario, arm, 5);
    world.go();
    let endpoint = super::super::server::endpoint(0);
    let (mut reports, mut known) = (0, 0);
    for server in &world.servers {
        // The agent starts long before the first query, as the simulated servers do.
        let clock = Arc::new(AtomicU64::new(0));
        let shown = Arc::clone(&clock);
        let load =
            probe_agent::load::Load::with_clock(arm.tracker(), move || Micros(shown.load(Ordering::Relaxed)));
        let mut open: HashMap<Nanos, Vec<probe_agent::load::InFlight>> = HashMap::new();
        for (at, logged) in &server.log {
            clock.store(micros(*at).0, Ordering::Relaxed);
            match logged {
                Logged::Arrived => open.entry(*at).or_default().push(load.start()),
                Logged::Left { arrived, outcome } => {
                    open.get_mut(arrived).unwrap().remove(0).finish(*outcome);
                }
                Logged::Reported { report, leaving, held } => {
                    let agents_report = load.report(endpoint, None, *leaving);
                    assert_eq!(agents_report, *report, "at {at} ns");
                    assert_eq!(agents_report.rif as usize, *held, "the model's own count at {at} ns");
                    reports += 1;
                    known += usize::from(report.latency_us.is_some());
                }
            }
        }
    }
    assert!(reports > 1000 && known > 1000, "{reports} reports, {known} with an estimate");
}

/// Simulated servers report as the agent's layer does, which writes the response headers before the request has left.
#[test]
fn a_response_reports_while_its_query_still_counts() {
    let scenario = SimScenario { deadline: None, ..scenario() };
    let mut world = World::new(&scenario, &SimArm::Prequal(ours()), 5);
    world.go();
    let mut left = 0;
    for server in &world.servers {
        for pair in server.log.windows(2) {
            let [(before, first), (at, Logged::Left { .. })] = pair else { continue };
            let stamped = matches!(first, Logged::Reported { leaving: Some(_), .. });
            assert!(stamped && before == at, "{first:?} at {before}, left at {at}");
            left += 1;
        }
    }
    assert!(left > 1000, "{left}");
}

/// Returns the mean time, in milliseconds, that queries wait for one of `slots` slots. The mean service time is 40 ms.
/// A random choice splits Poisson arrivals into independent Poisson arrivals, so ten servers count as ten trials.
fn mean_wait(slots: usize, load: f64, sizes: Sizes) -> f64 {
    let mut scenario = SimScenario::testbed(10, 1.0, Spare::None);
    scenario.servers = vec![ServerSpec::slots(slots, 40.0); 10];
    scenario.load = SimLoad::Poisson(10.0 * load * slots as f64 / 0.04);
    (scenario.clients, scenario.sizes, scenario.deadline) = (1, sizes, None);
    (scenario.warm_up, scenario.measured) = (10.0, 400.0);
    let samples = run(&scenario, &SimArm::Random, 1).samples;
    let mean = samples.iter().map(|sample| f64::from(sample.latency_us)).sum::<f64>() / samples.len() as f64;
    // The way through the network to the server and back takes 0.6 ms on average.
    mean / 1e3 - 40.0 - 0.6
}

#[test]
fn queries_wait_for_a_slot_as_long_as_queueing_theory_says() {
    // M/M/4 at 70 %: the probability of waiting (Erlang's C) times the mean wait of those that wait.
    let (slots, offered) = (4, 2.8f64);
    let mut blocked = 1.0;
    for servers in 1..=slots {
        blocked = offered * blocked / (f64::from(servers) + offered * blocked);
    }
    let load = offered / f64::from(slots);
    let waits = blocked / (1.0 - load * (1.0 - blocked));
    let known = waits * 40.0 / (f64::from(slots) * (1.0 - load));
    let got = mean_wait(4, load, Sizes::Exponential);
    assert!((got / known - 1.0).abs() < 0.04, "M/M/4: {got} ms, not {known}");
    // M/D/1: half of the wait with exponential sizes.
    let known = 0.7 * 40.0 / (2.0 * 0.3);
    let got = mean_wait(1, 0.7, Sizes::Exact);
    assert!((got / known - 1.0).abs() < 0.04, "M/D/1: {got} ms, not {known}");
}

#[test]
fn waves_of_queries_have_both_rates() {
    let mut scenario = SimScenario::testbed(10, 1.0, Spare::None);
    scenario.load = SimLoad::Waves { low: 5.0, high: 500.0, seconds: 2.0 };
    (scenario.clients, scenario.warm_up, scenario.measured) = (1, 0.0, 80.0);
    let samples = run(&scenario, &SimArm::Random, 1).samples;
    let high = samples.iter().filter(|sample| sample.at_ms / 2000 % 2 == 1).count() as f64;
    let low = samples.len() as f64 - high;
    assert!((high / 20_000.0 - 1.0).abs() < 0.03 && (low / 200.0 - 1.0).abs() < 0.25, "{high} and {low}");
}

/// Half of the servers are half as fast as the others. From the end of the blackout on, a server's weight is
/// proportional to its knee divided by its latency.
#[test]
fn cswrr_weights_servers_by_their_capacity() {
    let mut scenario = SimScenario::testbed(8, 1.0, Spare::None);
    scenario.servers =
        (0..8).map(|server| ServerSpec::slots(4, if server < 4 { 40.0 } else { 80.0 })).collect();
    (scenario.load, scenario.sizes, scenario.deadline) = (SimLoad::Poisson(400.0), Sizes::Exponential, None);
    (scenario.clients, scenario.warm_up, scenario.measured) = (1, 0.0, 60.0);
    let run = run(&scenario, &SimArm::Cswrr(cswrr::Settings::DEFAULT), 1);
    let to_slow = |from: f64, to: f64| run.share(|server| server >= 4, |at| (from..to).contains(&at));
    assert!((to_slow(0.0, 10.0) - 0.5).abs() < 0.01, "equal shares at first: {}", to_slow(0.0, 10.0));
    assert!((to_slow(20.0, 60.0) - 1.0 / 3.0).abs() < 0.03, "{}", to_slow(20.0, 60.0));
}

#[test]
fn a_remembered_key_costs_less() {
    let mut scenario = SimScenario::testbed(1, 1.0, Spare::None);
    let cache = Some(CacheSpec { entries: 50, miss: 10.0 });
    scenario.servers = vec![ServerSpec { cache, ..ServerSpec::new(10.0, SimService::Delay) }];
    (scenario.clients, scenario.sizes, scenario.deadline) = (1, Sizes::Exact, None);
    (scenario.load, scenario.keys) = (SimLoad::Poisson(200.0), Some(Keys { count: 100, exponent: 0.0 }));
    let samples = run(&scenario, &SimArm::Random, 1).samples;
    let hits = samples.iter().filter(|sample| sample.latency_us < 15_000).count();
    let share = hits as f64 / samples.len() as f64;
    assert!((share - 0.5).abs() < 0.02, "half of the keys fit, so half of the queries hit: {share}");
    assert!(samples.iter().all(|sample| sample.latency_us < 105_000));
}
