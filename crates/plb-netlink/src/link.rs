//! Network devices of the calling thread's namespace, by rtnetlink.

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkLayerType, LinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;

use crate::{Error, Result, netlink, sys};

/// One device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Device {
    /// Name of the device.
    pub name: String,
    /// Index in its namespace.
    pub index: u32,
    /// Whether the device is up.
    pub up: bool,
    /// Whether the device is `lo`.
    pub loopback: bool,
    /// Bytes before the IPv6 header: 14 on Ethernet and loopback, 0 on tunnels.
    pub header_length: u8,
}

/// Returns all devices.
///
/// # Errors
/// If a reply is cut short.
pub fn list() -> Result<Vec<Device>> {
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::GetLink(LinkMessage::default()));
    request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let messages = netlink::exchange(NETLINK_ROUTE, request, "listing devices", crate::error::NET_ADMIN)?;
    Ok(messages
        .into_iter()
        .filter_map(|message| match message {
            RouteNetlinkMessage::NewLink(link) => device(&link),
            _ => None,
        })
        .collect())
}

/// Returns one device by name.
///
/// # Errors
/// [`Error::Gone`], listing the existing names.
pub fn named(name: &str) -> Result<Device> {
    let devices = list()?;
    // The kernel also finds alternative names.
    let index = sys::device_index(name).ok();
    devices.iter().find(|device| Some(device.index) == index).cloned().ok_or_else(|| {
        let there: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        Error::Gone(format!(
            "no device `{name}` in this network namespace; existing devices: {}",
            there.join(", ")
        ))
    })
}

fn device(link: &LinkMessage) -> Option<Device> {
    let name = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })?;
    let kind = link.header.link_layer_type;
    Some(Device {
        name,
        index: link.header.index,
        up: link.header.flags.contains(LinkFlags::Up),
        loopback: link.header.flags.contains(LinkFlags::Loopback),
        header_length: if matches!(kind, LinkLayerType::Ether | LinkLayerType::Loopback) { 14 } else { 0 },
    })
}
