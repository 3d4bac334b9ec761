//! The server side of Prequal: counts requests in flight for any backend, and answers probes.
//!
//! Use it in one of two ways:
//! - as a process, `probe-agent`: a reverse proxy in front of one backend (`Agent`; Cargo features `proxy`, `tls` and
//!   `plb`, all on by default);
//! - inside an application built on tower: [`layer::PrequalLayer`], which needs none of these features.
//!
//! In both, a [`load::Load`] counts the requests, and [`body::TrackedBody`] records how each of them ends. The latency
//! estimator is [`prequal_core::server::tracker`]. This crate does not choose replicas: clients do.
//!
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(clippy::large_futures)]
#![cfg_attr(not(feature = "proxy"), allow(dead_code, reason = "the layer shares modules with the proxy"))]

#[cfg(feature = "proxy")]
mod accept;
#[cfg(feature = "proxy")]
mod access;
#[cfg(feature = "proxy")]
mod admin;
#[cfg(feature = "proxy")]
mod another;
#[cfg(feature = "proxy")]
pub mod backend_orca;
#[cfg(feature = "proxy")]
mod backend_stream;
pub mod body;
#[cfg(feature = "proxy")]
pub mod cli;
#[cfg(feature = "proxy")]
pub mod config;
#[cfg(feature = "proxy")]
mod conn;
#[cfg(feature = "proxy")]
mod drive;
#[cfg(feature = "proxy")]
mod exposition;
#[cfg(feature = "proxy")]
mod headers;
pub mod hint;
pub mod layer;
#[cfg(feature = "proxy")]
mod leash;
#[cfg(feature = "proxy")]
mod lines;
pub mod load;
#[cfg(feature = "proxy")]
pub mod log;
mod names;
#[cfg(feature = "proxy")]
mod oob;
pub mod orca;
#[cfg(feature = "proxy")]
mod phase;
#[cfg(all(feature = "proxy", not(feature = "plb")))]
#[path = "no_plb.rs"]
mod plb;
#[cfg(feature = "plb")]
mod plb;
mod probe;
#[cfg(feature = "proxy")]
mod process;
#[cfg(feature = "proxy")]
mod proxy;
#[cfg(feature = "proxy")]
mod ready;
#[cfg(feature = "proxy")]
mod received;
#[cfg(feature = "tls")]
mod reload;
mod reporter;
#[cfg(feature = "proxy")]
mod server;
#[cfg(feature = "proxy")]
mod socket;
#[cfg(all(feature = "proxy", not(feature = "tls")))]
#[path = "no_tls.rs"]
mod tls;
#[cfg(feature = "tls")]
mod tls;
#[cfg(feature = "proxy")]
mod traffic;
#[cfg(feature = "proxy")]
mod upload;
#[cfg(feature = "proxy")]
mod upstream;
pub mod utilization;

#[cfg(feature = "proxy")]
pub use server::{Addrs, Agent, AgentError};
#[cfg(feature = "proxy")]
pub use tls::TlsError;
