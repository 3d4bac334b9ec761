//! Each replica has a cache that is too small for all keys: sending a request to a replica that has its key cached
//! saves nine tenths of the work.

use std::time::Duration;

use super::FIRST;
use crate::arm::Arm;
use crate::backends::{Fleet, ReplicaSpec, Service};
use crate::load::{Arrivals, Keys, Spread};
use crate::scenario::{Goal, Load, Scenario};

const REPLICAS: usize = 8;
/// The fleet can serve this rate even without any cache hit: 8 × 4 / 0.1 s = 320.
const PER_SECOND: u32 = 300;
/// Probes every replica, and sends the key as the hint. A replica that has the key cached then reports less load.
const ALL: Arm = Arm::Hinted(8);
/// Number of keys that a replica caches: the most recently used.
const ENTRIES: usize = 200;
/// Six times the size of one cache, and less than all caches together.
const KEYS: Keys = Keys { count: 1200, exponent: 1.0 };

/// A run of `seconds`, preceded by a third of that time in which the caches fill.
pub(super) fn scenario(seconds: Duration) -> Scenario {
    let replica = ReplicaSpec::new(Service::Cache { entries: ENTRIES, hit_ms: 10, miss_ms: 100 });
    let filling = FIRST.max(seconds / 3);
    Scenario {
        name: "affinity".to_owned(),
        title: format!(
            "{REPLICAS} replicas, {ENTRIES} keys cached each, hit 10 ms, miss 100 ms; {} Zipf keys, {PER_SECOND} requests/s Poisson",
            KEYS.count
        ),
        fleet: Fleet::of(REPLICAS, replica.with_slots(4, 1000)),
        load: Load::Open {
            arrivals: Arrivals::Poisson(PER_SECOND),
            keys: Some(KEYS),
            spread: Spread::InTurn,
        },
        workers: 1,
        arms: vec![Arm::LeastRequest, Arm::Cswrr, Arm::RingHash, Arm::Prequal, Arm::Hinted(3), ALL],
        judged: filling..filling + seconds,
        schedule: Vec::new(),
        streams: 0,
        good_within: Duration::from_millis(50),
        marked: None,
        watch: None,
        goals: vec![Goal::NoWorseThan(Arm::LeastRequest), Goal::BeatenByHint(ALL)],
    }
}
