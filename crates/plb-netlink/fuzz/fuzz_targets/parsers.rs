//! Every parser of plb-netlink that reads what the kernel or an operator wrote. The first byte chooses which.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plb_netlink::counters::Counters;
use plb_netlink::diag;
use plb_netlink::flowlabel::{self, Label};
use plb_netlink::route::{self, Prefix};
use plb_netlink::tcpinfo::TcpInfo;

fuzz_target!(|data: &[u8]| {
    let Some((which, data)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(data);
    match which % 7 {
        0 => drop(diag::parse_datagram(data)),
        1 => drop(route::parse_datagram(data)),
        2 => drop(TcpInfo::parse(data)),
        3 => drop(flowlabel::parse_list(&text)),
        4 => drop(Counters::parse(&text)),
        5 => drop(text.parse::<Label>()),
        _ => drop(text.parse::<Prefix>()),
    }
});
