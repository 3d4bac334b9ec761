//! Labels on the wire, leases, and common mistakes.

use std::net::SocketAddrV6;
use std::time::Duration;

use netlab::{Capture, Fabric, H2, Node, eventually, ready};
use plb_netlink::flowlabel::{self, Current, Label, Share, Terms};
use plb_netlink::{Error, diag, pidfd, sock};

use crate::support::{plb, plb_json, within};

const SOON: Duration = Duration::from_secs(5);
const SLOWLY: Duration = Duration::from_millis(10);

fn label(number: u32) -> Label {
    Label::new(number).unwrap()
}

#[test]
fn an_explicit_label_is_on_every_packet_from_the_syn_on() {
    if !ready("an_explicit_label_is_on_every_packet_from_the_syn_on") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let sink = netlab::sink(&fabric).unwrap();
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    let stream = within(&fabric, Node::H1, || flowlabel::connect(sink.addr, label(0xabcde), None)).unwrap();
    let port = stream.local_addr().unwrap().port();
    let flow = netlab::Flow::over(stream, 1000, SLOWLY).unwrap();
    eventually("data on the wire", SOON, || {
        capture.packets().iter().filter(|p| p.source_port == port).count() > 5
    })
    .unwrap();
    assert_eq!(capture.labels(port), [label(0xabcde)]);
    assert!(capture.packets().iter().any(|p| p.source_port == port && p.syn && p.label == label(0xabcde)));
    assert!(
        matches!(flowlabel::current(&flow).unwrap(), Current::Explicit(found, None) if found == label(0xabcde))
    );
}

#[test]
fn automatic_labels_are_constant_and_can_be_switched() {
    if !ready("automatic_labels_are_constant_and_can_be_switched") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let sink = netlab::sink(&fabric).unwrap();
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    let flow = netlab::flow(&fabric, sink.addr, 1000, SLOWLY, |_| Ok(())).unwrap();
    let changes = |n: usize| {
        let r = eventually("a change of label", SOON, || capture.labels(flow.port()).len() == n);
        if r.is_err() {
            let port = flow.port();
            for p in capture.packets().iter().filter(|p| p.source_port == port).take(60) {
                println!("{p:?}");
            }
        }
        r.unwrap();
        capture.labels(flow.port())
    };
    let own = changes(1)[0];
    assert_ne!(own.get(), 0);
    assert_eq!(flowlabel::current(&flow).unwrap(), Current::Automatic);
    // The same with the command, through another process's descriptor: off means label 0, and on restores the same
    // label.
    let socket = format!(
        "{}:{}",
        std::process::id(),
        std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&flow))
    );
    plb_json(&fabric, Node::H1, &["repath", &socket]);
    assert_eq!(changes(2), [own, label(0)]);
    assert_eq!(flowlabel::current(&flow).unwrap(), Current::Zero);
    plb_json(&fabric, Node::H1, &["repath", &socket]);
    assert_eq!(changes(3), [own, label(0), own]);
}

#[test]
fn each_datagram_carries_its_own_label() {
    if !ready("each_datagram_carries_its_own_label") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    let to = SocketAddrV6::new(H2, 9, 0, 0);
    let local = SocketAddrV6::new(netlab::H1, 0, 0, 0);
    let socket = within(&fabric, Node::H1, || flowlabel::udp(Some(local))).unwrap();
    let labels = [1, 0xf_ffff, 0x12345].map(label);
    for label in labels {
        within(&fabric, Node::H1, || flowlabel::send_to(&socket, b"x", to, label)).unwrap();
    }
    let port = socket.local_addr().unwrap().port();
    eventually("three datagrams", SOON, || capture.labels(port).len() == 3).unwrap();
    assert_eq!(capture.labels(port), labels);
}

#[test]
fn leases() {
    if !ready("leases") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    within(&fabric, Node::H1, || {
        let (first, second) = (flowlabel::udp(None)?, flowlabel::udp(None)?);
        let terms = |number| Terms::new(Some(label(number)), H2);

        // A second socket can join a shared lease, and unleased labels remain usable.
        assert_eq!(flowlabel::lease(&first, &terms(0x111))?, label(0x111));
        assert_eq!(flowlabel::lease(&second, &terms(0x111))?, label(0x111));
        let fresh = flowlabel::lease(&second, &Terms { fresh: true, ..terms(0x111) }).unwrap_err();
        assert!(matches!(&fresh, Error::Invalid(why) if why.contains("already leased")), "{fresh}");
        assert!(flowlabel::unleased_labels_work()?);

        // The kernel chooses the label.
        let chosen = flowlabel::lease(&first, &Terms::new(None, H2))?;
        assert_ne!(chosen.get(), 0);

        let listed = flowlabel::list()?;
        let found = listed.iter().find(|l| l.label == label(0x111)).unwrap();
        assert_eq!((found.share, found.users, found.destination), (Some(Share::Any), 2, H2));

        flowlabel::renew(&first, label(0x111), 5, 6)?;
        assert!(flowlabel::list()?.iter().any(|l| l.label == label(0x111) && l.linger_s >= 5));
        flowlabel::put(&first, label(0x111))?;
        let gone = flowlabel::put(&first, label(0x111)).unwrap_err();
        assert!(matches!(&gone, Error::Gone(why) if why.contains("holds no lease")), "{gone}");

        // With an exclusive lease, other sockets are refused. From now on unleased labels are refused as well, even
        // after the lease has ended.
        let exclusive = Terms { share: Share::Exclusive, ..terms(0x222) };
        flowlabel::lease(&first, &exclusive)?;
        let refused = flowlabel::lease(&second, &terms(0x222)).unwrap_err();
        assert!(
            matches!(&refused, Error::NotPermitted { cure, .. } if cure.contains("label list")),
            "{refused}"
        );
        assert!(!flowlabel::unleased_labels_work()?);
        drop(first);
        assert!(!flowlabel::unleased_labels_work()?);
        let unleased = flowlabel::connect(SocketAddrV6::new(H2, 9, 0, 0), label(0x333), None).unwrap_err();
        assert!(matches!(&unleased, Error::Invalid(why) if why.contains("leased first")), "{unleased}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_lease_held_by_the_command_ends_with_it() {
    if !ready("a_lease_held_by_the_command_ends_with_it") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let leased = || {
        let listed = plb_json(&fabric, Node::H1, &["label", "list"]);
        listed.as_array().unwrap().iter().any(|l| l["label"] == 0x123)
    };
    let dry =
        plb_json(&fabric, Node::H1, &["label", "lease", "0x123", "--destination", "fd00:2::2", "--dry-run"]);
    assert_eq!((dry["changed"].as_bool(), leased()), (Some(false), false));
    let mut holder = std::process::Command::new(env!("CARGO_BIN_EXE_plb"))
        .args(["--netns", &fabric.name(Node::H1), "label", "lease", "0x123", "--destination", "fd00:2::2"])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    eventually("the lease", SOON, leased).unwrap();
    holder.kill().unwrap();
    holder.wait().unwrap();
    // The kernel keeps the lease for its linger time.
    eventually("the end of the lease", Duration::from_secs(20), || {
        within(&fabric, Node::H1, flowlabel::list)
            .unwrap()
            .iter()
            .all(|l| l.label.get() != 0x123 || l.users == 0)
    })
    .unwrap();
}

#[test]
fn bind_ignores_a_label() {
    if !ready("bind_ignores_a_label") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let sink = netlab::sink(&fabric).unwrap();
    let local = SocketAddrV6::new(netlab::H1, 0, label(0x777).get().to_be(), 0);
    let stream =
        within(&fabric, Node::H1, || flowlabel::connect(sink.addr, label(0x888), Some(local))).unwrap();
    assert!(
        matches!(flowlabel::current(&stream).unwrap(), Current::Explicit(found, _) if found == label(0x888))
    );
}

#[test]
fn the_list_of_sockets_agrees_with_the_sockets() {
    if !ready("the_list_of_sockets_agrees_with_the_sockets") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let sink = netlab::sink(&fabric).unwrap();
    let flows: Vec<_> =
        (0..3).map(|_| netlab::flow(&fabric, sink.addr, 1000, SLOWLY, |_| Ok(())).unwrap()).collect();
    let filter = diag::Filter { remote_port: Some(sink.addr.port()), ..diag::Filter::default() };
    let entries = within(&fabric, Node::H1, || diag::dump(&filter)).unwrap();
    assert_eq!(entries.len(), 3);
    let owners = pidfd::owners();
    for flow in &flows {
        let entry = entries.iter().find(|entry| entry.local.port() == flow.port()).unwrap();
        // SO_COOKIE equals the cookie of the dump, so it is also the one that BPF sees.
        assert_eq!(sock::cookie(flow).unwrap(), entry.cookie);
        assert_eq!(entry.congestion, Some(flow.congestion().unwrap()));
        assert!(entry.info.unwrap().delivered.is_some());
        assert_eq!(owners[&u64::from(entry.inode)].pid, std::process::id());
    }
    let one = diag::Filter { local_port: Some(flows[0].port()), ..diag::Filter::default() };
    assert_eq!(within(&fabric, Node::H1, || diag::dump(&one)).unwrap().len(), 1);
    let listed = plb_json(&fabric, Node::H1, &["sockets"]);
    assert_eq!(listed.as_array().unwrap().len(), 3);
    assert_eq!(listed[0]["owner"]["pid"], std::process::id());
}

#[test]
fn check_gives_the_reasons() {
    if !ready("check_gives_the_reasons") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let sink = netlab::sink(&fabric).unwrap();
    let explicit = within(&fabric, Node::H1, || flowlabel::connect(sink.addr, label(0xabc), None)).unwrap();
    let pinned =
        netlab::flow(&fabric, sink.addr, 1, SLOWLY, |s| sock::set_txrehash(s, sock::TxRehash::Off)).unwrap();
    let plain = netlab::flow(&fabric, sink.addr, 1, SLOWLY, |_| Ok(())).unwrap();
    let pid = std::process::id().to_string();
    let output = plb(&fabric, Node::H1, &["check", "--json", "--pid", &pid]);
    assert_eq!(output.status.code(), Some(1));
    let judged: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let reasons = |port: u16| -> Vec<String> {
        let local = SocketAddrV6::new(netlab::H1, port, 0, 0).to_string();
        let one = judged.as_array().unwrap().iter().find(|one| one["local"] == local.as_str()).unwrap();
        one["reasons"].as_array().unwrap().iter().map(|r| r["reason"].as_str().unwrap().to_owned()).collect()
    };
    assert!(reasons(explicit.local_addr().unwrap().port()).contains(&"explicit label 0x00abc".to_owned()));
    assert!(reasons(pinned.port()).contains(&"SO_TXREHASH off".to_owned()));
    let rest = reasons(plain.port());
    assert!(rest.iter().all(|reason| !reason.contains("label") && !reason.contains("TXREHASH")), "{rest:?}");
    assert!(rest.iter().any(|reason| reason.contains("no PLB hooks")), "{rest:?}");
    // The plain connection alone can be repathed after timeouts.
    let port = plain.port().to_string();
    let output = plb(&fabric, Node::H1, &["check", "--timeouts-only", "--local-port", &port]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stdout));
}
