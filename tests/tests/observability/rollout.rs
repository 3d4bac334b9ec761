//! The statements of docs/guide/operations.md about rolling out.

use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{Envoy, EnvoyConfig, Fleet, Policy, Reply, Request, SHIM_NAME, bed, eventually};

/// Shadow mode: everything is learned and nothing is steered.
#[test]
fn without_the_shim_the_filter_learns_and_envoy_decides() -> Result<()> {
    bed!();
    let fleet = Fleet::start([5, 5, 100].map(|delay| Reply::ok().delay(Duration::from_millis(delay))))?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?
        .policy(Policy::RoundRobin)
        .edit(|config| config.remove_filter(SHIM_NAME));
    let envoy = Envoy::start(config)?;
    let client = envoy.client();
    let learned = eventually("members, probes, reports", Duration::from_secs(10), || {
        client.burst(30, 3, |_| Request::get("/"));
        let now = envoy.prequal("replicas").ok()?;
        let known = now.other("prequal_members") == 3 && now.other("prequal_pool_occupancy") == 3;
        (known && now.probes("used") > 0 && now.reports("used") > 0).then_some(now)
    });
    fleet.clear();
    for answer in client.burst(300, 4, |_| Request::get("/")) {
        assert_eq!(answer?.status, 200);
    }
    assert_eq!(fleet.served(), [100; 3], "round robin, the slow one too");
    let after = envoy.prequal("replicas")?;
    assert!(after.other("prequal_diverted_total") > learned.other("prequal_diverted_total"), "{after:#?}");
    assert!(after.picks("fallback") > learned.picks("fallback"), "{after:#?}");
    Ok(())
}
