//! Faults of Envoy: its process, its listener, its filter, its endpoints.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use prequal_testbed::{Client, Request, wasm_module};

use crate::bed::{CLUSTER, Module, PROBE_CLUSTER, crashing_module};
use crate::fault::{Fault, Goal, Scope, Site, nothing_missing};

/// Time after which an updated listener has drained. In this test bed it drains for two seconds.
const DRAINED: Duration = Duration::from_millis(2500);

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "listener-update",
        what: "the listener is replaced three times, a second apart",
        scope: Scope::Envoy,
        hold: DRAINED,
        goal: Goal::within(5),
        begin: |site| {
            for _ in 0..3 {
                site.bed.edge().update_listener(&wasm_module())?;
                std::thread::sleep(Duration::from_secs(1));
            }
            Ok(())
        },
        end: nothing,
        missing: nothing_missing,
    },
    Fault {
        name: "vm-crash",
        what: "the filter panics three times, a second apart (a module built for it, swapped in and out by listener updates)",
        scope: Scope::Envoy,
        hold: Duration::ZERO,
        goal: Goal::within(5),
        begin: |site| {
            site.bed.edge().update_listener(&crashing_module())?;
            std::thread::sleep(DRAINED);
            for _ in 0..3 {
                crash(site)?;
                std::thread::sleep(Duration::from_secs(1));
            }
            Ok(())
        },
        end: |site| {
            site.bed.edge().update_listener(&wasm_module())?;
            std::thread::sleep(DRAINED);
            Ok(())
        },
        missing: |bed| {
            if bed.module == Module::Native {
                return Some("the native module runs in no VM".to_owned());
            }
            let module = crashing_module();
            (!module.exists()).then(|| format!("missing {}", module.display()))
        },
    },
    Fault {
        name: "hot-restart",
        what: "another Envoy takes over, and the old one ends 5 s later",
        scope: Scope::Envoy,
        hold: Duration::ZERO,
        goal: Goal::within(5),
        begin: |site| site.bed.hot_restart(),
        end: nothing,
        missing: nothing_missing,
    },
    Fault {
        name: "envoy-stalled",
        what: "SIGSTOP of Envoy for 2 s",
        scope: Scope::Envoy,
        hold: Duration::from_secs(2),
        goal: Goal::within(10),
        begin: |site| signal_envoy(site, libc::SIGSTOP),
        end: |site| signal_envoy(site, libc::SIGCONT),
        missing: nothing_missing,
    },
    Fault {
        name: "probe-cluster-gone",
        what: "the probe cluster has no endpoints for 5 s",
        scope: Scope::Envoy,
        hold: Duration::from_secs(5),
        goal: Goal::within(5),
        begin: |site| site.bed.edge().set_endpoints(PROBE_CLUSTER, &[0, 1, 2, 3, 4, 5, 6, 7]),
        end: all_endpoints,
        missing: nothing_missing,
    },
    Fault {
        name: "replicas-churn",
        what: "ten times, 400 ms apart, EDS removes one to three of the eight replicas, each time different ones",
        scope: Scope::Envoy,
        hold: Duration::ZERO,
        goal: Goal::within(10),
        begin: |site| {
            for round in 0..10_usize {
                let out: Vec<usize> = (0..=round % 3).map(|more| (round * 3 + more) % 8).collect();
                for cluster in [CLUSTER, PROBE_CLUSTER] {
                    site.bed.edge().set_endpoints(cluster, &out)?;
                }
                std::thread::sleep(Duration::from_millis(400));
            }
            Ok(())
        },
        end: all_endpoints,
        missing: nothing_missing,
    },
    Fault {
        name: "clock-forth",
        what: "Envoy's wall clock steps an hour forward",
        scope: Scope::Envoy,
        hold: Duration::from_secs(5),
        goal: Goal::within(5),
        begin: |site| step_clock(site, 3600),
        end: nothing,
        missing: no_clock,
    },
    Fault {
        name: "clock-back",
        what: "Envoy's wall clock steps an hour back",
        scope: Scope::Envoy,
        hold: Duration::from_secs(5),
        goal: Goal::within(5),
        begin: |site| step_clock(site, -3600),
        end: nothing,
        missing: no_clock,
    },
];

fn nothing(_: &Site) -> Result<()> {
    Ok(())
}

fn all_endpoints(site: &Site) -> Result<()> {
    [CLUSTER, PROBE_CLUSTER].into_iter().try_for_each(|cluster| site.bed.edge().set_endpoints(cluster, &[]))
}

/// Makes the VM of one worker panic. Requests in flight on that worker are lost, and so are requests that arrive before
/// it has a new VM.
fn crash(site: &Site) -> Result<()> {
    let client = Client::new(site.bed.edge().addr());
    site.bed.harm.note(None, || {
        let crash = client.send(Request::get("/").header("x-crash-prequal", "1"))?;
        ensure!(crash.status == 503, "the filter did not crash: {}", crash.status);
        // The same connection means the same worker. Envoy creates a new VM after 0.1 s, with the next request.
        let start = Instant::now();
        while client.get("/")?.status != 200 {
            if start.elapsed() > Duration::from_secs(5) {
                bail!("the filter does not come back");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    })
}

fn signal_envoy(site: &Site, signal: i32) -> Result<()> {
    let pid = libc::pid_t::try_from(site.bed.edge().pid())?;
    // SAFETY: kill takes plain integers; the child is not reaped, so that no other process has its id.
    unsafe { libc::kill(pid, signal) };
    Ok(())
}

fn step_clock(site: &Site, seconds: i64) -> Result<()> {
    let Some(file) = &site.bed.clock else { bail!("Envoy's clock cannot be stepped") };
    crate::clock::step(file, seconds)
}

fn no_clock(bed: &crate::bed::Bed) -> Option<String> {
    bed.clock.is_none().then(|| "no C compiler (cc) to build the library that steps Envoy's clock".to_owned())
}
