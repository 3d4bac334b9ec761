//! The client's side as a whole: one [`Balancer`] decides for one upstream cluster on one worker.
//!
//! A host (the Envoy filter, the simulator) drives it with events and does what it says:
//!
//! | event | what the host does |
//! |---|---|
//! | a request begins | [`Balancer::begin`], writes the choice on the request, sends the probes that are due |
//! | it is to wait for probes of its own | [`Balancer::ask`], and [`Balancer::begin`] with the answers |
//! | its client has sent all of it | [`Balancer::completed`], unless it began so |
//! | its response's headers come | [`Balancer::response`] |
//! | it has ended | [`Balancer::ended`] |
//! | probes are due | [`Balancer::targets`], sends them |
//! | a reply comes | [`Balancer::replied`] |
//! | a quarter of a second has passed | [`Balancer::tick`] |
//!
//! What requests and probes tell waits in the worker and is applied in the same read-modify-write as the next
//! pick, so a request costs one transaction on the shared state (`docs/adr/0001-root-owned-probes.md`). Where that state lies
//! is the host's business ([`store`]), and what it counts ([`Counters`]). Nothing here locks: the threads of
//! a host share a balancer behind a lock, or have one each over a store that locks.

mod balancer;
mod count;
mod doubt;
mod journal;
mod membership;
mod probing;
mod request;
mod rules;
pub mod store;
mod waits;

pub use balancer::{Balancer, Tick};
pub use count::{Class, Count, Counters, ProbeEnd, ReportEnd};
pub use probing::Reply;
pub use request::{Request, Witness};
pub use waits::{Wait, Waits};

#[cfg(test)]
mod tests;
