//! What a fault is: data, and two functions. [`crate::faults`] has all of them.

use std::time::Duration;

use anyhow::Result;

use crate::bed::Bed;

/// One fault.
pub(crate) struct Fault {
    /// As on the command line.
    pub(crate) name: &'static str,
    /// What happens, for the table.
    pub(crate) what: &'static str,
    pub(crate) scope: Scope,
    /// From the end of `begin` to the start of `end`.
    pub(crate) hold: Duration,
    pub(crate) goal: Goal,
    /// Makes it happen. One that is a series of events returns after the last.
    pub(crate) begin: fn(&Site) -> Result<()>,
    /// Undoes it; called in any case, also after a `begin` that failed.
    pub(crate) end: fn(&Site) -> Result<()>,
    /// What this machine lacks for it.
    pub(crate) missing: fn(&Bed) -> Option<String>,
}

/// What a fault touches. Two that touch the same thing form no pair: it would be unclear which of them caused a result.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Scope {
    /// Some replicas; a pair of these gets different ones.
    Replicas,
    /// All replicas, one after the other.
    Fleet,
    /// The process, listener or clusters of Envoy.
    Envoy,
    /// The machine or its network.
    Machine,
}

/// What a fault may cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Goal {
    /// Users' errors besides the fault's own.
    pub(crate) errors: usize,
    /// From its end until no request fails or is late. Until each replica has its traffic back, all are given the same time.
    pub(crate) recovery: Duration,
}

impl Goal {
    /// No error, and recovery within so many seconds.
    pub(crate) const fn within(seconds: u64) -> Self {
        Self { errors: 0, recovery: Duration::from_secs(seconds) }
    }
}

/// Where a fault happens.
pub(crate) struct Site<'a> {
    pub(crate) bed: &'a Bed,
    /// Three replicas that are its own.
    pub(crate) replicas: [usize; 3],
}

impl Site<'_> {
    /// The replica that it happens to, if it is one.
    pub(crate) fn replica(&self) -> usize {
        self.replicas[0]
    }
}

/// For faults that need nothing special.
pub(crate) fn nothing_missing(_: &Bed) -> Option<String> {
    None
}
