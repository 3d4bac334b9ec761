//! Go's tools: whether they are there, and what they build into Cargo's folder. They fetch what they need the first time.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};
use prequal_testbed::{target_dir, workspace_root};

/// Builds the program in `package` of the Go module in `folder`. `None`, after a line that says why, if there is no Go.
pub(crate) fn go_program(folder: &str, package: &str, name: &str) -> Result<Option<PathBuf>> {
    if !is_there("go", &["version"]) {
        return Ok(None);
    }
    let program = target_dir().join("libraries").join(name);
    let mut build = Command::new("go");
    build.args(["build", "-o"]).arg(&program).arg(package).current_dir(workspace_root().join(folder));
    run(&mut build)?;
    Ok(Some(program))
}

fn is_there(program: &str, ask: &[&str]) -> bool {
    if Command::new(program).args(ask).output().is_ok_and(|output| output.status.success()) {
        return true;
    }
    let reason = format!("missing {program}: install Go 1.25");
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{reason}");
    eprintln!("skipped: {reason}");
    false
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
