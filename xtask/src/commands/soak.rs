//! `cargo xtask soak`: checks for leaks after millions of requests.

use std::ffi::OsString;

use anyhow::Result;

use crate::commands::bench;
use crate::commands::build::WasmArgs;

/// Sends millions of requests through Envoy, filter and agents, with errors, aborts and timeouts mixed in, then checks
/// for leaks.
///
/// The memory of each process must be flat over the second half, every gauge and RIF must be back at zero, each request
/// must have ended as its kind requires, and no connection may be left (docs/results/soak.md). Otherwise the exit code
/// is 1. Every further argument is passed to the harness; `cargo xtask soak -- --help` prints its own help.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of requests to send [default: 10 million]
    #[arg(long, value_name = "N")]
    requests: Option<u64>,

    #[command(flatten)]
    wasm: WasmArgs,

    /// Passed to the harness
    #[arg(last = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut arguments = args.args.clone();
    if let Some(requests) = args.requests {
        arguments.extend(["--requests".into(), requests.to_string().into()]);
    }
    bench::harness("soak", &arguments, args.wasm.toolchain)
}
