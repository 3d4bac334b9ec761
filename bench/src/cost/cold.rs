//! The cost of the filter's steps with cold CPU caches.
//!
//! The Envoys share one core, and each gets one request in turn. Between two requests to an Envoy the others use the
//! caches, as other programs on a shared machine do. Rounds are compared one by one, so that the machine's drift
//! cancels out. Nothing is judged here. The part `filter` measures the same steps in an Envoy under full load.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use prequal_testbed::{Envoy, EnvoyConfig};

use super::{
    ADAPTIVE, Cost, EMPTY_MODULE, EMPTY_NATIVE, EMPTY_POLICY, NATIVE, NATIVE_CHAIN, NATIVE_OFF,
    NATIVE_POLICY, NO_FILTER, PROBES_OFF, STRIP, place, steps, trivial,
};
use crate::backends::Backends;
use crate::closed::Connection;
use crate::deployment::start_envoys;
use crate::stats::median;
use crate::table::{self, one, range};

/// One Envoy.
struct Turn {
    name: String,
    envoy: Envoy,
    connection: Connection,
    /// CPU time per request in each round, microseconds.
    cpu_us: Vec<f64>,
}

impl Turn {
    fn added_to(&self, base: &Self) -> Vec<f64> {
        self.cpu_us.iter().zip(&base.cpu_us).map(|(ours, base)| ours - base).collect()
    }
}

/// Measures and prints; there is no goal.
pub(super) async fn run(cost: &Cost) -> Result<()> {
    println!(
        "Envoy CPU per request with cold caches: one request to each Envoy in turn, 10 replicas that answer at once"
    );
    let backends = Backends::start(&trivial(10))?;
    let wanted = [
        NO_FILTER,
        NATIVE_CHAIN,
        EMPTY_MODULE,
        PROBES_OFF,
        ADAPTIVE,
        STRIP,
        EMPTY_POLICY,
        EMPTY_NATIVE,
        NATIVE_POLICY,
        NATIVE_OFF,
        NATIVE,
    ];
    let mut named: Vec<(String, EnvoyConfig)> = steps(&backends.addresses)?
        .into_iter()
        .filter(|(name, _)| wanted.contains(name))
        .map(|(name, config)| (name.to_owned(), config))
        .collect();
    for module in &cost.module {
        let module = module.canonicalize().with_context(|| format!("--module {}", module.display()))?;
        let config = EnvoyConfig::for_replicas(&backends.addresses)?.module(&module);
        named.push((format!("+ {}", module.display()), config));
    }
    let (names, configs): (Vec<_>, Vec<_>) = named.into_iter().unzip();
    let envoys = tokio::task::spawn_blocking(move || start_envoys(configs)).await??;
    let pids: Vec<u32> = envoys.iter().map(Envoy::pid).collect();
    place(&pids, &[backends.pid()])?;
    let mut turns = Vec::new();
    for (name, envoy) in names.into_iter().zip(envoys) {
        let connection = Connection::open(envoy.addr(), "/").await?;
        turns.push(Turn { name, envoy, connection, cpu_us: Vec::new() });
    }

    let length = cost.rounds.length();
    // The first round is not counted: connections and pools fill.
    round(&mut turns, length).await?;
    turns.iter_mut().for_each(|turn| turn.cpu_us.clear());
    let begin = Instant::now();
    for number in 1..=cost.rounds.count {
        let requests = round(&mut turns, length).await?;
        println!(
            "  round {number} of {}, {requests} requests each, {:.0} s",
            cost.rounds.count,
            begin.elapsed().as_secs_f64()
        );
    }

    let ours = turns.iter().find(|turn| turn.name == ADAPTIVE).context("the filter itself")?;
    let rows: Vec<Vec<String>> = turns
        .iter()
        .map(|turn| {
            let added = turn.added_to(&turns[0]);
            let more = turn.added_to(ours);
            vec![
                turn.name.clone(),
                one(median(turn.cpu_us.iter().copied())),
                range(&turn.cpu_us, one),
                format!("{:+.1}", median(added.iter().copied())),
                range(&added, one),
                one(standard_error(&added)),
                format!("{:+.1}", median(more.iter().copied())),
                one(standard_error(&more)),
            ]
        })
        .collect();
    let header = ["variant", "CPU µs", "min–max", "added", "min–max", "error", "more", "error"];
    println!("\n{}", table::render(&header, &rows));
    println!(
        "added: over no filter; more: over the default filter; both in the same round; error: standard error of the mean.\n"
    );
    Ok(())
}

/// Sends requests to each Envoy in turn for `length`; returns the number of requests per Envoy.
async fn round(turns: &mut [Turn], length: Duration) -> Result<u32> {
    let cpu = |turns: &[Turn]| turns.iter().map(|turn| turn.envoy.cpu_time()).collect::<Result<Vec<_>>>();
    let before = cpu(turns)?;
    let begin = Instant::now();
    let mut requests = 0;
    while begin.elapsed() < length {
        for turn in &mut *turns {
            turn.connection.get().await.with_context(|| turn.name.clone())?;
        }
        requests += 1;
    }
    let after = cpu(turns)?;
    for (turn, (before, after)) in turns.iter_mut().zip(before.into_iter().zip(after)) {
        turn.cpu_us.push(after.saturating_sub(before).as_secs_f64() * 1e6 / f64::from(requests));
    }
    Ok(requests)
}

fn standard_error(values: &[f64]) -> f64 {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (count - 1.0) / count).sqrt()
}
