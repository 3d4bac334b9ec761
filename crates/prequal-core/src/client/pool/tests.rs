//! Tests of each of the pool's rules on an injected clock, and of its invariants under random operations.

use super::*;
use crate::config::Profile;
use crate::shared::capacity::Capacity;
use crate::wire::report::LoadReport;
use proptest::prelude::*;
use rand::{Rng, SeedableRng, rngs::SmallRng};

fn replica(n: u16) -> Endpoint {
    format!("10.0.0.1:{}", 1000 + n).parse().unwrap()
}

fn ms(ms: u64) -> Micros {
    Micros::from_millis(100_000 + ms)
}

/// No probes, no removal, unlimited reuse: only the selection rule is left.
fn plain() -> PoolSettings {
    PoolSettings {
        pool_size: 16,
        r_remove: 0.0,
        delta: 1000.0,
        hot: HotRule::Gt,
        burst_guard: false,
        budget: Budget::Fixed { r_probe: 0.0 },
        ..Profile::Default.pool_settings()
    }
}

struct Scene {
    settings: PoolSettings,
    pool: PoolState,
    rng: SmallRng,
}

impl Scene {
    fn new(settings: PoolSettings) -> Self {
        let mut pool = PoolState::new();
        pool.set_members(100, 0, ms(0));
        Self { settings, pool, rng: SmallRng::seed_from_u64(7) }
    }
    fn report(&mut self, at: u64, n: u16, rif: u32, latency_ms: Option<u32>) {
        self.pool.record(
            &self.settings,
            ms(at),
            replica(n),
            Load::at_face_value(rif, latency_ms.map(|l| l * 1000)),
            Placement::even(0),
            &mut self.rng,
        );
    }
    fn pick(&mut self, at: u64) -> Pick {
        self.pool.pick(&self.settings, ms(at), &mut self.rng)
    }
}

impl Scene {
    /// Records reports of ten replicas that started `up_s` seconds ago, and counts how many of 10 000 picks go to the
    /// first.
    fn share_of_the_first(&mut self, up_s: [Option<u32>; 10]) -> usize {
        (0..10_000u64)
            .filter(|at| {
                for (n, up_s) in (0..).zip(up_s) {
                    let load = Load { up_s, ..Load::at_face_value(0, Some(1000)) };
                    self.pool.record(
                        &self.settings,
                        ms(*at),
                        replica(n),
                        load,
                        Placement::even(0),
                        &mut self.rng,
                    );
                }
                self.pick(*at).replica == Some(replica(0))
            })
            .count()
    }
}

#[test]
fn an_entry_holds_the_reports_load_and_age() {
    for (text, latency_us, up_s) in
        [("3;2000;10.0.0.1:80;up=7", Some(2000), Some(7)), ("3;;10.0.0.1:80", None, None)]
    {
        let report = LoadReport::parse(text).unwrap();
        assert_eq!(Load::from(&report), Load { up_s, ..Load::at_face_value(3, latency_us) }, "{text}");
    }
    let report = LoadReport::parse("3;;10.0.0.1:80;fail=9").unwrap();
    assert_eq!(Load::from(&report).failing, 9);
}

#[test]
fn a_young_replica_takes_a_share_that_grows_with_its_age() {
    let shares = [0, 3, 6, 9, 12].map(|up_s| {
        let mut up = [None; 10];
        up[0] = Some(up_s);
        Scene::new(PoolSettings { slow_start_ms: 10_000, ..plain() }).share_of_the_first(up)
    });
    // An older replica in its place would get 1000 requests. The young replica gets 50 at first, so that it can show
    // that it answers, and later 300, 600, 900 and 1000.
    for (got, wanted) in shares.iter().zip([50, 300, 600, 900, 1000]) {
        assert!(got.abs_diff(wanted) <= wanted * 8 / 100 + 16, "{shares:?}");
    }
}

#[test]
fn an_entirely_new_fleet_is_not_held_back() {
    let mut scene = Scene::new(PoolSettings { slow_start_ms: 10_000, ..plain() });
    let even = scene.share_of_the_first([Some(1); 10]);
    assert!((920..=1080).contains(&even), "{even}");
    let most_are_new = [&[Some(1); 6][..], &[None; 4][..]].concat().try_into().unwrap();
    let mut scene = Scene::new(PoolSettings { slow_start_ms: 10_000, ..plain() });
    let even = scene.share_of_the_first(most_are_new);
    assert!((920..=1080).contains(&even), "the old four must not carry everything: {even}");
    let mut scene = Scene::new(PoolSettings { slow_start_ms: 0, ..plain() });
    let off = scene.share_of_the_first([&[Some(0)][..], &[None; 9][..]].concat().try_into().unwrap());
    assert!((920..=1080).contains(&off), "{off}");
}

#[test]
fn an_ejected_replica_leaves_the_pool_and_a_single_remaining_one_is_chosen() {
    let mut scene = Scene::new(plain());
    scene.pool.set_members(2, 0, ms(0));
    scene.report(0, 1, 0, Some(1));
    scene.report(0, 2, 5, Some(90));
    let mut ejections = EjectionTable::new();
    ejections.set_members(2, 0);
    let unresponsive = crate::client::ejection::Event::Unresponsive { trial: false, ordinary: true };
    ejections.apply(&scene.settings.ejection, ms(0), replica(1), unresponsive);
    scene.pool.exclude(&ejections, ms(1));
    let pick = scene.pool.pick(&scene.settings, ms(1), &mut scene.rng);
    assert_eq!((pick.replica, pick.trial), (Some(replica(2)), false));
    let trial = Trial { replica: replica(1), placement: Placement::even(0) };
    let pick = scene.pool.pick_trial(&scene.settings, trial, ms(2));
    assert_eq!((pick.replica, pick.trial), (Some(replica(1)), true));
    // Without ejections a single entry is not a choice.
    scene.pool.exclude(&EjectionTable::new(), ms(3));
    assert!(!scene.pool.has_ejections());
    assert_eq!(scene.pick(3).branch, Branch::Fallback);
}

#[test]
fn the_papers_theta_uses_only_probe_replies() {
    for (profile, theta) in [(Profile::Paper, 8), (Profile::Default, 1)] {
        let mut scene = Scene::new(PoolSettings { q_rif: 0.5, ..profile.pool_settings() });
        for (rif, source) in [(8, Source::Probe), (1, Source::Response), (1, Source::Response)] {
            let load = Load { source, ..Load::at_face_value(rif, Some(20_000)) };
            scene.pool.record(&scene.settings, ms(0), replica(1), load, Placement::even(0), &mut scene.rng);
        }
        assert_eq!(scene.pool.view(&scene.settings, ms(1)).theta, Some(theta), "{profile:?}");
    }
}

#[test]
fn failures_elsewhere_are_the_median_of_the_other_reports() {
    let mut scene = Scene::new(plain());
    assert_eq!(scene.pool.failing_beside(replica(1)), 0);
    let failing_beside = |scene: &mut Scene, n: u16, failing: u16| {
        let load = Load { failing, ..Load::at_face_value(1, Some(20_000)) };
        scene.pool.record(&scene.settings, ms(0), replica(n), load, Placement::even(0), &mut scene.rng);
        scene.pool.failing_beside(replica(1))
    };
    assert_eq!(failing_beside(&mut scene, 1, 900), 0, "its own report does not count");
    assert_eq!(failing_beside(&mut scene, 2, 500), 500);
    assert_eq!(failing_beside(&mut scene, 3, 30), 30, "half of them may be bad");
    assert_eq!(failing_beside(&mut scene, 4, 100), 100);
}

#[test]
fn the_blob_is_small() {
    assert!(size_of::<PoolState>() <= 9368, "{}", size_of::<PoolState>());
    assert!(PoolState::new().encode().len() <= 1184, "{}", PoolState::new().encode().len());
}

#[test]
fn a_report_on_a_response_does_not_count_requests_that_are_on_their_way() {
    // The RIF that the pool knows before a request is sent, and the one after reports have arrived.
    let rif_after = |source, before: u32, after_us: u64, reported: &[u32]| {
        let mut scene = Scene::new(plain());
        (0..2).for_each(|n| scene.report(0, n, before, Some(20)));
        let chosen = scene.pick_predicted(10).replica.expect("a pool");
        let at = Micros(ms(10).0 + after_us);
        let Scene { settings, pool, rng } = &mut scene;
        for rif in reported {
            let load = Load { source, ..Load::at_face_value(*rif, Some(20_000)) };
            pool.record(settings, at, chosen, load, placement(0, 1.0), rng);
        }
        pool.candidates(at).find(|entry| entry.endpoint == chosen).map(|entry| entry.rif)
    };
    let response =
        |before, after_us, reported: &[u32]| rif_after(Source::Response, before, after_us, reported);
    assert_eq!(response(4, 300, &[3]), Some(4));
    assert_eq!(response(4, 300, &[3, 2]), Some(3), "in a burst, both reports have missed the request");
    assert_eq!(response(4, 1000, &[3]), Some(3), "the request must have arrived by then");
    assert_eq!(response(3, 300, &[3]), Some(3), "the round trip is short: the report counts the request");
    assert_eq!(response(0, 300, &[3]), Some(3), "other proxies' requests: the report may count the request");
    assert_eq!(rif_after(Source::Probe, 4, 300, &[3]), Some(3), "as in the paper");
}

/// RIF of a replica with two requests in flight after a probe's reply that reports `reported`. Its latest request was
/// sent `sent_ms` before. If `another`, a request to another replica followed.
fn rif_after_a_probe(settings: PoolSettings, sent_ms: u64, reported: u32, another: bool) -> u32 {
    let mut scene = Scene::new(settings);
    scene.capable(0, 1, 1, 20, 4);
    scene.capable(0, 2, 9, 20, 4);
    assert_eq!(scene.pick_predicted(1).replica, Some(replica(1)));
    if another {
        scene.capable(1, 1, 9, 20, 4);
        scene.capable(1, 2, 1, 20, 4);
        assert_eq!(scene.pick_predicted(1).replica, Some(replica(2)));
        scene.capable(1, 1, 2, 20, 4);
    }
    let capacity = Some(Capacity::new(20_000, 4));
    let load = Load { capacity, ..Load::at_face_value(reported, Some(20_000)) };
    let load = Load { source: Source::Probe, ..load };
    let at = ms(1 + sent_ms);
    scene.pool.record(&scene.settings, at, replica(1), load, Placement::even(0), &mut scene.rng);
    scene.pool.candidates(at).find(|candidate| candidate.endpoint == replica(1)).expect("an entry").rif
}

#[test]
fn a_probe_that_overtakes_a_request_does_not_make_its_replica_look_idle() {
    let default = || Profile::Default.pool_settings();
    assert_eq!(rif_after_a_probe(default(), 2, 1, false), 2, "the reply does not count the request");
    assert_eq!(rif_after_a_probe(default(), 2, 2, false), 2, "the reply counts the request");
    assert_eq!(rif_after_a_probe(default(), 2, 5, false), 5, "other clients sent requests");
    assert_eq!(rif_after_a_probe(default(), 2, 0, false), 1, "an earlier request has ended");
    assert_eq!(rif_after_a_probe(default(), 21, 1, false), 1, "it must have arrived by then");
    assert_eq!(rif_after_a_probe(default(), 2, 1, true), 1, "the probe belongs to a later request");
    assert_eq!(rif_after_a_probe(Profile::Paper.pool_settings(), 2, 1, false), 1, "as in the paper");
}

#[test]
fn clone_from_copies_the_whole_pool() {
    let (mut scene, mut copy) = (Scene::new(plain()), PoolState::new());
    // The pool grows, then most of its entries expire.
    for (at, reports) in [(0, 2), (100, 9), (5000, 3)] {
        (0..reports).for_each(|n| scene.report(at, n, 1, Some(40)));
        scene.pick(at);
        copy.clone_from(&scene.pool);
        assert_eq!(copy.encode(), scene.pool.encode());
    }
}

#[test]
fn a_fleet_of_up_to_64_is_kept_whole() {
    // One report arrives every 20 ms. Of a fleet of 65, only the reports of the last second are kept.
    for (members, kept) in [(24, 24), (25, 25), (64, 64), (65, 50)] {
        let mut scene = Scene::new(Profile::Default.pool_settings());
        scene.pool.set_members(members, 0, ms(0));
        (0..members as u16).for_each(|n| scene.report(20 * u64::from(n), n, 1, Some(40)));
        assert_eq!(scene.pool.entries().len(), kept, "of {members}");
        for pick in u64::from(members)..u64::from(members) + 200 {
            scene.report(20 * pick, (pick % u64::from(members)) as u16, 1, Some(40));
            scene.pick_predicted(20 * pick);
        }
        assert!(scene.pool.entries().len() >= kept - 1, "of {members}: {}", scene.pool.entries().len());
    }
}

#[test]
fn skipping_the_search_for_the_oldest_report_does_not_change_the_rates() {
    let mut scene = Scene::new(PoolSettings { r_remove: 1.0, ..Profile::Default.pool_settings() });
    for members in [0, 1, 24, 63, 64, 65, 128, 129] {
        scene.pool = PoolState::new();
        scene.pool.set_members(members, 0, ms(0));
        scene.report(0, 1, 1, Some(40));
        scene.pool.new_per_pick = 1.0;
        // The only report is fresh at first and old later, so the pool's capacity changes.
        for now in [ms(1).stamp(), ms(1900).stamp()] {
            let Scene { pool, settings, .. } = &scene;
            let rates = |size: usize| {
                let removal = pool.removal_rate(settings, size);
                (removal, reuse_budget(size as f64, members.into(), 1.0, removal, 1.0, 64.0))
            };
            assert_eq!(
                rates(pool.room(settings, now)),
                rates(pool.capacity(settings, now)),
                "{members} at {now:?}"
            );
        }
    }
}

#[test]
fn a_hot_replica_is_avoided_even_when_it_is_fastest() {
    let mut scene = Scene::new(PoolSettings { q_rif: 0.5, ..plain() });
    scene.report(0, 1, 2, Some(40));
    scene.report(0, 2, 90, Some(5));
    scene.report(0, 3, 3, Some(60));
    let pick = scene.pick(10);
    assert_eq!((pick.replica, pick.branch), (Some(replica(1)), Branch::Cold));
}

#[test]
fn when_all_are_hot_the_lowest_rif_wins() {
    // Many low RIFs in the history, then only loaded replicas in the pool.
    let mut scene = Scene::new(PoolSettings { q_rif: 0.5, pool_size: 2, ..plain() });
    for n in 0..10 {
        scene.report(0, n, 1, Some(10));
    }
    scene.report(1, 20, 9, Some(5));
    scene.report(1, 21, 8, Some(500));
    let pick = scene.pick(2);
    assert_eq!((pick.replica, pick.branch), (Some(replica(21)), Branch::Hot));
}

#[test]
fn the_two_definitions_of_hot_differ_only_at_a_tie() {
    for (hot, expected) in
        [(HotRule::Gt, (replica(2), Branch::Cold)), (HotRule::Ge, (replica(1), Branch::Cold))]
    {
        let mut scene = Scene::new(PoolSettings { q_rif: 0.99, hot, ..plain() });
        scene.report(0, 1, 1, Some(50));
        scene.report(0, 2, 5, Some(10)); // ties with θ = 5
        let pick = scene.pick(1);
        assert_eq!((pick.replica.unwrap(), pick.branch), expected, "{hot:?}");
    }
}

#[test]
fn the_ends_of_q_are_rif_only_and_latency_only() {
    for (q_rif, expected) in [(0.0, replica(1)), (1.0, replica(2))] {
        let mut scene = Scene::new(PoolSettings { q_rif, ..plain() });
        scene.report(0, 1, 1, Some(50));
        scene.report(0, 2, 500, Some(10));
        assert_eq!(scene.pick(1).replica, Some(expected), "Q = {q_rif}");
    }
}

#[test]
fn theta_comes_from_a_history_not_from_the_pool() {
    let mut scene = Scene::new(PoolSettings { q_rif: 0.75, pool_size: 2, ..plain() });
    for (n, rif) in [1, 2, 3, 100, 200, 300, 400, 500].into_iter().enumerate() {
        scene.report(0, n as u16, rif, Some(1));
    }
    assert_eq!(
        scene.pool.view(&scene.settings, ms(0)).theta,
        Some(300),
        "the nearest rank is among RIFs of `SMALL_RIF` or more"
    );
    assert_eq!(scene.pool.view(&scene.settings, ms(2000)).theta, None, "the history is bounded in time");
}

#[test]
fn fewer_than_two_entries_fall_back() {
    let mut scene = Scene::new(plain());
    assert_eq!(scene.pick(0).branch, Branch::Fallback);
    scene.report(0, 1, 0, Some(1));
    assert_eq!(scene.pick(0).replica, None);
    scene.report(0, 2, 0, Some(1));
    assert!(scene.pick(0).replica.is_some());
}

#[test]
fn reports_expire_by_receipt_age() {
    let mut scene = Scene::new(plain());
    scene.report(0, 1, 0, Some(1));
    scene.report(500, 2, 0, Some(1));
    assert_eq!(scene.pick(1999).branch, Branch::Cold);
    assert_eq!(scene.pick(2000).branch, Branch::Fallback);
}

/// How many of eight reports are still in the pool `age_ms` after their receipt, with a pick every `gap_ms`.
fn kept_at(settings: PoolSettings, gap_ms: u64, age_ms: u64) -> usize {
    let mut scene = Scene::new(settings);
    scene.pool.set_members(8, 0, ms(0));
    let received = 200 * gap_ms;
    for pick in 0..200 {
        scene.pick_predicted(pick * gap_ms);
    }
    (0..8).for_each(|n| scene.report(received, n, 0, Some(1)));
    scene.pool.expire(&scene.settings, ms(received + age_ms).stamp());
    scene.pool.entries().len()
}

#[test]
fn where_requests_are_rare_reports_are_kept_for_four_rounds() {
    let default = || Profile::Default.pool_settings();
    for (gap_ms, limit_ms) in [(10, 2000), (50, 2000), (100, 3200), (500, 16_000), (2000, 20_000)] {
        assert_eq!(kept_at(default(), gap_ms, limit_ms - 70), 8, "every {gap_ms} ms");
        assert_eq!(kept_at(default(), gap_ms, limit_ms + 1), 0, "every {gap_ms} ms");
    }
    assert_eq!(kept_at(default(), 10_000, 2000), 0, "pauses do not count");
    assert_eq!(kept_at(Profile::Paper.pool_settings(), 500, 1000), 0);
}

#[test]
fn an_old_report_does_not_show_that_its_replica_is_alive() {
    let mut scene = Scene::new(Profile::Default.pool_settings());
    scene.report(0, 1, 0, Some(1));
    scene.report(1000, 2, 0, Some(1));
    let alive: Vec<Endpoint> = scene.pool.alive(&scene.settings, ms(2500)).collect();
    assert_eq!(alive, [replica(2)]);
}

#[test]
fn each_pick_raises_the_entrys_rif() {
    let mut scene = Scene::new(PoolSettings { q_rif: 0.0, ..plain() });
    scene.report(0, 1, 3, Some(1));
    scene.report(0, 2, 5, Some(1));
    let picks: Vec<_> = (0..4).map(|_| scene.pick(1).replica.unwrap()).collect();
    assert_eq!(&picks[..2], &[replica(1), replica(1)]);
    assert!(picks[2..].contains(&replica(2)), "{picks:?}: at RIF 5 both tie");
}

#[test]
fn the_newest_report_of_a_replica_wins_and_a_full_pool_drops_the_oldest() {
    let mut scene = Scene::new(PoolSettings { pool_size: 3, ..plain() });
    for (at, n) in [(0, 1), (1, 2), (2, 3), (3, 1), (4, 4)] {
        scene.report(at, n, 0, Some(1));
    }
    let mut left: Vec<_> = scene.pool.replicas().collect();
    left.sort_by_key(Endpoint::port);
    assert_eq!(left, [replica(1), replica(3), replica(4)]);
}

#[test]
fn a_pool_of_a_large_fleet_grows_as_long_as_all_reports_are_fresh() {
    let budget = Budget::Adaptive { target_age_ms: 500, max_probes_per_query: 0.0 };
    let size_after = |budget, every_ms| {
        let mut scene = Scene::new(PoolSettings { budget, ..plain() });
        scene.pool.set_members(200, 0, ms(0));
        for n in 0..150u64 {
            scene.report(n * every_ms, n as u16, 0, Some(1));
        }
        scene.pool.replicas().count()
    };
    assert_eq!(size_after(budget, 1), MAX_POOL, "150 reports in 150 ms");
    assert_eq!(size_after(budget, 10), 100, "as many as arrive in a second");
    assert_eq!(size_after(budget, 100), 16, "too rare: `pool_size`");
    assert_eq!(size_after(Budget::Fixed { r_probe: 0.0 }, 1), 16, "the paper's probes");
}

#[test]
fn removal_alternates_oldest_and_worst() {
    let mut scene = Scene::new(PoolSettings { r_remove: 1.0, scale_removal: false, q_rif: 1.0, ..plain() });
    for (n, latency) in [(1, 30), (2, 10), (3, 90), (4, 20), (5, 25)] {
        scene.report(u64::from(n), n, 0, Some(latency));
    }
    scene.pick(10); // the oldest: 1
    assert!(!scene.pool.replicas().any(|r| r == replica(1)));
    scene.pick(10); // the slowest: 3
    assert!(!scene.pool.replicas().any(|r| r == replica(3)));
    assert_eq!(scene.pool.replicas().count(), 3);
}

#[test]
fn of_equally_bad_replicas_the_one_with_the_oldest_report_is_removed() {
    let mut scene = Scene::new(PoolSettings { r_remove: 1.0, scale_removal: false, ..plain() });
    (1..=5).for_each(|n| scene.report(u64::from(n), n, 0, Some(10)));
    // The first removal takes the oldest, the second the worst; all have the same score.
    for at in [10, 11] {
        scene.pool.pick_scored(&scene.settings, ms(at), &mut scene.rng, |_| 0.0);
    }
    assert_eq!(scene.pool.replicas().count(), 3);
    assert!(!scene.pool.replicas().any(|left| [replica(1), replica(2)].contains(&left)));
}

#[test]
fn fractional_rates_are_kept_in_the_mean() {
    for r_probe in [0.25, 0.7, 1.0, 2.5] {
        let mut scene = Scene::new(PoolSettings { budget: Budget::Fixed { r_probe }, ..plain() });
        let sent: u32 = (0..1000).map(|at| scene.pick(at).probes.addressed).sum();
        assert!((f64::from(sent) - 1000.0 * r_probe).abs() <= 1.0, "{r_probe}: {sent}");
    }
}

#[test]
fn the_adaptive_budget_probes_a_cold_pool_and_rests_on_a_warm_one() {
    let budget = Budget::Adaptive { target_age_ms: 100, max_probes_per_query: 1.0 };
    let mut scene = Scene::new(PoolSettings { budget, ..plain() });
    let all = |probes: ProbesDue| probes.addressed + probes.discovery;
    let cold: u32 = (0..50).map(|at| all(scene.pick(at).probes)).sum();
    assert!((80..=50 + 32).contains(&cold), "what the requests pay for, and what was saved: {cold}");
    let mut warm = 0;
    // By now the fleet no longer counts as new.
    for at in 3000..4000 {
        scene.report(at, (at % 16) as u16, 0, Some(1));
        warm += scene.pick(at).probes.addressed;
    }
    assert!((8..=20).contains(&warm), "one pool's worth of exploration in two seconds, got {warm}");
}

#[test]
fn an_idle_replica_of_unknown_latency_gets_one_request_until_it_answers() {
    let mut scene = Scene::new(PoolSettings { q_rif: 0.9, ..plain() });
    scene.report(0, 1, 3, Some(50));
    scene.report(0, 2, 3, Some(60));
    scene.report(0, 3, 0, None);
    assert_eq!(scene.pick(1).replica, Some(replica(3)));
    for _ in 0..5 {
        assert_ne!(scene.pick(1).replica, Some(replica(3)));
    }
    scene.report(5, 3, 1, None);
    assert_ne!(scene.pick(6).replica, Some(replica(3)), "a probe still reports it busy, latency unknown");
}

#[test]
fn a_replica_stays_out_for_its_cooldown_and_comes_back() {
    let mut scene = Scene::new(PoolSettings { q_rif: 1.0, ..plain() });
    for n in 1..=3 {
        scene.report(0, n, 0, Some(u32::from(n)));
    }
    scene.pool.cool_down(replica(1), ms(0), 500);
    assert_eq!(scene.pick(1).replica, Some(replica(2)));
    scene.report(100, 1, 0, Some(1));
    assert_eq!(scene.pick(101).replica, Some(replica(2)));
    scene.report(500, 1, 0, Some(1));
    assert_eq!(scene.pick(501).replica, Some(replica(1)));
}

#[test]
fn one_worker_sends_the_idle_probes() {
    let mut scene = Scene::new(plain());
    scene.pick(0);
    assert!(scene.pool.idle_probes(&scene.settings, ms(500), 1000).is_empty(), "a request came recently");
    let due = scene.pool.idle_probes(&scene.settings, ms(1000), 1000);
    assert_eq!((due.addressed, due.discovery), (15, 1));
    assert!(scene.pool.idle_probes(&scene.settings, ms(1001), 1000).is_empty(), "taken");
}

#[test]
fn a_candidate_gets_one_request_to_be_verified_and_no_more() {
    let mut scene = Scene::new(plain());
    scene.report(0, 1, 1, Some(10));
    scene.report(0, 2, 1, Some(10));
    scene.pool.introduce(&scene.settings, ms(0), replica(3));
    let first = scene.pick(1);
    assert_eq!((first.replica, first.verify), (Some(replica(3)), true));
    for _ in 0..4 {
        let next = scene.pick(1);
        assert!(next.replica != Some(replica(3)) && !next.verify);
    }
    scene.pool.introduce(&scene.settings, ms(1), replica(3));
    assert_ne!(scene.pick(1).replica, Some(replica(3)), "its first request has not come back");
    scene.pool.end_cooldown(replica(3));
    scene.report(2, 3, 0, Some(1));
    let known = scene.pick(3);
    assert_eq!((known.replica, known.verify), (Some(replica(3)), false));
}

#[test]
fn discovery_needs_no_other_probes_and_is_faster_while_names_are_new() {
    let adaptive = Budget::Adaptive { target_age_ms: 100, max_probes_per_query: 0.1 };
    for budget in [adaptive, Budget::Fixed { r_probe: 0.0 }] {
        let mut scene = Scene::new(PoolSettings { budget, ..plain() });
        scene.pool.set_members(8, 0, ms(0));
        scene.pool.set_members(9, 0, ms(0));
        let count = |scene: &mut Scene, range: std::ops::Range<u64>| -> u32 {
            let mut one = |at| {
                scene.report(at, (at % 9) as u16, 0, Some(1));
                scene.pick(at).probes.discovery
            };
            range.map(&mut one).sum()
        };
        let growing = count(&mut scene, 0..1000);
        count(&mut scene, 2500..3000);
        let settled = count(&mut scene, 3000..4000);
        assert!((75..=90).contains(&growing) && (4..=5).contains(&settled), "{growing} then {settled}");
    }
}

#[test]
fn in_a_large_fleet_probes_of_discovery_go_out_several_at_once_and_none_is_lost() {
    let budget = Budget::Adaptive { target_age_ms: 500, max_probes_per_query: 0.7 };
    let mut scene = Scene::new(PoolSettings { budget, verified_probes: true, ..plain() });
    scene.pool.set_members(1000, 0, ms(0));
    let mut one = |at| {
        scene.report(at, (at % 16) as u16, 0, Some(1));
        scene.pick(at).probes.discovery
    };
    let sent: Vec<u32> = (3000..13_000).step_by(5).map(&mut one).filter(|due| *due > 0).collect();
    assert!(sent.iter().sum::<u32>() >= 1000, "each replica once in 10 s: {sent:?}");
    assert!(sent.len() <= 150, "{sent:?}");
}

#[test]
fn while_the_fleet_fits_the_pool_nothing_is_removed() {
    let mut scene = Scene::new(PoolSettings { r_remove: 1.0, ..plain() });
    scene.pool.set_members(4, 0, ms(0));
    for n in 0..4 {
        scene.report(0, n, 0, Some(10));
    }
    for at in 0..50 {
        scene.pick(at);
    }
    assert_eq!(scene.pool.replicas().count(), 4);
}

/// Placement of a replica last met at sample `sampled`, with `weight` times the mean share.
fn placement(sampled: u32, weight: f64) -> Placement {
    Placement { sampled, weight: (weight * f64::from(Placement::UNIT)) as u16 }
}

fn placed(scene: &mut Scene, at: u64, n: u16, rif: u32, latency_ms: u32, placement: Placement) {
    let load = Load::at_face_value(rif, Some(latency_ms * 1000));
    scene.pool.record(&scene.settings, ms(at), replica(n), load, placement, &mut scene.rng);
}

#[test]
fn a_replica_that_the_policy_no_longer_picks_is_not_steered_to() {
    let mut scene = Scene::new(plain());
    scene.pool.set_members(4, 100, ms(0));
    for n in 0..4 {
        // The first replica is the fastest.
        placed(&mut scene, 0, n, 0, 10 + u32::from(n), placement(100, 1.0));
    }
    scene.pool.set_members(4, 140, ms(1));
    assert_eq!(scene.pick(1).replica, Some(replica(0)));
    // A report on a response renews the load, not the placement.
    let kept = scene.pick(1).placement;
    placed(&mut scene, 1, 0, 0, 1, kept);
    for n in 1..4 {
        placed(&mut scene, 1, n, 0, 10 + u32::from(n), placement(141, 1.0));
    }
    scene.pool.set_members(4, 141, ms(2));
    assert_eq!(scene.pick(2).replica, Some(replica(1)));
    placed(&mut scene, 3, 0, 0, 1, kept);
    assert_ne!(scene.pick(3).replica, Some(replica(0)));
    placed(&mut scene, 3, 0, 0, 1, placement(141, 1.0));
    assert_eq!(scene.pick(3).replica, Some(replica(0)), "met again");
}

#[test]
fn equal_replicas_share_by_weight_and_a_slow_heavy_one_is_avoided() {
    let mut scene = Scene::new(plain());
    let mut picks = [0u32; 8];
    for round in 0..4000 {
        scene.pool = PoolState::new();
        scene.pool.set_members(8, 0, ms(round));
        for n in 0..8 {
            let latency = scene.rng.random_range(20..30);
            placed(&mut scene, round, n, 0, latency, placement(0, if n < 4 { 1.5 } else { 0.5 }));
        }
        picks[usize::from(scene.pick(round).replica.unwrap().port() - 1000)] += 1;
    }
    let share = |picks: &[u32]| f64::from(picks.iter().sum::<u32>());
    let ratio = share(&picks[..4]) / share(&picks[4..]);
    assert!((2.6..=3.8).contains(&ratio), "{ratio:.2}, not 3: {picks:?}");

    for _ in 0..1000 {
        for n in 0..8 {
            let latency = if n == 0 { 800 } else { 10 };
            placed(&mut scene, 4001, n, 0, latency, placement(0, if n < 4 { 1.5 } else { 0.5 }));
        }
        assert_ne!(scene.pick(4001).replica, Some(replica(0)));
    }
}

#[test]
fn rif_counts_relative_to_the_weight() {
    let mut scene = Scene::new(PoolSettings { q_rif: 0.0, ..plain() });
    placed(&mut scene, 0, 1, 3, 10, placement(0, 3.0));
    placed(&mut scene, 0, 2, 2, 10, placement(0, 3.0));
    placed(&mut scene, 0, 3, 1, 10, placement(0, 0.5));
    // RIF over weight is 1, 1 (2/3, rounded up) and 2. The light replica gets no request until the others also reach 2,
    // which takes a RIF of 4 (4/3, rounded up).
    for _ in 0..3 {
        assert_ne!(scene.pick(1).replica, Some(replica(3)));
    }
}

#[test]
fn when_most_choices_are_refused_steering_pauses_for_a_second() {
    let mut scene = Scene::new(plain());
    let mut refused = 0;
    let mut at = 0;
    while scene.pool.paused == 0 {
        for n in 0..16 {
            scene.report(at, n, 0, Some(1));
        }
        let chosen = scene.pick(at).replica.expect("not paused");
        scene.pool.refused(chosen, ms(at), 10);
        refused += 1;
        at += 20;
        assert!(refused < 20);
    }
    assert!(refused > 8, "{refused}: a few may be refused without harm");
    for n in 0..16 {
        scene.report(at + 500, n, 0, Some(1));
    }
    assert_eq!(scene.pick(at + 500).branch, Branch::Fallback);
    assert_eq!(scene.pick(at + 1000).branch, Branch::Cold);
    // One refusal in four is not a reason to pause.
    for round in 0..100u64 {
        for n in 0..16 {
            scene.report(at + 1000 + round, n, 0, Some(1));
        }
        let chosen = scene.pick(at + 1000 + round).replica.expect("not paused");
        if round % 4 == 0 {
            scene.pool.refused(chosen, ms(at + 1000 + round), 10);
        }
    }
}

#[test]
fn with_verified_probes_exploration_uses_only_discovery() {
    for (verified_probes, addressed) in [(true, 0), (false, 15)] {
        let budget = Budget::Adaptive { target_age_ms: 500, max_probes_per_query: 1.0 };
        let mut scene = Scene::new(PoolSettings { budget, verified_probes, ..plain() });
        let mut due = ProbesDue::default();
        for at in 3000..4000 {
            scene.report(at, (at % 16) as u16, 0, Some(1));
            let probes = scene.pick(at).probes;
            // With the first request, a burst of probes is due.
            if at < 3010 {
                continue;
            }
            due.addressed += probes.addressed;
            due.discovery += probes.discovery;
        }
        assert!(due.addressed.abs_diff(addressed) <= 10, "{due:?}");
        assert!((20..=27).contains(&due.discovery), "a quarter of the fleet a second: {due:?}");
        let idle = scene.pool.idle_probes(&scene.settings, ms(20_000), 1000);
        assert_eq!((idle.addressed == 0, idle.discovery >= 16), (verified_probes, verified_probes));
    }
}

#[test]
fn a_foreign_blob_is_refused() {
    let good = PoolState::new();
    assert!(PoolState::decode(&good.encode()).is_ok());
    assert!(matches!(PoolState::decode(&[]), Err(BlobError::Size { .. })));
    let mut other = good;
    other.tag = Tag::new(0x7072_6571, 8);
    assert_eq!(PoolState::decode(&other.encode()).err(), Some(BlobError::Version));
    let mut other = good;
    other.remove_credit = f32::NAN;
    assert_eq!(PoolState::decode(&other.encode()).err(), Some(BlobError::Content));
    let mut other = good;
    other.entry_count = 1; // its endpoint is all zero
    assert_eq!(PoolState::decode(&other.encode()).err(), Some(BlobError::Content));
}

/// Found by fuzzing: the code divided by a knee of 0, and each new VM would have read the same blob and crashed again.
#[test]
fn an_entry_that_no_report_can_produce_is_refused() {
    let settings = Profile::Default.pool_settings();
    let mut rng = SmallRng::seed_from_u64(1);
    let damages: [fn(&mut Entry); 2] = [|entry| entry.knee = 0, |entry| entry.share = u8::MAX];
    for (number, damage) in damages.iter().enumerate() {
        let mut pool = PoolState::new();
        for n in 0..3 {
            let load = Load::at_face_value(0, Some(1000));
            pool.record(&settings, ms(1), replica(n), load, Placement::even(0), &mut rng);
        }
        assert!(PoolState::decode(&pool.encode()).is_ok());
        damage(&mut pool.entries[1]);
        assert_eq!(PoolState::decode(&pool.encode()).err(), Some(BlobError::Content), "damage {number}");
    }
}

/// Found by fuzzing: counts that no worker writes became rates that the next worker refused, and the pool was then
/// lost.
#[test]
fn a_blob_that_is_accepted_is_accepted_again_after_a_pick() {
    let settings = Profile::Default.pool_settings();
    let damages: [fn(&mut PoolState); 4] = [
        |pool| pool.reports_since_pick = u32::MAX,
        |pool| pool.new_since_pick = u32::MAX,
        |pool| pool.remove_credit = 1e6,
        |pool| pool.refusals_per_pick = 1e6,
    ];
    for (number, damage) in damages.iter().enumerate() {
        let mut pool = PoolState::new();
        damage(&mut pool);
        if let Ok(mut pool) = PoolState::decode(&pool.encode()) {
            pool.pick(&settings, ms(1), &mut SmallRng::seed_from_u64(1));
            assert!(PoolState::decode(&pool.encode()).is_ok(), "damage {number}");
        }
    }
    for square in [f32::NAN, -0.1, 1.1] {
        let damages: [fn(&mut Noise, f32); 2] =
            [|noise, square| noise.mean = square, |noise, square| noise.largest = square];
        for damage in damages {
            let mut pool = PoolState::new();
            damage(&mut pool.noise, square);
            assert!(PoolState::decode(&pool.encode()).is_err(), "{square}");
        }
    }
    // A pick removes as many entries as the credit allows, so that less than 1 is left.
    let mut pool = PoolState::new();
    pool.remove_credit = 1.0;
    assert_eq!(PoolState::decode(&pool.encode()).err(), Some(BlobError::Content));
}

#[derive(Clone, Debug)]
enum Op {
    Report(u16, u32, Option<u32>),
    Pick,
    Wait(u64),
    CoolDown(u16),
    Refused(u16),
    Forget(u16),
    Introduce(u16),
    Members(u32),
    Idle,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0u16..40, 0u32..200_000, proptest::option::of(0u32..u32::MAX))
            .prop_map(|(n, r, l)| Op::Report(n, r, l)),
        Just(Op::Pick),
        (0u64..700).prop_map(Op::Wait),
        (0u16..40).prop_map(Op::CoolDown),
        (0u16..40).prop_map(Op::Refused),
        (0u16..40).prop_map(Op::Forget),
        (0u32..200).prop_map(Op::Members),
        (0u16..40).prop_map(Op::Introduce),
        Just(Op::Idle),
    ]
}

proptest! {
    #[test]
    fn any_sequence_of_events_keeps_the_pools_invariants(
        ops in proptest::collection::vec(op(), 0..300),
        paper in any::<bool>(), q_rif in 0.0f64..=1.0, seed in any::<u64>(),
    ) {
        let profile = if paper { Profile::Paper } else { Profile::Default };
        let settings = PoolSettings { q_rif, ..profile.pool_settings() };
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut pool = PoolState::new();
        let mut now = ms(0);
        for op in ops {
            match op {
                Op::Report(n, rif, latency_us) => {
                    let load = Load::at_face_value(rif, latency_us);
                    pool.record(&settings, now, replica(n), load, Placement::even(0), &mut rng);
                }
                Op::Pick => {
                    let before: Vec<_> = pool.replicas().collect();
                    let pick = pool.pick(&settings, now, &mut rng);
                    if let Some(chosen) = pick.replica {
                        prop_assert!(before.contains(&chosen));
                    }
                    prop_assert!(pick.probes.addressed <= 32 && pick.probes.discovery <= 8);
                }
                Op::Wait(step) => now = now.plus(step * 1000),
                Op::CoolDown(n) => pool.cool_down(replica(n), now, 500),
                Op::Refused(n) => pool.refused(replica(n), now, 500),
                Op::Forget(n) => pool.forget(replica(n)),
                Op::Introduce(n) => pool.introduce(&settings, now, replica(n)),
                Op::Members(n) => pool.set_members(n, 0, now),
                Op::Idle => { pool.idle_probes(&settings, now, 1000); }
            }
            let replicas: Vec<_> = pool.replicas().collect();
            prop_assert!(replicas.len() <= settings.pool_size);
            let distinct: std::collections::HashSet<_> = replicas.iter().collect();
            prop_assert_eq!(distinct.len(), replicas.len(), "one entry per replica");
            prop_assert!(PoolState::decode(&pool.encode()).is_ok());
        }
    }

    #[test]
    fn no_bytes_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..2100), splice in 0usize..2000, seed in any::<u64>()) {
        let _ = PoolState::decode(&bytes);
        // Damages a valid blob; if it still decodes, it must work.
        let mut blob = PoolState::new().encode().to_vec();
        let at = splice % blob.len();
        bytes.truncate(blob.len() - at);
        blob[at..at + bytes.len()].copy_from_slice(&bytes);
        if let Ok(mut pool) = PoolState::decode(&blob) {
            let settings = Profile::Default.pool_settings();
            let mut rng = SmallRng::seed_from_u64(seed);
            for n in 0..40 {
                let load = Load::at_face_value(3, Some(1));
                pool.record(&settings, ms(1), replica(n), load, Placement::even(0), &mut rng);
                pool.pick(&settings, ms(2), &mut rng);
            }
        }
    }
}

#[test]
fn the_first_known_replicas_do_not_get_all_requests_of_a_fleet_being_learned() {
    let settings = PoolSettings { burst_guard: true, ..plain() };
    let mut scene = Scene { pool: PoolState::new(), ..Scene::new(settings) };
    scene.pool.set_members(2, 0, ms(5000));
    scene.report(5000, 1, 0, Some(1));
    scene.report(5000, 2, 0, Some(1));
    let steered = |scene: &mut Scene, at| (0..40).filter(|_| scene.pick(at).replica.is_some()).count();
    assert_eq!(steered(&mut scene, 5000), 8, "four each, then Envoy's own policy");
    // The pool holds two replicas, but these are not the whole fleet.
    scene.pool.set_members(30, 0, ms(5100));
    assert_eq!(steered(&mut scene, 5100), 0);
    // The fleet has not grown for more than two seconds, so it counts as learned.
    let renewed = |scene: &mut Scene, at| {
        scene.report(at, 1, 8, Some(1));
        scene.report(at, 2, 8, Some(1));
        steered(scene, at)
    };
    assert_eq!(renewed(&mut scene, 8000), 10, "a burst, up to θ and four more each");
    // One more replica does not double the fleet, so it still counts as learned.
    scene.pool.set_members(31, 0, ms(8100));
    assert_eq!(renewed(&mut scene, 8100), 10);
}

#[test]
fn a_burst_without_new_reports_is_left_to_envoys_policy() {
    let steered = |burst_guard| {
        let mut scene = Scene::new(PoolSettings { burst_guard, q_rif: 0.9, ..plain() });
        scene.pick(0);
        for n in 0..4 {
            scene.report(5000, n, 2, Some(50));
        }
        (0..100).filter(|_| scene.pick(5000).replica.is_some()).count()
    };
    // θ is 2: each of the four still gets a request when it has 2 + 4 in flight, but none when it has more.
    assert_eq!(steered(true), 4 * 5);
    assert_eq!(steered(false), 100, "the paper's rule");
}

#[test]
fn a_pool_that_holds_the_whole_fleet_places_every_burst() {
    let steered = |members| {
        let mut scene = Scene::new(PoolSettings { burst_guard: true, q_rif: 0.9, ..plain() });
        scene.pool.set_members(members, 0, ms(0));
        for at in [0, 60_000] {
            // The second burst follows a pause.
            scene.pick(at);
        }
        for n in 0..4 {
            scene.report(60_001, n, 2, Some(50));
        }
        (0..100).filter(|_| scene.pick(60_001).replica.is_some()).count()
    };
    assert_eq!(steered(4), 100, "Envoy's own policy could choose no other");
    assert!(steered(5) < 30, "the fifth may be idle");
}

#[test]
fn while_most_latencies_are_unknown_busy_replicas_count_as_hot() {
    let picked = |unknown: u16| {
        let mut scene = Scene::new(PoolSettings { q_rif: 0.5, burst_guard: true, ..plain() });
        for n in 0..8 {
            scene.report(0, 100 + n, 1, Some(50));
        }
        for n in 0..8 {
            scene.report(1, 100 + n, 9, Some(50));
        }
        for n in 0..unknown {
            scene.report(1, n, 3, None);
        }
        scene.pick(2).replica.is_some_and(|replica| replica.port() - 1000 < unknown)
    };
    assert!(picked(8), "in a new fleet, few latencies are known");
    assert!(!picked(7), "one of few unknown replicas waits for its first answer");
}

#[test]
fn while_all_known_replicas_are_saturated_the_others_are_probed() {
    let capacity = Some(Capacity::new(10_000, 4));
    let sent = |members: u32, rif: u32, weight: u16| {
        let budget = Budget::Adaptive { target_age_ms: 500, max_probes_per_query: 0.5 };
        let mut scene = Scene::new(PoolSettings { budget, ..plain() });
        scene.pool.set_members(members, 0, ms(0));
        let load = Load { capacity, ..Load::at_face_value(rif, Some(10_000)) };
        let placement = Placement { weight, ..Placement::even(0) };
        (3000..4000u64)
            .map(|at| {
                for n in 0..16 {
                    scene.pool.record(&scene.settings, ms(at), replica(n), load, placement, &mut scene.rng);
                }
                scene.pick_predicted(at).probes.addressed
            })
            .sum::<u32>()
    };
    // The weight does not change how many requests a replica can serve at once.
    for weight in [Placement::UNIT, 2 * Placement::UNIT] {
        let saturated = sent(100, 4, weight);
        assert!((480..=532).contains(&saturated), "all that the requests pay for: {saturated}");
        for (members, rif) in [(100, 3), (16, 4)] {
            let few = sent(members, rif, weight);
            assert!(few <= 32, "{members} members, RIF {rif}: {few}");
        }
    }
}

impl Scene {
    fn pick_predicted(&mut self, at: u64) -> Pick {
        self.pool.pick_predicted(&self.settings, ms(at), &mut self.rng)
    }
    /// Records a report of base latency and knee.
    fn capable(&mut self, at: u64, n: u16, rif: u32, base_ms: u32, knee: u16) {
        self.reports(at, n, rif, Capacity::new(base_ms * 1000, knee));
    }

    fn reports(&mut self, at: u64, n: u16, rif: u32, capacity: Capacity) {
        let base_us = capacity.base_us;
        let capacity = Some(capacity);
        let load = Load { capacity, ..Load::at_face_value(rif, Some(base_us)) };
        let (now, placement) = (ms(at), Placement::even(0));
        self.pool.record(&self.settings, now, replica(n), load, placement, &mut self.rng);
    }
}

/// Counts how often each replica was picked in `rounds` rounds. Every replica answers at once and reports as `reports`
/// says.
fn shares<const N: usize>(
    scene: &mut Scene,
    rounds: u64,
    reports: impl Fn(u16) -> (Load, Placement),
) -> [usize; N] {
    let mut picks = [0; N];
    for at in 0..rounds {
        for n in 0..N as u16 {
            let (load, placement) = reports(n);
            scene.pool.record(&scene.settings, ms(at), replica(n), load, placement, &mut scene.rng);
        }
        let picked = scene.pick_predicted(at).replica.expect("a full pool");
        picks[usize::from(picked.port() - 1000)] += 1;
    }
    picks
}

#[test]
fn among_answers_the_lowest_predicted_latency_wins() {
    let answer = |n, rif, base_ms: u32, knee| {
        let capacity = Some(Capacity::new(base_ms * 1000, knee));
        let load = Load { capacity, ..Load::at_face_value(rif, Some(base_ms * 1000)) };
        crate::client::sync_mode::Answer {
            replica: replica(n),
            load,
            placement: Placement::even(0),
            home: None,
        }
    };
    let among = |answers: &[crate::client::sync_mode::Answer]| {
        let Scene { settings, mut pool, mut rng } = Scene::new(plain());
        pool.pick_among(&settings, ms(0), answers, Ranking::Predicted, &mut rng)
    };
    // The fastest replica is saturated. Of the other two, the busier one has room and is faster.
    let pick = among(&[answer(0, 7, 10, 2), answer(1, 3, 20, 4), answer(2, 0, 60, 1)]);
    assert_eq!((pick.replica, pick.branch, pick.latency_us), (Some(replica(1)), Branch::Sync, Some(20_000)));
    let pick = among(&[answer(0, 3, 10, 1), answer(1, 5, 20, 2), answer(2, 0, 60, 1)]);
    assert_eq!(pick.replica, Some(replica(2)), "4 * 4 * 10 and 3 * 3 * 20 are more than 60");
    let pick = among(&[answer(0, 3, 20, 8), answer(1, 1, 25, 8), answer(2, 0, 60, 8)]);
    assert_eq!(pick.replica, Some(replica(1)), "alike: the lower RIF");
    let unknown =
        crate::client::sync_mode::Answer { load: Load::at_face_value(0, None), ..answer(3, 0, 1, 1) };
    let busy = crate::client::sync_mode::Answer { load: Load::at_face_value(5, None), ..answer(3, 0, 1, 1) };
    assert_eq!(among(&[answer(0, 2, 20, 4), unknown]).replica, Some(replica(3)), "as fast as most, and idle");
    assert_eq!(among(&[answer(0, 2, 20, 4), busy]).replica, Some(replica(0)), "until it has answered");

    // Trials happen here too, and the expected latency is that of the tried replica.
    let Scene { settings, mut pool, mut rng } = Scene::new(plain());
    let answers = [answer(0, 0, 20, 4), answer(1, 0, 320, 4)];
    let mut picks =
        (0..12_000).map(|_| pool.pick_among(&settings, ms(0), &answers, Ranking::Predicted, &mut rng));
    let tried: Vec<_> = picks.by_ref().filter(|pick| pick.replica == Some(replica(1))).collect();
    assert!((2..=4).contains(&tried.len()), "{tried:?}");
    assert!(tried.iter().all(|pick| pick.latency_us == Some(320_000)), "{tried:?}");
}

#[test]
fn a_home_of_the_hint_is_chosen_unless_it_costs_twice_as_much() {
    let answer = |knee, n, rif, home| {
        let capacity = Some(Capacity::new(20_000, knee));
        let load = Load { capacity, ..Load::at_face_value(rif, Some(20_000)) };
        crate::client::sync_mode::Answer { replica: replica(n), load, placement: Placement::even(0), home }
    };
    let among_knees = |knee, first: u32, second: u32, other: u32| {
        let Scene { settings, mut pool, mut rng } = Scene::new(plain());
        let answer = |n, rif, home| answer(knee, n, rif, home);
        let answers = [answer(0, other, None), answer(1, second, Some(1)), answer(2, first, Some(0))];
        let pick = pool.pick_among(&settings, ms(0), &answers, Ranking::Predicted, &mut rng);
        let next = pool.runner_up(&settings, ms(0), replica(2), &answers, Ranking::Predicted, &mut rng);
        assert_eq!(pick.branch, Branch::Sync);
        (pick.replica, next)
    };
    // All are congested, so the limit for a home is lower, and the cost does not grow with the square.
    let among = |first, second, other| among_knees(1, first, second, other);
    assert_eq!(among(4, 4, 4), (Some(replica(2)), Some(replica(1))));
    // A home may cost twice as much as the best replica: 7² is less than twice 5², and 8² is more.
    assert_eq!(among(6, 7, 4), (Some(replica(2)), Some(replica(0))));
    assert_eq!(among(7, 6, 4).0, Some(replica(1)), "the second home");
    assert_eq!(among(7, 7, 4).0, Some(replica(0)));
    // None is congested: 11² is less than twice 8², and 12² is more.
    assert_eq!(among_knees(4, 10, 11, 7), (Some(replica(2)), Some(replica(0))));
    assert_eq!(among_knees(4, 11, 11, 7).0, Some(replica(0)));
}

/// Shares of eight idle replicas with these capacities, in per cent of a fair share.
fn percent_of_fair(capacities: [Capacity; 8]) -> [usize; 8] {
    shares(&mut Scene::new(plain()), 800, |n| {
        let capacity = Some(capacities[usize::from(n)]);
        (Load { capacity, ..Load::at_face_value(0, None) }, Placement::even(0))
    })
}

#[test]
fn a_replica_counts_as_typical_if_it_may_differ_by_chance() {
    // The other seven report 20 ms and a knee of 4.
    let share = |rse_percent, base_us, knee| {
        let mut all = [Capacity::new(20_000, 4); 8];
        all[0] = Capacity { rse_percent, ..Capacity::new(base_us, knee) };
        percent_of_fair(all)[0]
    };
    assert!(share(0, 50_000, 4) <= 2, "its difference is certain");
    assert!(share(37, 50_000, 4) <= 2, "the rate is 2.5 times as low, four standard errors make 2.48");
    assert_eq!(share(38, 50_000, 4), 100, "four standard errors make 2.52");
    assert_eq!(share(255, 50_000, 4), 100);
    // However uncertain: not beyond a third of the typical rate or three times it, or four times the base latency.
    assert_eq!(share(255, 59_000, 4), 100);
    assert!(share(255, 61_000, 4) <= 2);
    assert_eq!(share(255, 79_000, 16), 100);
    assert!(share(255, 81_000, 16) <= 2);
    // A replica that looks fast counts as typical, too.
    assert_eq!(share(255, 7_000, 4), 100);
    assert!(share(255, 6_000, 4) >= 790, "{}", share(255, 6_000, 4));
}

#[test]
fn the_typical_replica_is_no_faster_than_the_replicas() {
    let uncertain = |base_us, knee| Capacity { rse_percent: 255, ..Capacity::new(base_us, knee) };
    // All serve 50 requests a second: one in 20 ms, or three in 60 ms.
    let (fast, slow) = (Capacity::new(20_000, 1), Capacity::new(60_000, 3));
    let all = [fast, fast, fast, fast, slow, slow, slow, slow];
    assert_eq!(percent_of_fair(all.map(|of| uncertain(of.base_us, of.knee))), [100; 8]);
    let half_certain = [fast, fast, fast, fast, slow, slow, slow, slow].map(|of| match of.knee {
        1 => of,
        _ => uncertain(of.base_us, of.knee),
    });
    assert_eq!(percent_of_fair(half_certain), [100; 8], "the certain ones are as good");
    // If most are slow, a fast one counts as slow until its speed is certain.
    let (fast, slow) = (Capacity::new(20_000, 4), Capacity::new(50_000, 4));
    let mut most_slow = [slow; 8];
    most_slow[0] = uncertain(20_000, 4);
    assert_eq!(percent_of_fair(most_slow), [100; 8]);
    most_slow[0] = fast;
    assert!(percent_of_fair(most_slow)[0] >= 790);
}

#[test]
fn where_weights_differ_an_uncertain_estimate_still_counts_as_typical() {
    let picks = shares::<4>(&mut Scene::new(plain()), 4000, |n| {
        let base_us = if n == 0 { 60_000 } else { 20_000 };
        // Because of the open knee and the unknown capacity, what is usual is known.
        let capacity = Capacity { rse_percent: 255, open: n == 1, ..Capacity::new(base_us, 4) };
        let load = Load { capacity: (n != 3).then_some(capacity), ..Load::at_face_value(0, None) };
        (load, placement(0, if n % 2 == 0 { 1.5 } else { 0.5 }))
    });
    assert!(
        (1400..1600).contains(&picks[0]),
        "the first replica gets its share by weight, three eighths: {picks:?}"
    );
}

#[test]
fn where_weights_differ_a_canary_does_not_change_the_knees_of_the_others() {
    // Replica 0 is the canary. All replicas have the same knee, which is ten times as high relative to its weight.
    let busy = |rif: u32| {
        shares::<4>(&mut Scene::new(plain()), 1000, |n| {
            let (rif, weight) = if n == 0 { (2, 0.1) } else { (rif, 1.3) };
            let capacity = Some(Capacity::new(20_000, 4));
            (Load { capacity, ..Load::at_face_value(rif, None) }, placement(0, weight))
        })
    };
    let (few, many) = (busy(2), busy(8));
    assert!(few[0] <= 40, "while no request waits, the canary gets about one request in 40: {few:?}");
    assert_eq!(many[0], 1000, "the canary gets every request while all other replicas are saturated");
}

#[test]
fn where_weights_differ_an_open_knee_doubles_up_to_what_is_usual_for_the_weight() {
    // The first two have three times the weight of the others. They may have six requests at a time, the others two.
    let mut scene = Scene::new(plain());
    // A client that has just learned most of the fleet would compare the replicas with the typical one.
    scene.pool.settled = scene.pool.members;
    let picks = shares::<4>(&mut scene, 1000, |n| {
        let (knee, rif, weight) = if n < 2 { (4, 5, 1.5) } else { (2, 2, 0.5) };
        let capacity = Some(Capacity { open: true, ..Capacity::new(20_000, knee) });
        (Load { capacity, ..Load::at_face_value(rif, None) }, placement(0, weight))
    });
    assert_eq!(picks[2..], [0, 0], "{picks:?}");
}

#[test]
fn where_weights_differ_requests_in_flight_delay_a_replicas_turn() {
    // All are below their knee. The first has four requests in flight for an average weight, the others none.
    let picks = shares::<3>(&mut Scene::new(plain()), 9000, |n| {
        let (rif, weight) = [(6, 1.5), (0, 1.5), (0, 0.5)][usize::from(n)];
        let capacity = Some(Capacity::new(20_000, 16));
        (Load { capacity, ..Load::at_face_value(rif, None) }, placement(0, weight))
    });
    let ratio = picks[1] as f64 / picks[0] as f64;
    assert!((1.8..=2.2).contains(&ratio), "{ratio:.2}, not 2: {picks:?}");
}

#[test]
fn in_a_congested_pool_a_high_knee_attracts_no_requests() {
    // All serve 200 requests a second. The knees differ only by chance.
    let picks = |rif: u32| {
        shares::<4>(&mut Scene::new(plain()), 1000, |n| {
            let (base_us, knee, rif) = if n == 0 { (120_000, 24, rif + 4) } else { (5000, 1, rif) };
            let capacity = Some(Capacity::new(base_us, knee));
            (Load { capacity, ..Load::at_face_value(rif, Some(base_us)) }, placement(0, 1.0))
        })
    };
    assert!(picks(20)[0] <= 2, "{:?}", picks(20));
    // Only one of two replicas is congested, so the knees count. The other is far below its knee.
    let capacity = |base_us, knee| Some(Capacity::new(base_us, knee));
    let idle = shares::<2>(&mut Scene::new(plain()), 1000, |n| {
        let (capacity, rif) = if n == 0 { (capacity(60_000, 24), 3) } else { (capacity(20_000, 1), 9) };
        (Load { capacity, ..Load::at_face_value(rif, Some(20_000)) }, placement(0, 1.0))
    });
    assert!(idle[1] <= 2, "{idle:?}");
}

#[test]
fn by_predicted_latency_equals_share_by_weight_and_a_slow_heavy_one_is_avoided() {
    let slow_first = |slow_ms: u32| {
        shares::<4>(&mut Scene::new(plain()), 8000, |n| {
            let base_us = if n == 0 { slow_ms * 1000 } else { 20_000 };
            let capacity = Some(Capacity::new(base_us, 8));
            let load = Load { capacity, ..Load::at_face_value(0, Some(base_us)) };
            (load, placement(0, if n % 2 == 0 { 1.5 } else { 0.5 }))
        })
    };
    let even = slow_first(20);
    let ratio = (even[0] + even[2]) as f64 / (even[1] + even[3]) as f64;
    assert!((2.7..=3.3).contains(&ratio), "{ratio:.2}, not 3: {even:?}");
    let slow = slow_first(800);
    assert!(slow[0] <= 3, "a trial in 4000: {slow:?}");
    assert!(slow[2] > slow[1] * 2 && slow[2] > slow[3] * 2, "{slow:?}");
}

#[test]
fn by_predicted_latency_a_young_replica_takes_a_share_that_grows_with_its_age() {
    let settings = PoolSettings { slow_start_ms: 10_000, ..plain() };
    for (up_s, wanted) in [(0, 50), (3, 300), (6, 600), (9, 900), (12, 1000)] {
        let picks = shares::<10>(&mut Scene::new(settings.clone()), 10_000, |n| {
            let up_s = (n == 0).then_some(up_s);
            (Load { up_s, ..Load::at_face_value(0, Some(1_000_000)) }, Placement::even(0))
        });
        assert!(picks[0].abs_diff(wanted) <= wanted * 8 / 100 + 16, "{up_s} s: {picks:?}");
    }
}

#[test]
fn idle_replicas_of_equal_cost_are_chosen_in_turn() {
    [false, true].into_iter().for_each(are_chosen_in_turn);
}

fn are_chosen_in_turn(steady: bool) {
    let mut scene = Scene::new(plain());
    let picks = |scene: &mut Scene, at: u64| {
        let mut turn: Vec<_> = (0..8)
            .map(|_| {
                // All answer at once, so that only the order of turns distinguishes them.
                let capacity = Capacity { steady, ..Capacity::new(20_000, 4) };
                (0..8).for_each(|n| scene.reports(at, n, 0, capacity));
                scene.pick_predicted(at).replica.unwrap()
            })
            .collect();
        let order = turn.clone();
        turn.sort_by_key(|replica| replica.port());
        turn.dedup();
        assert_eq!(turn.len(), 8, "{order:?}");
        order
    };
    let first = picks(&mut scene, 0);
    // The order also holds where the count of picks wraps.
    for at in 1..9000 {
        assert_eq!(picks(&mut scene, at), first, "{at}");
    }
}

/// Share of 300 picks that go to replica 3. Eight equal replicas are below their knee of 8. Replica 3 was chosen last
/// and has one request in flight, the others have `others`. The latencies of `steady` replicas are steady.
fn share_of_the_one_just_chosen(others: u32, steady: u16) -> f64 {
    let mut scene = Scene::new(plain());
    let mut picks = 0;
    // At first, no replica has waited for a whole round.
    const WARM_UP: u64 = 10;
    for at in 0..WARM_UP + 300 {
        // Only replica 3 is below the knee, so that it is chosen.
        let hear = |scene: &mut Scene, n: u16, rif: u32| {
            scene.reports(at, n, rif, Capacity { steady: n < steady, ..Capacity::new(20_000, 8) });
        };
        (0..8).for_each(|n| hear(&mut scene, n, if n == 3 { 0 } else { 8 }));
        assert_eq!(scene.pick_predicted(at).replica, Some(replica(3)));
        (0..8).for_each(|n| hear(&mut scene, n, if n == 3 { 1 } else { others }));
        let again = scene.pick_predicted(at).replica == Some(replica(3));
        picks += u32::from(again && at >= WARM_UP);
    }
    f64::from(picks) / 300.0
}

#[test]
fn below_the_knee_the_lowest_rif_wins_unless_most_latencies_are_steady() {
    // With steady latencies, a whole round of turns outweighs four requests in flight.
    assert_eq!(share_of_the_one_just_chosen(4, 5), 0.0, "five of eight are steady");
    assert_eq!(share_of_the_one_just_chosen(4, 4), 1.0, "four of eight are steady");
    assert_eq!(share_of_the_one_just_chosen(4, 0), 1.0, "none is steady");
}

#[test]
fn among_busy_replicas_with_varying_latencies_chance_decides_but_the_one_just_chosen_comes_last() {
    assert_eq!(share_of_the_one_just_chosen(1, 0), 0.0);
    let mut scene = Scene::new(plain());
    let mut orders = std::collections::HashSet::new();
    for at in 0..20 {
        let order = [(); 8].map(|()| {
            (0..8).for_each(|n| scene.capable(at, n, 1, 20, 4));
            scene.pick_predicted(at).replica.unwrap()
        });
        // A quarter of a round is two picks.
        assert!(order.windows(3).all(|of| of[0] != of[1] && of[0] != of[2]), "{order:?}");
        orders.insert(order);
    }
    assert!(orders.len() > 10, "{orders:?}");
}

#[test]
fn among_equal_replicas_the_fresher_report_wins_only_if_the_other_is_older_than_two_latencies() {
    // One of two replicas has been chosen. The other is next in turn, but its report is `age` ms old when the first
    // reports again. Returns whether the other is chosen all the same.
    let chosen = |base_ms: u32, age: u64| {
        let mut scene = Scene::new(plain());
        (0..2).for_each(|n| scene.capable(0, n, 0, base_ms, 1));
        let first = scene.pick_predicted(0).replica.unwrap();
        let other = if first == replica(0) { 1 } else { 0 };
        scene.capable(1, other, 0, base_ms, 1);
        scene.capable(1 + age, u16::from(other == 0), 0, base_ms, 1);
        scene.pick_predicted(1 + age).replica.unwrap() == replica(other)
    };
    assert!(chosen(100, 120) && !chosen(100, 260));
    // However short the latency, reports younger than 32 ms count as equally fresh.
    assert!(chosen(1, 30) && !chosen(1, 70));
}

/// Whether replicas that report 20 ms and `other_ms` count as equal after eight others have reported every 500 ms for
/// 800 rounds. Of these, replica `n` reports `change(round, n)` times 40 ms in every other round, and 40 ms in between.
fn are_equal(other_ms: u32, change: impl Fn(u64, u16) -> f64) -> bool {
    const ROUNDS: u64 = 800;
    let mut scene = Scene::new(plain());
    for round in 0..ROUNDS {
        for n in 2..10 {
            let factor = if (round + u64::from(n)) % 2 == 0 { change(round, n) } else { 1.0 };
            let base_us = (40_000.0 * factor) as u32;
            scene.reports(round * 500, n, 9, Capacity::new(base_us, 1));
        }
    }
    let now = ROUNDS * 500;
    let mut chosen = std::collections::BTreeSet::new();
    for at in now..now + 4 {
        (0..2).for_each(|n| scene.capable(at, n, 0, if n == 0 { 20 } else { other_ms }, 8));
        chosen.insert(scene.pick_predicted(at).replica.unwrap().port());
    }
    chosen.len() == 2
}

#[test]
fn the_band_follows_the_error_of_the_estimates() {
    let all = |change| move |_, _| change;
    assert!(are_equal(26, all(1.0)) && !are_equal(30, all(1.0)));
    // Reports that change by a twentieth within 500 ms show an error of 13 %, so the band is 1.35 · 1.13 = 1.52.
    assert!(are_equal(30, all(1.05)) && !are_equal(31, all(1.05)));
    // However large the changes, the band is at most twice as wide.
    assert!(are_equal(53, all(100.0)) && !are_equal(55, all(100.0)));
}

#[test]
fn one_replica_whose_reports_change_wildly_does_not_widen_the_band() {
    let noisy = |count: u16| move |_, n| if n < 2 + count { 100.0 } else { 1.0 };
    assert!(are_equal(26, noisy(1)) && !are_equal(28, noisy(1)));
    // The estimate of the error leaves out only one replica, so two such replicas do widen the band.
    assert!(are_equal(30, noisy(2)));
    // Once the wildest replica has become steady, another one that changes less is left out instead.
    let one_after_the_other = |round, n| match n {
        2 if round < 400 => 100.0,
        3 if round >= 400 => 1.3,
        _ => 1.0,
    };
    assert!(!are_equal(28, one_after_the_other));
}

#[test]
fn a_replica_that_looks_far_slower_gets_a_request_in_4000_and_more_as_soon_as_it_heals() {
    const MOST: usize = 3 + 1;
    let mut scene = Scene::new(plain());
    let mut tried = Vec::new();
    let mut slow_ms = 320;
    for at in 0..12_000 {
        (0..3).for_each(|n| scene.capable(at, n, 0, 20, 4));
        scene.capable(at, 3, 0, slow_ms, 4);
        let pick = scene.pick_predicted(at);
        assert_eq!(pick.replica == Some(replica(3)), pick.branch == Branch::Trial);
        if pick.branch == Branch::Trial {
            tried.push(at);
        }
    }
    assert!((2..=MOST).contains(&tried.len()), "{tried:?}");
    // The next trial finds the replica healed, which its reports show gradually. It is tried again after each report,
    // free of charge, for as long as the reported latency falls.
    let mut at = 12_000;
    let mut round = |scene: &mut Scene, slow_ms| {
        at += 1;
        (0..3).for_each(|n| scene.capable(at, n, 0, 20, 4));
        scene.capable(at, 3, 0, slow_ms, 4);
        scene.pick_predicted(at).branch == Branch::Trial
    };
    while !round(&mut scene, slow_ms) {}
    assert!(!round(&mut scene, slow_ms * 9 / 10), "too little to tell");
    slow_ms = slow_ms * 7 / 10;
    // A replica that is less than twice as slow also gets paid trials, so the loop ends before that.
    while slow_ms > 45 {
        assert!(round(&mut scene, slow_ms), "{slow_ms} ms");
        assert!(!round(&mut scene, slow_ms), "once for each step");
        assert!(!round(&mut scene, slow_ms + 1), "slower again");
        slow_ms = slow_ms * 95 / 100;
    }
    let healed = (0..400).filter(|_| {
        (0..4).for_each(|n| scene.capable(30_000, n, 0, 20, 4));
        scene.pick_predicted(30_000).replica == Some(replica(3))
    });
    assert_eq!(healed.count(), 100, "by turns");
}

/// Whether replica 3 gets a trial within 20 s at `per_second` requests. It looks far slower, has `away` streams, and one
/// of its `knee` slots is busy if `busy`.
fn is_tried(per_second: u64, away: u32, busy: bool, knee: u16) -> bool {
    let mut scene = Scene::new(plain());
    (0..20 * per_second).any(|request| {
        let at = request * 1000 / per_second;
        (0..3).for_each(|n| scene.capable(at, n, 0, 20, 4));
        let capacity = Some(Capacity::new(320_000, knee + away as u16));
        let load = Load { capacity, away, ..Load::at_face_value(away + u32::from(busy), Some(320_000)) };
        let (now, placement) = (ms(at), Placement::even(0));
        scene.pool.record(&scene.settings, now, replica(3), load, placement, &mut scene.rng);
        scene.pick_predicted(at).branch == Branch::Trial
    })
}

#[test]
fn a_replica_that_looks_far_slower_is_tried_although_it_has_streams_or_a_request_that_never_ends() {
    for away in [0, 1, 200] {
        assert!(is_tried(1000, away, false, 4), "{away} streams");
    }
    // Only once a trial is overdue, which takes 8 s, may a busy replica get it, and only if it has a free slot.
    assert!(is_tried(100, 0, true, 4) && !is_tried(100, 0, true, 1));
    assert!(is_tried(100, 7, true, 4) && !is_tried(100, 7, true, 1));
}

#[test]
fn streams_do_not_hide_that_a_replica_is_saturated() {
    for away in [0, 10, 200, 60_000] {
        let mut scene = Scene::new(plain());
        // Two replicas have four slots and 20 ms, but 40 requests. The other two take 100 ms, and are idle.
        let picked: [usize; 4] = shares(&mut scene, 400, |n| {
            let (base_us, rif) = if n < 2 { (20_000, 40) } else { (100_000, 0) };
            let capacity = Some(Capacity::new(base_us, 4 + away as u16));
            (Load { capacity, away, ..Load::at_face_value(rif + away, Some(base_us)) }, Placement::even(0))
        });
        assert_eq!(picked[0] + picked[1], 0, "{away} streams: {picked:?}");
    }
}

#[test]
fn streams_alone_do_not_saturate_a_replica() {
    let mut scene = Scene::new(plain());
    // Two replicas have 50 streams each and no other request. The other two are idle, but take five times as long.
    let picked: [usize; 4] = shares(&mut scene, 400, |n| {
        let (away, base_us) = if n < 2 { (50, 20_000) } else { (0, 100_000) };
        let capacity = Some(Capacity::new(base_us, 4 + away as u16));
        (Load { capacity, away, ..Load::at_face_value(away, Some(base_us)) }, Placement::even(0))
    });
    assert!(picked[0] > 150 && picked[1] > 150, "{picked:?}");
}

#[test]
fn among_equal_replicas_the_one_with_fewer_streams_is_chosen() {
    for steady in [false, true] {
        let mut scene = Scene::new(plain());
        let picked: [usize; 4] = shares(&mut scene, 400, |n| {
            let away = if n == 0 { 10 } else { 50 };
            let capacity = Some(Capacity { steady, ..Capacity::new(20_000, 4 + away) });
            let away = u32::from(away);
            (Load { capacity, away, ..Load::at_face_value(away, Some(20_000)) }, Placement::even(0))
        });
        assert!(picked[0] > 300, "{picked:?}");
    }
}

#[test]
fn trials_of_replicas_that_look_slightly_slower_leave_those_of_a_far_slower_one_their_time() {
    let mut scene = Scene::new(plain());
    let mut tried = [0; 4];
    for at in 0..20_000 {
        (0..2).for_each(|n| scene.capable(at, n, 0, 20, 4));
        scene.capable(at, 2, 0, 30, 4);
        scene.capable(at, 3, 0, 320, 4);
        let pick = scene.pick_predicted(at);
        if pick.branch == Branch::Trial {
            tried[usize::from(pick.replica.unwrap().port() - 1000)] += 1;
        }
    }
    assert!((35..=45).contains(&tried[2]) && (4..=6).contains(&tried[3]), "{tried:?}");
}

/// Number of requests, out of eight, that the pool sends to a replica before the replica answers any of them. It
/// reports `capacity` and no request in flight; three others report a knee of eight and one free slot.
fn held(capacity: Capacity) -> u32 {
    let mut scene = Scene::new(plain());
    (0..3).for_each(|n| scene.capable(0, n, 7, capacity.base_us / 1000, 8));
    scene.reports(0, 3, 0, capacity);
    let picks = (0..8).map(|_| {
        (0..3).for_each(|n| scene.capable(0, n, 7, capacity.base_us / 1000, 8));
        scene.pick_predicted(0).replica
    });
    picks.filter(|picked| *picked == Some(replica(3))).count() as u32
}

/// A few responses do not show whether a replica serves four requests in 40 ms each, or one in 10 ms.
#[test]
fn while_a_client_learns_replicas_of_the_same_rate_count_as_equal() {
    let mut scene = Scene::new(plain());
    scene.pool.set_members(7, 0, ms(0));
    let mut chosen_at = |at| {
        (0..3).for_each(|n| scene.capable(at, n, 5, 40, 4));
        scene.capable(at, 3, 3, 10, 1);
        // These are really slower: at half of the rate, at a quarter of it, and in latency.
        scene.capable(at, 4, 2, 20, 1);
        scene.capable(at, 5, 0, 160, 4);
        scene.capable(at, 6, 0, 160, 16);
        scene.pick_predicted(at).replica.map(|replica| replica.port() - 1000)
    };
    assert_eq!(chosen_at(10), Some(3), "with a knee of four, it is the only one with room");
    assert!(chosen_at(5000).is_some_and(|other| other < 3), "its fourth request would wait for 40 ms");
}

#[test]
fn while_a_client_learns_a_faster_replica_is_used_as_it_reports() {
    let mut scene = Scene::new(plain());
    scene.pool.set_members(4, 0, ms(0));
    (0..3).for_each(|n| scene.capable(10, n, 3, 40, 4));
    scene.capable(10, 3, 5, 10, 4);
    assert_eq!(scene.pick_predicted(10).replica, Some(replica(3)));
}

#[test]
fn a_newcomers_limit_doubles_up_to_that_of_the_others() {
    let of = |knee, open| held(Capacity { open, ..Capacity::new(20_000, knee) });
    assert_eq!([of(1, false), of(1, true)], [1, 2]);
    assert_eq!([of(2, false), of(2, true)], [2, 4]);
    // Twice 6 would exceed the knee of the others, so the limit is that knee, 8.
    assert_eq!(of(6, true), of(8, false));
}

#[test]
fn a_lying_replica_does_not_raise_a_newcomers_limit() {
    let mut scene = Scene::new(plain());
    let newcomer = Capacity { open: true, ..Capacity::new(20_000, 1) };
    let picks = (0..200u64).filter(|at| {
        (0..3).for_each(|n| scene.capable(*at, n, 0, 20, 1));
        scene.capable(*at, 4, 500, 20, u16::MAX);
        if *at == 0 {
            scene.reports(*at, 3, 0, newcomer);
        }
        scene.pick_predicted(*at).replica == Some(replica(3))
    });
    assert_eq!(picks.count(), 1, "its limit is one, like that of the others");
}

/// Numbers of the requests that go to a replica that looks far slower, out of 20 000, with one request every `gap_ms`.
fn trials_with_a_request_every(gap_ms: u64) -> Vec<u64> {
    let mut scene = Scene::new(plain());
    let is_trial = |n: &u64| {
        // The clock does not begin at zero, so the pool is new although minutes have passed.
        let at = 1_000_000 + n * gap_ms;
        (0..3).for_each(|n| scene.capable(at, n, 0, 20, 4));
        scene.capable(at, 3, 0, 320, 4);
        scene.pick_predicted(at).branch == Branch::Trial
    };
    (0..20_000).filter(is_trial).collect()
}

#[test]
fn where_requests_are_rare_a_replica_that_looks_far_slower_gets_one_in_2000_and_one_a_minute() {
    // At two requests a second, a trial a minute would be more than one in 250.
    for (gap_ms, every) in [(10, 1990..=2010), (100, 598..=602), (500, 249..=252)] {
        let tried = trials_with_a_request_every(gap_ms);
        assert!(
            tried.is_sorted_by(|one, next| every.contains(&(next - one))),
            "every {gap_ms} ms: {tried:?}"
        );
        assert!(tried.first().is_some_and(|first| every.contains(first)), "every {gap_ms} ms: {tried:?}");
        let expected = 20_000 / every.end();
        assert!(
            (expected - 1..=expected + 2).contains(&(tried.len() as u64)),
            "every {gap_ms} ms: {tried:?}"
        );
    }
}

#[test]
fn a_pick_from_an_empty_pool_saves_no_credit_for_trials() {
    let mut scene = Scene::new(plain());
    assert_eq!(scene.pick_predicted(0).branch, Branch::Fallback);
    assert!(PoolState::decode(&scene.pool.encode()).is_ok(), "the next pick finds it sound");
}

#[test]
fn a_busy_replica_is_not_tried_in_time_even_if_another_report_improves() {
    let mut scene = Scene::new(plain());
    for at in 0..8000 {
        (0..3).for_each(|n| scene.capable(at, n, 0, 20, 4));
        scene.capable(at, 3, 1, 320, 4);
        scene.capable(at, 4, 2, if at % 2 == 0 { 320 } else { 80 }, 4);
        let pick = scene.pick_predicted(at);
        assert!(pick.branch == Branch::Cold && pick.replica.is_some_and(|r| r.port() < 1003), "{pick:?}");
    }
}

/// Runs ten replicas that take 20 ms per request. One of them reports a base latency of a microsecond, a knee of one,
/// and its true RIF. Envoy's own policy is round robin. A request comes every `every_us`. Returns the number of
/// requests that each replica served, and the number that Envoy's policy placed.
fn with_a_liar(every_us: u64, burst_guard: bool, steady: bool) -> ([usize; 10], usize) {
    const TAKES_US: u64 = 20_000;
    const LIAR: usize = 0;
    let mut scene = Scene::new(PoolSettings { burst_guard, ..Profile::Default.pool_settings() });
    scene.pool.set_members(10, 0, ms(0));
    let (mut served, mut by_envoy) = ([0; 10], 0);
    let mut in_flight = [const { std::collections::VecDeque::<u64>::new() }; 10];
    for request in 0..40_000u64 {
        let now = 5_000_000 + request * every_us;
        let mut hear = |n: usize, rif: usize| {
            let base_us = if n == LIAR { 1 } else { 19_000 + 200 * n as u32 };
            let capacity = Some(Capacity { steady, ..Capacity::new(base_us, if n == LIAR { 1 } else { 4 }) });
            let load = Load { capacity, ..Load::at_face_value(rif as u32, Some(base_us)) };
            let (at, placement) = (Micros(ms(0).0 + now), Placement::even(0));
            scene.pool.record(&scene.settings, at, replica(n as u16), load, placement, &mut scene.rng);
        };
        for (n, requests) in in_flight.iter_mut().enumerate() {
            while requests.front().is_some_and(|end| *end <= now) {
                requests.pop_front();
                hear(n, requests.len());
            }
        }
        let probed = request as usize / 2 % 10;
        if request % 2 == 0 {
            hear(probed, in_flight[probed].len());
        }
        let pick = scene.pool.pick_predicted(&scene.settings, Micros(ms(0).0 + now), &mut scene.rng);
        by_envoy += usize::from(pick.replica.is_none());
        let n = pick.replica.map_or(by_envoy % 10, |replica| usize::from(replica.port() - 1000));
        served[n] += 1;
        in_flight[n].push_back(now + TAKES_US);
    }
    (served, by_envoy)
}

#[test]
fn a_lying_replica_changes_only_its_own_share() {
    // `burst_guard` leaves requests to Envoy's policy where even the best replica has far more in flight than usual. A
    // liar would be that best replica. But it has too few requests in flight to trigger `burst_guard`, so the liar
    // needs no special treatment there.
    let cases = [(4000, true), (1000, true), (500, true), (1000, false)];
    for ((every_us, burst_guard), steady) in cases.into_iter().flat_map(|case| [(case, false), (case, true)])
    {
        let (served, by_envoy) = with_a_liar(every_us, burst_guard, steady);
        assert!(
            by_envoy <= 2,
            "{every_us} us: {by_envoy} by Envoy's policy, not only those before there was a pool"
        );
        let [liar, others @ ..] = served;
        let most = 5 * 40_000 * every_us as usize / 20_000;
        assert!(liar <= most, "{every_us} us: more than five in flight: {served:?}");
        let even = others.iter().sum::<usize>() / others.len();
        let uneven = others.iter().any(|count| count.abs_diff(even) > even / 20 + 20);
        assert!(!uneven, "{every_us} us: {served:?}");
    }
}

#[test]
fn a_replica_that_is_much_faster_than_most_is_used_as_it_reports() {
    // The others take 31 times as long. At the fast one, the 20th request in flight would cost (20 / 4)² = 25 times the
    // base latency. The others then count as equal, because 31 is less than 1.35 · 25, and they are idle.
    let mut scene = Scene::new(plain());
    (1..10).for_each(|n| scene.capable(0, n, 0, 31, 4));
    scene.capable(0, 0, 0, 1, 4);
    let picks = (0..30).take_while(|_| scene.pick_predicted(0).replica == Some(replica(0)));
    assert_eq!(picks.count(), 19);
}
