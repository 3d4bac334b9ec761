//! Prequal as a proxy-wasm HTTP filter: steers each request to the replica that `prequal-core` picks.
//!
//! This crate is an adapter: it contains only the calls to Envoy. Every rule of the algorithm lives in `prequal-core`.
//!
//! The outbound role, at the client's Envoy, picks replicas; it drives [`prequal_core::client`]. The [`inbound`] role,
//! at the server's Envoy, reports the load of a replica.
//!
//! - [`root`]: configuration, ticks, replies;
//! - [`stream`]: one request: the pick, the report on the response, the outcome;
//! - [`sync`]: synchronous mode, in which a request waits for its own probes;
//! - [`probes`]: every probe (owned by the root, so that no reply is lost);
//! - [`steer`]: the steering header, which names the picked replica;
//! - [`filter`]: the state that the root and the streams of one worker share;
//! - [`store`]: the state that all workers share, as blobs in Envoy's shared data;
//! - [`outcome`]: how a request ended, as Envoy describes it;
//! - [`metrics`]: counters and gauges;
//! - [`host`]: host calls, with every failure returned as data.
//!
//! A panic fails every request in flight on its worker, so nothing here may panic on input from outside.
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
