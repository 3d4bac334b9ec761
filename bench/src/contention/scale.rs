//! The scale of the model: the paper's testbed (§5) on two cores.
//!
//! On the paper's machines a query gets at most one core, and a replica is allocated about 6.4 cores: several queries
//! run side by side before the allocation is used up. Two cores have no room for this, so a query here gets at most a
//! hundredth of a core ([`CORE`]), and all amounts of CPU time are a hundredth of the paper's. Wall-clock times are the
//! paper's own.

use std::time::Duration;

/// A core of the paper's machines, in cores of this machine.
pub(super) const CORE: f64 = 0.01;
/// A replica's allocation in cores of the model, as in the simulator.
pub(super) const ALLOCATION: f64 = crate::sim::scenario::ALLOCATION;
/// Maximum spare capacity that a machine has for its replica, in allocations. A machine's capacity is this plus the
/// replica's own allocation.
pub(super) const ROOM: f64 = 1.5;
/// Period of the machines' quota: short compared with a query, but long enough for a quota of at least 1 ms, the
/// kernel's minimum.
pub(super) const PERIOD: Duration = Duration::from_millis(10);
/// Number of replicas, each on a machine of its own.
pub(super) const REPLICAS: usize = 8;
/// Deadline of a query.
pub(super) const DEADLINE: Duration = Duration::from_secs(5);

/// Cores of this machine that are allocated to one replica.
pub(super) fn allocation() -> f64 {
    ALLOCATION * CORE
}

/// Cores of this machine that one machine of the model has.
pub(super) fn machine() -> f64 {
    allocation() * (1.0 + ROOM)
}

/// Queries per second over the whole fleet at which the mean work is `load` times the allocation.
pub(super) fn rate(load: f64) -> f64 {
    let mean_work = crate::sim::scenario::WORK_MS * crate::sim::scenario::TRUNCATED_MEAN / 1e3;
    load * REPLICAS as f64 * ALLOCATION / mean_work
}
