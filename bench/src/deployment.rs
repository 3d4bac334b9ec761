//! The processes of one run: replicas, an agent before each, and the Envoys that share them.
//!
//! Every arm has the agents in the path and the same Envoy configuration, the shipped one; a baseline
//! only lacks the filters and the probe cluster of ours. All processes end with the value.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use prequal_testbed::{Agent, AgentOptions, Envoy, EnvoyConfig, Policy};

use crate::backends::{Backends, Fleet};
use crate::scenario::Arm;

/// The serving cluster of the shipped configuration.
pub(crate) const CLUSTER: &str = "replicas";

/// A running set-up, ready for requests.
pub(crate) struct Deployment {
    pub(crate) backends: Backends,
    /// Held for their lives; Envoy and the replicas are what is looked at.
    _agents: Vec<Agent>,
    envoys: Vec<Envoy>,
}

/// Probes that were sent, and those whose fate is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Probes {
    pub(crate) sent: u64,
    pub(crate) settled: u64,
}

impl Deployment {
    /// Starts everything cold and waits until it serves.
    pub(crate) async fn start(arm: Arm, envoys: usize, fleet: &Fleet) -> Result<Self> {
        let fleet = fleet.clone();
        tokio::task::spawn_blocking(move || {
            let backends = Backends::start(&fleet)?;
            let agents = start_agents(&backends.addresses)?;
            let addresses: Vec<SocketAddr> = agents.iter().map(Agent::addr).collect();
            let configs = (0..envoys).map(|_| config(arm, &addresses)).collect::<Result<Vec<_>>>()?;
            Ok(Self { backends, _agents: agents, envoys: start_envoys(configs)? })
        })
        .await?
    }

    /// Ends all processes, off the runtime's threads.
    pub(crate) async fn stop(self) {
        // A panic in a drop was printed by the panic hook; there is nothing to add.
        let _ = tokio::task::spawn_blocking(move || drop(self)).await;
    }

    /// How many Envoys.
    pub(crate) fn envoys(&self) -> usize {
        self.envoys.len()
    }

    /// Where requests go, one per Envoy.
    pub(crate) fn targets(&self) -> Vec<SocketAddr> {
        self.envoys.iter().map(Envoy::addr).collect()
    }

    /// The admin of one Envoy.
    pub(crate) fn admin(&self, envoy: usize) -> SocketAddr {
        self.envoys[envoy].admin()
    }

    /// CPU time of all Envoys together so far.
    pub(crate) fn envoy_cpu(&self) -> Result<Duration> {
        self.envoys.iter().map(Envoy::cpu_time).sum()
    }

    /// Probes of all Envoys so far; none in a baseline.
    pub(crate) fn probes(&self) -> Result<Probes> {
        tokio::task::block_in_place(|| {
            let mut probes = Probes::default();
            for envoy in &self.envoys {
                let counters = envoy.prequal(CLUSTER)?;
                probes.sent += counters.probes("sent");
                probes.settled += counters.probes_settled();
            }
            Ok(probes)
        })
    }
}

/// One agent per replica, with one thread each: they share the machine with the thing measured.
pub(crate) fn start_agents(upstreams: &[SocketAddr]) -> Result<Vec<Agent>> {
    let options = AgentOptions { args: vec!["--threads".into(), "1".into()], ..AgentOptions::default() };
    upstreams.iter().map(|upstream| Agent::start_with(*upstream, &options)).collect()
}

/// Starts several Envoys at once: most of the time is the compilation of the module.
pub(crate) fn start_envoys(configs: Vec<EnvoyConfig>) -> Result<Vec<Envoy>> {
    let threads: Vec<_> =
        configs.into_iter().map(|config| std::thread::spawn(move || Envoy::start(config))).collect();
    let started = threads.into_iter().map(|thread| match thread.join() {
        Ok(envoy) => envoy.context("starting Envoy"),
        Err(_) => bail!("starting Envoy panicked, see above"),
    });
    started.collect()
}

fn config(arm: Arm, replicas: &[SocketAddr]) -> Result<EnvoyConfig> {
    let shipped = EnvoyConfig::for_replicas(replicas)?;
    Ok(match arm {
        Arm::Prequal => shipped,
        Arm::RoundRobin => shipped.without_prequal().policy(Policy::RoundRobin),
        Arm::LeastRequest => shipped.without_prequal().policy(Policy::LeastRequest),
        Arm::FullScan => shipped.without_prequal().policy(Policy::LeastRequestFullScan),
    })
}
