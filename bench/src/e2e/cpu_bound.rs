//! The replicas use up the CPU, so the CPU time of the filter, its probes and its reports reduces the throughput.
//!
//! All processes share the machine, so CPU time spent anywhere lowers the rate. A run with an empty module instead of
//! the filter shows Envoy's part of that cost.

use std::time::Duration;

use super::FIRST;
use crate::arm::Arm;
use crate::backends::{Fleet, ReplicaSpec, Service};
use crate::scenario::{Goal, Load, Scenario};

const REPLICAS: usize = 4;
/// Enough to keep every replica busy.
const CONNECTIONS: usize = 30;

/// A scenario for each amount of work per request.
pub(super) fn scenarios(seconds: Duration) -> Vec<Scenario> {
    [(4, 0.98), (1, 0.96)].map(|(ms, part)| scenario(ms, part, seconds)).into()
}

fn scenario(ms: u64, part: f64, seconds: Duration) -> Scenario {
    Scenario {
        name: format!("cpu-bound {ms} ms"),
        title: format!(
            "{REPLICAS} replicas with {ms} ms of work a request, {CONNECTIONS} closed-loop connections"
        ),
        fleet: Fleet::of(REPLICAS, ReplicaSpec::new(Service::Cpu { us: ms * 1000 })),
        load: Load::Closed { connections: CONNECTIONS },
        workers: 1,
        arms: vec![Arm::LeastRequest, Arm::Cswrr, Arm::EmptyModule, Arm::Prequal],
        judged: FIRST..FIRST + seconds,
        schedule: Vec::new(),
        streams: 0,
        good_within: Duration::from_secs(1),
        marked: None,
        watch: None,
        goals: vec![Goal::Throughput { of: Arm::LeastRequest, part }],
    }
}
