//! Synchronous mode: requests that wait for their own probes.

mod choices;
mod hints;
mod waits;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{Backend, Envoy, EnvoyConfig};
use serde_json::{Value, json};

use crate::support::is_probe;

const MS: fn(u64) -> Duration = Duration::from_millis;

/// The shipped configuration in synchronous mode; `settings` are added to the cluster's.
fn sync_config(addrs: &[SocketAddr], settings: Value) -> Result<EnvoyConfig> {
    let config = EnvoyConfig::for_replicas(addrs)?.filter_settings(|all| {
        let cluster = &mut all["clusters"][0];
        cluster["mode"] = json!("sync");
        // Long enough for a busy machine; the tests of the deadline set their own.
        cluster["sync_deadline_ms"] = json!(1000);
        cluster["probe_timeout_ms"] = json!(1000);
        // Listed explicitly, so that the first request already has replicas to probe.
        cluster["endpoints"] = json!(addrs.iter().map(ToString::to_string).collect::<Vec<_>>());
        for (key, value) in settings.as_object().expect("an object") {
            cluster[key] = value.clone();
        }
    });
    Ok(config)
}

fn start(addrs: &[SocketAddr], settings: Value) -> Result<Envoy> {
    Envoy::start(sync_config(addrs, settings)?)
}

fn user_requests(backend: &Backend) -> usize {
    backend.seen().iter().filter(|seen| !is_probe(seen)).count()
}

/// Asserts that no VM of `envoy` has crashed.
#[track_caller]
fn assert_no_crash(envoy: &Envoy) {
    let log = envoy.log();
    assert!(!log.contains("panicked") && !log.contains("Function: proxy_on"), "{log}");
    let reloads = envoy.stats().expect("stats");
    let reloads: Vec<_> = reloads.iter().filter(|(name, n)| name.contains("vm_reload") && **n > 0).collect();
    assert!(reloads.is_empty(), "{reloads:?}");
}
