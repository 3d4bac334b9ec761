//! Prometheus and promtool for the tests of dashboard and rules. Debian's package is unpacked into target/, never
//! installed: installed it would start a server on this machine.

use std::fs;

use anyhow::{Context as _, Result};

use crate::{progress, run, workspace};

/// Makes both programs available if they are neither on the path nor here. Where that fails it says why, and the tests
/// that need them say that they were skipped.
pub(crate) fn prepare() {
    let root = workspace::target().join("prometheus");
    let on_path = |program| run::succeeds(run::tool(program).arg("--version"));
    if root.is_dir() || (on_path("prometheus") && on_path("promtool")) {
        return;
    }
    let what = "fetching Debian's package prometheus (19 MB) into target/prometheus";
    if let Err(why) = progress::silently(what, unpack) {
        progress::say(format_args!("no Prometheus: {}", progress::last_line(&why)));
    }
}

fn unpack() -> Result<()> {
    let root = workspace::target().join("prometheus");
    // Renamed at the end: an interrupted run leaves nothing that looks complete.
    let scratch = root.with_file_name(format!(".prometheus-{}", std::process::id()));
    fs::create_dir_all(&scratch)?;
    let unpacked = (|| {
        let download =
            || run::output(run::tool("apt-get").args(["download", "prometheus"]).current_dir(&scratch));
        // Only root may refresh the lists, and they may be fresh.
        download().or_else(|_| run::output(run::tool("apt-get").arg("update")).and_then(|_| download()))?;
        let package = fs::read_dir(&scratch)?.next().context("apt-get downloaded nothing")??.path();
        run::output(run::tool("dpkg").arg("-x").arg(&package).arg(&scratch))?;
        fs::remove_file(package)?;
        Ok(fs::rename(&scratch, &root)?)
    })();
    if unpacked.is_err() {
        fs::remove_dir_all(&scratch)?;
    }
    unpacked
}
