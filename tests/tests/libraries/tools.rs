//! Programs that the tests need: whether they are installed, and what Go and Python build in Cargo's folder. The first
//! build downloads dependencies.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};
use prequal_testbed::{target_dir, workspace_root};

/// A message if `program`, which is in Debian's `package`, is missing or does not run with the arguments `ask`.
pub(crate) fn missing(program: &str, ask: &[&str], package: &str) -> Option<String> {
    (!succeeds(program, ask)).then(|| format!("no `{program}`: install it (Debian: {package})"))
}

/// A message if Go is missing.
pub(crate) fn missing_go() -> Option<String> {
    (!succeeds("go", &["version"])).then(|| "no `go`: install Go 1.25 or later".to_owned())
}

/// A message if Python is missing or too old.
pub(crate) fn missing_python() -> Option<String> {
    let check = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))";
    (!succeeds("python3", &["-c", check]))
        .then(|| "no `python3` with venv: install Python 3.10 or later (Debian: python3-venv)".to_owned())
}

fn succeeds(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}

/// Builds the program in `package` of the Go module in `folder`.
pub(crate) fn go_program(folder: &str, package: &str, name: &str) -> Result<PathBuf> {
    let program = target_dir().join("libraries").join(name);
    let mut build = Command::new("go");
    build.args(["build", "-o"]).arg(&program).arg(package).current_dir(workspace_root().join(folder));
    run(&mut build)?;
    Ok(program)
}

/// The conformance server in Python: an interpreter with the third-party server that it needs.
pub(crate) fn python_server() -> Result<Command> {
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
    Ok(server)
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
