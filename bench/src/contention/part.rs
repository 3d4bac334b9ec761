//! The child processes: replicas and antagonists, each in a process of its own so that it can have its own cgroup.
//!
//! A child reads its role as one JSON line from its standard input. It answers with one line once it is ready, and
//! begins when it reads the next one. It ends when its standard input ends, and therefore also when the parent is
//! killed.

use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::spare::Course;
use super::{antagonist, replica};

/// The role of a child.
#[derive(Debug, Deserialize, Serialize)]
pub(super) enum Role {
    /// Prints its address.
    Replica(replica::Spec),
    /// Begins at its second input line. Uses the spare CPU time that the course does not leave to the replica.
    Antagonist(Course),
}

/// A child as its parent sees it; killed on drop.
#[derive(Debug)]
pub(super) struct PartProcess {
    child: Child,
    stdin: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl PartProcess {
    /// Starts a process that waits for its role.
    pub(super) fn start() -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("contention-part")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting a part of the benchmark")?;
        let stdin = child.stdin.take().context("no stdin")?;
        let stdout = child.stdout.take().context("no stdout")?;
        Ok(Self { child, stdin, answers: BufReader::new(stdout).lines() })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Gives the process its role; returns its answer once it is ready.
    pub(super) fn assume(&mut self, role: &Role) -> Result<String> {
        writeln!(self.stdin, "{}", serde_json::to_string(role)?)?;
        self.answers.next().context("a part of the benchmark has ended")?.context("reading from it")
    }

    /// Lets the process begin.
    pub(super) fn begin(&mut self) -> Result<()> {
        writeln!(self.stdin).context("a part of the benchmark has ended")
    }
}

impl Drop for PartProcess {
    fn drop(&mut self) {
        // An error means that it has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The child process.
pub(crate) fn run() -> Result<()> {
    let mut lines = std::io::stdin().lines();
    let role = serde_json::from_str(&lines.next().context("no role")??)?;
    match role {
        Role::Replica(spec) => {
            std::thread::spawn(move || {
                if let Err(error) = replica::serve(&spec) {
                    eprintln!("replica {}: {error:#}", spec.number);
                    std::process::exit(1);
                }
            });
        }
        Role::Antagonist(course) => {
            println!("ready");
            if lines.next().is_none() {
                return Ok(());
            }
            std::thread::spawn(move || antagonist::run(&course));
        }
    }
    lines.for_each(drop);
    Ok(())
}
