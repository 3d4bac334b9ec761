//! Measures the cost of the agent's bookkeeping per request. Goal: 200 ns for a start and a finish.
//!
//! 12 requests are in flight, and the oldest ends first, as in a steady flow of 5000 requests a second.
//!
//! Also measures the bookkeeping for base latency and knee. Goal: 1 µs for the fit over 32 levels, which is due every
//! 10 ms.

use std::collections::VecDeque;
use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use prequal_core::server::capacity::Levels;
use prequal_core::server::tracker::{Ticket, Tracker, TrackerConfig};
use prequal_core::shared::outcome::Outcome;
use prequal_core::shared::time::Micros;

const IN_FLIGHT: usize = 12;
const STEP_US: u64 = 200;

struct Flow {
    tracker: Tracker,
    tickets: VecDeque<Ticket>,
    now: Micros,
}

impl Flow {
    fn new() -> Self {
        let mut flow = Self {
            tracker: Tracker::new(TrackerConfig::default()),
            tickets: VecDeque::new(),
            now: Micros::from_millis(1_700_000_000_000),
        };
        for _ in 0..IN_FLIGHT {
            flow.tickets.push_back(flow.tracker.start(flow.now));
        }
        for _ in 0..10_000 {
            flow.step();
        }
        flow
    }

    fn step(&mut self) {
        self.now = self.now.plus(STEP_US);
        self.tickets.push_back(self.tracker.start(self.now));
        if let Some(ticket) = self.tickets.pop_front() {
            self.tracker.finish(ticket, self.now, Outcome::Success);
        }
    }
}

fn tracker(c: &mut Criterion) {
    let mut flow = Flow::new();
    c.bench_function("tracker: start and finish", |b| b.iter(|| flow.step()));
    let mut flow = Flow::new();
    c.bench_function("tracker: start, finish and report", |b| {
        b.iter(|| {
            flow.step();
            black_box((flow.tracker.rif(), flow.tracker.latency(flow.now)))
        });
    });
}

/// Returns a table of levels of which `levels` are in use, and the current time.
fn seen(levels: u32) -> (Levels, Micros) {
    let mut seen = Levels::new();
    let mut now = Micros::from_millis(1_700_000_000_000);
    for _ in 0..4 {
        for level in 0..levels {
            now = now.plus(STEP_US);
            seen.moved(now, level, level + 1);
        }
        for level in (1..=levels).rev() {
            now = now.plus(STEP_US);
            seen.moved(now, level, level - 1);
            seen.served(now, level, level, level * 1000);
        }
    }
    (seen, now)
}

fn capacity(c: &mut Criterion) {
    // The fit is renewed once it is 10 ms old.
    const DUE_US: u64 = 10_000;
    for levels in [16, 32, 64, 512] {
        let (mut seen, now) = seen(levels);
        c.bench_function(&format!("capacity: fit over {levels} levels"), |b| {
            // Alternate between two times, so that every call renews the fit. If time only advanced, the observations
            // would fade.
            let mut later = false;
            b.iter(|| {
                later = !later;
                black_box(seen.capacity(if later { now.plus(DUE_US) } else { now }, false))
            });
        });
    }
    let (mut seen, mut now) = seen(32);
    c.bench_function("capacity: an arrival and an end", |b| {
        b.iter(|| {
            now = now.plus(1);
            seen.moved(now, 11, 12);
            seen.moved(now, 12, 11);
            seen.served(now, 12, 12, 12_000);
        });
    });
}

criterion_group!(benches, tracker, capacity);
criterion_main!(benches);
