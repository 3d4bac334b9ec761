//! `--plb` on the real sockets of a running agent, in a network namespace whose defaults are the opposite of what
//! `--plb` sets.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv6Addr, TcpListener, TcpStream};
use std::process::{Command, Stdio};

use netlab::{Fabric, Node, ready};
use plb_netlink::sock::{self, TxRehash};
use plb_netlink::{diag, pidfd};

#[test]
fn service_and_upstream_sockets_are_repathable_and_obstacles_are_logged() {
    if !ready("service_and_upstream_sockets_are_repathable_and_obstacles_are_logged") {
        return;
    }
    let fabric = Fabric::build().unwrap();
    fabric.set(Node::H1, "net.core.txrehash", "0").unwrap();
    fabric.set(Node::H1, "net.ipv6.auto_flowlabels", "2").unwrap();
    let io = |error: std::io::Error| error.to_string();
    let backend =
        fabric.within(Node::H1, || TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).map_err(io)).unwrap();
    let upstream = backend.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in backend.incoming().map_while(Result::ok) {
            let mut buffer = [0; 1024];
            let _ = stream.read(&mut buffer);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
            // The stream stays open, so that the agent keeps the connection.
            std::mem::forget(stream);
        }
    });
    let mut agent = Command::new("ip")
        .args(["netns", "exec", &fabric.name(Node::H1), env!("CARGO_BIN_EXE_probe-agent")])
        .args(["--plb", "--listen", "[::1]:0", "--upstream", &upstream.to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(agent.stdout.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    let service: std::net::SocketAddr = first.strip_prefix("listening service=").unwrap().parse().unwrap();
    let mut client = fabric.within(Node::H1, || TcpStream::connect(service).map_err(io)).unwrap();
    client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").unwrap();
    let mut answer = [0; 12];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");

    let pid = agent.id();
    let dump = |filter| fabric.within(Node::H1, || diag::dump(&filter).map_err(|e| e.to_string())).unwrap();
    let upstream_side = diag::Filter { remote_port: Some(upstream.port()), ..diag::Filter::default() };
    let service_side = diag::Filter {
        local_port: Some(service.port()),
        states: diag::States::Both,
        ..diag::Filter::default()
    };
    let inodes = pidfd::sockets(pid).unwrap();
    let mut seen = 0;
    for entry in dump(upstream_side).into_iter().chain(dump(service_side)) {
        // The listener, the accepted connection, the upstream connection.
        let Some((fd, _)) = inodes.iter().find(|(_, inode)| *inode == u64::from(entry.inode)) else {
            continue;
        };
        let socket = pidfd::duplicate(pid, *fd).unwrap();
        assert_eq!(sock::txrehash(&socket).unwrap(), TxRehash::On, "{entry:?}");
        assert!(sock::auto_label(&socket).unwrap(), "{entry:?}");
        seen += 1;
    }
    assert_eq!(seen, 3);

    agent.kill().unwrap();
    agent.wait().unwrap();
    let mut stderr = String::new();
    agent.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    for which in ["service", "upstream"] {
        let line = format!("probe-agent: --plb: {which}: net.ipv4.tcp_plb_enabled is off");
        assert_eq!(stderr.matches(&line).count(), 1, "{stderr}");
    }
}
