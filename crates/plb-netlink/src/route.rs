//! Congestion control and ECN of one IPv6 route, by rtnetlink. This is the narrowest way to use DCTCP: towards a fabric
//! only, with no change for other destinations.
//!
//! The congestion control of a route is the default of sockets that connect through it, applied at `connect`. If it
//! is locked, the route also refuses any other one that a socket requests.

use std::fmt;
use std::net::Ipv6Addr;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkMessage,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteMetric, RouteNextHop, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;

use crate::error::NET_ADMIN;
use crate::{Error, Result, link, netlink, sock, sysctl};

/// An IPv6 prefix; `::/0` is the default route.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Prefix {
    /// Address, with host bits zero.
    pub address: Ipv6Addr,
    /// Length in bits, 0 to 128.
    pub length: u8,
}

impl Prefix {
    fn contains(&self, address: Ipv6Addr) -> bool {
        address.to_bits() & self.mask() == self.address.to_bits() & self.mask()
    }

    /// Returns the address without its host bits.
    fn network(&self) -> Ipv6Addr {
        Ipv6Addr::from_bits(self.address.to_bits() & self.mask())
    }

    fn mask(&self) -> u128 {
        u128::MAX.checked_shl(128 - u32::from(self.length)).unwrap_or(0)
    }
}

impl std::str::FromStr for Prefix {
    type Err = Error;

    /// Parses `default`, `ADDRESS/LENGTH` or `ADDRESS` (128 bits).
    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            Error::Invalid(format!(
                "`{text}` is not an IPv6 prefix: `default`, ADDRESS or ADDRESS/LENGTH (length 0 to 128)"
            ))
        };
        if text == "default" {
            return Ok(Self { address: Ipv6Addr::UNSPECIFIED, length: 0 });
        }
        let (address, length) = text.split_once('/').unwrap_or((text, "128"));
        let address = address.parse().map_err(|_| bad())?;
        let length = length.parse().ok().filter(|length| *length <= 128).ok_or_else(bad)?;
        let prefix = Self { address, length };
        if prefix.network() != address {
            let cure = format!("its host bits are not zero; the network is `{}/{length}`", prefix.network());
            return Err(Error::Invalid(format!("`{text}` is not an IPv6 prefix: {cure}")));
        }
        Ok(prefix)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.length == 0 { f.write_str("default") } else { write!(f, "{}/{}", self.address, self.length) }
    }
}

/// One unicast route.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// Destination prefix.
    pub destination: Prefix,
    /// Routing table; 254 is the main table.
    pub table: u32,
    /// Preference among routes to the same destinations; lower wins.
    pub priority: u32,
    /// Device names, one for each next hop.
    pub devices: Vec<String>,
    /// Gateways, one for each next hop that has one.
    pub gateways: Vec<Ipv6Addr>,
    /// The route's congestion control.
    pub congestion: Option<String>,
    /// Whether sockets are forbidden to choose another congestion control.
    pub locked: bool,
    /// `features ecn`: whether to negotiate ECN regardless of `net.ipv4.tcp_ecn`.
    pub ecn: bool,
    message: RouteMessage,
}

/// Changes to a route; `None` keeps a value.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Change {
    /// The congestion control; an empty name removes it.
    pub congestion: Option<String>,
    /// Whether sockets are forbidden to choose another congestion control.
    pub locked: Option<bool>,
    /// `features ecn`.
    pub ecn: Option<bool>,
}

/// Returns every IPv6 unicast route of the main table. Needs no special rights.
///
/// # Errors
/// If a reply is cut short.
pub fn list() -> Result<Vec<Route>> {
    let devices = link::list()?;
    let name = |index: u32| {
        devices.iter().find(|d| d.index == index).map_or_else(|| format!("#{index}"), |d| d.name.clone())
    };
    let mut query = RouteMessage::default();
    query.header.address_family = AddressFamily::Inet6;
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::GetRoute(query));
    request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let messages = netlink::exchange(NETLINK_ROUTE, request, "listing IPv6 routes", NET_ADMIN)?;
    Ok(messages
        .into_iter()
        .filter_map(|message| match message {
            RouteNetlinkMessage::NewRoute(route) => read(route, &name),
            _ => None,
        })
        .filter(|route| route.table == u32::from(RouteHeader::RT_TABLE_MAIN))
        .collect())
}

/// Returns the route with exactly this destination or, for a single address, the route that packets to it take: the one
/// with the longest prefix. If several are left, the one with the lowest value of `priority` wins.
///
/// # Errors
/// [`Error::Gone`] if there is no such route.
pub fn find(wanted: Prefix) -> Result<Route> {
    let mut routes = list()?;
    routes.retain(|route| {
        route.destination == wanted || (wanted.length == 128 && route.destination.contains(wanted.address))
    });
    routes.sort_by_key(|route| (u8::MAX - route.destination.length, route.priority));
    routes.into_iter().next().ok_or_else(|| {
        Error::Gone(format!("no IPv6 route to {wanted} in the main table (`plb route` lists them)"))
    })
}

/// Replaces the route with a copy of it that has the changed metrics, and reads it back.
///
/// # Errors
/// If the congestion control is unknown or rights are missing; in both cases the route is unchanged.
pub fn set(route: &Route, change: &Change) -> Result<Route> {
    let wanted_name = change.congestion.as_deref().or(route.congestion.as_deref()).filter(|n| !n.is_empty());
    if change.locked == Some(true) && wanted_name.is_none() {
        return Err(Error::Invalid("there is no congestion control to lock: name one".to_owned()));
    }
    if let Some(name) = change.congestion.as_deref().filter(|name| !name.is_empty()) {
        sock::check_congestion_name(name)?;
    }
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::NewRoute(changed(&route.message, change)));
    request.header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_REPLACE | NLM_F_CREATE;
    let doing = format!("changing the route to {}", route.destination);
    netlink::exchange(NETLINK_ROUTE, request, &doing, NET_ADMIN).map_err(|error| {
        match (error.errno(), wanted_name) {
            (Some(libc::EINVAL | libc::ENOENT), Some(name))
                if !sysctl::congestion_controls().unwrap_or_default().iter().any(|known| known == name) =>
            {
                sock::unknown_congestion(name)
            }
            _ => error,
        }
    })?;
    let found = find(route.destination)?;
    let wanted = change.ecn.is_none_or(|ecn| ecn == found.ecn)
        && found.congestion.as_deref() == wanted_name
        && change.locked.is_none_or(|locked| locked == found.locked);
    if wanted {
        return Ok(found);
    }
    Err(Error::malformed("a route", format_args!("{doing}: read back something else: {found:?}")))
}

fn read(message: RouteMessage, name: &impl Fn(u32) -> String) -> Option<Route> {
    if message.header.kind != RouteType::Unicast {
        return None;
    }
    let mut route = Route {
        destination: Prefix {
            address: Ipv6Addr::UNSPECIFIED,
            length: message.header.destination_prefix_length,
        },
        table: message.header.table.into(),
        priority: 0,
        devices: Vec::new(),
        gateways: Vec::new(),
        congestion: None,
        locked: false,
        ecn: false,
        message,
    };
    for attribute in &route.message.attributes {
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet6(address)) => route.destination.address = *address,
            RouteAttribute::Table(table) => route.table = *table,
            RouteAttribute::Priority(priority) => route.priority = *priority,
            RouteAttribute::Oif(index) => route.devices.push(name(*index)),
            RouteAttribute::Gateway(RouteAddress::Inet6(gateway)) => route.gateways.push(*gateway),
            RouteAttribute::MultiPath(hops) => {
                route.devices.extend(hops.iter().map(|hop| name(hop.interface_index)));
                route.gateways.extend(hops.iter().filter_map(gateway));
            }
            RouteAttribute::Metrics(metrics) => {
                for metric in metrics {
                    match metric {
                        RouteMetric::CcAlgo(name) => route.congestion = Some(name.clone()),
                        RouteMetric::Features(bits) => route.ecn = bits & FEATURE_ECN != 0,
                        RouteMetric::Lock(bits) => route.locked = bits & LOCK_CC_ALGO != 0,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Some(route)
}

fn gateway(hop: &RouteNextHop) -> Option<Ipv6Addr> {
    hop.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet6(gateway)) => Some(*gateway),
        _ => None,
    })
}

/// Returns the same route with changed metrics; metrics that are not in `change` keep their values.
fn changed(message: &RouteMessage, change: &Change) -> RouteMessage {
    let mut message = message.clone();
    let mut metrics = Vec::new();
    message.attributes.retain(|attribute| match attribute {
        RouteAttribute::Metrics(old) => {
            metrics.extend(old.iter().cloned());
            false
        }
        // Only the kernel sets this attribute.
        RouteAttribute::CacheInfo(_) => false,
        _ => true,
    });
    let bits = |metrics: &[RouteMetric], which: fn(&RouteMetric) -> Option<u32>| {
        metrics.iter().find_map(which).unwrap_or_default()
    };
    let mut features =
        bits(&metrics, |m| if let RouteMetric::Features(bits) = m { Some(*bits) } else { None });
    let mut lock = bits(&metrics, |m| if let RouteMetric::Lock(bits) = m { Some(*bits) } else { None });
    metrics.retain(|metric| !matches!(metric, RouteMetric::Features(_) | RouteMetric::Lock(_)));
    if let Some(name) = &change.congestion {
        metrics.retain(|metric| !matches!(metric, RouteMetric::CcAlgo(_)));
        if name.is_empty() {
            lock &= !LOCK_CC_ALGO;
        } else {
            metrics.push(RouteMetric::CcAlgo(name.clone()));
        }
    }
    match change.ecn {
        Some(true) => features |= FEATURE_ECN,
        Some(false) => features &= !FEATURE_ECN,
        None => {}
    }
    match change.locked {
        Some(true) => lock |= LOCK_CC_ALGO,
        Some(false) => lock &= !LOCK_CC_ALGO,
        None => {}
    }
    if features != 0 {
        metrics.push(RouteMetric::Features(features));
    }
    if lock != 0 {
        metrics.push(RouteMetric::Lock(lock));
    }
    if !metrics.is_empty() {
        message.attributes.push(RouteAttribute::Metrics(metrics));
    }
    message
}

/// Parses a datagram as the kernel sends it. Public for fuzzing; programs should use [`list`].
///
/// # Errors
/// If the datagram is not a sequence of whole, well-formed messages.
pub fn parse_datagram(datagram: &[u8]) -> Result<Vec<Route>> {
    let batch = netlink::parse::<RouteNetlinkMessage>(datagram, "parsing", "", &mut false)?;
    Ok(batch
        .messages
        .into_iter()
        .filter_map(|message| match message {
            RouteNetlinkMessage::NewRoute(route) => read(route, &|index| format!("#{index}")),
            _ => None,
        })
        .collect())
}

const FEATURE_ECN: u32 = 1;
/// Bit number `RTAX_CC_ALGO`.
const LOCK_CC_ALGO: u32 = 1 << 16;

#[cfg(test)]
pub(crate) mod tests;
