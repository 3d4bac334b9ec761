//! The fleets behind the sidecars, and the load on them.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::arm::Arm;
use crate::backends::{Fleet, ReplicaSpec, Service, Times};
use crate::load::{Arrivals, Spread};
use crate::scenario::{Goal, Load, Marked, Scenario};

/// Load as a fraction of what the fleet can serve.
const LOAD: f64 = 0.7;
/// How many times longer a slow replica takes.
const SLOWER: f64 = 4.0;
/// Excluded at the start: at five requests a second, an Envoy needs seconds to learn the fleet.
pub(super) const LEARNS: Duration = Duration::from_secs(15);

/// Number of Envoys and replicas, and the rate of an Envoy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) envoys: u16,
    pub(super) replicas: u16,
    /// Requests per second of each Envoy.
    pub(super) per_envoy: f64,
}

impl Shape {
    /// Requests per second of all Envoys together.
    fn per_second(self) -> f64 {
        f64::from(self.envoys) * self.per_envoy
    }

    /// Mean service time of a usual replica, whole milliseconds, with which the fleet has its intended load.
    fn service_ms(self, slow: u16) -> f64 {
        let usual = f64::from(self.replicas - slow);
        (LOAD * (usual + f64::from(slow) / SLOWER) / self.per_second() * 1e3).round().max(1.0)
    }
}

/// Identical replicas.
pub(super) fn equal(shape: Shape, seconds: Duration) -> Result<Scenario> {
    scenario("sidecars", shape, 0, seconds)
}

/// A quarter of the replicas take [`SLOWER`] times as long.
pub(super) fn quarter_slow(shape: Shape, seconds: Duration) -> Result<Scenario> {
    scenario("sidecars, a quarter slow", shape, shape.replicas / 4, seconds)
}

fn scenario(name: &str, shape: Shape, slow: u16, seconds: Duration) -> Result<Scenario> {
    let rate = shape.per_second().round();
    ensure!(
        (1.0..=10_000.0).contains(&rate),
        "--envoys times --per-envoy must be 1 to 10000 requests a second, not {rate}"
    );
    let mean_ms = shape.service_ms(slow);
    let replica =
        |mean_ms| ReplicaSpec::new(Service::Queue { slots: 1, times: Times::Exponential { mean_ms } });
    let usual = shape.replicas - slow;
    let mut title = format!("{usual} replicas with 1 slot, exponential {mean_ms} ms");
    if slow > 0 {
        title += &format!(", and {slow} with exponential {} ms", mean_ms * SLOWER);
    }
    title += &format!("; {rate} requests/s Poisson, {:.0} % load", LOAD * 100.0);
    Ok(Scenario {
        name: name.to_owned(),
        title,
        fleet: Fleet::of(usize::from(usual), replica(mean_ms))
            .and(usize::from(slow), replica(mean_ms * SLOWER)),
        load: Load::Open { arrivals: Arrivals::Poisson(rate as u32), keys: None, spread: Spread::Random },
        workers: 1,
        arms: Arm::USUAL.to_vec(),
        judged: LEARNS..LEARNS + seconds,
        schedule: Vec::new(),
        streams: 0,
        good_within: Duration::from_secs(2),
        marked: (slow > 0).then_some(Marked { replicas: usual..shape.replicas, label: "the slow quarter" }),
        watch: None,
        goals: vec![Goal::NeverWorse],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { envoys: 32, replicas: 32, per_envoy: 5.0 };
    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn service_times_follow_from_the_load() {
        assert_eq!(SHAPE.service_ms(0), 140.0);
        // 24 + 8 / 4 = 26 usual replicas' worth.
        assert_eq!(SHAPE.service_ms(8), 114.0);
        assert_eq!(Shape { per_envoy: 1.0, ..SHAPE }.service_ms(0), 700.0);
    }

    #[test]
    fn the_slow_quarter_is_marked() {
        let scenario = quarter_slow(SHAPE, MINUTE).unwrap();
        assert_eq!((scenario.fleet.len(), scenario.marked.unwrap().replicas), (32, 24..32));
        assert!(
            scenario.title.contains("24 replicas") && scenario.title.contains("8 with exponential 456 ms")
        );
        assert!(equal(SHAPE, MINUTE).unwrap().marked.is_none());
    }

    #[test]
    fn a_rate_out_of_range_is_refused() {
        let error = equal(Shape { per_envoy: 0.01, ..SHAPE }, MINUTE).unwrap_err().to_string();
        assert!(error.contains("--per-envoy") && error.contains("1 to 10000"), "{error}");
    }
}
