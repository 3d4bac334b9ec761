//! Basic checks on the Envoy that `$ENVOY` names: steering, probes that balance, recovery from a crash. Small, so that it
//! can run on each supported version; everything else is in `e2e`.

use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{Envoy, EnvoyConfig, Fleet, Reply, Request, eventually, ready, workspace_root};
use serde_json::json;

#[test]
fn the_core_facts_hold_on_this_envoy() -> Result<()> {
    let module = workspace_root().join("target/dist-test/prequal_filter_crash.wasm");
    if !ready(std::slice::from_ref(&module)) {
        return Ok(());
    }
    let ms = Duration::from_millis;
    let fleet = Fleet::start([5, 5, 150].map(|delay| Reply::ok().delay(ms(delay))))?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?.concurrency(2).filter_settings(|settings| {
        let cluster = &mut settings["clusters"][0];
        cluster["budget"] = json!("fixed");
        cluster["r_probe"] = json!(1.0);
        cluster["idle_probe_interval_ms"] = json!(0);
        cluster["max_age_ms"] = json!(10_000);
    });
    // The shipped module loads and steers.
    let envoy = Envoy::start(config.clone())?;
    let client = envoy.client();
    let known = |envoy: &Envoy| {
        let client = envoy.client();
        eventually("three members are learned", Duration::from_secs(10), || {
            client.burst(10, 4, |_| Request::get("/"));
            (envoy.prequal("replicas").ok()?.other("prequal_members") == 3).then_some(())
        });
    };
    known(&envoy);
    fleet.clear();
    for answer in client.burst(300, 4, |_| Request::get("/")) {
        assert_eq!(answer?.status, 200);
    }
    assert!(fleet.served()[2] <= 9, "{:?}", fleet.served());
    let rest = eventually("every probe is accounted for", Duration::from_secs(5), || {
        let now = envoy.prequal("replicas").ok()?;
        (now.probes("sent") == now.probes_settled()).then_some(now)
    });
    assert!(rest.probes("used") > 0 && rest.steered() > 290, "{rest:#?}");
    drop(envoy);

    // A module that can be crashed recovers with its pool.
    let envoy = Envoy::start(config.module(&module).concurrency(1))?;
    known(&envoy);
    let before = envoy.prequal("replicas")?;
    assert_eq!(envoy.client().send(Request::get("/").header("x-prequal-crash-test", "1"))?.status, 503);
    eventually("the filter is back", Duration::from_secs(5), || {
        let reply = envoy.client().get("/").ok()?;
        (reply.status == 200 && envoy.prequal("replicas").ok()?.steered() > before.steered()).then_some(())
    });
    assert_eq!(envoy.prequal("replicas")?.picks("fallback"), before.picks("fallback"));
    Ok(())
}
