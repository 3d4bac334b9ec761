//! End to end: a real Envoy with the shipped configuration, the built filter, real agents. Each test asserts
//! the effect and the counter that explains it.
//!
//! One program, so that it links once; one module for each theme.

mod capacity;
mod chain;
mod clients;
mod edge;
mod ejection;
mod failures;
mod hosts;
mod inbound;
mod lifecycle;
mod orca;
mod probing;
mod protocols;
mod restarts;
mod rules;
mod steering;
mod support;
mod sync;
mod upgrade;
