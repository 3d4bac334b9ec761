//! Generates `socket_options` for an unmodified Envoy, so that its sockets can be repathed.
//!
//! Known behaviour of Envoy 1.40:
//! - Upstream options need `STATE_PREBIND`; `STATE_BOUND` is silently ignored.
//! - An option that fails makes the upstream connection fail.
//! - Accepted connections inherit a listener's options, which matters because servers send most of the data.
//! - Envoy cannot send a chosen flow label, even if the label is leased.

use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::sock;
use crate::{Result, sysctl};

/// Place for the options in Envoy's configuration.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Side {
    /// Under a cluster: connections that Envoy opens.
    Cluster,
    /// Under a listener: connections that Envoy accepts.
    Listener,
}

/// Checks that the calling thread's namespace has this congestion control; returns warnings.
///
/// # Errors
/// If the namespace does not have it; Envoy's connections would fail.
pub fn check(congestion: &str) -> Result<Vec<String>> {
    sock::check_congestion_name(congestion)?;
    if !sysctl::congestion_controls()?.iter().any(|name| name == congestion) {
        return Err(sock::unknown_congestion(congestion));
    }
    let mut warnings = Vec::new();
    if !sysctl::unrestricted_congestion_controls()?.iter().any(|name| name == congestion) {
        warnings.push(format!(
            "`{congestion}` is restricted: run Envoy with CAP_NET_ADMIN, or add it to \
             net.ipv4.tcp_allowed_congestion_control; otherwise every connection fails"
        ));
    }
    if sock::WITH_PLB_HOOKS.contains(&congestion) {
        warnings.push(format!(
            "the peers' listeners must use {congestion} too, otherwise they refuse ECN and PLB sees no congestion"
        ));
    } else {
        warnings.push(format!(
            "`{congestion}` has no PLB hooks: the kernel repaths only after timeouts; `plb run` also repaths for congestion"
        ));
    }
    Ok(warnings)
}

/// Returns the YAML, including its key. Without a congestion control the sockets keep the host's default.
pub fn socket_options(side: Side, congestion: Option<&str>) -> String {
    let (key, indent) = match side {
        Side::Cluster => ("upstream_bind_config:\n  socket_options:", "  "),
        Side::Listener => ("socket_options:", ""),
    };
    let mut yaml = format!("{key}\n");
    let mut option = |description: &str, level: i32, name: i32, value: &str, state: &str| {
        // Writing to a String cannot fail.
        let _ = writeln!(
            yaml,
            "{indent}- {{description: {description}, level: {level}, name: {name}, {value}, state: {state}}}"
        );
    };
    if let Some(congestion) = congestion {
        let state = match side {
            Side::Cluster => "STATE_PREBIND",
            Side::Listener => "STATE_LISTENING",
        };
        let value = format!("buf_value: {}", STANDARD.encode(congestion));
        option(
            &format!("congestion control {congestion}"),
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            &value,
            state,
        );
    }
    option("repath after timeouts and by PLB", libc::SOL_SOCKET, 74, "int_value: 1", "STATE_PREBIND");
    option("automatic flow label", libc::IPPROTO_IPV6, 70, "int_value: 1", "STATE_PREBIND");
    yaml
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_yaml_has_envoys_format() {
        assert_eq!(
            socket_options(Side::Cluster, Some("dctcp")),
            "upstream_bind_config:\n  socket_options:\n  - {description: congestion control dctcp, level: 6, name: \
             13, buf_value: ZGN0Y3A=, state: STATE_PREBIND}\n  - {description: repath after timeouts and by PLB, \
             level: 1, name: 74, int_value: 1, state: STATE_PREBIND}\n  - {description: automatic flow label, level: \
             41, name: 70, int_value: 1, state: STATE_PREBIND}\n"
        );
        let listener = socket_options(Side::Listener, Some("reno"));
        assert!(listener.starts_with("socket_options:\n- {"));
        assert!(listener.contains("buf_value: cmVubw==, state: STATE_LISTENING"));
        assert!(!socket_options(Side::Listener, None).contains("congestion"));
    }
}
