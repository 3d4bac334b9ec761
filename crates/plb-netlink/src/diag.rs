//! Lists TCP sockets with their `tcp_info`, by `NETLINK_SOCK_DIAG`.
//!
//! The list contains neither flow labels nor `SO_TXREHASH`: [`crate::repath`] reads them from the socket itself.

use std::net::{IpAddr, SocketAddr};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use crate::tcpinfo::TcpInfo;
use crate::{Result, netlink};

/// Criteria by which sockets are selected.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Filter {
    /// Whether to include IPv4; otherwise IPv6 only.
    pub ipv4: bool,
    /// States of the sockets.
    pub states: States,
    /// Local port.
    pub local_port: Option<u16>,
    /// Peer port.
    pub remote_port: Option<u16>,
    /// Peer address.
    pub remote: Option<IpAddr>,
    /// Congestion control.
    pub congestion: Option<String>,
}

/// States of a TCP socket.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum States {
    /// ESTABLISHED and CLOSE_WAIT: the states in which a socket can send.
    #[default]
    Connected,
    /// LISTEN.
    Listening,
    /// Both.
    Both,
}

/// One socket.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Local address.
    pub local: SocketAddr,
    /// Peer address; unspecified for a listener.
    pub remote: SocketAddr,
    /// Whether the state is LISTEN.
    pub listening: bool,
    /// `SO_COOKIE`: identifies the socket until the machine restarts; BPF programs see the same value.
    pub cookie: u64,
    /// Inode, as in `/proc/PID/fd`.
    pub inode: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Congestion control.
    pub congestion: Option<String>,
    /// State of the connection as reported by the kernel.
    pub info: Option<TcpInfo>,
}

impl Entry {
    /// Returns whether the connection uses IPv6 on the wire: neither IPv4 nor IPv4 in an IPv6 socket.
    pub fn is_ipv6(&self) -> bool {
        matches!(self.remote.ip(), IpAddr::V6(address) if address.to_ipv4_mapped().is_none())
    }
}

/// Returns the sockets of the calling thread's namespace that match. Needs no special rights.
///
/// # Errors
/// If the kernel has no `inet_diag`, or a reply is cut short.
pub fn dump(filter: &Filter) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for ipv6 in [true, false] {
        if !ipv6 && !filter.ipv4 {
            continue;
        }
        let mut request = NetlinkMessage::from(SockDiagMessage::InetRequest(request(filter, ipv6)));
        request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
        let messages = netlink::exchange(
            NETLINK_SOCK_DIAG,
            request,
            "listing TCP sockets (inet_diag)",
            "it needs no rights; does a sandbox forbid it?",
        )?;
        for message in messages {
            if let SockDiagMessage::InetResponse(response) = message {
                let entry = entry(&response)?;
                if matches(filter, &entry) {
                    entries.push(entry);
                }
            }
        }
    }
    Ok(entries)
}

fn request(filter: &Filter, ipv6: bool) -> InetRequest {
    let connected = StateFlags::ESTABLISHED | StateFlags::CLOSE_WAIT;
    let mut socket_id = if ipv6 { SocketId::new_v6() } else { SocketId::new_v4() };
    socket_id.source_port = filter.local_port.unwrap_or(0);
    socket_id.destination_port = filter.remote_port.unwrap_or(0);
    InetRequest {
        family: if ipv6 { AF_INET6 } else { AF_INET },
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::INFO | ExtensionFlags::CONG,
        states: match filter.states {
            States::Connected => connected,
            States::Listening => StateFlags::LISTEN,
            States::Both => connected | StateFlags::LISTEN,
        },
        socket_id,
    }
}

/// Returns whether the entry matches. The kernel filters by port already, except for port 0.
fn matches(filter: &Filter, entry: &Entry) -> bool {
    filter.local_port.is_none_or(|port| port == entry.local.port())
        && filter.remote_port.is_none_or(|port| port == entry.remote.port())
        && filter.remote.is_none_or(|address| address == entry.remote.ip())
        && filter.congestion.as_deref().is_none_or(|name| entry.congestion.as_deref() == Some(name))
}

fn entry(response: &InetResponse) -> Result<Entry> {
    let InetResponse { header, nlas } = response;
    let id = &header.socket_id;
    let mut entry = Entry {
        local: SocketAddr::new(id.source_address, id.source_port),
        remote: SocketAddr::new(id.destination_address, id.destination_port),
        listening: header.state == TCP_LISTEN,
        // The cookie consists of two native 32-bit halves, the lower one first.
        cookie: cookie(id.cookie),
        inode: header.inode,
        uid: header.uid,
        congestion: None,
        info: None,
    };
    for nla in nlas {
        match nla {
            Nla::TcpInfo(bytes) => entry.info = Some(TcpInfo::parse(bytes)?),
            Nla::Congestion(name) => entry.congestion = Some(name.clone()),
            _ => {}
        }
    }
    Ok(entry)
}

fn cookie([a, b, c, d, e, f, g, h]: [u8; 8]) -> u64 {
    let lower = u32::from_ne_bytes([a, b, c, d]);
    let upper = u32::from_ne_bytes([e, f, g, h]);
    u64::from(upper) << 32 | u64::from(lower)
}

/// Parses a datagram as the kernel sends it. Public for fuzzing; programs should use [`dump`].
///
/// # Errors
/// If the datagram is not a sequence of whole, well-formed answers.
pub fn parse_datagram(datagram: &[u8]) -> Result<Vec<Entry>> {
    let batch = netlink::parse::<SockDiagMessage>(datagram, "parsing", "", &mut false)?;
    batch
        .messages
        .iter()
        .filter_map(|message| match message {
            SockDiagMessage::InetResponse(response) => Some(entry(response)),
            _ => None,
        })
        .collect()
}

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
const TCP_LISTEN: u8 = 10;

#[cfg(test)]
pub(crate) mod tests;
