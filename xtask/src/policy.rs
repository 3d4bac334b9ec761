//! The rules for dependencies: `cargo deny` checks licences, sources, bans and advisories as `deny.toml` says, and each
//! direct dependency needs a line in `docs/design/dependencies.md`.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{progress, run, workspace};

/// Fails if a dependency breaks a rule. Returns why advisories could not be checked, if they could not.
pub(crate) fn check() -> Result<Option<String>> {
    let missing = unexplained()?;
    ensure!(
        missing.is_empty(),
        "docs/design/dependencies.md does not say why these are used: {}",
        missing.join(", ")
    );
    let program = cargo_deny()?;
    let deny = |args: &[&str]| {
        let mut command = run::tool(&program);
        command.args(["--all-features", "--locked"]).args(args);
        command
    };
    run::check(&mut deny(&["check", "bans", "licenses", "sources"]))?;
    // Only a failure to fetch the database is forgiven; an advisory that applies is not.
    if let Err(why) = run::output(&mut deny(&["fetch", "db"])) {
        return Ok(Some(progress::last_line(&why)));
    }
    run::check(&mut deny(&["check", "advisories"]))?;
    Ok(None)
}

/// Builds the pinned `cargo-deny` into target/, once, and returns its path.
pub(crate) fn cargo_deny() -> Result<PathBuf> {
    let root = workspace::target().join("cargo-deny");
    let program = root.join("bin").join("cargo-deny");
    let version = run::output(Command::new(&program).arg("--version"));
    if version.is_ok_and(|said| said.trim() == format!("cargo-deny {VERSION}")) {
        return Ok(program);
    }
    progress::silently(&format!("building cargo-deny {VERSION}"), || {
        // cargo-deny runs for two seconds. Optimising it would take longer than that saves.
        run::output(
            run::cargo()
                .args([
                    "install",
                    "cargo-deny",
                    "--version",
                    VERSION,
                    "--locked",
                    "--debug",
                    "--force",
                    "--root",
                ])
                .arg(&root)
                .env("CARGO_PROFILE_DEV_DEBUG", "false"),
        )
    })?;
    Ok(program)
}

const VERSION: &str = "0.20.2";

/// Returns the direct dependencies that `docs/design/dependencies.md` does not name between backticks.
fn unexplained() -> Result<Vec<String>> {
    let path = workspace::root().join("docs/design/dependencies.md");
    let explained = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let metadata =
        run::output(run::cargo().args(["metadata", "--locked", "--no-deps", "--format-version", "1"]))?;
    let metadata: Value = serde_json::from_str(&metadata)?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let direct: BTreeSet<&str> = packages
        .iter()
        .flat_map(|package| package["dependencies"].as_array().into_iter().flatten())
        .filter(|dependency| !dependency["source"].is_null())
        .filter_map(|dependency| dependency["name"].as_str())
        .collect();
    ensure!(!direct.is_empty(), "cargo metadata lists no dependencies");
    let missing = direct.into_iter().filter(|name| !explained.contains(&format!("`{name}`")));
    Ok(missing.map(str::to_owned).collect())
}
