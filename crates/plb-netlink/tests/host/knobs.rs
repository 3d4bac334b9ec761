//! Knobs, routes, namespaces, and the messages for bad input and missing rights.

use netlab::{Fabric, Node, ready};
use plb_netlink::detector::Threshold;
use plb_netlink::netns::Namespace;
use plb_netlink::sysctl::{self, PlbParams, Rounds};
use plb_netlink::{Error, route};

use crate::support::{failure, plb, plb_json, within};

#[test]
fn knobs_are_per_namespace_and_read_back() {
    if !ready("knobs_are_per_namespace_and_read_back") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let wanted = PlbParams {
        enabled: true,
        k: Threshold::from_256ths(64).unwrap(),
        m: Rounds::new(2).unwrap(),
        n: Rounds::new(31).unwrap(),
        suspend_s: 255,
    };
    let here = PlbParams::read().unwrap();
    within(&fabric, Node::H1, || wanted.write()).unwrap();
    assert_eq!(within(&fabric, Node::H1, PlbParams::read).unwrap(), wanted);
    assert_eq!(within(&fabric, Node::H2, PlbParams::read).unwrap(), PlbParams::default());
    assert_eq!(PlbParams::read().unwrap(), here);
}

#[test]
fn the_kernel_accepts_each_largest_value_and_no_more() {
    if !ready("the_kernel_accepts_each_largest_value_and_no_more") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    // The kernel accepts the largest value of each knob; it refuses the next larger value and keeps the old one.
    for (knob, largest) in sysctl::PLB_KNOBS.into_iter().zip([1, 256, 31, 31, 255]) {
        within(&fabric, Node::H1, || sysctl::write(knob, &largest.to_string())).unwrap();
        let error =
            within(&fabric, Node::H1, || sysctl::write(knob, &(largest + 1).to_string())).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{knob}: {error}");
        assert_eq!(within(&fabric, Node::H1, || sysctl::read_number(knob)).unwrap(), Some(largest), "{knob}");
    }
}

#[test]
fn set_changes_the_given_knobs_and_an_error_changes_nothing() {
    if !ready("set_changes_the_given_knobs_and_an_error_changes_nothing") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let read = || within(&fabric, Node::H1, PlbParams::read).unwrap();

    let dry = plb_json(&fabric, Node::H1, &["set", "--enabled", "on", "--dry-run"]);
    assert_eq!(dry["changed"], false);
    assert_eq!(read(), PlbParams::default());

    plb_json(&fabric, Node::H1, &["set", "--enabled", "on", "--k", "0.25", "--n", "6"]);
    let expected = PlbParams {
        enabled: true,
        k: Threshold::from_256ths(64).unwrap(),
        n: Rounds::new(6).unwrap(),
        ..PlbParams::default()
    };
    assert_eq!(read(), expected);

    for (args, says) in [
        (vec!["set", "--n", "0"], "N must be at least 1"),
        (vec!["set", "--m", "7"], "M = 7, N = 6"),
        (vec!["set", "--n", "32"], "0 to 31, got 32"),
        (vec!["set", "--k", "1.5"], "0 to 1"),
        (vec!["set", "--enabled", "off", "--m", "9"], "M = 9, N = 6"),
    ] {
        let (code, said) = failure(&plb(&fabric, Node::H1, &args));
        assert_eq!(code, Some(2), "{args:?}");
        assert!(said.contains(says), "{args:?}: {said}");
        assert_eq!(read(), expected, "{args:?}");
    }
    let shown = plb_json(&fabric, Node::H1, &["show"]);
    assert_eq!(shown["plb"]["net.ipv4.tcp_plb_rehash_rounds"], 6);
}

#[test]
fn missing_processes_devices_and_routes_are_named() {
    if !ready("missing_processes_devices_and_routes_are_named") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let no_descriptor = format!("{}:9999", std::process::id());
    for (args, code, says) in [
        (vec!["pin", "4194303:1"], 5, "no process 4194303"),
        (vec!["unpin", &no_descriptor], 5, "no descriptor 9999"),
        (vec!["repath", "cookie:999999999"], 5, "no TCP socket with cookie"),
        (vec!["run", "--dev", "nope0"], 5, "no device `nope0`"),
        (vec!["route", "set", "fd99::/64", "--ecn", "on"], 5, "no IPv6 route to fd99::/64"),
        (vec!["route", "set", "default", "--congestion", "nosuchcc"], 4, "modprobe tcp_nosuchcc"),
        (vec!["route", "set", "default", "--congestion", "much-too-long-a-name"], 2, "1 to 15"),
        (vec!["route", "set", "default", "--lock", "on"], 2, "no congestion control to lock"),
        (vec!["envoy", "--congestion", "nosuchcc"], 4, "no congestion control `nosuchcc`"),
        (vec!["check", "--pid", "4194303"], 5, "no process 4194303"),
        (vec!["label", "lease", "7", "--destination", "::"], 2, "one destination"),
    ] {
        let (found, said) = failure(&plb(&fabric, Node::H1, &args));
        assert_eq!(found, Some(code), "{args:?}: {said}");
        assert!(said.contains(says), "{args:?}: {said}");
    }
    let name = fabric.name(Node::H1);
    drop(fabric);
    let error = Namespace::named(&name).unwrap_err();
    assert!(matches!(&error, Error::Gone(why) if why.contains(&name)), "{error}");
    // Only the name is left, as after a lost mount.
    let file = std::path::Path::new("/run/netns").join(&name);
    std::fs::write(&file, "").unwrap();
    let error = Namespace::named(&name).unwrap().within(|| Ok(())).unwrap_err();
    std::fs::remove_file(&file).unwrap();
    assert!(matches!(&error, Error::Gone(why) if why.contains("only its name is left")), "{error}");
}

#[test]
fn missing_rights_are_named() {
    if !ready("missing_rights_are_named") {
        return;
    }
    // When another user runs a command that writes in this namespace, the command must name the missing right.
    let before = PlbParams::read().unwrap();
    for (args, says) in [
        (vec!["set", "--n", "11"], "CAP_NET_ADMIN"),
        (vec!["route", "set", "default", "--ecn", "on"], "CAP_NET_ADMIN"),
        (vec!["run", "--way", "bpf", "--duration", "0"], "CAP_BPF"),
        (vec!["unpin", "1:0"], "CAP_SYS_PTRACE"),
        (vec!["--netns", "nope", "show"], "no network namespace"),
    ] {
        use std::os::unix::process::CommandExt as _;
        // A copy that the other user can reach.
        let copy = std::env::temp_dir().join(format!("plb-as-nobody-{}", std::process::id()));
        std::fs::copy(env!("CARGO_BIN_EXE_plb"), &copy).unwrap();
        let run = || std::process::Command::new(&copy).args(&args).uid(65534).gid(65534).output();
        let mut output = run();
        // A child that another test forks holds the copy open for writing until it executes a program.
        while output.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::ExecutableFileBusy) {
            std::thread::yield_now();
            output = run();
        }
        std::fs::remove_file(&copy).unwrap();
        let (code, said) = failure(&output.unwrap());
        let expected = if args.contains(&"--netns") { 5 } else { 3 };
        // On a machine without an IPv6 default route there is nothing to refuse.
        if said.contains("no IPv6 route") {
            continue;
        }
        assert_eq!(code, Some(expected), "{args:?}: {said}");
        assert!(said.contains(says), "{args:?}: {said}");
    }
    assert_eq!(PlbParams::read().unwrap(), before);
}

#[test]
fn route_metrics_decide_congestion_control_and_ecn() {
    if !ready("route_metrics_decide_congestion_control_and_ecn") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let sink = netlab::sink(&fabric).unwrap();
    let connect = || {
        let flow =
            netlab::flow(&fabric, sink.addr, 1000, std::time::Duration::from_millis(10), |_| Ok(())).unwrap();
        let ecn = plb_netlink::tcpinfo::TcpInfo::of(&flow).unwrap().ecn;
        (flow.congestion().unwrap(), ecn)
    };
    let default = connect();
    assert_ne!(default.0, "reno", "the test needs a default other than reno");
    assert!(!default.1);

    plb_json(
        &fabric,
        Node::H1,
        &["route", "set", "default", "--congestion", "reno", "--lock", "on", "--ecn", "on"],
    );
    assert_eq!(connect(), ("reno".to_owned(), true));
    // With a locked route, a socket cannot choose another congestion control.
    let refused = netlab::flow(&fabric, sink.addr, 1, std::time::Duration::ZERO, |_| Ok(())).unwrap();
    let error = plb_netlink::sock::set_congestion(&refused, &default.0).unwrap_err();
    assert!(matches!(&error, Error::NotPermitted { cure, .. } if cure.contains("route locks")), "{error}");

    let listed = within(&fabric, Node::H1, route::list).unwrap();
    let default_route = listed.iter().find(|route| route.destination.length == 0).unwrap();
    assert!(default_route.locked && default_route.ecn && default_route.congestion.as_deref() == Some("reno"));

    plb_json(&fabric, Node::H1, &["route", "set", "default", "--congestion", "none", "--ecn", "off"]);
    assert_eq!(connect(), default);

    // A multipath route keeps its paths.
    let hops = |route: &route::Route| (route.devices.clone(), route.gateways.clone());
    let before = within(&fabric, Node::R1, || route::find("fd00:2::/64".parse()?)).unwrap();
    assert_eq!(before.devices.len(), 4);
    plb_json(&fabric, Node::R1, &["route", "set", "fd00:2::/64", "--congestion", "reno"]);
    let after = within(&fabric, Node::R1, || route::find("fd00:2::9".parse()?)).unwrap();
    assert_eq!(hops(&after), hops(&before));
    assert_eq!(after.congestion.as_deref(), Some("reno"));
}

#[test]
fn lint_finds_the_traps_of_a_real_namespace() {
    if !ready("lint_finds_the_traps_of_a_real_namespace") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    let ids = |node| -> Vec<String> {
        let output = plb(&fabric, node, &["lint", "--json"]);
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let ids = found.as_array().unwrap().iter().map(|f| f["id"].as_str().unwrap().to_owned()).collect();
        let problems = found.as_array().unwrap().iter().any(|f| f["severity"] == "problem");
        assert_eq!(output.status.code(), Some(i32::from(problems)));
        ids
    };
    assert_eq!(ids(Node::R1), [] as [String; 0]);
    fabric.set(Node::R1, "net.ipv6.fib_multipath_hash_policy", "1").unwrap();
    assert_eq!(ids(Node::R1), ["hash-label"]);
    fabric.set(Node::H1, "net.core.txrehash", "0").unwrap();
    fabric.set(Node::H1, "net.ipv6.auto_flowlabels", "0").unwrap();
    assert_eq!(ids(Node::H1), ["auto-labels-off", "txrehash"]);
}
