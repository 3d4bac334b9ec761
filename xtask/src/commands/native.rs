//! `cargo xtask native`: checks of the native module that need no Envoy.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

use crate::commands::platform::{PLATFORMS, Platform};
use crate::progress;
use crate::toolchain::Toolchain;

mod elf;
mod hosts;
mod loader;
mod sanitizers;

/// Checks the native module without Envoy: its file for every architecture, and its code under sanitizers.
///
/// Builds the module for each architecture. The file must depend only on glibc, in a version that Envoy's images have,
/// and export the same hooks for each architecture. A small program then loads it as Envoy does (under qemu for another
/// architecture) and makes a hook panic. After that, the module's unit tests run under AddressSanitizer and
/// ThreadSanitizer. Missing packages are installed with apt-get if run as root.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only these checks
    #[arg(long, value_enum, value_delimiter = ',', value_name = "CHECKS")]
    only: Vec<NativeCheck>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum NativeCheck {
    /// The files for every architecture
    Platforms,
    /// The unit tests under sanitizers
    Sanitizers,
    /// The CPU time of one attempt with up to 10 000 hosts, and of a million host updates; runs only if named
    Hosts,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let skipped = checked(&args.only)?;
    skipped.iter().for_each(|what| progress::say(format_args!("skipped: {what}")));
    Ok(())
}

/// Runs all checks: a step of `cargo xtask test`. Returns what could not be checked here.
pub(crate) fn check() -> Result<Vec<String>> {
    checked(&[])
}

/// Runs the checks `only`, or all if it is empty; returns what could not be checked here.
fn checked(only: &[NativeCheck]) -> Result<Vec<String>> {
    let wanted = |check| only.is_empty() || only.contains(&check);
    let mut skipped = Vec::new();
    if wanted(NativeCheck::Platforms) {
        skipped.extend(platforms()?);
    }
    if wanted(NativeCheck::Sanitizers) {
        skipped.extend(sanitizers::run()?);
    }
    if only.contains(&NativeCheck::Hosts) {
        hosts()?;
    }
    Ok(skipped)
}

/// Builds the module for `platform` with these cargo features, and checks the file.
pub(crate) fn module(toolchain: &Toolchain, platform: &Platform, features: &str) -> Result<PathBuf> {
    inspected(toolchain, platform, features).map(|(file, _)| file)
}

/// Like [`module`], but also returns what the file exports and needs.
fn inspected(toolchain: &Toolchain, platform: &Platform, features: &str) -> Result<(PathBuf, elf::Library)> {
    let file = toolchain.build_native(platform.triple, platform.cross_linker(), features)?;
    let library = elf::Library::read(&file)?;
    library.check(platform.arch).with_context(|| file.display().to_string())?;
    Ok((file, library))
}

/// Measures the module for this machine with many hosts, and with hosts that change.
fn hosts() -> Result<()> {
    let this = PLATFORMS.iter().find(|platform| platform.cross_linker().is_none());
    let platform = this.context("the module is not built for this machine's architecture")?;
    let (file, library) = inspected(&Toolchain::for_programs(platform.triple)?, platform, "")?;
    hosts::run(&loader::Loader::of(platform)?, &file, &library)
}

/// Builds, inspects and loads the module for each architecture; returns those that are impossible here.
fn platforms() -> Result<Vec<String>> {
    let mut skipped = Vec::new();
    let mut hooks = None;
    for platform in &PLATFORMS {
        platform.install();
        if let Some(why) = platform.missing()? {
            skipped.push(format!("the native module for {}: {why}", platform.arch));
            continue;
        }
        let toolchain = Toolchain::for_programs(platform.triple)?;
        let (file, library) = inspected(&toolchain, platform, "")?;
        progress::say(format_args!("{}: {library}", platform.arch));
        let expected = hooks.get_or_insert_with(|| library.exports.clone());
        ensure!(
            library.exports == *expected,
            "{}: the hooks differ from another architecture's",
            platform.arch
        );
        let loader = match loader::Loader::of(platform) {
            Ok(loader) => loader,
            Err(why) => {
                skipped.push(format!(
                    "loading the native module for {}: {}",
                    platform.arch,
                    progress::last_line(&why)
                ));
                continue;
            }
        };
        loader.serves(&file, &library)?;
        let (file, library) = inspected(&toolchain, platform, "crash-test")?;
        loader.survives_a_panic(&file, &library)?;
        progress::say(format_args!("{}: loads, and catches a panic", platform.arch));
    }
    Ok(skipped)
}
