//! `cargo xtask reference`: the tables of docs/configuration.md, from the code.

use anyhow::Result;

use crate::run;

/// Writes the tables of docs/configuration.md: every setting and flag as the code has it.
///
/// The test that holds the document against the code writes them instead.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(Args {}: &Args) -> Result<()> {
    run::check(
        run::cargo()
            .args(["test", "--quiet", "--package", "prequal-testbed", "--test", "reference"])
            .env("PREQUAL_WRITE_REFERENCE", "1"),
    )
}
