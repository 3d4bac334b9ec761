//! `struct tcp_info`, parsed according to its length. Kernels append fields: a field that an older kernel lacks is
//! `None`, and a field that this crate does not know is skipped.

use std::os::fd::AsFd;

use crate::error::NET_ADMIN;
use crate::{Error, Result, sys};

/// The fields that are relevant to repathing.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct TcpInfo {
    /// Whether ECN was negotiated.
    pub ecn: bool,
    /// Whether the peer's packets carried ECT at least once.
    pub ecn_seen: bool,
    /// Number of packets sent and not yet acknowledged.
    pub unacked: u32,
    /// Smoothed round-trip time, µs.
    pub rtt_us: u32,
    /// Congestion window, in packets.
    pub cwnd: u32,
    /// Total number of retransmitted packets.
    pub total_retrans: u32,
    /// Bytes acknowledged by the peer (Linux 4.1).
    pub bytes_acked: Option<u64>,
    /// Smallest round-trip time, µs (Linux 4.6).
    pub min_rtt_us: Option<u32>,
    /// Goodput, in bytes per second (Linux 4.9).
    pub delivery_rate: Option<u64>,
    /// Number of packets delivered (Linux 4.18).
    pub delivered: Option<u32>,
    /// Number of delivered packets with CE echoed (Linux 4.18). With classic ECN, all packets from a mark to the
    /// response to it count.
    pub delivered_ce: Option<u32>,
    /// Number of times PLB *or* a timeout wanted to change the label (Linux 6.2). It does not prove that the label
    /// changed.
    pub rehash: Option<u32>,
    /// Number of retransmission timeouts (Linux 6.7).
    pub total_rto: Option<u16>,
}

impl TcpInfo {
    /// Parses the output of `getsockopt(TCP_INFO)` or `INET_DIAG_INFO`.
    ///
    /// # Errors
    /// If it is shorter than the oldest `tcp_info` in use (104 bytes, Linux 2.6), or cut inside a field.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() < OLDEST || !bytes.len().is_multiple_of(4) {
            return Err(Error::malformed(
                "struct tcp_info",
                format_args!("{} bytes; at least {OLDEST} and a multiple of 4 are needed", bytes.len()),
            ));
        }
        let options = bytes[5];
        Ok(Self {
            ecn: options & 8 != 0,
            ecn_seen: options & 16 != 0,
            unacked: u32_at(bytes, 24).unwrap_or_default(),
            rtt_us: u32_at(bytes, 68).unwrap_or_default(),
            cwnd: u32_at(bytes, 80).unwrap_or_default(),
            total_retrans: u32_at(bytes, 100).unwrap_or_default(),
            bytes_acked: u64_at(bytes, 120),
            min_rtt_us: u32_at(bytes, 148),
            delivery_rate: u64_at(bytes, 160),
            delivered: u32_at(bytes, 192),
            delivered_ce: u32_at(bytes, 196),
            rehash: u32_at(bytes, 236),
            total_rto: u16_at(bytes, 240),
        })
    }

    /// Reads the fields from a socket.
    ///
    /// # Errors
    /// On a socket that is not TCP.
    pub fn of(socket: &impl AsFd) -> Result<Self> {
        let mut bytes = [0; 512];
        let length = sys::get_option(sys::raw(socket), libc::IPPROTO_TCP, libc::TCP_INFO, &mut bytes)
            .map_err(|source| Error::kernel("reading TCP_INFO", NET_ADMIN, source))?;
        Self::parse(&bytes[..length])
    }
}

fn array_at<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..offset + N)?.try_into().ok()
}

fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    array_at(bytes, offset).map(u16::from_ne_bytes)
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    array_at(bytes, offset).map(u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    array_at(bytes, offset).map(u64::from_ne_bytes)
}

/// Length up to and including `tcpi_total_retrans`.
const OLDEST: usize = 104;

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns bytes whose values are derived from their offsets, so that every field differs.
    fn patterned(length: usize) -> Vec<u8> {
        (0..length).map(|offset| u8::try_from(offset % 251).unwrap()).collect()
    }

    #[test]
    fn fields_are_where_the_kernel_has_them() {
        // Checks the offsets against the `tcp_info` of the libc crate, a copy of the kernel's uapi struct.
        use std::mem::offset_of;
        type Kernel = libc::tcp_info;
        for (ours, theirs) in [
            (24, offset_of!(Kernel, tcpi_unacked)),
            (68, offset_of!(Kernel, tcpi_rtt)),
            (80, offset_of!(Kernel, tcpi_snd_cwnd)),
            (100, offset_of!(Kernel, tcpi_total_retrans)),
            (120, offset_of!(Kernel, tcpi_bytes_acked)),
            (148, offset_of!(Kernel, tcpi_min_rtt)),
            (160, offset_of!(Kernel, tcpi_delivery_rate)),
            (192, offset_of!(Kernel, tcpi_delivered)),
            (196, offset_of!(Kernel, tcpi_delivered_ce)),
            (236, offset_of!(Kernel, tcpi_rehash)),
            (240, offset_of!(Kernel, tcpi_total_rto)),
        ] {
            assert_eq!(ours, theirs);
        }
        let bytes = patterned(280);
        let info = TcpInfo::parse(&bytes).unwrap();
        assert_eq!(info.unacked, u32::from_ne_bytes([24, 25, 26, 27]));
        assert_eq!(info.rehash, Some(u32::from_ne_bytes([236, 237, 238, 239])));
        assert_eq!(info.total_rto, Some(u16::from_ne_bytes([240, 241])));
        assert_eq!(info.bytes_acked, Some(u64::from_ne_bytes([120, 121, 122, 123, 124, 125, 126, 127])));
    }

    #[test]
    fn fields_that_an_older_kernel_lacks_are_none() {
        // Length of the struct, then which of the optional fields it contains.
        for (length, acked, delivered, rehash, rto) in [
            (104, false, false, false, false), // Linux 2.6 to 3.14
            (192, true, false, false, false),  // 4.10
            (200, true, true, false, false),   // 4.18
            (232, true, true, false, false),   // 5.4: the version of Debian 12's header
            (240, true, true, true, false),    // 6.2
            (248, true, true, true, true),     // 6.7
            (280, true, true, true, true),     // 6.18
            (400, true, true, true, true),     // a future version
        ] {
            let info = TcpInfo::parse(&patterned(length)).unwrap();
            assert_eq!(info.bytes_acked.is_some(), acked, "{length}");
            assert_eq!(info.delivered_ce.is_some(), delivered, "{length}");
            assert_eq!(info.rehash.is_some(), rehash, "{length}");
            assert_eq!(info.total_rto.is_some(), rto, "{length}");
        }
    }

    #[test]
    fn every_other_length_is_an_error() {
        for length in 0..OLDEST {
            assert!(TcpInfo::parse(&patterned(length)).is_err(), "{length}");
        }
        for length in (OLDEST..400).filter(|length| length % 4 != 0) {
            assert!(TcpInfo::parse(&patterned(length)).is_err(), "{length}");
        }
    }
}
