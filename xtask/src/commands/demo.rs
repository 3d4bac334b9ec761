//! `cargo xtask demo`: the whole thing at work, set up from nothing.

use std::ffi::OsString;

use anyhow::Result;

use crate::commands::bench;
use crate::commands::build::WasmArgs;

/// Shows Prequal beside Envoy's own policies, through a real Envoy.
///
/// Fetches Envoy, builds the filter and the agent, then sends a constant 500 requests a second to 16
/// backends, two of which are slow, under round_robin, least_request and Prequal: first through one Envoy,
/// then through four that share the backends. Prints a table and writes a plot. Takes at most 4 minutes after
/// set-up, 1 with --quick.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// One Envoy only, and shorter: at most a minute after set-up
    #[arg(long)]
    quick: bool,

    /// Leave the Prequal arm running at the end and print the URLs to try; stop it with Ctrl-C
    #[arg(long)]
    keep: bool,

    #[command(flatten)]
    wasm: WasmArgs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut handed = Vec::<OsString>::new();
    if args.quick {
        handed.push("--quick".into());
    }
    if args.keep {
        handed.push("--keep".into());
    }
    bench::harness("demo", &handed, args.wasm.toolchain)
}
