//! A separate network namespace for everything: its ports are used by no other process, and its loopback may lose
//! packets.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

/// Moves this process, and all processes that it starts, into a new network namespace. Call it before any other thread
/// is started.
pub(crate) fn enter() -> Result<()> {
    // SAFETY: unshare takes a plain integer and changes only this process, which still has one thread.
    let done = unsafe { libc::unshare(libc::CLONE_NEWNET) };
    ensure!(
        done == 0,
        "cannot create a network namespace: {} (it needs root)",
        std::io::Error::last_os_error()
    );
    run("ip", &["link", "set", "lo", "up"])
}

/// Runs a tool and waits for it; fails if the tool does.
pub(crate) fn run(program: &str, args: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {}: {}",
        args.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

/// Whether a tool can be run at all.
pub(crate) fn has(program: &str, arg: &str) -> bool {
    Command::new(program)
        .arg(arg)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
