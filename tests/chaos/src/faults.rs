//! All faults, grouped by what they affect. To add a fault, add an entry to one of the lists.

mod agents;
mod backends;
mod envoy;
mod lies;
mod machine;
mod network;

use crate::fault::Fault;

pub(crate) use machine::{hog, memory_hog};

/// Every fault, in the order of the table.
pub(crate) fn all() -> impl Iterator<Item = &'static Fault> {
    [agents::FAULTS, lies::FAULTS, backends::FAULTS, envoy::FAULTS, machine::FAULTS, network::FAULTS]
        .into_iter()
        .flatten()
}

/// The faults that `--short` runs: those of agents, backends and Envoy in which most can go wrong.
pub(crate) const SHORT: [&str; 5] =
    ["agent-killed", "backend-killed", "backend-goaway", "listener-update", "replicas-churn"];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_the_short_form_names_exist() {
        let names: BTreeSet<_> = all().map(|fault| fault.name).collect();
        assert_eq!(names.len(), all().count());
        assert!(names.len() >= 20, "{}", names.len());
        assert!(SHORT.iter().all(|name| names.contains(name)), "{names:?}");
    }
}
