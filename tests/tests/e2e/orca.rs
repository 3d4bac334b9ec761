//! Envoy's own `client_side_weighted_round_robin`, fed by our agents: no filter, no probes.

use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{AgentOptions, Envoy, EnvoyConfig, Replica, Reply, Request};
use serde_json::json;

use crate::support::{assert_all_ok, bed};

/// A cluster of a fast and a slow replica, how their agents tell their load, and whether Envoy asks out of band.
const CLUSTERS: [(&str, &[&str], bool); 5] = [
    (SILENT, &[], false),
    ("text", &["--orca", "text"], false),
    ("json", &["--orca", "json"], false),
    ("binary", &["--orca", "binary"], false),
    ("oob", &["--orca-streams", "10"], true),
];
const POLICY: &str = "envoy.extensions.load_balancing_policies.client_side_weighted_round_robin";
/// Agents that report nothing: an equal share.
const SILENT: &str = "silent";
/// Most of 100 requests that the slow replica may get.
const SPARED: u64 = 25;
const TRIES: usize = 10;

fn policy(out_of_band: bool) -> serde_json::Value {
    let typed_config = json!({
        "@type": format!("type.googleapis.com/{POLICY}.v3.ClientSideWeightedRoundRobin"),
        "blackout_period": "0.1s", "weight_update_period": "0.1s",
        "enable_oob_load_report": out_of_band, "oob_reporting_period": "0.2s",
    });
    json!({"policies": [{"typed_extension_config": {"name": POLICY, "typed_config": typed_config}}]})
}

#[test]
fn weighted_round_robin_spares_the_replica_that_our_agents_report_as_slow() -> Result<()> {
    bed!();
    let start = |(name, args, out_of_band): (&'static str, &[&str], bool)| {
        let load = ["--orca-window-ms", "1000", "--orca-limit", "64"];
        let args: Vec<String> = args.iter().chain(&load).map(ToString::to_string).collect();
        let options = AgentOptions { args, ..AgentOptions::default() };
        let replica = |ms| Replica::start_with(Reply::ok().delay(Duration::from_millis(ms)), &options);
        Ok((name, out_of_band, [replica(10)?, replica(80)?]))
    };
    let fleets = CLUSTERS.map(start).into_iter().collect::<Result<Vec<_>>>()?;
    let mut config = EnvoyConfig::shipped()?;
    for (name, _, replicas) in &fleets {
        config = config.add_cluster(name, &format!("/{name}/"), &replicas.each_ref().map(Replica::addr));
    }
    let envoy = Envoy::start(config.without_prequal().edit(|config| {
        for (name, out_of_band, _) in &fleets {
            let cluster = config.cluster_mut(name);
            cluster.as_object_mut().expect("a cluster").remove("lb_policy");
            cluster["load_balancing_policy"] = policy(*out_of_band);
        }
    }))?;

    let (envoy, fleets) = (&envoy, &fleets);
    // Shares of the slow replica in percent. Reports take a while to count, and a busy machine makes both slow.
    let slow_share = |name: &str, replicas: &[Replica; 2]| {
        let mut share = 100;
        let tries = if name == SILENT { 1 } else { TRIES };
        for _ in 0..tries {
            replicas.iter().for_each(|replica| replica.backend.clear());
            let path = format!("/{name}/");
            assert_all_ok(&envoy.client().burst(100, 8, move |_| Request::get(&path)));
            share = share.min(replicas[1].backend.served());
            if share <= SPARED {
                break;
            }
        }
        share
    };
    std::thread::scope(|scope| {
        let ask = |name, replicas| scope.spawn(move || slow_share(name, replicas));
        let shares: Vec<_> = fleets.iter().map(|(name, _, replicas)| (*name, ask(*name, replicas))).collect();
        for (name, share) in shares {
            let share = share.join().expect("no failed request");
            let fair = if name == SILENT { 40..=60 } else { 0..=SPARED };
            eprintln!("{name}: the slow replica got {share} of 100");
            assert!(fair.contains(&share), "{name}: the slow replica got {share} of 100\n{}", envoy.log());
        }
    });
    let reply = envoy.client().get("/text/")?;
    assert!(reply.header("endpoint-load-metrics").is_some(), "it is for the operator to remove");
    let reports = envoy.stat("cluster.oob.lb_orca_oob.reports_received")?;
    let streams = fleets[4].2[0].agent.metrics()?["prequal_agent_orca_streams"];
    assert!(reports > 0 && streams == 1.0, "{reports} reports, {streams} streams");
    Ok(())
}
