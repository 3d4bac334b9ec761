//! Prequal against other load balancers in the same run: the fleet, the agents and the arrivals are the same for all.
//!
//! A pass has Envoy's own policies, the peers that this machine has, and Prequal as filter and as native module. Every
//! proxy has the same number of workers, and no policy has retries or active health checks. Prequal can still eject a
//! replica that fails. Goals are set for Prequal against the best of all others, quantile by quantile; a missed goal is
//! a finding.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use prequal_testbed::{dist_dir, envoy_binary};

use super::{Topologies, draw, ingress, measure, never_worse, slow_half, stall};
use crate::arm::Arm;
use crate::comparison::Comparison;
use crate::deployment::NATIVE;
use crate::goals::Goals;
use crate::passes::Length;
use crate::peer::Peer;
use crate::scenario::{Goal, Scenario};

/// Envoy's own policies.
const ENVOY: [Arm; 5] = [Arm::RoundRobin, Arm::LeastRequest, Arm::FullScan, Arm::Cswrr, Arm::CswrrOutOfBand];

/// Arguments of `peers`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Peers {
    /// The fleet and its load, as in `e2e`
    shape: NamedFleet,
    #[command(flatten)]
    length: Length,
    /// Number of proxies that share the load; each of four has one worker
    #[arg(long, default_value = "1")]
    proxies: Topologies,
    /// Workers or threads of a single proxy
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
}

/// Fleets and loads of `e2e`.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum NamedFleet {
    /// 16 identical replicas at 80 % load, exponential times
    Equal,
    /// 10 identical replicas at 90 % load, exponential times
    #[value(name = "equal-90")]
    Equal90,
    /// 8 replicas at 70 % load, one request in ten takes twenty times as long
    Mix,
    /// 8 replicas, and 8 half as fast, at 80 % load
    Generations,
    /// 14 replicas with 4 slots and 2 with one
    Queue,
    /// 12 replicas at 90 % load, all requests identical
    Constant,
    /// The demo's fleet: 14 replicas answer in 50 ms, 2 in 800 ms
    Ingress,
    /// Half of 40 replicas take five times as long, and all have little room for waiting requests
    SlowHalf,
    /// One of 11 replicas takes 2 s for half of the run
    Stall,
}

impl NamedFleet {
    fn scenario(self, seconds: Duration) -> Scenario {
        match self {
            Self::Equal => never_worse::equal(seconds),
            Self::Equal90 => never_worse::equal_90(seconds),
            Self::Mix => never_worse::mix(seconds),
            Self::Generations => never_worse::generations(seconds),
            Self::Queue => never_worse::queue(seconds),
            Self::Constant => never_worse::constant(seconds),
            Self::Ingress => ingress::scenario(seconds),
            Self::SlowHalf => slow_half::scenario(seconds),
            Self::Stall => stall::scenario(seconds),
        }
    }
}

/// Runs one fleet; the exit code says whether every goal was reached.
pub(crate) async fn run(args: &Peers) -> Result<ExitCode> {
    ensure!(
        !NATIVE.load(Ordering::Relaxed),
        "`peers` runs both the filter and the native module; leave out --native"
    );
    let (peers, versions) = available()?;
    let native = dist_dir().join("libprequal_native.so").is_file();
    if !native {
        println!("No native module in {}: skipped.", dist_dir().display());
    }
    let ours: &[Arm] = if native { &[Arm::Prequal, Arm::Native] } else { &[Arm::Prequal] };
    let shape = args.shape.scenario(args.length.seconds(60));
    let scenario = Scenario {
        arms: [&ENVOY, peers.as_slice(), ours].concat(),
        workers: args.workers,
        // Do not watch a healed replica come back: this would lengthen Prequal's runs only.
        watch: None,
        ..shape
    };
    let mut scenarios = args.length.choose(vec![scenario])?;
    for scenario in &mut scenarios {
        let ours = scenario.arms.iter().filter(|arm| arm.is_prequal());
        scenario.goals = ours.map(|arm| Goal::NoWorseThanPeers(*arm)).collect();
    }
    let topologies = args.proxies.list();
    let comparisons = measure(scenarios, args.length.passes(3), topologies).await?;
    report(&comparisons, topologies, &args.length.out, &versions)
}

fn report(comparisons: &[Comparison], topologies: &[usize], out: &Path, versions: &str) -> Result<ExitCode> {
    let mut goals = Goals::default();
    for comparison in comparisons {
        let mut panels = Vec::new();
        for envoys in topologies {
            println!("{}", comparison.tables(*envoys));
            goals.judge(comparison, *envoys);
            // Two panels, because one cannot show more than eight curves. Prequal is in both, with the same colours.
            let of = |peers: bool| {
                let arms = comparison.scenario.arms.iter().copied();
                let (ours, others): (Vec<Arm>, Vec<Arm>) = arms.partition(|arm| arm.is_prequal());
                let others = others.into_iter().filter(|arm| matches!(arm, Arm::Peer(_)) == peers);
                ours.into_iter().chain(others).collect::<Vec<_>>()
            };
            panels.extend([false, true].map(|peers| comparison.panel_of(*envoys, &of(peers))));
        }
        let name = format!("peers-{}", comparison.scenario.name);
        draw(&out.join(format!("{name}.svg")), &name, &panels)?;
    }
    println!("Versions: {versions}.\n");
    Ok(goals.print())
}

/// The peers that this machine can run, and the versions of all programs.
fn available() -> Result<(Vec<Arm>, String)> {
    let mut versions = vec![envoy_version()?];
    let mut arms = Vec::new();
    for peer in Peer::ALL {
        match peer.version() {
            Ok(version) => {
                arms.push(Arm::Peer(peer));
                versions.push(version);
            }
            Err(why) => println!("{} is skipped: {why:#}", peer.label()),
        }
    }
    versions.dedup();
    Ok((arms, versions.join(", ")))
}

fn envoy_version() -> Result<String> {
    let output = Command::new(envoy_binary()).arg("--version").output().context("running Envoy")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = release(&text).with_context(|| format!("Envoy printed {text:?}"))?;
    Ok(format!("Envoy {version}"))
}

/// The release in a line such as `FILE  version: COMMIT/1.40.0/Clean/RELEASE/BoringSSL`.
fn release(line: &str) -> Option<&str> {
    line.rsplit_once("version: ")?.1.split('/').nth(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envoys_release_is_read_whatever_its_path() {
        let line = "\n/folder/envoy/envoy  version: 9e55809/1.40.0/Clean/RELEASE/BoringSSL\n\n";
        assert_eq!(release(line), Some("1.40.0"));
        assert_eq!(release("envoy 1.40.0"), None);
    }
}
