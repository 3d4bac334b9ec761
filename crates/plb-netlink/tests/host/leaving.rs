//! Labels that `plb run --way sockopt` has switched off do not stay off, either in a black hole or after the run.

use std::time::Duration;

use netlab::{Capture, Fabric, Flow, Node, PATHS, eventually, ready};
use plb_netlink::sock;

use crate::support::{Run, signal, traffic};

/// Long enough for the kernel's back-off: 0.2, 0.4, 0.8, 1.6, 3.2, 6.4 s.
const LONG: Duration = Duration::from_secs(25);

/// Starts to watch one flow. Waits until the flow has no label and there is no further reason to move it.
fn switched_off(fabric: &Fabric, flow: &Flow) -> Run {
    let mut congested = fabric.congest(&[1, 2, 3, 4]).unwrap();
    // A long interval leaves time to end the congestion between two moves.
    let run = Run::start(fabric, &["--way", "sockopt", "--interval-ms", "300"]);
    for _ in 0..10 {
        while run.done() != "automatic label off" {}
        drop(congested);
        // On a busy machine the flow may have moved once more by then.
        std::thread::sleep(Duration::from_millis(1000));
        while run.lines.try_recv().is_ok() {}
        if !sock::auto_label(flow).unwrap() {
            return run;
        }
        congested = fabric.congest(&[1, 2, 3, 4]).unwrap();
    }
    panic!("it moves back each time");
}

#[test]
fn a_timeout_moves_a_connection_whose_label_was_switched_off() {
    if !ready("a_timeout_moves_a_connection_whose_label_was_switched_off") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let (sink, flows) = traffic(&fabric, 1);
    let run = switched_off(&fabric, &flows[0]);
    let before = fabric.path_bytes().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let after = fabric.path_bytes().unwrap();
    let path = (0..PATHS).max_by_key(|path| after[*path] - before[*path]).unwrap() + 1;
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    fabric.black_hole(path).unwrap();
    let event = run.next();
    assert_eq!(
        (&event["cause"], &event["done"]),
        (&"timeout".into(), &"automatic label on".into()),
        "{event}"
    );
    let received = sink.received();
    eventually("delivery", LONG, || sink.received() > received + 50_000).unwrap();
    // `any`: on a busy machine the label may have been switched off again by now.
    assert!(capture.labels(flows[0].port()).iter().any(|label| label.get() != 0));
}

#[test]
fn labels_that_were_switched_off_are_restored_however_it_ends() {
    if !ready("labels_that_were_switched_off_are_restored_however_it_ends") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let (_sink, flows) = traffic(&fabric, 1);
    for way in ["TERM", "INT", "HUP", "KILL"] {
        let mut run = switched_off(&fabric, &flows[0]);
        signal(&run.child, way);
        run.child.wait().unwrap();
        eventually(way, Duration::from_secs(5), || sock::auto_label(&flows[0]).unwrap()).unwrap();
    }
    // The run also ends if the reader of its output has gone away, but only when it next moves a connection.
    let mut run = switched_off(&fabric, &flows[0]);
    run.hang_up();
    let congested = fabric.congest(&[1, 2, 3, 4]).unwrap();
    eventually("its end", Duration::from_secs(20), || run.child.try_wait().unwrap().is_some()).unwrap();
    drop(congested);
    eventually("on", Duration::from_secs(5), || sock::auto_label(&flows[0]).unwrap()).unwrap();
}
