//! User-space PLB: connections leave paths that mark packets, and all changes are undone at the end.

use std::process::{Command, Stdio};
use std::time::Duration;

use netlab::{Capture, Fabric, Flow, Node, PATHS, eventually, ready};
use plb_netlink::flowlabel::{self, Current, Label};
use plb_netlink::tcpinfo::TcpInfo;

use crate::support::{Run, congested_fabric, plb_json, signal, traffic};

/// Returns the share of packets marked since the last call, for each flow.
fn marked(flows: &[Flow], before: &mut Vec<TcpInfo>) -> Vec<f64> {
    let now: Vec<TcpInfo> = flows.iter().map(|flow| TcpInfo::of(flow).unwrap()).collect();
    let share = |(now, before): (&TcpInfo, &TcpInfo)| {
        let delivered = now.delivered.unwrap() - before.delivered.unwrap();
        f64::from(now.delivered_ce.unwrap() - before.delivered_ce.unwrap()) / f64::from(delivered.max(1))
    };
    let shares = now.iter().zip(before.iter()).map(share).collect();
    *before = now;
    shares
}

#[test]
fn connections_leave_marked_paths_and_get_their_labels_back() {
    if !ready("connections_leave_marked_paths_and_get_their_labels_back") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let congested = fabric.congest(&[1, 2, 3]).unwrap();
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    let (_sink, flows) = traffic(&fabric, 8);
    let mut readings: Vec<TcpInfo> = flows.iter().map(|flow| TcpInfo::of(flow).unwrap()).collect();
    assert!(readings.iter().all(|info| info.ecn), "ECN is negotiated");
    std::thread::sleep(Duration::from_millis(300));
    let victims: Vec<usize> = marked(&flows, &mut readings)
        .iter()
        .enumerate()
        .filter(|(_, share)| **share > 0.5)
        .map(|(i, _)| i)
        .collect();
    // The chance that all eight flows are on the one clean path is one in 65536.
    assert!(!victims.is_empty(), "no flow started on a marked path");
    let own: Vec<Label> = flows.iter().map(|flow| capture.labels(flow.port())[0]).collect();

    let run = Run::start(&fabric, &["--dev", "u0"]);
    let moved = run.next();
    assert!(moved["done"].as_str().unwrap().starts_with("new label"), "{moved}");
    eventually("all flows on the clean path", Duration::from_secs(20), || {
        std::thread::sleep(Duration::from_millis(200));
        marked(&flows, &mut readings).iter().all(|share| *share < 0.5)
    })
    .unwrap();
    // Check the effect on the wire and on the paths.
    for victim in &victims {
        assert!(capture.labels(flows[*victim].port()).len() >= 2);
    }
    let before = fabric.path_bytes().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let after = fabric.path_bytes().unwrap();
    let bytes: [u64; PATHS] = std::array::from_fn(|path| after[path] - before[path]);
    assert!(bytes[..3].iter().sum::<u64>() < bytes[3] / 10, "{bytes:?}");
    drop(congested);

    let ended = run.stop();
    assert!(ended["moves"].as_u64().unwrap() >= victims.len() as u64, "{ended}");
    assert!(ended["relabelled_packets"].as_u64().unwrap() > 0, "{ended}");
    for victim in victims {
        eventually("its own label again", Duration::from_secs(5), || {
            capture.labels(flows[victim].port()).last() == Some(&own[victim])
        })
        .unwrap();
    }
}

#[test]
fn a_crash_detaches_too() {
    if !ready("a_crash_detaches_too") {
        return;
    }
    let (fabric, _congested) = congested_fabric();
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    let (_sink, flows) = traffic(&fabric, 1);
    let own = eventually("a packet", Duration::from_secs(5), || !capture.labels(flows[0].port()).is_empty())
        .map(|_| capture.labels(flows[0].port())[0])
        .unwrap();
    let mut run = Run::start(&fabric, &["--dev", "u0"]);
    assert!(run.next()["done"].as_str().unwrap().starts_with("new label"));
    eventually("another label", Duration::from_secs(5), || capture.labels(flows[0].port()).len() > 1)
        .unwrap();
    signal(&run.child, "KILL");
    run.child.wait().unwrap();
    eventually("its own label again", Duration::from_secs(5), || {
        capture.labels(flows[0].port()).last() == Some(&own)
    })
    .unwrap();
}

#[test]
fn without_bpf_there_are_two_labels() {
    if !ready("without_bpf_there_are_two_labels") {
        return;
    }
    let (fabric, congested) = congested_fabric();
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    let (_sink, flows) = traffic(&fabric, 1);
    let run = Run::start(&fabric, &["--way", "sockopt"]);
    let done = |value: serde_json::Value| value["done"].as_str().unwrap().to_owned();
    assert_eq!(done(run.next()), "automatic label off");
    assert_eq!(done(run.next()), "automatic label on");
    drop(congested);
    run.stop();
    let mut labels: Vec<Label> = capture.labels(flows[0].port());
    labels.sort();
    labels.dedup();
    assert_eq!(labels.len(), 2);
    assert_eq!(labels[0].get(), 0);
}

#[test]
fn one_connection_can_be_given_a_label_by_hand() {
    if !ready("one_connection_can_be_given_a_label_by_hand") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let (_sink, flows) = traffic(&fabric, 2);
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    let cookie = format!("cookie:{}", plb_netlink::sock::cookie(&flows[0]).unwrap());
    let dry =
        plb_json(&fabric, Node::H1, &["repath", &cookie, "--dev", "u0", "--label", "0x4242", "--dry-run"]);
    assert_eq!(dry["changed"], false);
    let mut repath = Command::new(env!("CARGO_BIN_EXE_plb"))
        .args(["--netns", &fabric.name(Node::H1), "repath", &cookie, "--dev", "u0", "--label", "0x4242"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let label = Label::new(0x4242).unwrap();
    eventually("the label on the wire", Duration::from_secs(5), || {
        capture.labels(flows[0].port()).last() == Some(&label)
    })
    .unwrap();
    signal(&repath, "INT");
    assert!(repath.wait().unwrap().success());
    // The other connection was never touched, and the socket itself does not see the change.
    assert_eq!(capture.labels(flows[1].port()).len(), 1);
    assert_eq!(flowlabel::current(&flows[0]).unwrap(), Current::Automatic);
}

#[test]
fn the_table_of_labels_forgets() {
    if !ready("the_table_of_labels_forgets") {
        return;
    }
    let map = plb_netlink::bpf::CookieMap::new(2).unwrap();
    assert_eq!(map.get(7).unwrap(), None);
    map.set(7, [1; 16]).unwrap();
    map.set(8, [2; 16]).unwrap();
    assert_eq!(map.get(7).unwrap(), Some([1; 16]));
    let full = map.set(9, [3; 16]).unwrap_err();
    assert!(matches!(&full, plb_netlink::Error::Unsupported { what, .. } if what.contains("full")), "{full}");
    assert!(map.remove(7).unwrap());
    assert!(!map.remove(7).unwrap());
    map.set(9, [3; 16]).unwrap();
}

#[test]
fn connections_may_end_while_they_are_watched() {
    if !ready("connections_may_end_while_they_are_watched") {
        return;
    }
    let (fabric, _congested) = congested_fabric();
    let (_sink, mut flows) = traffic(&fabric, 2);
    let run = Run::start(&fabric, &["--dev", "u0"]);
    let label = |value: &serde_json::Value| value["done"].as_str().unwrap().starts_with("new label");
    assert!(label(&run.next()) && label(&run.next()));
    flows.pop();
    let other = flows[0].port();
    eventually("more moves of the one that is left", Duration::from_secs(20), || {
        run.next()["local"].as_str().unwrap().ends_with(&format!(":{other}"))
    })
    .unwrap();
    assert_eq!(run.stop()["connections"], 1);
}
