//! Prequal as a proxy-wasm HTTP filter: steers each request to the replica that `prequal-core` picks.
//!
//! This crate is an adapter. Every rule of the algorithm lives in `prequal-core`, where [`prequal_core::client`] is driven from
//! here; here are only the calls to Envoy:
//!
//! The outbound role, at the client's Envoy, picks replicas; the [`inbound`] role, at the server's, reports for one.
//!
//! - [`root`]: configuration, ticks, replies;
//! - [`stream`]: one request: the pick, the report on the response, the outcome;
//! - [`sync`]: requests that wait for probes of their own;
//! - [`probes`]: every probe (owned by the root, so that no reply is lost);
//! - [`steer`]: the steering header;
//! - [`filter`]: what root and streams share on one worker;
//! - [`store`]: the blobs in shared data, which all workers share;
//! - [`outcome`]: what Envoy says of a request;
//! - [`metrics`]: counters and gauges;
//! - [`host`]: host calls, every failure returned as data.
//!
//! A panic costs every request in flight on its worker, so nothing here may panic on anything from outside.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]
#![allow(missing_docs, reason = "the only public items are the ABI's entry points, written by the SDK")]

mod filter;
mod host;
mod inbound;
mod metrics;
mod outcome;
mod probes;
mod root;
mod steer;
mod store;
mod stream;
mod sync;

#[cfg(test)]
mod tests;

proxy_wasm::main! {{
    proxy_wasm::set_log_level(proxy_wasm::types::LogLevel::Info);
    proxy_wasm::set_root_context(|id| Box::new(root::Root::new(id)));
}}
