//! `cargo xtask chaos`: faults under load, each with a goal, by the program in `tests/chaos`.

use std::ffi::OsString;
use std::process::Command;

use anyhow::Result;

use crate::commands::build::{self, WasmArgs};
use crate::commands::envoy;
use crate::{progress, run, workspace};

/// Breaks things under load: agents, backends, Envoy, the machine, the network, one at a time and in random pairs.
///
/// The shipped configuration, a real Envoy, eight agents with backends, 500 requests/s of every kind. Each fault has a goal;
/// a missed one is the exit status. `--list` names the faults, names run only those, `--pairs N --seed S` adds random pairs,
/// `--short` is what CI runs, `--write` renews the table in docs/reliability.md. Every argument is handed to the program;
/// `cargo xtask chaos -- --help` prints its own help. Needs root, for a network namespace of its own.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    wasm: WasmArgs,

    /// Handed to the program
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    // What only asks needs nothing built for it.
    if !args.args.iter().any(|arg| arg == "--help" || arg == "--list") {
        let toolchain = build::dist(args.wasm.toolchain)?;
        build::dist_test(&toolchain)?;
    }
    start(&args.args)
}

/// What keeps it from running here.
pub(crate) fn missing() -> Option<String> {
    let allowed = run::succeeds(run::tool("unshare").args(["--net", "true"]));
    (!allowed).then(|| "a network namespace of its own needs root".to_owned())
}

/// The short form, with what the step `build` has made. As for tests, a fault that misses its goal has a second try.
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
