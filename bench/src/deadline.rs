//! How long a synchronous request waits where no agent answers: Envoy's timers are coarse.
//!
//! Replicas serve at once and let every probe hang. The overshoot is what a request takes beyond its deadline; the
//! way through Envoy and the generator's own delay are in it, so it is an upper bound.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use prequal_core::report::PROBE_PATH;
use prequal_testbed::{Backend, Body, Envoy, EnvoyConfig, Reply, Request};
use serde_json::json;

use crate::deployment::CLUSTER;
use crate::table::{self, two};

/// Beyond the deadline at the 99th percentile, milliseconds.
const OVERSHOOT_MS: f64 = 5.0;
const REPLICAS: usize = 4;

/// Measures, prints, judges. Blocks.
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
                "only {waited} of {requests} waited: not the case meant"
            );
            let mut over = Vec::new();
            for answer in answers {
                over.push(
                    answer?.elapsed.saturating_sub(Duration::from_millis(deadline_ms)).as_secs_f64() * 1e3,
                );
            }
            over.sort_by(f64::total_cmp);
            let quantile = |q: f64| over[((q * over.len() as f64).ceil() as usize).clamp(1, over.len()) - 1];
            reached &= quantile(0.99) <= OVERSHOOT_MS;
            rows.push(vec![
                format!("{deadline_ms} ms"),
                connections.to_string(),
                two(quantile(0.5)),
                two(quantile(0.99)),
                two(quantile(1.0)),
            ]);
        }
    }
    println!("\n{}", table::render(&["deadline", "connections", "p50 ms", "p99 ms", "max ms"], &rows));
    println!("{}  overshoot at p99 at most {OVERSHOOT_MS} ms\n", if reached { "PASS" } else { "MISS" });
    Ok(reached)
}
