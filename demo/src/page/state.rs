//! The page's state, and the JSON that the browser reads.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::faults::Fault;
use crate::load::SIDES;
use crate::page::endpoints::Endpoints;
use crate::windows::KEPT;

/// Rates are taken over this many collections, one a second.
const RATES_OVER: usize = 5;

/// A fault that is over at once is shown for this long.
const SHOWN: Duration = Duration::from_secs(3);

/// A replica is shown as avoided if its share is below this fraction of an equal share.
const AVOIDED: f64 = 0.05;

/// A fault that was switched on.
#[derive(Clone, Debug)]
pub(crate) struct Active {
    pub(crate) id: u64,
    pub(crate) fault: &'static Fault,
    pub(crate) replica: Option<u16>,
    pub(crate) seconds: u64,
    pub(crate) begun: Instant,
}

impl Active {
    fn end(&self) -> Instant {
        self.begun + Duration::from_secs(self.seconds).max(SHOWN)
    }
}

/// The last few readings of a program's counters, for computing rates.
#[derive(Debug, Default)]
pub(crate) struct Readings(VecDeque<(Instant, BTreeMap<String, f64>)>);

impl Readings {
    pub(crate) fn push(&mut self, now: Instant, values: BTreeMap<String, f64>) {
        self.0.push_back((now, values));
        while self.0.len() > RATES_OVER + 1 {
            self.0.pop_front();
        }
    }

    pub(crate) fn last(&self, name: &str) -> Option<f64> {
        self.0.back()?.1.get(name).copied()
    }

    /// Growth per second. A counter that decreased has restarted: its value is its growth.
    pub(crate) fn rate(&self, name: &str) -> f64 {
        let (Some((first, old)), Some((last, new))) = (self.0.front(), self.0.back()) else { return 0.0 };
        let elapsed = last.saturating_duration_since(*first).as_secs_f64();
        if elapsed <= 0.0 {
            return 0.0;
        }
        let (old, new) = (old.get(name).copied().unwrap_or(0.0), new.get(name).copied().unwrap_or(0.0));
        (if new >= old { new - old } else { new }) / elapsed
    }
}

/// One agent at the last reading.
#[derive(Debug, Default)]
pub(crate) struct Agent {
    /// Whether it answered the last query.
    pub(crate) up: bool,
    pub(crate) readings: Readings,
}

/// One side of the load.
#[derive(Debug, Default)]
pub(crate) struct Side {
    pub(crate) ok: u64,
    pub(crate) failed: u64,
    /// As reported by the load generator, oldest first.
    pub(crate) windows: VecDeque<Value>,
}

impl Side {
    fn answered(&self, replica: u16) -> f64 {
        self.windows.back().map_or(0.0, |window| {
            let counts = window["answered"].as_array().into_iter().flatten();
            counts
                .filter(|pair| pair[0].as_u64() == Some(u64::from(replica)))
                .filter_map(|pair| pair[1].as_f64())
                .fold(0.0, |sum, count| sum + count)
        })
    }

    /// Share of the last window's answers, 0 to 1.
    pub(crate) fn share(&self, replica: u16) -> f64 {
        let counts = self.windows.back().and_then(|window| window["answered"].as_array());
        let all: f64 = counts.into_iter().flatten().filter_map(|pair| pair[1].as_f64()).sum();
        if all > 0.0 { self.answered(replica) / all } else { 0.0 }
    }
}

/// The whole state of the page.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) endpoints: Endpoints,
    pub(crate) baseline: String,
    /// When the controller on the host last fetched orders.
    pub(crate) controller: Option<Instant>,
    /// Orders that it has not fetched yet.
    pub(crate) orders: Vec<Value>,
    /// The load generator's clock.
    pub(crate) second: u64,
    pub(crate) rate: u64,
    pub(crate) ended: bool,
    pub(crate) sides: [Side; 2],
    pub(crate) agents: BTreeMap<u16, Agent>,
    pub(crate) balancer: Readings,
    pub(crate) balancer_up: bool,
    active: Vec<Active>,
    events: VecDeque<(u64, String)>,
    next_id: u64,
}

impl State {
    pub(crate) fn new(endpoints: Endpoints) -> Self {
        Self {
            endpoints,
            baseline: String::new(),
            controller: None,
            orders: Vec::new(),
            second: 0,
            rate: 0,
            ended: false,
            sides: Default::default(),
            agents: BTreeMap::new(),
            balancer: Readings::default(),
            balancer_up: false,
            active: Vec::new(),
            events: VecDeque::new(),
            next_id: 1,
        }
    }

    /// Whether a controller on the host fetches orders.
    pub(crate) fn controlled(&self, within: Duration) -> bool {
        self.controller.is_some_and(|last| last.elapsed() < within)
    }

    /// Records that a fault was switched on; returns its number.
    pub(crate) fn begin(&mut self, order: &Active) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let target = order.replica.map_or_else(String::new, |number| format!(" on {number}"));
        self.event(format!("{}{target}", order.fault.name));
        self.active.push(Active { id, begun: Instant::now(), ..order.clone() });
        id
    }

    /// Records that a fault could not be carried out.
    pub(crate) fn failed(&mut self, id: u64, why: &str) {
        if let Some(index) = self.active.iter().position(|active| active.id == id) {
            let active = self.active.remove(index);
            self.event(format!("{} not carried out: {why}", active.fault.name));
        }
    }

    /// Stores the load generator's figures. If its clock went back, it was restarted.
    pub(crate) fn load(&mut self, stats: &Value) {
        let second = stats["second"].as_u64().unwrap_or(0);
        if second < self.second {
            self.sides = Default::default();
            self.events.clear();
        }
        self.second = second;
        self.rate = stats["rate"].as_u64().unwrap_or(0);
        self.ended = stats["ended"].as_bool().unwrap_or(false);
        for (side, name) in self.sides.iter_mut().zip(SIDES) {
            let reported = &stats["sides"][name];
            side.ok = reported["ok"].as_u64().unwrap_or(0);
            side.failed = reported["failed"].as_u64().unwrap_or(0);
            side.windows.extend(reported["windows"].as_array().into_iter().flatten().cloned());
            while side.windows.len() > KEPT {
                side.windows.pop_front();
            }
        }
    }

    /// The last second of the newest window.
    pub(crate) fn newest(&self) -> u64 {
        self.sides[0].windows.back().and_then(|window| window["second"].as_u64()).unwrap_or(0)
    }

    /// Removes faults that have ended, and records that.
    pub(crate) fn expire(&mut self, now: Instant) {
        let (over, active) = std::mem::take(&mut self.active).into_iter().partition(|a| now >= a.end());
        self.active = active;
        for ended in over as Vec<Active> {
            if ended.seconds > 0 {
                self.event(format!("{} ends", ended.fault.name));
            }
        }
    }

    fn event(&mut self, text: String) {
        self.events.push_back((self.second, text));
        while self.events.len() > 50 {
            self.events.pop_front();
        }
    }

    /// The whole state, with the windows that end after `since`.
    pub(crate) fn json(&self, since: u64) -> Value {
        let now = Instant::now();
        let rotation = self.endpoints.in_rotation(now);
        let sides: serde_json::Map<String, Value> = SIDES
            .iter()
            .zip(&self.sides)
            .map(|(name, side)| {
                let newer: Vec<&Value> =
                    side.windows.iter().filter(|w| w["second"].as_u64() > Some(since)).collect();
                ((*name).to_owned(), json!({"ok": side.ok, "failed": side.failed, "windows": newer}))
            })
            .collect();
        let replicas: Vec<Value> =
            (1..=self.endpoints.replicas).map(|number| self.replica(number, &rotation)).collect();
        let active: Vec<Value> = self
            .active
            .iter()
            .map(|active| {
                json!({
                    "id": active.id,
                    "name": active.fault.name,
                    "what": active.fault.what,
                    "replica": active.replica,
                    "seconds": active.seconds,
                    "left": active.end().saturating_duration_since(now).as_secs_f64().ceil(),
                })
            })
            .collect();
        json!({
            "second": self.second,
            "rate": self.rate,
            "ended": self.ended,
            "baseline": self.baseline,
            "controller": self.controlled(super::CONTROLLER),
            "sides": sides,
            "replicas": replicas,
            "balancer": self.balancer(),
            "active": active,
            "events": self.events.iter().map(|(second, text)| json!([second, text])).collect::<Vec<_>>(),
        })
    }

    fn replica(&self, number: u16, rotation: &[u16]) -> Value {
        let [prequal, baseline] = [&self.sides[0], &self.sides[1]].map(|side| side.share(number));
        let in_rotation = rotation.contains(&number);
        let measured = self.sides[0].windows.back().is_some();
        let agent = self.agents.get(&number);
        let faults: Vec<&str> =
            self.active.iter().filter(|a| a.replica == Some(number)).map(|a| a.fault.name).collect();
        json!({
            "number": number,
            "address": self.endpoints.address(number).map(|ip| ip.to_string()),
            "in_rotation": in_rotation,
            "up": agent.is_some_and(|agent| agent.up),
            "rif": agent.and_then(|agent| agent.readings.last("rif")),
            "latency_ms": agent.and_then(|agent| agent.readings.last("latency_ms")),
            "base_ms": agent.and_then(|agent| agent.readings.last("base_ms")),
            "knee": agent.and_then(|agent| agent.readings.last("knee")),
            "requests_per_s": agent.map_or(0.0, |agent| agent.readings.rate("success")),
            "errors_per_s": agent.map_or(0.0, |agent| agent.readings.rate("failure")),
            "share": {"prequal": prequal, "baseline": baseline},
            "avoided": measured && in_rotation && prequal * (rotation.len() as f64) < AVOIDED,
            "faults": faults,
        })
    }

    fn balancer(&self) -> Value {
        let rate = |name: &str| self.balancer.rate(name);
        let picks = rate("cold") + rate("hot") + rate("trial") + rate("fallback");
        json!({
            "up": self.balancer_up,
            "cold_per_s": rate("cold"),
            "hot_per_s": rate("hot"),
            "trial_per_s": rate("trial"),
            "fallback_per_s": rate("fallback"),
            "probes_per_query": if picks > 0.0 { rate("sent") / picks } else { 0.0 },
            "diverted_per_s": rate("diverted"),
            "theta_rif": self.balancer.last("theta_rif"),
            "pool_occupancy": self.balancer.last("pool_occupancy"),
            "members": self.balancer.last("members"),
            "ejected": self.balancer.last("ejected"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn state() -> State {
        let mut endpoints = Endpoints::new(3, PathBuf::from("unused"));
        for number in 1..=3 {
            endpoints.found(number, ([10, 0, 0, number as u8], 80).into());
        }
        State::new(endpoints)
    }

    fn stats(second: u64, answered: Value) -> Value {
        let window = json!({"second": second - 1, "answered": answered});
        let side = json!({"ok": 10, "failed": 1, "windows": [window]});
        json!({"second": second, "rate": 100, "ended": false, "sides": {"prequal": side, "baseline": side}})
    }

    #[test]
    fn a_replica_without_traffic_is_avoided_unless_it_is_out_of_rotation() {
        let mut state = state();
        assert_eq!(state.json(0)["replicas"][0]["avoided"], false, "nothing measured yet");
        state.load(&stats(7, json!([[1, 99], [2, 1]])));
        let json = state.json(0);
        assert_eq!(json["replicas"][0]["share"]["prequal"], 0.99);
        assert_eq!(json["replicas"][0]["avoided"], false);
        assert_eq!(json["replicas"][1]["avoided"], true);
        assert_eq!(json["replicas"][2]["in_rotation"], false);
        assert_eq!(json["replicas"][2]["avoided"], false);
    }

    #[test]
    fn only_newer_windows_are_sent_and_a_restart_clears_them() {
        let mut state = state();
        state.load(&stats(7, json!([])));
        state.load(&stats(8, json!([])));
        let windows =
            |state: &State, since| state.json(since)["sides"]["prequal"]["windows"].as_array().map(Vec::len);
        assert_eq!((windows(&state, 0), windows(&state, 6), windows(&state, 7)), (Some(2), Some(1), Some(0)));
        state.load(&stats(3, json!([])));
        assert_eq!(windows(&state, 0), Some(1));
    }

    #[test]
    fn rates_survive_a_counter_that_restarts() {
        let mut readings = Readings::default();
        let start = Instant::now();
        for (second, value) in [(0, 100.0), (1, 150.0), (2, 200.0)] {
            readings.push(start + Duration::from_secs(second), [("x".to_owned(), value)].into());
        }
        assert_eq!(readings.rate("x"), 50.0);
        readings.push(start + Duration::from_secs(3), [("x".to_owned(), 30.0)].into());
        assert_eq!(readings.rate("x"), 10.0);
        assert_eq!(readings.rate("unknown"), 0.0);
    }
}
