//! The YAML printed by `plb envoy`, in a real Envoy: its sockets have the requested options.

use std::io::{Read as _, Write as _};
use std::net::{Ipv6Addr, SocketAddrV6, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use netlab::{Capture, Fabric, H2, Node, eventually, ready, skip};
use plb_netlink::sock::{self, TxRehash};
use plb_netlink::{diag, pidfd};

use crate::support::{plb, within};

/// Envoy, stopped at the end of the test.
struct Envoy(Child);

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Indents lines of YAML.
fn indented(yaml: &str, by: usize) -> String {
    yaml.lines().map(|line| format!("{:by$}{line}\n", "")).collect()
}

#[test]
fn envoys_sockets_have_the_options_of_the_yaml() {
    let name = "envoys_sockets_have_the_options_of_the_yaml";
    if !ready(name) {
        return;
    }
    let Some(binary) = std::env::var_os("ENVOY").filter(|path| !path.is_empty()) else {
        return skip(name, "no Envoy: set ENVOY=/path/to/envoy, or run `cargo xtask test`");
    };
    let fabric = Fabric::build().unwrap();
    // The opposite of what the YAML requests, so that the defaults cannot satisfy the test.
    fabric.set(Node::H1, "net.core.txrehash", "0").unwrap();
    fabric.set(Node::H1, "net.ipv6.auto_flowlabels", "2").unwrap();
    let backend = fabric
        .within(Node::H2, || {
            TcpListener::bind(SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 0, 0, 0)).map_err(|e| e.to_string())
        })
        .unwrap();
    let backend_port = backend.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in backend.incoming().map_while(Result::ok) {
            std::thread::spawn(move || answer(stream));
        }
    });

    let part = |which: &str| {
        let output = plb(&fabric, Node::H1, &["envoy", "--congestion", "reno", which]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let listener_port = 8080;
    let config = format!(
        "static_resources:
  listeners:
  - name: l
    address: {{socket_address: {{address: '::1', port_value: {listener_port}}}}}
{listener}    filter_chains:
    - filters:
      - name: tcp
        typed_config:
          '@type': type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: t
          cluster: c
  clusters:
  - name: c
    type: STATIC
{cluster}    load_assignment:
      cluster_name: c
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: '{H2}', port_value: {backend_port}}}}}}}
",
        listener = indented(&part("--listener"), 4),
        cluster = indented(&part("--cluster"), 4),
    );
    let folder = std::env::temp_dir().join(format!("plb-envoy-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("envoy.yaml");
    std::fs::write(&path, &config).unwrap();
    let log = std::fs::File::create(folder.join("log")).unwrap();
    let child = Command::new("ip")
        .args(["netns", "exec", &fabric.name(Node::H1)])
        .arg(binary)
        .arg("-c")
        .arg(&path)
        .args(["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"])
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    let envoy = Envoy(child);
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    let mut client = None;
    let up = eventually("Envoy listens", Duration::from_secs(30), || {
        let connect = || TcpStream::connect((Ipv6Addr::LOCALHOST, listener_port)).map_err(|e| e.to_string());
        client = fabric.within(Node::H1, connect).ok();
        client.is_some()
    });
    let said = || std::fs::read_to_string(folder.join("log")).unwrap_or_default();
    up.unwrap_or_else(|error| panic!("{error}:\n{}\n{config}", said()));
    let mut client = client.unwrap();
    client.write_all(b"ping").unwrap();
    client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut echoed = [0; 4];
    client.read_exact(&mut echoed).unwrap_or_else(|error| panic!("{error}:\n{}", said()));
    assert_eq!(&echoed, b"ping");

    // `ip netns exec` became Envoy, so the process id is the same.
    let inodes: Vec<(i32, u64)> = pidfd::sockets(envoy.0.id()).unwrap();
    let sockets = |filter: diag::Filter| within(&fabric, Node::H1, || diag::dump(&filter)).unwrap();
    let upstream = sockets(diag::Filter { remote_port: Some(backend_port), ..diag::Filter::default() });
    let accepted = sockets(diag::Filter { local_port: Some(listener_port), ..diag::Filter::default() });
    for (side, entries) in [("upstream", &upstream), ("accepted", &accepted)] {
        let entry = entries.first().unwrap_or_else(|| panic!("no {side} socket"));
        let (fd, _) = inodes.iter().find(|(_, inode)| *inode == u64::from(entry.inode)).unwrap();
        let socket = pidfd::duplicate(envoy.0.id(), *fd).unwrap();
        assert_eq!(sock::congestion(&socket).unwrap(), "reno", "{side}");
        assert_eq!(sock::txrehash(&socket).unwrap(), TxRehash::On, "{side}");
        assert!(sock::auto_label(&socket).unwrap(), "{side}");
    }
    // Its packets also have a label, although the namespace's default gives them none.
    let labels = capture.labels(upstream[0].local.port());
    assert!(labels.iter().all(|label| label.get() != 0) && !labels.is_empty(), "{labels:?}");
    assert!(!said().contains("on socket failed"), "{}", said());
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Echoes the data of a connection.
fn answer(mut stream: TcpStream) {
    let mut buffer = [0; 1024];
    while let Ok(length) = stream.read(&mut buffer) {
        if length == 0 || stream.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
}
