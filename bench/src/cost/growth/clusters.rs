//! The cost of a request over the number of clusters, with requests to up to sixteen of them.

use anyhow::Result;
use prequal_testbed::Envoy;

use super::Grown;
use crate::backends::Backends;
use crate::cost::kind::{EnvoyKind, path};
use crate::cost::{CONNECTIONS, Rounds, Variant, place, saturate, trivial, warm_up};
use crate::deployment::start_envoys;

pub(super) const SIZES: [usize; 4] = [1, 16, 64, 256];
const REPLICAS: usize = 10;

pub(super) async fn run(rounds: Rounds, sizes: Vec<usize>) -> Result<Grown> {
    println!(
        "Envoy CPU per request with {sizes:?} clusters of {REPLICAS} replicas that answer at once, one worker"
    );
    let backends = Backends::start(&trivial(REPLICAS))?;
    let mut configs = Vec::new();
    for size in &sizes {
        for kind in EnvoyKind::ALL {
            configs.push(kind.config(&backends.addresses, *size)?);
        }
    }
    let envoys = tokio::task::spawn_blocking(move || start_envoys(configs)).await??;
    let pids: Vec<u32> = envoys.iter().map(Envoy::pid).collect();
    place(&pids, &[backends.pid()])?;
    let mut variants = Vec::new();
    for (envoys, size) in envoys.chunks(EnvoyKind::ALL.len()).zip(&sizes) {
        for (kind, envoy) in EnvoyKind::ALL.iter().zip(envoys) {
            let variant = Variant::new(kind.name(), envoy.addr(), vec![envoy.pid()]);
            variants.push(variant.paths(used(*size)));
        }
    }
    warm_up(rounds, &variants).await?;
    saturate(rounds, &mut variants).await?;
    let kinds = EnvoyKind::ALL.map(EnvoyKind::name).into();
    Ok(Grown { quantity: "clusters", sizes, kinds, shown: 1, beyond: None, variants })
}

/// One path per connection, evenly over all clusters.
fn used(clusters: usize) -> Vec<String> {
    (0..CONNECTIONS).map(|connection| path(connection * clusters / CONNECTIONS)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_spread_over_the_clusters() {
        assert!(used(1).iter().all(|path| path == "/"));
        let paths = used(256);
        assert_eq!((paths[0].as_str(), paths[15].as_str()), ("/", "/cluster-0240"));
    }
}
