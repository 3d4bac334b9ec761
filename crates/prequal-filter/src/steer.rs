//! The steering header, as the shim reads it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use prequal_core::client::Request;
use prequal_core::config::Shim;
use prequal_core::endpoint::MAX_TEXT;
use prequal_core::report::HEADER_DEST;
use proxy_wasm::types::MapType;

use crate::host;

/// Writes the choice on the request that is the effective context.
pub(crate) fn steer(shim: Shim, request: &Request) {
    let value = request.pick.replica.map(|replica| {
        let mut value = String::with_capacity(2 * MAX_TEXT + 1);
        replica.append_to(&mut value);
        match (shim, request.runner_up) {
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
    host::set_header(MapType::HttpRequestHeaders, HEADER_DEST, value.as_deref());
}
