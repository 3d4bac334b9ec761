//! The cost of configured clusters that get no requests: probes per second and Envoy's CPU time, excluding the seconds
//! after the start. Clusters that were used and then abandoned are covered by the unit tests of `prequal-core`'s
//! `pool/probes.rs`.

use std::time::{Duration, Instant};

use anyhow::Result;
use prequal_testbed::{Envoy, EnvoyConfig};
use serde_json::json;

use super::{place, trivial};
use crate::backends::Backends;
use crate::deployment::{CLUSTER, start_envoys};
use crate::goals::print_verdict;

pub(crate) const CLUSTERS: usize = 100;
const WORKERS: u32 = 4;
/// Wait after the start, long enough for the probes that the filter sends at its start without any request.
pub(crate) const SETTLES: Duration = Duration::from_secs(20);
const MEASURED: Duration = Duration::from_secs(60);
/// Goal for all clusters together.
const PROBES_PER_SECOND: f64 = 1.0;
/// Goal, as a share of one core.
const CPU_SHARE: f64 = 0.005;

/// Measures, prints and judges; returns whether both goals were reached.
pub(super) async fn run() -> Result<bool> {
    let verdicts = verdicts(MEASURED).await?;
    let reached =
        verdicts.into_iter().fold(true, |all, (reached, line)| print_verdict(reached, &line) && all);
    println!();
    Ok(reached)
}

/// Measures over `measured`; returns the verdict on each goal.
pub(crate) async fn verdicts(measured: Duration) -> Result<Vec<(bool, String)>> {
    println!(
        "Envoy with {CLUSTERS} clusters that get no requests, {WORKERS} workers, over {} s",
        measured.as_secs()
    );
    let backends = Backends::start(&trivial(10))?;
    let name = |index: usize| if index == 0 { CLUSTER.to_owned() } else { format!("unused-{index}") };
    let config = (1..CLUSTERS).try_fold(
        EnvoyConfig::for_replicas(&backends.addresses)?.concurrency(WORKERS),
        |config, index| {
            let cluster = name(index);
            Ok::<_, anyhow::Error>(config.add_cluster(&cluster, &format!("/{cluster}"), &backends.addresses))
        },
    )?;
    let with = config.clone().filter_settings(|settings| {
        let clusters = (0..CLUSTERS).map(|index| {
            json!({"cluster": name(index), "probe_cluster": format!("{}-agent", name(index)), "verified_probes": true})
        });
        settings["clusters"] = clusters.collect();
    });
    let envoys =
        tokio::task::spawn_blocking(move || start_envoys(vec![config.without_prequal(), with])).await??;
    let pids: Vec<u32> = envoys.iter().map(Envoy::pid).collect();
    place(&pids, &[backends.pid()])?;
    tokio::time::sleep(SETTLES).await;
    let learned = tokio::task::block_in_place(|| probes(&envoys[1]))?;
    let (began, before) = (Instant::now(), cpu(&envoys)?);
    tokio::time::sleep(measured).await;
    let (seconds, after) = (began.elapsed().as_secs_f64(), cpu(&envoys)?);
    let sent = tokio::task::block_in_place(|| probes(&envoys[1]))? - learned;
    let shares: Vec<f64> =
        before.iter().zip(&after).map(|(before, after)| (*after - *before).as_secs_f64() / seconds).collect();
    println!("  {learned} probes at the start; without the filter {:.2} % of a core", shares[0] * 100.0);
    let rate = sent as f64 / seconds;
    let few = format!("{rate:.2} probes a second in all (less than {PROBES_PER_SECOND})");
    let cheap = format!("{:.2} % of a core (less than {} %)", shares[1] * 100.0, CPU_SHARE * 100.0);
    Ok(vec![(rate < PROBES_PER_SECOND, few), (shares[1] < CPU_SHARE, cheap)])
}

fn cpu(envoys: &[Envoy]) -> Result<Vec<Duration>> {
    envoys.iter().map(Envoy::cpu_time).collect()
}

/// Probes sent, by Envoy's own count.
fn probes(envoy: &Envoy) -> Result<u64> {
    let stats = envoy.stats()?.into_iter();
    Ok(stats.filter(|(name, _)| name.ends_with("-agent.upstream_rq_total")).map(|(_, count)| count).sum())
}
