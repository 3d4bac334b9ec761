//! The steering header, in the form that the shim reads. The shim is the extension of Envoy that sends the request to
//! the host that the header names.

use prequal_core::client::Request;
use prequal_core::client::settings::Shim;
use prequal_core::shared::endpoint::MAX_TEXT;
use prequal_core::wire::report::HEADER_DEST;

use crate::host;

/// Writes the choice to the request that is the effective context.
pub(crate) fn steer(shim: Shim, request: &Request) {
    let value = request.pick.replica.map(|replica| {
        let mut value = Vec::with_capacity(2 * MAX_TEXT + 1);
        replica.append_to(&mut value);
        match (shim, request.runner_up) {
            (Shim::StatefulSession, _) => return base64(&value),
            (Shim::OverrideHost, None) => {}
            (Shim::OverrideHost, Some(next)) => {
                value.push(b',');
                next.append_to(&mut value);
            }
        }
        value
    });
    // Without a choice the header is removed: a header that a client sent must never steer.
    host::set_request_header(HEADER_DEST, value.as_deref());
}

/// Encodes in base64 (RFC 4648). This code runs for every request. A library would add code for variants that are not
/// needed.
fn base64(bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |n| u32::from(group.get(n).copied().unwrap_or(0));
        let word = byte(0) << 16 | byte(1) << 8 | byte(2);
        for n in 0..4 {
            let digit = ALPHABET.get((word >> (18 - 6 * n) & 63) as usize).filter(|_| n <= group.len());
            text.push(*digit.unwrap_or(&b'='));
        }
    }
    text
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_follows_rfc_4648() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("~~~???", "fn5+Pz8/"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text.as_bytes(), "RFC 4648, section 10");
        }
    }
}
