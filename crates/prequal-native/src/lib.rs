//! Prequal as a dynamic module: native code that a stock Envoy loads.
//!
//! The balancer is that of the WebAssembly filter ([`prequal_core::client`]); this crate is an adapter. It has five
//! roles, each an extension of Envoy ([`attempt`] has two of them):
//!
//! - [`policy`]: the load-balancing policy of a cluster, which chooses a host for each attempt;
//! - [`attempt`]: an HTTP filter in the cluster's upstream chain, which reads the report on each response, and an
//!   access logger of the router's attempts, which shows why an attempt ended without a response;
//! - [`prober`]: a bootstrap extension, which sends the probes from the main thread;
//! - [`detour`]: an HTTP filter of the listener, which sends requests to hosts that are not healthy if Envoy's own
//!   policies would do so. It is optional.
//!
//! All unsafe code is in three files: [`abi`] has the declarations, [`envoy`] has the wrappers of what Envoy provides,
//! and [`hooks`] has the functions that Envoy calls. The other modules:
//!
//! - [`worker`]: one cluster on one thread, and what the threads share about it;
//! - [`store`]: the balancer's state in this process's memory, without locks;
//! - [`hosts`]: Envoy's host sets: priorities, localities, weights, health; [`shares`]: how Envoy shares requests among
//!   them; [`localities`]: the number of a host's locality;
//! - [`metrics`]: counters and gauges, under the filter's names;
//! - [`clock`]: the time.
//!
//! A panic must not cross the ABI, because it would end Envoy; see [`hooks`].
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]
#![deny(unsafe_code)]
#![allow(missing_docs, reason = "the only public items are the ABI's entry points")]

mod detour;
mod hosts;
mod localities;
mod shares;
mod store;

// The following modules call Envoy, and unit tests have no Envoy to link with. The tests of `tests/` load the module
// into a real one.
#[cfg(not(test))]
#[allow(unsafe_code, reason = "the declarations of the ABI")]
mod abi;
#[cfg(not(test))]
mod attempt;
#[cfg(not(test))]
mod clock;
#[cfg(not(test))]
#[allow(unsafe_code, reason = "the wrappers of the ABI, each with its invariant")]
mod envoy;
#[cfg(not(test))]
#[allow(unsafe_code, reason = "the hooks of the ABI, each with its invariant")]
mod hooks;
#[cfg(not(test))]
mod metrics;
#[cfg(not(test))]
mod policy;
#[cfg(not(test))]
mod prober;
#[cfg(not(test))]
mod worker;
