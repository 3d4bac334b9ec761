//! Gives chosen sockets another flow label on the wire, from outside, whatever their congestion control: a BPF program
//! on the egress of a device looks the socket up by its cookie and rewrites the 20 bits. The TCP checksum does not cover
//! them.
//!
//! It runs after the host chose its own route: with several uplinks the label decides in the fabric, not on the host.

use crate::bpf::{self, Assembler, Attached, CookieMap};
use crate::flowlabel::Label;
use crate::link::Device;
use crate::{Error, Result};

/// The program on one or more devices. Everything is undone when this is dropped or the process ends.
#[derive(Debug)]
pub struct Relabeller {
    map: CookieMap,
    _attached: Vec<Attached>,
}

impl Relabeller {
    /// Attaches to the egress of these devices. No packet changes until [`set`](Self::set).
    ///
    /// # Errors
    /// Missing rights, a kernel before 6.6.
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

    /// From the next packet on, this socket's packets carry `label`. The count of rewritten packets starts over.
    ///
    /// # Errors
    /// When the table is full.
    pub fn set(&self, cookie: u64, label: Label) -> Result<()> {
        let mut value = [0; 16];
        value[..4].copy_from_slice(&label.to_wire());
        self.map.set(cookie, value)
    }

    /// The label a socket was given, and how many packets went out with it.
    ///
    /// # Errors
    /// When the kernel refuses to look.
    pub fn get(&self, cookie: u64) -> Result<Option<(Label, u64)>> {
        Ok(self.map.get(cookie)?.map(|[a, b, c, d, _, _, _, _, count @ ..]| {
            (Label::from_wire([a, b, c, d]), u64::from_ne_bytes(count))
        }))
    }

    /// The socket's own label counts again.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remove(&self, cookie: u64) -> Result<bool> {
        self.map.remove(cookie)
    }
}

/// Value of the map: label as on the wire, 4 bytes of padding, packets rewritten.
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
    // r7 = what the map has for this packet's socket
    p.copy(1, 6).call(GET_SOCKET_COOKIE).store64(10, -8, 0);
    map.load_into(1, &mut p).copy(2, 10).add(2, KEY).call(MAP_LOOKUP).end_if_equal(0, 0).copy(7, 0);
    // the first word of the IPv6 header
    p.copy(1, 6).set(2, header).copy(3, 10).add(3, WORD).set(4, 4).call(LOAD_BYTES).end_unless_equal(0, 0);
    p.load32(1, 10, -12).and32(1, keep_version_and_class).load32(2, 7, 0).or32(1, 2).store32(10, -12, 1);
    p.copy(1, 6).set(2, header).copy(3, 10).add(3, WORD).set(4, 4).set(5, 0).call(STORE_BYTES);
    p.end_unless_equal(0, 0).set(1, 1).atomic_add64(7, 8, 1);
    p.finish()
}

/// Sockets relabelled at once.
const CAPACITY: u32 = 65_536;
