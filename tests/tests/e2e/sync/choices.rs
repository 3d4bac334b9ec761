//! Which replicas a request probes, and which one it goes to.

use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{Backend, Client, Envoy, EnvoyConfig, Fleet, Prequal, Reply, Request, eventually};
use serde_json::json;

use super::{MS, assert_no_crash, start, user_requests};
use crate::support::{
    SERVING, addrs, assert_all_ok, assert_no_prequal_headers, assert_probes_balance, bed, counted, is_probe,
    report, set, stand_in, stand_ins, with_load,
};

#[test]
fn a_request_goes_to_the_best_of_the_probed_replicas() -> Result<()> {
    bed!();
    let answering = |rif, latency| move |addr| with_load(report(rif, latency, addr));
    let good = stand_in(answering(1, 2000), |_| Reply::ok())?;
    let bad = stand_in(answering(9, 80_000), |_| Reply::ok())?;
    // Load is only reported by probes.
    let envoy = start(&[good.addr(), bad.addr()], json!({"piggyback": false}))?;
    for client in [envoy.client(), Client::http2(envoy.addr())] {
        assert_all_ok(&client.burst(100, 4, |_| Request::get("/")));
    }
    assert_eq!((user_requests(&good), user_requests(&bad)), (200, 0));
    let after = assert_probes_balance(&envoy);
    assert_eq!((after.picks("sync"), after.waits("enough")), (200, 200), "{after:#?}");
    assert_eq!(after.other("prequal_sync_answers_total"), 400, "{after:#?}");
    for seen in good.seen().iter().filter(|seen| !is_probe(seen)) {
        assert_no_prequal_headers(&seen.headers);
    }
    // Envoy merges histograms every five seconds.
    eventually("the waits are timed", Duration::from_secs(20), || {
        let text = envoy.admin_get("/stats/prometheus").ok()?;
        text.contains("prequal_sync_wait_us_count{cluster=\"replicas\"} 200").then_some(())
    });
    let text = envoy.admin_get("/stats/prometheus")?;
    assert!(text.contains("prequal_sync_waits_total{cluster=\"replicas\",end=\"enough\"} 200"), "{text}");
    assert_no_crash(&envoy);
    Ok(())
}

#[test]
fn late_probe_replies_enter_the_pool() -> Result<()> {
    bed!();
    let late = |addr| with_load(report(1, 2000, addr)).delay(MS(60));
    let fleet = stand_ins(3, late, |_| Reply::ok())?;
    // The pool's own count of requests in flight never decreases here, so switch its limit off (`burst_guard`).
    let settings = json!({"sync_deadline_ms": 3, "piggyback": false, "probe_timeout_ms": 2000, "max_age_ms": 60_000, "idle_probe_interval_ms": 0, "burst_guard": false});
    let envoy = start(&addrs(&fleet), settings)?;
    let client = envoy.client();
    client.get("/")?;
    let first = envoy.prequal(SERVING)?;
    assert_eq!((first.waits("deadline"), first.picks("fallback")), (1, 1), "{first:#?}");
    counted(&envoy, "the late answers", |now| now.probes("used") >= 3);
    assert_all_ok(&client.burst(10, 1, |_| Request::get("/")));
    let after = envoy.prequal(SERVING)?;
    // If Envoy stalls for 60 ms, it handles the replies before it notices that the deadline has passed.
    assert_eq!(after.waits("deadline") + after.waits("enough"), 11, "{after:#?}");
    assert_eq!((after.picks("sync"), after.picks("fallback")), (after.waits("enough"), 1), "{after:#?}");
    let from_the_pool = after.picks("cold") + after.picks("hot");
    assert!(from_the_pool >= 5 && from_the_pool + after.waits("enough") == 10, "{after:#?}");
    Ok(())
}

#[test]
fn requests_that_do_not_wait_are_also_steered() -> Result<()> {
    bed!();
    let load = |addr| with_load(report(1, 2000, addr));
    let fleet = stand_ins(3, load, load)?;
    let envoy = start(&addrs(&fleet), json!({"probe_cluster": "no-such-cluster", "max_age_ms": 60_000}))?;
    assert_all_ok(&envoy.client().burst(60, 2, |_| Request::get("/")));
    let after = envoy.prequal(SERVING)?;
    assert_eq!((after.waits("unasked"), after.other("prequal_diverted_total")), (60, 0), "{after:#?}");
    assert!(after.picks("cold") + after.picks("hot") >= 30, "{after:#?}");
    assert_no_crash(&envoy);
    Ok(())
}

#[test]
fn in_fleets_smaller_than_d_every_replica_is_probed() -> Result<()> {
    bed!();
    // With this many requests, chance leaves no replica out.
    for (n, asked, requests) in [(1, 0, 40), (2, 2, 40), (3, 3, 40), (9, 8, 200)] {
        let fleet = stand_ins(n, |addr| with_load(report(1, 2000, addr)), |_| Reply::ok())?;
        let settings = json!({"sync_d": 8, "idle_probe_interval_ms": 0, "discovery_interval_ms": 60_000});
        let envoy = start(&addrs(&fleet), settings)?;
        assert_all_ok(&envoy.client().burst(requests, 2, |_| Request::get("/")));
        let after = assert_probes_balance(&envoy);
        let addressed = fleet.iter().flat_map(Backend::seen).filter(is_probe).count();
        assert!(addressed >= requests * asked, "n = {n}: {addressed} probes: {after:#?}");
        let all = requests as u64;
        let (waited, unasked) = if n == 1 { (0, all) } else { (all, 0) };
        assert_eq!((after.waits("enough"), after.waits("unasked")), (waited, unasked), "n = {n}: {after:#?}");
        assert!(fleet.iter().all(|backend| user_requests(backend) > 0), "n = {n}: no replica is left out");
    }
    Ok(())
}

#[test]
fn an_ejected_replica_is_not_probed() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(4, &Reply::ok().delay(MS(2)))?;
    // One reply ends the wait. If it came from an ejected replica, it would be dropped, and the pick would not be
    // `sync`.
    let envoy = start(&fleet.addrs(), json!({"sync_d": 2, "sync_deadline_ms": 1000}))?;
    let client = envoy.client();
    fleet[0].backend.set(Reply::status(503));
    eventually("the failing replica is ejected", Duration::from_secs(10), || {
        client.burst(20, 4, |_| Request::get("/"));
        (envoy.prequal(SERVING).ok()?.other("prequal_ejected") == 1).then_some(())
    });
    let before = envoy.prequal(SERVING)?;
    client.burst(200, 4, |_| Request::get("/"));
    let after = envoy.prequal(SERVING)?;
    let more = |count: fn(&Prequal) -> u64| count(&after) - count(&before);
    let trials = more(|counts| counts.other("prequal_trials_total"));
    assert!(more(|counts| counts.picks("sync")) + trials >= 195, "{after:#?}");
    Ok(())
}

#[test]
fn synchronous_mode_also_learns_the_fleet() -> Result<()> {
    bed!();
    let fleet = Fleet::start([5, 5, 60].map(|delay| Reply::ok().delay(MS(delay))))?;
    let config = set(EnvoyConfig::for_replicas(&fleet.addrs())?, "mode", "sync");
    let envoy = Envoy::start(set(config, "sync_deadline_ms", 1000))?;
    crate::support::warm(&envoy, 3);
    fleet.clear();
    let before = envoy.prequal(SERVING)?;
    assert_all_ok(&envoy.client().burst(300, 3, |_| Request::get("/")));
    let after = envoy.prequal(SERVING)?;
    assert!(after.picks("sync") - before.picks("sync") >= 250, "{after:#?}");
    // The slow replica is chosen only if the two that replied first were the slow one and a busy one.
    assert!(fleet.served()[2] < 60, "{:?}", fleet.served());
    fleet.assert_idle();
    Ok(())
}

#[test]
fn a_route_can_have_its_own_mode() -> Result<()> {
    bed!();
    let fleet = stand_ins(3, |addr| with_load(report(1, 2000, addr)), |_| Reply::ok())?;
    let config = EnvoyConfig::for_replicas(&addrs(&fleet))?
        .filter_settings(|settings| {
            let addrs = addrs(&fleet);
            settings["clusters"][0]["endpoints"] =
                json!(addrs.iter().map(ToString::to_string).collect::<Vec<_>>());
            settings["clusters"][0]["route_modes"] = json!({"chat": "sync"});
            settings["clusters"][0]["sync_deadline_ms"] = json!(1000);
        })
        .edit(|config| {
            let mut route = config.routes_mut().last().expect("a route").clone();
            route["name"] = json!("chat");
            route["match"] = json!({"prefix": "/chat"});
            let routes = config.routes_mut();
            routes.insert(routes.len() - 1, route);
        });
    let envoy = Envoy::start(config)?;
    assert_all_ok(&envoy.client().burst(30, 2, |_| Request::get("/other")));
    let before = envoy.prequal(SERVING)?;
    assert_eq!((before.picks("sync"), before.waits("enough")), (0, 0), "{before:#?}");
    assert_all_ok(&envoy.client().burst(30, 2, |_| Request::get("/chat")));
    let after = envoy.prequal(SERVING)?;
    assert_eq!((after.picks("sync"), after.steered() - before.steered()), (30, 30), "{after:#?}");
    Ok(())
}
