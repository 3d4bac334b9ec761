//! Fixtures for everything that runs against a real Envoy: the tests beside this file and the benchmarks in
//! `bench/`.
//!
//! * [`Backend`]: an HTTP server in this process that answers as specified ([`Reply`]) and counts.
//! * [`Killable`]: the same in a process of its own, which can be killed.
//! * [`Agent`]: the real `probe-agent` as a child process.
//! * [`Fleet`]: backends, each behind its agent.
//! * [`EnvoyConfig`]: the shipped static configuration, with ports, endpoints and settings replaced.
//! * [`Envoy`]: a real Envoy running such a configuration; its statistics and CPU time.
//! * [`MinimalRoot`]: a root folder for Envoy, as in a minimal image.
//! * [`Prometheus`]: a real Prometheus that scrapes Envoys and agents.
//! * [`Client`]: HTTP/1.1 or HTTP/2 requests, blocking.
//! * [`bed!`] and [`needs!`]: skip a test with one line that says what the machine lacks.
//!
//! All calls block the calling thread and may be made from any thread, even inside another tokio runtime (there they
//! block a worker). The fixtures share one background runtime, see [`handle`]. The operating system chooses the ports.
//! Readiness is polled ([`eventually`]); the fixtures never sleep for it.
//!
//! Nothing here decides whether a result is good: that is up to the tests and `bench/`.

mod agent;
mod backend;
mod client;
mod config;
mod counters;
mod discovery;
mod envoy;
mod fleet;
mod killable;
pub mod manifests;
mod minimal;
mod needs;
mod process;
mod prometheus;
mod reply;
mod runtime;

pub use agent::{Agent, AgentOptions};
pub use backend::Backend;
pub use client::{Client, Request, Response, WebSocket, assert_no_prequal_headers, http_get};
pub use config::{
    EnvoyConfig, FILTER_NAME, Policy, SHIM_NAME, crash_module, dist_dir, envoy_binary,
    envoy_loads_native_modules, envoy_runs_wasm, lb_endpoint, target_dir, wasm_module, workspace_root,
};
pub use counters::Prequal;
pub use envoy::{Envoy, IDLE_PROBES, PARENT_SHUTDOWN_S};
pub use fleet::{Fleet, Replica};
pub use killable::Killable;
pub use minimal::MinimalRoot;
pub use needs::{missing, missing_descriptors, missing_file, missing_ipv6, missing_program, skip};
pub use process::cpu_time;
pub use prometheus::{Prometheus, missing_prometheus, prometheus_tool};
pub use reply::{Body, Reply, Seen};
pub use runtime::{block_on, eventually, handle};
