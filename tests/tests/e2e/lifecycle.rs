//! The filter's life cycle: bad configuration, an update, a crash of its VM.

use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{Envoy, EnvoyConfig, Fleet, Reply, Request, crash_module, eventually};
use serde_json::json;

use crate::support::{SERVING, assert_all_ok, bed, set, uniform_fleet, warm};

/// Settings that must be refused, each with a word that the message must contain.
fn bad_settings() -> Vec<(String, &'static str)> {
    let one = |setting: &str| {
        format!(r#"{{"clusters":[{{"cluster":"replicas","probe_cluster":"replicas-agent",{setting}}}]}}"#)
    };
    vec![
        (String::new(), "JSON"),
        ("{".into(), "JSON"),
        ("{}".into(), "clusters"),
        (one(r#""pool_sise":16"#), "pool_sise"),
        (one(r#""pool_size":"many""#), "pool_size"),
        (one(r#""pool_size":100000"#), "pool_size"),
        (one(r#""q_rif":1.5"#), "q_rif"),
        (one(r#""q_rif":NaN"#), "JSON"),
        (one(r#""max_age_ms":0"#), "max_age_ms"),
        (one(r#""endpoints":["nowhere"]"#), "endpoints"),
        (format!(r#"{{"clusters":[],"x":"{}"}}"#, "y".repeat(1 << 20)), "configuration"),
    ]
}

#[test]
fn envoy_does_not_start_with_bad_settings() -> Result<()> {
    bed!();
    for (text, word) in [bad_settings().swap_remove(3), bad_settings().swap_remove(6)] {
        let config = EnvoyConfig::for_replicas(&[])?.filter_text(&text);
        let error = format!("{:#}", Envoy::start(config).expect_err("bad settings"));
        assert!(error.contains(word), "{text:.100}: {error}");
    }
    Ok(())
}

#[test]
fn an_update_with_bad_settings_is_refused_and_the_old_ones_serve() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(2, &Reply::ok())?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?.dynamic_listener();
    let mut envoy = Envoy::start(config.clone())?;
    let warmed = warm(&envoy, 2);
    for (text, word) in bad_settings() {
        let taken = envoy.update_listener(config.clone().filter_text(&text))?;
        assert!(!taken, "{text:.100}");
        let log = envoy.log();
        assert!(log.contains(word), "{text:.100}: no {word} in {log}");
        assert_all_ok(&envoy.client().burst(10, 2, |_| Request::get("/")));
    }
    let after = envoy.prequal(SERVING)?;
    assert_eq!(after.picks("fallback"), warmed.picks("fallback"), "the pool was lost");
    assert!(after.steered() > warmed.steered());
    Ok(())
}

#[test]
fn every_bad_setting_is_named_at_once() -> Result<()> {
    bed!();
    let text = r#"{"clusters":[{"cluster":"replicas","probe_cluster":"replicas-agent",
        "pool_size":0,"q_rif":-1,"max_age_ms":0}]}"#;
    let error = Envoy::start(EnvoyConfig::for_replicas(&[])?.filter_text(text)).expect_err("bad settings");
    let error = format!("{error:#}");
    for field in ["pool_size", "q_rif", "max_age_ms"] {
        assert!(error.contains(field), "no {field} in {error}");
    }
    Ok(())
}

#[test]
fn an_update_keeps_the_pool_and_loses_no_reply() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(3, &Reply::ok())?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?.dynamic_listener();
    let config = set(set(config, "max_age_ms", 10_000), "idle_probe_interval_ms", 0);
    let config = set(set(config, "budget", "fixed"), "r_probe", 1.0);
    // With these settings, only an empty pool leaves a request to Envoy's policy, and no reply is too late on a busy
    // machine.
    let config = set(set(config, "burst_guard", false), "probe_timeout_ms", 1000);
    let mut envoy = Envoy::start(config.clone())?;
    let warmed = warm(&envoy, 3);
    // Two generations serve at the same time while the first drains.
    let client = envoy.client();
    let load = std::thread::spawn(move || client.burst(2000, 4, |_| Request::get("/")));
    for delta in [1.5, 2.0, 1.0] {
        assert!(envoy.update_listener(set(config.clone(), "delta", delta))?, "{}", envoy.log());
        assert_all_ok(&envoy.client().burst(50, 2, |_| Request::get("/")));
    }
    assert_all_ok(&load.join().expect("the load ran"));
    let rest = crate::support::assert_probes_balance(&envoy);
    assert_eq!(rest.picks("fallback"), warmed.picks("fallback"), "the pool was lost");
    assert!(rest.steered() - warmed.steered() >= 2150, "{rest:#?}");
    assert_eq!(envoy.stat("cluster.replicas-agent.upstream_rq_total")?, rest.probes("sent"));
    Ok(())
}

#[test]
fn a_crash_of_the_vm_costs_one_request_and_keeps_the_pool() -> Result<()> {
    let module = crash_module();
    bed!(std::slice::from_ref(&module));
    let fleet = Fleet::uniform(3, &Reply::ok())?;
    let config = set(EnvoyConfig::for_replicas(&fleet.addrs())?.module(&module), "max_age_ms", 10_000);
    let envoy = Envoy::start(config)?;
    let warmed = warm(&envoy, 3);
    let crash = envoy.client().send(Request::get("/").header("x-crash-prequal", "1"))?;
    assert_eq!(crash.status, 503);
    eventually("the filter is back", Duration::from_secs(5), || {
        let reply = envoy.client().get("/").ok()?;
        (reply.status == 200 && envoy.prequal(SERVING).ok()?.steered() > warmed.steered()).then_some(())
    });
    assert_all_ok(&envoy.client().burst(50, 2, |_| Request::get("/")));
    let after = envoy.prequal(SERVING)?;
    assert_eq!(after.picks("fallback"), warmed.picks("fallback"), "the pool was lost");
    assert!(envoy.stat("wasm.prequal.vm_reload_success")? >= 1);
    assert_eq!(json!(envoy.stat("wasm.prequal.vm_reload_failure")?), json!(0));
    Ok(())
}

/// `FAIL_OPEN`, as in Istio's manifests, helps only later requests.
#[test]
fn a_crash_ends_the_requests_in_flight_with_either_failure_policy() -> Result<()> {
    let module = crash_module();
    bed!(std::slice::from_ref(&module));
    for policy in ["FAIL_RELOAD", "FAIL_OPEN"] {
        let fleet = Fleet::uniform(2, &Reply::ok())?;
        let config = EnvoyConfig::for_replicas(&fleet.addrs())?.module(&module).concurrency(1);
        let envoy = Envoy::start(config.edit(|config| {
            let filter = config.filter_mut("prequal").expect("the filter");
            filter["typed_config"]["config"]["failure_policy"] = json!(policy);
        }))?;
        warm(&envoy, 2);
        fleet.iter().for_each(|replica| replica.backend.set(Reply::ok().gated()));
        let client = envoy.client();
        let load = std::thread::spawn(move || client.burst(8, 8, |_| Request::get("/")));
        eventually("all requests wait", Duration::from_secs(5), || {
            (fleet.iter().map(|replica| replica.backend.active()).sum::<i64>() == 8).then_some(())
        });
        envoy.client().send(Request::get("/").header("x-crash-prequal", "1"))?;
        fleet.iter().for_each(|replica| replica.backend.set_gate(true));
        let replies = load.join().expect("the load ran").into_iter();
        let statuses = replies.map(|reply| Ok(reply?.status.as_u16())).collect::<Result<Vec<_>>>()?;
        assert_eq!(statuses, [503; 8], "{policy}");
    }
    Ok(())
}

#[test]
fn the_shipped_module_cannot_be_crashed_by_a_header() -> Result<()> {
    bed!();
    let (_fleet, envoy) = uniform_fleet(2, &Reply::ok())?;
    let reply = envoy.client().send(Request::get("/").header("x-crash-prequal", "1"))?;
    assert_eq!(reply.status, 200);
    assert_eq!(envoy.stat("wasm.prequal.vm_reload_success")?, 0);
    Ok(())
}
