//! Envoy's own view of its hosts takes precedence over the filter's choice: discovery, health, draining, priorities,
//! weights.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use anyhow::Result;
use prequal_testbed::{
    Agent, AgentOptions, Backend, Envoy, EnvoyConfig, Fleet, Reply, Request, eventually, lb_endpoint,
    missing_ipv6, needs,
};
use serde_json::{Value, json};

use crate::support::{SERVING, assert_all_ok, bed, endpoint, set, warm};

/// The clusters that share the replicas' addresses.
const BOTH: [&str; 2] = [SERVING, "replicas-agent"];

#[test]
fn endpoints_come_and_go_through_eds() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(3, &Reply::ok().delay(Duration::from_millis(2)))?;
    let all = fleet.addrs();
    let mut envoy = Envoy::start(EnvoyConfig::for_replicas(&all[..2])?.eds(&BOTH))?;
    warm(&envoy, 2);
    assert_eq!(fleet.served()[2], 0);
    for cluster in BOTH {
        envoy.set_endpoints(cluster, &all)?;
    }
    // The newcomer is found and gets its share.
    warm(&envoy, 3);
    eventually("the newcomer is served", Duration::from_secs(10), || {
        assert_all_ok(&envoy.client().burst(20, 4, |_| Request::get("/")));
        (fleet.served()[2] >= 10).then_some(())
    });
    for cluster in BOTH {
        envoy.set_endpoints(cluster, &all[1..])?;
    }
    fleet.clear();
    let before = envoy.prequal(SERVING)?;
    assert_all_ok(&envoy.client().burst(200, 4, |_| Request::get("/")));
    assert_eq!(fleet.served()[0], 0, "removed, yet served");
    // Choices of the removed replica were overruled, and soon it is no longer chosen.
    let forgotten = eventually("the filter forgets the removed replica", Duration::from_secs(10), || {
        let before = envoy.prequal(SERVING).ok()?;
        assert_all_ok(&envoy.client().burst(100, 4, |_| Request::get("/")));
        let after = envoy.prequal(SERVING).ok()?;
        let diverted = |at: &prequal_testbed::Prequal| at.other("prequal_diverted_total");
        (diverted(&after) == diverted(&before) && after.other("prequal_members") == 2).then_some(after)
    });
    assert!(forgotten.steered() > before.steered());
    assert_eq!(fleet.served()[0], 0);
    Ok(())
}

/// A new replica has served only one request at a time; the filter must find out that it can serve as many at once as
/// the others.
#[test]
fn a_newcomer_among_replicas_that_serve_many_at_once_gets_its_share() -> Result<()> {
    bed!();
    const AT_ONCE: usize = 40;
    const HALF_OF_A_SHARE: u64 = 10 * AT_ONCE as u64 / 5 / 2;
    let fleet = Fleet::uniform(5, &Reply::ok().delay(Duration::from_millis(100)))?;
    let all = fleet.addrs();
    let mut envoy = Envoy::start(EnvoyConfig::for_replicas(&all[..4])?.eds(&BOTH))?;
    warm(&envoy, 4);
    assert_all_ok(&envoy.client().burst(30 * AT_ONCE, AT_ONCE, |_| Request::get("/")));
    for cluster in BOTH {
        envoy.set_endpoints(cluster, &all)?;
    }
    eventually("the newcomer has half of a fair share", Duration::from_secs(20), || {
        fleet.clear();
        assert_all_ok(&envoy.client().burst(10 * AT_ONCE, AT_ONCE, |_| Request::get("/")));
        (fleet.served()[4] >= HALF_OF_A_SHARE).then_some(())
    });
    Ok(())
}

/// Three replicas, of which the last is the fastest, so that the filter prefers it; the test decides whether `/health`
/// succeeds there.
fn fleet_with_a_fast_one() -> Result<Fleet> {
    let ms = Duration::from_millis;
    Fleet::start([20, 20, 1].map(|delay| Reply::ok().delay(ms(delay))))
}

fn health_checks() -> Value {
    json!([{
        "timeout": "1s", "interval": "0.1s", "no_traffic_interval": "0.1s", "no_traffic_healthy_interval": "0.1s",
        "unhealthy_threshold": 1, "healthy_threshold": 1,
        "http_health_check": {"path": "/health"},
    }])
}

fn user_requests(fleet: &Fleet, index: usize) -> usize {
    fleet[index].backend.seen().iter().filter(|seen| seen.path == "/").count()
}

#[test]
fn a_host_that_fails_its_health_check_is_not_used() -> Result<()> {
    bed!();
    let fleet = fleet_with_a_fast_one()?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?.edit(|config| {
        config.cluster_mut(SERVING)["health_checks"] = health_checks();
    });
    // Without ejection by failures: the agent counts failed checks, and the filter would eject the replica before Envoy
    // can refuse it.
    let envoy = Envoy::start(set(config, "ejection_failure_share", 0))?;
    warm(&envoy, 3);
    fleet[2].backend.set_handler(|seen| match seen.path.as_str() {
        "/health" => Reply::status(503),
        _ => Reply::ok(),
    });
    eventually("Envoy sees the failure", Duration::from_secs(5), || {
        (envoy.stat("cluster.replicas.membership_healthy").ok()? == 2).then_some(())
    });
    // The main thread sets the statistic; workers learn of the failure later.
    eventually("no request reaches it", Duration::from_secs(5), || {
        fleet.clear();
        assert_all_ok(&envoy.client().burst(150, 4, |_| Request::get("/")));
        (user_requests(&fleet, 2) == 0).then_some(())
    });
    // The fast replica was preferred at first, and Envoy refused it.
    assert!(envoy.prequal(SERVING)?.other("prequal_diverted_total") > 0);
    // Within two seconds the filter no longer chooses it.
    eventually("the refused host is left alone", Duration::from_secs(5), || {
        let before = envoy.prequal(SERVING).ok()?.other("prequal_diverted_total");
        assert_all_ok(&envoy.client().burst(50, 2, |_| Request::get("/")));
        let after = envoy.prequal(SERVING).ok()?.other("prequal_diverted_total");
        (after - before <= 2).then_some(())
    });
    // And it comes back.
    fleet[2].backend.set(Reply::ok());
    eventually("the healthy host is served again", Duration::from_secs(10), || {
        assert_all_ok(&envoy.client().burst(30, 4, |_| Request::get("/")));
        (user_requests(&fleet, 2) >= 20).then_some(())
    });
    Ok(())
}

#[test]
fn an_ejected_host_is_not_used_and_comes_back() -> Result<()> {
    bed!();
    let fleet = fleet_with_a_fast_one()?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?.edit(|config| {
        config.cluster_mut(SERVING)["outlier_detection"] = json!({
            "consecutive_5xx": 3, "interval": "0.1s", "base_ejection_time": "5s", "max_ejection_percent": 50,
            "enforcing_success_rate": 0, "enforcing_consecutive_gateway_failure": 0,
        });
    });
    let envoy = Envoy::start(config)?;
    warm(&envoy, 3);
    fleet[2].backend.set(Reply::status(500));
    eventually("Envoy ejects the failing host", Duration::from_secs(10), || {
        envoy.client().burst(20, 4, |_| Request::get("/"));
        (envoy.stat("cluster.replicas.outlier_detection.ejections_active").ok()? == 1).then_some(())
    });
    fleet.clear();
    let before = envoy.prequal(SERVING)?;
    assert_all_ok(&envoy.client().burst(150, 4, |_| Request::get("/")));
    assert_eq!(fleet.served()[2], 0);
    // The filter has seen the failures too: it no longer chooses the host.
    let after = envoy.prequal(SERVING)?;
    let more = |name: &str| after.other(name) - before.other(name);
    assert!(after.steered() - before.steered() >= 135, "{after:#?}");
    assert!(more("prequal_diverted_total") <= 5, "{after:#?}");
    // And it comes back, although trials were refused while Envoy had it ejected.
    fleet[2].backend.set(Reply::ok());
    eventually("the host that was ejected is served again", Duration::from_secs(30), || {
        assert_all_ok(&envoy.client().burst(30, 4, |_| Request::get("/")));
        (user_requests(&fleet, 2) >= 20).then_some(())
    });
    Ok(())
}

#[test]
fn a_draining_host_is_not_used() -> Result<()> {
    bed!();
    let fleet = fleet_with_a_fast_one()?;
    let all = fleet.addrs();
    let mut envoy = Envoy::start(EnvoyConfig::for_replicas(&all)?.eds(&BOTH))?;
    warm(&envoy, 3);
    let draining = endpoint(all[2], 1, "DRAINING");
    let localities = json!([{"lb_endpoints": [lb_endpoint(&all[0]), lb_endpoint(&all[1]), draining]}]);
    for cluster in BOTH {
        envoy.set_localities(cluster, &localities)?;
    }
    fleet.clear();
    let before = envoy.prequal(SERVING)?;
    assert_all_ok(&envoy.client().burst(150, 4, |_| Request::get("/")));
    assert_eq!(fleet.served()[2], 0);
    let after = envoy.prequal(SERVING)?;
    let diverted = after.other("prequal_diverted_total") - before.other("prequal_diverted_total");
    assert!(diverted > 0, "{after:#?}");
    Ok(())
}

/// Two fast replicas in the second priority and two slower ones in the first: by load alone, the second would be
/// chosen.
fn near_and_far() -> Result<Fleet> {
    let ms = Duration::from_millis;
    Fleet::start([10, 10, 1, 1].map(|delay| Reply::ok().delay(ms(delay))))
}

fn priorities(all: &[SocketAddr], first_status: &str) -> Value {
    let of = |range: std::ops::Range<usize>, status: &str| {
        let endpoints = all[range].iter().map(|addr| endpoint(*addr, 1, status));
        endpoints.collect::<Vec<_>>()
    };
    json!([
        {"locality": {"zone": "near"}, "priority": 0, "lb_endpoints": of(0..2, first_status)},
        {"locality": {"zone": "far"}, "priority": 1, "lb_endpoints": of(2..4, "HEALTHY")},
    ])
}

/// Both clusters have the same endpoints, as shipped: an unaddressed probe finds the host that Envoy would use.
fn placed(all: &[SocketAddr], localities: Value) -> Result<EnvoyConfig> {
    let config = EnvoyConfig::for_replicas(all)?;
    Ok(config.localities(BOTH[0], localities.clone()).localities(BOTH[1], localities))
}

/// Sends load for two seconds, then counts how many of 200 requests the near and the far replicas serve.
#[track_caller]
fn near_and_far_served(envoy: &Envoy, fleet: &Fleet) -> [usize; 2] {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        assert_all_ok(&envoy.client().burst(20, 4, |_| Request::get("/")));
    }
    fleet.clear();
    let before = envoy.prequal(SERVING).expect("stats");
    assert_all_ok(&envoy.client().burst(200, 4, |_| Request::get("/")));
    let after = envoy.prequal(SERVING).expect("stats");
    let steered = after.steered() - before.steered();
    let diverted = after.other("prequal_diverted_total") - before.other("prequal_diverted_total");
    assert!(steered - diverted >= 100, "it is steered too: {after:#?}");
    [0, 2].map(|first| user_requests(fleet, first) + user_requests(fleet, first + 1))
}

#[test]
fn a_lower_priority_serves_only_while_the_higher_is_gone() -> Result<()> {
    bed!();
    let fleet = near_and_far()?;
    let all = fleet.addrs();
    let config = placed(&all, priorities(&all, "HEALTHY"))?.eds(&BOTH);
    let mut envoy = Envoy::start(config)?;
    assert_eq!(near_and_far_served(&envoy, &fleet), [200, 0]);
    for (status, expected) in [("UNHEALTHY", [0, 200]), ("HEALTHY", [200, 0])] {
        for cluster in BOTH {
            envoy.set_localities(cluster, &priorities(&all, status))?;
        }
        assert_eq!(near_and_far_served(&envoy, &fleet), expected, "first priority {status}");
    }
    Ok(())
}

#[test]
fn a_failover_by_health_checks_of_only_the_serving_cluster_is_followed() -> Result<()> {
    bed!();
    let fleet = near_and_far()?;
    let all = fleet.addrs();
    let config = placed(&all, priorities(&all, "HEALTHY"))?
        .edit(|config| config.cluster_mut(SERVING)["health_checks"] = health_checks());
    let envoy = Envoy::start(config)?;
    assert_eq!(near_and_far_served(&envoy, &fleet), [200, 0]);
    let healthy = |count| {
        eventually("the health checks show it", Duration::from_secs(5), || {
            (envoy.stat("cluster.replicas.membership_healthy").ok()? == count).then_some(())
        });
    };
    for near in 0..2 {
        fleet[near].backend.set_handler(|seen| match seen.path.as_str() {
            "/health" => Reply::status(503),
            _ => Reply::ok(),
        });
    }
    healthy(2);
    // Probes still reach the first priority, so the filter chooses its replicas. Envoy refuses these choices. Steering
    // then pauses, and Envoy's own choices show the filter the second priority.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        assert_all_ok(&envoy.client().burst(20, 4, |_| Request::get("/")));
    }
    fleet.clear();
    // Equal replicas need not share evenly (docs/design/limits.md), but none is left out.
    eventually("both of the second serve", Duration::from_secs(20), || {
        assert_all_ok(&envoy.client().burst(200, 4, |_| Request::get("/")));
        [2, 3].iter().all(|&far| user_requests(&fleet, far) >= 40).then_some(())
    });
    assert_eq!(user_requests(&fleet, 0) + user_requests(&fleet, 1), 0);
    for near in 0..2 {
        fleet[near].backend.set(Reply::ok().delay(Duration::from_millis(10)));
    }
    healthy(4);
    assert_eq!(near_and_far_served(&envoy, &fleet), [200, 0]);
    Ok(())
}

#[test]
fn requests_are_steered_to_ipv6_endpoints() -> Result<()> {
    bed!();
    needs!(missing_ipv6());
    let backend = Backend::start_on("[::1]:0", |_| Reply::ok())?;
    let options = AgentOptions { listen: "[::1]:0".into(), ..AgentOptions::default() };
    let agents = (0..3).map(|_| Agent::start_with(backend.addr(), &options)).collect::<Result<Vec<_>>>()?;
    let addrs = agents.iter().map(Agent::addr).collect::<Vec<_>>();
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&addrs)?)?;
    let before = warm(&envoy, 3);
    assert_eq!(before.other("prequal_members"), 3);
    assert_all_ok(&envoy.client().burst(100, 2, |_| Request::get("/")));
    let after = envoy.prequal(SERVING)?;
    assert!(after.steered() - before.steered() >= 95, "{after:#?}");
    assert_eq!(after.other("prequal_diverted_total"), 0, "{after:#?}");
    Ok(())
}

#[test]
fn two_localities_are_both_served() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(4, &Reply::ok().delay(Duration::from_millis(2)))?;
    let all = fleet.addrs();
    let of = |zone: &str, range: std::ops::Range<usize>| {
        let endpoints = all[range].iter().map(lb_endpoint).collect::<Vec<_>>();
        json!({"locality": {"zone": zone}, "load_balancing_weight": 1, "lb_endpoints": endpoints})
    };
    let localities = json!([of("a", 0..1), of("b", 1..4)]);
    let config = placed(&all, localities)?;
    let envoy = Envoy::start(config)?;
    warm(&envoy, 4);
    fleet.clear();
    let before = envoy.prequal(SERVING)?;
    // Equal replicas need not share evenly (docs/design/limits.md), but none is left out. On a busy machine, twelve
    // callers send more than the filter may steer while it still learns the replicas, so Envoy places some requests of
    // the first rounds.
    let after = eventually("all four serve, named by the filter", Duration::from_secs(20), || {
        let begun = envoy.prequal(SERVING).ok()?;
        assert_all_ok(&envoy.client().burst(400, 12, |_| Request::get("/")));
        let now = envoy.prequal(SERVING).ok()?;
        let steered = now.steered() - begun.steered() >= 390;
        (steered && fleet.served().iter().all(|&served| served >= 20)).then_some(now)
    });
    assert_eq!(after.other("prequal_diverted_total"), before.other("prequal_diverted_total"));
    Ok(())
}

/// Asserts that the ratio of two heavy replicas' requests to two light ones' is eventually `within` this range. Each
/// attempt sends 1200 requests, `callers` at a time, and nearly all of them must be steered. If the choice ignored
/// weights, the ratio would be 1.9, because probes would still follow the weights.
#[track_caller]
fn assert_heavy_to_light(
    config: EnvoyConfig,
    fleet: &Fleet,
    callers: usize,
    within: RangeInclusive<f64>,
) -> Result<()> {
    // On a busy machine late replies would be lost, and with them samples.
    let envoy = Envoy::start(set(config, "probe_timeout_ms", 500))?;
    warm(&envoy, 4);
    eventually(&format!("heavy to light is within {within:?}"), Duration::from_secs(30), || {
        fleet.clear();
        let before = envoy.prequal(SERVING).ok()?;
        assert_all_ok(&envoy.client().burst(1200, callers, |_| Request::get("/")));
        let after = envoy.prequal(SERVING).ok()?;
        let steered = after.steered() - before.steered() >= 1150;
        let served = fleet.served();
        let ratio = (served[0] + served[1]) as f64 / (served[2] + served[3]) as f64;
        (steered && within.contains(&ratio)).then_some(())
    });
    Ok(())
}

#[test]
fn endpoint_weights_stay_in_force() -> Result<()> {
    bed!();
    // With equal weights, there is one caller for each of the four replicas: with more callers, replicas with a low
    // estimate of the knee would serve less (docs/design/limits.md).
    for (heavy, callers, within) in [(3, 12, 2.1..=4.5), (1, 4, 0.6..=1.6)] {
        let fleet = Fleet::uniform(4, &Reply::ok().delay(Duration::from_millis(10)))?;
        let weighted = fleet.addrs().into_iter().zip([heavy, heavy, 1, 1]);
        let weighted = weighted.map(|(addr, weight)| endpoint(addr, weight, "HEALTHY"));
        let localities = json!([{"lb_endpoints": weighted.collect::<Vec<_>>()}]);
        let config = placed(&fleet.addrs(), localities)?;
        assert_heavy_to_light(config, &fleet, callers, within)?;
    }
    Ok(())
}

#[test]
fn locality_weights_stay_in_force() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(4, &Reply::ok().delay(Duration::from_millis(10)))?;
    let all = fleet.addrs();
    let of = |zone: &str, weight: u32, range: std::ops::Range<usize>| {
        let endpoints = all[range].iter().map(lb_endpoint).collect::<Vec<_>>();
        json!({"locality": {"zone": zone}, "load_balancing_weight": weight, "lb_endpoints": endpoints})
    };
    let localities = json!([of("a", 3, 0..2), of("b", 1, 2..4)]);
    let config = placed(&all, localities)?.edit(|config| {
        let by_locality = json!({"locality_weighted_lb_config": {}});
        config.cluster_mut(SERVING)["common_lb_config"] = by_locality.clone();
        let fallback = config
            .cluster_mut("replicas-agent")
            .pointer_mut(
                "/load_balancing_policy/policies/0/typed_extension_config/typed_config\
                     /fallback_policy/policies/0/typed_extension_config/typed_config",
            )
            .expect("shipped");
        fallback["locality_lb_config"] = by_locality;
    });
    assert_heavy_to_light(config, &fleet, 12, 2.1..=4.5)
}
