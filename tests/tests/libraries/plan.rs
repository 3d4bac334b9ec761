//! Generates the traces: a server with slots and a queue, under changing load. Seeds are fixed.

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use crate::trace::{Event, Kind, Trace, What};

const SECOND: f64 = 1e6;

/// A server and its load.
struct Plan {
    name: &'static str,
    slots: usize,
    service_us: f64,
    /// A request takes the sum of this many exponential times; with 0, exactly the service time.
    stages: u32,
    /// For each phase: seconds, requests a second, factor of the service time, and seconds by which the clock steps at
    /// the end.
    phases: &'static [(f64, f64, f64, i64)],
    /// Resolution of the clock.
    tick_us: u64,
    /// Shares of requests that end in each way.
    fails: f64,
    aborts: f64,
    streams: f64,
    slow_clients: f64,
    /// Mean time that a slow client keeps its request waiting, and mean time that the request then takes to end.
    waits_us: (f64, f64),
}

const PLAIN: Plan = Plan {
    name: "plain",
    slots: 4,
    service_us: 40_000.0,
    stages: 1,
    phases: &[(20.0, 70.0, 1.0, 0)],
    tick_us: 1,
    fails: 0.0,
    aborts: 0.0,
    streams: 0.0,
    slow_clients: 0.0,
    waits_us: (500_000.0, 5000.0),
};

const PLANS: [Plan; 15] = [
    PLAIN,
    Plan { name: "constant", stages: 0, slots: 8, phases: &[(10.0, 180.0, 1.0, 0)], ..PLAIN },
    Plan {
        name: "overload",
        phases: &[(5.0, 60.0, 1.0, 0), (6.0, 130.0, 1.0, 0), (8.0, 10.0, 1.0, 0)],
        ..PLAIN
    },
    // A run of fast responses, which restarts the estimate.
    Plan {
        name: "healed",
        stages: 0,
        phases: &[(5.0, 60.0, 1.0, 0), (8.0, 4.0, 10.0, 0), (6.0, 30.0, 1.0, 0)],
        ..PLAIN
    },
    // Runs of fast responses that do not restart it, because many requests are in flight.
    Plan { name: "many slots", slots: 64, service_us: 100_000.0, phases: &[(8.0, 450.0, 1.0, 0)], ..PLAIN },
    Plan { name: "failures", fails: 0.3, phases: &[(8.0, 60.0, 1.0, 0), (10.0, 0.5, 1.0, 0)], ..PLAIN },
    Plan { name: "clients", aborts: 0.1, streams: 0.05, slow_clients: 0.2, ..PLAIN },
    // More requests in flight than there are distinct levels.
    Plan { name: "flood", slots: 800, phases: &[(1.0, 1000.0, 40.0, 0), (2.0, 50.0, 1.0, 0)], ..PLAIN },
    // The clock steps back and forward. After the long steps forward all earlier evidence is old, and the weights of
    // the estimate are scaled down.
    Plan {
        name: "clock",
        fails: 0.1,
        phases: &[
            (4.0, 60.0, 1.0, 0),
            (2.0, 60.0, 1.0, -3),
            (3.0, 60.0, 1.0, 170),
            (3.0, 60.0, 1.0, 700),
            (3.0, 60.0, 1.0, 9000),
            (3.0, 60.0, 1.0, -8000),
            (3.0, 60.0, 1.0, 0),
        ],
        ..PLAIN
    },
    Plan { name: "trickle", fails: 0.2, phases: &[(60.0, 0.4, 1.0, 0)], ..PLAIN },
    // After the previous departure, a request takes as long as one that arrives alone.
    Plan { name: "one by one", slots: 1, stages: 0, phases: &[(20.0, 12.0, 1.0, 0)], ..PLAIN },
    // A clock so coarse that no request takes any time: between its ticks, the requests of one second begin and end.
    Plan {
        name: "no time",
        slots: 1,
        tick_us: 2_000_000,
        phases: &[
            (1.0, 20.0, 1.0, 0),
            (1.0, 0.01, 1.0, 0),
            (1.0, 20.0, 1.0, 0),
            (1.0, 0.01, 1.0, 0),
            (1.0, 20.0, 1.0, 0),
        ],
        ..PLAIN
    },
    // Never idle again after the start, for so long that the sums of the lowest levels fade to zero.
    Plan { name: "busy", slots: 32, service_us: 20_000_000.0, phases: &[(6000.0, 1.5, 1.0, 0)], ..PLAIN },
    // So few requests meet another one that only the length of busy periods shows this. Many wait for
    // their clients.
    Plan {
        name: "rarely two",
        slots: 1,
        stages: 0,
        slow_clients: 0.3,
        phases: &[(40.0, 5.0, 1.0, 0)],
        ..PLAIN
    },
    // Every request waits while its response is written. Only the times between departures show that requests are
    // served one by one.
    Plan {
        name: "writes",
        slots: 1,
        stages: 8,
        slow_clients: 1.0,
        waits_us: (3.0, 3.0),
        phases: &[(30.0, 15.0, 1.0, 0)],
        ..PLAIN
    },
];

/// All traces, each with its seed.
pub(crate) fn traces() -> Vec<Trace> {
    let mut traces: Vec<Trace> = (0..).zip(&PLANS).map(|(seed, plan)| plan.trace(seed)).collect();
    traces.push(Trace {
        name: "idle",
        events: vec![Event { at: 2_000_000, what: What::Probe }],
        ..traces[0].head()
    });
    traces
}

impl Trace {
    /// The same server, without events.
    fn head(&self) -> Self {
        Self { events: Vec::new(), ..*self }
    }
}

impl Plan {
    fn trace(&self, seed: u32) -> Trace {
        let mut rng = SmallRng::seed_from_u64(seed.into());
        let mut events = Vec::new();
        let mut free = vec![0.0f64; self.slots];
        let (mut id, mut at) = (0, 0.0);
        let mut phase_ends = 0.0;
        for &(seconds, rate, factor, _) in self.phases {
            phase_ends += seconds * SECOND;
            loop {
                let next = at + exponential(&mut rng, SECOND / rate);
                if next > phase_ends {
                    break;
                }
                at = next;
                let slot = (0..free.len()).min_by(|a, b| free[*a].total_cmp(&free[*b])).expect("a slot");
                let mean = self.service_us * factor;
                let takes = match self.stages {
                    0 => mean,
                    stages => {
                        let each = mean / f64::from(stages);
                        (0..stages).map(|_| exponential(&mut rng, each)).sum()
                    }
                };
                free[slot] = free[slot].max(at) + takes;
                self.request(&mut rng, &mut events, id, at, free[slot]);
                id += 1;
                if rng.random::<f64>() < 0.3 {
                    let later = exponential(&mut rng, 10_000.0);
                    push(&mut events, at + later, What::Probe);
                }
            }
            at = phase_ends;
            push(&mut events, at, What::Probe);
        }
        // A stable sort: events at the same time stay in order.
        events.sort_by_key(|event| event.at);
        let begin = 5_000_000_000;
        let mut steps = self.steps();
        for event in &mut events {
            while steps.first().is_some_and(|(until, _)| event.at > *until) {
                steps.remove(0);
            }
            let shift = steps.first().map_or(0, |(_, shift)| *shift);
            let at = (begin + event.at).saturating_add_signed(shift);
            event.at = at - at % self.tick_us;
        }
        let (json, limit) = (seed % 2 == 1, [0, 64, 2][seed as usize % 3]);
        let window_us = [5_000_000, 1_000_000][seed as usize % 2];
        Trace { name: self.name, begin, json, limit, window_us, events }
    }

    /// The offsets of the stepping clock: each with the time, on the steady clock, until which it applies.
    fn steps(&self) -> Vec<(u64, i64)> {
        let (mut until, mut shift) = (0, 0);
        let mut steps = Vec::new();
        for &(seconds, _, _, step) in self.phases {
            until += (seconds * SECOND) as u64;
            steps.push((until, shift));
            shift += step * 1_000_000;
        }
        steps.push((u64::MAX, shift));
        steps
    }

    /// Adds the events of a request that arrives at `at` and is answered at `end`.
    fn request(&self, rng: &mut SmallRng, events: &mut Vec<Event>, id: u32, at: f64, end: f64) {
        let mut drawn = rng.random::<f64>();
        let mut is = |share: f64| {
            drawn -= share;
            drawn < 0.0
        };
        push(events, at, What::Start(id));
        if is(self.aborts) {
            let left = at + (end - at) * rng.random::<f64>();
            push(events, left, What::Abort(id));
        } else if is(self.fails) {
            push(events, end, What::Head(id, Kind::Fail));
            push(events, end, What::Finish(id));
        } else if is(self.streams) {
            push(events, end, What::Head(id, Kind::Stream));
            push(events, end + exponential(rng, 2.0 * SECOND), What::Finish(id));
        } else if is(self.slow_clients) {
            push(events, end, What::Head(id, Kind::Ok));
            push(events, end, What::Wait(id));
            let (wait_us, then_us) = self.waits_us;
            let back = end + exponential(rng, wait_us);
            if rng.random::<f64>() < 0.2 {
                push(events, back, What::Abort(id));
            } else {
                push(events, back, What::Back(id));
                push(events, back + exponential(rng, then_us), What::Finish(id));
            }
        } else {
            push(events, end, What::Head(id, Kind::Ok));
            push(events, end, What::Finish(id));
        }
    }
}

fn push(events: &mut Vec<Event>, at: f64, what: What) {
    events.push(Event { at: at as u64, what });
}

fn exponential(rng: &mut SmallRng, mean: f64) -> f64 {
    -(1.0 - rng.random::<f64>()).ln() * mean
}
