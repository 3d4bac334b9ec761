//! Unit tests of the native module under LLVM's sanitizers, with the stable compiler.
//!
//! The state that threads share (`crates/prequal-native/src/store.rs`) is lock-free and uses a library with unsafe
//! code. ThreadSanitizer finds unsynchronised accesses; AddressSanitizer finds uses of freed values. For
//! ThreadSanitizer the standard library is instrumented too: only then does the sanitizer know which accesses are
//! ordered by the locks of that library.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};

use crate::{progress, run, workspace};

/// A sanitizer of the compiler.
struct Sanitizer {
    name: &'static str,
    /// Whether the standard library must be instrumented too, which takes most of the time.
    whole: bool,
}

const SANITIZERS: [Sanitizer; 2] =
    [Sanitizer { name: "address", whole: false }, Sanitizer { name: "thread", whole: true }];

/// Runs the tests under each sanitizer; returns what could not be run here.
pub(super) fn run() -> Result<Vec<String>> {
    if let Some(why) = missing()? {
        return Ok(vec![format!("sanitizers: {why}")]);
    }
    for sanitizer in SANITIZERS {
        let started = Instant::now();
        let passed = sanitizer.test()?;
        let seconds = progress::seconds(started.elapsed());
        progress::say(format_args!("{} sanitizer: {passed} unit tests passed in {seconds}", sanitizer.name));
    }
    Ok(vec![])
}

/// The reason why there is no standard library to instrument, if any.
fn missing() -> Result<Option<String>> {
    let sysroot = run::output(run::tool("rustc").args(["--print", "sysroot"]))?;
    let source = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/Cargo.lock");
    if !source.is_file() {
        let mut rustup = run::tool("rustup");
        rustup.args(["component", "add", "rust-src"]);
        if let Err(why) = progress::silently("rustup component add rust-src", || run::output(&mut rustup)) {
            return Ok(Some(format!("no source of the standard library: {}", progress::last_line(&why))));
        }
    }
    let supported = cfg!(all(target_os = "linux", target_arch = "x86_64"));
    Ok((!supported).then(|| "only on x86_64 Linux".to_owned()))
}

impl Sanitizer {
    /// Runs the unit tests; returns how many there are.
    fn test(&self) -> Result<usize> {
        let mut cargo = run::cargo();
        // With --target, build scripts and macros are not instrumented.
        cargo.args(["test", "--package", "prequal-native", "--lib", "--target", TARGET, "--target-dir"]);
        cargo.arg(workspace::target().join("sanitizers").join(self.name));
        if self.whole {
            cargo.arg("-Zbuild-std");
        }
        cargo
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", format!("-Zsanitizer={}", self.name))
            .env_remove("CARGO_ENCODED_RUSTFLAGS");
        let said = run::output(&mut cargo)?;
        let passed: Vec<&str> = said.lines().filter(|line| line.ends_with(" ... ok")).collect();
        let threads = passed.iter().any(|line| line.starts_with("test store::tests::threads_"));
        ensure!(threads, "no test with several threads ran:\n{said}");
        Ok(passed.len())
    }
}

const TARGET: &str = "x86_64-unknown-linux-gnu";
