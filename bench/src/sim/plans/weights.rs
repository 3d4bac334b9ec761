//! Fleets drawn at random whose endpoints have weights in Envoy's configuration: which weights each has, and how much
//! load. Left out: weights of localities, and weights that change.

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use super::random::{Drawn, FLEETS, drawn_from, log_uniform, over_fleets};
use super::*;

/// Number of the last fleet of `cold`.
const COLD: u64 = 5 * FLEETS;
/// Seconds before the figures: clients follow weights within about a minute.
const WARM_UP: f64 = 90.0;
/// Highest load of the servers with the highest weight, if all servers share by weight.
const BUSIEST: f64 = 0.9;
/// Weight of the others in a fleet with a canary of weight 1.
const USUAL: u32 = 10;

pub(super) fn weights(length: RunLength) -> Experiment {
    let mut plan = over_fleets(
        weighted_fleet,
        COLD,
        length,
        "weights",
        "fleets drawn at random whose endpoints have weights",
        "120 fleets of the generator of `random`, without its slow episodes. A third have a *canary*: one server has a \
            tenth of the weight of each other. In a third, 20 to 80 % of the servers have 2 to 8 times the weight of the \
            others, but are no larger. In a third, these servers are larger by as much, and the load is too. Clients learn servers and weights \
            from unaddressed probes. `RR` and `LL` are Envoy's `round_robin` and `least_request`. The other policies of \
            Envoy are left out, as they do not follow weights.",
    );
    for point in &mut plan.points {
        point.arms.retain(|(name, _)| ["RR", "LL", LEARNING].contains(&&**name));
    }
    plan
}

/// Draws a fleet with weights. The same number always gives the same fleet.
fn weighted_fleet(number: u64) -> Point {
    let rng = &mut SmallRng::seed_from_u64(number);
    let Drawn { mut point, load, .. } = drawn_from(rng, number);
    let SimScenario { servers, load: arrivals, warm_up, .. } = &mut point.scenario;
    let n = servers.len();
    let times = log_uniform(rng, 2.0, 8.0).round() as u32;
    let heavy = (((0.2 + 0.6 * rng.random::<f64>()) * n as f64).round() as usize).clamp(1, n - 1);
    let kind = rng.random_range(0..3);
    let first = rng.random_range(0..n);
    let chosen = |index: usize, count: usize| (index + n - first) % n < count;
    let label = match kind {
        0 => "a canary".to_owned(),
        1 => format!("{heavy} with {times}x the weight"),
        _ => format!("{heavy} with {times}x the weight and size"),
    };
    for (index, server) in servers.iter_mut().enumerate() {
        server.weight = match kind {
            0 if chosen(index, 1) => 1,
            0 => USUAL,
            _ if chosen(index, heavy) => times,
            _ => 1,
        };
        if kind == 2 {
            server.grow(server.weight);
        }
    }
    let mean = servers.iter().map(|server| f64::from(server.weight)).sum::<f64>() / n as f64;
    let highest = servers.iter().map(|server| server.weight).max().unwrap_or(1);
    let (larger, busiest) = if kind == 2 { (mean, load) } else { (1.0, load * f64::from(highest) / mean) };
    // Without a limit on the busiest, Envoy's policies would overload the heavy servers of most fleets.
    let lower = (BUSIEST / busiest).min(1.0);
    if let SimLoad::Poisson(qps) = arrivals {
        *qps *= larger * lower;
    }
    *warm_up = WARM_UP;
    point.label += &format!(
        ", {label}{}",
        if lower < 1.0 { format!(", {:.0} % load", load * lower * 100.0) } else { String::new() }
    );
    point
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fleet_has_two_weights() {
        for number in COLD + 1..=COLD + FLEETS {
            let point = weighted_fleet(number);
            assert_eq!(format!("{:?}", point.scenario), format!("{:?}", weighted_fleet(number).scenario));
            let mut weights: Vec<u32> = point.scenario.servers.iter().map(|server| server.weight).collect();
            weights.sort_unstable();
            if point.label.contains("a canary") {
                assert_eq!((weights[0], weights.get(1)), (1, Some(&USUAL)), "{}", point.label);
            }
            weights.dedup();
            assert_eq!(weights.len(), 2, "{}", point.label);
        }
    }
}
