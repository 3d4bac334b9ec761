//! IPv6 flow labels: lease, put, renew and list them; connect with one; send datagrams with one.
//!
//! For TCP, an explicit label *pins* a connection: neither PLB nor a retransmission timeout changes the label any
//! more.
//!
//! A label can be used without a lease until a socket in the namespace takes an exclusive, process or user lease.
//! From then on the kernel refuses unleased labels with EINVAL, even after that lease has ended. Leases in this crate
//! are therefore shared with every socket ([`Share::Any`]) by default.

use std::fmt;
use std::fs;
use std::io;
use std::net::{Ipv6Addr, SocketAddrV6, TcpStream, UdpSocket};
use std::os::fd::AsFd;

use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, Type};

use crate::{Error, Result, sys};

/// A flow label: 20 bits. 0 means "no label".
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Label(u32);

impl Label {
    /// The largest label.
    pub const MAX: u32 = 0xf_ffff;

    /// Creates a label.
    ///
    /// # Errors
    /// If the value exceeds 20 bits.
    pub fn new(label: u32) -> Result<Self> {
        if label > Self::MAX {
            return Err(Error::Invalid(format!(
                "a flow label has 20 bits, 0 to {:#x}; got {label:#x}",
                Self::MAX
            )));
        }
        Ok(Self(label))
    }

    /// Makes a label from 1 to 2^20-1 out of random bits. The result is never equal to the label `not`.
    pub fn random(bits: u32, not: Option<Self>) -> Self {
        let label = Self(bits % Self::MAX + 1);
        if Some(label) == not { Self(label.0 % Self::MAX + 1) } else { label }
    }

    /// Returns the label as a number.
    pub fn get(self) -> u32 {
        self.0
    }

    /// Encodes the label as the last 20 of the first 32 bits of an IPv6 header.
    pub fn to_wire(self) -> [u8; 4] {
        self.0.to_be_bytes()
    }

    /// Decodes a label from the first four bytes of an IPv6 header, or from `flr_label` or `sin6_flowinfo`.
    pub fn from_wire(bytes: [u8; 4]) -> Self {
        Self(u32::from_be_bytes(bytes) & Self::MAX)
    }

    /// Returns the label as std and socket2 expect it: they pass `flowinfo` to the kernel unchanged, and the kernel
    /// reads it in network byte order.
    fn flowinfo(self) -> u32 {
        self.0.to_be()
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:05x}", self.0)
    }
}

impl std::str::FromStr for Label {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let number = match text.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16),
            None => text.parse(),
        };
        Self::new(number.map_err(|_| {
            Error::Invalid(format!("`{text}` is not a flow label: a number of 0 to {:#x}", Self::MAX))
        })?)
    }
}

/// Sockets that may use a leased label.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Share {
    /// This socket only. Taking such a lease switches unleased labels off for the whole namespace.
    Exclusive,
    /// Sockets of this process. Has the same side effect.
    Process,
    /// Sockets of this user. Has the same side effect.
    User,
    /// Every socket.
    #[default]
    Any,
}

impl Share {
    fn code(self) -> u8 {
        match self {
            Self::Exclusive => 1,
            Self::Process => 2,
            Self::User => 3,
            Self::Any => 255,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        [Self::Exclusive, Self::Process, Self::User, Self::Any].into_iter().find(|share| share.code() == code)
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exclusive => "exclusive",
            Self::Process => "process",
            Self::User => "user",
            Self::Any => "any",
        })
    }
}

/// Terms of a lease.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Terms {
    /// The label; `None`: the kernel chooses one.
    pub label: Option<Label>,
    /// The single destination of the label; the kernel does not lease a label for all destinations.
    pub destination: Ipv6Addr,
    /// Sockets that may use the label.
    pub share: Share,
    /// Whether to fail if the label is already leased, instead of joining that lease.
    pub fresh: bool,
    /// Time for which the kernel keeps the lease after its last use, in seconds. Values above about 60 need
    /// CAP_NET_ADMIN.
    pub linger_s: u16,
    /// Minimum lifetime of the lease, in seconds. Values above about 60 need CAP_NET_ADMIN.
    pub expires_s: u16,
}

impl Terms {
    /// Creates terms for a destination: a label shared with every socket, with the kernel's default times.
    pub fn new(label: Option<Label>, destination: Ipv6Addr) -> Self {
        Self { label, destination, share: Share::Any, fresh: false, linger_s: 0, expires_s: 0 }
    }
}

/// A lease as reported by the kernel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Lease {
    /// The label.
    pub label: Label,
    /// Sockets that may use the label; `None` for a code that this crate does not know.
    pub share: Option<Share>,
    /// Linger time, in seconds.
    pub linger_s: u16,
    /// Remaining lifetime, in seconds.
    pub expires_s: u16,
}

/// Leases a label for this socket until the socket is closed or the label is [`put`]; returns the label.
///
/// # Errors
/// If another socket has a lease of the label that this one may not join ([`Share`]); if this socket lacks the rights
/// and exceeds 32 leases or asks for long times; or if `flowlabel_state_ranges` reserves the label for automatic ones.
pub fn lease(socket: &impl AsFd, terms: &Terms) -> Result<Label> {
    if terms.destination.is_unspecified() || terms.destination.is_multicast() {
        return Err(Error::Invalid("a lease is for one destination, a unicast IPv6 address".to_owned()));
    }
    let mut request = encode(Action::Get, terms);
    let doing = match terms.label {
        Some(label) => format!("leasing flow label {label}"),
        None => "leasing a flow label".to_owned(),
    };
    set(socket, &mut request).map_err(|source| match source.raw_os_error() {
        Some(libc::EPERM) if terms.linger_s > 0 || terms.expires_s > 0 => Error::NotPermitted {
            doing: format!("{doing} with linger {} s, expires {} s", terms.linger_s, terms.expires_s),
            cure: "another socket has an exclusive lease (`plb label list` shows the owner), or the times need \
                   CAP_NET_ADMIN (a few seconds do not)"
                .to_owned(),
        },
        Some(libc::EPERM) => Error::NotPermitted {
            doing,
            cure: "another socket leased it for itself, its process or its user; `plb label list` shows the holder. Take \
                   another label, or wait until that lease ends"
                .to_owned(),
        },
        Some(libc::EEXIST) => Error::Invalid(format!(
            "{doing}: already leased (`plb label list`); take another label, or join it without asking for a fresh one"
        )),
        Some(libc::ENOBUFS) => Error::NotPermitted {
            doing,
            cure: "a socket holds at most 32 labels without CAP_NET_ADMIN; put some back".to_owned(),
        },
        Some(libc::ERANGE) => Error::Invalid(format!(
            "{doing}: net.ipv6.flowlabel_state_ranges=1 keeps labels from 0x80000 on for automatic ones; take a \
             smaller one"
        )),
        _ => explain(doing, source),
    })?;
    decode(&request).map(|lease| lease.label)
}

/// Gives back this socket's lease of `label`. A connection that used the label falls back to its automatic label and is
/// no longer pinned.
///
/// # Errors
/// If the socket does not hold the lease.
pub fn put(socket: &impl AsFd, label: Label) -> Result<()> {
    let mut request = encode(Action::Put, &Terms::new(Some(label), Ipv6Addr::UNSPECIFIED));
    set(socket, &mut request).map_err(|source| match source.raw_os_error() {
        Some(libc::ESRCH) => Error::Gone(format!("this socket holds no lease of flow label {label}")),
        _ => explain(format!("putting back flow label {label}"), source),
    })
}

/// Extends a lease.
///
/// # Errors
/// If the socket does not hold the lease, or the times need rights that are missing.
pub fn renew(socket: &impl AsFd, label: Label, linger_s: u16, expires_s: u16) -> Result<()> {
    let terms = Terms { linger_s, expires_s, ..Terms::new(Some(label), Ipv6Addr::UNSPECIFIED) };
    let mut request = encode(Action::Renew, &terms);
    set(socket, &mut request).map_err(|source| match source.raw_os_error() {
        Some(libc::ESRCH) => Error::Gone(format!("this socket holds no lease of flow label {label}")),
        Some(libc::EPERM) => Error::NotPermitted {
            doing: format!("renewing flow label {label} with linger {linger_s} s, expires {expires_s} s"),
            cure: "long times need CAP_NET_ADMIN; a few seconds do not".to_owned(),
        },
        _ => explain(format!("renewing flow label {label}"), source),
    })
}

/// Flow label that a socket sends, as far as the kernel reports it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Current {
    /// The hash of the connection, which repathing changes. Its value is visible only on the wire.
    Automatic,
    /// No label: automatic labels are off and no other label is set.
    Zero,
    /// A label that was set explicitly; repathing does not change it.
    Explicit(Label, Option<Lease>),
}

/// Returns the current label of a connected socket.
///
/// # Errors
/// If the socket is not an IPv6 socket.
pub fn current(socket: &impl AsFd) -> Result<Current> {
    let fd = sys::raw(socket);
    let mut request = [0; REQUEST_LENGTH];
    match sys::get_option(fd, libc::IPPROTO_IPV6, IPV6_FLOWLABEL_MGR, &mut request) {
        Ok(length) => {
            let lease = decode(request.get(..length).unwrap_or_default())?;
            // A label of 0 means that the socket holds no label.
            if lease.label.get() != 0 {
                return Ok(Current::Explicit(lease.label, Some(lease)));
            }
        }
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => {}
        Err(source) => return Err(explain("reading the flow label of a socket".to_owned(), source)),
    }
    // An unleased label appears in the peer's address, but only if the socket shows labels at all. If it does not, this
    // function switches that on for a moment. During that time, the socket's owner sees the same address as before,
    // unless the connection has a label.
    let shown = crate::sock::show_labels(socket, true)?;
    let peer = SockRef::from(&fd).peer_addr().ok().and_then(|peer| peer.as_socket_ipv6());
    if !shown {
        crate::sock::show_labels(socket, false)?;
    }
    let unleased = Label::from_wire(peer.map_or(0, |peer| peer.flowinfo()).to_ne_bytes());
    if unleased.get() != 0 {
        return Ok(Current::Explicit(unleased, None));
    }
    Ok(if crate::sock::auto_label(socket)? { Current::Automatic } else { Current::Zero })
}

/// A line of `/proc/net/ip6_flowlabel`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Listed {
    /// The label.
    pub label: Label,
    /// Sockets that may use the label.
    pub share: Option<Share>,
    /// Process or user that owns the lease, for those two shares; otherwise 0.
    pub owner: u32,
    /// Number of sockets that use the label.
    pub users: u32,
    /// Linger time, in seconds.
    pub linger_s: u32,
    /// Remaining lifetime, in seconds; negative once expired.
    pub expires_s: i64,
    /// Destination of the label.
    pub destination: Ipv6Addr,
}

/// Returns every lease of the calling thread's namespace.
///
/// # Errors
/// [`Error::Unsupported`] without IPv6.
pub fn list() -> Result<Vec<Listed>> {
    let text = fs::read_to_string("/proc/thread-self/net/ip6_flowlabel").map_err(|source| {
        if source.kind() == io::ErrorKind::NotFound {
            no_ipv6()
        } else {
            Error::kernel("reading ip6_flowlabel", "run as root", source)
        }
    })?;
    parse_list(&text)
}

/// Parses `/proc/net/ip6_flowlabel`.
///
/// # Errors
/// If a line is malformed.
pub fn parse_list(text: &str) -> Result<Vec<Listed>> {
    text.lines().skip(1).filter(|line| !line.trim().is_empty()).map(parse_line).collect()
}

fn parse_line(line: &str) -> Result<Listed> {
    let bad = || Error::malformed("/proc/net/ip6_flowlabel", format_args!("`{line}`"));
    // Label S Owner Users Linger Expires Dst Opt
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [label, share, owner, users, linger, expires, destination, _options] = fields[..] else {
        return Err(bad());
    };
    let destination =
        u128::from_str_radix(destination, 16).ok().filter(|_| destination.len() == 32).ok_or_else(bad)?;
    Ok(Listed {
        label: u32::from_str_radix(label, 16)
            .ok()
            .and_then(|label| Label::new(label).ok())
            .ok_or_else(bad)?,
        share: Share::from_code(share.parse().map_err(|_| bad())?),
        owner: owner.parse().map_err(|_| bad())?,
        users: users.parse().map_err(|_| bad())?,
        linger_s: linger.parse().map_err(|_| bad())?,
        expires_s: expires.parse().map_err(|_| bad())?,
        destination: destination.into(),
    })
}

/// Connects with exactly this label on every packet, including the SYN. `local`: the address to bind to first.
///
/// `bind` alone cannot set a label: the kernel ignores that field there.
///
/// # Errors
/// Same as `connect`; the module documentation explains EINVAL.
pub fn connect(to: SocketAddrV6, label: Label, local: Option<SocketAddrV6>) -> Result<TcpStream> {
    let doing = || format!("connecting to {to} with flow label {label}");
    let socket = labelled(Type::STREAM, Protocol::TCP, local)?;
    socket.connect(&address(to, label)).map_err(|source| explain(doing(), source))?;
    Ok(socket.into())
}

/// Opens a UDP socket whose datagrams can each carry a different label: see [`send_to`].
///
/// # Errors
/// Same as `socket` and `bind`.
pub fn udp(local: Option<SocketAddrV6>) -> Result<UdpSocket> {
    Ok(labelled(Type::DGRAM, Protocol::UDP, local)?.into())
}

/// Sends one datagram with the given label over a socket opened by [`udp`].
///
/// # Errors
/// Same as `sendto`; the module documentation explains EINVAL.
pub fn send_to(socket: &UdpSocket, data: &[u8], to: SocketAddrV6, label: Label) -> Result<usize> {
    SockRef::from(socket)
        .send_to(data, &address(to, label))
        .map_err(|source| explain(format!("sending to {to} with flow label {label}"), source))
}

/// Returns whether unleased labels still work in this namespace; see the module documentation. Sends nothing.
///
/// # Errors
/// [`Error::Unsupported`] without IPv6.
pub fn unleased_labels_work() -> Result<bool> {
    let socket = labelled(Type::DGRAM, Protocol::UDP, None)?;
    let loopback = SocketAddrV6::new(Ipv6Addr::LOCALHOST, 9, 0, 0);
    let leased: Vec<Label> = list()?.into_iter().map(|listed| listed.label).collect();
    let probe = (1..=Label::MAX).map(Label).find(|label| !leased.contains(label)).unwrap_or(Label(1));
    Ok(socket
        .connect(&address(loopback, probe))
        .map_or_else(|error| error.raw_os_error() != Some(libc::EINVAL), |()| true))
}

fn labelled(kind: Type, protocol: Protocol, local: Option<SocketAddrV6>) -> Result<Socket> {
    let socket = Socket::new(Domain::IPV6, kind, Some(protocol))
        .map_err(|source| explain("opening an IPv6 socket".to_owned(), source))?;
    crate::sock::show_labels(&socket, true)?;
    if let Some(local) = local {
        socket.bind(&SockAddr::from(local)).map_err(|source| {
            Error::kernel(format!("binding to {local}"), "use a port from 1024 on", source)
        })?;
    }
    Ok(socket)
}

fn address(to: SocketAddrV6, label: Label) -> SockAddr {
    SockAddr::from(SocketAddrV6::new(*to.ip(), to.port(), label.flowinfo(), to.scope_id()))
}

fn explain(doing: String, source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::EAFNOSUPPORT) => no_ipv6(),
        Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP) => {
            Error::Invalid(format!("{doing}: flow labels are for IPv6 sockets only"))
        }
        Some(libc::EINVAL) => Error::Invalid(format!(
            "{doing}: refused. A socket in this namespace has (or had) an exclusive, process or user lease; since then \
             labels must be leased first"
        )),
        _ => Error::kernel(doing, crate::error::NET_ADMIN, source),
    }
}

pub(crate) fn no_ipv6() -> Error {
    Error::Unsupported {
        what: "this kernel or namespace has no IPv6".to_owned(),
        cure: "flow labels and PLB need it: load the module, or boot without ipv6.disable=1".to_owned(),
    }
}

#[derive(Clone, Copy)]
enum Action {
    Get = 0,
    Put = 1,
    Renew = 2,
}

/// Encodes a `struct in6_flowlabel_req`.
fn encode(action: Action, terms: &Terms) -> [u8; REQUEST_LENGTH] {
    const CREATE: u16 = 1;
    const EXCLUSIVE: u16 = 2;
    let flags = match action {
        Action::Get if terms.fresh => CREATE | EXCLUSIVE,
        Action::Get => CREATE,
        Action::Put | Action::Renew => 0,
    };
    let mut request = [0; REQUEST_LENGTH];
    request[0..16].copy_from_slice(&terms.destination.octets());
    request[16..20].copy_from_slice(&terms.label.map_or([0; 4], Label::to_wire));
    request[20] = action as u8;
    request[21] = terms.share.code();
    request[22..24].copy_from_slice(&flags.to_ne_bytes());
    request[24..26].copy_from_slice(&terms.expires_s.to_ne_bytes());
    request[26..28].copy_from_slice(&terms.linger_s.to_ne_bytes());
    request
}

/// Decodes the kernel's answer.
fn decode(request: &[u8]) -> Result<Lease> {
    let Ok(request) = <&[u8; REQUEST_LENGTH]>::try_from(request) else {
        return Err(Error::malformed(
            "struct in6_flowlabel_req",
            format_args!("{} bytes instead of {REQUEST_LENGTH}", request.len()),
        ));
    };
    let [.., l0, l1, l2, l3, _action, share, _f0, _f1, e0, e1, g0, g1, _, _, _, _] = *request;
    Ok(Lease {
        label: Label::from_wire([l0, l1, l2, l3]),
        share: Share::from_code(share),
        expires_s: u16::from_ne_bytes([e0, e1]),
        linger_s: u16::from_ne_bytes([g0, g1]),
    })
}

fn set(socket: &impl AsFd, request: &mut [u8; REQUEST_LENGTH]) -> io::Result<()> {
    sys::set_option(sys::raw(socket), libc::IPPROTO_IPV6, IPV6_FLOWLABEL_MGR, request)
}

const REQUEST_LENGTH: usize = 32;
const IPV6_FLOWLABEL_MGR: i32 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    /// Laid out by hand from `include/uapi/linux/in6.h` for a little-endian machine.
    #[rustfmt::skip]
    #[cfg(target_endian = "little")]
    const REQUEST: [u8; 32] = [
        0xfd, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, // flr_dst fd00:2::2
        0x00, 0x0a, 0xbc, 0xde, // flr_label 0xabcde, big endian
        0,                      // flr_action IPV6_FL_A_GET
        255,                    // flr_share IPV6_FL_S_ANY
        0x03, 0x00,             // flr_flags CREATE|EXCL
        0x07, 0x00,             // flr_expires 7 s
        0x05, 0x01,             // flr_linger 261 s
        0, 0, 0, 0,             // __flr_pad
    ];

    fn terms() -> Terms {
        Terms {
            label: Some(Label(0xabcde)),
            destination: "fd00:2::2".parse().unwrap(),
            share: Share::Any,
            fresh: true,
            linger_s: 261,
            expires_s: 7,
        }
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn the_request_has_the_kernels_layout() {
        assert_eq!(encode(Action::Get, &terms()), REQUEST);
        let lease = decode(&REQUEST).unwrap();
        let expected = Lease { label: Label(0xabcde), share: Some(Share::Any), linger_s: 261, expires_s: 7 };
        assert_eq!(lease, expected);
        assert_eq!(encode(Action::Put, &terms())[20..24], [1, 255, 0, 0]);
        assert_eq!(encode(Action::Renew, &terms())[20..24], [2, 255, 0, 0]);
    }

    #[test]
    fn a_truncated_answer_is_an_error() {
        let whole = encode(Action::Get, &terms());
        for length in 0..whole.len() {
            assert!(decode(&whole[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn labels_have_twenty_bits() {
        assert!(Label::new(0xf_ffff).is_ok());
        let error = Label::new(0x10_0000).unwrap_err().to_string();
        assert!(error.contains("20 bits") && error.contains("0x100000"), "{error}");
        for (text, expected) in
            [("0xabcde", Some(0xabcde)), ("43981", Some(0xabcd)), ("0", Some(0)), ("0xfffff", Some(0xf_ffff))]
        {
            assert_eq!(text.parse::<Label>().ok().map(Label::get), expected, "{text}");
        }
        for text in ["", "x", "-1", "0x", "0x100000", "1048576", "99999999999"] {
            assert!(text.parse::<Label>().is_err(), "{text}");
        }
        assert_eq!(Label(0xabc).to_string(), "0x00abc");
        assert_eq!(Label::from_wire([0x6f, 0xfa, 0xbc, 0xde]), Label(0xabcde));
    }

    #[test]
    fn random_labels_are_never_zero_nor_the_old_one() {
        for bits in [0, 1, Label::MAX - 1, Label::MAX, u32::MAX] {
            let label = Label::random(bits, None);
            assert!((1..=Label::MAX).contains(&label.get()));
            let other = Label::random(bits, Some(label));
            assert!((1..=Label::MAX).contains(&other.get()) && other != label);
        }
    }

    /// Output of `cat /proc/net/ip6_flowlabel` with one lease of each share, on Linux 6.18.
    const LISTING: &str = "\
Label S Owner  Users  Linger Expires  Dst                              Opt
00abc 1   0      1      6      5        fd000002000000000000000000000002 0
00abd 2   4711   2      7      -3       00000000000000000000000000000000 0
00abe 3   1000   1      6      60       fd000002000000000000000000000002 0
00abf 255 0      3      6      6        fd000002000000000000000000000002 0
";

    #[test]
    fn the_listing_is_read() {
        let listed = parse_list(LISTING).unwrap();
        let brief: Vec<_> =
            listed.iter().map(|l| (l.label.get(), l.share, l.owner, l.users, l.expires_s)).collect();
        assert_eq!(
            brief,
            [
                (0xabc, Some(Share::Exclusive), 0, 1, 5),
                (0xabd, Some(Share::Process), 4711, 2, -3),
                (0xabe, Some(Share::User), 1000, 1, 60),
                (0xabf, Some(Share::Any), 0, 3, 6),
            ]
        );
        assert_eq!(listed[0].destination, "fd00:2::2".parse::<Ipv6Addr>().unwrap());
        assert_eq!(listed[1].destination, Ipv6Addr::UNSPECIFIED);
        assert_eq!(parse_list("").unwrap(), []);
    }

    #[test]
    fn a_truncated_line_is_an_error() {
        let line = LISTING.lines().nth(1).unwrap();
        // A cut inside the last number would go unnoticed, but that number has only one digit.
        for length in 1..line.len() {
            assert!(parse_line(&line[..length]).is_err(), "{length}");
        }
    }
}
