//! `cargo xtask demo`: sets up everything from nothing and shows Prequal at work.

use std::ffi::OsString;

use anyhow::Result;

use crate::commands::bench;
use crate::commands::build::WasmArgs;

/// Compares Prequal with Envoy's own policies, through a real Envoy.
///
/// Fetches Envoy and builds the filter and the agent. Then sends a constant 500 requests a second to 16 backends, two
/// of which are slow, under round_robin, least_request and Prequal: first through one Envoy, then through four that
/// share the backends. Prints a table and writes a plot. Takes up to 4 minutes after setup, up to 1 minute with
/// --quick.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// One Envoy only, and shorter: up to a minute after setup
    #[arg(long)]
    quick: bool,

    /// Keep the Prequal deployment running at the end and print URLs to try; Ctrl-C stops it
    #[arg(long)]
    keep: bool,

    #[command(flatten)]
    wasm: WasmArgs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut arguments = Vec::<OsString>::new();
    if args.quick {
        arguments.push("--quick".into());
    }
    if args.keep {
        arguments.push("--keep".into());
    }
    bench::harness("demo", &arguments, args.wasm.toolchain)
}
