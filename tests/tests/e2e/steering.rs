//! Where requests go: learned membership, the slow replica, pools of clusters and workers.

use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{Envoy, EnvoyConfig, Fleet, Policy, Prequal, Reply, Request, eventually};
use serde_json::json;

use crate::support::{
    SERVING, assert_all_ok, bed, counted, set, three_fast_and_one_slow, warm, warm_cluster,
};

#[test]
fn membership_is_learned_without_initial_knowledge() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(5, &Reply::ok())?;
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&fleet.addrs())?)?;
    let cold = envoy.prequal(SERVING)?;
    assert_eq!(cold.steered(), 0, "{cold:#?}");
    let warmed = warm(&envoy, 5);
    assert_eq!(warmed.other("prequal_members"), 5);
    // From now on nearly every request is steered, and each goes to the chosen host.
    let after = eventually("steered, and no replica left out", Duration::from_secs(20), || {
        let before = envoy.prequal(SERVING).ok()?;
        assert_all_ok(&envoy.client().burst(200, 2, |_| Request::get("/")));
        let after = envoy.prequal(SERVING).ok()?;
        let steered = after.steered() - before.steered() >= 195;
        (steered && fleet.served().iter().all(|&served| served > 0)).then_some(after)
    });
    assert_eq!(after.other("prequal_diverted_total"), warmed.other("prequal_diverted_total"));
    Ok(())
}

#[test]
fn membership_is_learned_with_a_long_max_age() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(3, &Reply::ok())?;
    let config = set(EnvoyConfig::for_replicas(&fleet.addrs())?, "max_age_ms", 60_000);
    let envoy = Envoy::start(config)?;
    assert_eq!(warm(&envoy, 3).other("prequal_members"), 3);
    Ok(())
}

#[test]
fn a_slow_replica_is_avoided() -> Result<()> {
    bed!();
    let (fleet, envoy) = three_fast_and_one_slow()?;
    // A fair share would be 150. For comparison, two choices by requests in flight on the same machine:
    let other = Envoy::start(
        EnvoyConfig::for_replicas(&fleet.addrs())?.without_prequal().policy(Policy::LeastRequest),
    )?;
    assert_all_ok(&other.client().burst(600, 6, |_| Request::get("/")));
    let by_least_request = fleet.served()[3];
    eventually("steered, and hardly any to the slow one", Duration::from_secs(20), || {
        fleet.clear();
        let before = envoy.prequal(SERVING).ok()?;
        assert_all_ok(&envoy.client().burst(600, 6, |_| Request::get("/")));
        let after = envoy.prequal(SERVING).ok()?;
        let served = fleet.served();
        assert_eq!(served.iter().sum::<u64>(), 600);
        (after.steered() - before.steered() >= 590 && served[3] <= by_least_request.min(15)).then_some(())
    });
    Ok(())
}

#[test]
fn two_clusters_are_isolated() -> Result<()> {
    bed!();
    let (first, second) = (Fleet::uniform(3, &Reply::ok())?, Fleet::uniform(2, &Reply::ok())?);
    let config = EnvoyConfig::for_replicas(&first.addrs())?
        .add_cluster("other", "/other", &second.addrs())
        .filter_settings(|settings| {
            let clusters = settings["clusters"].as_array_mut().expect("a list");
            clusters.push(json!({"cluster": "other", "probe_cluster": "other-agent"}));
        });
    let envoy = Envoy::start(config)?;
    warm(&envoy, 3);
    assert_eq!(envoy.prequal("other")?.steered(), 0);
    assert_eq!(second.iter().flat_map(|replica| replica.backend.seen()).count(), 0);
    let before = envoy.prequal(SERVING)?;
    let warmed = warm_cluster(&envoy, "other", "/other", 2);
    assert_eq!(warmed.other("prequal_members"), 2);
    assert_all_ok(&envoy.client().burst(100, 2, |_| Request::get("/other")));
    let after = envoy.prequal("other")?;
    assert!(after.steered() >= 95, "{after:#?}");
    assert_eq!(after.other("prequal_diverted_total"), 0, "{after:#?}");
    assert_eq!(envoy.prequal(SERVING)?.picks, before.picks);
    for (fleet, path) in [(&first, "/"), (&second, "/other")] {
        for seen in fleet.iter().flat_map(|replica| replica.backend.seen()) {
            assert_eq!(seen.path, path);
        }
    }
    Ok(())
}

#[test]
fn the_first_request_to_an_unconfigured_cluster_does_not_count_for_the_configured_one() -> Result<()> {
    bed!();
    let (first, second) = (Fleet::uniform(3, &Reply::ok())?, Fleet::uniform(2, &Reply::ok())?);
    let config = EnvoyConfig::for_replicas(&first.addrs())?.add_cluster("other", "/other", &second.addrs());
    let envoy = Envoy::start(config)?;
    let before = warm(&envoy, 3);
    let client = envoy.client();
    assert_all_ok(&client.burst(5, 1, |_| Request::get("/other")));
    assert_all_ok(&client.burst(20, 1, |_| Request::get("/")));
    // The tick sets the gauges.
    std::thread::sleep(Duration::from_millis(600));
    let after = envoy.prequal(SERVING)?;
    assert_eq!(after.other("prequal_members"), 3, "{after:#?}");
    assert_eq!(after.other("prequal_diverted_total"), before.other("prequal_diverted_total"), "{after:#?}");
    Ok(())
}

/// While clients move from one cluster to another with the same replicas, the requests of those that have not moved yet
/// are not steered.
#[test]
fn another_cluster_with_the_same_replicas_is_left_alone() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(3, &Reply::ok())?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?.add_cluster("old", "/old", &fleet.addrs());
    let envoy = Envoy::start(config.concurrency(1))?;
    warm(&envoy, 3);
    let client = envoy.client();
    let old = |count| assert_all_ok(&client.burst(count, 1, |_| Request::get("/old")));
    // The tick publishes the counts.
    std::thread::sleep(Duration::from_millis(600));
    let before = envoy.prequal(SERVING)?;
    old(132);
    assert_all_ok(&client.burst(50, 1, |_| Request::get("/")));
    let steered = |now: &Prequal| now.steered() - before.steered();
    let after = counted(&envoy, "the moved requests", |now| steered(now) >= 45);
    assert!(steered(&after) <= 50 + 16, "requests to the old cluster were steered: {after:#?}");
    Ok(())
}

#[test]
fn two_workers_share_one_pool() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(3, &Reply::ok())?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?.concurrency(2);
    let envoy = Envoy::start(set(set(config, "max_age_ms", 10_000), "reuse_cap", 64))?;
    let workers = || -> Result<Vec<u64>> {
        let stats = envoy.stats()?;
        let of = |name: &&String| name.contains(".worker_") && name.ends_with(".downstream_cx_total");
        let of_listener = |name: &&String| of(name) && !name.contains("admin");
        Ok(stats.keys().filter(of_listener).map(|name| stats[name]).collect())
    };
    // One connection, hence one worker, fills the pool.
    let first = envoy.client();
    for _ in 0..60 {
        first.get("/")?;
    }
    let all = |now: &Prequal| now.steered() + now.picks("fallback");
    let before = counted(&envoy, "the first requests", |now| all(now) == 60);
    assert!(before.steered() > 0, "{before:#?}");
    // Each request uses a new connection, until the other worker has served too.
    let mut sent = 0;
    while workers()?.iter().any(|&connections| connections < 3) {
        envoy.client().get("/")?;
        sent += 1;
        assert!(sent < 500, "one worker gets all connections: {:?}", workers()?);
    }
    let after = counted(&envoy, "the others", |now| all(now) == 60 + sent);
    assert_eq!(
        after.picks("fallback"),
        before.picks("fallback"),
        "the other worker started with an empty pool"
    );
    Ok(())
}

#[test]
fn the_override_host_shim_also_steers() -> Result<()> {
    bed!();
    let ms = Duration::from_millis;
    let fleet = Fleet::start([5, 5, 100].map(|delay| Reply::ok().delay(ms(delay))))?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?.override_host();
    let envoy = Envoy::start(config)?;
    warm(&envoy, 3);
    eventually("hardly any to the slow one", Duration::from_secs(20), || {
        fleet.clear();
        assert_all_ok(&envoy.client().burst(300, 4, |_| Request::get("/")));
        (fleet.served()[2] <= 9).then_some(())
    });
    assert_eq!(envoy.prequal(SERVING)?.other("prequal_diverted_total"), 0);
    for seen in fleet[0].backend.seen() {
        crate::support::assert_no_prequal_headers(&seen.headers);
    }
    Ok(())
}
