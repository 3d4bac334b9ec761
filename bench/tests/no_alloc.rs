//! Checks that the pick path does not allocate: decode, apply reports, pick, encode, as the filter does per request.
//!
//! This test is not in the core, because a counting allocator needs `unsafe`, which the core forbids. Allocations are
//! counted per thread: the test harness allocates in its own threads.

#[path = "../benches/served/mod.rs"]
mod served;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};

use prequal_core::client::Balancer;
use prequal_core::client::ejection::EjectionTable;
use prequal_core::client::ejection::flights::Flights;
use prequal_core::client::members::Placement;
use prequal_core::client::pool::{Branch, PoolState, Ranking};
use prequal_core::client::settings::{ChoiceSettings, ClusterConfig, Shim};
use prequal_core::client::store::Memory;
use prequal_core::config::Profile;
use prequal_core::shared::blob::Blob;
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;
use prequal_core::wire::load::Load;
use prequal_core::wire::report::LoadReport;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use served::Served;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn allocations() -> usize {
    ALLOCATIONS.get()
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[test]
fn the_pick_path_does_not_allocate() {
    let mut rng = SmallRng::seed_from_u64(7);
    // The paper's profile removes an entry per pick and expects three probes for each pick.
    for (profile, reports_per_pick, predicted) in
        [(Profile::Default, 1, false), (Profile::Default, 1, true), (Profile::Paper, 3, false)]
    {
        let settings = profile.pool_settings();
        let mut pool = PoolState::new();
        let mut now = Micros::from_millis(1_700_000_000_000);
        pool.set_members(100, 0, now);
        let mut blob = Vec::with_capacity(size_of::<PoolState>());
        blob.extend_from_slice(&pool.encode());
        let reports: Vec<String> = (0..100u32)
            .map(|number| {
                let capacity = format!("base={};knee={}", 500 * number + 1, number % 5 + 1);
                format!("{};{};10.0.0.{number}:80;{capacity}", number % 9, 1000 * number)
            })
            .collect();
        let (mut steered, mut fell_back, mut tried) = (0, 0, 0);

        let before = allocations();
        for round in 0..20_000usize {
            now = now.plus(100);
            let mut pool = PoolState::decode(&blob).unwrap();
            // Periodically stop the reports for more than a second, so that the pool runs empty.
            if round % 1000 < 900 {
                for number in 0..reports_per_pick {
                    let text = &reports[(round * reports_per_pick + number) % reports.len()];
                    let report = LoadReport::parse(text).unwrap();
                    let endpoint = report.endpoint.unwrap();
                    let load = Load::from(&report);
                    pool.record(&settings, now, endpoint, load, Placement::even(0), &mut rng);
                }
            } else {
                now = now.plus(50_000);
            }
            let ranking = if predicted { Ranking::Predicted } else { Ranking::HotCold };
            let pick = black_box(pool.pick_by(&settings, now, ranking, &mut rng));
            tried += usize::from(pick.branch == Branch::Trial);
            match pick.branch {
                Branch::Fallback | Branch::Agentless => fell_back += 1,
                Branch::Cold | Branch::Hot | Branch::Trial | Branch::Sync | Branch::Scored => steered += 1,
            }
            blob.clear();
            blob.extend_from_slice(&pool.encode());
        }
        let allocated = allocations() - before;

        assert!(
            steered > 1000 && fell_back > 100,
            "both paths ran: {steered} steered, {fell_back} fell back"
        );
        assert_eq!(predicted, tried > 0, "{tried} trials");
        assert_eq!(allocated, 0, "allocations on the pick path");
    }

    // Requests in flight and ejections do not allocate while neither exceeds its earlier maximum.
    let settings = Profile::Default.pool_settings();
    let (mut pool, mut table, mut flights) = (PoolState::new(), EjectionTable::new(), Flights::new());
    let mut now = Micros::from_millis(1_700_000_000_000);
    pool.set_members(100, 0, now);
    table.set_members(100, 0);
    let replicas: Vec<Endpoint> =
        (0..100u8).map(|n| SocketAddr::from((Ipv4Addr::new(10, 0, 0, n), 80)).into()).collect();
    let mut round = |round: usize| {
        now = now.plus(100_000);
        let replica = replicas[round % replicas.len()];
        let flight = flights.sent(now, replica, Some(20_000), false, true);
        while let Some(overdue) = flights.overdue(now.plus(1_000_000)) {
            black_box(table.apply(&settings.ejection, now, overdue.replica, overdue.event()));
        }
        let failed = round.is_multiple_of(3);
        if let Some(landed) = flights.answered(&settings.ejection, flight, now.plus(20_000), failed) {
            black_box(table.apply(&settings.ejection, now, replica, landed.event(failed, None)));
        }
        black_box(table.heard(&settings.ejection, now, replica, 0, 0, Placement::even(0)));
        let trial = table.take_trial(&settings.ejection, now, &mut rng);
        pool.exclude(&table, now);
        black_box(match trial {
            Some(trial) => pool.pick_trial(&settings, trial, now),
            None => pool.pick(&settings, now, &mut rng),
        });
        table.expire(now);
        usize::from(trial.is_some())
    };
    (0..1000).for_each(|n| _ = round(n));
    let before = allocations();
    let trials: usize = (1000..10_000).map(&mut round).sum();
    assert_eq!(allocations(), before, "allocations while replicas are ejected");
    assert!(trials > 100, "{trials} trials: the ejection table was in use");

    // A request from beginning to end, through the whole balancer.
    let config = ClusterConfig {
        cluster: String::new(),
        probe_cluster: String::new(),
        pool: settings,
        probe: Profile::Default.probe_settings(),
        choice: ChoiceSettings::default(),
        endpoints: replicas.clone(),
    };
    let mut balancer = Balancer::new(config, Shim::OverrideHost, &Memory, (), now);
    let mut round = |round: usize| {
        now = now.plus(1000);
        let mut request = balancer.begin(now, &[], true, &mut rng);
        let served = request.pick.replica.unwrap_or(replicas[round % replicas.len()]);
        let report =
            LoadReport { endpoint: Some(served), ..LoadReport::parse("1;9000;10.0.0.1:80").unwrap() };
        let proxy = Served(now, served);
        // More requests fail at first, so that the table has room for later failures.
        let failed = round.is_multiple_of(if round < 1000 { 10 } else { 1000 });
        balancer.response(now, &mut request, failed, Some(Ok(report)), &proxy);
        let steered = request.pick.replica.is_some();
        balancer.ended(request, true, false, &proxy);
        usize::from(steered)
    };
    (0..1000).for_each(|number| _ = round(number));
    let before = allocations();
    let steered: usize = (1000..10_000).map(&mut round).sum();
    assert_eq!(allocations(), before, "allocations of the balancer");
    assert!(steered > 8000, "{steered} steered");

    // Check that the counter itself works.
    let before = allocations();
    let endpoint: Endpoint = SocketAddr::from((Ipv4Addr::LOCALHOST, 80)).into();
    black_box(endpoint.to_string());
    assert!(allocations() > before);
}
