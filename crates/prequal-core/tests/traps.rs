//! One test for each trap that public implementations of Prequal fell into, as far as it concerns the core. The names
//! of the tests number the traps. Two traps also concern adapters: requests dropped half-way (trap 3) are tested again
//! in the agent and in the filter's end-to-end suite, and pools shared between routes (trap 7) in that suite.
//! Benchmark arms that share state (trap 10) are tested in the simulator (`bench/src/sim/grid.rs`).

use prequal_core::client::ejection::{Change, EjectionTable, Event};
use prequal_core::client::members::{Evidence, Members, Placement};
use prequal_core::client::pool::reuse::reuse_budget;
use prequal_core::client::pool::{Branch, Budget, PoolSettings, PoolState};
use prequal_core::config::Profile;
use prequal_core::server::tracker::{Tracker, TrackerConfig};
use prequal_core::shared::blob::Blob as _;
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::outcome::Outcome;
use prequal_core::shared::time::Micros;
use prequal_core::wire::load::Load;
use rand::SeedableRng;
use rand::rngs::SmallRng;

fn replica(n: u16) -> Endpoint {
    format!("10.0.0.1:{}", 1000 + n).parse().unwrap()
}

fn ms(ms: u64) -> Micros {
    Micros::from_millis(1_000_000 + ms)
}

/// A pool with these reports, one per millisecond: RIF, and latency in milliseconds.
fn pool(settings: &PoolSettings, reports: &[(u32, Option<u32>)]) -> (PoolState, SmallRng) {
    let mut rng = SmallRng::seed_from_u64(1);
    let mut pool = PoolState::new();
    pool.set_members(100, 0, ms(0));
    for (n, (rif, latency)) in (0..).zip(reports) {
        let load = Load::at_face_value(*rif, latency.map(|ms| ms * 1000));
        pool.record(settings, ms(u64::from(n)), replica(n), load, Placement::even(0), &mut rng);
    }
    (pool, rng)
}

fn settings() -> PoolSettings {
    PoolSettings {
        r_remove: 0.0,
        delta: 1000.0,
        budget: Budget::Fixed { r_probe: 0.0 },
        ..Profile::Paper.pool_settings()
    }
}

#[test]
fn trap_1_equation_1_is_grouped_as_the_paper_has_it() {
    let [m, n, r_probe, r_remove, delta] = [16.0, 100.0, 3.0, 1.0, 1.0];
    let right = (1.0 + delta) / ((1.0 - m / n) * r_probe - r_remove);
    let wrong = (1.0 + delta) / ((1.0 - m / n) * (r_probe - r_remove));
    let got = reuse_budget(m, n, r_probe, r_remove, delta, 64.0);
    assert!((got - right).abs() < 1e-12 && (got - wrong).abs() > 0.1, "{got}");
}

#[test]
fn trap_1_a_fleet_no_larger_than_the_pool_has_a_defined_reuse() {
    for n in 0..=16 {
        assert!(
            (reuse_budget(16.0, f64::from(n), 3.0, 1.0, 1.0, 64.0) - 64.0).abs() < f64::EPSILON,
            "n = {n}"
        );
    }
}

#[test]
fn trap_2_the_branch_for_all_hot_can_be_reached() {
    let settings = PoolSettings { q_rif: 0.5, pool_size: 2, ..settings() };
    let low = [(1, Some(10)); 10];
    let (mut pool, mut rng) = pool(&settings, &[&low[..], &[(9, Some(1)), (8, Some(99))]].concat());
    let pick = pool.pick(&settings, ms(20), &mut rng);
    assert_eq!((pick.replica, pick.branch), (Some(replica(11)), Branch::Hot));
}

#[test]
fn trap_3_a_request_leaves_rif_however_it_ends() {
    let endings = [
        (Outcome::Success, false),
        (Outcome::Failure, false),
        (Outcome::Aborted, false),
        // Upgraded connections and long streams. One that the client resets is an abort.
        (Outcome::Streaming, true),
        (Outcome::Aborted, true),
        (Outcome::Failure, true),
    ];
    for (outcome, upgraded) in endings {
        let mut tracker = Tracker::new(TrackerConfig::default());
        let tickets: Vec<_> = (0..5).map(|at| tracker.start(ms(at))).collect();
        assert_eq!(tracker.rif(), 5);
        for (left, ticket) in (0..5).rev().zip(tickets) {
            if upgraded {
                tracker.streaming(&ticket, ms(4));
            }
            // The clock may have stepped back since the request began.
            tracker.finish(ticket, ms(u64::from(left)), outcome);
            assert_eq!(tracker.rif(), left, "{outcome:?}, upgraded: {upgraded}");
        }
        // The request does not go on waiting either, which would be a permanent stall.
        let served = tracker.start(ms(10));
        tracker.finish(served, ms(20), Outcome::Success);
        assert_eq!(tracker.latency(ms(9000)), Some(10_000), "{outcome:?}, upgraded: {upgraded}");
    }
}

#[test]
fn trap_4_a_probe_rate_of_0_7_is_not_rounded_to_0() {
    let settings = PoolSettings { budget: Budget::Fixed { r_probe: 0.7 }, ..settings() };
    let (mut pool, mut rng) = pool(&settings, &[]);
    let sent: u32 = (0..1000).map(|at| pool.pick(&settings, ms(at), &mut rng).probes.addressed).sum();
    assert!((699..=701).contains(&sent), "{sent}");
}

#[test]
fn trap_5_cold_replicas_rank_by_latency_and_hot_by_rif() {
    let cold = PoolSettings { q_rif: 1.0, ..settings() };
    let (mut state, mut rng) = pool(&cold, &[(1, Some(90)), (50, Some(10))]);
    assert_eq!(state.pick(&cold, ms(1), &mut rng).replica, Some(replica(1)));
    let hot = PoolSettings { q_rif: 0.0, ..settings() };
    let (mut state, mut rng) = pool(&hot, &[(1, Some(90)), (50, Some(10))]);
    assert_eq!(state.pick(&hot, ms(1), &mut rng).replica, Some(replica(0)));
}

#[test]
fn trap_6_probe_targets_are_drawn_without_replacement() {
    let mut members = Members::default();
    for n in 0..4 {
        members.observe(replica(n), None, Evidence::Served, ms(0));
    }
    let mut rng = SmallRng::seed_from_u64(1);
    for _ in 0..100 {
        let mut targets: Vec<_> =
            members.sample(4, &mut rng, |_| false).iter().map(|target| target.replica.port()).collect();
        targets.sort_unstable();
        assert_eq!(targets, [1000, 1001, 1002, 1003]);
    }
}

#[test]
fn trap_7_clusters_do_not_share_what_they_learn() {
    let settings = PoolSettings { q_rif: 1.0, ..settings() };
    let ejections_of = |ejected| {
        let mut ejections = EjectionTable::new();
        ejections.set_members(2, 0);
        let unresponsive = Event::Unresponsive { trial: false, ordinary: true };
        ejections.apply(&Profile::Default.pool_settings().ejection, ms(0), ejected, unresponsive);
        ejections
    };
    // Two clusters share the same replicas, and the other cluster has all kinds of trouble with both replicas.
    let after_a_while = |beside_another: bool| {
        let (mut cluster, mut rng) = pool(&settings, &[(1, Some(90)), (1, Some(10))]);
        let (mut other, mut others_rng) = pool(&settings, &[(7, Some(10)), (1, Some(90))]);
        let mut picks = Vec::new();
        for at in 2..20 {
            if beside_another {
                other.set_members(2, 5, ms(at));
                other.pick(&settings, ms(at), &mut others_rng);
                let load = Load { up_s: Some(0), ..Load::at_face_value(9, None) };
                other.record(&settings, ms(at), replica(0), load, Placement::even(5), &mut others_rng);
                other.refused(replica(1), ms(at), 60_000);
                other.exclude(&ejections_of(replica(0)), ms(at));
            }
            picks.push(cluster.pick(&settings, ms(at), &mut rng));
        }
        (picks, cluster.view(&settings, ms(20)), cluster.encode().into_owned())
    };
    let (alone, beside_another) = (after_a_while(false), after_a_while(true));
    assert!(alone.0.iter().all(|pick| pick.replica == Some(replica(1))));
    assert_eq!(alone, beside_another);
}

#[test]
fn trap_8_failures_do_not_make_a_replica_look_fast() {
    let mut tracker = Tracker::new(TrackerConfig::default());
    for at in 0..20 {
        let ticket = tracker.start(ms(at * 100));
        tracker.finish(ticket, ms(at * 100 + 50), Outcome::Success);
    }
    let honest = tracker.latency(ms(2000));
    for at in 0..100 {
        let ticket = tracker.start(ms(2000 + at));
        tracker.finish(ticket, ms(2000 + at), Outcome::Failure);
    }
    assert!(tracker.latency(ms(2100)) >= honest, "{:?} after failures at once", tracker.latency(ms(2100)));
}

/// Consecutive-failure counters rarely trip on a replica that fails 30 % of its requests.
#[test]
fn trap_8_a_replica_that_never_fails_twice_in_a_row_is_ejected() {
    let settings = Profile::Default.pool_settings().ejection;
    let mut table = EjectionTable::new();
    table.set_members(10, 0);
    let ejected = (0..100u64).find(|i| {
        // Every third request fails.
        let event = Event::Failed { requests: 2.0, well: 9, trial: false };
        matches!(table.apply(&settings, ms(i * 60), replica(1), event), Change::Ejected(_))
    });
    assert!(ejected.is_some_and(|failures| failures < 5), "{ejected:?}");
    assert!(table.is_ejected(replica(1)));
}

#[test]
fn trap_9_a_replica_of_unknown_latency_gets_one_request() {
    let settings = PoolSettings { q_rif: 0.99, ..settings() };
    let (mut pool, mut rng) = pool(&settings, &[(1, Some(10)), (1, Some(12)), (0, None)]);
    let picks: Vec<_> = (0..10).map(|_| pool.pick(&settings, ms(1), &mut rng).replica).collect();
    let to_unknown = picks.iter().filter(|pick| **pick == Some(replica(2))).count();
    assert_eq!(to_unknown, 1, "{picks:?}");
}

#[test]
fn trap_11_age_counts_on_the_clock_of_the_client() {
    // A report carries no server time: only its receipt counts, and a step of the client's clock makes it old.
    let settings = settings();
    let (mut state, mut rng) = pool(&settings, &[(1, Some(10)), (1, Some(12))]);
    let stepped_back = Micros::from_millis(1000);
    assert_eq!(state.pick(&settings, stepped_back, &mut rng).branch, Branch::Fallback);
}
