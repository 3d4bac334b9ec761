//! `plb`: shows, sets and proves what decides about repathing on this host.
//!
//! One file a topic under `cli/`; each command gathers data, then prints it as a table or as JSON.

#[path = "cli/mod.rs"]
mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
