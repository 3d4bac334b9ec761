//! What the two sides exchange.
//!
//! | module | defines |
//! |---|---|
//! | [`report`] | how a load report looks on the wire |
//! | [`load`] | the parts of a report that a choice needs |
//! | [`probe`] | which requests are probes, and how they are answered |
//! | [`hint`] | what a probe tells the replica about the query |
//! | [`headers`] | how a report is found among the headers of a message |
//! | [`orca`] | how an ORCA report presents the load |

pub mod headers;
pub mod hint;
pub mod load;
pub mod orca;
pub mod probe;
pub mod report;
