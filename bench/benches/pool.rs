//! Measures the cost of the rules alone for one request, with a pool of 16. Goals: 400 ns for a pick and a record, 1 µs
//! for decoding the pool's bytes and encoding them again.
//!
//! Time advances as at 10 000 requests a second, so that entries age, and reports arrive as often as picks, so that the
//! pool stays full. The host calls around the rules are measured by `prequal-bench cost`.

use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};

use criterion::{Criterion, criterion_group, criterion_main};
use prequal_core::client::members::Placement;
use prequal_core::client::pool::{PoolSettings, PoolState};
use prequal_core::config::Profile;
use prequal_core::shared::blob::Blob;
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;
use prequal_core::wire::load::Load;
use prequal_core::wire::report::LoadReport;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const STEP_US: u64 = 100;

fn replica(number: u16) -> Endpoint {
    let [high, low] = number.to_be_bytes();
    SocketAddr::from((Ipv4Addr::new(10, 0, high, low), 8080)).into()
}

/// A pool as in a busy fleet, and its settings.
struct Case {
    settings: PoolSettings,
    pool: PoolState,
    now: Micros,
    fleet: u16,
    reports_per_pick: u32,
    rng: SmallRng,
}

impl Case {
    fn new(profile: Profile, fleet: u16, reports_per_pick: u32) -> Self {
        let mut case = Self {
            settings: profile.pool_settings(),
            pool: PoolState::new(),
            now: Micros::from_millis(1_700_000_000_000),
            fleet,
            reports_per_pick,
            rng: SmallRng::seed_from_u64(1),
        };
        case.pool.set_members(u32::from(fleet), 0, case.now);
        // More requests than any history in the pool covers.
        for _ in 0..20_000 {
            case.request();
        }
        assert!(case.pool.view(&case.settings, case.now).occupancy >= 2, "the pool fills");
        case
    }

    fn request(&mut self) {
        for _ in 0..self.reports_per_pick {
            self.record();
        }
        self.pick();
    }

    fn record(&mut self) {
        let endpoint = replica(self.rng.random_range(0..self.fleet));
        let rif = self.rng.random_range(0..8);
        let load = Load::at_face_value(rif, Some(self.rng.random_range(1_000..20_000)));
        self.pool.record(&self.settings, self.now, endpoint, load, Placement::even(0), &mut self.rng);
    }

    fn pick(&mut self) {
        self.now = self.now.plus(STEP_US);
        black_box(self.pool.pick(&self.settings, self.now, &mut self.rng));
    }
}

fn pool(c: &mut Criterion) {
    // The paper's profile removes an entry per pick and expects three probes for each pick.
    for (name, profile, fleet, reports) in [
        ("pick and record, 100 replicas", Profile::Default, 100, 1),
        ("pick and record, 16 replicas", Profile::Default, 16, 1),
        ("pick and 3 records, 100 replicas, paper's profile", Profile::Paper, 100, 3),
    ] {
        let mut case = Case::new(profile, fleet, reports);
        c.bench_function(name, |b| b.iter(|| case.request()));
    }
}

fn blob(c: &mut Criterion) {
    let case = Case::new(Profile::Default, 100, 1);
    let bytes = case.pool.encode().to_vec();
    let mut out = bytes.clone();
    c.bench_function(&format!("decode and encode the blob ({} bytes)", bytes.len()), |b| {
        b.iter(|| {
            if let Ok(pool) = PoolState::decode(black_box(&bytes)) {
                // Encoding passes the bytes to the host, which copies them.
                out.copy_from_slice(black_box(&pool.encode()));
            }
        });
    });
    black_box(out);
}

fn report(c: &mut Criterion) {
    let text = "12;50321;10.0.0.17:8080";
    c.bench_function("parse a report", |b| b.iter(|| LoadReport::parse(black_box(text))));
}

criterion_group!(benches, pool, blob, report);
criterion_main!(benches);
