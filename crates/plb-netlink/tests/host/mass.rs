//! Ten thousand connections at once: all congested together, then all timing out together. One walk over the
//! processes must serve all of them.

use std::collections::HashSet;
use std::io::Write as _;
use std::net::{SocketAddrV6, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use netlab::{Fabric, H2, Node, ready, skip};
use plb_netlink::pidfd;
use socket2::{Domain, Protocol, Socket, Type};

use crate::support::Run;

const CONNECTIONS: usize = 10_000;
/// Measured: 3 to 14 s under much other load. A walk for each connection would take many minutes.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns whether this process may have enough descriptors; raises its limit if necessary.
fn enough_descriptors() -> bool {
    let wanted = CONNECTIONS + 500;
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let soft = line.split_whitespace().nth(3).unwrap();
    if soft == "unlimited" || soft.parse::<usize>().unwrap() >= wanted {
        return true;
    }
    let pid = std::process::id().to_string();
    let limit = format!("--nofile={wanted}:{wanted}");
    Command::new("prlimit").args(["--pid", &pid, &limit]).status().is_ok_and(|status| status.success())
}

/// Opens connections from `h1` to a listener in `h2` that never accepts. The kernel still completes and acknowledges
/// them, and they cost no descriptors there.
fn connections(fabric: &Fabric) -> (Vec<TcpStream>, Socket) {
    for node in [Node::H1, Node::H2] {
        fabric.set(node, "net.ipv4.tcp_ecn", "1").unwrap();
    }
    fabric.set(Node::H2, "net.core.somaxconn", "20000").unwrap();
    let text = |error: std::io::Error| error.to_string();
    let listener = fabric
        .within(Node::H2, || {
            let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP)).map_err(text)?;
            socket.bind(&SocketAddrV6::new(H2, 0, 0, 0).into()).map_err(text)?;
            socket.listen(20_000).map_err(text)?;
            Ok(socket)
        })
        .unwrap();
    let to = listener.local_addr().unwrap().as_socket().unwrap();
    let connect = |_| {
        let stream = TcpStream::connect_timeout(&to, Duration::from_secs(5)).map_err(text)?;
        stream.set_nonblocking(true).map_err(text)?;
        Ok(stream)
    };
    let streams = fabric.within(Node::H1, || (0..CONNECTIONS).map(connect).collect::<Result<_, String>>());
    (streams.unwrap(), listener)
}

/// Returns the user and system time of a process.
fn cpu(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<u64> = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|f| f.parse().unwrap())
        .collect();
    // USER_HZ is 100 on every Linux on which this test runs.
    Duration::from_millis(10 * (fields[0] + fields[1]))
}

/// Sends a little data on every connection and waits until each has moved for one of these causes. Returns how long
/// this took, counted from the first move.
fn all_move(run: &Run, clients: &mut [TcpStream], causes: &[&str]) -> Duration {
    let before = cpu(run.child.id());
    let began = Instant::now();
    for client in clients.iter_mut() {
        client.write_all(&[0x5a; 500]).unwrap();
    }
    let sent = began.elapsed();
    let mut moved = HashSet::new();
    let (mut first, mut last) = (f64::MAX, 0.0_f64);
    while moved.len() < clients.len() {
        let event = run.next();
        if causes.contains(&event["cause"].as_str().unwrap())
            && moved.insert(event["cookie"].as_u64().unwrap())
        {
            let done = event["done"].as_str().unwrap();
            assert!(done.starts_with("new label"), "{done}");
            let at = event["at_s"].as_f64().unwrap();
            (first, last) = (first.min(at), last.max(at));
        }
    }
    println!(
        "{causes:?}: sent within {sent:?}; all moved {:?} after that; first to last move {:.3} s; CPU {:?}",
        began.elapsed() - sent,
        last - first,
        cpu(run.child.id()) - before,
    );
    began.elapsed() - sent
}

#[test]
fn ten_thousand_connections_move_at_once() {
    let name = "ten_thousand_connections_move_at_once";
    if !ready(name) {
        return;
    }
    if !enough_descriptors() {
        return skip(name, "this process may not have so many descriptors: `ulimit -n 10500`");
    }
    let fabric = Fabric::build().unwrap();
    let (mut clients, _listener) = connections(&fabric);
    let congested = fabric.congest(&[1, 2, 3, 4]).unwrap();
    let run = Run::start(&fabric, &["--way", "bpf"]);
    // Wait until all connections are known before anything happens.
    std::thread::sleep(Duration::from_secs(2));
    let idle = cpu(run.child.id());
    std::thread::sleep(Duration::from_secs(2));
    println!("at rest: {:.0} % of a core", (cpu(run.child.id()) - idle).as_secs_f64() * 50.0);

    let began = Instant::now();
    assert!(pidfd::owners().len() >= CONNECTIONS);
    println!("one walk over all processes: {:?}", began.elapsed());
    let took = all_move(&run, &mut clients, &["congested, idle", "congested, busy"]);
    assert!(took < LIMIT, "{took:?}");
    drop(congested);
    for path in 1..=netlab::PATHS {
        fabric.black_hole(path).unwrap();
    }
    let took = all_move(&run, &mut clients, &["timeout"]);
    assert!(took < LIMIT, "{took:?}");
    let ended = run.stop();
    println!("{ended}");
    // A separate walk for each move would mean ten thousand walks.
    assert!(ended["process_walks"].as_u64().unwrap() <= 5, "{ended}");
}
