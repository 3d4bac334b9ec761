//! The programs that `cargo xtask bench peers` compares with: HAProxy and nginx from this machine or from Debian's
//! packages, Caddy from its Go module.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Result;

use crate::commands::debian;
use crate::commands::go::{self, Program};
use crate::{progress, run};

/// Debian packages. Each has the name of its program.
const PACKAGES: [&str; 2] = ["haproxy", "nginx"];

const CADDY: Program = Program {
    name: "caddy",
    module: "github.com/caddyserver/caddy/v2",
    folder: "/cmd/caddy",
    version: "v2.11.9",
    go: "1.25",
};

/// Fetches missing programs. If that is impossible, prints the reason; the harness then skips the program. Returns the
/// search paths for programs and libraries, as environment variables.
pub(crate) fn prepare() -> Result<Vec<(&'static str, OsString)>> {
    let mut programs = vec![go::bin()];
    let mut libraries = Vec::new();
    for package in PACKAGES.into_iter().filter(|program| !is_installed(program)) {
        match debian::unpacked_whole(package) {
            Ok(root) => {
                programs.push(root.join("usr/sbin"));
                let folder = format!("usr/lib/{}-linux-gnu", env::consts::ARCH);
                libraries.push(root.join(folder));
            }
            Err(why) => progress::say(format_args!("no {package}: {}", progress::last_line(&why))),
        }
    }
    // Built outside its repository, Caddy does not know its version.
    if let Err(why) = CADDY.prepare(&format!("-X {}.CustomVersion={}", CADDY.module, CADDY.version)) {
        progress::say(format_args!("no caddy: {}", progress::last_line(&why)));
    }
    Ok(vec![("PATH", with(programs, "PATH")?), ("LD_LIBRARY_PATH", with(libraries, "LD_LIBRARY_PATH")?)])
}

/// Whether the program is in `PATH`, or where Debian keeps servers.
fn is_installed(program: &str) -> bool {
    let search = format!("PATH=\"$PATH:/usr/sbin\" command -v {program}");
    run::succeeds(run::tool("sh").args(["-c", &search]))
}

/// `folders`, followed by those in the variable: the pinned Caddy comes before any other.
fn with(folders: Vec<PathBuf>, variable: &str) -> Result<OsString> {
    let present = env::var_os(variable).unwrap_or_default();
    let present = env::split_paths(&present).filter(|folder| !folder.as_os_str().is_empty());
    Ok(env::join_paths(folders.into_iter().chain(present))?)
}
