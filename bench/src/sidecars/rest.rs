//! The sidecars at rest: what an Envoy costs without requests, and which messages the replicas still get.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::fleet::LEARNS;
use crate::arm::Arm;
use crate::cost::idle;
use crate::deployment::Deployment;
use crate::goals::Goals;
use crate::scenario::{Scenario, topology_label};
use crate::table::{self, one};

/// Goal for an Envoy at rest, as a share of one core.
const CPU_SHARE: f64 = 0.005;

/// Mean figures at rest, those of an Envoy unless stated otherwise.
struct Rest {
    /// Share of one core.
    cpu: f64,
    resident_mib: f64,
    /// Probes per second that a replica gets from all Envoys together.
    probes: f64,
    /// Share of one core that an agent uses.
    agent_cpu: f64,
}

/// Measures, without requests, the fleet of `scenario` and an Envoy with many clusters. Prints the figures and adds the
/// verdicts.
pub(super) async fn run(
    scenario: &Scenario,
    envoys: usize,
    seconds: Duration,
    goals: &mut Goals,
) -> Result<()> {
    let place = format!("{} at rest", topology_label(envoys));
    println!(
        "{place}: load for {} s, a pause of {} s, then {} s measured",
        LEARNS.as_secs(),
        idle::SETTLES.as_secs(),
        seconds.as_secs()
    );
    let mut rows = Vec::new();
    for arm in [Arm::RoundRobin, Arm::Prequal] {
        let deployment = Deployment::start(arm, envoys, scenario.workers(envoys), &scenario.fleet).await?;
        let rest = measure(scenario, &deployment, seconds).await;
        deployment.stop().await;
        let rest = rest?;
        println!("  {}: {:.3} % of a core for each Envoy", arm.label(), rest.cpu * 100.0);
        rows.push(vec![
            arm.label().to_owned(),
            format!("{:.3} %", rest.cpu * 100.0),
            one(rest.resident_mib),
            format!("{:.3}", rest.probes),
            format!("{:.3} %", rest.agent_cpu * 100.0),
        ]);
        if arm == Arm::Prequal {
            let line = format!(
                "{place}: {:.3} % of a core each (less than {} %)",
                rest.cpu * 100.0,
                CPU_SHARE * 100.0
            );
            goals.add(rest.cpu < CPU_SHARE, line);
        }
    }
    let header = ["policy", "Envoy, of a core", "Envoy MiB", "probes/s per replica", "agent, of a core"];
    println!("\n{}", table::render(&header, &rows));
    for (reached, line) in idle::verdicts(seconds).await? {
        goals.add(reached, format!("{} clusters without requests: {line}", idle::CLUSTERS));
    }
    Ok(())
}

async fn measure(scenario: &Scenario, deployment: &Deployment, seconds: Duration) -> Result<Rest> {
    // These Envoys must know the fleet and have used it; Envoys that never had a request are measured elsewhere.
    scenario.start_load(deployment, LEARNS, 1).finish().await;
    tokio::time::sleep(idle::SETTLES).await;
    let read =
        || tokio::task::block_in_place(|| anyhow::Ok((deployment.proxy_cpu()?, deployment.agents_work()?)));
    let (began, before) = (Instant::now(), read()?);
    tokio::time::sleep(seconds).await;
    let (elapsed, after) = (began.elapsed().as_secs_f64(), read()?);
    let agents = after.1.since(before.1);
    let replicas = scenario.fleet.len() as f64;
    Ok(Rest {
        cpu: after.0.saturating_sub(before.0).as_secs_f64() / elapsed / deployment.envoys() as f64,
        resident_mib: deployment.envoy_resident_kib()? / 1024.0,
        probes: agents.probes / elapsed / replicas,
        agent_cpu: agents.cpu.as_secs_f64() / elapsed / replicas,
    })
}
