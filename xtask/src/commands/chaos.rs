//! `cargo xtask chaos`: injects faults under load, each with a goal, using the program in `tests/chaos`.

use std::ffi::OsString;
use std::process::Command;

use anyhow::Result;

use crate::commands::build::{self, WasmArgs};
use crate::commands::envoy;
use crate::{progress, run, workspace};

/// Breaks things under load: agents, backends, Envoy, the machine, the network, one at a time and in random pairs.
///
/// Runs the shipped configuration in a real Envoy, with eight agents and their backends, at 500 requests/s of mixed
/// kinds. Each fault has a goal; the exit status is nonzero if one is missed. `--list` prints the names of the faults;
/// if names are given as arguments, only these faults are run, and `NAME+NAME` runs two at once; `--pairs N --seed S`
/// adds random pairs; `--short` is what CI runs; `--module native` runs the native module instead of the filter;
/// `--write` replaces the table in docs/results/reliability.md. Every argument is passed to the program;
/// `cargo xtask chaos -- --help` prints its own help. Needs root, to create its network namespace.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    wasm: WasmArgs,

    /// Passed to the program
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    // `--help` and `--list` need nothing built.
    if !args.args.iter().any(|arg| arg == "--help" || arg == "--list") {
        build::dist_and_test(args.wasm.toolchain)?;
    }
    start(&args.args)
}

/// The reason why the faults cannot be injected on this machine, if any.
pub(crate) fn missing() -> Option<String> {
    let allowed = run::succeeds(run::tool("unshare").args(["--net", "true"]));
    (!allowed).then(|| "it needs root, to create a network namespace".to_owned())
}

/// Runs the short form with the programs that the step `build` made. A fault that misses its goal gets a second try, as
/// a failed test does.
pub(crate) fn short() -> Result<()> {
    start(&["--short", "--tries", "2"].map(Into::into))
}

fn start(args: &[OsString]) -> Result<()> {
    let envoy = envoy::default_envoy()?;
    progress::headline("building prequal-chaos");
    let program = run::built_program("prequal-chaos")?;
    run::check(
        Command::new(program)
            .current_dir(workspace::root())
            .arg("run")
            .args(args)
            .env("ENVOY", envoy)
            .env("PREQUAL_DIST", workspace::dist())
            .env("PREQUAL_DIST_TEST", workspace::dist_test()),
    )
}
