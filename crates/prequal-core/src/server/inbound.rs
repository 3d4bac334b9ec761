//! Counts the requests of one replica across the workers of one Envoy, even if one of their Wasm VMs dies.
//!
//! Each worker counts its own requests in its own slot ([`slots`]), so no count depends on a worker that no longer
//! exists. It appends the results of its requests to a log that all workers read ([`ended`]), so the estimate is the
//! same on every worker that a probe can reach.

pub mod ended;
pub mod slots;
