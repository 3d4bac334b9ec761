//! Captures packets on the wire: the IPv6 packets with ports that a namespace sends and receives.

use std::io::Read as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use plb_netlink::flowlabel::Label;
use socket2::{Domain, Protocol, Socket, Type};

use crate::{Fabric, Node, Result};

/// One captured packet with ports.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Packet {
    /// Flow label.
    pub label: Label,
    /// 6 TCP, 17 UDP.
    pub protocol: u8,
    /// Source port.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// TCP: SYN without ACK.
    pub syn: bool,
}

/// A capture in progress; records until dropped.
#[derive(Debug)]
pub struct Capture {
    packets: Arc<Mutex<Vec<Packet>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Capture {
    /// Starts recording the packets that one namespace sends and receives.
    ///
    /// # Errors
    /// Without CAP_NET_RAW.
    pub fn start(fabric: &Fabric, node: Node) -> Result<Self> {
        let socket = fabric.within(node, || {
            // SOCK_DGRAM gives packets without the link header. With one protocol instead of all, the socket would not
            // see sent packets.
            let all = Protocol::from(i32::from(0x0003_u16.to_be()));
            let socket = Socket::new(Domain::PACKET, Type::DGRAM, Some(all)).map_err(|e| e.to_string())?;
            socket.set_read_timeout(Some(Duration::from_millis(50))).map_err(|e| e.to_string())?;
            socket.set_recv_buffer_size(8 << 20).map_err(|e| e.to_string())?;
            Ok(socket)
        })?;
        let packets = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (record, ended) = (packets.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut buffer = [0; 128];
            while !ended.load(Ordering::Relaxed) {
                // A timeout is an opportunity to check `ended`.
                let Ok(length) = (&socket).read(&mut buffer) else { continue };
                if let (Some(packet), Ok(mut packets)) = (parse(&buffer[..length]), record.lock()) {
                    packets.push(packet);
                }
            }
        });
        Ok(Self { packets, stop, thread: Some(thread) })
    }

    /// All packets so far.
    pub fn packets(&self) -> Vec<Packet> {
        self.packets.lock().map(|packets| packets.clone()).unwrap_or_default()
    }

    /// Labels of the packets from `source_port`, in order, with consecutive duplicates removed.
    pub fn labels(&self, source_port: u16) -> Vec<Label> {
        let mut labels: Vec<Label> =
            self.packets().iter().filter(|p| p.source_port == source_port).map(|p| p.label).collect();
        labels.dedup();
        labels
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn parse(packet: &[u8]) -> Option<Packet> {
    let (first, rest) = packet.split_first_chunk::<4>()?;
    if first[0] >> 4 != 6 {
        return None;
    }
    let protocol = *rest.get(2)?;
    let ports = rest.get(36..)?;
    if !matches!(protocol, 6 | 17) {
        return None;
    }
    let port = |at: usize| Some(u16::from_be_bytes([*ports.get(at)?, *ports.get(at + 1)?]));
    Some(Packet {
        label: Label::from_wire(*first),
        protocol,
        source_port: port(0)?,
        destination_port: port(2)?,
        syn: protocol == 6 && ports.get(13)? & 0x12 == 0x02,
    })
}
