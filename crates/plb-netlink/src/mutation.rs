//! Runs every parser on seeded mutations of real input: an error is fine, a panic is not.

use std::panic::catch_unwind;

use crate::counters::Counters;
use crate::flowlabel::{self, Label};
use crate::tcpinfo::TcpInfo;
use crate::{diag, route};

/// A small, seeded generator, good enough to choose bytes (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        usize::try_from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33).unwrap() % bound
    }
}

/// Makes one to four changes: a flipped bit, a new byte, an interesting 16-bit length, a cut, a repeated piece.
fn mutate(original: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = original.to_vec();
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            break;
        }
        let at = random.below(bytes.len());
        match random.below(5) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = u8::try_from(random.below(256)).unwrap(),
            2 => {
                let length = [0_u16, 1, 3, 4, 5, 0x7fff, 0x8000, 0xffff][random.below(8)];
                let end = (at + 2).min(bytes.len());
                bytes[at..end].copy_from_slice(&length.to_ne_bytes()[..end - at]);
            }
            3 => bytes.truncate(at),
            _ => {
                let piece = bytes[at..(at + random.below(64)).min(bytes.len())].to_vec();
                let into = random.below(bytes.len());
                bytes.splice(into..into, piece);
            }
        }
    }
    // In half of the cases the outer length is corrected, so that the inner parsers are reached.
    if random.below(2) == 0 && bytes.len() >= 4 && original.len() >= 4 {
        let length = u32::try_from(bytes.len()).unwrap();
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
    }
    bytes
}

fn survives(name: &str, original: &[u8], parse: fn(&[u8])) {
    for seed in 1..=20_000_u64 {
        let mutated = mutate(original, &mut Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        assert!(catch_unwind(|| parse(&mutated)).is_ok(), "{name}, seed {seed}: {mutated:02x?}");
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn socket_lists() {
    survives("inet_diag", diag::tests::REPLY, |bytes| drop(diag::parse_datagram(bytes)));
}

#[test]
fn routes() {
    survives("route", route::tests::REPLY, |bytes| drop(route::parse_datagram(bytes)));
}

#[test]
fn tcp_info() {
    survives("tcp_info", &diag::tests::REPLY[128..408], |bytes| drop(TcpInfo::parse(bytes)));
}

#[test]
fn text_files() {
    let labels = b"Label S Owner  Users  Linger Expires  Dst                              Opt\n\
        00abc 1   0      1      6      5        fd000002000000000000000000000002 0\n";
    survives("ip6_flowlabel", labels, |bytes| drop(flowlabel::parse_list(&text(bytes))));
    let netstat = b"TcpExt: TCPTimeouts TCPPLBRehash\nTcpExt: 5 7\nIpExt: A\nIpExt: 1\n";
    survives("netstat", netstat, |bytes| drop(Counters::parse(&text(bytes))));
}

#[test]
fn arguments() {
    survives("label", b"0xabcde", |bytes| drop(text(bytes).parse::<Label>()));
    survives("prefix", b"fd00:2::/64", |bytes| drop(text(bytes).parse::<route::Prefix>()));
}
