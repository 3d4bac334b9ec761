//! `prequal`: renders an Envoy configuration with Prequal, finds what breaks one, and watches one at work.
//!
//! One module a subcommand. None of them knows a rule of Prequal: settings are judged by `prequal-core`, statistics read
//! by `prequal-stats`, and what is rendered is the configuration that ships.

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
        // Whoever reads the output may have gone away (`| head`): nobody is left to be told.
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
