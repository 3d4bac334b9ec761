//! The client's side. One [`Balancer`] makes the decisions for one upstream cluster on one worker.
//!
//! An embedder (the Envoy filter, the native module, the simulator) drives it with events and acts on its decisions:
//!
//! | event | action of the embedder |
//! |---|---|
//! | a request begins | calls [`Balancer::begin`], writes the choice on the request, sends the probes that are due |
//! | a request is to wait for its own probes | calls [`Balancer::ask`], then [`Balancer::begin`] with the answers |
//! | the client has sent the whole request | calls [`Balancer::completed`], unless it was complete at the beginning |
//! | the response headers arrive | calls [`Balancer::response`] |
//! | the request has ended | calls [`Balancer::ended`] |
//! | probes are due | calls [`Balancer::targets`], sends the probes |
//! | a reply to a probe arrives | calls [`Balancer::replied`] |
//! | a quarter of a second has passed | calls [`Balancer::tick`] |
//!
//! Updates from requests and probes wait in the worker and are applied in the same read-modify-write as the next pick,
//! so a request costs one transaction on the shared state (`docs/design/adr/0001-root-owned-probes.md`). The embedder
//! decides where that state is stored ([`store`]) and what is counted ([`Counters`]). Nothing here locks: the threads
//! of an embedder either share a balancer behind a lock, or each have their own balancer over a store that is safe to
//! share, by compare-and-swap or a lock.
//!
//! | module | decides |
//! |---|---|
//! | [`Balancer`] | how one worker reacts to each event |
//! | [`pool`] | which replica serves a request, and when a report leaves the pool (§4) |
//! | [`pool::reuse`] | how often one report is used: equation (1) |
//! | [`sync_mode`] | when a request that probes first has waited long enough (§4) |
//! | [`ejection`] | which replicas are ejected, and when they return |
//! | [`members`] | which replicas exist and which are probed |
//! | [`policies`] | how the rules of other load balancers choose a replica |
//! | [`settings`] | the settings of one upstream cluster |
//! | [`store`] | what a host's storage of shared state must provide |
//! | [`reply`] | which replies to probes have a usable report |
//! | [`labels`] | the label values of the metrics |

mod balancer;
mod count;
pub mod ejection;
pub mod labels;
pub mod members;
pub mod policies;
pub mod pool;
pub mod reply;
mod rules;
pub mod settings;
pub mod store;
pub mod sync_mode;

pub use balancer::{Balancer, Request, Tick, Witness};
pub use count::{Class, Count, Counters, ProbeEnd, ReportEnd};
