//! The Prequal algorithm, pure: events in, decisions out.
//!
//! Every rule of the paper (Wydrowski et al., NSDI '24, "Load is not what you should balance") is written
//! down here and nowhere else; the Envoy filter, the agent and the benchmarks are adapters around these types.
//! The crate reads no clock, draws no randomness of its own, performs no I/O and keeps no globals: callers pass
//! `now` and an `Rng`, so every decision can be replayed from its inputs.
//!
//! | module | decides |
//! |---|---|
//! | [`client`] | everything of one cluster on one worker: the events, and what follows from them |
//! | [`pool`] | which replica serves a request, and when a report leaves the pool (§4) |
//! | [`ejection`] | which replicas are ejected, and when they are back |
//! | [`reuse`] | equation (1) |
//! | [`sync`] | which replica serves when a request asks first (§4) |
//! | [`hint`] | what a probe tells of the query |
//! | [`policies`] | what Prequal is compared with |
//! | [`members`] | which replicas exist and which are probed |
//! | [`tracker`] | what a replica says of itself |
//! | [`capacity`] | how fast a replica is, and from how many requests on they wait |
//! | [`replica`], [`probe`] | and how it is told |
//! | [`inbound`] | how the workers of an Envoy tell it together |
//! | [`failures`] | which share of its requests it fails |
//! | [`affinity`] | whether it says so differently to a query that it is ready for |
//! | [`report`] | the wire form of that |
//! | [`rates`], [`orca`] | how fast requests come and fail, and the same load in the format of ORCA |
//! | [`load`] | what of it a choice needs |
//! | [`blob`] | which bytes are state of this version |
//! | [`shared`] | how workers change it without losing each other's changes |
//! | [`config`] | settings that cannot be invalid |
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
