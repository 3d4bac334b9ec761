//! Basic checks on the Envoy that `$ENVOY` names: steering, the accounting of probes, recovery from a crash. They are
//! few, so that they can run on each supported version; everything else is in `e2e`.

use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{
    Envoy, EnvoyConfig, Fleet, Prequal, Reply, Request, bed, crash_module, envoy_loads_native_modules,
    envoy_runs_wasm, eventually,
};
use serde_json::json;

#[test]
fn the_core_facts_hold_on_this_envoy() -> Result<()> {
    let module = crash_module();
    bed!(std::slice::from_ref(&module));
    if !envoy_runs_wasm()? {
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

    // After a crash, the module recovers with its pool.
    let envoy = Envoy::start(config.module(&module).concurrency(1))?;
    known(&envoy);
    let before = envoy.prequal("replicas")?;
    assert_eq!(envoy.client().send(Request::get("/").header("x-crash-prequal", "1"))?.status, 503);
    eventually("the filter is back", Duration::from_secs(5), || {
        let reply = envoy.client().get("/").ok()?;
        (reply.status == 200 && envoy.prequal("replicas").ok()?.steered() > before.steered()).then_some(())
    });
    assert_eq!(envoy.prequal("replicas")?.picks("fallback"), before.picks("fallback"));
    Ok(())
}

/// The native module needs Envoy 1.38. On such an Envoy all its symbols resolve, it steers, and each attempt's end is
/// attributed to the right party, whether Envoy first logs the attempt or first destroys its filter.
#[test]
fn the_native_module_works_on_this_envoy_or_is_refused() -> Result<()> {
    bed!();
    let ms = Duration::from_millis;
    let mut fleet = Fleet::start([5, 5, 150].map(|delay| Reply::ok().delay(ms(delay))))?;
    let config = EnvoyConfig::native_for_replicas(&fleet.addrs())?.concurrency(2);
    if !envoy_loads_native_modules()? {
        assert!(Envoy::start(config).is_err(), "an Envoy without the extension has accepted it");
        return Ok(());
    }
    let envoy = Envoy::start(config)?;
    let client = envoy.client();
    let settled = |open: &dyn Fn(&Prequal) -> bool| {
        eventually("every request and probe is accounted for", Duration::from_secs(5), || {
            let now = envoy.prequal("replicas").ok()?;
            (now.requests_open() == 0 && now.probes_open() == 0 && open(&now)).then_some(now)
        })
    };
    client.burst(60, 4, |_| Request::get("/"));
    fleet.clear();
    for answer in client.burst(300, 4, |_| Request::get("/")) {
        assert_eq!(answer?.status, 200);
    }
    assert!(fleet.served()[2] <= 12, "{:?}", fleet.served());
    let rest = settled(&|_| true);
    assert!(rest.probes("used") > 0 && rest.other("prequal_members") == 3, "{rest:#?}");
    assert_eq!(rest.outcomes("answer"), 360, "{rest:#?}");
    // Failed attempts are retried and count against the replica; requests that clients abort do not.
    fleet[0].agent.kill();
    for answer in client.burst(100, 4, |_| Request::get("/")) {
        assert_eq!(answer?.status, 200);
    }
    let retried = envoy.stat("cluster.replicas.upstream_rq_retry")?;
    assert!(retried > 0, "nothing was tested");
    let failed = settled(&|now| now.outcomes("answer") == 460);
    assert_eq!(failed.outcomes("upstream_failure"), retried, "{failed:#?}");
    fleet.iter().for_each(|replica| replica.backend.set(Reply::ok().delay(ms(2000))));
    (0..3).for_each(|_| _ = client.abandon(Request::get("/"), ms(50)));
    settled(&|now| now.outcomes("client_abort") == 3);
    Ok(())
}
