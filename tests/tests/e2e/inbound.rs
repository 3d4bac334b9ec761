//! The inbound role: an Envoy beside each replica reports for it, without an agent.

mod capacity;
mod counting;
mod reports;
mod steering;

use std::net::{SocketAddr, TcpListener};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;
use http::HeaderMap;
use prequal_testbed::{Backend, Client, Envoy, EnvoyConfig, Response, eventually};
use serde_json::{Value, json};

use crate::support::PROBE_PATH;

const MS: fn(u64) -> Duration = Duration::from_millis;

/// The shipped inbound configuration with two workers.
fn beside(replica: &Backend) -> Result<EnvoyConfig> {
    Ok(EnvoyConfig::inbound(replica.addr())?.concurrency(2))
}

fn with(config: EnvoyConfig, settings: &Value) -> EnvoyConfig {
    config.filter_text(&settings.to_string())
}

/// A report of the inbound role.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Report {
    rif: u64,
    latency_us: Option<u64>,
    endpoint: String,
    /// The fields after the endpoint.
    rest: String,
}

/// The only report in `headers`.
fn report_in(headers: &HeaderMap) -> Result<Report> {
    let all: Vec<_> = headers.get_all("x-prequal-load").iter().collect();
    anyhow::ensure!(all.len() == 1, "{} reports in {headers:?}", all.len());
    let mut fields = all[0].to_str()?.splitn(4, ';');
    let mut next = || fields.next().unwrap_or_default();
    let (rif, latency) = (next().parse()?, next());
    let latency_us = if latency.is_empty() { None } else { Some(latency.parse()?) };
    Ok(Report { rif, latency_us, endpoint: next().into(), rest: next().into() })
}

/// Probes over a new connection, so that any worker may answer.
fn probe(addr: SocketAddr) -> Result<Report> {
    let reply = Client::new(addr).get(PROBE_PATH)?;
    anyhow::ensure!(reply.status == 200, "{}: {}", reply.status, reply.text());
    report_in(&reply.headers)
}

/// Probes over several connections, so that both workers answer.
fn probes(addr: SocketAddr) -> Vec<u64> {
    (0..12).map(|_| probe(addr).expect("a report").rif).collect()
}

/// Sends `count` requests at once, each over a new connection.
fn hold(
    addr: SocketAddr,
    count: usize,
    http2: bool,
    path: &'static str,
) -> Vec<JoinHandle<Result<Response>>> {
    let client = move || if http2 { Client::http2(addr) } else { Client::new(addr) };
    (0..count).map(|_| std::thread::spawn(move || client().get(path))).collect()
}

/// Waits until both workers report `rif`.
#[track_caller]
fn wait_for_rif(addr: SocketAddr, rif: u64, limit: Duration) {
    let start = Instant::now();
    loop {
        let reported = probes(addr);
        if reported.iter().all(|reported| *reported == rif) {
            return;
        }
        assert!(start.elapsed() < limit, "not {rif} in flight within {limit:?}, but {reported:?}");
    }
}

/// Requests in flight in each slot that has any.
fn slots(envoy: &Envoy) -> Result<Vec<u64>> {
    let found = envoy.inbound(envoy.addr())?;
    Ok(found.iter().filter(|(name, n)| name.starts_with("in_flight.") && **n > 0).map(|(_, n)| *n).collect())
}

/// Waits until exactly `count` requests have ended with `result`.
#[track_caller]
fn wait_for_count(envoy: &Envoy, result: &str, count: u64) {
    let name = format!("requests.{result}");
    eventually(&format!("{count} of {name}"), Duration::from_secs(5), || {
        (envoy.inbound(envoy.addr()).ok()?.get(&name).copied().unwrap_or(0) == count).then_some(())
    });
}

/// A free port, for an address that must be known before Envoy starts.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn on_port(config: EnvoyConfig, port: u16) -> EnvoyConfig {
    config.edit(|config| config.listener_mut()["address"]["socket_address"]["port_value"] = json!(port))
}
