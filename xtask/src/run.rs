//! Starts child processes, and reports every kind of failure as one readable error.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::workspace;

/// The cargo that runs this program, started in the workspace root.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace::root());
    // The outer cargo sets these for this program; build scripts and tests of the inner cargo must not see them.
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|n| n.starts_with("CARGO_PKG_") || n.starts_with("CARGO_MANIFEST_")) {
            command.env_remove(name);
        }
    }
    command
}

/// A command by name, started in the workspace root with messages in English.
pub(crate) fn tool(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(workspace::root()).env("LC_ALL", "C").stdin(Stdio::null());
    command
}

/// Runs the command with the terminal inherited and waits for it; anything but success is an error that shows the
/// command.
pub(crate) fn check(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start `{}`", shown(command)))?;
    if !status.success() {
        bail!("`{}` failed: {status}", shown(command));
    }
    Ok(())
}

/// Runs the command without showing its output; returns standard output. An error includes standard error.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start `{}`", shown(command)))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed: {}\n{}", shown(command), output.status, said.trim_end());
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{}` printed no UTF-8", shown(command)))
}

/// Whether the command could be started and succeeded. Shows no output.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Runs the command, passing each line of standard output to `line`; standard error is inherited.
pub(crate) fn lines(command: &mut Command, mut line: impl FnMut(&str)) -> Result<()> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{}`", shown(command)))?;
    if let Some(stdout) = child.stdout.take() {
        let mut reader = BufReader::new(stdout);
        let mut bytes = Vec::new();
        // Read as bytes: a test may print anything.
        while reader.read_until(b'\n', &mut bytes)? > 0 {
            line(String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']));
            bytes.clear();
        }
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("`{}` failed: {status}", shown(command));
    }
    Ok(())
}

/// Builds a program of the workspace with the release profile, and returns its file.
pub(crate) fn built_program(name: &str) -> Result<PathBuf> {
    let files = built_programs(&[name])?;
    files.into_iter().next().with_context(|| format!("cargo built no {name}"))
}

/// Builds programs of the workspace with the release profile; returns their files. All are built with the features of
/// the whole workspace: with only its own package's features, each program would need its dependencies compiled once
/// more. One command builds all of them, so that one is linked while another is compiled.
pub(crate) fn built_programs(names: &[&str]) -> Result<Vec<PathBuf>> {
    let mut command = cargo();
    command.args(["build", "--release", "--workspace"]);
    names.iter().for_each(|name| {
        command.args(["--bin", name]);
    });
    let files: Vec<String> =
        names.iter().map(|name| format!("{name}{}", std::env::consts::EXE_SUFFIX)).collect();
    built_files(&mut command, &files.iter().map(String::as_str).collect::<Vec<_>>())
}

/// A program that contains tests.
#[derive(Clone, Debug)]
pub(crate) struct TestProgram {
    /// Name of the library, program or test file.
    pub(crate) name: String,
    pub(crate) file: PathBuf,
    /// The working folder in which cargo would start it.
    pub(crate) folder: PathBuf,
}

/// Builds the tests of the whole workspace, in cargo's order. Building single tests would compile their dependencies
/// once more, with only the features that those tests need.
pub(crate) fn test_programs() -> Result<Vec<TestProgram>> {
    tests_of(cargo().args(["test", "--workspace"]))
}

/// Builds the tests of a `cargo test ...` and returns them.
fn tests_of(command: &mut Command) -> Result<Vec<TestProgram>> {
    let mut found = Vec::new();
    command.args(["--no-run", "--message-format=json-render-diagnostics"]);
    lines(command, |line| {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else { return };
        if message["profile"]["test"] == true
            && let (Some(file), Some(name)) =
                (message["executable"].as_str(), message["target"]["name"].as_str())
            && let Some(folder) = message["manifest_path"].as_str().and_then(|path| Path::new(path).parent())
        {
            found.push(TestProgram { name: name.to_owned(), file: file.into(), folder: folder.to_owned() });
        }
    })?;
    Ok(found)
}

/// Builds the test program `name` with a `cargo test ...` and returns its file.
pub(crate) fn built_test(command: &mut Command, name: &str) -> Result<PathBuf> {
    let found = tests_of(command)?.into_iter().find(|test| test.name == name);
    found.map(|test| test.file).with_context(|| format!("`{}` built no test {name}", shown(command)))
}

/// Runs a `cargo build ...` and returns the file called `name` that it built, wherever cargo put it.
pub(crate) fn built_file(command: &mut Command, name: &str) -> Result<PathBuf> {
    let files = built_files(command, &[name])?;
    files.into_iter().next().with_context(|| format!("`{}` built no {name}", shown(command)))
}

/// Like [`built_file`], for several files, returned in the order of `names`.
pub(crate) fn built_files(command: &mut Command, names: &[&str]) -> Result<Vec<PathBuf>> {
    let mut found = vec![None; names.len()];
    command.arg("--message-format=json-render-diagnostics");
    lines(command, |line| {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else { return };
        let files = message.get("filenames").and_then(|f| f.as_array()).into_iter().flatten();
        for file in files.filter_map(|f| f.as_str()).map(PathBuf::from) {
            if let Some(index) = names.iter().position(|name| file.file_name() == Some(OsStr::new(name))) {
                found[index] = Some(file);
            }
        }
    })?;
    let made = |(file, name): (Option<PathBuf>, &&str)| {
        file.with_context(|| format!("`{}` built no {name}", shown(command)))
    };
    found.into_iter().zip(names).map(made).collect()
}

/// The program and its arguments, for messages.
fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    if let Some(program) = PathBuf::from(command.get_program()).file_name() {
        words[0] = program.to_string_lossy().into_owned();
    }
    words.extend(command.get_args().map(|a| a.to_string_lossy().into_owned()));
    words.join(" ")
}
