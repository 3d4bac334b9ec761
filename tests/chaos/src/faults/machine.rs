//! A machine with too few resources: descriptors, processors.

use std::process::{Command, Stdio};
use std::sync::PoisonError;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::fault::{Fault, Goal, Scope, nothing_missing};

const HOLD: Duration = Duration::from_secs(5);

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "descriptors",
        what: "an agent may open no more descriptors (RLIMIT_NOFILE) for 5 s",
        scope: Scope::Replicas,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| {
            let Some(pid) = site.bed.pods[site.replica()].agent_pid() else { return Ok(()) };
            let open = std::fs::read_dir(format!("/proc/{pid}/fd"))?.count();
            limit_descriptors(pid, Some(open as u64))
        },
        end: |site| {
            let Some(pid) = site.bed.pods[site.replica()].agent_pid() else { return Ok(()) };
            limit_descriptors(pid, None)
        },
        missing: nothing_missing,
    },
    Fault {
        name: "busy-cores",
        what: "two processes per core compute for 5 s",
        scope: Scope::Machine,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| {
            let cores = std::thread::available_parallelism()?.get();
            for _ in 0..2 * cores {
                let hog = Command::new(std::env::current_exe()?).arg("hog").stdin(Stdio::null()).spawn()?;
                site.bed.hogs.lock().unwrap_or_else(PoisonError::into_inner).push(hog);
            }
            Ok(())
        },
        end: |site| {
            site.bed.end_hogs();
            Ok(())
        },
        missing: nothing_missing,
    },
];

/// Sets the soft limit of `pid`, or with `None` resets it to its hard limit.
fn limit_descriptors(pid: u32, limit: Option<u64>) -> Result<()> {
    let pid = libc::pid_t::try_from(pid)?;
    // SAFETY: both calls get valid pointers to a local rlimit, or none.
    let done = unsafe {
        let mut limits: libc::rlimit = std::mem::zeroed();
        libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut limits) == 0 && {
            limits.rlim_cur = limit.unwrap_or(limits.rlim_max);
            libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const limits, std::ptr::null_mut()) == 0
        }
    };
    ensure!(done, "setting RLIMIT_NOFILE: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Computes until it is killed, for at most a minute; started by `busy-cores`.
pub(crate) fn hog() -> Result<()> {
    let end = std::time::Instant::now().checked_add(Duration::from_secs(60)).context("a minute")?;
    let mut number = 1_u64;
    while std::time::Instant::now() < end {
        for _ in 0..1_000_000 {
            number = std::hint::black_box(number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
    }
    Ok(())
}
