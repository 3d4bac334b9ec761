//! gRPC's own client for Go with its policy `weighted_round_robin`, fed out of band by agents.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use prequal_testbed::handle;
use probe_agent::Agent;
use probe_agent::config::AgentConfig;

use crate::tools::go_program;

/// Maximum number of 100 calls that the slow server may get; by chance it would be 50.
const SPARED: u64 = 25;

/// Ends the program when the test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An agent in front of `server`, which answers streams of load reports.
fn agent(server: &str) -> Result<(SocketAddr, tokio::task::AbortHandle)> {
    let upstream: SocketAddr = server.parse()?;
    let mut config = AgentConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)), upstream.into());
    config.orca.streams = 10;
    config.orca.limit = 64.try_into().ok();
    config.orca.window = Duration::from_secs(1);
    let _entered = handle().enter();
    let agent = Agent::bind(config)?;
    let addr = agent.addrs().service.tcp().context("an address")?;
    let task = handle().spawn(async move { agent.run(std::future::pending()).await });
    Ok((addr, task.abort_handle()))
}

#[test]
fn grpc_for_go_spares_the_server_that_agents_report_as_slow() -> Result<()> {
    let Some(program) = go_program("tests/grpc-go", ".", "grpc-client")? else { return Ok(()) };
    let child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut child = Running(child);
    let mut input = child.0.stdin.take().context("piped")?;
    let mut lines = BufReader::new(child.0.stdout.take().context("piped")?).lines();
    let servers = lines.next().context("the addresses of the servers")??;
    let agents = servers.split(' ').skip(1).map(agent).collect::<Result<Vec<_>>>()?;
    let addrs: Vec<String> = agents.iter().map(|(addr, _)| addr.to_string()).collect();
    writeln!(input, "{}", addrs.join(" "))?;

    // Without reports the shares are equal, except in the first rounds, which go to the connection that is ready first.
    let (mut equal, mut least) = (Vec::new(), 100);
    for line in lines {
        let line = line?;
        let round: Vec<&str> = line.split(' ').collect();
        let ["round", out_of_band, fast, slow, failed] = round[..] else {
            anyhow::bail!("not understood: {line}")
        };
        eprintln!("out of band: {out_of_band}, fast {fast}, slow {slow}");
        ensure!(failed == "0", "{failed} calls failed");
        let slow: u64 = slow.parse()?;
        let enough = if out_of_band == "true" {
            least = least.min(slow);
            least <= SPARED
        } else {
            equal.push(slow);
            equal.len() == 3
        };
        writeln!(input, "{}", if enough { "enough" } else { "go on" })?;
        if enough && out_of_band == "true" {
            break;
        }
    }
    agents.iter().for_each(|(_, task)| task.abort());
    ensure!(equal[1..].iter().all(|slow| (40..=60).contains(slow)), "without reports: {equal:?}");
    ensure!(least <= SPARED, "with reports the slow server got {least} of 100");
    Ok(())
}
