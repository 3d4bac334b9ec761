//! The definition of a fault: data and two functions. [`crate::faults`] lists all faults.

use std::time::Duration;

use anyhow::Result;

use crate::bed::Bed;

/// One fault.
pub(crate) struct Fault {
    /// Name on the command line.
    pub(crate) name: &'static str,
    /// Description for the table.
    pub(crate) what: &'static str,
    pub(crate) scope: Scope,
    /// Time from the end of `begin` to the start of `end`.
    pub(crate) hold: Duration,
    pub(crate) goal: Goal,
    /// Makes the fault happen. For a series of events, returns after the last one.
    pub(crate) begin: fn(&Site) -> Result<()>,
    /// Undoes it; always called, even if `begin` failed.
    pub(crate) end: fn(&Site) -> Result<()>,
    /// What this machine lacks for the fault, if anything.
    pub(crate) missing: fn(&Bed) -> Option<String>,
}

/// What a fault affects. Faults that affect the same thing are not paired, because it would be unclear which of them
/// caused a result.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Scope {
    /// Some replicas; paired faults get different ones.
    Replicas,
    /// All replicas, one after the other.
    Fleet,
    /// The process, listener or clusters of Envoy.
    Envoy,
    /// The machine or its network.
    Machine,
}

/// The allowed cost of a fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Goal {
    /// Maximum number of users' errors, apart from the fault's own.
    pub(crate) errors: usize,
    /// Maximum time from the end of the fault until no request fails or is late. The limit until each replica has its
    /// traffic back is the same for all faults.
    pub(crate) recovery: Duration,
}

impl Goal {
    /// No error, and recovery within `seconds`.
    pub(crate) const fn within(seconds: u64) -> Self {
        Self { errors: 0, recovery: Duration::from_secs(seconds) }
    }
}

/// Where a fault happens.
pub(crate) struct Site<'a> {
    pub(crate) bed: &'a Bed,
    /// Three replicas reserved for this fault.
    pub(crate) replicas: [usize; 3],
}

impl Site<'_> {
    /// The affected replica, for a fault that affects only one.
    pub(crate) fn replica(&self) -> usize {
        self.replicas[0]
    }
}

/// For faults that need nothing special.
pub(crate) fn nothing_missing(_: &Bed) -> Option<String> {
    None
}
