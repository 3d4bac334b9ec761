//! The Prequal algorithm without side effects: events go in, decisions come out.
//!
//! This crate is the only place that implements the rules of the paper (Wydrowski et al., NSDI '24, "Load is not
//! what you should balance"). The Envoy filter, the agent and the benchmarks are adapters around these types.
//! The crate reads no clock, draws no randomness of its own, performs no I/O and keeps no globals: callers pass
//! `now` and an `Rng`, so every decision can be replayed from its inputs.
//!
//! | module | decides |
//! |---|---|
//! | [`client`] | how one worker balances one cluster: the events, and how to react to each |
//! | [`pool`] | which replica serves a request, and when a report leaves the pool (§4) |
//! | [`ejection`] | which replicas are ejected, and when they return |
//! | [`reuse`] | how often one report is used: equation (1) |
//! | [`sync`] | which replica serves a request that probes first (§4) |
//! | [`hint`] | what a probe tells the replica about the query |
//! | [`policies`] | how the policies that Prequal is compared with choose a replica |
//! | [`members`] | which replicas exist and which are probed |
//! | [`tracker`] | what load a replica measures |
//! | [`capacity`] | how fast a replica is, and how many requests in flight saturate it |
//! | [`replica`], [`probe`] | what a replica reports, and how it answers probes |
//! | [`inbound`] | how the workers of an Envoy together report the load of one replica |
//! | [`failures`] | what share of its requests a replica fails |
//! | [`affinity`] | whether a replica reports less load to a query that it has cached data for |
//! | [`report`] | how a report looks on the wire |
//! | [`rates`], [`orca`] | how many requests end and fail per second, and how an ORCA report presents the load |
//! | [`load`] | which parts of a report a choice needs |
//! | [`blob`] | which bytes are valid state of this version |
//! | [`shared`] | how workers change that state without losing each other's changes |
//! | [`config`] | which settings are valid |
//!
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod affinity;
pub mod blob;
pub mod capacity;
pub mod client;
pub mod config;
pub mod ejection;
pub mod endpoint;
pub mod failures;
mod fnv;
pub mod hint;
mod in_flight;
pub mod inbound;
pub mod load;
pub mod members;
pub mod orca;
pub mod policies;
pub mod pool;
pub mod probe;
pub mod rates;
pub mod replica;
pub mod report;
pub mod reuse;
pub mod shared;
pub mod sync;
pub mod time;
pub mod tracker;
