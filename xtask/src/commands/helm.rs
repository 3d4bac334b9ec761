//! `cargo xtask helm`: builds the Helm that the chart is tested with, once, from its Go module.
//!
//! No package registry that this project uses has the program. Compiling takes a few minutes at most.

use std::path::PathBuf;

use anyhow::Result;

use crate::commands::go::Program;
use crate::{progress, run};

/// Prints the path of the pinned Helm, building it first if needed.
///
/// It is built with `go install` into target/bin/. Needs Go 1.26, or an earlier Go that may fetch it
/// (GOTOOLCHAIN=auto).
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: &Args) -> Result<()> {
    println!("{}", built()?.display());
    Ok(())
}

/// Builds Helm for the tests of the chart. If that fails, one line gives the reason, and those tests report that they
/// were skipped.
pub(crate) fn prepare() {
    if let Err(why) = built() {
        progress::say(format_args!("no Helm: {}", progress::last_line(&why)));
    }
}

/// The path of the pinned Helm, built if needed.
pub(crate) fn built() -> Result<PathBuf> {
    let program = HELM.path();
    let is_pinned = |said: String| said.trim() == HELM.version;
    if run::output(run::tool(&program).args(["version", "--template", "{{.Version}}"])).is_ok_and(is_pinned) {
        return Ok(program);
    }
    HELM.build(&format!("-X {}/internal/version.version={}", HELM.module, HELM.version))
}

const HELM: Program =
    Program { name: "helm", module: "helm.sh/helm/v4", folder: "/cmd/helm", version: "v4.3.1", go: "1.26" };
