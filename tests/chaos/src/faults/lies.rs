//! Agents that lie about their load or their name, or send garbage.

use std::time::Duration;

use anyhow::Result;

use crate::backend::Mode;
use crate::bed::REPLICAS;
use crate::fault::{Fault, Goal, Scope, Site, nothing_missing};

const HOLD: Duration = Duration::from_secs(5);
/// Longer than the default drain of an agent.
const DRAIN: Duration = Duration::from_secs(40);

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "agent-lies-idle",
        what: "a replica that takes four times as long reports that it is idle and fast",
        scope: Scope::Replicas,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| replace(site, Mode::LieIdle),
        end: restore,
        missing: nothing_missing,
    },
    Fault {
        name: "agent-lies-busy",
        what: "a replica reports that it is busier and slower than any other",
        scope: Scope::Replicas,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| replace(site, Mode::LieBusy),
        end: restore,
        missing: nothing_missing,
    },
    Fault {
        name: "agent-lies-garbage",
        what: "a replica's reports are garbage, of ten kinds",
        scope: Scope::Replicas,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| replace(site, Mode::LieGarbage),
        end: restore,
        missing: nothing_missing,
    },
    Fault {
        name: "agent-lies-name",
        what: "an agent reports under the address of another replica",
        scope: Scope::Replicas,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| {
            let pod = &site.bed.pods[site.replica()];
            let other = site.bed.pods[(site.replica() + 1) % REPLICAS].addr();
            pod.terminate_agent(DRAIN)?;
            pod.start_agent(&["--advertise".to_owned(), other.to_string()])
        },
        end: |site| {
            let pod = &site.bed.pods[site.replica()];
            pod.terminate_agent(DRAIN)?;
            pod.start_agent(&[])
        },
        missing: nothing_missing,
    },
];

fn replace(site: &Site, mode: Mode) -> Result<()> {
    let pod = &site.bed.pods[site.replica()];
    pod.terminate_agent(DRAIN)?;
    pod.start_liar(mode)
}

fn restore(site: &Site) -> Result<()> {
    let pod = &site.bed.pods[site.replica()];
    pod.end_liar(&site.bed.harm);
    pod.start_agent(&[])
}
