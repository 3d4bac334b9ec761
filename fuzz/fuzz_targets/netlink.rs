//! Every parser of plb-netlink that reads data from the kernel or an operator. The first byte selects the parser.
#![no_main]

use plb_netlink::counters::Counters;
use plb_netlink::diag;
use plb_netlink::flowlabel::{self, Label};
use plb_netlink::route::{self, Prefix};
use plb_netlink::tcpinfo::TcpInfo;

fn seeds() -> Vec<Vec<u8>> {
    let labels = "Label S Owner  Users  Linger Expires  Dst                              Opt\n\
        00abc 1   0      1      6      5        fd000002000000000000000000000002 0\n";
    let netstat = "TcpExt: TCPTimeouts TCPPLBRehash\nTcpExt: 5 7\nIpExt: A\nIpExt: 1\n";
    let mut seeds = vec![[&[2][..], &[7; 280]].concat()];
    for (which, text) in
        [(3, labels), (4, netstat), (5, "0xabcde"), (5, "703710"), (6, "fd00:2::/64"), (6, "::/0")]
    {
        seeds.push([&[which], text.as_bytes()].concat());
    }
    // The corpus also has two captured datagrams, which the parsers' own tests use too.
    seeds
}

fn run(data: &[u8]) {
    let Some((which, data)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(data);
    match which % 7 {
        0 => drop(diag::parse_datagram(data)),
        1 => drop(route::parse_datagram(data)),
        2 => drop(TcpInfo::parse(data)),
        3 => drop(flowlabel::parse_list(&text)),
        4 => drop(Counters::parse(&text)),
        5 => {
            if let Ok(label) = text.parse::<Label>() {
                assert_eq!(label.to_string().parse::<Label>().ok(), Some(label));
            }
        }
        _ => {
            if let Ok(prefix) = text.parse::<Prefix>() {
                assert_eq!(prefix.to_string().parse::<Prefix>().ok(), Some(prefix));
            }
        }
    }
}

prequal_fuzz::target!(seeds, run);
