//! `cargo xtask gateway`: runs Envoy Gateway's translators on the manifests in envoy-configs/envoy-gateway/.

use anyhow::Result;

use crate::{progress, run};

/// Writes tests/envoy-gateway/translated.json: Envoy Gateway's translation of envoy-configs/envoy-gateway/ into xDS.
///
/// The tests run that xDS on Envoy. They fail if a manifest, the translating program or the release of Envoy Gateway
/// has changed since. Needs Go 1.26, or an earlier Go that may fetch it (GOTOOLCHAIN=auto). The first run compiles
/// Envoy Gateway: about five minutes of CPU time and 3 GB of Go's caches. Therefore `cargo xtask test` does not run
/// this command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write nothing, and fail if the translation differs from the file
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    progress::headline("translating with Envoy Gateway");
    let mut translate = run::cargo();
    translate.args(["run", "--quiet", "--package", "prequal-testbed", "--example", "refresh_envoy_gateway"]);
    if args.check {
        translate.args(["--", "--check"]);
    }
    run::check(&mut translate)?;
    progress::headline(if args.check { "the file is up to date" } else { "written" });
    Ok(())
}
