//! Makes the caller's own socket repathable before it connects or listens, as far as this host allows.

use std::os::fd::AsFd;

use crate::sock::{self, TxRehash};
use crate::sysctl::{self, PlbParams};

/// Sets congestion control (DCTCP, which also enables ECN), `SO_TXREHASH` and automatic labels. Accepted connections
/// inherit them from their listener. `ipv6`: whether the connection uses IPv6 on the wire.
///
/// Returns the settings that failed and any other obstacles, one sentence each. If the list is empty, nothing that was
/// checked on this host prevents PLB; the peer must also accept ECN. The socket is usable in any case.
pub fn prepare(socket: &impl AsFd, ipv6: bool) -> Vec<String> {
    if !ipv6 {
        return vec!["IPv4 has no flow label: this socket cannot be repathed".to_owned()];
    }
    let mut obstacles = Vec::new();
    let wanted = sock::WITH_PLB_HOOKS[0];
    if let Err(error) = sock::set_congestion(socket, wanted) {
        obstacles.push(error.to_string());
        // DCTCP requests ECN by itself. Other congestion controls do so only if the host is configured to, and no
        // socket option changes that.
        match sysctl::read_number("net.ipv4.tcp_ecn") {
            Ok(Some(1)) => {}
            Ok(value) => obstacles.push(format!(
                "no ECN without {wanted}: net.ipv4.tcp_ecn={}; set it to 1, or `plb route set PREFIX --ecn on`",
                value.unwrap_or_default()
            )),
            Err(error) => obstacles.push(error.to_string()),
        }
    }
    obstacles.extend(sock::set_txrehash(socket, TxRehash::On).err().map(|error| error.to_string()));
    obstacles.extend(sock::set_auto_label(socket, true).err().map(|error| error.to_string()));
    match PlbParams::read() {
        Ok(params) if params.enabled => {}
        Ok(_) => obstacles.push("net.ipv4.tcp_plb_enabled is off: `plb set --enabled on`".to_owned()),
        Err(error) => obstacles.push(error.to_string()),
    }
    obstacles
}
