//! gRPC's own client and servers for Go, with agents between them. The client's policy `weighted_round_robin` uses the
//! agents' reports, out of band and in trailers. The agents report what they measure, or what the servers report about
//! themselves.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use prequal_core::wire::orca::backend::Metric;
use prequal_testbed::{handle, needs};
use probe_agent::Agent;
use probe_agent::backend_orca::FromBackend;
use probe_agent::config::AgentConfig;
use probe_agent::orca::OrcaFormat;

use crate::tools::{go_program, missing_go};

/// Maximum number of calls, out of 100, that the server with the higher utilisation may get; an equal share would be
/// 50.
const SPARED: u64 = 25;

/// Ends the program when the test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An agent in front of `server`, with the settings that `change` makes. The agent answers streams of load reports.
fn agent(server: &str, change: impl Fn(&mut AgentConfig)) -> Result<(SocketAddr, tokio::task::AbortHandle)> {
    let upstream: SocketAddr = server.parse()?;
    let mut config = AgentConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)), upstream.into());
    config.orca.streams = 10;
    config.orca.limit = 64.try_into().ok();
    config.orca.window = Duration::from_secs(1);
    change(&mut config);
    let _entered = handle().enter();
    let agent = Agent::bind(config)?;
    let addr = agent.addrs().service.tcp().context("an address")?;
    let task = handle().spawn(async move { agent.run(std::future::pending()).await });
    Ok((addr, task.abort_handle()))
}

/// A round of calls: how many each server got.
struct Round {
    out_of_band: bool,
    fast: u64,
    slow: u64,
}

/// Runs the client with `args` on agents of both servers, round by round, until it ends. `enough` returns whether the
/// client should continue with its next mode.
fn rounds(
    args: &[&str],
    change: impl Fn(&mut AgentConfig),
    mut enough: impl FnMut(Round) -> bool,
) -> Result<()> {
    let program = go_program("tests/grpc-go", ".", "grpc-client")?;
    let child = Command::new(program).args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut child = Running(child);
    let mut input = child.0.stdin.take().context("piped")?;
    let mut lines = BufReader::new(child.0.stdout.take().context("piped")?).lines();
    let servers = lines.next().context("the addresses of the servers")??;
    let agents = servers.split(' ').skip(1).map(|server| agent(server, &change));
    let agents = agents.collect::<Result<Vec<_>>>()?;
    let addrs: Vec<String> = agents.iter().map(|(addr, _)| addr.to_string()).collect();
    writeln!(input, "{}", addrs.join(" "))?;
    for line in lines {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let ["round", out_of_band, fast, slow, failed] = words[..] else {
            anyhow::bail!("unexpected output: {line}")
        };
        eprintln!("out of band: {out_of_band}, fast {fast}, slow {slow}");
        ensure!(failed == "0", "{failed} calls failed");
        let round = Round { out_of_band: out_of_band == "true", fast: fast.parse()?, slow: slow.parse()? };
        writeln!(input, "{}", if enough(round) { "enough" } else { "go on" })?;
    }
    agents.iter().for_each(|(_, task)| task.abort());
    Ok(())
}

#[test]
fn grpc_for_go_spares_the_server_that_agents_report_as_slow() -> Result<()> {
    needs!(missing_go());
    // Without reports the shares are equal, except in the first rounds, which go to the connection that is ready first.
    let (mut equal, mut least) = (Vec::new(), 100);
    rounds(
        &[],
        |_| {},
        |round| {
            if round.out_of_band {
                least = least.min(round.slow);
                least <= SPARED
            } else {
                equal.push(round.slow);
                equal.len() == 3
            }
        },
    )?;
    ensure!(equal[1..].iter().all(|slow| (40..=60).contains(slow)), "without reports: {equal:?}");
    ensure!(least <= SPARED, "with reports the slow server got {least} of 100");
    Ok(())
}

/// Runs rounds until a server gets few calls; `calls` returns how many it got in a round.
fn is_spared(args: &[&str], change: impl Fn(&mut AgentConfig), calls: impl Fn(Round) -> u64) -> Result<()> {
    needs!(missing_go());
    let mut least = 100;
    rounds(args, change, |round| {
        least = least.min(calls(round));
        least <= SPARED
    })?;
    ensure!(least <= SPARED, "the server still got {least} of 100 calls");
    Ok(())
}

#[test]
fn grpc_for_go_follows_a_servers_own_reports() -> Result<()> {
    // The fast server reports a high utilisation in the trailers of its calls, and the slow one a low one. By the
    // agents' own measurements it would be the other way round.
    let reads = |config: &mut AgentConfig| config.orca_from_backend = Some(FromBackend(Metric::Utilization));
    is_spared(&["reporting"], reads, |round| round.fast)
}

#[test]
fn grpc_for_go_follows_a_servers_own_reports_out_of_band() -> Result<()> {
    let reads = |config: &mut AgentConfig| {
        config.orca_from_backend = Some(FromBackend(Metric::Utilization));
        config.orca_backend_stream = Some(Duration::from_secs(1));
    };
    is_spared(&["streaming"], reads, |round| round.fast)
}

#[test]
fn grpc_for_go_reads_the_agents_reports_in_trailers() -> Result<()> {
    let in_band = |config: &mut AgentConfig| {
        config.orca.format = Some(OrcaFormat::Binary);
        config.orca.streams = 0;
    };
    is_spared(&["in-band"], in_band, |round| round.slow)
}

#[test]
fn grpc_servers_for_go_with_few_streams_and_short_connections_lose_no_call() -> Result<()> {
    needs!(missing_go());
    // Each server gets about 50 calls at once, allows ten streams per connection, and sends a GOAWAY on each connection
    // every 0.2 s. `rounds` fails if a call fails.
    let mut done = 0;
    rounds(
        &["limits"],
        |_| {},
        |round| {
            assert_eq!(round.fast + round.slow, 2000);
            done += 1;
            done == 3
        },
    )?;
    Ok(())
}
