use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::sim::balancer::Prequal;
use crate::sim::plans::{ours, paper};
use crate::sim::scenario::NORMAL;
use crate::sim::server::Logged;

/// Small and overloaded, so that queries queue, miss deadlines, fail and are refused.
fn scenario() -> Scenario {
    let mut scenario = Scenario::testbed(10, 1.6, NORMAL);
    scenario.servers[0].failing = 0.2;
    (scenario.servers[1].slots, scenario.servers[1].queue) = (8, 4);
    scenario.changes = vec![(3.0, Change::Frozen(2, true)), (4.0, Change::Frozen(2, false))];
    (scenario.warm_up, scenario.measured) = (1.0, 8.0);
    scenario
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_seed_another() {
    for arm in [Arm::Prequal(paper()), Arm::Prequal(ours()), Arm::WeightedRoundRobin, Arm::Yarp] {
        let (once, again) = (run(&scenario(), &arm, 7), run(&scenario(), &arm, 7));
        assert_eq!((&once.samples, once.events), (&again.samples, again.events), "{arm:?}");
        assert_ne!(once.samples, run(&scenario(), &arm, 8).samples);
    }
}

#[test]
fn every_policy_meets_the_same_arrivals() {
    let arrivals = |arm| -> Vec<u32> { run(&scenario(), &arm, 7).samples.iter().map(|s| s.at_ms).collect() };
    assert_eq!(arrivals(Arm::Random), arrivals(Arm::Prequal(paper())));
}

#[test]
fn every_query_ends_once_and_nothing_is_left_behind() {
    let scenario = scenario();
    let mut world = World::new(&scenario, &Arm::Prequal(Prequal { learn: true, ..ours() }), 3);
    world.go();
    assert!(world.assigned.iter().all(|assigned| *assigned == 0), "{:?}", world.assigned);
    assert!(world.servers.iter().all(|server| server.rif() == 0 && server.running == 0));
    assert_eq!(world.queries.items.len(), world.queries.free.len());
    assert!(world.run.samples.iter().any(|sample| sample.latency_us == FAILED), "the test must see failures");
}

/// What the simulated servers reported, the agent reports too when it sees the same requests.
#[test]
fn the_agent_agrees_with_the_simulated_servers() {
    // Both estimators: ours and the paper's.
    for arm in [Arm::Prequal(ours()), Arm::Prequal(paper())] {
        agent_agrees(&arm);
    }
}

fn agent_agrees(arm: &Arm) {
    let scenario = scenario();
    let mut world = World::new(&scenario, arm, 5);
    world.go();
    let endpoint = super::super::balancer::endpoint(0);
    let (mut reports, mut known) = (0, 0);
    for server in &world.servers {
        let clock = Arc::new(AtomicU64::new(0));
        let shown = Arc::clone(&clock);
        let load =
            probe_agent::load::Load::with_clock(arm.tracker(), move || micros(shown.load(Ordering::Relaxed)));
        let mut open: HashMap<Nanos, Vec<probe_agent::load::InFlight>> = HashMap::new();
        for (at, logged) in &server.log {
            clock.store(*at, Ordering::Relaxed);
            match logged {
                Logged::Arrived => open.entry(*at).or_default().push(load.start()),
                Logged::Left { arrived, outcome } => {
                    open.get_mut(arrived).unwrap().remove(0).finish(*outcome);
                }
                Logged::Reported { report, held } => {
                    let told = load.report(endpoint, None, 0);
                    assert_eq!((told.rif, told.latency_us), *report, "at {at} ns");
                    assert_eq!(told.rif as usize, *held, "the model's own count at {at} ns");
                    reports += 1;
                    known += usize::from(report.1.is_some());
                }
            }
        }
    }
    assert!(reports > 1000 && known > 1000, "{reports} reports, {known} with an estimate");
}
