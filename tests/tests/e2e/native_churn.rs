//! The native module while its endpoints change all the time, under load on four workers.
//!
//! A round has sixty changes and takes half a second or more. `PREQUAL_ROUNDS=1200` runs for at least ten minutes.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context as _, Result};
use prequal_testbed::{Client, Envoy, EnvoyConfig, Fleet, Reply, Request, eventually};
use serde_json::Value;

use crate::support::{SERVING, assert_all_ok, bed, warm};

/// The clusters that share the replicas' addresses.
const BOTH: [&str; 2] = [SERVING, "replicas-agent"];
const HOSTS: usize = 6;
const CHANGES: usize = 60;
/// After each change whose number is a multiple of this, the test checks that no other host gets requests.
const CHECKED: usize = 10;
/// Number of requests of one such check.
const SERVED: u64 = 20;
/// Maximum time until every worker has adopted a change. It is far shorter, unless the machine is busy.
const LIMIT: Duration = Duration::from_secs(10);
/// Maximum growth of Envoy's heap after the first round, bytes.
const GROWTH: u64 = 1 << 20;

/// Ends the load even if a check fails: otherwise the test would wait for the load for ever.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Sends requests until `done`. Returns their number; panics if one of them fails.
fn load(client: &Client, done: &AtomicBool) -> usize {
    let mut answered = 0;
    while !done.load(Relaxed) {
        let answers = client.burst(100, 8, |_| Request::get("/"));
        assert_all_ok(&answers);
        answered += answers.len();
    }
    answered
}

/// Changes the endpoints to any two to six hosts, without a pattern.
fn change(envoy: &mut Envoy, fleet: &Fleet, number: usize) -> Result<()> {
    let all = fleet.addrs();
    let indices: Vec<usize> =
        (0..2 + number * 7 % (HOSTS - 1)).map(|index| (number * 5 + index) % HOSTS).collect();
    let some: Vec<_> = indices.iter().map(|index| all[*index]).collect();
    BOTH.iter().try_for_each(|cluster| envoy.set_endpoints(cluster, &some))?;
    if number.is_multiple_of(CHECKED) {
        eventually(&format!("only {indices:?} are served, change {number}"), LIMIT, || {
            fleet.clear();
            eventually("requests are served", LIMIT, || {
                (fleet.served().iter().sum::<u64>() >= SERVED).then_some(())
            });
            let served = fleet.served();
            (0..HOSTS).all(|index| indices.contains(&index) || served[index] == 0).then_some(())
        });
    }
    Ok(())
}

/// Size of Envoy's heap, bytes. Envoy's statistic is up to five seconds old.
fn heap(envoy: &Envoy) -> Result<u64> {
    let memory: Value = serde_json::from_str(&envoy.admin_get("/memory")?)?;
    Ok(memory["allocated"].as_str().context("a number")?.parse()?)
}

/// Workers and main thread see different host sets for a moment, and the pool names hosts that have left.
#[test]
fn no_request_fails_or_goes_astray_while_endpoints_change() -> Result<()> {
    bed!();
    let rounds = std::env::var("PREQUAL_ROUNDS").map_or(Ok(2), |rounds| rounds.parse::<usize>())?;
    let fleet = Fleet::uniform(HOSTS, &Reply::ok().delay(Duration::from_millis(1)))?;
    let config = EnvoyConfig::native_for_replicas(&fleet.addrs())?.eds(&BOTH).concurrency(4);
    let mut envoy = Envoy::start(config)?;
    warm(&envoy, HOSTS as u64);
    let (client, done) = (envoy.client(), AtomicBool::new(false));
    let mut sizes = Vec::new();
    let answered = std::thread::scope(|scope| {
        let load = scope.spawn(|| load(&client, &done));
        let ends = Ends(&done);
        let changes = (0..rounds * CHANGES).try_for_each(|number| {
            change(&mut envoy, &fleet, number)?;
            if (number + 1) % CHANGES == 0 {
                sizes.push(heap(&envoy)?);
            }
            anyhow::Ok(())
        });
        drop(ends);
        let answered = load.join().expect("the load ends well");
        changes.map(|()| answered)
    })?;
    assert!(answered >= rounds * 500, "hardly any load: {answered}");
    BOTH.iter().try_for_each(|cluster| envoy.set_endpoints(cluster, &fleet.addrs()))?;
    let rest = eventually("every request and probe is accounted for", Duration::from_secs(5), || {
        let now = envoy.prequal(SERVING).ok()?;
        let settled = now.requests_open() == 0
            && now.probes_open() <= 1
            && now.other("prequal_members") == HOSTS as u64;
        settled.then_some(now)
    });
    assert_eq!(rest.outcomes("upstream_failure") + rest.outcomes("local"), 0, "{rest:#?}");
    fleet.assert_idle();
    let (first, last) = (sizes.first().context("a round")?, sizes.last().context("a round")?);
    assert!(*last < first + GROWTH, "Envoy's heap grows: {sizes:?}");
    println!(
        "{answered} requests during {} changes; Envoy's heap after each round: {sizes:?}",
        rounds * CHANGES
    );
    Ok(())
}
