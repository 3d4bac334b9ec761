//! A replica stalls in the middle of a run, as in a long garbage collection, and heals (the scenario of Finagle's
//! post).
//!
//! The whole run is judged, including the cold start and the first seconds of the stall.

use std::time::Duration;

use crate::arm::Arm;
use crate::backends::{Change, Fleet, ReplicaSpec, Service};
use crate::deployment::ReplicaEvent;
use crate::recovery::Watch;
use crate::scenario::{Goal, Load, Marked, Scenario};

const REPLICAS: usize = 11;
const PER_SECOND: u32 = 1000;
/// The replica that stalls.
const STALLED: u16 = 10;
/// Maximum number of late requests in a minute, 0.04 %. Most of them are in flight at the replica when it stalls, and
/// no policy can save them. A longer run is allowed proportionally more.
const LATE: u32 = 24;
const USUAL: Service = Service::Normal { mean_ms: 167.0, sd_ms: 5.0 };

/// A run of `seconds`, with the stall in the middle half.
pub(crate) fn scenario(seconds: Duration) -> Scenario {
    let change = |service| ReplicaEvent::Backend(STALLED, Change::Service(service));
    Scenario {
        name: "stall".to_owned(),
        title: format!(
            "{REPLICAS} replicas at 167 ± 5 ms, {PER_SECOND} requests/s, one at 2 s in the middle half of {} s",
            seconds.as_secs()
        ),
        fleet: Fleet::of(REPLICAS, ReplicaSpec::new(USUAL)),
        load: Load::constant(PER_SECOND),
        workers: 1,
        arms: Arm::USUAL.to_vec(),
        judged: Duration::ZERO..seconds,
        schedule: vec![(seconds / 4, change(Service::Sleep { ms: 2000 })), (seconds * 3 / 4, change(USUAL))],
        streams: 0,
        good_within: Duration::from_secs(1),
        marked: Some(Marked { replicas: STALLED..STALLED + 1, label: "the stalling one" }),
        watch: Some(Watch { replica: STALLED, within: Duration::from_secs(10), part: 0.5 }),
        goals: vec![Goal::Good(good(seconds)), Goal::Back],
    }
}

/// Minimum share of good requests in a run of `seconds`: 99.96 % for a minute or more. A shorter run may have as many
/// late requests as a run of a minute.
fn good(seconds: Duration) -> f64 {
    let requests = seconds.as_secs_f64().min(60.0) * f64::from(PER_SECOND);
    (requests - f64::from(LATE)) / requests
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_requests_may_be_late_in_a_short_run_as_in_a_minute() {
        let late = |seconds| (1.0 - good(Duration::from_secs(seconds))) * seconds as f64 * 1000.0;
        assert_eq!([12, 60, 300].map(|seconds| late(seconds).round()), [24.0, 24.0, 120.0]);
    }
}
