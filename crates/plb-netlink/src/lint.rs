//! All known traps that can prevent repathing on a host, each with its fix.
//!
//! [`Host::read`] collects the state of the host; [`lint`] judges that state without asking the kernel.

use crate::Result;
use crate::counters::Counters;
use crate::diag::{self, Entry, Filter, States};
use crate::fabric::Hash;
use crate::flowlabel::{self, Listed, Share};
use crate::route::{self, Route};
use crate::sock::WITH_PLB_HOOKS;
use crate::sysctl::{self, PlbParams};

/// Input of [`lint`]: the state of one namespace at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    /// `uname -r`.
    pub kernel: String,
    /// PLB's knobs; `None` before Linux 6.2.
    pub plb: Option<PlbParams>,
    /// Whether the kernel has IPv6.
    pub ipv6: bool,
    /// `net.ipv6.auto_flowlabels`.
    pub auto_flowlabels: u32,
    /// `net.ipv6.flowlabel_reflect`.
    pub flowlabel_reflect: u32,
    /// `net.ipv6.flowlabel_state_ranges`.
    pub flowlabel_state_ranges: u32,
    /// `net.core.txrehash`; `None` before Linux 6.0.
    pub txrehash: Option<u32>,
    /// `net.ipv4.tcp_ecn`.
    pub tcp_ecn: u32,
    /// `net.ipv4.tcp_congestion_control`.
    pub congestion: String,
    /// Available congestion controls.
    pub available: Vec<String>,
    /// Congestion controls that need no special rights.
    pub unrestricted: Vec<String>,
    /// `net.ipv6.conf.all.forwarding`: whether this namespace routes.
    pub forwards: bool,
    /// Multipath hash of the namespace; `None` without IPv6.
    pub hash: Option<Hash>,
    /// Leased labels.
    pub leases: Vec<Listed>,
    /// Whether unleased labels are still accepted.
    pub unleased_labels_work: bool,
    /// Connected and listening TCP sockets, IPv4 included.
    pub sockets: Vec<Entry>,
    /// Number of connected sockets with an explicit label, among those whose owners could be inspected.
    pub explicit_labels: usize,
    /// IPv6 routes.
    pub routes: Vec<Route>,
    /// Counters.
    pub counters: Counters,
}

impl Host {
    /// Reads the state of the calling thread's namespace.
    ///
    /// # Errors
    /// If something that exists cannot be read.
    pub fn read() -> Result<Self> {
        let ipv6 = sysctl::read("net.ipv6.auto_flowlabels")?.is_some();
        let number = |name: &str| Ok(sysctl::read_number(name)?.unwrap_or_default());
        let sockets = diag::dump(&Filter { ipv4: true, states: States::Both, ..Filter::default() })?;
        Ok(Self {
            kernel: sysctl::kernel_release(),
            plb: PlbParams::read().ok(),
            ipv6,
            auto_flowlabels: number("net.ipv6.auto_flowlabels")?,
            flowlabel_reflect: number("net.ipv6.flowlabel_reflect")?,
            flowlabel_state_ranges: number("net.ipv6.flowlabel_state_ranges")?,
            txrehash: sysctl::read_number("net.core.txrehash")?,
            tcp_ecn: number("net.ipv4.tcp_ecn")?,
            congestion: sysctl::read("net.ipv4.tcp_congestion_control")?.unwrap_or_default(),
            available: sysctl::congestion_controls()?,
            unrestricted: sysctl::unrestricted_congestion_controls()?,
            forwards: number("net.ipv6.conf.all.forwarding")? != 0,
            hash: if ipv6 { Some(Hash::read()?) } else { None },
            leases: if ipv6 { flowlabel::list()? } else { Vec::new() },
            unleased_labels_work: !ipv6 || flowlabel::unleased_labels_work()?,
            explicit_labels: explicit_labels(&sockets),
            sockets,
            routes: if ipv6 { route::list()? } else { Vec::new() },
            counters: Counters::read()?,
        })
    }
}

fn explicit_labels(sockets: &[Entry]) -> usize {
    let owners = crate::pidfd::owners();
    sockets
        .iter()
        .filter(|entry| !entry.listening && entry.is_ipv6())
        .filter_map(|entry| owners.get(&u64::from(entry.inode)))
        .filter_map(|owner| crate::pidfd::duplicate(owner.pid, owner.fd).ok())
        .filter(|socket| matches!(flowlabel::current(socket), Ok(flowlabel::Current::Explicit(..))))
        .count()
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Severity {
    /// Repathing works, but less well than expected, or in another way.
    Note,
    /// Something does not work.
    Problem,
}

/// One trap that was found.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Finding {
    /// Identifier for scripts: short and stable.
    pub id: &'static str,
    /// Severity.
    pub severity: Severity,
    /// What was found.
    pub what: String,
    /// How to fix it.
    pub cure: String,
}

/// Returns all traps found on this host, problems first. An empty list means that there are none.
pub fn lint(host: &Host) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut add = |id, severity, what: String, cure: &str| {
        found.push(Finding { id, severity, what, cure: cure.to_owned() });
    };
    use Severity::{Note, Problem};

    if !host.ipv6 {
        add("no-ipv6", Problem, "no IPv6: there is no flow label to change".to_owned(), "switch IPv6 on");
    }
    let hooks = |name: &str| WITH_PLB_HOOKS.contains(&name);
    let on = host.plb.is_some_and(|plb| plb.enabled);
    match &host.plb {
        None => add(
            "no-plb",
            Problem,
            format!("kernel {} has no PLB", host.kernel),
            "Linux 6.2 or later has it; on older kernels `plb run` detects congestion from user space",
        ),
        Some(plb) => {
            if plb.n.get() == 0 {
                add(
                    "n-zero",
                    Problem,
                    "tcp_plb_rehash_rounds is 0: a connection moves at every check".to_owned(),
                    "`plb set --n 12`",
                );
            } else if plb.m > plb.n {
                add(
                    "m-above-n",
                    Problem,
                    format!("M = {} is above N = {}: the idle rule never acts", plb.m.get(), plb.n.get()),
                    "`plb set --m 3 --n 12`",
                );
            }
            if plb.k.in_256ths() == 0 {
                add(
                    "k-zero",
                    Problem,
                    "tcp_plb_cong_thresh is 0: every round counts as congested".to_owned(),
                    "`plb set --k 0.5`",
                );
            }
        }
    }
    if on {
        let route_hooks = host.routes.iter().any(|route| route.congestion.as_deref().is_some_and(hooks));
        let socket_hooks =
            host.sockets.iter().any(|s| !s.listening && s.congestion.as_deref().is_some_and(hooks));
        if !hooks(&host.congestion) && !route_hooks && !socket_hooks {
            add(
                "no-hooks",
                Problem,
                format!(
                    "PLB is on, but nothing here uses a congestion control with PLB hooks (default: {})",
                    host.congestion
                ),
                "use dctcp for a route (`plb route set PREFIX --congestion dctcp`), for Envoy's sockets (`plb envoy`), \
                 or as the default (set it in the initial network namespace first); or use `plb run`",
            );
        }
        if host.explicit_labels > 0 {
            add(
                "explicit-labels",
                Problem,
                format!(
                    "{} connections have an explicit label: the counters rise, but nothing moves",
                    host.explicit_labels
                ),
                "`plb check` lists them; `plb unpin PID:FD` frees one; applications should not set labels on TCP",
            );
        }
    }
    let plb_wanted = on || hooks(&host.congestion);
    if plb_wanted && !host.available.iter().any(|name| hooks(name)) {
        add(
            "no-dctcp",
            Problem,
            "PLB is on, but dctcp is not loaded".to_owned(),
            "`modprobe tcp_dctcp`; if the kernel has none, `plb run`",
        );
    }
    if plb_wanted && host.tcp_ecn != 1 && !host.routes.iter().any(|route| route.ecn) {
        add(
            "ecn",
            Problem,
            format!("net.ipv4.tcp_ecn={}: connections from this host do not request ECN", host.tcp_ecn),
            "set it to 1 (with 3 to 5, which request AccECN, a peer whose tcp_ecn is 2 did not negotiate ECN), or \
             `plb route set PREFIX --ecn on`",
        );
    }
    if host.available.iter().any(|name| hooks(name)) && !host.unrestricted.iter().any(|name| hooks(name)) {
        add(
            "dctcp-restricted",
            Note,
            "dctcp needs CAP_NET_ADMIN here: an unprivileged Envoy's connections fail with it".to_owned(),
            "add dctcp to net.ipv4.tcp_allowed_congestion_control",
        );
    }
    let foreign: Vec<String> = host
        .sockets
        .iter()
        .filter(|s| s.listening && !s.congestion.as_deref().is_some_and(hooks) && !s.local.ip().is_loopback())
        .map(|s| s.local.port().to_string())
        .collect();
    if plb_wanted && !foreign.is_empty() {
        add(
            "listener",
            Problem,
            format!("listeners without dctcp refuse ECN to a DCTCP sender: ports {}", brief(&foreign)),
            "make dctcp the default before the listener is created, or `plb route set` on the route back to the \
             senders (`features ecn` there does not help), or the listener's socket_options (`plb envoy --listener`)",
        );
    }
    match host.auto_flowlabels {
        _ if !host.ipv6 => {}
        0 => add(
            "auto-labels-off",
            Problem,
            "net.ipv6.auto_flowlabels=0: every packet has label 0, even if a socket requests a label"
                .to_owned(),
            "set it to 1",
        ),
        2 => add(
            "auto-labels-opt-in",
            Problem,
            "net.ipv6.auto_flowlabels=2: only sockets that request a label have one".to_owned(),
            "set it to 1, or set IPV6_AUTOFLOWLABEL on each socket (`plb envoy` does)",
        ),
        3 => add(
            "auto-labels-forced",
            Note,
            "net.ipv6.auto_flowlabels=3: sockets cannot opt out, so `plb run --way sockopt` does not work"
                .to_owned(),
            "set it to 1",
        ),
        _ => {}
    }
    match host.txrehash {
        Some(0) => add(
            "txrehash",
            Problem,
            "net.core.txrehash=0: labels of new sockets never change, neither by PLB nor after timeouts; the counters \
             rise nevertheless"
                .to_owned(),
            "set it to 1",
        ),
        None => add(
            "no-txrehash",
            Note,
            format!("kernel {} has no net.core.txrehash", host.kernel),
            "Linux 6.0 or later has it",
        ),
        _ => {}
    }
    if host.flowlabel_reflect & 1 != 0 {
        add(
            "reflect",
            Problem,
            "net.ipv6.flowlabel_reflect: accepted connections answer with the peer's label, so this side cannot repath"
                .to_owned(),
            "set it to 0",
        );
    }
    if host.forwards
        && let Some(hash) = host.hash
    {
        if !hash.sees_label() {
            add(
                "hash-label",
                Problem,
                format!(
                    "this namespace routes, and its multipath hash does not see the label (policy {}, fields {})",
                    hash.policy, hash.fields
                ),
                "net.ipv6.fib_multipath_hash_policy=3 and net.ipv6.fib_multipath_hash_fields=63",
            );
        } else if !hash.sees_ports() {
            add(
                "hash-ports",
                Note,
                "this namespace routes by addresses and label, not by ports".to_owned(),
                "net.ipv6.fib_multipath_hash_policy=3 and net.ipv6.fib_multipath_hash_fields=63 hash the 4-tuple too",
            );
        }
    }
    let narrow = host.leases.iter().filter(|lease| lease.share != Some(Share::Any)).count();
    if narrow > 0 || !host.unleased_labels_work {
        add(
            "exclusive-lease",
            Note,
            format!(
                "unleased labels are refused in this namespace{}",
                if narrow > 0 {
                    format!(": {narrow} labels are leased to one socket, process or user")
                } else {
                    ": a socket once took an exclusive lease".to_owned()
                }
            ),
            "lease labels shared (`plb label lease --share any`, the default); only a new namespace accepts unleased ones again",
        );
    }
    if host.flowlabel_state_ranges != 0 {
        add(
            "state-ranges",
            Note,
            "net.ipv6.flowlabel_state_ranges=1: labels from 0x80000 on cannot be leased".to_owned(),
            "lease smaller ones, or set it to 0",
        );
    }
    let ipv4 = host
        .sockets
        .iter()
        .filter(|s| !s.listening && !s.is_ipv6() && !s.remote.ip().to_canonical().is_loopback())
        .count();
    if ipv4 > 0 {
        add(
            "ipv4",
            Note,
            format!("{ipv4} connections use IPv4, which has no label and cannot be repathed"),
            "give the endpoints IPv6 addresses",
        );
    }
    if host.txrehash == Some(0) && host.counters.plb_rehash.unwrap_or(0) > 0 {
        add(
            "counter-without-move",
            Problem,
            "TCPPLBRehash is above 0 although net.core.txrehash=0: it counts requests, not moves".to_owned(),
            "set net.core.txrehash=1; look at labels on the wire or at bytes per path, not at this counter",
        );
    }
    found.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    found
}

fn brief(words: &[String]) -> String {
    let shown = words[..words.len().min(8)].join(", ");
    if words.len() > 8 { format!("{shown} and {} more", words.len() - 8) } else { shown }
}

#[cfg(test)]
mod tests;
