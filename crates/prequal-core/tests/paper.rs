//! The paper's sentences as tests (Prequal, NSDI '24, §4 and §5.3), with an injected clock, seeded randomness and the
//! paper's profile. Where the paper gives a number, the test uses it.

use std::collections::HashMap;

use prequal_core::client::members::{Evidence, Members, Placement};
use prequal_core::client::pool::reuse::{reuse_budget, round_randomly};
use prequal_core::client::pool::{Branch, Budget, HotRule, Pick, PoolSettings, PoolState};
use prequal_core::config::Profile;
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;
use prequal_core::wire::load::Load;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

fn replica(n: u16) -> Endpoint {
    format!("10.0.0.1:{}", 1000 + n).parse().unwrap()
}

fn ms(ms: u64) -> Micros {
    Micros::from_millis(1_000_000 + ms)
}

/// The paper's baseline without probes of its own; each test supplies the reports.
fn paper() -> PoolSettings {
    PoolSettings { budget: Budget::Fixed { r_probe: 0.0 }, ..Profile::Paper.pool_settings() }
}

/// Settings under which no report is removed or used up, so that only the selection rule remains.
fn selection(q_rif: f64) -> PoolSettings {
    PoolSettings { q_rif, r_remove: 0.0, delta: 1000.0, ..paper() }
}

struct Client {
    settings: PoolSettings,
    pool: PoolState,
    rng: SmallRng,
}

impl Client {
    fn new(settings: PoolSettings) -> Self {
        let mut pool = PoolState::new();
        pool.set_members(100, 0, ms(0));
        Self { settings, pool, rng: SmallRng::seed_from_u64(11) }
    }

    fn probe(&mut self, at: u64, n: u16, rif: u32, latency_ms: u32) {
        let load = Load::at_face_value(rif, Some(latency_ms * 1000));
        self.pool.record(&self.settings, ms(at), replica(n), load, Placement::even(0), &mut self.rng);
    }

    fn query(&mut self, at: u64) -> Pick {
        self.pool.pick(&self.settings, ms(at), &mut self.rng)
    }

    fn has(&self, n: u16) -> bool {
        self.pool.replicas().any(|in_pool| in_pool == replica(n))
    }
}

#[test]
fn s4_the_pool_is_capped_at_16_and_a_new_probe_evicts_the_oldest() {
    let mut client = Client::new(paper());
    for n in 0..17 {
        client.probe(u64::from(n), n, 1, 10);
    }
    assert_eq!(client.pool.replicas().count(), 16);
    assert!(!client.has(0) && client.has(1) && client.has(16));
}

#[test]
fn s4_probes_older_than_a_second_are_removed_counted_from_their_receipt() {
    let mut client = Client::new(selection(0.84));
    for n in 0..3 {
        client.probe(0, n, 1, 10);
    }
    assert!(client.query(999).replica.is_some());
    assert_eq!(client.query(1000).branch, Branch::Fallback);
    assert_eq!(client.pool.replicas().count(), 0);
}

#[test]
fn s4_below_two_probes_the_choice_is_left_to_chance() {
    let mut client = Client::new(selection(0.84));
    assert_eq!(client.query(0).replica, None);
    client.probe(0, 1, 0, 1);
    assert_eq!(client.query(0).replica, None);
    client.probe(0, 2, 0, 1);
    assert!(client.query(0).replica.is_some());
}

#[test]
fn s4_if_any_probe_is_cold_the_cold_one_of_lowest_latency_is_chosen() {
    let mut client = Client::new(selection(0.5));
    client.probe(0, 1, 9, 1);
    client.probe(0, 2, 1, 40);
    client.probe(0, 3, 2, 30);
    client.probe(0, 4, 9, 2);
    let pick = client.query(1);
    // θ is the median of 1, 2, 9, 9. With ≥, only the replica with RIF 1 is cold.
    assert_eq!((pick.replica, pick.branch), (Some(replica(2)), Branch::Cold));
    let mut client = Client::new(PoolSettings { hot: HotRule::Gt, ..selection(0.5) });
    for (n, rif, latency) in [(1, 9, 1), (2, 1, 40), (3, 2, 30), (4, 9, 2)] {
        client.probe(0, n, rif, latency);
    }
    assert_eq!(client.query(1).replica, Some(replica(3)), "with > 2 is cold too");
}

#[test]
fn s4_if_all_are_hot_the_one_of_lowest_rif_is_chosen() {
    let mut client = Client::new(PoolSettings { pool_size: 3, ..selection(0.5) });
    for n in 10..30 {
        client.probe(0, n, 1, 10);
    }
    for (n, rif, latency) in [(1, 9, 1), (2, 7, 90), (3, 8, 2)] {
        client.probe(1, n, rif, latency);
    }
    let pick = client.query(2);
    assert_eq!((pick.replica, pick.branch), (Some(replica(2)), Branch::Hot));
}

#[test]
fn s5_3_q_of_0_is_rif_only_and_q_of_1_is_latency_only() {
    for (q_rif, expected) in [(0.0, 1), (1.0, 3)] {
        let mut client = Client::new(selection(q_rif));
        for (n, rif, latency) in [(1, 1, 90), (2, 2, 50), (3, 1000, 10)] {
            client.probe(0, n, rif, latency);
        }
        for _ in 0..3 {
            client.probe(0, 1, 1, 90);
            client.probe(0, 3, 1000, 10);
            assert_eq!(client.query(1).replica, Some(replica(expected)), "Q = {q_rif}");
        }
    }
}

#[test]
fn s5_3_a_probe_tied_with_the_maximum_is_hot() {
    for (hot, expected) in [(HotRule::Ge, 1), (HotRule::Gt, 2)] {
        let mut client = Client::new(PoolSettings { hot, ..selection(0.999) });
        client.probe(0, 1, 1, 50);
        client.probe(0, 2, 5, 10);
        assert_eq!(client.query(1).replica, Some(replica(expected)), "{hot:?}");
    }
}

#[test]
fn s4_ties_are_broken_at_random() {
    let mut hits = HashMap::new();
    for seed in 0..4000 {
        let mut client = Client::new(selection(0.84));
        client.rng = SmallRng::seed_from_u64(seed);
        for n in 0..4 {
            client.probe(0, n, 1, 10);
        }
        *hits.entry(client.query(1).replica.unwrap()).or_insert(0) += 1;
    }
    assert_eq!(hits.len(), 4);
    assert!(hits.values().all(|hits| (850..=1150).contains(hits)), "{hits:?}");
}

#[test]
fn s4_theta_is_the_quantile_of_recent_probe_responses_not_of_the_pool() {
    let mut client = Client::new(PoolSettings { pool_size: 2, ..selection(0.75) });
    for (n, rif) in [1, 2, 3, 4, 5, 6, 7, 8].into_iter().enumerate() {
        client.probe(0, n as u16, rif, 10);
    }
    assert_eq!(client.pool.view(&client.settings, ms(0)).theta, Some(6));
}

#[test]
fn s4_using_a_probe_raises_its_rif_by_one() {
    let mut client = Client::new(selection(0.0));
    client.probe(0, 1, 3, 10);
    client.probe(0, 2, 5, 10);
    let picks: Vec<_> = (0..3).map(|_| client.query(1).replica).collect();
    // RIF 3, then 4, then a tie at 5.
    assert_eq!(picks[..2], [Some(replica(1)); 2]);
    let mut next = Client::new(selection(0.0));
    next.probe(0, 1, 3, 10);
    next.probe(0, 2, 4, 10);
    let picks: Vec<_> = (0..5).map(|_| next.query(1).replica.unwrap()).collect();
    let to_first = picks.iter().filter(|replica_| **replica_ == replica(1)).count();
    assert_eq!(to_first, 3, "{picks:?}: both end at RIF 6");
}

#[test]
fn s4_equation_1_as_a_table() {
    for (m, n, r_probe, r_remove, delta, expected) in [
        (16.0, 100.0, 3.0, 1.0, 1.0, 2.0 / 1.52), // the paper's baseline, 1.316
        (16.0, 100.0, 4.0, 0.25, 1.0, 1.0),       // 2 / 3.11 < 1
        (16.0, 100.0, 2.0, 0.25, 1.0, 2.0 / 1.43), // fig. 8
        (16.0, 100.0, 1.0, 0.25, 1.0, 2.0 / 0.59), // fig. 8
        (16.0, 100.0, 0.5, 0.25, 1.0, 2.0 / 0.17), // fig. 8, its lowest rate
        (16.0, 100.0, 1.0, 1.0, 1.0, 64.0),       // denominator < 0
        (16.0, 16.0, 3.0, 0.0, 1.0, 64.0),        // n = m
        (16.0, 16.0, 3.0, 1.0, 1.0, 64.0),
        (16.0, 4.0, 3.0, 1.0, 1.0, 64.0),  // n < m
        (16.0, 24.0, 3.0, 1.0, 1.0, 64.0), // denominator exactly 0
        (16.0, 25.0, 3.0, 1.0, 1.0, 2.0 / 0.08),
        (2.0, 4.0, 4.0, 1.0, 1.0, 2.0),
        (16.0, 1000.0, 3.0, 1.0, 3.0, 4.0 / 1.952),
        (16.0, 0.0, 3.0, 1.0, 1.0, 64.0), // nothing learned yet
    ] {
        let got = reuse_budget(m, n, r_probe, r_remove, delta, 64.0);
        assert!((got - expected).abs() < 1e-9, "m={m} n={n} r_probe={r_probe} r_remove={r_remove}: {got}");
    }
}

#[test]
fn s4_the_reuse_limit_is_rounded_at_random_so_that_its_mean_is_kept_within_a_per_cent() {
    let mut rng = SmallRng::seed_from_u64(3);
    for b_reuse in [1.0, 1.316, 2.7, 11.76] {
        let total: f64 = (0..200_000).map(|_| f64::from(round_randomly(b_reuse, &mut rng))).sum();
        assert!((total / 2e5 / b_reuse - 1.0).abs() < 0.01, "{b_reuse}");
    }
    assert!((0..1000).all(|_| round_randomly(3.0, &mut rng) == 3), "a whole number is itself");
}

#[test]
fn s4_a_probe_is_removed_once_it_has_been_used_b_reuse_times() {
    // 2 reports per query, n = 100, m = 16, r_remove = 0: b_reuse = (1 + δ) / 1.68 = 2 with δ = 2.36.
    let settings = PoolSettings { delta: 2.36, r_remove: 0.0, hot: HotRule::Gt, q_rif: 1.0, ..paper() };
    let mut client = Client::new(settings);
    // The client learns the rate of reports.
    for at in 0..2000 {
        client.probe(at, (at % 90) as u16, 5, 50);
        client.probe(at, ((at + 45) % 90) as u16, 5, 50);
        client.query(at);
    }
    client.probe(2000, 95, 0, 1);
    for _ in 0..2 {
        assert_eq!(client.query(2000).replica, Some(replica(95)));
    }
    assert!(!client.has(95), "used up");
}

#[test]
fn s4_a_probe_is_used_b_reuse_times_in_the_mean_within_a_per_cent() {
    for b_reuse in [1.316, 2.35, 4.9] {
        // 2 reports per query, n = 100, m = 16, r_remove = 0: b_reuse = (1 + δ) / 1.68.
        let delta = b_reuse * 1.68 - 1.0;
        let settings = PoolSettings { delta, r_remove: 0.0, q_rif: 1.0, ..paper() };
        let mut client = Client::new(settings);
        let (mut probes, mut uses, mut at) = (0u32, 0u32, 0);
        while probes < 20_000 {
            at += 1;
            // The first thousand queries only teach the rate. After that, there is always a probe that no other can
            // beat.
            let measured = at > 1000 && !client.has(95);
            if measured {
                client.probe(at, 95, 0, 1);
            } else {
                client.probe(at, (at % 45) as u16, 5, 50);
            }
            client.probe(at, (at % 45 + 45) as u16, 5, 50);
            probes += u32::from(measured);
            uses += u32::from(client.query(at).replica == Some(replica(95)));
        }
        // The last probe is still in use.
        let mean = f64::from(uses - 1) / f64::from(probes - 1);
        assert!((mean / b_reuse - 1.0).abs() < 0.01, "{mean} uses, {b_reuse} wanted");
    }
}

#[test]
fn s4_fractional_probe_rates_are_rounded_deterministically_within_one_over_100_000_queries() {
    for r_probe in [0.5, 0.71, 1.0, 1.41, 2.83, 3.0] {
        let mut client = Client::new(PoolSettings { budget: Budget::Fixed { r_probe }, ..paper() });
        let mut sent = 0u32;
        for query in 1..=100_000u32 {
            client.probe(u64::from(query), (query % 16) as u16, 0, 10);
            let due = client.query(u64::from(query)).probes.addressed;
            assert!(due == r_probe.floor() as u32 || due == r_probe.ceil() as u32);
            sent += due;
        }
        assert!((f64::from(sent) - 100_000.0 * r_probe).abs() <= 1.5, "{r_probe}: {sent}");
    }
}

#[test]
fn s4_fractional_removal_rates_are_kept_within_one_over_100_000_queries() {
    for r_remove in [0.25, 0.7, 1.0] {
        let mut client = Client::new(PoolSettings { r_remove, delta: 1000.0, ..paper() });
        let mut removed = 0i64;
        for query in 0..100_000u64 {
            // The pool is refilled before each query, so that it never runs empty and each removal shows.
            while client.pool.replicas().count() < 16 {
                let n = client.rng.random_range(0..100);
                client.probe(query, n, 1, 10);
            }
            client.query(query);
            removed += 16 - client.pool.replicas().count() as i64;
        }
        assert!((removed as f64 - 1e5 * r_remove).abs() <= 1.5, "{r_remove}: {removed}");
    }
}

#[test]
fn s4_removal_alternates_between_the_oldest_and_the_worst() {
    let mut client = Client::new(PoolSettings { q_rif: 0.5, delta: 1000.0, ..paper() });
    // Oldest to newest. Replica 6 is hot and has the highest RIF; replica 4 is hot as well.
    for (n, rif, latency) in [(1, 1, 30), (2, 1, 20), (3, 1, 90), (4, 7, 10), (5, 1, 25), (6, 9, 10)] {
        client.probe(u64::from(n), n, rif, latency);
    }
    client.query(10);
    assert!(!client.has(1), "the oldest");
    client.query(10);
    assert!(!client.has(6), "any hot: the highest RIF");
    client.query(10);
    assert!(!client.has(2), "the oldest again");
}

#[test]
fn s4_with_none_hot_the_worst_is_the_one_of_highest_latency() {
    let mut client = Client::new(PoolSettings { q_rif: 1.0, delta: 1000.0, ..paper() });
    for (n, rif, latency) in [(1, 1, 10), (2, 50, 20), (3, 1, 90), (4, 1, 30)] {
        client.probe(u64::from(n), n, rif, latency);
    }
    client.query(10);
    client.query(10);
    assert!(!client.has(1) && !client.has(3) && client.has(2) && client.has(4));
}

#[test]
fn s4_probe_targets_are_uniform_without_replacement_by_chi_square() {
    let mut members = Members::default();
    for n in 0..50 {
        members.observe(replica(n), None, Evidence::Served, ms(0));
    }
    let mut rng = SmallRng::seed_from_u64(5);
    let mut hits = [0f64; 50];
    let rounds = 20_000;
    for _ in 0..rounds {
        let targets = members.sample(3, &mut rng, |_| false);
        let [a, b, c] = [0, 1, 2].map(|i| targets[i].replica);
        assert!(a != b && b != c && a != c);
        for target in targets {
            hits[usize::from(target.replica.port() - 1000)] += 1.0;
        }
    }
    let expected = f64::from(rounds) * 3.0 / 50.0;
    let chi_square: f64 = hits.iter().map(|hits| (hits - expected).powi(2) / expected).sum();
    // With 49 degrees of freedom, the value exceeds 85.4 once in a thousand.
    assert!(chi_square < 85.4, "{chi_square}");
}

/// With fewer probes than queries, the pool runs empty (depletion) unless reports are reused.
#[test]
fn s4_reuse_prevents_depletion() {
    let fallbacks = |reuse_cap| {
        let settings = PoolSettings { r_remove: 0.0, reuse_cap, ..paper() };
        let mut client = Client::new(settings);
        let mut fallbacks = 0;
        for query in 0..10_000u64 {
            if query % 2 == 0 {
                let n = client.rng.random_range(0..100);
                client.probe(query, n, 1, 10);
            }
            fallbacks += u32::from(client.query(query).replica.is_none());
        }
        fallbacks
    };
    let (without, with) = (fallbacks(1), fallbacks(64));
    assert!(without > 3000 && with < 100, "{without} without reuse, {with} with it");
}

enum Removal {
    None,
    /// Removes as many as the paper, but never the worst.
    OldestOnly,
    OldestAndWorst,
}

/// Good probes are used up and bad ones stay. Without removal of the worst, the reports in the pool are more and more
/// those of heavily loaded replicas (degradation), even if as many probes are removed for their age.
#[test]
fn s4_removal_of_the_worst_prevents_degradation() {
    let mean_rif_in_pool = |removal: &Removal| {
        let r_remove = if matches!(removal, Removal::OldestAndWorst) { 1.0 } else { 0.0 };
        // A long age limit and RIF-only control, so that ageing does not replace removal.
        let settings = PoolSettings { r_remove, max_age_ms: 60_000, q_rif: 0.0, delta: 0.001, ..paper() };
        let mut client = Client::new(settings);
        // RIF and time of the latest report.
        let mut reported = [(0u32, 0u64); 100];
        let of = |replica_: Endpoint| usize::from(replica_.port() - 1000);
        let (mut total, mut count) = (0u32, 0u32);
        for query in 0..20_000u64 {
            for nth in 0..3 {
                let n = client.rng.random_range(0..100u16);
                let rif = client.rng.random_range(0..20);
                reported[usize::from(n)] = (rif, query * 3 + nth);
                client.probe(query, n, rif, 10);
            }
            client.query(query);
            if matches!(removal, Removal::OldestOnly) {
                let oldest = client.pool.replicas().min_by_key(|in_pool| reported[of(*in_pool)].1);
                client.pool.forget(oldest.unwrap());
            }
            if query > 1000 {
                for in_pool in client.pool.replicas() {
                    total += reported[of(in_pool)].0;
                    count += 1;
                }
            }
        }
        f64::from(total) / f64::from(count)
    };
    let fleet = 9.5;
    let [none, oldest, both] = [Removal::None, Removal::OldestOnly, Removal::OldestAndWorst]
        .map(|removal| mean_rif_in_pool(&removal) - fleet);
    assert!(none > 2.0, "above the fleet without removal: {none}");
    assert!(oldest > none * 0.9, "{oldest} with removal of the oldest, {none} without any");
    assert!(both < oldest * 0.7, "{both} with removal of the worst, {oldest} without");
}
