//! What the agent's bookkeeping costs per request: goal 200 ns for a start and a finish.
//!
//! 12 requests are in flight and the oldest ends first, as in a steady flow; 5000 requests a second.

use std::collections::VecDeque;
use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use prequal_core::time::Micros;
use prequal_core::tracker::{Outcome, Ticket, Tracker, TrackerConfig};

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

criterion_group!(benches, tracker);
criterion_main!(benches);
