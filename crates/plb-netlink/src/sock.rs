//! Per-socket options that determine whether a connection can be repathed. They work on any descriptor, including a
//! duplicate of another process's ([`crate::pidfd`]).

use std::os::fd::AsFd;

use socket2::SockRef;

use crate::error::NET_ADMIN;
use crate::{Error, Result, sys, sysctl};

/// `SO_TXREHASH`: whether the automatic label changes when the kernel wants to repath.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum TxRehash {
    /// The label stays: the connection is pinned to its current path.
    Off,
    /// The label changes.
    On,
    /// The value of `net.core.txrehash` applies. Occurs only before a socket is connected or listening.
    Default,
}

/// Reads `SO_TXREHASH`.
///
/// # Errors
/// Before Linux 6.0; on a socket that is not TCP.
pub fn txrehash(socket: &impl AsFd) -> Result<TxRehash> {
    let value = sys::get_int(sys::raw(socket), libc::SOL_SOCKET, SO_TXREHASH)
        .map_err(|source| no_txrehash("reading SO_TXREHASH", source))?;
    match value {
        0 => Ok(TxRehash::Off),
        1 => Ok(TxRehash::On),
        // The value is set as -1; the kernel stores it as 255.
        -1 | 255 => Ok(TxRehash::Default),
        other => Err(Error::malformed("SO_TXREHASH", other)),
    }
}

/// Returns whether the kernel may change the automatic label: `SO_TXREHASH` with the namespace's default applied.
/// Before Linux 6.0 nothing forbids it.
///
/// # Errors
/// On a socket that is not TCP.
pub fn may_rehash(socket: &impl AsFd) -> Result<bool> {
    match txrehash(socket) {
        Ok(TxRehash::On) | Err(Error::Unsupported { .. }) => Ok(true),
        Ok(TxRehash::Off) => Ok(false),
        Ok(TxRehash::Default) => Ok(sysctl::read_number("net.core.txrehash")? != Some(0)),
        Err(error) => Err(error),
    }
}

/// Sets `SO_TXREHASH`, before or after connecting. Needs no special rights.
///
/// # Errors
/// Same as [`txrehash`].
pub fn set_txrehash(socket: &impl AsFd, value: TxRehash) -> Result<()> {
    let value = match value {
        TxRehash::Off => 0,
        TxRehash::On => 1,
        TxRehash::Default => -1,
    };
    sys::set_int(sys::raw(socket), libc::SOL_SOCKET, SO_TXREHASH, value)
        .map_err(|source| no_txrehash("setting SO_TXREHASH", source))
}

fn no_txrehash(doing: &str, source: std::io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::ENOPROTOOPT) => Error::Unsupported {
            what: format!("{doing}: kernel {} has no such option", sysctl::kernel_release()),
            cure: "it came with Linux 6.0".to_owned(),
        },
        Some(libc::EOPNOTSUPP) => Error::Invalid(format!("{doing}: for TCP sockets only")),
        _ => Error::kernel(doing, NET_ADMIN, source),
    }
}

/// Returns whether automatic labels are in effect: the socket's own setting, subject to `net.ipv6.auto_flowlabels`.
///
/// # Errors
/// On a socket that is not IPv6.
pub fn auto_label(socket: &impl AsFd) -> Result<bool> {
    sys::get_int(sys::raw(socket), libc::IPPROTO_IPV6, IPV6_AUTOFLOWLABEL)
        .map(|value| value != 0)
        .map_err(|source| no_label("reading IPV6_AUTOFLOWLABEL", source))
}

/// Switches automatic labels on or off; off means label 0. Takes effect at once. Needs no special rights.
///
/// # Errors
/// Same as [`auto_label`]; also if `net.ipv6.auto_flowlabels` (0 and 3) overrides the setting.
pub fn set_auto_label(socket: &impl AsFd, on: bool) -> Result<()> {
    sys::set_int(sys::raw(socket), libc::IPPROTO_IPV6, IPV6_AUTOFLOWLABEL, on.into())
        .map_err(|source| no_label("setting IPV6_AUTOFLOWLABEL", source))?;
    if auto_label(socket)? == on {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "automatic flow labels cannot be switched {} here: net.ipv6.auto_flowlabels={} overrides the socket; set it to 1",
        if on { "on" } else { "off" },
        sysctl::read("net.ipv6.auto_flowlabels")?.unwrap_or_default()
    )))
}

/// Sets whether the socket shows and accepts flow labels in addresses (`IPV6_FLOWINFO_SEND`); returns the previous
/// value. A connection keeps its label.
///
/// # Errors
/// On a socket that is not IPv6.
pub fn show_labels(socket: &impl AsFd, on: bool) -> Result<bool> {
    let fd = sys::raw(socket);
    let before = sys::get_int(fd, libc::IPPROTO_IPV6, IPV6_FLOWINFO_SEND)
        .map_err(|source| no_label("reading IPV6_FLOWINFO_SEND", source))?
        != 0;
    if before != on {
        sys::set_int(fd, libc::IPPROTO_IPV6, IPV6_FLOWINFO_SEND, on.into())
            .map_err(|source| no_label("setting IPV6_FLOWINFO_SEND", source))?;
    }
    Ok(before)
}

fn no_label(doing: &str, source: std::io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP) => {
            Error::Invalid(format!("{doing}: flow labels are for IPv6 sockets only"))
        }
        _ => Error::kernel(doing, NET_ADMIN, source),
    }
}

/// Returns the congestion control of a TCP socket.
///
/// # Errors
/// On a socket that is not TCP.
pub fn congestion(socket: &impl AsFd) -> Result<String> {
    let name = SockRef::from(socket)
        .tcp_congestion()
        .map_err(|source| Error::kernel("reading TCP_CONGESTION", NET_ADMIN, source))?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8(name.to_vec()).map_err(|error| Error::malformed("TCP_CONGESTION", error))
}

/// Sets the congestion control of a TCP socket, before or after connecting.
///
/// # Errors
/// If the name is unknown (the error lists the known ones), if the congestion control is restricted and CAP_NET_ADMIN
/// is missing, or if the route locks another one.
pub fn set_congestion(socket: &impl AsFd, name: &str) -> Result<()> {
    check_congestion_name(name)?;
    SockRef::from(socket).set_tcp_congestion(name.as_bytes()).map_err(|source| {
        let doing = format!("setting congestion control `{name}`");
        match source.raw_os_error() {
            Some(libc::ENOENT) => unknown_congestion(name),
            Some(libc::EPERM) => Error::NotPermitted {
                doing,
                cure: format!(
                    "add it to net.ipv4.tcp_allowed_congestion_control, or grant CAP_NET_ADMIN; or the route locks \
                     another one (`plb route` shows it); allowed now: {}",
                    sysctl::unrestricted_congestion_controls().unwrap_or_default().join(", ")
                ),
            },
            _ => Error::kernel(doing, NET_ADMIN, source),
        }
    })
}

/// Returns `SO_COOKIE`, which identifies the socket until the machine restarts, like [`crate::diag::Entry::cookie`].
///
/// # Errors
/// On a descriptor that is not a socket.
pub fn cookie(socket: &impl AsFd) -> Result<u64> {
    let mut bytes = [0; 8];
    sys::get_option(sys::raw(socket), libc::SOL_SOCKET, libc::SO_COOKIE, &mut bytes)
        .map_err(|source| Error::kernel("reading SO_COOKIE", NET_ADMIN, source))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Checks the name of a congestion control.
///
/// # Errors
/// If the name is malformed or too long for the kernel to store.
pub(crate) fn check_congestion_name(name: &str) -> Result<()> {
    let plausible = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    if name.is_empty() || name.len() > 15 || !name.bytes().all(plausible) {
        return Err(Error::Invalid(format!(
            "`{name}` is not a congestion control: 1 to 15 letters, digits, `_`, `-`"
        )));
    }
    Ok(())
}

/// Builds an error that says how to fix it: the available congestion controls, and the name of the module.
pub(crate) fn unknown_congestion(name: &str) -> Error {
    Error::Unsupported {
        what: format!("no congestion control `{name}` here"),
        cure: format!(
            "`modprobe tcp_{name}` as root, if the kernel has that module; available: {}",
            sysctl::congestion_controls().unwrap_or_default().join(", ")
        ),
    }
}

/// Congestion controls whose upstream implementation calls PLB's hooks.
pub const WITH_PLB_HOOKS: [&str; 1] = ["dctcp"];

const SO_TXREHASH: i32 = 74;
const IPV6_AUTOFLOWLABEL: i32 = 70;
const IPV6_FLOWINFO_SEND: i32 = 33;
