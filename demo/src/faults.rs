//! The list of faults, for the page and for `cargo xtask fault`.

use serde_json::{Value, json};

/// The program that can carry out a fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum By {
    /// The page, by a request to the program concerned.
    Page,
    /// `cargo xtask` on the host: the fault needs the container engine, whose socket no container here has.
    Host,
}

/// The target of a fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Target {
    /// One replica, by default this one.
    Replica(u16),
    /// A replica with an antagonist beside it, by default this one.
    Neighboured(u16),
    /// A component of which there is only one.
    Only,
}

/// One fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    pub(crate) by: By,
    pub(crate) target: Target,
    /// Default duration, seconds. 0 for a fault that ends at once, because Docker restarts the program.
    pub(crate) seconds: u64,
}

impl Fault {
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        FAULTS.iter().find(|fault| fault.name == name)
    }

    pub(crate) fn json(&self) -> Value {
        let (replica, any) = match self.target {
            Target::Replica(number) => (Some(number), true),
            Target::Neighboured(number) => (Some(number), false),
            Target::Only => (None, false),
        };
        json!({
            "name": self.name,
            "what": self.what,
            "by": match self.by { By::Page => "page", By::Host => "host" },
            "replica": replica,
            "any_replica": any,
            "seconds": self.seconds,
        })
    }
}

/// Factor by which the slow replica's wait grows.
pub(crate) const SLOW_FACTOR: u32 = 10;

/// Share of a sinkhole's requests that fail at once.
pub(crate) const SINKHOLE_SHARE: f64 = 0.5;

/// All faults, in the order in which the page shows them.
pub(crate) const FAULTS: [Fault; 11] = [
    Fault {
        name: "slow",
        what: "the service waits ten times as long",
        by: By::Page,
        target: Target::Replica(3),
        seconds: 20,
    },
    Fault {
        name: "antagonist",
        what: "a neighbour burns CPU on the replica's core",
        by: By::Page,
        target: Target::Neighboured(8),
        seconds: 20,
    },
    Fault {
        name: "sinkhole",
        what: "half of the requests fail at once with 503",
        by: By::Page,
        target: Target::Replica(4),
        seconds: 20,
    },
    Fault {
        name: "hang",
        what: "requests are accepted and not answered",
        by: By::Page,
        target: Target::Replica(5),
        seconds: 20,
    },
    Fault {
        name: "crash",
        what: "the service dies; Docker starts it again, within a second or so",
        by: By::Page,
        target: Target::Replica(6),
        seconds: 0,
    },
    Fault {
        name: "agent-kill",
        what: "the agent is killed; its container is started again at the end",
        by: By::Host,
        target: Target::Replica(2),
        seconds: 10,
    },
    Fault {
        name: "loss",
        what: "the replica loses 3 % of the packets sent to it",
        by: By::Host,
        target: Target::Replica(1),
        seconds: 20,
    },
    Fault {
        name: "delay",
        what: "every packet that the replica sends is 50 ms late (netem)",
        by: By::Host,
        target: Target::Replica(1),
        seconds: 20,
    },
    Fault {
        name: "endpoint-remove",
        what: "discovery removes the replica",
        by: By::Page,
        target: Target::Replica(2),
        seconds: 20,
    },
    Fault {
        name: "endpoint-add",
        what: "discovery adds the spare replica",
        by: By::Page,
        target: Target::Only,
        seconds: 20,
    },
    Fault {
        name: "envoy-restart",
        what: "the Envoy with Prequal exits; Docker starts it again, with an empty pool",
        by: By::Page,
        target: Target::Only,
        seconds: 0,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        for fault in FAULTS {
            assert_eq!(FAULTS.iter().filter(|other| other.name == fault.name).count(), 1);
            assert_eq!(Fault::named(fault.name).map(|found| found.what), Some(fault.what));
        }
        assert!(Fault::named("flood").is_none());
    }
}
