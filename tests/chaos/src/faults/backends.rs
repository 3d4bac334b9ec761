//! Backends that die, hang and misbehave behind agents that keep running.

use std::time::Duration;

use anyhow::Result;

use crate::backend::Mode;
use crate::bed::REPLICAS;
use crate::fault::{Fault, Goal, Scope, Site, nothing_missing};

const HOLD: Duration = Duration::from_secs(5);

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "backend-killed",
        what: "SIGKILL of a backend; started again after 5 s",
        scope: Scope::Replicas,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| {
            site.bed.pods[site.replica()].kill_backend(&site.bed.harm);
            Ok(())
        },
        end: |site| site.bed.pods[site.replica()].start_backend(),
        missing: nothing_missing,
    },
    Fault {
        name: "backends-killed-in-turn",
        what: "SIGKILL of every backend, one after the other, each started again after a second",
        scope: Scope::Fleet,
        hold: Duration::ZERO,
        goal: Goal::within(5),
        begin: |site| {
            for number in 0..REPLICAS {
                let pod = &site.bed.pods[number];
                pod.kill_backend(&site.bed.harm);
                std::thread::sleep(Duration::from_secs(1));
                pod.start_backend()?;
            }
            Ok(())
        },
        end: |site| site.bed.pods.iter().try_for_each(|pod| pod.start_backend()),
        missing: nothing_missing,
    },
    Fault {
        name: "backend-hung",
        what: "SIGSTOP of a backend for 5 s",
        scope: Scope::Replicas,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| {
            site.bed.pods[site.replica()].signal_backend(libc::SIGSTOP);
            Ok(())
        },
        end: |site| {
            site.bed.pods[site.replica()].signal_backend(libc::SIGCONT);
            Ok(())
        },
        missing: nothing_missing,
    },
    Fault {
        name: "backend-mute",
        what: "a backend sends nothing on new connections for 700 ms: no SETTINGS, like a server that is starting",
        scope: Scope::Replicas,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| order(site, Mode::Mute(700)),
        end: well,
        missing: nothing_missing,
    },
    Fault {
        name: "backend-slow",
        what: "a backend takes 300 ms longer",
        scope: Scope::Replicas,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| order(site, Mode::Slow(300)),
        end: well,
        missing: nothing_missing,
    },
    Fault {
        name: "backend-fails",
        what: "a backend answers 30 % of its requests with 503, at once",
        scope: Scope::Replicas,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| order(site, Mode::Fail(30)),
        end: well,
        missing: nothing_missing,
    },
    Fault {
        name: "backend-resets",
        what: "a backend breaks off (RST) the connections of 5 % of its requests",
        scope: Scope::Replicas,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| order(site, Mode::Reset(5)),
        end: well,
        missing: nothing_missing,
    },
    Fault {
        name: "backend-goaway",
        what: "a backend ends each connection after 200 ms: GOAWAY, `connection: close`",
        scope: Scope::Replicas,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| order(site, Mode::GoAway),
        end: well,
        missing: nothing_missing,
    },
    Fault {
        name: "backend-empty-frames",
        what: "a backend sends an empty DATA frame after each gRPC message for 15 s",
        scope: Scope::Replicas,
        // Long enough for a connection to carry a few hundred of these frames.
        hold: Duration::from_secs(15),
        goal: Goal::within(5),
        begin: |site| order(site, Mode::EmptyFrames),
        end: well,
        missing: nothing_missing,
    },
    Fault {
        name: "backend-half-closed",
        what: "a backend closes its half of each connection after 200 ms and reads on",
        scope: Scope::Replicas,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| order(site, Mode::HalfClose),
        end: well,
        missing: nothing_missing,
    },
];

fn order(site: &Site, mode: Mode) -> Result<()> {
    site.bed.pods[site.replica()].order(mode)
}

fn well(site: &Site) -> Result<()> {
    order(site, Mode::Well)
}
