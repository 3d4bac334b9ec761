//! Replicas that report their capacity truthfully, falsely or not at all.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{Backend, Envoy, EnvoyConfig, Request};

use crate::support::{SERVING, addrs, assert_all_ok, bed, counted, report, stand_in, warm, with_load};

const MS: fn(u64) -> Duration = Duration::from_millis;
/// A report that is true for a replica that answers in 5 ms.
const HONEST: &str = ";base=5000;knee=8";
const TRIES: u32 = 5;

/// A replica that answers in 5 ms, and reports this latency and no load. `claim` makes the rest of each report from the
/// report's number.
fn claims(claim: impl Fn(u64) -> String + Send + Sync + 'static) -> Result<Backend> {
    let number = Arc::new(AtomicU64::new(0));
    let load = Arc::new(move |addr: SocketAddr| {
        let claim = claim(number.fetch_add(1, Ordering::Relaxed));
        with_load(report(0, 5000, addr) + &claim)
    });
    let probe = Arc::clone(&load);
    stand_in(move |addr| probe(addr), move |addr| load(addr).delay(MS(5)))
}

fn honest(count: usize) -> Result<Vec<Backend>> {
    (0..count).map(|_| claims(|_| HONEST.into())).collect()
}

/// Whether no value of `served` differs from their mean by more than half of it.
fn is_even(served: &[u64]) -> bool {
    let mean = served.iter().sum::<u64>() / served.len() as u64;
    served.iter().all(|n| n.abs_diff(mean) * 2 <= mean)
}

/// Asserts that `count` requests are eventually shared as `judge` requires, most of them steered. This may take several
/// attempts, because a busy machine makes honest replicas look slow.
#[track_caller]
fn assert_shares(
    envoy: &Envoy,
    fleet: &[Backend],
    count: usize,
    callers: usize,
    judge: impl Fn(&[u64]) -> bool,
) {
    let mut shares = Vec::new();
    for _ in 0..TRIES {
        fleet.iter().for_each(Backend::clear);
        let before = envoy.prequal(SERVING).expect("stats").steered();
        assert_all_ok(&envoy.client().burst(count, callers, |_| Request::get("/")));
        let steered = envoy.prequal(SERVING).expect("stats").steered() - before;
        let served: Vec<u64> = fleet.iter().map(Backend::served).collect();
        let good = steered * 2 > count as u64 && judge(&served);
        shares.push((steered, served));
        if good {
            return;
        }
    }
    panic!("steered, served: {shares:?}");
}

#[test]
fn an_impossible_capacity_is_counted_and_has_no_effect() -> Result<()> {
    bed!();
    let bad = [
        ";base=0;knee=4",
        ";base=5000;knee=0",
        ";base=99999999999;knee=4",
        ";base=5000;knee=65536",
        ";base=NaN;knee=4",
        ";base=-5;knee=4",
        ";base=5000;knee=4;rse=256",
        ";base=5000;knee=4;rse=-1",
        ";base=5000;knee=4;away=1",
        ";base=5000",
        ";knee=4",
    ];
    let is_bad = Arc::new(AtomicBool::new(false));
    let mut fleet = honest(4)?;
    for claim in bad {
        let is_bad = Arc::clone(&is_bad);
        let claimed = move |_| if is_bad.load(Ordering::Relaxed) { claim } else { HONEST }.to_owned();
        fleet.push(claims(claimed)?);
    }
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&addrs(&fleet))?)?;
    warm(&envoy, 14);
    assert_eq!(envoy.prequal(SERVING)?.reports("bad_capacity"), 0);
    is_bad.store(true, Ordering::Relaxed);
    assert_all_ok(&envoy.client().burst(400, 6, |_| Request::get("/")));
    counted(&envoy, "bad reports of all ten", |now| {
        now.reports("bad_capacity") >= 10 && now.probes("rejected_bad_capacity") > 0
    });
    // Earlier reports are too old after two seconds.
    std::thread::sleep(MS(2100));
    assert_shares(&envoy, &fleet, 800, 6, |served| is_even(&served[..4]));
    Ok(())
}

#[test]
fn a_capacity_that_changes_with_every_report_harms_only_its_sender() -> Result<()> {
    bed!();
    let mut fleet = honest(4)?;
    fleet.push(claims(|number| match number % 5 {
        0 => ";base=1;knee=65535".into(),
        1 => ";base=3600000000;knee=1".into(),
        2 => String::new(),
        3 => ";base=1000000;knee=1;rse=255".into(),
        _ => HONEST.into(),
    })?);
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&addrs(&fleet))?)?;
    warm(&envoy, 5);
    assert_shares(&envoy, &fleet, 1000, 6, |served| {
        served[..4].iter().all(|served| *served >= 20) && is_even(&served[..4])
    });
    assert_eq!(envoy.prequal(SERVING)?.reports("bad_capacity"), 0);
    Ok(())
}

#[test]
fn a_replica_that_claims_to_answer_at_once_gets_more_and_the_others_share_the_rest_evenly() -> Result<()> {
    bed!();
    let mut fleet = honest(4)?;
    // The claim is believed while few requests are in flight there. Beyond the knee, the cost of a request grows with
    // the square of their number.
    fleet.push(claims(|_| ";base=1;knee=1".into())?);
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&addrs(&fleet))?)?;
    warm(&envoy, 5);
    assert_shares(&envoy, &fleet, 1500, 24, |served| {
        is_even(&served[..4]) && served[..4].iter().all(|other| served[4] * 5 > other * 6)
    });
    Ok(())
}

#[test]
fn replicas_with_old_and_new_agents_share_the_load() -> Result<()> {
    bed!();
    let mut fleet = honest(2)?;
    for _ in 0..2 {
        fleet.push(claims(|_| String::new())?);
    }
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&addrs(&fleet))?)?;
    warm(&envoy, 4);
    assert_shares(&envoy, &fleet, 800, 4, |served| served.iter().all(|served| *served >= 80));
    Ok(())
}
