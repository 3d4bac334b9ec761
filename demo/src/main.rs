//! The programs of the docker-compose demo, in one binary so that one image serves all of them.
//!
//! A replica is three containers in one network namespace: `hold` owns the namespace, so that the other two can die and
//! come back; `service` answers requests; the shipped `probe-agent` is in front of it. `load` sends half of the
//! requests through each Envoy, `antagonist` burns CPU beside a replica, and `page` collects data, draws it and
//! switches faults on. Users of the filter get none of these programs.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

mod antagonist;
mod faults;
mod hold;
mod load;
mod page;
mod service;
mod web;
mod windows;

/// The programs of the docker-compose demo. `docs/guide/compose.md` describes how they work together.
#[derive(Parser)]
#[command(name = "prequal-demo", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Owns the network namespace of a replica and does nothing else
    Hold,
    Service(service::Args),
    Antagonist(antagonist::Args),
    Load(load::Args),
    Page(page::Args),
    /// Succeeds if a GET of this address answers 200, for health checks
    Health {
        /// `http://host:port/path`
        url: String,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("prequal-demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // As PID 1 of a container, a program without handlers would ignore SIGTERM.
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        tokio::select! {
            done = start(command) => done,
            _ = terminate.recv() => Ok(()),
            _ = interrupt.recv() => Ok(()),
        }
    })
}

async fn start(command: Command) -> Result<()> {
    match command {
        Command::Hold => hold::run().await,
        Command::Service(args) => service::run(args).await,
        Command::Antagonist(args) => antagonist::run(args).await,
        Command::Load(args) => load::run(args).await,
        Command::Page(args) => page::run(args).await,
        Command::Health { url } => {
            let answer = web::Client::new().get(&url, Duration::from_secs(3)).await?;
            ensure!(answer.status == http::StatusCode::OK, "{url} answered {}", answer.status);
            Ok(())
        }
    }
}
