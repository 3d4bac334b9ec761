//! `plb`: shows, sets and checks the settings that determine whether this host repaths connections.
//!
//! Each topic has one file under `cli/`. Each command gathers data, then prints it as a table or as JSON.

#[path = "cli/mod.rs"]
mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
