//! The agent over real sockets: inside this process, and as the program that operators start.
//!
//! All modules are one program, so that it links once; each module has one theme. `floods.rs` is a separate program: it
//! raises the limit of file descriptors of its process, and its clients must not wait for other tests.

#[path = "../common/mod.rs"]
mod common;

mod authority;
mod backend_stream;
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
mod reuse;
mod stalled;
mod tls;
mod unix;
