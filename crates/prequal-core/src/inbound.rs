//! The workers of one Envoy that serve one replica: how they count together, and go on when one of their VMs dies.
//!
//! Each worker counts its own requests in a place of its own ([`slots`]), so that no count depends on a worker that is no
//! more, and appends what its requests told to a log that all of them read ([`ended`]), so that the estimate is the same
//! whichever worker a probe meets.

pub mod ended;
pub mod slots;
