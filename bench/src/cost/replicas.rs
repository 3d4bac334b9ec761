//! The cost of a large fleet: the filter with few replicas and with many, each compared with an Envoy that uses round
//! robin.
//!
//! Three questions: Does the filter add more to the cost of a request in the large fleet? (The cost with round robin,
//! which opens as many connections, is subtracted.) How much does the membership cost per second, at a fixed and low
//! request rate? How soon is a new replica known? Request latency is not measured here.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use prequal_testbed::{Envoy, EnvoyConfig, Policy};
use tokio::task::JoinHandle;

use super::{CONNECTIONS, Cost, Variant, counters, place, saturate, trivial, warm_up};
use crate::backends::Backends;
use crate::closed::Connection;
use crate::deployment::{CLUSTER, start_envoys};
use crate::goals::print_verdict;
use crate::stats::median;
use crate::table::{self, one, two};

const FEW: usize = 16;
/// Goal for the cost of a request with many replicas, relative to that with few.
const FACTOR: f64 = 1.1;
/// Goal for the CPU time per second that the membership takes.
const WORK: f64 = 0.01;
const NEWCOMERS: usize = 3;
/// In larger fleets, no replicas join during the run: with a limit of 20 000 open files, Envoy could no longer read its
/// endpoints.
const MOST_JOINED: usize = 5000;
const FOUND_WITHIN: Duration = Duration::from_secs(10);
/// Interval between requests at the low rate. These requests trigger the probes that find a newcomer.
const PACE: Duration = Duration::from_millis(5);
/// Time to wait for a newcomer before giving up.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time to wait until the filter knows every replica. It sends at most 105 discovery probes a second in a settled
/// fleet, and up to 1000 while it keeps finding replicas.
const LEARNING: Duration = Duration::from_secs(150);
/// The probe cluster of the shipped configuration.
pub(super) const PROBING: &str = "replicas-agent";
/// Maximum number of replicas in one process, because each has several open files.
const HOSTED: usize = 2500;

/// Measures, prints and judges; returns whether every goal was reached.
pub(super) async fn run(cost: &Cost) -> Result<bool> {
    let many = cost.replicas;
    println!("Envoy CPU per request before {FEW} and {many} replicas that answer at once, one worker");
    let backends = host(many + NEWCOMERS)?;
    let all: Vec<_> = backends.iter().flat_map(|backends| backends.addresses.iter().copied()).collect();
    let mut configs = Vec::new();
    for size in [FEW, many] {
        let shipped = EnvoyConfig::for_replicas(&all[..size])?;
        configs.push(shipped.clone().without_prequal().policy(Policy::RoundRobin));
        configs.push(shipped.eds(&[CLUSTER, PROBING]));
    }
    let mut envoys = tokio::task::spawn_blocking(move || start_envoys(configs)).await??;
    let pids: Vec<u32> = envoys.iter().map(Envoy::pid).collect();
    place(&pids, &backends.iter().map(Backends::pid).collect::<Vec<_>>())?;
    let names = ["few, round robin", "few, filter", "many, round robin", "many, filter"];
    let mut variants: Vec<Variant> = names
        .into_iter()
        .zip(&envoys)
        .map(|(name, envoy)| Variant::new(name, envoy.addr(), vec![envoy.pid()]))
        .collect();

    warm_up(cost.rounds, &variants).await?;
    learn(&variants[3], &envoys[3], many).await?;
    let before = counters(&envoys)?;
    saturate(cost.rounds, &mut variants).await?;
    let after = counters(&envoys)?;
    let at_rate = at_fixed_rate(cost, &envoys).await?;

    let added = [0, 2].map(|plain| variants[plain + 1].cpu() - variants[plain].cpu());
    // Both fleets get the same number of requests, so the cost of a request cancels out.
    let work = (at_rate[3] - at_rate[2]) - (at_rate[1] - at_rate[0]);
    let rows: Vec<Vec<String>> = variants
        .iter()
        .zip(&at_rate)
        .zip(before.iter().zip(&after))
        .map(|((variant, at_rate), (before, after))| {
            let requests = (after.requests - before.requests) as f64;
            vec![
                variant.name.to_owned(),
                one(variant.cpu()),
                variant.cpu_range(),
                format!("{:.0}", variant.per_second()),
                format!("{:.3}", (after.sent - before.sent) as f64 / requests),
                format!("{:.2} %", at_rate * 100.0),
            ]
        })
        .collect();
    let header = ["replicas", "CPU µs", "min–max", "req/s", "probes/req", "at 200 req/s, of a core"];
    println!("\n{}", table::render(&header, &rows));
    let (factor, in_all) = (added[1] / added[0], variants[3].cpu() / variants[1].cpu());
    let per_request = print_verdict(
        factor <= FACTOR,
        &format!(
            "a request costs {} µs more than round robin, {} with {FEW} replicas: {} times (at most {FACTOR}); {} times in all",
            one(added[1]),
            one(added[0]),
            two(factor),
            two(in_all),
        ),
    );
    let membership = print_verdict(
        work <= WORK,
        &format!("the membership takes {:.2} % of a core (at most 1 %)", work * 100.0),
    );
    let discovery = many > MOST_JOINED || {
        let found = newcomers(&mut envoys[3], &all, many).await?;
        print_verdict(
            found <= FOUND_WITHIN,
            &format!(
                "the last of {NEWCOMERS} newcomers was known after {:.1} s (at most {} s)",
                found.as_secs_f64(),
                FOUND_WITHIN.as_secs()
            ),
        )
    };
    println!();
    Ok(per_request && membership && discovery)
}

/// Starts `count` replicas in as few processes as can hold them.
pub(super) fn host(count: usize) -> Result<Vec<Backends>> {
    (0..count).step_by(HOSTED).map(|first| Backends::start(&trivial(HOSTED.min(count - first)))).collect()
}

/// Sends requests until the filter knows every replica, or for [`LEARNING`].
pub(super) async fn learn(variant: &Variant, envoy: &Envoy, replicas: usize) -> Result<()> {
    let begin = Instant::now();
    while members(envoy)? < replicas as u64 && begin.elapsed() < LEARNING {
        variant.round(CONNECTIONS, Duration::from_millis(500)).await?;
    }
    println!("  {} of {replicas} known after {:.0} s", members(envoy)?, begin.elapsed().as_secs_f64());
    Ok(())
}

/// Number of replicas that the filter knows.
pub(super) fn members(envoy: &Envoy) -> Result<u64> {
    tokio::task::block_in_place(|| Ok(envoy.prequal(CLUSTER)?.other("prequal_members")))
}

/// CPU time per second of each Envoy, with requests at a fixed rate.
async fn at_fixed_rate(cost: &Cost, envoys: &[Envoy]) -> Result<Vec<f64>> {
    let mut connections = Vec::new();
    for envoy in envoys {
        connections.push(Connection::open(envoy.addr(), "/").await?);
    }
    let mut rounds = vec![Vec::new(); envoys.len()];
    for _ in 0..cost.rounds.count {
        let before = envoys.iter().map(Envoy::cpu_time).collect::<Result<Vec<_>>>()?;
        let begin = Instant::now();
        let mut pace = tokio::time::interval(PACE);
        while begin.elapsed() < cost.rounds.length() {
            pace.tick().await;
            for connection in &mut connections {
                connection.get().await?;
            }
        }
        for ((round, envoy), before) in rounds.iter_mut().zip(envoys).zip(before) {
            let used = envoy.cpu_time()?.saturating_sub(before);
            round.push(used.as_secs_f64() / begin.elapsed().as_secs_f64());
        }
    }
    Ok(rounds.into_iter().map(median).collect())
}

/// Adds replicas one after the other at a low request rate; returns the longest time until one was known.
async fn newcomers(envoy: &mut Envoy, all: &[std::net::SocketAddr], many: usize) -> Result<Duration> {
    let mut connection = Connection::open(envoy.addr(), "/").await?;
    let requests: JoinHandle<Result<()>> = tokio::spawn(async move {
        let mut pace = tokio::time::interval(PACE);
        loop {
            pace.tick().await;
            connection.get().await?;
        }
    });
    let mut last = Duration::ZERO;
    for size in many + 1..=many + NEWCOMERS {
        let fleet = all.get(..size).context("too few replicas were started")?;
        let known = members(envoy)?;
        tokio::task::block_in_place(|| {
            [CLUSTER, PROBING].iter().try_for_each(|cluster| envoy.set_endpoints(cluster, fleet))
        })?;
        let begin = Instant::now();
        while members(envoy)? <= known && begin.elapsed() < PATIENCE {}
        last = last.max(begin.elapsed());
    }
    requests.abort();
    Ok(last)
}
