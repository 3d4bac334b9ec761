//! `cargo xtask sim`: the simulator, which needs neither Envoy nor the module.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::{progress, run, workspace};

/// Runs the simulator: every policy of the papers against each other in virtual time.
///
/// `cargo xtask sim fig6` runs one experiment, `cargo xtask sim all` every one and then writes docs/evaluation.md,
/// `cargo xtask sim all --quick` is what CI runs (at most three minutes). Every argument is handed to the
/// simulator; `cargo xtask sim -- --help` prints its own help.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Handed to the simulator
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let program = program()?;
    run::check(Command::new(program).current_dir(workspace::root()).arg("sim").args(&args.args))
}

/// All experiments, short: a step of `cargo xtask test`.
pub(crate) fn quick() -> Result<()> {
    let program = program()?;
    // The tables would bury the other steps; a bar that is missed comes on standard error.
    run::output(Command::new(program).current_dir(workspace::root()).args(["sim", "all", "--quick"]))
        .map(drop)
}

fn program() -> Result<PathBuf> {
    progress::headline("building the simulator");
    run::built_program("prequal-bench")
}
