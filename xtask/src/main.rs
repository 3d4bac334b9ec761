//! `cargo xtask`: every command that a contributor types.
//!
//! This file only names the commands. Each has its own file under `commands/`, and sets up what it needs on a fresh
//! machine. Nothing here is shipped.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod circles;
mod commands;
mod exports;
mod policy;
mod progress;
mod run;
mod toolchain;
mod workspace;

/// Builds, tests, measures and shows this project.
///
/// All output is under target/; deleting that folder loses nothing but time.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Build(commands::build::Args),
    Dist(commands::dist::Args),
    Crates(commands::crates::Args),
    Demo(commands::demo::Args),
    Compose(commands::compose::Args),
    Fault(commands::fault::Args),
    Chaos(commands::chaos::Args),
    Fuzz(commands::fuzz::Args),
    Native(commands::native::Args),
    Test(commands::test::Args),
    Bench(commands::bench::Args),
    Sim(commands::sim::Args),
    Soak(commands::soak::Args),
    Envoy(commands::envoy::Args),
    Gateway(commands::gateway::Args),
    Helm(commands::helm::Args),
    PlbGuest(commands::plb_guest::Args),
    Silent(commands::silent::Args),
    Reference(commands::reference::Args),
    /// Started by `cargo xtask test` in CI, to build ahead
    #[command(hide = true)]
    Ahead,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Build(args) => commands::build::run(&args),
        Command::Dist(args) => commands::dist::run(&args),
        Command::Crates(args) => commands::crates::run(&args),
        Command::Demo(args) => commands::demo::run(&args),
        Command::Compose(args) => commands::compose::run(&args),
        Command::Fault(args) => commands::fault::run(&args),
        Command::Chaos(args) => commands::chaos::run(&args),
        Command::Fuzz(args) => commands::fuzz::run(&args),
        Command::Native(args) => commands::native::run(&args),
        Command::Test(args) => commands::test::run(&args),
        Command::Bench(args) => commands::bench::run(&args),
        Command::Sim(args) => commands::sim::run(&args),
        Command::Soak(args) => commands::soak::run(&args),
        Command::Envoy(args) => commands::envoy::run(&args),
        Command::Gateway(args) => commands::gateway::run(&args),
        Command::Helm(args) => commands::helm::run(&args),
        Command::PlbGuest(args) => commands::plb_guest::run(&args),
        Command::Silent(args) => commands::silent::run(&args),
        Command::Reference(args) => commands::reference::run(&args),
        Command::Ahead => commands::ahead::run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Print the causes without a backtrace, even if RUST_BACKTRACE is set: most failures come from other
            // programs.
            eprintln!("error: {error}");
            error.chain().skip(1).for_each(|cause| eprintln!("  because: {cause}"));
            ExitCode::FAILURE
        }
    }
}
