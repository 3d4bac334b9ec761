//! Decides whether a socket can be repathed and, if not, why.
//!
//! The kernel's counters do not show this: they rise even for sockets whose label cannot change.

use std::fmt;
use std::os::fd::AsFd;

use socket2::SockRef;

use crate::Result;
use crate::flowlabel::{self, Current, Label};
use crate::sock;
use crate::sysctl::PlbParams;
use crate::tcpinfo::TcpInfo;

/// Obstacle to repathing.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Reason {
    /// IPv4 has no flow label.
    Ipv4,
    /// The connection does not leave the host.
    Local,
    /// The label is explicit; repathing does not change it.
    ExplicitLabel(Label),
    /// Automatic labels are off: every packet carries label 0.
    NoAutomaticLabel,
    /// `SO_TXREHASH` is off: the label stays.
    TxRehashOff,
    /// No repathing for congestion: this congestion control does not call PLB.
    NoHooks(String),
    /// No repathing for congestion: ECN was not negotiated, so congestion cannot be detected.
    NoEcn,
    /// No repathing for congestion: `net.ipv4.tcp_plb_enabled` is off.
    PlbOff,
    /// No repathing for congestion: this kernel does not have PLB.
    NoPlb,
}

impl Reason {
    /// Returns whether this obstacle also stops repathing after timeouts, not only repathing for congestion.
    pub fn stops_timeouts_too(&self) -> bool {
        !matches!(self, Self::NoHooks(_) | Self::NoEcn | Self::PlbOff | Self::NoPlb)
    }

    /// Returns how to fix it.
    pub fn cure(&self) -> &'static str {
        match self {
            Self::Ipv4 => "use IPv6 between these hosts",
            Self::Local => "nothing to fix: the connection crosses no network",
            Self::ExplicitLabel(_) => "`plb unpin PID:FD`, or do not set a label",
            Self::NoAutomaticLabel => "`plb unpin PID:FD`; set net.ipv6.auto_flowlabels=1",
            Self::TxRehashOff => "`plb unpin PID:FD`; set net.core.txrehash=1 for new sockets",
            Self::NoHooks(_) => "use dctcp (`plb route set`, `plb envoy`), or `plb run`",
            Self::NoEcn => {
                "net.ipv4.tcp_ecn=1 on the sender; a listener must use dctcp to accept ECN from a DCTCP sender"
            }
            Self::PlbOff => "`plb set --enabled on`",
            Self::NoPlb => "Linux 6.2 or later, or `plb run`",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ipv4 => f.write_str("IPv4 has no flow label"),
            Self::Local => f.write_str("does not leave the host"),
            Self::ExplicitLabel(label) => write!(f, "explicit label {label}"),
            Self::NoAutomaticLabel => f.write_str("automatic labels off"),
            Self::TxRehashOff => f.write_str("SO_TXREHASH off"),
            Self::NoHooks(name) => write!(f, "{name} has no PLB hooks"),
            Self::NoEcn => f.write_str("no ECN"),
            Self::PlbOff => f.write_str("tcp_plb_enabled off"),
            Self::NoPlb => f.write_str("kernel without PLB"),
        }
    }
}

/// Facts about a socket.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Facts {
    /// Whether the connection uses IPv6 on the wire.
    pub ipv6: bool,
    /// Whether both ends are on this host.
    pub local: bool,
    /// Its label; `None` for IPv4.
    pub label: Option<Current>,
    /// `SO_TXREHASH` with the namespace's default applied.
    pub txrehash: bool,
    /// Congestion control.
    pub congestion: String,
    /// Whether ECN was negotiated.
    pub ecn: bool,
    /// Whether `tcp_plb_enabled` is on; `None`: this kernel has no PLB.
    pub plb: Option<bool>,
}

/// Result of the check. If there are no reasons, all repathing works.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Verdict {
    /// Facts on which the result is based.
    pub facts: Facts,
    /// All obstacles.
    pub reasons: Vec<Reason>,
}

impl Verdict {
    /// Returns whether a retransmission timeout moves the connection; if so, `plb run` can move it too.
    pub fn on_timeout(&self) -> bool {
        !self.reasons.iter().any(Reason::stops_timeouts_too)
    }

    /// Returns whether the kernel's PLB also moves the connection for congestion.
    pub fn on_congestion(&self) -> bool {
        self.reasons.is_empty()
    }
}

/// Judges a connected TCP socket: the caller's own or a duplicate of another process's ([`crate::pidfd`]).
///
/// # Errors
/// On a socket that is not TCP.
pub fn repathable(socket: &impl AsFd) -> Result<Verdict> {
    let reference = SockRef::from(socket);
    let peer = reference.peer_addr().ok();
    let own = reference.local_addr().ok();
    let v6 = peer.as_ref().and_then(socket2::SockAddr::as_socket_ipv6);
    let ipv6 = v6.is_some_and(|peer| peer.ip().to_ipv4_mapped().is_none());
    let ip = |address: &socket2::SockAddr| address.as_socket().map(|a| a.ip());
    let local = peer
        .as_ref()
        .and_then(ip)
        .is_some_and(|peer| peer.to_canonical().is_loopback() || own.as_ref().and_then(ip) == Some(peer));
    let label = if ipv6 { Some(flowlabel::current(socket)?) } else { None };
    let txrehash = sock::may_rehash(socket)?;
    Ok(judge(Facts {
        ipv6,
        local,
        label,
        txrehash,
        congestion: sock::congestion(socket)?,
        ecn: TcpInfo::of(socket)?.ecn,
        plb: PlbParams::read().ok().map(|params| params.enabled),
    }))
}

/// Judges a socket by its facts.
pub fn judge(facts: Facts) -> Verdict {
    let mut reasons = Vec::new();
    if !facts.ipv6 {
        reasons.push(Reason::Ipv4);
    }
    if facts.local {
        reasons.push(Reason::Local);
    }
    match facts.label {
        Some(Current::Explicit(label, _)) => reasons.push(Reason::ExplicitLabel(label)),
        Some(Current::Zero) => reasons.push(Reason::NoAutomaticLabel),
        Some(Current::Automatic) | None => {}
    }
    if !facts.txrehash {
        reasons.push(Reason::TxRehashOff);
    }
    match facts.plb {
        None => reasons.push(Reason::NoPlb),
        Some(false) => reasons.push(Reason::PlbOff),
        Some(true) => {}
    }
    if !sock::WITH_PLB_HOOKS.contains(&facts.congestion.as_str()) {
        reasons.push(Reason::NoHooks(facts.congestion.clone()));
    }
    if !facts.ecn {
        reasons.push(Reason::NoEcn);
    }
    Verdict { facts, reasons }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_obstacle_is_named_and_counts_where_it_should() {
        let good = Facts {
            ipv6: true,
            local: false,
            label: Some(Current::Automatic),
            txrehash: true,
            congestion: "dctcp".to_owned(),
            ecn: true,
            plb: Some(true),
        };
        let label = Label::new(0xabc).unwrap();
        let cases: [(&str, Facts, &[Reason], bool); 10] = [
            ("all is well", good.clone(), &[], true),
            ("IPv4", Facts { ipv6: false, label: None, ..good.clone() }, &[Reason::Ipv4], false),
            ("loopback", Facts { local: true, ..good.clone() }, &[Reason::Local], false),
            (
                "explicit label",
                Facts { label: Some(Current::Explicit(label, None)), ..good.clone() },
                &[Reason::ExplicitLabel(label)],
                false,
            ),
            (
                "label 0",
                Facts { label: Some(Current::Zero), ..good.clone() },
                &[Reason::NoAutomaticLabel],
                false,
            ),
            ("txrehash off", Facts { txrehash: false, ..good.clone() }, &[Reason::TxRehashOff], false),
            (
                "no hooks",
                Facts { congestion: "cubic".to_owned(), ..good.clone() },
                &[Reason::NoHooks("cubic".to_owned())],
                true,
            ),
            ("no ECN", Facts { ecn: false, ..good.clone() }, &[Reason::NoEcn], true),
            ("PLB off", Facts { plb: Some(false), ..good.clone() }, &[Reason::PlbOff], true),
            ("old kernel", Facts { plb: None, ..good.clone() }, &[Reason::NoPlb], true),
        ];
        for (name, facts, reasons, on_timeout) in cases {
            let verdict = judge(facts);
            assert_eq!(verdict.reasons, reasons, "{name}");
            assert_eq!(verdict.on_timeout(), on_timeout, "{name}");
            assert_eq!(verdict.on_congestion(), reasons.is_empty(), "{name}");
        }
    }
}
