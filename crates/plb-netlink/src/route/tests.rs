//! Tests with one captured route: parsing, writing, and every possible truncation.

use super::*;

/// Captured on Linux 6.18: `ip -6 route add fd00:2::/64 via fd00:1::1 dev u0 features ecn congctl lock reno mtu 1400`.
#[rustfmt::skip]
#[cfg(target_endian = "little")]
pub(crate) const REPLY: &[u8] = &[
    // nlmsghdr: 176 bytes, RTM_NEWROUTE, NLM_F_MULTI
    0xb0, 0, 0, 0, 0x18, 0, 0x02, 0, 0x01, 0, 0, 0, 0x6a, 0x0a, 0, 0,
    // rtmsg: AF_INET6, /64, main table, protocol boot, scope universe, unicast
    0x0a, 0x40, 0, 0, 0xfe, 0x03, 0, 0x01, 0, 0, 0, 0,
    8, 0, 15, 0, 0xfe, 0, 0, 0,                                            // RTA_TABLE 254
    20, 0, 1, 0, 0xfd, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,        // RTA_DST fd00:2::
    40, 0, 8, 0,                                                           // RTA_METRICS
    8, 0, 1, 0, 0, 0, 1, 0,                                                //   RTAX_LOCK bit 16
    8, 0, 2, 0, 0x78, 0x05, 0, 0,                                          //   RTAX_MTU 1400
    8, 0, 12, 0, 1, 0, 0, 0,                                               //   RTAX_FEATURES ecn
    9, 0, 16, 0, 0x72, 0x65, 0x6e, 0x6f, 0, 0, 0, 0,                       //   RTAX_CC_ALGO "reno"
    8, 0, 6, 0, 0, 4, 0, 0,                                                // RTA_PRIORITY 1024
    20, 0, 5, 0, 0xfd, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1,        // RTA_GATEWAY fd00:1::1
    8, 0, 4, 0, 3, 0, 0, 0,                                                // RTA_OIF 3
    36, 0, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,          // RTA_CACHEINFO
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    5, 0, 20, 0, 0, 0, 0, 0,                                               // RTA_PREF
];

fn route() -> Route {
    parse_datagram(REPLY).unwrap().remove(0)
}

#[test]
#[cfg(target_endian = "little")]
fn a_route_is_read() {
    let route = route();
    assert_eq!(route.destination, "fd00:2::/64".parse().unwrap());
    assert_eq!((route.table, route.priority), (254, 1024));
    assert_eq!(route.devices, ["#3"]);
    assert_eq!(route.gateways, ["fd00:1::1".parse::<Ipv6Addr>().unwrap()]);
    assert_eq!((route.congestion.as_deref(), route.locked, route.ecn), (Some("reno"), true, true));
}

#[test]
#[cfg(target_endian = "little")]
fn a_route_written_back_is_the_same_bytes() {
    let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(REPLY).unwrap();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    assert_eq!(bytes, REPLY);
}

#[test]
fn every_truncation_is_an_error() {
    for length in 0..REPLY.len() {
        assert!(parse_datagram(&REPLY[..length]).is_err(), "{length}");
    }
}

/// Returns the metrics of a changed route, in the order in which they are sent.
fn metrics(change: &Change) -> Vec<RouteMetric> {
    changed(&route().message, change)
        .attributes
        .into_iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Metrics(metrics) => Some(metrics),
            _ => None,
        })
        .unwrap_or_default()
}

#[test]
fn a_change_keeps_all_other_metrics() {
    use RouteMetric::{CcAlgo, Features, Lock, Mtu};
    let reno = || CcAlgo("reno".to_owned());
    let nothing = Change::default();
    assert_eq!(metrics(&nothing), [Mtu(1400), reno(), Features(1), Lock(1 << 16)]);
    assert_eq!(metrics(&Change { ecn: Some(false), ..nothing.clone() }), [Mtu(1400), reno(), Lock(1 << 16)]);
    assert_eq!(metrics(&Change { locked: Some(false), ..nothing.clone() }), [Mtu(1400), reno(), Features(1)]);
    let dctcp = Change { congestion: Some("dctcp".to_owned()), ..nothing.clone() };
    assert_eq!(metrics(&dctcp), [Mtu(1400), CcAlgo("dctcp".to_owned()), Features(1), Lock(1 << 16)]);
    let none = Change { congestion: Some(String::new()), ..nothing };
    assert_eq!(metrics(&none), [Mtu(1400), Features(1)]);
}

#[test]
fn the_kernels_own_figures_are_not_sent_back() {
    let sent = changed(&route().message, &Change::default());
    assert!(!sent.attributes.iter().any(|a| matches!(a, RouteAttribute::CacheInfo(_))));
    assert_eq!(sent.header, route().message.header);
}

#[test]
fn prefixes() {
    for (text, expected) in [
        ("default", Some("default")),
        ("::/0", Some("default")),
        ("fd00:2::/64", Some("fd00:2::/64")),
        ("fd00:2::1", Some("fd00:2::1/128")),
        ("fd00:2::/129", None),
        // Found by fuzzing: the address has bits beyond the prefix length. No route has such a prefix, so none matched.
        ("fd00:2::1/64", None),
        ("::6/0", None),
        ("fd00:2::/", None),
        ("10.0.0.0/8", None),
        ("", None),
    ] {
        let prefix = text.parse::<Prefix>().ok().map(|prefix| prefix.to_string());
        assert_eq!(prefix.as_deref(), expected, "{text}");
    }
    let prefix: Prefix = "fd00:2::/64".parse().unwrap();
    assert!(prefix.contains("fd00:2::9".parse().unwrap()));
    assert!(!prefix.contains("fd00:3::9".parse().unwrap()));
    let all: Prefix = "default".parse().unwrap();
    assert!(all.contains("2001:db8::1".parse().unwrap()));
}
