//! `probe-agent`: starts the agent and stops it on a signal.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use probe_agent::Agent;
use probe_agent::cli::Cli;
use probe_agent::log::Log;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let log = cli.log();
    match run(cli, &log) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(CUT),
        Err(error) => {
            log.say(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Returns the number of requests that the drain cut.
fn run(cli: Cli, log: &Log) -> anyhow::Result<u32> {
    let runtime = runtime(cli.threads)?;
    let cut = runtime.block_on(async {
        let mut agents = Vec::new();
        for config in cli.configs() {
            agents.push(Agent::bind(config)?);
        }
        if let Some((first, others)) = agents.split_first_mut() {
            others.iter().for_each(|other| first.show(other));
        }
        let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
        announce(&agents).context("standard output")?;
        let second = log.clone();
        let shutdown = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tokio::spawn(async move {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                second.say("second signal: exiting without waiting for requests in flight");
                std::process::exit(1);
            });
        };
        let (stop, stopped) = watch::channel(());
        let running: Vec<_> = agents
            .into_iter()
            .map(|agent| {
                let mut stopped = stopped.clone();
                tokio::spawn(agent.run(async move {
                    let _ = stopped.changed().await;
                }))
            })
            .collect();
        shutdown.await;
        drop(stop);
        let mut cut = 0;
        for agent in running {
            cut += agent.await.context("an agent failed")?;
        }
        if cut > 0 {
            log.say(&format!("drain timed out: cut {cut} requests in flight"));
        }
        Ok(cut)
    });
    // A name lookup in progress must not keep the process alive.
    runtime.shutdown_background();
    cut
}

fn runtime(threads: Option<u16>) -> anyhow::Result<Runtime> {
    let threads = match threads {
        Some(threads) => usize::from(threads),
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let mut builder = if threads == 1 {
        tokio::runtime::Builder::new_current_thread()
    } else {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(threads);
        builder
    };
    builder.enable_all().build().context("cannot start threads")
}

/// Prints the addresses, so that a harness that asked for port 0 learns the ports.
fn announce(agents: &[Agent]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for (n, agent) in agents.iter().enumerate() {
        let addrs = agent.addrs();
        let [service, probe] = if n == 0 { ["service", "probe"] } else { ["replica", "replica-probe"] };
        writeln!(out, "listening {service}={}", addrs.service)?;
        if let Some(addr) = addrs.probe {
            writeln!(out, "listening {probe}={addr}")?;
        }
        if let Some(admin) = addrs.admin {
            writeln!(out, "listening admin={admin}")?;
        }
    }
    writeln!(out, "ready")?;
    out.flush()
}

/// Exit status if the drain had to cut requests.
const CUT: u8 = 3;
