//! Pinned connections stay on their paths, and options are set on the intended socket or on none.

use std::io::Write as _;
use std::net::TcpStream;
use std::os::fd::{AsFd as _, AsRawFd as _, IntoRawFd as _};
use std::time::{Duration, Instant};

use netlab::{Capture, Flow, Node, eventually, ready};
use plb_netlink::daemon::{Daemon, Outcome, Way};
use plb_netlink::detector::{Config, Threshold};
use plb_netlink::diag::Filter;
use plb_netlink::flowlabel::{self, Current, Label};
use plb_netlink::sock::{self, TxRehash};

use crate::support::{Run, SLOWLY, congested_fabric, plb_json, traffic, within};

/// Long enough for several moves of a connection that is not pinned.
const A_WHILE: Duration = Duration::from_millis(700);

#[test]
fn rehashing_switched_off_is_a_pin() {
    if !ready("rehashing_switched_off_is_a_pin") {
        return;
    }
    for way in [["--way", "bpf"], ["--way", "sockopt"]] {
        let (fabric, _congested) = congested_fabric();
        let (sink, _none) = traffic(&fabric, 0);
        let off = |socket: &socket2::Socket| sock::set_txrehash(socket, TxRehash::Off);
        let flow = netlab::flow(&fabric, sink.addr, 3000, SLOWLY, off).unwrap();
        let capture = Capture::start(&fabric, Node::H1).unwrap();
        let run = Run::start(&fabric, &way);
        assert_eq!(run.done(), "left alone: SO_TXREHASH is off");
        std::thread::sleep(A_WHILE);
        assert_eq!(run.stop()["moves"], 0);
        assert_eq!(capture.labels(flow.port()).len(), 1);
    }
}

#[test]
fn a_pin_set_after_the_first_move_holds_too() {
    if !ready("a_pin_set_after_the_first_move_holds_too") {
        return;
    }
    let (fabric, _congested) = congested_fabric();
    let (_sink, flows) = traffic(&fabric, 1);
    let run = Run::start(&fabric, &["--dev", "u0"]);
    assert!(run.done().starts_with("new label"));
    let socket = format!("{}:{}", std::process::id(), flows[0].as_fd().as_raw_fd());
    plb_json(&fabric, Node::H1, &["pin", &socket]);
    eventually("it is left alone", Duration::from_secs(5), || run.done().starts_with("left alone")).unwrap();
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    std::thread::sleep(A_WHILE);
    assert_eq!(capture.labels(flows[0].port()).len(), 1);
}

#[test]
fn an_explicit_label_is_a_pin_whether_its_socket_shows_it_or_not() {
    if !ready("an_explicit_label_is_a_pin_whether_its_socket_shows_it_or_not") {
        return;
    }
    for shown in [true, false] {
        let (fabric, _congested) = congested_fabric();
        let (sink, _none) = traffic(&fabric, 0);
        let label = Label::new(0xabc).unwrap();
        let stream = within(&fabric, Node::H1, || flowlabel::connect(sink.addr, label, None)).unwrap();
        if !shown {
            // From here on getpeername() reports a label of 0.
            sock::show_labels(&stream, false).unwrap();
            assert_eq!(flowlabel::current(&stream).unwrap(), Current::Explicit(label, None));
        }
        let flow = Flow::over(stream, 3000, SLOWLY).unwrap();
        let capture = Capture::start(&fabric, Node::H1).unwrap();
        let run = Run::start(&fabric, &["--dev", "u0"]);
        assert_eq!(run.done(), "left alone: explicit label 0x00abc");
        std::thread::sleep(A_WHILE);
        run.stop();
        assert_eq!(capture.labels(flow.port()), [label], "shown: {shown}");
    }
}

#[test]
fn a_reused_descriptor_is_not_touched() {
    if !ready("a_reused_descriptor_is_not_touched") {
        return;
    }
    let (fabric, _congested) = congested_fabric();
    let (sink, _none) = traffic(&fabric, 0);
    within(&fabric, Node::H1, || {
        let connect = || TcpStream::connect(sink.addr).unwrap();
        let (watched, other) = (connect(), connect());
        watched.set_nonblocking(true).unwrap();
        let port = watched.local_addr().unwrap().port();
        let filter = Filter { local_port: Some(port), ..Filter::default() };
        let config = Config::new(Threshold::HALF, 1, 3, Duration::from_secs(60)).unwrap();
        let mut daemon = Daemon::new(config, filter, Way::SocketOptions(None));
        let started = Instant::now();
        let mut next = |mut writer: &TcpStream| loop {
            assert!(started.elapsed() < Duration::from_secs(20));
            let _ = writer.write(&[0; 3000]);
            if let Some(event) = daemon.step(started.elapsed()).unwrap().pop() {
                return event.outcome;
            }
            std::thread::sleep(SLOWLY);
        };
        assert_eq!(next(&watched), Outcome::Toggled(false));
        // The application moves the socket to another descriptor and reuses the old descriptor for another socket.
        let elsewhere = watched.try_clone().unwrap();
        let old = watched.into_raw_fd();
        // SAFETY: takes two integers; nothing owns `old` any more.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), old) }, old);
        assert_eq!(next(&elsewhere), Outcome::Toggled(true));
        assert!(sock::auto_label(&elsewhere).unwrap() && sock::auto_label(&other).unwrap());
        assert_eq!(next(&elsewhere), Outcome::Toggled(false));
        drop(daemon);
        assert!(sock::auto_label(&elsewhere).unwrap() && sock::auto_label(&other).unwrap());
        Ok(())
    })
    .unwrap();
}
