//! Two generations of machines in one fleet, with few slots on each (the scenario of Netflix's post).

use std::time::Duration;

use super::FIRST;
use crate::arm::Arm;
use crate::backends::{Fleet, ReplicaSpec};
use crate::scenario::{Goal, Load, Marked, Scenario};

/// Replicas of each kind.
const REPLICAS: u16 = 20;

/// A run of `seconds` after [`FIRST`].
pub(super) fn scenario(seconds: Duration) -> Scenario {
    let kind = |ms| ReplicaSpec::sleeping(ms).with_slots(4, 8);
    let count = usize::from(REPLICAS);
    Scenario {
        name: "slow-half".to_owned(),
        title: format!(
            "{REPLICAS} replicas at 50 ms and {REPLICAS} at 250 ms, 4 slots and 8 waiting each, 800 requests/s Poisson"
        ),
        fleet: Fleet::of(count, kind(50)).and(count, kind(250)),
        load: Load::poisson(800),
        workers: 1,
        arms: Arm::USUAL.to_vec(),
        judged: FIRST..FIRST + seconds,
        schedule: Vec::new(),
        streams: 0,
        good_within: Duration::from_secs(1),
        marked: Some(Marked { replicas: REPLICAS..2 * REPLICAS, label: "the slow half" }),
        watch: None,
        goals: vec![Goal::MarkedShare(0.04), Goal::NoneRejected],
    }
}
