//! Repathing by the kernel after timeouts, tested on a path that loses all packets, with repathing on and off.

use std::time::Duration;

use netlab::{Capture, Fabric, Flow, Node, PATHS, Sink, eventually, ready};
use plb_netlink::counters::Counters;
use plb_netlink::flowlabel::{self, Label};
use plb_netlink::sock::{self, TxRehash};
use plb_netlink::tcpinfo::TcpInfo;

use crate::support::{plb_json, within};

const SLOWLY: Duration = Duration::from_millis(10);
/// Long enough for the kernel's back-off: 0.2, 0.4, 0.8, 1.6, 3.2 s. Each timeout has a three-in-four chance of leaving
/// the path.
const LONG: Duration = Duration::from_secs(15);
/// About five timeouts, after which a socket that can leave the path has done so with probability 0.999.
const HOPELESS: Duration = Duration::from_secs(7);

/// Returns the path that currently carries a flow.
fn path_of(fabric: &Fabric, flow: &Flow) -> usize {
    let before = fabric.path_bytes().unwrap();
    let sent = flow.sent();
    eventually("more data", Duration::from_secs(5), || flow.sent() > sent + 20_000).unwrap();
    let after = fabric.path_bytes().unwrap();
    (0..PATHS).max_by_key(|path| after[*path] - before[*path]).unwrap() + 1
}

fn delivers(sink: &Sink, limit: Duration) -> Result<Duration, String> {
    // Data in flight may still arrive, so the test checks that delivery continues.
    let before = sink.received();
    eventually("delivery", limit, || sink.received() > before + 50_000)
}

fn counters(fabric: &Fabric) -> Counters {
    within(fabric, Node::H1, Counters::read).unwrap()
}

#[test]
fn with_txrehash_a_black_hole_is_left_after_timeouts() {
    if !ready("with_txrehash_a_black_hole_is_left_after_timeouts") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let sink = netlab::sink(&fabric).unwrap();
    let flow =
        netlab::flow(&fabric, sink.addr, 5000, SLOWLY, |s| sock::set_txrehash(s, TxRehash::On)).unwrap();
    let path = path_of(&fabric, &flow);
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    let before = counters(&fabric);
    fabric.black_hole(path).unwrap();
    let watch = std::process::Command::new(env!("CARGO_BIN_EXE_plb"))
        .args(["--json", "--netns", &fabric.name(Node::H1), "watch", "--interval-ms", "1000", "--count", "8"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let took = delivers(&sink, LONG).unwrap();
    println!("recovered in {took:?}");
    assert_ne!(path_of(&fabric, &flow), path);
    assert!(capture.labels(flow.port()).len() >= 2, "the label changed");
    let after = counters(&fabric);
    assert!(after.timeout_rehash > before.timeout_rehash);
    let info = TcpInfo::of(&flow).unwrap();
    assert!(info.rehash.unwrap() >= 1 && info.total_rto.unwrap() >= 1, "{info:?}");
    assert!(after.plb_rehash == before.plb_rehash);
    // `plb watch` saw it too: eight lines whose differences add up.
    let said = watch.wait_with_output().unwrap();
    let lines: Vec<serde_json::Value> = String::from_utf8(said.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 8);
    assert!(lines.iter().all(|line| line["connections"][0]["local"].is_string()), "{lines:?}");
    let seen: u64 = lines.iter().map(|line| line["counters"]["TcpTimeoutRehash"].as_u64().unwrap()).sum();
    assert!(seen >= 1, "{lines:?}");
}

#[test]
fn without_txrehash_a_black_hole_holds_and_unpin_helps() {
    if !ready("without_txrehash_a_black_hole_holds_and_unpin_helps") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let sink = netlab::sink(&fabric).unwrap();
    let flow = netlab::flow(&fabric, sink.addr, 5000, SLOWLY, |_| Ok(())).unwrap();
    let socket = format!(
        "{}:{}",
        std::process::id(),
        std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&flow))
    );
    let path = path_of(&fabric, &flow);
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    plb_json(&fabric, Node::H1, &["pin", &socket]);
    fabric.black_hole(path).unwrap();
    assert!(delivers(&sink, HOPELESS).is_err(), "a pinned connection left the black hole");
    let info = TcpInfo::of(&flow).unwrap();
    assert!(info.total_rto.unwrap() >= 3, "{info:?}");
    assert_eq!(capture.labels(flow.port()).len(), 1);
    // After the unpin, one of the next timeouts moves the connection. By now the next one may be several seconds away.
    // If the new label also leads into the black hole, the timeout after that is twice as far away.
    plb_json(&fabric, Node::H1, &["unpin", &socket]);
    delivers(&sink, Duration::from_secs(150)).unwrap();
    assert!(capture.labels(flow.port()).len() >= 2);
}

#[test]
fn an_explicit_label_pins_although_the_counters_rise() {
    if !ready("an_explicit_label_pins_although_the_counters_rise") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let sink = netlab::sink(&fabric).unwrap();
    let label = Label::new(0xabc).unwrap();
    let stream = within(&fabric, Node::H1, || flowlabel::connect(sink.addr, label, None)).unwrap();
    let flow = Flow::over(stream, 5000, SLOWLY).unwrap();
    let path = path_of(&fabric, &flow);
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    let before = counters(&fabric);
    fabric.black_hole(path).unwrap();
    assert!(delivers(&sink, HOPELESS).is_err(), "a labelled connection left the black hole");
    assert_eq!(capture.labels(flow.port()), [label]);
    assert!(counters(&fabric).timeout_rehash > before.timeout_rehash, "this is the counter that misleads");
}

#[test]
fn a_fabric_that_does_not_hash_the_label_does_not_repath() {
    if !ready("a_fabric_that_does_not_hash_the_label_does_not_repath") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    // All fields except the label. Policy 1 is not used: within one kernel it takes the sender's own hash from the
    // packet's metadata. A timeout changes that hash, so a namespace fabric would repath where a real router would
    // not.
    fabric.set(Node::R1, "net.ipv6.fib_multipath_hash_fields", "55").unwrap();
    let sink = netlab::sink(&fabric).unwrap();
    let flow = netlab::flow(&fabric, sink.addr, 5000, SLOWLY, |_| Ok(())).unwrap();
    let path = path_of(&fabric, &flow);
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    fabric.black_hole(path).unwrap();
    assert!(delivers(&sink, HOPELESS).is_err());
    assert!(capture.labels(flow.port()).len() >= 2, "labels change, paths do not");
}
