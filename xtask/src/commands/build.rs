//! `cargo xtask build`: builds what a user deploys, into `target/dist/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

use crate::commands::native;
use crate::commands::platform::Platform;
use crate::toolchain::{Choice, Toolchain};
use crate::{progress, run, workspace};

/// Builds the agent, the command `prequal` and the Envoy filter into target/dist/, and the docker-compose demo's
/// program.
///
/// target/dist/probe-agent and target/dist/prequal are release builds for this machine. target/dist/prequal_filter.wasm
/// is the filter and target/dist/libprequal_native.so the native module; Envoy loads either. target/dist/prequal-demo
/// is the program that the demo's containers run. The filter needs a WebAssembly standard library. It comes from rustup
/// (`rustup target add wasm32-wasip1`) where that works, else from Debian's packages, which are unpacked under
/// target/toolchain/ and never installed.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) wasm: WasmArgs,
}

/// Options shared by every command that builds the module.
#[derive(clap::Args, Clone, Copy)]
pub(crate) struct WasmArgs {
    /// Which compiler builds the .wasm
    #[arg(long, value_enum, default_value_t, env = "XTASK_WASM_TOOLCHAIN", value_name = "WHICH")]
    pub(crate) toolchain: Choice,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    dist(args.wasm.toolchain).map(|_| ())
}

/// Builds everything in `target/dist/` and returns the compiler that made the module.
pub(crate) fn dist(choice: Choice) -> Result<Toolchain> {
    let toolchain = Toolchain::prepare(choice)?;
    shipped(&toolchain)?;
    Ok(toolchain)
}

/// Builds everything in `target/dist/` and `target/dist-test/`, checks that only the modules of the latter can crash on
/// request, and returns the compiler that made the modules.
pub(crate) fn dist_and_test(choice: Choice) -> Result<Toolchain> {
    let toolchain = Toolchain::prepare(choice)?;
    // The crashing modules are built first: cargo keeps only the last module that it built from a package, and later
    // steps need the shipped ones.
    let crashing = crashing(&toolchain)?;
    let shipped = shipped(&toolchain)?;
    for module in &crashing {
        ensure!(names_crash(module)?, "{} does not know `{CRASH_HEADER}`", module.display());
    }
    for module in &shipped {
        ensure!(!names_crash(module)?, "{} knows `{CRASH_HEADER}`", module.display());
    }
    Ok(toolchain)
}

/// Builds everything in `target/dist/` and returns the two modules.
fn shipped(toolchain: &Toolchain) -> Result<[PathBuf; 2]> {
    progress::headline("building target/dist/");
    let started = Instant::now();
    for program in run::built_programs(&["probe-agent", "prequal", "prequal-demo"])? {
        let name = program.file_name().context("a program has a name")?.to_owned();
        place(&program, &workspace::dist().join(name))?;
    }
    let wasm = workspace::dist().join("prequal_filter.wasm");
    place(&filter(toolchain, "")?, &wasm)?;
    let native = workspace::dist().join("libprequal_native.so");
    place(&native_module("")?, &native)?;
    progress::say(format_args!("built in {}", progress::seconds(started.elapsed())));
    Ok([wasm, native])
}

/// Builds the modules that crash on request, for the tests of what happens after a crash, and returns them. The
/// crashing filter marks its shared data with another version, so tests also use this filter as a different release.
fn crashing(toolchain: &Toolchain) -> Result<[PathBuf; 2]> {
    progress::headline("building target/dist-test/");
    let wasm = workspace::dist_test().join("prequal_filter_crash.wasm");
    place(&filter(toolchain, "crash-test,next-blob")?, &wasm)?;
    let native = workspace::dist_test().join("libprequal_native_crash.so");
    place(&native_module("crash-test")?, &native)?;
    Ok([wasm, native])
}

fn names_crash(module: &Path) -> Result<bool> {
    let header = CRASH_HEADER.as_bytes();
    Ok(fs::read(module)?.windows(header.len()).any(|window| window == header))
}

/// Builds the module with these cargo features.
pub(crate) fn filter(toolchain: &Toolchain, features: &str) -> Result<PathBuf> {
    let module = toolchain.build_filter(features)?;
    ensure!(fs::read(&module)?.starts_with(b"\0asm"), "{} is not a WebAssembly module", module.display());
    Ok(module)
}

/// Builds the native module for this machine with these cargo features, as a release does.
fn native_module(features: &str) -> Result<PathBuf> {
    let platform = Platform::here()?;
    native::module(&Toolchain::for_programs(platform.triple)?, &platform, features)
}

/// Copies to a temporary name beside `to`, then renames: a running program keeps the old file, and no reader sees a
/// partial new one.
fn place(from: &Path, to: &Path) -> Result<()> {
    let folder = to.parent().context("a file in a folder")?;
    fs::create_dir_all(folder)?;
    let scratch = to.with_extension(format!("new-{}", std::process::id()));
    fs::copy(from, &scratch).with_context(|| format!("copying {}", from.display()))?;
    fs::rename(&scratch, to)?;
    let size = fs::metadata(to)?.len();
    let shown = to.strip_prefix(workspace::root()).unwrap_or(to);
    progress::say(format_args!("{} ({} KB)", shown.display(), size.div_ceil(1024)));
    Ok(())
}

/// The request header that makes the test-only module panic.
const CRASH_HEADER: &str = "x-crash-prequal";
