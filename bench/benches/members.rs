//! Measures the cost of the membership by fleet size. Goals with 1000 replicas: 1 µs for a request that Envoy placed,
//! and 1 µs for a sample, which is the reply to a discovery probe. Both include the sharing between workers. The goal
//! for a tick, which a worker runs four times a second, is 100 µs.

use std::cell::{Cell, RefCell};
use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};

use criterion::{Criterion, criterion_group, criterion_main};
use prequal_core::client::members::{Evidence, Members, Note, View};
use prequal_core::shared::blob::Blob;
use prequal_core::shared::cas::{self, Place};
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// The membership as stored in shared data.
#[derive(Default)]
struct Host {
    bytes: RefCell<Vec<u8>>,
    number: Cell<u32>,
}

impl Place<Members> for Host {
    fn read(&self) -> (Option<Members>, Option<u32>) {
        // A host copies the bytes.
        let bytes = self.bytes.borrow().clone();
        (Members::decode(black_box(&bytes)).ok(), Some(self.number.get()))
    }

    fn write(&self, members: &Members, _: Option<u32>) -> bool {
        *self.bytes.borrow_mut() = black_box(members.encode().to_vec());
        self.number.set(self.number.get() + 1);
        true
    }
}

/// One worker and its fleet.
struct Worker {
    size: u16,
    host: Host,
    view: View,
    now: Micros,
    rng: SmallRng,
}

impl Worker {
    fn new(size: u16) -> Self {
        let mut worker = Self {
            size,
            host: Host::default(),
            view: View::default(),
            now: Micros::from_millis(1_700_000_000_000),
            rng: SmallRng::seed_from_u64(1),
        };
        for number in 0..size {
            worker.note(Note::Sampled { replica: replica(number), probe: None });
        }
        worker.share();
        worker
    }

    fn any(&mut self) -> Endpoint {
        self.now = self.now.plus(4000);
        replica(self.rng.random_range(0..self.size))
    }

    fn note(&mut self, note: Note) {
        self.view.note(self.now, note);
        if self.view.is_due() {
            self.share();
        }
    }

    fn share(&mut self) {
        cas::update(&self.host, |stored| ((), self.view.share(stored, self.now)));
        self.view.shared();
    }
}

fn replica(number: u16) -> Endpoint {
    let [high, low] = number.to_be_bytes();
    SocketAddr::from((Ipv4Addr::new(10, 0, high, low), 8080)).into()
}

fn members(c: &mut Criterion) {
    for size in [10, 16, 100, 1000, 10_000] {
        let mut worker = Worker::new(size);
        c.bench_function(&format!("members: a sample, {size} replicas"), |b| {
            b.iter(|| {
                let replica = worker.any();
                black_box(worker.view.members().answering_at(replica));
                worker.note(Note::Sampled { replica, probe: None });
                black_box(worker.view.members().placement(replica));
            });
        });
        c.bench_function(&format!("members: a request that Envoy placed, {size} replicas"), |b| {
            b.iter(|| {
                let replica = worker.any();
                worker.note(Note::Confirmed { replica, evidence: Evidence::Placed });
                black_box(worker.view.members().placement(replica));
            });
        });
        c.bench_function(&format!("members: replicas to probe, {size} replicas"), |b| {
            b.iter(|| black_box(worker.view.members().sample(3, &mut worker.rng, |_| false)));
        });
        c.bench_function(&format!("members: a tick, {size} replicas"), |b| {
            b.iter(|| {
                let replica = worker.any();
                worker.note(Note::Sampled { replica, probe: None });
                worker.share();
                worker.view.adopt(worker.host.read().0.unwrap_or_default());
            });
        });
    }
}

criterion_group!(benches, members);
criterion_main!(benches);
