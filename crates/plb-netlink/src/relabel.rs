//! Gives selected sockets another flow label on the wire. This works with any congestion control, and does not change
//! the sockets. A BPF program on the egress of a device looks the socket up by its cookie and rewrites the 20 bits. The
//! TCP checksum does not cover them.
//!
//! The program runs after the host has chosen its own route. On a host with several uplinks, the new label therefore
//! affects the path in the fabric, not the choice of the uplink.

use crate::bpf::{self, Assembler, Attached, CookieMap};
use crate::flowlabel::Label;
use crate::link::Device;
use crate::{Error, Result};

/// The program on one or more devices. All changes are undone when this is dropped or the process ends.
#[derive(Debug)]
pub struct Relabeller {
    map: CookieMap,
    _attached: Vec<Attached>,
}

impl Relabeller {
    /// Attaches the program to the egress of these devices. No packet changes until [`set`](Self::set) is called.
    ///
    /// # Errors
    /// Missing rights, or a kernel before 6.6.
    pub fn attach(devices: &[Device]) -> Result<Self> {
        if devices.is_empty() {
            return Err(Error::Invalid("no device to attach to".to_owned()));
        }
        let map = CookieMap::new(CAPACITY)?;
        let attached = devices
            .iter()
            .map(|device| bpf::attach_egress(&program(&map, device.header_length)?, device.index))
            .collect::<Result<_>>()?;
        Ok(Self { map, _attached: attached })
    }

    /// Makes this socket's packets carry `label`, starting with the next one. The count of rewritten packets starts
    /// over.
    ///
    /// # Errors
    /// If the table is full.
    pub fn set(&self, cookie: u64, label: Label) -> Result<()> {
        let mut value = [0; 16];
        value[..4].copy_from_slice(&label.to_wire());
        self.map.set(cookie, value)
    }

    /// Returns the label given to a socket, and the number of packets sent with it.
    ///
    /// # Errors
    /// If the kernel refuses the lookup.
    pub fn get(&self, cookie: u64) -> Result<Option<(Label, u64)>> {
        Ok(self.map.get(cookie)?.map(|[a, b, c, d, _, _, _, _, count @ ..]| {
            (Label::from_wire([a, b, c, d]), u64::from_ne_bytes(count))
        }))
    }

    /// Stops rewriting: the socket's own label is sent again. Returns whether the socket was relabelled.
    ///
    /// # Errors
    /// If the kernel refuses the removal.
    pub fn remove(&self, cookie: u64) -> Result<bool> {
        self.map.remove(cookie)
    }
}

/// Assembles the program. A value of the map consists of the label as on the wire, 4 bytes of padding, and the number
/// of packets rewritten.
fn program(map: &CookieMap, header_length: u8) -> Result<Vec<u64>> {
    const GET_SOCKET_COOKIE: i32 = 46;
    const MAP_LOOKUP: i32 = 1;
    const LOAD_BYTES: i32 = 26;
    const STORE_BYTES: i32 = 9;
    /// `__sk_buff.protocol`.
    const PROTOCOL: i16 = 16;
    const KEY: i32 = -8;
    const WORD: i32 = -12;
    let ipv6 = i32::from(0x86dd_u16.to_be());
    let keep_version_and_class = u32::from_ne_bytes([0xff, 0xf0, 0, 0]);
    let header = i32::from(header_length);

    let mut p = Assembler::default();
    p.copy(6, 1).load32(1, 6, PROTOCOL).end_unless_equal(1, ipv6);
    // r7 = the map's value for this packet's socket
    p.copy(1, 6).call(GET_SOCKET_COOKIE).store64(10, -8, 0);
    map.load_into(1, &mut p).copy(2, 10).add(2, KEY).call(MAP_LOOKUP).end_if_equal(0, 0).copy(7, 0);
    // the first word of the IPv6 header
    p.copy(1, 6).set(2, header).copy(3, 10).add(3, WORD).set(4, 4).call(LOAD_BYTES).end_unless_equal(0, 0);
    p.load32(1, 10, -12).and32(1, keep_version_and_class).load32(2, 7, 0).or32(1, 2).store32(10, -12, 1);
    p.copy(1, 6).set(2, header).copy(3, 10).add(3, WORD).set(4, 4).set(5, 0).call(STORE_BYTES);
    p.end_unless_equal(0, 0).set(1, 1).atomic_add64(7, 8, 1);
    p.finish()
}

/// Maximum number of relabelled sockets at a time.
const CAPACITY: u32 = 65_536;
