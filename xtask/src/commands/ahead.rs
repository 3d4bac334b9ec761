//! `cargo xtask ahead`, which CI's run of the tests starts for itself: it builds what later steps need while the tests wait
//! for sockets and clocks, in whatever CPU time they leave.
//!
//! Errors count for nothing here. The step whose part failed builds it again, and reports.

use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use anyhow::Result;

use crate::commands::{dist, fuzz};
use crate::toolchain::Choice;
use crate::{run, workspace};

/// Builds what the last steps of `cargo xtask test` need.
pub(crate) fn run() -> Result<()> {
    run::built_program("prequal-bench")?;
    dist::rehearsal::build(Choice::Auto)?;
    fuzz::build().map(drop)
}

/// A run of the command beside this process; it ends with this value.
pub(crate) struct Ahead(Child);

impl Ahead {
    /// Starts it with the scheduler's idle policy: it gets only time that nothing else wants. `None` where that cannot be.
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
            // The group: cargo and its compilers too.
            run::succeeds(run::tool("kill").args(["--", &format!("-{}", self.0.id())]));
            let _ = self.0.wait();
        }
    }
}
