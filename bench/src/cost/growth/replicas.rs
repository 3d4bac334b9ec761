//! The cost of a request over the number of replicas.

use anyhow::Result;
use prequal_testbed::Envoy;

use super::Grown;
use crate::backends::Backends;
use crate::cost::kind::EnvoyKind;
use crate::cost::replicas::{host, learn};
use crate::cost::{Rounds, Variant, place, saturate, warm_up};
use crate::deployment::start_envoys;

pub(super) const SIZES: [usize; 4] = [10, 100, 1000, 10_000];

pub(super) async fn run(rounds: Rounds, sizes: Vec<usize>) -> Result<Grown> {
    println!("Envoy CPU per request before {sizes:?} replicas that answer at once, one worker");
    let backends = host(sizes.iter().copied().max().unwrap_or(0))?;
    let all: Vec<_> = backends.iter().flat_map(|backends| backends.addresses.iter().copied()).collect();
    let mut configs = Vec::new();
    for size in &sizes {
        for kind in EnvoyKind::ALL {
            configs.push(kind.config(&all[..*size], 1)?);
        }
    }
    let envoys = tokio::task::spawn_blocking(move || start_envoys(configs)).await??;
    let pids: Vec<u32> = envoys.iter().map(Envoy::pid).collect();
    place(&pids, &backends.iter().map(Backends::pid).collect::<Vec<_>>())?;
    let kinds = EnvoyKind::ALL.map(EnvoyKind::name);
    let mut variants: Vec<Variant> = kinds
        .iter()
        .cycle()
        .zip(&envoys)
        .map(|(name, envoy)| Variant::new(name, envoy.addr(), vec![envoy.pid()]))
        .collect();
    warm_up(rounds, &variants).await?;
    for (index, size) in sizes.iter().enumerate() {
        let filter = index * EnvoyKind::ALL.len() + 1;
        learn(&variants[filter], &envoys[filter], *size).await?;
    }
    saturate(rounds, &mut variants).await?;
    Ok(Grown { quantity: "replicas", sizes, kinds: kinds.into(), shown: 1, beyond: None, variants })
}
