//! The Envoy in front of the replicas, and changes to it while it runs: its listener, its endpoints, its process.
//!
//! The configuration is the shipped one, except that listener and endpoints come from files, which can change.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use prequal_testbed::{Envoy, EnvoyConfig, IDLE_PROBES, PARENT_SHUTDOWN_S, Prequal};
use serde_json::json;

/// The serving cluster of the shipped configuration.
pub(crate) const CLUSTER: &str = "replicas";
/// Its probe cluster.
pub(crate) const PROBE_CLUSTER: &str = "replicas-agent";

/// The port of the shipped listener.
const PORT: u16 = 10_000;
/// Number of workers: the number of cores of the machine for which the goals are set.
const WORKERS: u32 = 2;

/// The form in which Envoy runs Prequal.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub(crate) enum Module {
    /// The WebAssembly filter
    Wasm,
    /// The native module
    Native,
}

/// The current Envoy, and earlier ones that are draining.
pub(crate) struct Edge {
    envoy: Envoy,
    config: EnvoyConfig,
    addrs: Vec<SocketAddr>,
    updates: u32,
}

/// Requests and probes that one process of Envoy has begun and not ended, according to its filter's counters. At rest,
/// these numbers grow only if a count is lost.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Open {
    pid: u32,
    requests: i64,
    probes: i64,
}

impl Open {
    /// Requests and probes begun since `before` and not ended. Idle probes may always be in flight, so a few are
    /// allowed.
    fn since(self, before: Self) -> Vec<String> {
        // The counters of a process that took over began at zero.
        let before = if before.pid == self.pid { before } else { Self::default() };
        let (requests, probes) = (self.requests - before.requests, self.probes - before.probes);
        let mut found = Vec::new();
        if requests != 0 {
            found.push(format!("picks minus outcomes: {requests}"));
        }
        if probes.unsigned_abs() > IDLE_PROBES {
            found.push(format!("probes minus results: {probes}"));
        }
        found
    }
}

impl Edge {
    pub(super) fn start(addrs: &[SocketAddr], module: Module) -> Result<Self> {
        let shipped = match module {
            Module::Wasm => EnvoyConfig::for_replicas(addrs)?,
            Module::Native => EnvoyConfig::native_for_replicas(addrs)?,
        };
        let config =
            shipped.concurrency(WORKERS).dynamic_listener().eds(&[CLUSTER, PROBE_CLUSTER]).edit(|config| {
                config.listener_mut()["address"]["socket_address"]["port_value"] = json!(PORT)
            });
        let envoy = Envoy::start_restartable(config.clone())?;
        Ok(Self { envoy, config, addrs: addrs.to_vec(), updates: 0 })
    }

    /// The address for users' requests.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.envoy.addr()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.envoy.pid()
    }

    /// Number of replicas that the filter knows.
    pub(super) fn members(&self) -> Result<u64> {
        Ok(self.envoy.prequal(CLUSTER)?.other("prequal_members"))
    }

    /// Gives `cluster` the endpoints of all replicas but `without`.
    pub(crate) fn set_endpoints(&mut self, cluster: &str, without: &[usize]) -> Result<()> {
        let kept: Vec<SocketAddr> = self
            .addrs
            .iter()
            .enumerate()
            .filter(|(replica, _)| !without.contains(replica))
            .map(|(_, addr)| *addr)
            .collect();
        self.envoy.set_endpoints(cluster, &kept)
    }

    /// Replaces the listener with a different one, whose filter is `module`.
    pub(crate) fn update_listener(&mut self, module: &Path) -> Result<()> {
        self.updates += 1;
        let number = self.updates;
        let config = self.config.clone().module(module).edit(|config| {
            config.listener_mut()["metadata"] = json!({"filter_metadata": {"chaos": {"update": number}}});
        });
        ensure!(self.envoy.update_listener(config.clone())?, "Envoy refused it: {}", self.envoy.log());
        self.config = config;
        Ok(())
    }

    /// Starts another process that takes over; returns when the old one has ended.
    pub(super) fn hot_restart(&mut self) -> Result<()> {
        let new = self.envoy.hot_restart(self.config.clone())?;
        let mut old = std::mem::replace(&mut self.envoy, new);
        old.wait_for_end(Duration::from_secs(PARENT_SHUTDOWN_S + 10))
    }

    /// The failure counts of Envoy and the filter, to explain a miss.
    pub(super) fn evidence(&self) -> Vec<String> {
        const PARTS: [&str; 7] = ["reset", "retry", "fail", "timeout", "destroy", "_5xx", "overflow"];
        let telling = |name: &str| {
            (name.starts_with("cluster.replicas.upstream_") && PARTS.iter().any(|part| name.contains(part)))
                || name.contains("prequal_ejections_total")
                || name.contains("vm_reload")
        };
        match self.envoy.stats() {
            Ok(stats) => stats
                .into_iter()
                .filter(|(name, value)| *value > 0 && telling(name))
                .map(|(name, value)| format!("{name} {value}"))
                .collect(),
            Err(error) => vec![format!("Envoy: {error:#}"), self.envoy.log()],
        }
    }

    /// The requests and probes that the filter has begun and not ended.
    pub(super) fn open(&self) -> Result<Open> {
        Ok(self.open_in(&self.envoy.prequal(CLUSTER)?))
    }

    fn open_in(&self, prequal: &Prequal) -> Open {
        Open { pid: self.pid(), requests: prequal.requests_open(), probes: prequal.probes_open() }
    }

    /// Gauges that are not zero, and counters that do not balance compared with `before`, which is `None` if counts may
    /// have been lost.
    pub(super) fn unbalanced(&self, ejected: bool, before: Option<Open>) -> Result<Vec<String>> {
        let mut found = Vec::new();
        let stats = self.envoy.stats()?;
        for name in [
            "cluster.replicas.upstream_rq_active",
            "cluster.replicas.upstream_rq_pending_active",
            "http.ingress.downstream_rq_active",
        ] {
            match stats.get(name).copied().unwrap_or(0) {
                0 => {}
                count => found.push(format!("{name} {count}")),
            }
        }
        let prequal = self.envoy.prequal(CLUSTER)?;
        let gauges: &[&str] =
            if ejected { &["prequal_ejected", "prequal_panic"] } else { &["prequal_panic"] };
        for name in gauges {
            match prequal.other(name) {
                0 => {}
                count => found.push(format!("{name} {count}")),
            }
        }
        if let Some(before) = before {
            found.extend(self.open_in(&prequal).since(before));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_count_shows() {
        let before = Open { pid: 1, requests: 3, probes: 7 };
        assert!(before.since(before).is_empty());
        let idle = Open { probes: before.probes + IDLE_PROBES.cast_signed(), ..before };
        assert!(idle.since(before).is_empty() && before.since(idle).is_empty());
        let lost = Open { requests: 4, probes: idle.probes + 1, ..before };
        assert_eq!(lost.since(before), ["picks minus outcomes: 1", "probes minus results: 5"]);
        let twice = Open { requests: 2, ..before };
        assert_eq!(twice.since(before), ["picks minus outcomes: -1"]);
        // The counters of another process began at zero.
        let other = Open { pid: 2, requests: 0, probes: 0 };
        assert!(other.since(before).is_empty());
    }
}
