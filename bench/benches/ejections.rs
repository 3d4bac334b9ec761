//! Measures the cost of a request while replicas are ejected: the pick and its response. The balancer keeps its state
//! as bytes in shared data. Goal: with 1000 ejected replicas, no more than 1.2 times the cost with none.

mod served;

use std::cell::RefCell;
use std::collections::HashMap;
use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;

use criterion::{Criterion, criterion_group, criterion_main};
use prequal_core::client::Balancer;
use prequal_core::client::ejection::{EjectionTable, Event};
use prequal_core::client::pool::PoolState;
use prequal_core::client::settings::{ChoiceSettings, ClusterConfig, Shim};
use prequal_core::client::store::{Cas, SharedData};
use prequal_core::config::Profile;
use prequal_core::shared::blob::Blob;
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;
use prequal_core::wire::report::LoadReport;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use served::Served;

/// More than twice the number of ejected replicas.
const FLEET: u16 = 2100;
const STEP_US: u64 = 100;

/// Bytes by key, with the version number of their last write.
type Values = Rc<RefCell<HashMap<String, (Vec<u8>, u32)>>>;

/// Copies the bytes on every read and write, as a host does.
#[derive(Clone, Default)]
struct Shared(Values);

impl SharedData for Shared {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        let values = self.0.borrow();
        values.get(key).map_or((None, None), |(bytes, number)| (Some(bytes.clone()), Some(*number)))
    }

    fn set(&self, key: &str, bytes: &[u8], number: Option<u32>) -> bool {
        let mut values = self.0.borrow_mut();
        let value = values.entry(key.to_owned()).or_default();
        let fresh = number.is_none_or(|number| number == 0 || number == value.1);
        if fresh {
            *value = (bytes.to_vec(), value.1 + 1);
        }
        fresh
    }
}

struct Worker {
    balancer: Balancer<Cas<Shared>, ()>,
    now: Micros,
    /// The replica that serves next if no replica is picked.
    turn: u16,
    ejected: u16,
    rng: SmallRng,
}

impl Worker {
    fn new(ejected: u16) -> Self {
        let now = Micros::from_millis(1_700_000_000_000);
        let store = Cas { data: Shared::default(), prefix: "bench".into() };
        let pool_settings = Profile::Default.pool_settings();
        let (mut table, mut pool) = (EjectionTable::new(), PoolState::new());
        table.set_members(FLEET.into(), 0);
        for number in 0..ejected {
            let event = Event::Unresponsive { trial: false, ordinary: true };
            table.apply(&pool_settings.ejection, now, replica(number), event);
        }
        table.changed();
        pool.exclude(&table, now);
        store.data.set("bench/ejections", &table.encode(), None);
        store.data.set("bench/pool", &pool.encode(), None);
        let config = ClusterConfig {
            cluster: "service".into(),
            probe_cluster: "probes".into(),
            pool: pool_settings,
            probe: Profile::Default.probe_settings(),
            choice: ChoiceSettings::default(),
            endpoints: (0..FLEET).map(replica).collect(),
        };
        let balancer = Balancer::new(config, Shim::StatefulSession, &store, (), now);
        let mut worker = Self { balancer, now, turn: 0, ejected, rng: SmallRng::seed_from_u64(1) };
        (0..10_000).for_each(|_| worker.request());
        worker
    }

    fn request(&mut self) {
        self.now = self.now.plus(STEP_US);
        let mut request = self.balancer.begin(self.now, &[], true, &mut self.rng);
        self.turn = (self.turn + 1) % 1000;
        let served = request.pick.replica.unwrap_or_else(|| replica(self.ejected + self.turn));
        let proxy = Served(self.now.plus(STEP_US / 2), served);
        let report = LoadReport { endpoint: Some(served), ..self.report() };
        self.balancer.response(proxy.0, &mut request, false, Some(Ok(report)), &proxy);
        self.balancer.ended(request, true, false, &proxy);
    }

    fn report(&mut self) -> LoadReport {
        LoadReport::parse("3;10000;10.0.0.1:8080").expect("well-formed")
    }
}

fn replica(number: u16) -> Endpoint {
    let [high, low] = number.to_be_bytes();
    SocketAddr::from((Ipv4Addr::new(10, 0, high, low), 8080)).into()
}

fn ejections(c: &mut Criterion) {
    for ejected in [0, 16, 256, 1000] {
        let mut worker = Worker::new(ejected);
        let view = worker.balancer.tick(worker.now, &mut worker.rng);
        assert_eq!((view.ejected, view.panic), (ejected.into(), false));
        c.bench_function(&format!("a request, {ejected} replicas ejected"), |b| {
            b.iter(|| black_box(&mut worker).request());
        });
    }
}

criterion_group!(benches, ejections);
criterion_main!(benches);
