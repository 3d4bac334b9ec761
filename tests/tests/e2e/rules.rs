//! Selection rules, retries, and fleets of one, two and three replicas.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{Backend, Body, Envoy, EnvoyConfig, Fleet, Reply, Request, eventually};
use serde_json::{Value, json};

use crate::support::{
    SERVING, addrs, assert_all_ok, bed, is_probe, report, set, stand_in, stand_ins, warm, with_load,
};

const MS: fn(u64) -> Duration = Duration::from_millis;

fn with(addrs: &[SocketAddr], settings: &Value) -> Result<EnvoyConfig> {
    let config = EnvoyConfig::for_replicas(addrs)?;
    let settings = settings.as_object().expect("an object");
    Ok(settings.iter().fold(config, |config, (key, value)| set(config, key, value.clone())))
}

/// Removes the shipped setting `verified_probes`, which is refused with a rule that needs no probes.
fn without_probes(config: EnvoyConfig) -> EnvoyConfig {
    config.filter_settings(|settings| {
        settings["clusters"][0].as_object_mut().expect("an object").remove("verified_probes");
    })
}

#[test]
fn every_rule_avoids_a_slow_replica() -> Result<()> {
    bed!();
    let fleet = Fleet::start([5, 5, 5, 100].map(|delay| Reply::ok().delay(MS(delay))))?;
    for (settings, branches, probe_free) in [
        (json!({"rule": "predicted"}), &["cold", "hot", "trial"][..], false),
        (json!({"rule": "hcl", "hot": "gt"}), &["cold"], false),
        (json!({"rule": "rif_only"}), &["hot"], false),
        (json!({"rule": "latency_only"}), &["cold"], false),
        (json!({"rule": "linear", "lambda": 0.5, "alpha_ms": 5}), &["scored"], false),
        (json!({"rule": "c3"}), &["scored"], false),
        (json!({"rule": "linear", "mode": "sync", "sync_d": 4, "sync_deadline_ms": 1000}), &["sync"], false),
        (json!({"rule": "peak_ewma"}), &["scored"], true),
        (json!({"rule": "zuul_choice_of_two", "max_in_flight": 4}), &["scored"], true),
    ] {
        let config = with(&fleet.addrs(), &settings)?;
        let envoy = Envoy::start(if probe_free { without_probes(config) } else { config })?;
        warm(&envoy, 4);
        fleet.clear();
        let (before, mut sent) = (envoy.prequal(SERVING)?, 0);
        // Latency alone causes herding: the replica that is slightly faster gets everything. With the other rules,
        // equal replicas need not share evenly (docs/design/limits.md), but none is left out.
        let herds = settings["rule"] == "latency_only";
        eventually(&format!("{settings}: all fast replicas serve"), Duration::from_secs(20), || {
            assert_all_ok(&envoy.client().burst(600, 6, |_| Request::get("/")));
            sent += 600;
            (herds || fleet.served()[..3].iter().all(|&served| served >= 30)).then_some(())
        });
        let (after, served) = (envoy.prequal(SERVING)?, fleet.served());
        let chosen: u64 = branches.iter().map(|branch| after.picks(branch) - before.picks(branch)).sum();
        assert!(chosen >= sent * 3 / 4, "{settings}: {chosen} of {sent} by the rule: {after:#?}");
        // A fair share is a quarter. RIF alone cannot distinguish slow from busy, and gives the slow replica as much as
        // it can serve.
        assert!(served[3] <= sent / 8, "{settings}: {served:?}");
        assert_eq!(after.probes("sent") == 0, probe_free, "{settings}: {after:#?}");
        fleet.assert_idle();
    }
    Ok(())
}

#[test]
fn zuul_avoids_a_replica_that_answers_with_errors() -> Result<()> {
    bed!();
    // This replica fails at once, so that no other has fewer requests in flight.
    let mut fleet = vec![stand_in(|_| Reply::status(404), |_| Reply::status(503))?];
    fleet.extend(stand_ins(3, |_| Reply::status(404), |_| Reply::ok().delay(MS(5)))?);
    let envoy = Envoy::start(without_probes(with(&addrs(&fleet), &json!({"rule": "zuul_choice_of_two"}))?))?;
    warm(&envoy, 4);
    fleet.iter().for_each(Backend::clear);
    envoy.client().burst(400, 4, |_| Request::get("/"));
    // A fair share is 100.
    assert!(fleet[0].served() <= 50, "{:?}", fleet.iter().map(Backend::served).collect::<Vec<_>>());
    Ok(())
}

#[test]
fn c3_does_not_count_fast_errors_as_short_response_times() -> Result<()> {
    bed!();
    // By its reports, the failing replica looks best at first, and later slightly worse than the others.
    let worse = Arc::new(AtomicBool::new(false));
    let looks_worse = Arc::clone(&worse);
    let load = move |addr| {
        let (rif, latency_ms) = if looks_worse.load(Ordering::Relaxed) { (1, 55) } else { (0, 50) };
        with_load(report(rif, latency_ms * 1000, addr))
    };
    let failures = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&failures);
    let fails = stand_in(load, move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Reply::status(503)
    })?;
    let mut fleet = vec![fails];
    let load = |addr| with_load(report(1, 50_000, addr));
    fleet.extend(stand_ins(3, load, move |addr| load(addr).delay(MS(50)))?);
    // Without ejection: only the rule should react.
    let settings = json!({"rule": "c3", "ejection_failure_share": 0, "ejection_wait_factor": 0});
    let envoy = Envoy::start(with(&addrs(&fleet), &settings)?)?;
    warm(&envoy, 4);
    let client = envoy.client();
    client.burst(40, 1, |_| Request::get("/"));
    assert!(failures.load(Ordering::Relaxed) >= 10, "it never looked best: nothing is tested");
    worse.store(true, Ordering::Relaxed);
    client.burst(20, 1, |_| Request::get("/"));
    // A busy machine adds to the response times of the others, which then look worse.
    eventually("at most a quarter to the one that fails", Duration::from_secs(30), || {
        let before = failures.load(Ordering::Relaxed);
        client.burst(60, 1, |_| Request::get("/"));
        (failures.load(Ordering::Relaxed) - before <= 15).then_some(())
    });
    Ok(())
}

#[test]
fn zuul_reads_the_utilisation_that_replicas_report() -> Result<()> {
    bed!();
    // Without agents, so the header is the only source.
    let reply = |share: &'static str| move |_| Reply::ok().header("x-netflix.server.utilization", share);
    let mut fleet = stand_ins(3, |_| Reply::status(404), reply("0.1"))?;
    fleet.push(stand_in(|_| Reply::status(404), reply("70%, target=90"))?);
    let envoy = Envoy::start(without_probes(with(&addrs(&fleet), &json!({"rule": "zuul_choice_of_two"}))?))?;
    warm(&envoy, 4);
    fleet.iter().for_each(Backend::clear);
    assert_all_ok(&envoy.client().burst(400, 2, |_| Request::get("/")));
    let served: Vec<u64> = fleet.iter().map(Backend::served).collect();
    assert!(served[3] <= 50 && served.iter().sum::<u64>() == 400, "{served:?}");
    for seen in fleet.iter().flat_map(Backend::seen) {
        assert!(!is_probe(&seen));
    }
    Ok(())
}

#[test]
fn replicas_without_agents_are_balanced_by_their_orca_reports() -> Result<()> {
    bed!();
    let start = |report: &'static str| {
        let backend = Backend::start(Reply::ok())?;
        backend.set_handler(move |seen| {
            let report = if seen.path == "/broken" { "TEXT nonsense" } else { report };
            Reply::ok().header("endpoint-load-metrics", report)
        });
        Ok(backend)
    };
    let fleet = [
        "TEXT cpu_utilization=0.1,named_metrics.kv=0.8",
        r#"JSON {"application_utilization": 0.1, "named_metrics": {"kv": 0.1}}"#,
        "TEXT cpu_utilization=0.7,named_metrics.kv=0.1",
    ];
    let fleet = fleet.into_iter().map(start).collect::<Result<Vec<_>>>()?;
    // All are equally fast: only the reports show which one is full.
    for (metric, spared) in [("off", None), ("utilization", Some(2)), ("named_metrics.kv", Some(0))] {
        let rule = json!({"rule": "zuul_choice_of_two", "orca_utilization": metric});
        let envoy = Envoy::start(without_probes(with(&addrs(&fleet), &rule)?))?;
        warm(&envoy, 3);
        fleet.iter().for_each(Backend::clear);
        assert_all_ok(&envoy.client().burst(300, 2, |_| Request::get("/")));
        let served: Vec<u64> = fleet.iter().map(Backend::served).collect();
        assert_eq!(served.iter().sum::<u64>(), 300, "{metric}: {served:?}");
        for (index, count) in served.iter().enumerate() {
            let fair = if spared == Some(index) { 0..=40 } else { 50..=250 };
            assert!(fair.contains(count), "{metric}: {served:?}");
        }
        assert_all_ok(&[envoy.client().get("/broken")]);
        let counts = envoy.prequal(SERVING)?;
        let (used, bad) = (counts.reports("used"), counts.reports("bad_orca"));
        assert_eq!((used >= 300, bad), (spared.is_some(), spared.map_or(0, |_| 1)), "{metric}: {used} used");
        assert!(fleet.iter().flat_map(Backend::seen).all(|seen| !is_probe(&seen)));
    }
    Ok(())
}

#[test]
fn a_rule_without_probes_follows_the_membership() -> Result<()> {
    bed!();
    let fleet = stand_ins(3, |_| Reply::status(404), |_| Reply::ok().delay(MS(1)))?;
    let all = addrs(&fleet);
    let config = without_probes(with(&all[..2], &json!({"rule": "peak_ewma", "discovery_interval_ms": 50}))?);
    let mut envoy = Envoy::start(config.eds(&[SERVING]))?;
    warm(&envoy, 2);
    envoy.set_endpoints(SERVING, &all)?;
    warm(&envoy, 3);
    eventually("the newcomer is served", Duration::from_secs(10), || {
        fleet[2].clear();
        assert_all_ok(&envoy.client().burst(60, 3, |_| Request::get("/")));
        (fleet[2].served() >= 10).then_some(())
    });
    envoy.set_endpoints(SERVING, &all[1..])?;
    fleet[0].clear();
    eventually("the filter forgets the removed replica", Duration::from_secs(10), || {
        let diverted = |envoy: &Envoy| Some(envoy.prequal(SERVING).ok()?.other("prequal_diverted_total"));
        let before = diverted(&envoy)?;
        assert_all_ok(&envoy.client().burst(100, 4, |_| Request::get("/")));
        (diverted(&envoy)? == before).then_some(())
    });
    assert_eq!(fleet[0].served(), 0);
    Ok(())
}

/// For each request, by Envoy's request id: the index of the backend that got each attempt.
type Attempts = BTreeMap<String, Vec<usize>>;

/// Adds the attempts since the last call. Backends record a limited number of requests.
fn add_attempts(attempts: &mut Attempts, fleet: &[Backend]) {
    for (index, backend) in fleet.iter().enumerate() {
        for seen in backend.seen().iter().filter(|seen| !is_probe(seen)) {
            let id = seen.header("x-request-id").expect("Envoy numbers requests").to_owned();
            attempts.entry(id).or_default().push(index);
        }
        backend.clear();
    }
}

#[test]
fn a_retry_goes_to_another_replica_and_with_override_host_to_the_runner_up() -> Result<()> {
    bed!();
    let load = |rif, latency| move |addr| with_load(report(rif, latency, addr));
    for (shim, mode) in [
        ("stateful_session", "async"),
        ("stateful_session", "sync"),
        ("override_host", "async"),
        ("override_host", "sync"),
    ] {
        // The replica with the best reports fails everything. The second is far better than the other two. Their
        // replies to probes arrive last, so a request that waits for three of four replies has the second replica's.
        let mut fleet = vec![
            stand_in(load(0, 1000), |_| Reply::ok().body(Body::Reset))?,
            stand_in(load(0, 5000), load(0, 5000))?,
        ];
        let late = move |addr| load(3, 900_000)(addr).delay(MS(50));
        fleet.extend(stand_ins(2, late, load(3, 900_000))?);
        let all: Vec<String> = addrs(&fleet).iter().map(ToString::to_string).collect();
        // Without ejection: no request begins at an ejected replica.
        let settings = json!({"mode": mode, "endpoints": all, "ejection_failure_share": 0});
        let mut config = with(&addrs(&fleet), &settings)?.edit(|config| {
            config.route_mut()["retry_policy"]["retry_on"] = json!("reset,connect-failure");
        });
        if mode == "sync" {
            config = set(set(config, "sync_d", 4), "sync_deadline_ms", 1000);
        }
        if shim == "override_host" {
            config = config.override_host();
        }
        let envoy = Envoy::start(config)?;
        warm(&envoy, 4);
        fleet.iter().for_each(Backend::clear);
        let ended = |envoy: &Envoy| Some(envoy.prequal(SERVING).ok()?.outcomes.values().sum::<u64>());
        let (before, mut attempts) = (ended(&envoy), Attempts::new());
        eventually("five requests begin at the one that fails", Duration::from_secs(20), || {
            assert_all_ok(&envoy.client().burst(20, 1, |_| Request::get("/")));
            add_attempts(&mut attempts, &fleet);
            (attempts.values().filter(|at| at.contains(&0)).count() >= 5).then_some(())
        });
        for (id, at) in attempts.iter().filter(|(_, at)| at.contains(&0)) {
            assert_eq!(
                at.iter().filter(|&&at| at == 0).count(),
                1,
                "{shim} {mode}: {id} twice to the same: {at:?}"
            );
        }
        if shim == "override_host" {
            // Envoy may have placed the first requests, before the pool knew all replicas.
            let retried: Vec<_> = attempts.values().filter(|at| at.contains(&0)).collect();
            let to_runner_up = retried.iter().filter(|at| ***at == [0, 1]).count();
            assert!(to_runner_up >= retried.len() * 4 / 5, "{mode}: {to_runner_up} of {}", retried.len());
        }
        let outcomes = ended(&envoy).zip(before).map(|(after, before)| after - before);
        assert_eq!(outcomes, Some(attempts.len() as u64), "{shim} {mode}: one outcome each");
    }
    Ok(())
}

#[test]
fn a_replica_that_reports_a_low_age_gets_fewer_requests() -> Result<()> {
    bed!();
    let load = |addr| with_load(report(1, 2000, addr));
    let mut fleet = stand_ins(3, load, move |addr| load(addr).delay(MS(2)))?;
    let new = |addr| with_load(report(1, 2000, addr) + ";up=0");
    fleet.push(stand_in(new, move |addr| new(addr).delay(MS(2)))?);
    // The number of requests, out of 400, that the new replica gets; a fair share is 100.
    let share_of_the_new = |slow_start_ms: u32| -> Result<_> {
        let envoy = Envoy::start(with(&addrs(&fleet), &json!({"slow_start_ms": slow_start_ms}))?)?;
        warm(&envoy, 4);
        Ok(move |fleet: &[Backend]| {
            fleet.iter().for_each(Backend::clear);
            assert_all_ok(&envoy.client().burst(400, 8, |_| Request::get("/")));
            fleet[3].seen().iter().filter(|seen| !is_probe(seen)).count()
        })
    };
    let spared = share_of_the_new(600_000)?(&fleet);
    assert!(spared < 50, "{spared}");
    let unspared = share_of_the_new(0)?;
    eventually("without a slow start its age has no effect", Duration::from_secs(20), || {
        (unspared(&fleet) >= 50).then_some(())
    });
    Ok(())
}

#[test]
fn fleets_of_one_two_and_three_behave_well_in_both_modes() -> Result<()> {
    bed!();
    for mode in ["async", "sync"] {
        for n in 1..=3 {
            let delays = [60, 5, 5];
            let fleet = Fleet::start(delays[..n].iter().map(|delay| Reply::ok().delay(MS(*delay))))?;
            let mut config = set(EnvoyConfig::for_replicas(&fleet.addrs())?, "mode", mode);
            if mode == "sync" {
                config = set(config, "sync_deadline_ms", 1000);
            }
            let envoy = Envoy::start(config)?;
            if n > 1 {
                warm(&envoy, n as u64);
            }
            fleet.clear();
            let mut sent = 0;
            // Equal replicas need not share evenly (docs/design/limits.md), but both are in use.
            eventually(&format!("{mode}, n = {n}: the fast ones serve"), Duration::from_secs(20), || {
                assert_all_ok(&envoy.client().burst(150, 3, |_| Request::get("/")));
                sent += 150;
                fleet.served()[1..].iter().all(|&served| served > 5).then_some(())
            });
            let (after, served) = (envoy.prequal(SERVING)?, fleet.served());
            assert_eq!(served.iter().sum::<u64>(), sent, "{mode}, n = {n}");
            // With one replica there is no choice: Envoy's own policy serves.
            assert_eq!(after.steered() == 0, n == 1, "{mode}, n = {n}: {after:#?}");
            let fair = sent / n as u64;
            assert!(n == 1 || served[0] <= fair * 2 / 3, "{mode}, n = {n}: the slow one got {served:?}");
            assert_eq!(after.other("prequal_diverted_total"), 0, "{mode}, n = {n}: {after:#?}");
            fleet.assert_idle();
        }
    }
    Ok(())
}

#[test]
fn every_profile_steers() -> Result<()> {
    bed!();
    let fleet = Fleet::start([5, 5, 5, 100].map(|delay| Reply::ok().delay(MS(delay))))?;
    for (profile, mode) in
        [("default", "async"), ("paper", "async"), ("small", "async"), ("inference", "sync")]
    {
        let config = EnvoyConfig::for_replicas(&fleet.addrs())?
            .filter_settings(|settings| settings["profile"] = json!(profile));
        let envoy = Envoy::start(config)?;
        warm(&envoy, 4);
        fleet.clear();
        let before = envoy.prequal(SERVING)?;
        let request = |_| Request::get("/").header("x-session-id", "s");
        assert_all_ok(&envoy.client().burst(400, 4, request));
        let (after, served) = (envoy.prequal(SERVING)?, fleet.served());
        let of_sync = after.picks("sync") - before.picks("sync");
        assert!(if mode == "sync" { of_sync >= 300 } else { of_sync == 0 }, "{profile}: {after:#?}");
        // A fair share is 100. The paper's rule sends slow replicas no trials. But while RIFs are one or two, the fast
        // replicas are often hot (their RIFs reach θ), and then a slow one that is cold is chosen.
        assert!(served[3] <= 60, "{profile}: {served:?}");
    }
    Ok(())
}

#[test]
fn contradictory_settings_are_refused_with_field_and_remedy() -> Result<()> {
    bed!();
    let fleet = stand_ins(1, |_| Reply::ok(), |_| Reply::ok())?;
    for (key, value, remedy) in [
        ("hint", json!({"header": "x-a"}), "`clusters[0].hint` needs \"mode\": \"sync\""),
        ("lambda", json!(0.5), "`clusters[0].lambda` needs \"rule\": \"linear\""),
        (
            "rule",
            json!("peak_ewma"),
            "`clusters[0].verified_probes` has no effect with a rule that needs no probes",
        ),
    ] {
        let refused = Envoy::start(set(EnvoyConfig::for_replicas(&addrs(&fleet))?, key, value));
        let error = format!("{:#}", refused.expect_err("refused"));
        assert!(error.contains(remedy), "{key}: {error}");
    }
    Ok(())
}
