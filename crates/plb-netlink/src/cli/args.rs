//! Arguments and help.

use std::net::{IpAddr, Ipv6Addr};

use clap::{Args, Parser, Subcommand, ValueEnum};
use plb_netlink::diag::{Filter, States};
use plb_netlink::flowlabel::{Label, Share};
use plb_netlink::route::Prefix;

/// Repathing by IPv6 flow labels (PLB): what this host does, what it could do, and what stands in the way.
///
/// The network spreads connections over its paths by a hash of each packet that includes the IPv6 flow label. A host
/// moves a connection to another path by changing its label. Linux does that by itself after a retransmission timeout,
/// and from 6.2 on for congestion too, with DCTCP and ECN: that is PLB (Protective Load Balancing, SIGCOMM '22).
///
/// Note that an *explicit* label on a TCP connection switches all of that off for it.
///
/// Without `--netns`, everything is about the network namespace that this command runs in.
#[derive(Debug, Parser)]
#[command(name = "plb", version, after_long_help = AFTER_HELP, propagate_version = true, max_term_width = 100)]
pub(crate) struct Cli {
    /// Act in this network namespace (of `ip netns`)
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) netns: Option<String>,

    /// Print JSON instead of tables; lines of JSON where it goes on and on
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Say what would be changed, change nothing; all arguments are still checked
    #[arg(long, global = true)]
    pub(crate) dry_run: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

const AFTER_HELP: &str = "\
EXIT CODES
  0  done; for `check` and `lint`: nothing wrong
  1  `check`: a socket cannot be repathed; `lint`: a problem was found
  2  bad arguments; nothing was changed
  3  a right is missing; the message says which
  4  this kernel or host lacks something; the message says what helps
  5  a namespace, process, socket, lease, device or route is not there (any more)
  6  the kernel refused or answered nonsense

RIGHTS
  show, sockets, lint, envoy, route (list), label list, watch: none, but owners of foreign sockets need root to be seen
  set, route set: root, or CAP_NET_ADMIN
  repath --dev, run --way bpf: CAP_BPF and CAP_NET_ADMIN
  run, either way: for connections of other users CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH too, in the host's PID
    namespace; connections whose owner cannot be reached are left alone
  pin, unpin, repath, label put/renew/show: the socket owner's user, or CAP_SYS_PTRACE
  --netns: CAP_SYS_ADMIN

FIRST STEPS
  plb lint                      what is in the way on this host, and what helps
  plb set --enabled on          switch the kernel's PLB on in this namespace
  plb check                     which connections can be repathed, and why not
  plb watch                     see it happen
  plb envoy                     the socket options for an unmodified Envoy";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the kernel's PLB knobs, what they depend on, and the counters
    Show,
    /// Set the kernel's PLB knobs; what is not named stays
    ///
    /// All values are checked first, written, and read back. If one is refused, the old ones are put back. A change acts
    /// on live connections at once.
    Set(SetArgs),
    /// Judge every connection: can it be repathed, and why not. Exit code 1 if one cannot
    ///
    /// A timeout moves a connection that has an automatic label and SO_TXREHASH on. PLB moves it for congestion if it
    /// also uses DCTCP with ECN and PLB is on. The kernel's counters are no proof of either: they rise for connections
    /// whose label cannot change.
    Check(CheckArgs),
    /// List TCP connections with congestion control, ECN, marks, repaths, owner
    Sockets(SelectArgs),
    /// Lease, give back, renew and list flow labels
    Label(LabelArgs),
    /// Keep a connection on its path: its label stays as it is (SO_TXREHASH off)
    Pin(SocketArgs),
    /// Let a connection be repathed: SO_TXREHASH on, automatic label on, explicit label put back
    Unpin(SocketArgs),
    /// Move one connection to another label now
    ///
    /// Without --dev through its socket options: an explicit label is dropped; else the automatic label is switched off
    /// or on, so there are two labels only. With --dev by a BPF program on that device's egress: any label, held until
    /// this command ends.
    Repath(RepathArgs),
    /// User-space PLB: watch connections, move those that stay congested
    ///
    /// For connections whose congestion control has no PLB hooks (anything but DCTCP). Needs ECN and a fabric that marks.
    /// Reads every connection's tcp_info, runs the paper's algorithms, and changes the label on the wire by a BPF program
    /// on the egress devices. Connections with an explicit label or with SO_TXREHASH off are left alone, and so are those
    /// of which that cannot be read. When this command ends, however it ends, the program is gone and the connections
    /// have their own labels again.
    Run(RunArgs),
    /// Beside `run --way sockopt`: switches back what that leaves behind
    #[command(hide = true)]
    Restore,
    /// Live table: repaths, timeouts and marks of this namespace and of each connection
    Watch(WatchArgs),
    /// Congestion control and ECN per IPv6 route
    Route(RouteArgs),
    /// Look for every known trap, each with its cure. Exit code 1 if there is a problem
    Lint,
    /// Print the socket_options YAML for an unmodified Envoy, after checking that this host has what it names
    ///
    /// Put the first part under each cluster, the second under each listener. Flow labels themselves are not among the
    /// options: Envoy cannot send a chosen one, and should not.
    Envoy(EnvoyArgs),
}

#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    /// Switch PLB on or off
    #[arg(long, value_name = "ON|OFF")]
    pub(crate) enabled: Option<OnOff>,

    /// Share of a round's packets with CE marks from which on it counts as congested: 0 to 1, or 0/256 to 256/256
    /// [kernel default: 0.5]
    #[arg(long, value_name = "SHARE")]
    pub(crate) k: Option<String>,

    /// Congested rounds after which an idle connection moves, 0 (never) to 31, at most N [kernel default: 3]
    #[arg(long, value_name = "ROUNDS")]
    pub(crate) m: Option<u8>,

    /// Congested rounds after which a busy connection moves, 1 to 31; small values cost retransmissions [kernel
    /// default: 12]
    #[arg(long, value_name = "ROUNDS")]
    pub(crate) n: Option<u8>,

    /// Pause after a retransmission timeout, 0 to 255 s, really 1 to 2 times this: the time a link takes to be
    /// repaired [kernel default: 60]
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
    /// Only this local port
    #[arg(long, value_name = "PORT")]
    pub(crate) local_port: Option<u16>,

    /// Only this port of the peer
    #[arg(long, value_name = "PORT")]
    pub(crate) remote_port: Option<u16>,

    /// Only this peer
    #[arg(long, value_name = "IP")]
    pub(crate) remote: Option<IpAddr>,

    /// Only this congestion control
    #[arg(long, value_name = "NAME")]
    pub(crate) congestion: Option<String>,

    /// Also IPv4, which cannot be repathed
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

    /// Be content with repathing after timeouts: do not ask for DCTCP, ECN and PLB
    #[arg(long)]
    pub(crate) timeouts_only: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SocketArgs {
    /// The socket: PID:FD, or `cookie:N` as `plb sockets` shows it
    #[arg(value_name = "SOCKET")]
    pub(crate) socket: SocketName,
}

/// How a socket is named on the command line.
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
    /// List every leased label of the namespace
    List,
    /// Show the label of a socket
    Show(SocketArgs),
    /// Lease a label and hold it until interrupted
    ///
    /// A lease belongs to a socket and ends with it, so this command stays. With --share any (the default) other
    /// sockets can then use the label; with any other share, labels without a lease are refused in this namespace
    /// from then on, for as long as the namespace lives.
    Lease(LeaseArgs),
    /// Give a socket's lease back; a connection that used the label falls back to its automatic one
    Put(PutArgs),
    /// Extend a socket's lease
    Renew(RenewArgs),
}

#[derive(Debug, Args)]
pub(crate) struct LeaseArgs {
    /// 20 bits, decimal or 0x...; without it the kernel chooses
    #[arg(value_name = "LABEL")]
    pub(crate) label: Option<Label>,

    /// The destination it is for: the kernel leases no label for all
    #[arg(long, value_name = "IPV6")]
    pub(crate) destination: Ipv6Addr,

    /// Who else may use it
    #[arg(long, value_enum, default_value = "any")]
    pub(crate) share: ShareArg,

    /// Fail if the label is already leased, instead of joining
    #[arg(long)]
    pub(crate) fresh: bool,

    /// Seconds after its last use in which no other socket gets it; long ones need CAP_NET_ADMIN
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub(crate) linger: u16,

    /// Seconds for which it stays at least; long ones need CAP_NET_ADMIN
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

    /// Which of its labels; without it the current one
    #[arg(value_name = "LABEL")]
    pub(crate) label: Option<Label>,
}

#[derive(Debug, Args)]
pub(crate) struct RenewArgs {
    #[command(flatten)]
    pub(crate) socket: SocketArgs,

    /// Which of its labels
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

    /// Rewrite the label on this device's egress, until interrupted; may be given several times
    #[arg(long, value_name = "DEVICE")]
    pub(crate) dev: Vec<String>,

    /// This label instead of a random one
    #[arg(long, value_name = "LABEL", requires = "dev")]
    pub(crate) label: Option<Label>,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Devices on whose egress labels are rewritten; without it every device that is up, except lo
    #[arg(long, value_name = "DEVICE")]
    pub(crate) dev: Vec<String>,

    /// How connections are moved
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) way: WayArg,

    /// Congested share of a round, as for `set` [default: as the kernel's knobs are set, else 0.5]
    #[arg(long, value_name = "SHARE")]
    pub(crate) k: Option<String>,

    /// Rounds before an idle connection moves [default: as the kernel's knobs are set, else 3]
    #[arg(long, value_name = "ROUNDS")]
    pub(crate) m: Option<u8>,

    /// Rounds before a busy connection moves [default: as the kernel's knobs are set, else 12]
    #[arg(long, value_name = "ROUNDS")]
    pub(crate) n: Option<u8>,

    /// Pause after a timeout, seconds [default: as the kernel's knobs are set, else 60]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) suspend: Option<u8>,

    /// Time between two looks at the connections, 1 to 1000: a round is one round trip, but at least this
    #[arg(long, value_name = "MS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) interval_ms: u64,

    /// End after this many seconds
    #[arg(long, value_name = "SECONDS")]
    pub(crate) duration: Option<u64>,

    #[command(flatten)]
    pub(crate) select: SelectArgs,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum WayArg {
    /// bpf where it is allowed, else sockopt
    Auto,
    /// A program on the egress device: any label. CAP_BPF, CAP_NET_ADMIN, Linux 6.6
    Bpf,
    /// Automatic label off and on through the owner's descriptor: two labels
    Sockopt,
}

#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Time between two lines, 50 to 60000
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    pub(crate) interval_ms: u64,

    /// End after so many
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
    /// List the IPv6 routes of the main table (also without any subcommand)
    List,
    /// Change the metrics of one route; what is not named stays
    ///
    /// A route's congestion control is the default of sockets that connect through it. For DCTCP give it to the routes
    /// of both sides: a listener with another one refuses ECN.
    Set(RouteSetArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RouteSetArgs {
    /// `default`, PREFIX/LENGTH as `plb route` lists it, or an address: the route its packets take
    #[arg(value_name = "PREFIX")]
    pub(crate) prefix: Prefix,

    /// Congestion control; `none` removes it
    #[arg(long, value_name = "NAME")]
    pub(crate) congestion: Option<String>,

    /// Refuse any other congestion control on sockets of this route
    #[arg(long, value_name = "ON|OFF")]
    pub(crate) lock: Option<OnOff>,

    /// Ask for ECN whatever net.ipv4.tcp_ecn says
    #[arg(long, value_name = "ON|OFF")]
    pub(crate) ecn: Option<OnOff>,
}

#[derive(Debug, Args)]
pub(crate) struct EnvoyArgs {
    /// Congestion control for Envoy's sockets; without it dctcp if this host has it, else the host's default
    #[arg(long, value_name = "NAME")]
    pub(crate) congestion: Option<String>,

    /// Only the part for clusters
    #[arg(long, conflicts_with = "listener")]
    pub(crate) cluster: bool,

    /// Only the part for listeners
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
    fn a_bad_argument_names_itself_and_what_is_right() {
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
