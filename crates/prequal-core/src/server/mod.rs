//! The server's side: what load a replica measures, and what it reports.
//!
//! | module | decides |
//! |---|---|
//! | [`tracker`] | what load a replica measures: RIF and latency (§4) |
//! | [`capacity`] | how fast a replica is, and how many requests in flight saturate it |
//! | [`failures`] | what share of its requests a replica fails |
//! | [`rates`] | how many requests end and fail per second |
//! | [`affinity`] | whether a replica reports less load to a query that it has cached data for |
//! | [`replica`] | what a replica reports: all of the above together |
//! | [`inbound`] | how the workers of an Envoy together report the load of one replica |

pub mod affinity;
pub mod capacity;
pub mod failures;
pub mod inbound;
pub mod rates;
pub mod replica;
pub mod tracker;
