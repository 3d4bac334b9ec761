//! Command-line arguments and help.

use std::net::{IpAddr, Ipv6Addr};

use clap::{Args, Parser, Subcommand, ValueEnum};
use plb_netlink::diag::{Filter, States};
use plb_netlink::flowlabel::{Label, Share};
use plb_netlink::route::Prefix;

/// Repathing by IPv6 flow labels (PLB): what this host does, what it could do, and what prevents it
///
/// The network spreads connections over its paths by a hash of each packet, which includes the IPv6 flow label. A
/// host moves a connection to another path by changing its label. Linux does this after a retransmission timeout and,
/// from 6.2 on, also for congestion with DCTCP and ECN. The latter is PLB (Protective Load Balancing, SIGCOMM '22).
///
/// Note that an *explicit* label on a TCP connection switches all of this off for that connection.
///
/// Without `--netns`, commands act on the network namespace in which they run.
#[derive(Debug, Parser)]
#[command(name = "plb", version, after_long_help = AFTER_HELP, propagate_version = true, max_term_width = 100)]
pub(crate) struct Cli {
    /// Network namespace to act in (as listed by `ip netns`)
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) netns: Option<String>,

    /// Print JSON instead of tables; commands that run until interrupted print one JSON object per line
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Print the changes without making them; all arguments are still checked
    #[arg(long, global = true)]
    pub(crate) dry_run: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

const AFTER_HELP: &str = "\
EXIT CODES
  0  done; for `check` and `lint`: nothing wrong
  1  `check`: a socket cannot be repathed or could not be checked; `lint`: a problem was found
  2  bad arguments; nothing was changed
  3  a right is missing; the message says which
  4  this kernel or host lacks a feature; the message says how to get it
  5  a namespace, process, socket, lease, device or route does not exist (any more)
  6  the kernel refused, or its answer was malformed

RIGHTS
  show, sockets, lint, envoy, route (list), label list, watch: none; root, to see the owners of other users' sockets
  set, route set: root, or CAP_NET_ADMIN
  repath --dev, run --way bpf: CAP_BPF and CAP_NET_ADMIN
  run, with any --way: to move connections of other users also CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, in the host's
    PID namespace; connections whose owner cannot be reached are left alone
  pin, unpin, repath, label put/renew/show: the socket owner's user, or CAP_SYS_PTRACE
  --netns: CAP_SYS_ADMIN

FIRST STEPS
  plb lint                      what prevents repathing on this host, and how to fix it
  plb set --enabled on          switch the kernel's PLB on in this namespace
  plb check                     which connections can be repathed, and why not
  plb watch                     watch connections move
  plb envoy                     the socket options for an unmodified Envoy";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the kernel's PLB knobs, the settings they depend on, and the counters
    Show,
    /// Set the kernel's PLB knobs; knobs that are not given keep their values
    ///
    /// All values are checked first, then written and read back. If the kernel refuses one, the old values are
    /// restored. A change acts on live connections at once.
    Set(SetArgs),
    /// Check whether each connection can be repathed, and why not. Exit code 1 if one cannot or could not be checked
    ///
    /// A timeout moves a connection that has an automatic label and SO_TXREHASH on. PLB moves it for congestion if it
    /// also uses DCTCP with ECN and PLB is on. The kernel's counters do not prove that a connection has moved: they
    /// also rise for connections whose label cannot change.
    Check(CheckArgs),
    /// List TCP connections with congestion control, ECN, marks, repaths and owner
    Sockets(SelectArgs),
    /// Lease, give back, renew and list flow labels
    Label(LabelArgs),
    /// Keep a connection on its path: its label does not change (SO_TXREHASH off)
    Pin(SocketArgs),
    /// Allow a connection to be repathed: SO_TXREHASH on, automatic label on, explicit label given back
    Unpin(SocketArgs),
    /// Move one connection to another label now
    ///
    /// Without --dev, this uses the socket's options: an explicit label is dropped; otherwise the automatic label is
    /// switched off or on, which gives only two labels. With --dev, a BPF program on that device's egress sets any
    /// label, until this command ends.
    Repath(RepathArgs),
    /// User-space PLB: watch connections and move those that stay congested
    ///
    /// Serves the connections that the kernel does not move on congestion. The kernel moves only connections that use
    /// DCTCP, and only while its PLB is on. Requires ECN and a fabric that marks packets. Reads every connection's
    /// tcp_info, runs the paper's algorithms, and changes the label on the wire with a BPF program on the egress
    /// devices. With --way sockopt, and with --way auto where BPF cannot be used, it switches the automatic label off
    /// or on instead. Connections with an explicit label or with SO_TXREHASH off are left alone, as are connections for
    /// which these cannot be read. However this command ends, its BPF program is removed and the connections send their
    /// own labels again.
    Run(RunArgs),
    /// Companion of `run --way sockopt`: restores labels if that command ends without doing so
    #[command(hide = true)]
    Restore,
    /// Show a live table of repaths, timeouts and marks, for this namespace and for each connection
    Watch(WatchArgs),
    /// List and change congestion control and ECN per IPv6 route
    Route(RouteArgs),
    /// Check for every known trap and print how to fix each one found. Exit code 1 if there is a problem
    Lint,
    /// Print the socket_options YAML for an unmodified Envoy, after checking that this host supports them
    ///
    /// Put the first part under each cluster, the second under each listener. The options do not include a flow
    /// label: Envoy cannot send a chosen one, and should not.
    Envoy(EnvoyArgs),
}

#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    /// Switch PLB on or off
    #[arg(long, value_name = "ON|OFF")]
    pub(crate) enabled: Option<OnOff>,

    /// Minimum share of CE-marked packets that makes a round congested: 0 to 1, or 0/256 to 256/256 [kernel default:
    /// 0.5]
    #[arg(long, value_name = "SHARE")]
    pub(crate) k: Option<String>,

    /// Congested rounds after which an idle connection moves, 0 (never) to 31, at most N [kernel default: 3]
    #[arg(long, value_name = "ROUNDS")]
    pub(crate) m: Option<u8>,

    /// Congested rounds after which a busy connection moves, 1 to 31; small values cause retransmissions [kernel
    /// default: 12]
    #[arg(long, value_name = "ROUNDS")]
    pub(crate) n: Option<u8>,

    /// Pause after a retransmission timeout, 0 to 255 s; the actual pause is 1 to 2 times this. Set it to the time it
    /// takes to repair a link [kernel default: 60]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) suspend: Option<u8>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum OnOff {
    On,
    Off,
}

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct SelectArgs {
    /// Only connections with this local port
    #[arg(long, value_name = "PORT")]
    pub(crate) local_port: Option<u16>,

    /// Only connections with this peer port
    #[arg(long, value_name = "PORT")]
    pub(crate) remote_port: Option<u16>,

    /// Only connections to this peer address
    #[arg(long, value_name = "IP")]
    pub(crate) remote: Option<IpAddr>,

    /// Only connections with this congestion control
    #[arg(long, value_name = "NAME")]
    pub(crate) congestion: Option<String>,

    /// Include IPv4 connections, which cannot be repathed
    #[arg(long, short = '4')]
    pub(crate) ipv4: bool,
}

impl SelectArgs {
    pub(crate) fn filter(&self) -> Filter {
        Filter {
            ipv4: self.ipv4,
            states: States::Connected,
            local_port: self.local_port,
            remote_port: self.remote_port,
            remote: self.remote,
            congestion: self.congestion.clone(),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) select: SelectArgs,

    /// Only sockets of this process
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Option<u32>,

    /// Accept repathing after timeouts only: do not require DCTCP, ECN and PLB
    #[arg(long)]
    pub(crate) timeouts_only: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SocketArgs {
    /// The socket: PID:FD, or `cookie:N` as shown by `plb sockets`
    #[arg(value_name = "SOCKET")]
    pub(crate) socket: SocketName,
}

/// Name of a socket on the command line.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum SocketName {
    Descriptor { pid: u32, fd: i32 },
    Cookie(u64),
}

impl std::str::FromStr for SocketName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || "must be PID:FD (see `ls -l /proc/PID/fd`) or cookie:N (see `plb sockets`)".to_owned();
        let (first, second) = text.split_once(':').ok_or_else(bad)?;
        if first == "cookie" {
            return second.parse().map(Self::Cookie).map_err(|_| bad());
        }
        let pid = first.parse().ok().filter(|pid| *pid > 0).ok_or_else(bad)?;
        let fd = second.parse().ok().filter(|fd| *fd >= 0).ok_or_else(bad)?;
        Ok(Self::Descriptor { pid, fd })
    }
}

#[derive(Debug, Args)]
pub(crate) struct LabelArgs {
    #[command(subcommand)]
    pub(crate) command: LabelCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LabelCommand {
    /// List all leased labels of the namespace
    List,
    /// Show the label of a socket
    Show(SocketArgs),
    /// Lease a label and hold it until interrupted
    ///
    /// A lease belongs to a socket and ends with it, so this command keeps running. With --share any (the default),
    /// other sockets can then use the label. With any other share, labels without a lease are refused in this
    /// namespace from then on, for as long as the namespace exists.
    Lease(LeaseArgs),
    /// Give back a socket's lease; a connection that used the label falls back to its automatic one
    Put(PutArgs),
    /// Extend a socket's lease
    Renew(RenewArgs),
}

#[derive(Debug, Args)]
pub(crate) struct LeaseArgs {
    /// Label, 20 bits, decimal or 0x...; if omitted, the kernel chooses one
    #[arg(value_name = "LABEL")]
    pub(crate) label: Option<Label>,

    /// Destination of the label; the kernel does not lease a label for all destinations
    #[arg(long, value_name = "IPV6")]
    pub(crate) destination: Ipv6Addr,

    /// Sockets that may also use the label
    #[arg(long, value_enum, default_value = "any")]
    pub(crate) share: ShareArg,

    /// Fail if the label is already leased, instead of joining that lease
    #[arg(long)]
    pub(crate) fresh: bool,

    /// Seconds for which the kernel keeps the lease after its last use; long times need CAP_NET_ADMIN
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub(crate) linger: u16,

    /// Minimum lifetime of the lease in seconds; long times need CAP_NET_ADMIN
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub(crate) expires: u16,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ShareArg {
    Any,
    User,
    Process,
    Exclusive,
}

impl From<ShareArg> for Share {
    fn from(share: ShareArg) -> Self {
        match share {
            ShareArg::Any => Self::Any,
            ShareArg::User => Self::User,
            ShareArg::Process => Self::Process,
            ShareArg::Exclusive => Self::Exclusive,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct PutArgs {
    #[command(flatten)]
    pub(crate) socket: SocketArgs,

    /// The label to give back; if omitted, the current one
    #[arg(value_name = "LABEL")]
    pub(crate) label: Option<Label>,
}

#[derive(Debug, Args)]
pub(crate) struct RenewArgs {
    #[command(flatten)]
    pub(crate) socket: SocketArgs,

    /// The label to renew
    #[arg(value_name = "LABEL")]
    pub(crate) label: Label,

    /// Seconds, as for `lease`
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub(crate) linger: u16,

    /// Seconds, as for `lease`
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub(crate) expires: u16,
}

#[derive(Debug, Args)]
pub(crate) struct RepathArgs {
    #[command(flatten)]
    pub(crate) socket: SocketArgs,

    /// Rewrite the label on the egress of this device, until interrupted; may be repeated
    #[arg(long, value_name = "DEVICE")]
    pub(crate) dev: Vec<String>,

    /// Use this label instead of a random one
    #[arg(long, value_name = "LABEL", requires = "dev")]
    pub(crate) label: Option<Label>,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Devices on whose egress labels are rewritten; if omitted, every device that is up, except lo
    #[arg(long, value_name = "DEVICE")]
    pub(crate) dev: Vec<String>,

    /// Method of moving connections
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) way: WayArg,

    /// Minimum share of CE-marked packets that makes a round congested, as for `set` [default: the kernel's knob, else
    /// 0.5]
    #[arg(long, value_name = "SHARE")]
    pub(crate) k: Option<String>,

    /// Congested rounds before an idle connection moves [default: the kernel's knob, else 3]
    #[arg(long, value_name = "ROUNDS")]
    pub(crate) m: Option<u8>,

    /// Congested rounds before a busy connection moves [default: the kernel's knob, else 12]
    #[arg(long, value_name = "ROUNDS")]
    pub(crate) n: Option<u8>,

    /// Pause after a timeout, in seconds [default: the kernel's knob, else 60]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) suspend: Option<u8>,

    /// Interval between two readings of the connections, 1 to 1000 ms; a round is one round trip, but at least this
    /// long
    #[arg(long, value_name = "MS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) interval_ms: u64,

    /// Stop after this many seconds
    #[arg(long, value_name = "SECONDS")]
    pub(crate) duration: Option<u64>,

    #[command(flatten)]
    pub(crate) select: SelectArgs,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum WayArg {
    /// bpf where it is permitted, otherwise sockopt
    Auto,
    /// BPF program on the egress device: any label. Needs CAP_BPF, CAP_NET_ADMIN, Linux 6.6
    Bpf,
    /// Automatic label switched off and on through the owner's descriptor: two labels
    Sockopt,
}

#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Interval between two updates, 50 to 60000 ms
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    pub(crate) interval_ms: u64,

    /// Stop after this many updates
    #[arg(long, value_name = "N")]
    pub(crate) count: Option<u64>,

    #[command(flatten)]
    pub(crate) select: SelectArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RouteArgs {
    #[command(subcommand)]
    pub(crate) command: Option<RouteCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RouteCommand {
    /// List the IPv6 routes of the main table (the default without a subcommand)
    List,
    /// Change the metrics of one route; metrics that are not given keep their values
    ///
    /// The congestion control of a route is the default of sockets that connect through it. For DCTCP, set it on the
    /// routes of both sides: a listener with another congestion control refuses ECN.
    Set(RouteSetArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RouteSetArgs {
    /// Route: `default`, PREFIX/LENGTH as listed by `plb route`, or an address (the route that packets to it take)
    #[arg(value_name = "PREFIX")]
    pub(crate) prefix: Prefix,

    /// Congestion control of the route; `none` removes it
    #[arg(long, value_name = "NAME")]
    pub(crate) congestion: Option<String>,

    /// Refuse any other congestion control on sockets that use this route
    #[arg(long, value_name = "ON|OFF")]
    pub(crate) lock: Option<OnOff>,

    /// Request ECN regardless of net.ipv4.tcp_ecn
    #[arg(long, value_name = "ON|OFF")]
    pub(crate) ecn: Option<OnOff>,
}

#[derive(Debug, Args)]
pub(crate) struct EnvoyArgs {
    /// Congestion control for Envoy's sockets; if omitted, dctcp if this host has it, otherwise the host's default
    #[arg(long, value_name = "NAME")]
    pub(crate) congestion: Option<String>,

    /// Print only the part for clusters
    #[arg(long, conflicts_with = "listener")]
    pub(crate) cluster: bool,

    /// Print only the part for listeners
    #[arg(long)]
    pub(crate) listener: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sockets_are_named_in_two_ways() {
        for (text, expected) in [
            ("12:3", Some(SocketName::Descriptor { pid: 12, fd: 3 })),
            ("cookie:4097", Some(SocketName::Cookie(4097))),
            ("0:3", None),
            ("12:-1", None),
            ("12", None),
            ("cookie:", None),
            ("", None),
        ] {
            assert_eq!(text.parse::<SocketName>().ok(), expected, "{text}");
        }
    }

    #[test]
    fn an_error_names_the_argument_and_its_valid_values() {
        for (args, says) in [
            (vec!["label", "lease", "0x100000"], "20 bits"),
            (vec!["pin", "7"], "PID:FD"),
            (vec!["set", "--m", "300"], "--m"),
            (vec!["set", "--enabled", "yes"], "on, off"),
            (vec!["run", "--interval-ms", "0"], "1..=1000"),
            (vec!["route", "set", "10.0.0.0/8"], "IPv6 prefix"),
            (vec!["repath", "1:2", "--label", "3"], "--dev"),
            (vec!["envoy", "--cluster", "--listener"], "--listener"),
        ] {
            let error = Cli::try_parse_from(["plb"].into_iter().chain(args.clone())).unwrap_err().to_string();
            assert!(error.contains(says), "{args:?}: {error}");
        }
    }
}
