//! `cargo xtask reference`: writes the tables of docs/reference/configuration.md from the code.

use anyhow::Result;

use crate::run;

/// Writes the tables of docs/reference/configuration.md: every setting and flag as defined in the code.
///
/// Runs the test that compares the document with the code, in a mode in which it writes the tables instead.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(Args {}: &Args) -> Result<()> {
    run::check(
        run::cargo()
            .args(["test", "--quiet", "--package", "prequal-testbed", "--test", "reference"])
            .env("PREQUAL_WRITE_REFERENCE", "1"),
    )
}
