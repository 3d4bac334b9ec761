//! The agent over real sockets: in this process, and as the program that operators start.
//!
//! One program, so that it links once; one module for each theme. `floods.rs` is a program of its own: it raises this
//! process' limit of descriptors, and its clients must not wait for other tests.

#[path = "../common/mod.rs"]
mod common;

mod authority;
mod capacity;
mod certificates;
mod drain;
mod edges;
mod features;
mod hostile;
mod http2;
mod limits;
mod observe;
mod orca;
mod pairs;
mod plb;
mod process;
mod ready;
mod replica;
mod requests;
mod tls;
mod unix;
