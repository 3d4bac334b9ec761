//! The server side of Prequal: counts requests in flight beside any backend, and answers probes.
//!
//! Two ways to use it:
//! - as a process, `probe-agent`: a reverse proxy in front of one backend ([`Agent`]);
//! - inside an application built on tower: [`layer::PrequalLayer`].
//!
//! Both count on a [`load::Load`] and end requests by [`body::TrackedBody`]; the estimator itself is
//! [`prequal_core::tracker`]. Nothing here chooses a replica: that is the client's side.

#![forbid(unsafe_code)]

mod admin;
pub mod body;
pub mod cli;
pub mod config;
mod conn;
mod headers;
pub mod hint;
pub mod layer;
pub mod load;
mod plb;
mod probe;
mod proxy;
mod ready;
mod reload;
mod reporter;
mod server;
mod tls;
mod upload;
mod upstream;
pub mod utilization;

pub use server::{Addrs, Agent, AgentError};
pub use tls::TlsError;
