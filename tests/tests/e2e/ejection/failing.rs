//! Replicas that fail requests: which failures eject, how soon, and how the replicas come back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{Backend, Client, Envoy, EnvoyConfig, Fleet, Reply, eventually};
use serde_json::json;

use super::{MS, get, good, until, without_retries};
use crate::support::{bed, counted, grpc_reply, grpc_reply_alone, grpc_request, set, warm};

/// Fails `share` per cent of the requests at once, in a fixed pattern; the others are answered after 20 ms.
fn fail(backend: &Backend, share: u64) {
    let count = Arc::new(AtomicU64::new(0));
    backend.set_handler(move |_| {
        // 37 is coprime to 100, which spreads the failures.
        if count.fetch_add(37, Ordering::Relaxed) % 100 < share {
            Reply::status(503)
        } else {
            Reply::ok().delay(MS(20))
        }
    });
}

#[test]
fn without_probes_all_replicas_are_used_and_a_failed_one_comes_back() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(4, &Reply::ok().delay(MS(5)))?;
    let config = set(without_retries(&fleet.addrs())?, "budget", "fixed");
    let config = set(set(config, "r_probe", 0), "idle_probe_interval_ms", 0);
    let envoy = Envoy::start(config)?;
    warm(&envoy, 4);
    let client = envoy.client();
    fail(&fleet[0].backend, 100);
    until(&client, "ejected", Duration::from_secs(10), || {
        envoy.prequal("replicas").is_ok_and(|counts| counts.other("prequal_ejected") == 1)
    });
    fleet[0].backend.set(Reply::ok().delay(MS(5)));
    until(&client, "back in use", Duration::from_secs(30), || {
        envoy.prequal("replicas").is_ok_and(|counts| counts.other("prequal_ejected") == 0)
    });
    Ok(())
}

#[test]
fn a_replica_that_fails_some_of_its_requests_is_ejected_and_comes_back() -> Result<()> {
    bed!();
    for (share, workers) in [(30, 1), (30, 2), (50, 1), (100, 1)] {
        let fleet = Fleet::uniform(10, &Reply::ok().delay(MS(20)))?;
        let envoy = Envoy::start(without_retries(&fleet.addrs())?.concurrency(workers))?;
        warm(&envoy, 10);
        let client = envoy.client();
        get(&client, 400);
        fail(&fleet[0].backend, share);
        fleet.clear();
        let answers = get(&client, 2000);
        let counts = envoy.prequal("replicas")?;
        assert!(good(&answers) >= 1980, "failing {share} %: {} of 2000 good: {counts:#?}", good(&answers));
        // A replica that looked slow on a busy machine has to wait for its first request.
        until(&client, "it still gets a few requests", Duration::from_secs(30), || fleet.served()[0] > 0);
        fleet[0].backend.set(Reply::ok().delay(MS(20)));
        until(&client, "back in use", Duration::from_secs(30), || {
            fleet.clear();
            get(&client, 200);
            fleet.served()[0] >= 10
        });
        let counts = envoy.prequal("replicas")?;
        assert!(counts.other("prequal_trials_total") > 0, "{counts:#?}");
    }
    Ok(())
}

#[test]
fn grpc_errors_in_trailers_or_without_a_body_eject() -> Result<()> {
    bed!();
    for failing in [grpc_reply("14"), grpc_reply_alone("14")] {
        let fleet = Fleet::uniform(4, &grpc_reply("0").delay(MS(10)))?;
        let envoy = Envoy::start(without_retries(&fleet.addrs())?)?;
        warm(&envoy, 4);
        fleet[0].backend.set(failing);
        let client = Client::http2(envoy.addr());
        eventually("the failing one is left alone", Duration::from_secs(20), || {
            fleet.clear();
            client.burst(400, 8, |_| grpc_request());
            (fleet.served()[0] < 24).then_some(())
        });
        counted(&envoy, "ejected", |now| {
            now.other("prequal_ejections_total.failing") + now.other("prequal_ejections_total.reported") > 0
        });
    }
    Ok(())
}

#[test]
fn an_unresponsive_replica_is_ejected_at_once_and_comes_back_when_it_answers() -> Result<()> {
    bed!();
    // Each worker detects the replica by itself; its verdict applies to all workers.
    for workers in [1, 2] {
        unresponsive_and_back(workers)?;
    }
    Ok(())
}

fn unresponsive_and_back(workers: u32) -> Result<()> {
    let fleet = Fleet::uniform(6, &Reply::ok().delay(MS(20)))?;
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&fleet.addrs())?.concurrency(workers))?;
    warm(&envoy, 6);
    let client = envoy.client();
    get(&client, 600);
    fleet[0].backend.set(Reply::ok().delay(Duration::from_secs(2)));
    fleet.clear();
    let answers = get(&client, 1500);
    let late = answers.iter().flatten().filter(|answer| answer.elapsed > Duration::from_secs(1)).count();
    // At most the requests that the eight callers had in flight there, and a trial or two.
    assert!(late <= 12, "{late} late: {:#?}", envoy.prequal("replicas")?);
    counted(&envoy, "ejected as unresponsive", |now| now.other("prequal_ejections_total.unresponsive") > 0);
    fleet[0].backend.set(Reply::ok().delay(MS(20)));
    // The next trial may be 8 s away. On a busy machine its answer may be late, and another follows 8 s later.
    until(&client, "half of its share", Duration::from_secs(20), || {
        fleet.clear();
        get(&client, 200);
        fleet.served()[0] >= 17
    });
    Ok(())
}

#[test]
fn refused_connections_eject_and_the_replica_is_back_when_it_listens_again() -> Result<()> {
    bed!();
    let mut fleet = Fleet::uniform(5, &Reply::ok().delay(MS(10)))?;
    let envoy = Envoy::start(without_retries(&fleet.addrs())?)?;
    warm(&envoy, 5);
    let client = envoy.client();
    get(&client, 300);
    fleet[0].agent.kill();
    let answers = get(&client, 1000);
    assert!(good(&answers) >= 985, "{} of 1000 good: {:#?}", good(&answers), envoy.prequal("replicas")?);
    let options = prequal_testbed::AgentOptions { listen: fleet[0].addr().to_string(), ..Default::default() };
    let _agent = prequal_testbed::Agent::start_with(fleet[0].backend.addr(), &options)?;
    until(&client, "back in use", Duration::from_secs(30), || {
        fleet.clear();
        get(&client, 200);
        fleet.served()[0] >= 20
    });
    Ok(())
}

#[test]
fn if_most_of_the_fleet_fails_no_replica_is_ejected() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(5, &Reply::ok().delay(MS(5)))?;
    let envoy = Envoy::start(without_retries(&fleet.addrs())?)?;
    warm(&envoy, 5);
    for replica in fleet.iter().take(4) {
        replica.backend.set(Reply::status(500));
    }
    let client = envoy.client();
    get(&client, 400);
    // The replicas that failed first were ejected until the others failed too.
    let ejected = || envoy.prequal("replicas").map(|now| now.other("prequal_ejected"));
    until(&client, "no replica is ejected", Duration::from_secs(5), || {
        ejected().is_ok_and(|ejected| ejected == 0)
    });
    fleet.clear();
    get(&client, 500);
    let served = fleet.served();
    // Trials alone would be at most one per second and replica; equal replicas need not share evenly
    // (docs/design/limits.md).
    assert!(served.iter().take(4).sum::<u64>() > 100, "{served:?}");
    assert!(served[4] < 400, "the healthy one does not carry all: {served:?}");
    for replica in fleet.iter().take(4) {
        replica.backend.set(Reply::ok().delay(MS(5)));
    }
    until(&client, "all in use", Duration::from_secs(30), || {
        fleet.clear();
        good(&get(&client, 250)) == 250 && fleet.served().iter().all(|count| *count > 15)
    });
    Ok(())
}

#[test]
fn both_rules_can_be_switched_off() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(4, &Reply::ok().delay(MS(5)))?;
    let config = without_retries(&fleet.addrs())?.filter_settings(|settings| {
        settings["ejection_failure_share"] = json!(0);
        settings["ejection_wait_factor"] = json!(0);
    });
    let envoy = Envoy::start(config)?;
    warm(&envoy, 4);
    fail(&fleet[0].backend, 50);
    get(&envoy.client(), 400);
    let counts = envoy.prequal("replicas")?;
    assert_eq!(counts.other("prequal_ejected"), 0, "{counts:#?}");
    assert_eq!(counts.other("prequal_trials_total"), 0, "{counts:#?}");
    Ok(())
}
