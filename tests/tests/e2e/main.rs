//! End-to-end tests: a real Envoy with the shipped configuration, the built filter, real agents. Each test asserts the
//! effect and the counter that explains it.
//!
//! All are in one program, so that it is linked only once, with one module for each theme.

mod agentless;
mod capacity;
mod chain;
mod clients;
mod edge;
mod ejection;
mod failures;
mod hosts;
mod inbound;
mod lifecycle;
mod native;
mod native_churn;
mod native_shares;
mod orca;
mod probing;
mod protocols;
mod restarts;
mod rules;
mod steering;
mod support;
mod sync;
mod upgrade;
