//! A replica stalls in the middle of a run, as in a long garbage collection, and heals (the scenario of seed 001).
//!
//! The whole run is judged, including the cold start and the first seconds of the stall.

use std::time::Duration;

use crate::arm::Arm;
use crate::backends::{Change, Fleet, Replica, Service};
use crate::deployment::Event;
use crate::recovery::Watch;
use crate::scenario::{Goal, Load, Marked, Scenario};

const REPLICAS: usize = 11;
/// The replica that stalls.
const STALLED: u16 = 10;
const USUAL: Service = Service::Normal { mean_ms: 167.0, sd_ms: 5.0 };

/// A run of `seconds`, with the stall in the middle half.
pub(crate) fn scenario(seconds: Duration) -> Scenario {
    let change = |service| Event::Backend(STALLED, Change::Service(service));
    Scenario {
        name: "stall".to_owned(),
        title: format!(
            "{REPLICAS} replicas at 167 ± 5 ms, 1000 requests/s, one at 2 s in the middle half of {} s",
            seconds.as_secs()
        ),
        fleet: Fleet::of(REPLICAS, Replica::new(USUAL)),
        load: Load::constant(1000),
        workers: 1,
        arms: Arm::USUAL.to_vec(),
        judged: Duration::ZERO..seconds,
        schedule: vec![(seconds / 4, change(Service::Sleep { ms: 2000 })), (seconds * 3 / 4, change(USUAL))],
        good_within: Duration::from_secs(1),
        marked: Some(Marked { replicas: STALLED..STALLED + 1, label: "the stalling one" }),
        watch: Some(Watch { replica: STALLED, within: Duration::from_secs(10), part: 0.5 }),
        goals: vec![Goal::Good(0.998), Goal::Back],
    }
}
