//! Checks whether the machine has what a test needs.
//!
//! If something is missing, the test prints one line that says what, and does not run. Under `CI=true` it fails
//! instead, because a pipeline must not pass by skipping. [`needs!`](macro@crate::needs) and [`bed!`](crate::bed)
//! return from the test.

use std::net::TcpListener;
use std::path::PathBuf;

use crate::config::{dist_dir, envoy_binary, wasm_module};

/// Returns from a test if `$missing`, an `Option<String>`, names something that this machine lacks.
#[macro_export]
macro_rules! needs {
    ($missing:expr) => {
        if let Some(what) = $missing {
            $crate::skip(&what);
            return Ok(());
        }
    };
}

/// Returns from a test if Envoy, the agent, the filter, or one of the paths in `$also` is missing.
#[macro_export]
macro_rules! bed {
    () => {
        $crate::bed!(&[])
    };
    ($also:expr) => {
        $crate::needs!($crate::missing($also))
    };
}

/// Reports that the current test does not run, because `missing` is missing.
///
/// # Panics
/// Under `CI=true`.
#[track_caller]
pub fn skip(missing: &str) {
    // The test harness runs each test on a thread with the test's name.
    let thread = std::thread::current();
    netlab::skip(thread.name().unwrap_or("a test"), missing);
}

/// What is missing to run tests on a real Envoy: Envoy itself, the agent, the filter, or any path of `also`. `None` if
/// everything is there.
pub fn missing(also: &[PathBuf]) -> Option<String> {
    let envoy = envoy_binary();
    if !envoy.is_file() {
        return Some(format!("no Envoy at {}: run `cargo xtask envoy`, or set `ENVOY`", envoy.display()));
    }
    let mut built = vec![dist_dir().join("probe-agent"), wasm_module()];
    built.extend_from_slice(also);
    missing_file(&built, "cargo xtask build")
}

/// The first of `paths` that does not exist, and the command that creates it.
pub fn missing_file(paths: &[PathBuf], command: &str) -> Option<String> {
    let path = paths.iter().find(|path| !path.exists())?;
    Some(format!("no {}: run `{command}`", path.display()))
}

/// The first of `programs` that is in no folder of `PATH`.
pub fn missing_program(programs: &[&str]) -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = |program: &str| std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    let program = programs.iter().find(|program| !found(program))?;
    Some(format!("no program `{program}` in PATH"))
}

/// Why this process cannot open `count` files; `None` if it can.
pub fn missing_descriptors(count: u64) -> Option<String> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes to the value that it is passed.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    let allowed = limit.rlim_cur;
    (allowed < count).then(|| format!("only {allowed} open files are allowed: run `ulimit -n {count}`"))
}

/// Why IPv6 cannot be tested; `None` if it can.
pub fn missing_ipv6() -> Option<String> {
    let error = TcpListener::bind("[::1]:0").err()?;
    Some(format!("no IPv6 loopback: {error}"))
}
