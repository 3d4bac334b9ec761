//! `cargo xtask ahead`, which a test run in CI starts by itself. It builds what later steps need, in the CPU time that is idle
//! while the tests wait for sockets and clocks.
//!
//! Errors are ignored here. The step that needs the failed part builds it again and reports the error.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::Result;

use crate::commands::{dist, fuzz};
use crate::toolchain::Choice;
use crate::{policy, run, workspace};

/// Builds what the last steps of `cargo xtask test` need.
pub(crate) fn run() -> Result<()> {
    thread::spawn(hurry_when_waited_for);
    run::built_program("prequal-bench")?;
    dist::rehearsal::build(Choice::Auto)?;
    fuzz::build()?;
    policy::cargo_deny().map(drop)
}

/// Gives this build the usual priority once another process waits for a lock that the build holds, such as one of cargo's.
/// On a busy machine that process would otherwise wait for hours.
fn hurry_when_waited_for() {
    let own = group(std::process::id());
    loop {
        thread::sleep(Duration::from_secs(1));
        let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
        if !waited_for(&locks).into_iter().any(|holder| group(holder) == own) {
            continue;
        }
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        for pid in processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
            if group(pid) == own {
                run::succeeds(run::tool("chrt").args([
                    "--all-tasks",
                    "--other",
                    "--pid",
                    "0",
                    &pid.to_string(),
                ]));
            }
        }
    }
}

/// The processes that hold a lock for which another waits. In the kernel's list, `7: -> FLOCK ...` follows the holder's
/// line.
fn waited_for(locks: &str) -> Vec<u32> {
    let mut holders = BTreeMap::new();
    let mut found = Vec::new();
    for line in locks.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [id, "->", ..] => found.extend(holders.get(id)),
            [id, _, _, _, pid, ..] => drop(pid.parse().map(|pid: u32| holders.insert(id, pid))),
            _ => {}
        }
    }
    found
}

/// The process group of `pid`.
fn group(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name, which may contain anything: state, parent, group.
    stat.rsplit_once(')')?.1.split_whitespace().nth(2)?.parse().ok()
}

/// This command in a child process. Dropping the value ends it.
pub(crate) struct Ahead(Child);

impl Ahead {
    /// Starts the command under the scheduler's idle policy: it gets only CPU time that no other process wants, until a
    /// process waits for it. `None` if that is impossible.
    pub(crate) fn start() -> Option<Self> {
        let log = File::create(workspace::target().join("ahead.log")).ok()?;
        Command::new("chrt")
            .args(["--idle", "0"])
            .arg(std::env::current_exe().ok()?)
            .arg("ahead")
            .stdin(Stdio::null())
            .stderr(log.try_clone().ok()?)
            .stdout(log)
            .process_group(0)
            .spawn()
            .ok()
            .map(Self)
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if !matches!(self.0.try_wait(), Ok(Some(_))) {
            // The whole process group: cargo and its compilers too.
            run::succeeds(run::tool("kill").args(["--", &format!("-{}", self.0.id())]));
            let _ = self.0.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_with_waiters_are_found() {
        let locks = "1: POSIX  ADVISORY  WRITE 11 00:1a:22 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 22 fe:00:66 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 33 fe:00:66 0 EOF\n\
                     nonsense\n";
        assert_eq!(waited_for(locks), [22]);
        assert!(group(std::process::id()).is_some());
        assert_eq!(group(0), None);
    }
}
