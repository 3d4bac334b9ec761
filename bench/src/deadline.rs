//! Measures how far a synchronous request overshoots its deadline if no agent answers: Envoy's timers are coarse.
//!
//! Replicas serve at once but let every probe hang. The overshoot is judged by the filter's own histogram of waits,
//! which end when the filter decides. The client's excess over the deadline also includes Envoy, the replica and the
//! generator.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use prequal_core::wire::report::PROBE_PATH;
use prequal_testbed::{Backend, Body, Envoy, EnvoyConfig, Reply, Request, eventually};
use serde_json::json;

use crate::deployment::CLUSTER;
use crate::table::{self, two};

/// Goal for the 99th percentile of the time beyond the deadline, milliseconds.
const OVERSHOOT_MS: f64 = 5.0;
const REPLICAS: usize = 4;

/// Measures, prints and judges; returns whether the goal was reached. Blocks.
pub(crate) fn run(requests: usize) -> Result<bool> {
    println!("Synchronous requests whose probes all hang: {requests} each, time beyond the deadline");
    let backends = (0..REPLICAS).map(|_| Backend::start(Reply::ok())).collect::<Result<Vec<_>>>()?;
    for backend in &backends {
        backend.set_handler(|seen| match seen.path.as_str() {
            PROBE_PATH => Reply::ok().body(Body::Hang),
            _ => Reply::ok(),
        });
    }
    let replicas: Vec<SocketAddr> = backends.iter().map(Backend::addr).collect();
    let (mut rows, mut reached) = (Vec::new(), true);
    for deadline_ms in [3, 20] {
        for connections in [1, 16] {
            let envoy = Envoy::start(EnvoyConfig::for_replicas(&replicas)?.filter_settings(|settings| {
                let cluster = &mut settings["clusters"][0];
                cluster["mode"] = json!("sync");
                cluster["sync_deadline_ms"] = json!(deadline_ms);
                cluster["endpoints"] = json!(replicas.iter().map(ToString::to_string).collect::<Vec<_>>());
            }))?;
            let answers = envoy.client().burst(requests, connections, |_| Request::get("/"));
            let waited = envoy.prequal(CLUSTER)?.waits("deadline");
            ensure!(
                waited * 100 >= requests as u64 * 95,
                "only {waited} of {requests} waited until the deadline: this is not the intended case"
            );
            let mut over = Vec::new();
            for answer in answers {
                over.push(
                    answer?.elapsed.saturating_sub(Duration::from_millis(deadline_ms)).as_secs_f64() * 1e3,
                );
            }
            over.sort_by(f64::total_cmp);
            let quantile = |q: f64| over[((q * over.len() as f64).ceil() as usize).clamp(1, over.len()) - 1];
            let decided =
                eventually("Envoy merges its histograms", Duration::from_secs(20), || decided(&envoy));
            let decided = decided.map(|us| us / 1e3 - deadline_ms as f64);
            reached &= decided[1] <= OVERSHOOT_MS;
            rows.push(vec![
                format!("{deadline_ms} ms"),
                connections.to_string(),
                two(decided[0]),
                two(decided[1]),
                two(quantile(0.5)),
                two(quantile(0.99)),
                two(quantile(1.0)),
            ]);
        }
    }
    let header = ["deadline", "connections", "decided p50", "p99 ms", "client p50", "p99 ms", "max ms"];
    println!("\n{}", table::render(&header, &rows));
    println!(
        "{}  overshoot of the decision at p99 at most {OVERSHOOT_MS} ms\n",
        if reached { "PASS" } else { "MISS" }
    );
    Ok(reached)
}

/// Median and 99th percentile of the filter's waits, microseconds, once Envoy has merged them.
fn decided(envoy: &Envoy) -> Option<[f64; 2]> {
    let text = envoy.admin_get("/stats?filter=prequal_sync_wait_us").ok()?;
    // "P50(interval,all) P75(...)"; "nan" and "No recorded values" before the first merge.
    let quantile = |name: &str| -> Option<f64> {
        let (_, rest) = text.split_once(name)?;
        rest.split_once(')')?.0.split_once(',')?.1.parse().ok().filter(|us: &f64| us.is_finite())
    };
    Some([quantile(" P50(")?, quantile(" P99(")?])
}
