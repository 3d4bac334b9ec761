//! The client's side as a whole: one [`Balancer`] makes the decisions for one upstream cluster on one worker.
//!
//! A host (the Envoy filter, the simulator) drives it with events and acts on its decisions:
//!
//! | event | action of the host |
//! |---|---|
//! | a request begins | calls [`Balancer::begin`], writes the choice on the request, sends the probes that are due |
//! | a request is to wait for its own probes | calls [`Balancer::ask`], then [`Balancer::begin`] with the answers |
//! | the client has sent the whole request | calls [`Balancer::completed`], unless it was whole at the beginning |
//! | the response headers arrive | calls [`Balancer::response`] |
//! | the request has ended | calls [`Balancer::ended`] |
//! | probes are due | calls [`Balancer::targets`], sends the probes |
//! | a reply to a probe arrives | calls [`Balancer::replied`] |
//! | a quarter of a second has passed | calls [`Balancer::tick`] |
//!
//! Updates from requests and probes wait in the worker and are applied in the same read-modify-write as the next pick, so
//! a request costs one transaction on the shared state (`docs/adr/0001-root-owned-probes.md`). The host decides where that
//! state is stored ([`store`]) and what is counted ([`Counters`]). Nothing here locks: the threads of a host either share
//! a balancer behind a lock, or each have their own over a store that locks.

mod balancer;
mod count;
mod doubt;
pub mod headers;
mod journal;
pub mod labels;
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
