//! `cargo xtask ahead`, which `cargo xtask test` starts in CI. It builds what later steps need, and does jobs that are
//! not sensitive to timing. It uses the CPU time that is idle while linkers and tests wait.
//!
//! Errors are ignored here. The step that needs the failed part builds or checks it again and reports the error.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::Result;

use crate::commands::{compose, dist, fuzz, native, plb_guest, sim};
use crate::toolchain::Choice;
use crate::{policy, run, workspace};

/// Work that tolerates the lowest priority. If a job fails, for example for lack of CPU time, its step repeats it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Job {
    /// The base images of the step `compose`
    Images,
    /// The step `native`
    Native,
    /// The step `sim`
    Sim,
    /// The step `plb-guest`
    PlbGuest,
    /// The step `fuzz`
    Fuzz,
}

const JOBS: [Job; 5] = [Job::Images, Job::Native, Job::Sim, Job::PlbGuest, Job::Fuzz];

/// Builds what the later steps of `cargo xtask test` need, in the order of these steps, and does the jobs.
pub(crate) fn run() -> Result<()> {
    thread::spawn(hurry_while_waited_for);
    run::test_programs()?;
    run::built_program("prequal-bench")?;
    dist::rehearsal::build(Choice::Auto)?;
    for job in JOBS {
        job.run()?;
    }
    policy::cargo_deny().map(drop)
}

impl Job {
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Images => "base images",
            Self::Native => "tests of the native module",
            Self::Sim => "simulator",
            Self::PlbGuest => "PLB in a guest kernel",
            Self::Fuzz => "fuzzing",
        }
    }

    /// The file that says how the job has ended; empty until then.
    fn file(self, folder: &Path) -> PathBuf {
        folder.join(format!("ahead-{self:?}.txt").to_lowercase())
    }

    /// Does the job and writes how it has ended. The job counts as done only if it skipped nothing.
    fn run(self) -> Result<()> {
        let skipped = match self {
            Self::Images => compose::base_images().map(|()| vec![]),
            Self::Native => native::check(),
            Self::Sim => sim::quick().map(|()| vec![]),
            Self::PlbGuest => plb_guest::prove(plb_guest::LIMIT).map(|()| vec![]),
            Self::Fuzz => fuzz::quick().map(|()| vec![]),
        };
        let end = match skipped {
            Ok(skipped) if skipped.is_empty() => DONE.to_owned(),
            Ok(skipped) => format!("skipped: {}", skipped.join(", ")),
            Err(error) => format!("failed: {error:#}"),
        };
        Ok(fs::write(self.file(&workspace::target()), end)?)
    }
}

const DONE: &str = "done";

/// How often the priority is adjusted.
const INTERVAL: Duration = Duration::from_secs(1);

/// Gives this process group the usual priority while another process waits for a lock that the group holds, such as one
/// of cargo's locks. Otherwise, on a busy machine, the other process would wait for hours.
fn hurry_while_waited_for() {
    let Some(own) = group(std::process::id()) else { return };
    let mut hurries = false;
    loop {
        thread::sleep(INTERVAL);
        let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
        let waited_for = waited_for(&locks).into_iter().any(|holder| group(holder) == Some(own));
        if waited_for || hurries {
            schedule(own, if waited_for { Policy::Usual } else { Policy::Idle });
        }
        hurries = waited_for;
    }
}

/// A scheduling policy of Linux.
#[derive(Clone, Copy)]
enum Policy {
    Usual,
    /// Only CPU time that no other process wants.
    Idle,
}

/// Sets the policy of every process of a group.
fn schedule(of: u32, policy: Policy) {
    let policy = match policy {
        Policy::Usual => "--other",
        Policy::Idle => "--idle",
    };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in processes.filter_map(|entry| entry.file_name().into_string().ok()) {
        if pid.parse().ok().and_then(group) == Some(of) {
            run::succeeds(run::tool("chrt").args(["--all-tasks", policy, "--pid", "0", &pid]));
        }
    }
}

/// The processes that hold a lock for which another process waits. `locks` is the text of `/proc/locks`: the line of a
/// waiting process (`7: -> FLOCK ...`) follows the holder's line.
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

/// A run of this command in parallel with this process. Dropping the value ends the run.
pub(crate) struct Ahead {
    command: Child,
    /// Where the jobs' files are.
    folder: PathBuf,
}

impl Ahead {
    /// Starts the command under the scheduler's idle policy: it gets only CPU time that no other process wants, until
    /// another process waits for one of its locks or results. `None` if that is impossible.
    pub(crate) fn start() -> Option<Self> {
        let folder = workspace::target();
        for job in JOBS {
            // Empties the file of an earlier run.
            File::create(job.file(&folder)).ok()?;
        }
        let log = File::create(folder.join("ahead.log")).ok()?;
        let command = Command::new("chrt")
            .args(["--idle", "0"])
            .arg(std::env::current_exe().ok()?)
            .arg("ahead")
            .stdin(Stdio::null())
            .stderr(log.try_clone().ok()?)
            .stdout(log)
            .process_group(0)
            .spawn()
            .ok()?;
        Some(Self { command, folder })
    }

    /// Waits until `job` or the command has ended, and returns whether the job is done. Meanwhile the command has
    /// the usual priority.
    pub(crate) fn done(&mut self, job: Job) -> bool {
        let file = job.file(&self.folder);
        let end = || fs::read_to_string(&file).unwrap_or_default();
        while end().is_empty() && matches!(self.command.try_wait(), Ok(None)) {
            // Repeated, because a program that has just started may have inherited the idle policy.
            schedule(self.command.id(), Policy::Usual);
            thread::sleep(INTERVAL);
        }
        schedule(self.command.id(), Policy::Idle);
        end() == DONE
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if !matches!(self.command.try_wait(), Ok(Some(_))) {
            // The whole process group: cargo and its compilers too.
            run::succeeds(run::tool("kill").args(["--", &format!("-{}", self.command.id())]));
            let _ = self.command.wait();
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

    #[test]
    fn a_job_counts_only_if_its_file_says_that_it_is_done() {
        let dir = tempfile::tempdir().expect("a folder");
        for (end, expected) in [(DONE, true), ("failed: no linker", false), ("", false)] {
            let file = Job::Sim.file(dir.path());
            fs::write(&file, "").expect("written");
            let script = format!("sleep 0.1; printf '{end}' > '{}'", file.display());
            let command = Command::new("sh").args(["-c", &script]).process_group(0).spawn().expect("a shell");
            let mut ahead = Ahead { command, folder: dir.path().to_owned() };
            assert_eq!(ahead.done(Job::Sim), expected, "{end}");
        }
    }
}
