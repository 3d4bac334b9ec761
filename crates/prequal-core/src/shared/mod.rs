//! What both sides use.
//!
//! | module | defines |
//! |---|---|
//! | [`endpoint`] | the address of a replica |
//! | [`capacity`] | base latency and knee, and the latency that they predict |
//! | [`outcome`] | how a request ended |
//! | [`time`] | times and durations |
//! | [`blob`] | which bytes are valid state of this version |
//! | [`cas`] | how workers change that state without losing each other's changes |

pub mod blob;
pub mod capacity;
pub mod cas;
pub mod endpoint;
pub(crate) mod fnv;
pub(crate) mod in_flight;
pub mod outcome;
pub mod time;
