//! The same ramp in the simulator: same scale, same antagonists, the same number of replicas, one client.

use std::time::Duration;

use super::figures::StepFigures;
use super::policy::Policy;
use super::ramp::{Ramp, SETTLING, WARM_UP};
use super::scale::{DEADLINE, REPLICAS};
use crate::sim::engine;
use crate::sim::scenario::{SimChange, SimScenario, Spare};

/// Simulates one step of the ramp under a policy.
pub(super) fn step(ramp: &Ramp, step: usize, policy: Policy, pass: u64) -> StepFigures {
    let warm_up = WARM_UP + SETTLING;
    let mut scenario = SimScenario::testbed(REPLICAS, ramp.loads[step], Spare::None);
    // One Envoy with one worker.
    scenario.clients = 1;
    scenario.warm_up = warm_up.as_secs_f64();
    scenario.measured = ramp.measured.as_secs_f64();
    scenario.deadline = Some(DEADLINE.as_secs_f64());
    scenario.changes = changes(ramp, ramp.from(step) - warm_up, warm_up + ramp.measured, pass);
    let latencies = engine::run(&scenario, &policy.simulated(), pass).latencies();
    StepFigures::of(|q| latencies.ms(q), latencies.failed())
}

/// What the antagonists do in a part of the ramp.
fn changes(ramp: &Ramp, start: Duration, length: Duration, pass: u64) -> Vec<(f64, SimChange)> {
    let courses = ramp.courses(pass).into_iter().enumerate();
    courses
        .flat_map(|(server, course)| {
            let part = course.part(start, length).into_iter();
            part.map(move |(at, spare)| (at.as_secs_f64(), SimChange::Spare(server, spare)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_simulator_follows_the_antagonists() {
        let ramp = Ramp { loads: vec![0.75, 1.27], measured: Duration::from_secs(10) };
        let light = step(&ramp, 0, Policy::Wrr, 1);
        // Work alone has a median of 80 ms.
        assert!((78.0..95.0).contains(&light.quantiles_ms[0]), "{light:?}");
        let p99 = |policy| step(&ramp, 1, policy, 1).quantiles_ms[super::super::figures::P99];
        assert!(p99(Policy::Wrr) > 2.0 * p99(Policy::Prequal), "full machines are too much for WRR");
    }
}
