//! The steering header, as the shim reads it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use prequal_core::config::Shim;
use prequal_core::endpoint::{Endpoint, MAX_TEXT};
use prequal_core::exceptions::flights::Flight;
use prequal_core::pool::Pick;
use prequal_core::report::HEADER_DEST;
use proxy_wasm::hostcalls;
use proxy_wasm::types::MapType;

/// Where a request goes.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) pick: Pick,
    /// Where a retry goes; only the `override_host` shim can be told.
    pub(crate) runner_up: Option<Endpoint>,
    /// The request, on its way to the chosen replica; `None` when nothing watches it.
    pub(crate) flight: Option<Flight>,
}

/// Writes the choice on the request that is the effective context.
pub(crate) fn steer(shim: Shim, choice: Option<&Choice>) {
    let replica = choice.and_then(|choice| choice.pick.replica);
    let runner_up = choice.and_then(|choice| choice.runner_up);
    let value = replica.map(|replica| {
        let mut value = String::with_capacity(2 * MAX_TEXT + 1);
        replica.append_to(&mut value);
        match (shim, runner_up) {
            (Shim::StatefulSession, _) => return STANDARD.encode(value),
            (Shim::OverrideHost, None) => {}
            (Shim::OverrideHost, Some(next)) => {
                value.push(',');
                next.append_to(&mut value);
            }
        }
        value
    });
    // Without a choice the header is removed: a client's own must never steer.
    let _ = hostcalls::set_map_value(MapType::HttpRequestHeaders, HEADER_DEST, value.as_deref());
}
