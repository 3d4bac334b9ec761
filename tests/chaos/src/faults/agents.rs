//! Agents that die, hang and are replaced.

use std::time::Duration;

use anyhow::Result;

use crate::bed::REPLICAS;
use crate::fault::{Fault, Goal, Scope, Site, nothing_missing};

const S: Duration = Duration::from_secs(1);

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "agent-killed",
        what: "SIGKILL of an agent; started again after 5 s",
        scope: Scope::Replicas,
        hold: Duration::from_secs(5),
        goal: Goal::within(5),
        begin: |site| {
            site.bed.pods[site.replica()].kill_agent(&site.bed.harm);
            Ok(())
        },
        end: start_agents,
        missing: nothing_missing,
    },
    Fault {
        name: "agents-killed",
        what: "SIGKILL of three of eight agents at once; started again after 5 s",
        scope: Scope::Replicas,
        hold: Duration::from_secs(5),
        goal: Goal::within(5),
        begin: |site| {
            site.bed.of(&site.replicas).for_each(|pod| pod.kill_agent(&site.bed.harm));
            Ok(())
        },
        end: start_agents,
        missing: nothing_missing,
    },
    Fault {
        name: "agent-flaps",
        what: "SIGKILL of an agent five times, a second apart; started again at once",
        scope: Scope::Replicas,
        hold: Duration::ZERO,
        goal: Goal::within(5),
        begin: |site| {
            let pod = &site.bed.pods[site.replica()];
            for _ in 0..5 {
                pod.kill_agent(&site.bed.harm);
                pod.start_agent(&[])?;
                std::thread::sleep(S);
            }
            Ok(())
        },
        end: start_agents,
        missing: nothing_missing,
    },
    Fault {
        name: "agent-hung",
        what: "SIGSTOP of an agent for 5 s",
        scope: Scope::Replicas,
        hold: Duration::from_secs(5),
        goal: Goal::within(5),
        begin: |site| {
            site.bed.pods[site.replica()].signal_agent(libc::SIGSTOP);
            Ok(())
        },
        end: |site| {
            site.bed.pods[site.replica()].signal_agent(libc::SIGCONT);
            Ok(())
        },
        missing: nothing_missing,
    },
    Fault {
        name: "agents-restarted",
        what: "SIGTERM of every agent, one after the other, each started again when it has ended",
        scope: Scope::Fleet,
        hold: Duration::ZERO,
        goal: Goal::within(5),
        begin: |site| {
            for number in 0..REPLICAS {
                let pod = &site.bed.pods[number];
                pod.terminate_agent(DRAIN)?;
                pod.start_agent(&[])?;
                std::thread::sleep(S / 2);
            }
            Ok(())
        },
        end: |site| site.bed.pods.iter().try_for_each(|pod| pod.start_agent(&[])),
        missing: nothing_missing,
    },
];

/// Longer than the default drain of an agent.
const DRAIN: Duration = Duration::from_secs(40);

fn start_agents(site: &Site) -> Result<()> {
    site.bed.of(&site.replicas).try_for_each(|pod| pod.start_agent(&[]))
}
