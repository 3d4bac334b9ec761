//! Go's and Python's tools: whether they are installed, and what they build in Cargo's folder. They fetch what they need
//! the first time.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};
use prequal_testbed::{target_dir, workspace_root};

/// Builds the program in `package` of the Go module in `folder`. If there is no Go, prints a line and returns `None`.
pub(crate) fn go_program(folder: &str, package: &str, name: &str) -> Result<Option<PathBuf>> {
    if !is_there("go", &["version"], "Go 1.25") {
        return Ok(None);
    }
    let program = target_dir().join("libraries").join(name);
    let mut build = Command::new("go");
    build.args(["build", "-o"]).arg(&program).arg(package).current_dir(workspace_root().join(folder));
    run(&mut build)?;
    Ok(Some(program))
}

/// The conformance server in Python: an interpreter with the third-party server that it needs. If there is no Python,
/// prints a line and returns `None`.
pub(crate) fn python_server() -> Result<Option<Command>> {
    if !is_there(
        "python3",
        &["-c", "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))"],
        "Python 3.10 with venv",
    ) {
        return Ok(None);
    }
    let folder = workspace_root().join("libraries/python/conformance");
    let environment = target_dir().join("libraries/python");
    let python = environment.join("bin/python");
    // Written last, so that everything it lists is installed.
    let (wanted, installed) = (folder.join("requirements.txt"), environment.join("requirements.txt"));
    let wanted_text = std::fs::read_to_string(&wanted)?;
    if std::fs::read_to_string(&installed).ok().as_ref() != Some(&wanted_text) {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment))?;
        let mut install = Command::new(&python);
        install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"]).arg(&wanted);
        run(&mut install)?;
        std::fs::write(&installed, wanted_text)?;
    }
    let mut server = Command::new(python);
    // Do not write bytecode folders into the sources.
    server.arg("-B").arg(folder.join("server.py"));
    Ok(Some(server))
}

/// Returns whether `program` runs with the arguments `ask`. If not, prints a line that names its `package`.
pub(crate) fn is_there(program: &str, ask: &[&str], package: &str) -> bool {
    if Command::new(program).args(ask).output().is_ok_and(|output| output.status.success()) {
        return true;
    }
    let reason = format!("missing {program}: install {package}");
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{reason}");
    eprintln!("skipped: {reason}");
    false
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
