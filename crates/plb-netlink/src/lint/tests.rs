//! Tests a host without traps, and then one trap at a time.

use super::*;
use crate::detector::Threshold;
use crate::sysctl::Rounds;

/// Returns a host that is configured as the documentation recommends.
fn good() -> Host {
    Host {
        kernel: "6.12.0".to_owned(),
        plb: Some(PlbParams { enabled: true, ..PlbParams::default() }),
        ipv6: true,
        auto_flowlabels: 1,
        flowlabel_reflect: 0,
        flowlabel_state_ranges: 0,
        txrehash: Some(1),
        tcp_ecn: 1,
        congestion: "dctcp".to_owned(),
        available: vec!["reno".to_owned(), "dctcp".to_owned()],
        unrestricted: vec!["reno".to_owned(), "dctcp".to_owned()],
        forwards: true,
        hash: Some(crate::fabric::PLB_HASH),
        leases: Vec::new(),
        unleased_labels_work: true,
        sockets: vec![socket("[fd00:1::2]:8080", "[::]:0", "dctcp")],
        explicit_labels: 0,
        routes: Vec::new(),
        counters: Counters::default(),
    }
}

fn socket(local: &str, remote: &str, congestion: &str) -> Entry {
    let remote: std::net::SocketAddr = remote.parse().unwrap();
    Entry {
        local: local.parse().unwrap(),
        remote,
        listening: remote.port() == 0,
        cookie: 1,
        inode: 1,
        uid: 0,
        congestion: Some(congestion.to_owned()),
        info: None,
    }
}

fn plb(change: impl FnOnce(&mut PlbParams)) -> Option<PlbParams> {
    let mut params = PlbParams { enabled: true, ..PlbParams::default() };
    change(&mut params);
    Some(params)
}

#[test]
fn a_good_host_has_no_finding() {
    assert_eq!(lint(&good()), []);
}

#[test]
fn each_trap_alone_is_found() {
    let lease = Listed {
        label: flowlabel::Label::new(1).unwrap(),
        share: Some(Share::Exclusive),
        owner: 0,
        users: 1,
        linger_s: 0,
        expires_s: 0,
        destination: std::net::Ipv6Addr::UNSPECIFIED,
    };
    let text = str::to_owned;
    let cases: Vec<(&str, Host)> = vec![
        ("no-ipv6", Host { ipv6: false, hash: None, ..good() }),
        ("no-plb", Host { plb: None, ..good() }),
        ("n-zero", Host { plb: plb(|p| p.n = Rounds::new(0).unwrap()), ..good() }),
        ("m-above-n", Host { plb: plb(|p| p.m = Rounds::new(13).unwrap()), ..good() }),
        ("k-zero", Host { plb: plb(|p| p.k = Threshold::from_256ths(0).unwrap()), ..good() }),
        ("no-hooks", Host { congestion: text("cubic"), ..good() }),
        ("explicit-labels", Host { explicit_labels: 2, ..good() }),
        ("no-dctcp", Host { available: vec![text("reno")], unrestricted: vec![text("reno")], ..good() }),
        ("dctcp-restricted", Host { unrestricted: vec![text("reno")], ..good() }),
        ("ecn", Host { tcp_ecn: 2, ..good() }),
        ("ecn", Host { tcp_ecn: 3, ..good() }),
        ("listener", Host { sockets: vec![socket("[::]:80", "[::]:0", "cubic")], ..good() }),
        ("auto-labels-off", Host { auto_flowlabels: 0, ..good() }),
        ("auto-labels-opt-in", Host { auto_flowlabels: 2, ..good() }),
        ("auto-labels-forced", Host { auto_flowlabels: 3, ..good() }),
        ("txrehash", Host { txrehash: Some(0), ..good() }),
        ("no-txrehash", Host { txrehash: None, ..good() }),
        ("reflect", Host { flowlabel_reflect: 3, ..good() }),
        ("hash-label", Host { hash: Some(Hash { policy: 1, fields: 7 }), ..good() }),
        ("hash-label", Host { hash: Some(Hash { policy: 3, fields: 7 }), ..good() }),
        ("hash-ports", Host { hash: Some(Hash { policy: 0, fields: 7 }), ..good() }),
        ("exclusive-lease", Host { leases: vec![lease], ..good() }),
        ("exclusive-lease", Host { unleased_labels_work: false, ..good() }),
        ("state-ranges", Host { flowlabel_state_ranges: 1, ..good() }),
        ("ipv4", Host { sockets: vec![socket("10.0.0.1:5000", "10.0.0.2:80", "dctcp")], ..good() }),
        (
            "ipv4",
            Host { sockets: vec![socket("[::ffff:10.0.0.1]:5", "[::ffff:10.0.0.2]:80", "dctcp")], ..good() },
        ),
    ];
    for (id, host) in cases {
        let found = lint(&host);
        let ids: Vec<&str> = found.iter().map(|finding| finding.id).collect();
        assert_eq!(ids, [id]);
        assert!(found.iter().all(|finding| !finding.what.is_empty() && !finding.cure.is_empty()));
    }
}

#[test]
fn a_counter_that_rises_without_effect_is_named() {
    let counters = Counters { plb_rehash: Some(309), ..Counters::default() };
    let ids: Vec<&str> =
        lint(&Host { txrehash: Some(0), counters, ..good() }).iter().map(|finding| finding.id).collect();
    assert_eq!(ids, ["txrehash", "counter-without-move"]);
}

#[test]
fn irrelevant_settings_are_not_reported() {
    // A host that does not forward needs no particular hash. Loopback traffic does not cross the fabric.
    let host = Host {
        forwards: false,
        hash: Some(Hash { policy: 1, fields: 7 }),
        sockets: vec![socket("[::1]:80", "[::]:0", "cubic"), socket("127.0.0.1:5", "127.0.0.1:80", "cubic")],
        ..good()
    };
    assert_eq!(lint(&host), []);
}
