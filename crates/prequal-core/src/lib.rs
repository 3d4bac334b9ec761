//! The Prequal algorithm without side effects: events go in, decisions come out.
//!
//! This crate is the only place that implements the rules of the paper (Wydrowski et al., NSDI '24, "Load is not what
//! you should balance"). The Envoy filter, the agent and the benchmarks are adapters around these types. The crate
//! reads no clock, draws no randomness of its own, performs no I/O and keeps no globals: callers pass `now` and an
//! `Rng`, so every decision can be replayed from its inputs.
//!
//! There is one module for each side, and there are modules for what the two sides share. [`client`] and [`server`] do
//! not use each other.
//!
//! | module | contents |
//! |---|---|
//! | [`client`] | which replica serves a request, and which replicas are probed |
//! | [`server`] | what load a replica measures, and what it reports |
//! | [`wire`] | what the two sides exchange: reports, probes, hints, headers |
//! | [`shared`] | what both sides use: endpoints, time, outcomes, state that workers share |
//! | [`config`] | which settings are valid |
//!
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod client;
pub mod config;
pub mod server;
pub mod shared;
pub mod wire;
