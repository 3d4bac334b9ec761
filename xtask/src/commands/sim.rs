//! `cargo xtask sim`: runs the simulator, which needs neither Envoy nor the module.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::{progress, run, workspace};

/// Runs the simulator, which compares every policy of the papers in virtual time.
///
/// `cargo xtask sim fig6` runs one experiment. `cargo xtask sim all` runs every experiment and then writes
/// docs/results/evaluation.md. `cargo xtask sim all --quick` is what CI runs (up to three minutes). Every argument is
/// passed to the simulator; `cargo xtask sim -- --help` prints its own help.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Passed to the simulator
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let program = program()?;
    run::check(Command::new(program).current_dir(workspace::root()).arg("sim").args(&args.args))
}

/// Runs a short version of all experiments: a step of `cargo xtask test`.
pub(crate) fn quick() -> Result<()> {
    let program = program()?;
    // The tables would bury the other steps' output; missed goals are reported on standard error.
    run::output(Command::new(program).current_dir(workspace::root()).args(["sim", "all", "--quick"]))
        .map(drop)
}

fn program() -> Result<PathBuf> {
    progress::headline("building the simulator");
    run::built_program("prequal-bench")
}
