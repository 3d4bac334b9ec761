//! The native module beside Envoy's built-in round robin: the same hosts, health, priorities, weights and localities,
//! and so the same share of the requests for each host (`docs/guide/native.md`).

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{Envoy, EnvoyConfig, Fleet, Policy, Reply, Request, eventually};
use serde_json::{Value, json};

use crate::support::{SERVING, assert_all_ok, bed, endpoint, set, warm};

const PROBING: &str = "replicas-agent";
/// Number of hosts behind both Envoys; a comparison may use fewer.
const HOSTS: usize = 7;
/// Number of requests that a comparison sends through each Envoy.
const REQUESTS: usize = 1500;
/// Maximum difference between a host's two shares, per cent of all requests: four standard deviations of that
/// difference for a host with half of the requests.
const TOLERANCE: f64 = 7.5;

const HEALTHY: &str = "HEALTHY";
const DEGRADED: &str = "DEGRADED";
const UNHEALTHY: &str = "UNHEALTHY";

/// Hosts of one locality and one priority: health and weight of each.
struct Group<'a> {
    priority: u32,
    zone: &'a str,
    zone_weight: u32,
    hosts: &'a [(&'a str, u32)],
}

impl<'a> Group<'a> {
    fn of_priority(priority: u32, hosts: &'a [(&'a str, u32)]) -> Self {
        Self { priority, zone: "", zone_weight: 1, hosts }
    }

    fn of_zone(zone: &'a str, zone_weight: u32, hosts: &'a [(&'a str, u32)]) -> Self {
        Self { priority: 0, zone, zone_weight, hosts }
    }

    /// The group with the next addresses of `addrs`, as Envoy's `LocalityLbEndpoints`.
    fn endpoints(&self, addrs: &mut impl Iterator<Item = SocketAddr>) -> Value {
        let host = |((health, weight), addr): (&(&str, u32), SocketAddr)| endpoint(addr, *weight, health);
        let hosts: Vec<Value> = self.hosts.iter().zip(addrs).map(host).collect();
        json!({"priority": self.priority, "locality": {"zone": self.zone},
               "load_balancing_weight": self.zone_weight, "lb_endpoints": hosts})
    }
}

/// One fleet behind two Envoys.
struct Sides {
    fleet: Fleet,
    built_in: Envoy,
    native: Envoy,
}

impl Sides {
    /// Starts both, with or without weights of localities.
    fn start(locality_weighted: bool) -> Result<Self> {
        let fleet = Fleet::uniform(HOSTS, &Reply::ok().delay(Duration::from_millis(1)))?;
        let addrs = fleet.addrs();
        let built_in =
            EnvoyConfig::for_replicas(&addrs)?.without_prequal().policy(Policy::RoundRobin).edit(|config| {
                let policies = &mut config.cluster_mut(SERVING)["load_balancing_policy"]["policies"];
                if locality_weighted {
                    let settings = &mut policies[0]["typed_extension_config"]["typed_config"];
                    settings["locality_lb_config"] = json!({"locality_weighted_lb_config": {}});
                }
            });
        let built_in = Envoy::start(built_in.eds(&[SERVING]))?;
        let native = with_detour(EnvoyConfig::native_for_replicas(&addrs)?);
        let native = set(native, "locality_weighted", locality_weighted);
        let native = Envoy::start(native.eds(&[SERVING, PROBING]))?;
        warm(&native, HOSTS as u64);
        Ok(Self { fleet, built_in, native })
    }

    /// Each host's share of the requests through this Envoy, per cent.
    fn shares(&self, envoy: &Envoy) -> Vec<f64> {
        self.fleet.clear();
        assert_all_ok(&envoy.client().burst(REQUESTS, 4, |_| Request::get("/")));
        self.fleet.served().iter().map(|served| *served as f64 * 100.0 / REQUESTS as f64).collect()
    }

    /// Applies the groups to both Envoys and compares the shares. `expected` has the shares that follow from
    /// Envoy's rules, in the order of the hosts.
    #[track_caller]
    fn compare(&mut self, what: &str, groups: &[Group<'_>], expected: &[f64]) -> Result<()> {
        let mut addrs = self.fleet.addrs().into_iter();
        let endpoints = Value::Array(groups.iter().map(|group| group.endpoints(&mut addrs)).collect());
        self.built_in.set_localities(SERVING, &endpoints)?;
        [SERVING, PROBING].iter().try_for_each(|cluster| self.native.set_localities(cluster, &endpoints))?;
        let near = |one: &[f64], other: &[f64]| {
            one.iter().zip(other).all(|(one, other)| (one - other).abs() <= TOLERANCE)
        };
        let built_in = self.shares(&self.built_in);
        assert!(near(&built_in, expected), "{what}: round robin has {built_in:.1?}, not {expected:?}");
        let mut native = Vec::new();
        // Workers adopt the new weights a moment after the main thread.
        let agreed = (0..8).any(|_| {
            native = self.shares(&self.native);
            near(&native, &built_in)
        });
        assert!(agreed, "{what}: the native module has {native:.1?}, round robin {built_in:.1?}");
        Ok(())
    }
}

/// Adds the detour filter, which names hosts that are not healthy, and lets Envoy use the hosts that it names.
fn with_detour(config: EnvoyConfig) -> EnvoyConfig {
    config.edit(|config| {
        config.insert_before("envoy.filters.http.router", detour());
        let all = ["UNKNOWN", HEALTHY, UNHEALTHY, "DRAINING", "TIMEOUT", DEGRADED];
        config.cluster_mut(SERVING)["common_lb_config"]["override_host_status"] = json!({ "statuses": all });
    })
}

fn detour() -> Value {
    json!({"name": "prequal-detour", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilter",
        "dynamic_module_config": {"name": "prequal_native", "do_not_close": true},
        "filter_name": "prequal_detour",
    }})
}

#[test]
fn degraded_hosts_get_what_healthy_ones_leave() -> Result<()> {
    bed!();
    let mut sides = Sides::start(false)?;
    let (h, d, u) = ((HEALTHY, 1), (DEGRADED, 1), (UNHEALTHY, 1));
    sides.compare(
        "a third healthy",
        &[Group::of_priority(0, &[h, h, d, d, d, (DEGRADED, 3)])],
        &[23.0, 23.0, 9.0, 9.0, 9.0, 27.0],
    )?;
    sides.compare(
        "healthy hosts of all priorities come first",
        &[Group::of_priority(0, &[h, d, u, u]), Group::of_priority(1, &[h, h])],
        &[35.0, 0.0, 0.0, 0.0, 32.5, 32.5],
    )?;
    sides.compare(
        "none is healthy",
        &[Group::of_priority(0, &[d, d, u, u]), Group::of_priority(1, &[d, d])],
        &[35.0, 35.0, 0.0, 0.0, 15.0, 15.0],
    )?;
    sides.compare(
        "weights of localities do not count unless the cluster says so",
        &[Group::of_zone("a", 1, &[h, h, h]), Group::of_zone("b", 9, &[h])],
        &[25.0; 4],
    )?;
    Ok(())
}

#[test]
fn in_panic_all_hosts_are_used() -> Result<()> {
    bed!();
    let mut sides = Sides::start(false)?;
    let (h, d, u) = ((HEALTHY, 1), (DEGRADED, 1), (UNHEALTHY, 1));
    sides.compare(
        "too few healthy hosts",
        &[Group::of_priority(0, &[h, h, u, u, u, (UNHEALTHY, 3)])],
        &[12.5, 12.5, 12.5, 12.5, 12.5, 37.5],
    )?;
    sides.compare("no healthy host", &[Group::of_priority(0, &[u; HOSTS])], &[14.3; HOSTS])?;
    sides.compare(
        "both priorities panic, so their sizes decide",
        &[Group::of_priority(0, &[u, u, u, h]), Group::of_priority(1, &[u, u])],
        &[16.7; 6],
    )?;
    sides.compare(
        "one of two priorities panics",
        &[Group::of_priority(0, &[h, u, u, u, u]), Group::of_priority(1, &[u, d])],
        &[5.8, 5.8, 5.8, 5.8, 5.8, 0.0, 71.0],
    )?;
    sides.compare(
        "the other priority is large enough",
        &[Group::of_priority(0, &[h, u, u, u]), Group::of_priority(1, &[h, h])],
        &[35.0, 0.0, 0.0, 0.0, 32.5, 32.5],
    )?;
    Ok(())
}

#[test]
fn the_panic_threshold_is_a_setting_of_its_own() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(3, &Reply::ok())?;
    let config = set(EnvoyConfig::native_for_replicas(&fleet.addrs())?, "healthy_panic_threshold", 0);
    let mut envoy = Envoy::start(with_detour(config).eds(&[SERVING, PROBING]))?;
    warm(&envoy, 3);
    let hosts = [(HEALTHY, 1), (UNHEALTHY, 1), (UNHEALTHY, 1)];
    let endpoints = Group::of_priority(0, &hosts).endpoints(&mut fleet.addrs().into_iter());
    envoy.set_localities(SERVING, &json!([endpoints]))?;
    eventually("only the healthy host is used", Duration::from_secs(5), || {
        fleet.clear();
        assert_all_ok(&envoy.client().burst(100, 4, |_| Request::get("/")));
        (fleet.served()[1..] == [0, 0]).then_some(())
    });
    Ok(())
}

#[test]
fn localities_share_by_weight_and_health() -> Result<()> {
    bed!();
    let mut sides = Sides::start(true)?;
    let (h, d, u) = ((HEALTHY, 1), (DEGRADED, 1), (UNHEALTHY, 1));
    sides.compare(
        "all are healthy",
        &[Group::of_zone("a", 1, &[h, h, h]), Group::of_zone("b", 3, &[h, (HEALTHY, 2)])],
        &[8.3, 8.3, 8.3, 25.0, 50.0, 0.0],
    )?;
    sides.compare(
        "half of a locality is unhealthy",
        &[Group::of_zone("a", 1, &[h, h]), Group::of_zone("b", 1, &[h, u, h, u])],
        &[29.4, 29.4, 20.6, 0.0, 20.6, 0.0],
    )?;
    sides.compare(
        "degraded hosts have their own weights, also where no host is healthy",
        &[Group::of_zone("a", 1, &[d]), Group::of_zone("b", 4, &[d]), Group::of_zone("c", 1, &[h, h, u, u])],
        &[10.8, 43.2, 23.0, 23.0, 0.0, 0.0],
    )?;
    sides.compare(
        "in panic localities do not count",
        &[Group::of_zone("a", 1, &[h, u, u]), Group::of_zone("b", 9, &[u, u, u])],
        &[16.7; 6],
    )?;
    Ok(())
}
