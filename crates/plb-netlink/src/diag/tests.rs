//! Tests with one captured reply: parsing, writing, and every possible truncation.

use super::*;
use netlink_packet_core::NetlinkPayload;

/// Captured on Linux 6.18 from a dump of one connected socket, IPv6, extensions INFO and CONG.
#[rustfmt::skip]
#[cfg(target_endian = "little")]
pub(crate) const REPLY: &[u8] = &[
    // nlmsghdr
    0xa4, 0x01, 0, 0, // length 420
    0x14, 0,          // SOCK_DIAG_BY_FAMILY
    0x02, 0,          // NLM_F_MULTI
    0x01, 0, 0, 0,    // sequence
    0x6a, 0x0a, 0, 0, // port
    // inet_diag_msg
    0x0a, 0x01, 0x00, 0x00, // AF_INET6, ESTABLISHED, no timer, no retransmits
    0x9c, 0x40, 0x1f, 0x90, // ports 40000 and 8080
    0xfd, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2,
    0xfd, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2,
    0, 0, 0, 0,             // interface
    0x01, 0x10, 0, 0, 0x02, 0, 0, 0, // cookie, two halves (changed; the captured one was 1)
    0, 0, 0, 0,             // expires
    0, 0, 0, 0, 0, 0, 0, 0, // queues
    0, 0, 0, 0,             // uid
    0x79, 0x07, 0x07, 0x00, // inode 460665
    // attributes
    5, 0, 8, 0, 0, 0, 0, 0,                      // INET_DIAG_SHUTDOWN
    8, 0, 15, 0, 0, 0, 0, 0,                     // INET_DIAG_MARK
    12, 0, 21, 0, 1, 0, 0, 0, 0, 0, 0, 0,        // INET_DIAG_CGROUP_ID, unknown to the library
    6, 0, 22, 0, 0x12, 0, 0, 0,                  // INET_DIAG_SOCKOPT, unknown to the library
    0x1c, 0x01, 2, 0,                            // INET_DIAG_INFO, 280 bytes
    0x01, 0, 0, 0, 0, 0x07, 0xaa, 0x01,          // ESTABLISHED; options: timestamps, SACK, window scale; no ECN
    0xe0, 0x1c, 0x03, 0, 0, 0, 0, 0, 0x8a, 0, 0, 0x18, 0x02, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0, 1, 0, 0xc4, 0xff, 0, 0,                // pmtu, rcv_ssthresh
    0x1b, 0, 0, 0, 0x0f, 0, 0, 0,                // rtt 27 µs, rttvar
    0xff, 0xff, 0xff, 0x7f, 0x0a, 0, 0, 0,       // ssthresh, cwnd 10
    0xb8, 0xff, 0, 0, 0x03, 0, 0, 0, 0, 0, 0, 0, 0xc4, 0xff, 0, 0, 0, 0, 0, 0,
    0xce, 0x9d, 0x6b, 0x02, 0x06, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
    0xe9, 0x03, 0, 0, 0, 0, 0, 0,                // bytes_acked 1001
    0, 0, 0, 0, 0, 0, 0, 0, 0x03, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0,
    0x09, 0, 0, 0,                               // min_rtt 9 µs
    0, 0, 0, 0, 0x01, 0, 0, 0,
    0x55, 0xd5, 0xf7, 0xe9, 0, 0, 0, 0,          // delivery_rate
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0x02, 0, 0, 0, 0, 0, 0, 0,                   // delivered 2, delivered_ce 0
    0xe8, 0x03, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0, 1, 0, 0, 0, 1, 0,                      // snd_wnd, rcv_wnd
    0, 0, 0, 0,                                  // rehash
    0, 0, 0, 0, 0, 0, 0, 0,                      // total_rto and related fields
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    10, 0, 4, 0, 0x63, 0x75, 0x62, 0x69, 0x63, 0, 0, 0, // INET_DIAG_CONG "cubic"
];

#[test]
#[cfg(target_endian = "little")]
fn a_reply_is_read() {
    let entries = parse_datagram(REPLY).unwrap();
    let [entry] = &entries[..] else { panic!("{entries:?}") };
    assert_eq!(entry.local, "[fd00:1::2]:40000".parse().unwrap());
    assert_eq!(entry.remote, "[fd00:1::2]:8080".parse().unwrap());
    assert_eq!((entry.cookie, entry.inode, entry.uid), (0x2_0000_1001, 460_665, 0));
    assert_eq!((entry.listening, entry.congestion.as_deref()), (false, Some("cubic")));
    let info = entry.info.unwrap();
    assert_eq!((info.ecn, info.rtt_us, info.cwnd, info.min_rtt_us), (false, 27, 10, Some(9)));
    assert_eq!((info.bytes_acked, info.delivered, info.delivered_ce), (Some(1001), Some(2), Some(0)));
    assert_eq!((info.rehash, info.total_rto), (Some(0), Some(0)));
}

#[test]
#[cfg(target_endian = "little")]
fn a_reply_written_back_is_the_same_bytes() {
    let message = NetlinkMessage::<SockDiagMessage>::deserialize(REPLY).unwrap();
    assert!(matches!(message.payload, NetlinkPayload::InnerMessage(_)));
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    assert_eq!(bytes, REPLY);
}

#[test]
fn every_truncation_is_an_error() {
    for length in 0..REPLY.len() {
        assert!(parse_datagram(&REPLY[..length]).is_err(), "{length}");
    }
    // Also try truncated messages whose header gives the shortened length. Such a message may be accepted only at the
    // boundary of an attribute, because attributes are optional, and never with half a value.
    for length in (16..REPLY.len()).step_by(4) {
        let mut cut = REPLY[..length].to_vec();
        cut[..4].copy_from_slice(&u32::try_from(length).unwrap().to_ne_bytes());
        if let Ok(entries) = parse_datagram(&cut) {
            assert!(length >= 88 && entries.len() == 1, "{length}");
            assert!(entries[0].congestion.is_none());
        }
    }
}

#[test]
fn a_refusal_by_the_kernel_is_an_error() {
    // nlmsgerr with ENOENT (no inet_diag), in answer to a request header.
    let mut refusal = vec![36, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    refusal.extend((-libc::ENOENT).to_ne_bytes());
    refusal.extend([16, 0, 0, 0, 20, 0, 1, 3, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(parse_datagram(&refusal).unwrap_err().errno(), Some(libc::ENOENT));
}

#[test]
#[cfg(target_endian = "little")]
fn the_request_is_what_the_kernel_reads() {
    let filter = Filter { local_port: Some(40000), remote_port: Some(8080), ..Filter::default() };
    let mut message = NetlinkMessage::from(SockDiagMessage::InetRequest(request(&filter, true)));
    message.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    #[rustfmt::skip]
    let head = [
        72, 0, 0, 0, 20, 0, 0x01, 0x03, 0, 0, 0, 0, 0, 0, 0, 0, // nlmsghdr: REQUEST, DUMP
        10, 6, 0b1010, 0,       // AF_INET6, TCP, INFO and CONG
        0x02, 0x01, 0, 0,       // ESTABLISHED, CLOSE_WAIT
        0x9c, 0x40, 0x1f, 0x90, // ports, big endian
    ];
    assert_eq!(bytes[..head.len()], head);
    assert_eq!(bytes.len(), 72);
}

#[test]
fn filters() {
    let entry = parse_datagram(REPLY).unwrap().remove(0);
    for (filter, expected) in [
        (Filter::default(), true),
        (Filter { local_port: Some(40000), ..Filter::default() }, true),
        (Filter { local_port: Some(0), ..Filter::default() }, false),
        (Filter { remote_port: Some(40000), ..Filter::default() }, false),
        (Filter { remote: Some("fd00:1::2".parse().unwrap()), ..Filter::default() }, true),
        (Filter { remote: Some("fd00:1::3".parse().unwrap()), ..Filter::default() }, false),
        (Filter { congestion: Some("cubic".to_owned()), ..Filter::default() }, true),
        (Filter { congestion: Some("dctcp".to_owned()), ..Filter::default() }, false),
    ] {
        assert_eq!(matches(&filter, &entry), expected, "{filter:?}");
    }
}
