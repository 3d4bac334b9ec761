//! A machine with too few resources: descriptors, memory, processors.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::cgroup::{self, LIMIT_MB, Tight};
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
        name: "memory",
        what: "an agent's control group is at its memory limit for 5 s: a neighbour fills it, is killed, and fills it again",
        scope: Scope::Replicas,
        hold: Duration::ZERO,
        goal: Goal::within(5),
        begin: |site| {
            let Some(pid) = site.bed.pods[site.replica()].agent_pid() else { return Ok(()) };
            let tight = Tight::around(pid)?;
            let group = tight.group().to_owned();
            *site.bed.tight.lock().unwrap_or_else(PoisonError::into_inner) = Some(tight);
            exhaust(&group, HOLD)
        },
        end: |site| {
            site.bed.tight.lock().unwrap_or_else(PoisonError::into_inner).take();
            Ok(())
        },
        missing: |_| cgroup::missing(),
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

/// Sets the soft limit on the descriptors of `pid`; `None` resets it to the hard limit.
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
    let end = Instant::now().checked_add(Duration::from_secs(60)).context("a minute")?;
    let mut number = 1_u64;
    while Instant::now() < end {
        for _ in 0..1_000_000 {
            number = std::hint::black_box(number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
    }
    Ok(())
}

/// Starts one process after another, each of which fills `group` until the kernel kills it.
fn exhaust(group: &Path, time: Duration) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < time {
        let mut hog = Command::new(std::env::current_exe()?);
        let status = hog.arg("memory-hog").arg(group).stdin(Stdio::null()).status()?;
        ensure!(status.signal() == Some(libc::SIGKILL), "the memory limit has no effect: {status}");
    }
    Ok(())
}

/// Fills the memory of `group` until the kernel kills this process; started by `memory`. Gives up at twice the limit.
pub(crate) fn memory_hog(group: &Path) -> Result<()> {
    // The kernel kills this process, not the agent.
    std::fs::write("/proc/self/oom_score_adj", "1000").context("writing oom_score_adj")?;
    cgroup::join(group, 0)?;
    let mut taken: Vec<Vec<u8>> = Vec::new();
    for _ in 0..2 * LIMIT_MB {
        taken.push(std::hint::black_box(vec![1; 1 << 20]));
        // A little at a time, so that the agent meets the limit too.
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}
