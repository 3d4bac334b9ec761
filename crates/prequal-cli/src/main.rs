//! `prequal`: renders an Envoy configuration with Prequal, checks one for mistakes, and watches one at work.
//!
//! Each subcommand has one module. None of them contains a rule of Prequal: `prequal-core` validates settings,
//! `prequal-stats` reads statistics, and rendering starts from a shipped configuration.

mod check;
mod config;
mod read;
mod top;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Prequal for Envoy: render a configuration, check one, watch one at work
#[derive(Parser)]
#[command(name = "prequal", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Config(Box<config::Args>),
    Check(check::Args),
    Top(top::Args),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Config(args) => config::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Top(args) => top::run(&args),
    };
    done.unwrap_or_else(|error| {
        // The reader of the output may have exited (`| head`); then there is no one to report the error to.
        if !is_broken_pipe(&error) {
            eprintln!("prequal: {error:#}");
        }
        ExitCode::from(2)
    })
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    kind == Some(std::io::ErrorKind::BrokenPipe)
}
