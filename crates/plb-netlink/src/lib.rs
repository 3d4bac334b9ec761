//! The host side of PLB (Protective Load Balancing) on Linux: flow labels, the kernel's PLB knobs, repathing.
//!
//! A host changes the path of a connection by changing its IPv6 flow label, which a fabric's ECMP hash includes. Linux
//! does this after a retransmission timeout and, from 6.2 on, for congestion (DCTCP). This crate reads and sets
//! everything that decides whether Linux can do so ([`sysctl`], [`sock`], [`flowlabel`], [`route`], [`fabric`]). It
//! shows what happened ([`diag`], [`tcpinfo`], [`counters`], [`repath`]). It also repaths from user space where the
//! kernel does not repath for congestion itself ([`detector`], [`tracker`], [`relabel`], [`daemon`]).
//!
//! **A common mistake:** for TCP, an *explicit* flow label switches repathing off. Leave automatic labels on; set
//! explicit ones only to pin a connection.
//!
//! All functions act on the network namespace of the calling thread; [`netns`] enters another one. Calls block; there
//! is no async runtime. The only `unsafe` is in `sys`. The crate does not depend on the other crates of this project.
//!
#![doc = include_str!("../README.md")]

pub mod bpf;
pub mod counters;
pub mod daemon;
pub mod detector;
pub mod diag;
pub mod envoy;
mod error;
pub mod fabric;
pub mod flowlabel;
pub mod guardian;
pub mod holders;
pub mod link;
pub mod lint;
#[cfg(test)]
mod mutation;
mod netlink;
pub mod netns;
pub mod pidfd;
pub mod pins;
pub mod prepare;
pub mod relabel;
pub mod repath;
pub mod rights;
pub mod route;
pub mod sock;
mod sys;
pub mod sysctl;
pub mod tcpinfo;
pub mod tracker;

pub use error::{Error, Result};
pub use sys::{ignore_interrupts, interrupted, random_u32, watch_interrupts};
