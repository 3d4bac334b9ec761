//! The command line: arguments, the network namespace, exit codes.

mod args;
mod knobs;
mod labels;
mod live;
mod output;
mod review;
mod routes;
mod sockets;

use std::process::ExitCode;

use clap::Parser as _;
use plb_netlink::netns::Namespace;
use plb_netlink::{Error, Result};

use args::{Cli, Command};
use output::Output;

/// Result of a command that answers a question.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Answer {
    /// The command is done, or it found nothing wrong.
    Good,
    /// The command found something wrong: exit code 1.
    Bad,
}

pub(crate) fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(Answer::Good) => ExitCode::SUCCESS,
        Ok(Answer::Bad) => ExitCode::from(1),
        Err(error) => {
            eprintln!("plb: {error}");
            let mut cause = std::error::Error::source(&error);
            while let Some(inner) = cause {
                eprintln!("  because: {inner}");
                cause = inner.source();
            }
            ExitCode::from(exit_code(&error))
        }
    }
}

/// Returns the exit code; see `EXIT CODES` in the help.
fn exit_code(error: &Error) -> u8 {
    match error {
        Error::Invalid(_) => 2,
        Error::NotPermitted { .. } => 3,
        Error::Unsupported { .. } => 4,
        Error::Gone(_) => 5,
        _ => 6,
    }
}

fn run(cli: &Cli) -> Result<Answer> {
    if let Some(name) = &cli.netns {
        Namespace::named(name)?.enter()?;
    }
    let output = Output { json: cli.json, dry_run: cli.dry_run };
    match &cli.command {
        Command::Show => knobs::show(output),
        Command::Set(args) => knobs::set(output, args),
        Command::Check(args) => sockets::check(output, args),
        Command::Sockets(args) => sockets::list(output, args),
        Command::Label(args) => labels::run(output, args),
        Command::Pin(args) => sockets::pin(output, args),
        Command::Unpin(args) => sockets::unpin(output, args),
        Command::Repath(args) => live::repath(output, args),
        Command::Run(args) => live::run(output, args),
        Command::Restore => live::restore(),
        Command::Watch(args) => live::watch_table(output, args),
        Command::Route(args) => routes::run(output, args),
        Command::Lint => review::lint(output),
        Command::Envoy(args) => review::envoy(output, args),
    }
}
