//! Programs that checks need, from Debian's packages.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, bail, ensure};

use crate::{progress, run, workspace};

/// The folder under target/ with the files of `package`, fetched once. The package is only unpacked: if installed, it
/// might start a server on this machine.
pub(crate) fn unpacked(package: &str) -> Result<PathBuf> {
    let root = workspace::target().join(package);
    if !root.is_dir() {
        let what = format!("fetching Debian's package {package} into target/{package}");
        progress::silently(&what, || unpack(package, || Ok(vec![package.to_owned()])))?;
    }
    Ok(root)
}

/// Like [`unpacked`], together with the packages that `package` depends on and that are not installed.
pub(crate) fn unpacked_whole(package: &str) -> Result<PathBuf> {
    let root = workspace::target().join(package);
    if !root.is_dir() {
        let what = format!("fetching Debian's package {package} and its libraries into target/{package}");
        progress::silently(&what, || unpack(package, || not_installed(package)))?;
    }
    Ok(root)
}

/// Fetches Prometheus and promtool for the tests of the dashboard and rules. If that is impossible, prints the reason;
/// the tests that need them then report that they were skipped.
pub(crate) fn prometheus() {
    let on_path = |program| run::succeeds(run::tool(program).arg("--version"));
    if on_path("prometheus") && on_path("promtool") {
        return;
    }
    if let Err(why) = unpacked("prometheus") {
        progress::say(format_args!("no Prometheus: {}", progress::last_line(&why)));
    }
}

/// Installs those of `tools` (program and package) that are missing; needs root.
pub(crate) fn install(tools: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<&str> = tools
        .iter()
        .filter(|(program, _)| !run::succeeds(run::tool("sh").args(["-c", &format!("command -v {program}")])))
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let line = format!("apt-get install -y --no-install-recommends {}", missing.join(" "));
    if run::output(run::tool("id").arg("-u"))?.trim() != "0" {
        bail!("missing {}; as root: {line}", missing.join(", "));
    }
    progress::silently(&line, || {
        with_fresh_lists(|| {
            let mut command = run::tool("apt-get");
            // By default, apt gives up at once if another process, such as `cargo xtask ahead`, uses it.
            command.args(["-o", "DPkg::Lock::Timeout=300"]);
            command.args(["install", "-y", "--no-install-recommends"]).args(&missing);
            run::output(command.env("DEBIAN_FRONTEND", "noninteractive"))
        })
    })?;
    Ok(())
}

/// The packages that an installation of `package` would add, from the lines `Inst NAME (VERSION ...)` of a simulation.
fn not_installed(package: &str) -> Result<Vec<String>> {
    let simulated = run::output(run::tool("apt-get").args([
        "install",
        "--simulate",
        "--no-install-recommends",
        package,
    ]))?;
    let added = simulated.lines().filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next());
    Ok(added.map(str::to_owned).collect())
}

/// Unpacks the packages that `names` yields into the folder of `package`.
fn unpack(package: &str, names: impl Fn() -> Result<Vec<String>>) -> Result<()> {
    let root = workspace::target().join(package);
    // Renamed at the end, so that an interrupted run leaves nothing that looks complete.
    let scratch = root.with_file_name(format!(".{package}-{}", std::process::id()));
    fs::create_dir_all(&scratch)?;
    let unpacked = (|| {
        with_fresh_lists(|| {
            run::output(run::tool("apt-get").arg("download").args(names()?).current_dir(&scratch))
        })?;
        let archives = fs::read_dir(&scratch)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        ensure!(!archives.is_empty(), "apt-get downloaded nothing");
        for archive in archives {
            run::output(run::tool("dpkg").arg("-x").arg(&archive).arg(&scratch))?;
            fs::remove_file(archive)?;
        }
        Ok(fs::rename(&scratch, &root)?)
    })();
    if unpacked.is_err() {
        fs::remove_dir_all(&scratch)?;
    }
    unpacked
}

/// Tries first without refreshing the package lists: only root may refresh them, and they may be fresh.
fn with_fresh_lists<T>(work: impl Fn() -> Result<T>) -> Result<T> {
    work().or_else(|_| run::output(run::tool("apt-get").arg("update")).and_then(|_| work()))
}
