//! Identity of a replica: its serving `ip:port`, in the canonical text form that Envoy's clusters use.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

/// Length of the longest text form, `[v6]:port`, bytes.
pub const MAX_TEXT: usize = 47;

/// A serving `ip:port`. It is plain data, so that blobs in shared data can hold it.
///
/// The text form is canonical (`10.0.0.1:80`, `[2001:db8::1]:80`): Envoy ignores any other spelling. In sorted order
/// the ports of one host are adjacent.
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Endpoint {
    /// IPv6 octets; an IPv4 address fills the first four, and the others are zero.
    ip: [u8; 16],
    port: u16,
    /// 4 or 6; 0 in a zeroed record, which is not an endpoint.
    family: u16,
}

impl Endpoint {
    /// Returns the endpoint as a socket address.
    pub fn socket_addr(&self) -> SocketAddr {
        let ip = if self.family == 4 {
            let [a, b, c, d, ..] = self.ip;
            IpAddr::V4(Ipv4Addr::new(a, b, c, d))
        } else {
            IpAddr::V6(Ipv6Addr::from(self.ip))
        };
        SocketAddr::new(ip, self.port)
    }

    /// The port, 1 to 65535.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the same host at another port.
    #[must_use]
    pub fn with_port(mut self, port: u16) -> Self {
        self.port = port;
        self
    }

    /// Whether both are ports of one host.
    pub fn same_host(&self, other: &Self) -> bool {
        self.family == other.family && self.ip == other.ip
    }

    /// Like [`Self::from_str`], from bytes; `None` if they are not an endpoint.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        Self::parse_plain_v4(text).or_else(|| Self::parse_any(text))
    }

    /// Parses every spelling that the standard library knows.
    fn parse_any(text: &[u8]) -> Option<Self> {
        // Longer text cannot be an address; a bound here keeps hostile headers cheap.
        if text.len() > MAX_TEXT {
            return None;
        }
        let address: SocketAddr = std::str::from_utf8(text).ok()?.parse().ok()?;
        (address.port() != 0).then(|| address.into())
    }

    /// Parses the usual spelling of IPv4, with less code than the standard parser needs for all spellings. `None`
    /// leaves the decision to the standard parser.
    fn parse_plain_v4(text: &[u8]) -> Option<Self> {
        let mut ip = [0; 16];
        let mut rest = text;
        for (octet, end) in ip.iter_mut().zip(b"...:") {
            let (number, after) = leading_number(rest)?;
            *octet = u8::try_from(number).ok()?;
            rest = after.strip_prefix(&[*end])?;
        }
        match leading_number(rest)? {
            (port @ 1.., []) => Some(Self { ip, port, family: 4 }),
            _ => None,
        }
    }

    /// Appends the text form. For IPv4, it does not use [`fmt`], whose overhead every request would pay.
    pub fn append_to(&self, text: &mut Vec<u8>) {
        if self.family != 4 {
            text.extend_from_slice(self.to_string().as_bytes());
            return;
        }
        let [a, b, c, d, ..] = self.ip;
        for (octet, end) in [a, b, c, d].into_iter().zip(*b"...:") {
            append_number(text, octet.into());
            text.push(end);
        }
        append_number(text, self.port);
    }

    /// Whether a record read from shared data holds a valid endpoint.
    pub(crate) fn is_valid(&self) -> bool {
        self.port != 0 && (self.family == 6 || (self.family == 4 && self.ip.iter().skip(4).all(|b| *b == 0)))
    }
}

/// Parses the number that the text begins with, and returns it and the text after it. `None` if there is no number, or
/// if it has a leading zero. Not inlined: five copies would be more code than the calls.
#[inline(never)]
fn leading_number(text: &[u8]) -> Option<(u16, &[u8])> {
    let mut number = 0u16;
    let mut rest = text;
    while let Some((digit, after)) = rest.split_first().filter(|(digit, _)| digit.is_ascii_digit()) {
        if number == 0 && rest.len() < text.len() {
            return None;
        }
        number = number.checked_mul(10)?.checked_add(u16::from(digit - b'0'))?;
        rest = after;
    }
    (rest.len() < text.len()).then_some((number, rest))
}

#[inline(never)]
fn append_number(text: &mut Vec<u8>, number: u16) {
    let mut power = 10_000;
    while power > 1 && power > number {
        power /= 10;
    }
    while power > 0 {
        text.push(b'0' + (number / power % 10) as u8);
        power /= 10;
    }
}

impl From<SocketAddr> for Endpoint {
    fn from(addr: SocketAddr) -> Self {
        let mut ip = [0; 16];
        let family = match addr.ip() {
            IpAddr::V4(v4) => {
                for (to, from) in ip.iter_mut().zip(v4.octets()) {
                    *to = from;
                }
                4
            }
            IpAddr::V6(v6) => {
                ip = v6.octets();
                6
            }
        };
        Self { ip, port: addr.port(), family }
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text.as_bytes()).ok_or(EndpointError)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.socket_addr().fmt(f)
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.socket_addr().fmt(f)
    }
}

/// The text is not an `ip:port` with a port of 1 to 65535 (`[ip]:port` for IPv6).
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("not an `ip:port` with a port of 1 to 65535 (IPv6 as `[ip]:port`)")]
pub struct EndpointError;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_is_canonical_both_ways() {
        for (text, canonical) in [
            ("127.0.0.1:80", "127.0.0.1:80"),
            ("[::1]:24142", "[::1]:24142"),
            ("[0:0:0:0:0:0:0:1]:24142", "[::1]:24142"),
            ("[2001:DB8::5]:65535", "[2001:db8::5]:65535"),
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), canonical, "{text}");
        }
    }

    #[test]
    fn invalid_endpoints_are_refused() {
        for text in [
            "",
            "a:80",
            "127.0.0.1",
            "127.0.0.1:0",
            "127.0.0.1:70000",
            "::1:80",
            "localhost:80",
            " 1.2.3.4:5",
        ] {
            assert_eq!(text.parse::<Endpoint>(), Err(EndpointError), "{text}");
        }
        assert!("1".repeat(1000).parse::<Endpoint>().is_err());
    }

    proptest! {
        /// The fast paths agree with the standard library.
        #[test]
        fn fast_paths_agree_with_the_standard_library(
            text in prop_oneof!["[0-9a-f:.\\[\\]]{0,50}", "[0-9]{1,4}(\\.[0-9]{1,4}){3}:[0-9]{0,6}", ".{0,20}"],
            ip in any::<IpAddr>(),
            port in 1u16..,
        ) {
            let standard = text.parse::<SocketAddr>().ok().filter(|address| address.port() != 0);
            prop_assert_eq!(Endpoint::parse(text.as_bytes()), standard.map(Endpoint::from));
            let endpoint = Endpoint::from(SocketAddr::new(ip, port));
            let mut appended = b"x".to_vec();
            endpoint.append_to(&mut appended);
            prop_assert_eq!(&appended, &format!("x{endpoint}").into_bytes());
            prop_assert_eq!(Endpoint::parse(&appended[1..]), Some(endpoint));
        }
    }
}
