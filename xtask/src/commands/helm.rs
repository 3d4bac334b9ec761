//! `cargo xtask helm`: builds the Helm that the chart is tested with, once, from its Go module.
//!
//! No package registry that this project uses has the program, but the Go module proxy has its source. Compiling takes a
//! few minutes at most. Go checks the module against the public checksum log.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use crate::{progress, run, workspace};

/// Prints the path of the pinned Helm, building it first if needed.
///
/// It is built with `go install` into target/bin/. Needs Go 1.26, or an earlier Go that may fetch it (GOTOOLCHAIN=auto).
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: &Args) -> Result<()> {
    println!("{}", built()?.display());
    Ok(())
}

/// Builds Helm for the tests of the chart. If that fails, one line gives the reason, and those tests report that they were
/// skipped.
pub(crate) fn prepare() {
    if let Err(why) = built() {
        progress::say(format_args!("no Helm: {}", progress::last_line(&why)));
    }
}

/// The path of the pinned Helm, built if needed.
pub(crate) fn built() -> Result<PathBuf> {
    let folder = workspace::target().join("bin");
    let program = folder.join("helm");
    let is_pinned = |said: String| said.trim() == VERSION;
    if run::output(run::tool(&program).args(["version", "--template", "{{.Version}}"])).is_ok_and(is_pinned) {
        return Ok(program);
    }
    if !run::succeeds(run::tool("go").arg("version")) {
        bail!("Go is missing: https://go.dev/dl, or a `golang` package of 1.26 or later");
    }
    // Each process has its own folder, then renames once: parallel commands never return half a program.
    let scratch = workspace::target().join(format!(".helm-{}", std::process::id()));
    fs::create_dir_all(&scratch)?;
    fs::create_dir_all(&folder)?;
    let version = format!("-s -w -X {MODULE}/internal/version.version={VERSION}");
    let made = progress::silently(&format!("building Helm {VERSION} from its Go module"), || {
        run::output(
            run::tool("go")
                .args(["install", "-trimpath", "-ldflags", &version])
                .arg(format!("{MODULE}/cmd/helm@{VERSION}"))
                .env("GOBIN", &scratch)
                .env("CGO_ENABLED", "0"),
        )
    })
    .and_then(|_| fs::rename(scratch.join("helm"), &program).context("go made no helm"));
    fs::remove_dir_all(&scratch)?;
    made.map(|()| program)
}

const MODULE: &str = "helm.sh/helm/v4";

const VERSION: &str = "v4.3.1";
