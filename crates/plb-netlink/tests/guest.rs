//! Tests of the kernel's own PLB. They run as root in the guest of `cargo xtask plb-guest`, which has DCTCP.
//!
//! Every path is a queue of 6 Mbit/s that marks packets once they have queued for 8 ms. Eight long flows are placed
//! on three of the four paths, so that moving them can improve the balance. ECMP places them like this by chance in
//! four of ten cases.

use std::process::{Command, ExitCode};
use std::time::Duration;

use netlab::{Capture, Fabric, Flow, Node, PATHS, Result, Sink, eventually, imbalance};
use plb_netlink::Error;
use plb_netlink::counters::Counters;
use plb_netlink::flowlabel::{self, Label};
use plb_netlink::sock::{self, TxRehash};
use plb_netlink::sysctl;
use plb_netlink::tcpinfo::TcpInfo;

const FLOWS: usize = 8;
const LONG: Duration = Duration::from_secs(8);
const SHORT: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    match run() {
        Ok(()) => {
            println!("all cases hold");
            ExitCode::SUCCESS
        }
        Err(why) => {
            println!("FAILED: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    println!("Linux {}", sysctl::kernel_release());
    // Set in the initial namespace: namespaces created later inherit it, and cannot choose it themselves.
    sysctl::write("net.ipv4.tcp_congestion_control", "dctcp").map_err(text)?;
    let fabric = congestible_fabric()?;
    println!(
        "fabric ready\n{:<34} {:>9}  {:>9}  {:>10}  bytes by path",
        "case", "imbalance", "total", "PLBRehash"
    );
    off_against_on(&fabric)?;
    counter_without_move(&fabric)?;
    listener_trap(&fabric)
}

/// Builds the fabric with marking queues, MTU-sized packets and a base round trip of 4 ms.
fn congestible_fabric() -> Result<Fabric> {
    let fabric = Fabric::build()?;
    for path in 1..=PATHS {
        fabric.tc(&format!("-n {{r1}} qdisc add dev p{path} root handle 1: htb default 1"))?;
        fabric.tc(&format!(
            "-n {{r1}} class add dev p{path} parent 1: classid 1:1 htb rate 6mbit ceil 6mbit burst 3k cburst 3k quantum 1514"
        ))?;
        fabric.tc(&format!(
            "-n {{r1}} qdisc add dev p{path} parent 1:1 handle 10: codel limit 200 target 500ms interval 1s ecn \
             ce_threshold 8ms"
        ))?;
    }
    // Otherwise a burst of 64 kB fills a queue of 6 Mbit/s.
    fabric.ip("-n {h1} link set u0 gso_max_segs 1")?;
    fabric.ip("-n {r1} link set hx gso_max_segs 1")?;
    fabric.tc("-n {h2} qdisc add dev u0 root netem delay 4ms limit 5000")?;
    for node in [Node::H1, Node::H2] {
        fabric.set(node, "net.ipv4.tcp_ecn", "1")?;
    }
    Ok(fabric)
}

/// Measurements over an interval.
struct Measured {
    bytes: [u64; PATHS],
    plb_rehash: u64,
    delivered_ce: u64,
}

impl Measured {
    fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }

    fn imbalance(&self) -> f64 {
        imbalance(&self.bytes)
    }

    fn print(&self, case: &str) {
        println!(
            "{case:<34} {:>9.3}  {:>6.1} MB  {:>10}  {:?}",
            self.imbalance(),
            self.total() as f64 / 1e6,
            self.plb_rehash,
            self.bytes
        );
    }
}

fn measure(fabric: &Fabric, duration: Duration) -> Result<Measured> {
    let counters = || fabric.within(Node::H1, || Counters::read().map_err(text));
    let (bytes, before) = (fabric.path_bytes()?, counters()?);
    std::thread::sleep(duration);
    let (bytes_after, after) = (fabric.path_bytes()?, counters()?);
    let delta = |after: Option<u64>, before: Option<u64>| -> Result<u64> {
        Ok(after.ok_or("a counter is missing")? - before.ok_or("a counter is missing")?)
    };
    Ok(Measured {
        bytes: std::array::from_fn(|path| bytes_after[path] - bytes[path]),
        plb_rehash: delta(after.plb_rehash, before.plb_rehash)?,
        delivered_ce: delta(after.delivered_ce, before.delivered_ce)?,
    })
}

/// Switches PLB on or off in the sender's namespace, as an operator would.
fn plb(fabric: &Fabric, on: bool) -> Result<()> {
    command(fabric, Node::H1, &["set", "--enabled", if on { "on" } else { "off" }]).map(drop)
}

fn command(fabric: &Fabric, node: Node, args: &[&str]) -> Result<String> {
    let output = Command::new("plb")
        .args(["--netns", &fabric.name(node)])
        .args(args)
        .output()
        .map_err(|error| format!("starting plb: {error}"))?;
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(said) } else { Err(format!("plb {args:?}: {said}")) }
}

/// Opens connections that use only three of the paths: a connection that starts on the fourth is replaced by a new one.
fn flows_on_three_paths(
    fabric: &Fabric,
    sink: &Sink,
    connect: impl Fn() -> Result<std::net::TcpStream>,
) -> Result<Vec<Flow>> {
    let mut streams = Vec::new();
    for _attempt in 0..20 * FLOWS {
        let stream = connect()?;
        let before = fabric.path_bytes()?;
        let received = sink.received();
        std::io::Write::write_all(&mut &stream, &[0; 8000]).map_err(|error| error.to_string())?;
        eventually("8 kB through the fabric", Duration::from_secs(5), || sink.received() >= received + 8000)?;
        let after = fabric.path_bytes()?;
        let path = (0..PATHS).max_by_key(|path| after[*path] - before[*path]).unwrap_or(0);
        if path + 1 < PATHS {
            streams.push(stream);
        }
        if streams.len() == FLOWS {
            return streams.into_iter().map(|stream| Flow::over(stream, 1 << 16, Duration::ZERO)).collect();
        }
    }
    Err("no connection landed on the first three paths".to_owned())
}

/// Opens a plain connection from `h1`.
fn plain(
    fabric: &Fabric,
    sink: &Sink,
    prepare: impl Fn(&socket2::Socket) -> plb_netlink::Result<()> + Sync,
) -> Result<std::net::TcpStream> {
    fabric.within(Node::H1, || {
        use socket2::{Domain, Protocol, SockAddr, Socket, Type};
        let error = |error: std::io::Error| error.to_string();
        let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP)).map_err(error)?;
        prepare(&socket).map_err(text)?;
        socket.connect(&SockAddr::from(sink.addr)).map_err(error)?;
        Ok(socket.into())
    })
}

fn off_against_on(fabric: &Fabric) -> Result<()> {
    let (mut off, mut on) = (Vec::new(), Vec::new());
    for pair in 1..=2 {
        let sink = netlab::sink(fabric)?;
        plb(fabric, false)?;
        let flows = flows_on_three_paths(fabric, &sink, || plain(fabric, &sink, |_| Ok(())))?;
        for flow in &flows {
            ensure(
                flow.congestion()? == "dctcp" && TcpInfo::of(flow).map_err(text)?.ecn,
                "flows use DCTCP and ECN",
            )?;
        }
        let capture = Capture::start(fabric, Node::H1)?;
        let without = measure(fabric, LONG)?;
        without.print(&format!("PLB off, pair {pair}"));
        ensure(without.plb_rehash == 0, "without PLB the counter stays")?;
        ensure(
            flows.iter().all(|flow| capture.labels(flow.port()).len() == 1),
            "without PLB no label changes",
        )?;
        // The same connections continue: the knobs act on live connections.
        plb(fabric, true)?;
        let with = measure(fabric, LONG)?;
        with.print(&format!("PLB on, pair {pair}"));
        ensure(with.plb_rehash > 0, "with PLB the counter rises")?;
        ensure(with.bytes.iter().all(|bytes| *bytes > with.total() / 40), "with PLB all paths carry bytes")?;
        ensure(
            flows.iter().any(|flow| capture.labels(flow.port()).len() > 1),
            "with PLB labels change on the wire",
        )?;
        if pair == 1 {
            // The result of `plb check` must agree with the measurement.
            command(fabric, Node::H1, &["check", "--remote-port", &sink.addr.port().to_string()])?;
        }
        off.push((without.imbalance(), without.total()));
        on.push((with.imbalance(), with.total()));
    }
    let median = |pairs: &[(f64, u64)]| {
        let n = pairs.len() as f64;
        (pairs.iter().map(|p| p.0).sum::<f64>() / n, pairs.iter().map(|p| p.1 as f64).sum::<f64>() / n)
    };
    let ((off_imbalance, off_bytes), (on_imbalance, on_bytes)) = (median(&off), median(&on));
    println!(
        "median of two pairs: imbalance {off_imbalance:.3} -> {on_imbalance:.3}, bytes {:.1} -> {:.1} MB",
        off_bytes / 1e6,
        on_bytes / 1e6
    );
    ensure(on_imbalance <= off_imbalance / 2.0, "PLB at least halves the imbalance")?;
    ensure(on_bytes > off_bytes, "PLB carries more bytes")
}

/// PLB is on but labels cannot change: the counter rises and no connection moves.
fn counter_without_move(fabric: &Fabric) -> Result<()> {
    plb(fabric, true)?;
    let explicit = |sink: &Sink| {
        fabric.within(Node::H1, || {
            let random = plb_netlink::random_u32().map_err(|error| error.to_string())?;
            flowlabel::connect(sink.addr, Label::random(random, None), None).map_err(text)
        })
    };
    for case in ["SO_TXREHASH off", "explicit label"] {
        let sink = netlab::sink(fabric)?;
        let flows = flows_on_three_paths(fabric, &sink, || match case {
            "explicit label" => explicit(&sink),
            _ => plain(fabric, &sink, |socket| sock::set_txrehash(socket, TxRehash::Off)),
        })?;
        let capture = Capture::start(fabric, Node::H1)?;
        let measured = measure(fabric, SHORT)?;
        measured.print(&format!("PLB on, {case}"));
        ensure(measured.plb_rehash > 0, "the counter rises")?;
        ensure(flows.iter().all(|flow| capture.labels(flow.port()).len() == 1), "no label changes")?;
        ensure(measured.bytes[PATHS - 1] < measured.total() / 100, "the fourth path stays empty")?;
        let check = command(fabric, Node::H1, &["check", "--remote-port", &sink.addr.port().to_string()]);
        ensure(check.is_err_and(|said| said.contains(case)), "`plb check` gives the reason")?;
    }
    Ok(())
}

/// A listener with another congestion control refuses ECN to a DCTCP sender; setting DCTCP on its route back fixes
/// that.
fn listener_trap(fabric: &Fabric) -> Result<()> {
    plb(fabric, true)?;
    fabric.set(Node::H2, "net.ipv4.tcp_congestion_control", "reno")?;
    let attempt = |case: &str| -> Result<(bool, Measured)> {
        let sink = netlab::sink(fabric)?;
        let flows = flows_on_three_paths(fabric, &sink, || plain(fabric, &sink, |_| Ok(())))?;
        let measured = measure(fabric, SHORT)?;
        measured.print(case);
        Ok((TcpInfo::of(&flows[0]).map_err(text)?.ecn, measured))
    };
    let (ecn, measured) = attempt("PLB on, listener without DCTCP")?;
    ensure(
        !ecn && measured.delivered_ce == 0 && measured.plb_rehash == 0,
        "the listener refuses ECN, PLB is blind",
    )?;
    command(fabric, Node::H2, &["route", "set", "default", "--congestion", "dctcp"])?;
    let (ecn, measured) = attempt("PLB on, DCTCP on its route back")?;
    ensure(ecn && measured.delivered_ce > 0 && measured.plb_rehash > 0, "DCTCP on the route back cures it")
}

fn ensure(holds: bool, what: &str) -> Result<()> {
    if holds { Ok(()) } else { Err(format!("expected: {what}")) }
}

fn text(error: Error) -> String {
    error.to_string()
}
