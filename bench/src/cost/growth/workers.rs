//! The cost of a request over the number of workers. Here nothing is bound to a core.

use anyhow::Result;
use prequal_testbed::Envoy;

use super::Grown;
use crate::backends::Backends;
use crate::cost::kind::EnvoyKind;
use crate::cost::{Rounds, Variant, saturate, trivial, warm_up};
use crate::deployment::start_envoys;
use crate::process::{cores, pin};

pub(super) const SIZES: [usize; 5] = [1, 2, 4, 8, 16];
const REPLICAS: usize = 10;

pub(super) async fn run(rounds: Rounds, sizes: Vec<usize>) -> Result<Grown> {
    println!("Envoy CPU per request with {sizes:?} workers before {REPLICAS} replicas that answer at once");
    let cores = cores();
    let backends = Backends::start(&trivial(REPLICAS))?;
    let mut configs = Vec::new();
    for size in &sizes {
        for kind in EnvoyKind::ALL {
            configs.push(kind.config(&backends.addresses, 1)?.concurrency(u32::try_from(*size)?));
        }
    }
    let envoys = tokio::task::spawn_blocking(move || start_envoys(configs)).await??;
    // An earlier part may have bound this process to a core, and thereby the processes that it has started since.
    for pid in envoys.iter().map(Envoy::pid).chain([backends.pid(), std::process::id()]) {
        pin(pid, 0..cores)?;
    }
    let mut variants: Vec<Variant> = EnvoyKind::ALL
        .iter()
        .cycle()
        .zip(&envoys)
        .map(|(kind, envoy)| Variant::new(kind.name(), envoy.addr(), vec![envoy.pid()]))
        .collect();
    warm_up(rounds, &variants).await?;
    saturate(rounds, &mut variants).await?;
    Ok(Grown {
        quantity: "workers",
        sizes,
        kinds: EnvoyKind::ALL.map(EnvoyKind::name).into(),
        shown: 1,
        beyond: Some((cores, "more workers than cores")),
        variants,
    })
}
