//! Network and service together: Envoy and agents over a fabric of four paths, two of which go bad.
//!
//! Load and Envoy are in namespace `h1` ([`Client`]), agents and backends in `h2` ([`Servers`]), each group in its own
//! process. There are two kinds of trouble: two paths silently lose every packet, or two paths are slow and mark
//! packets. The arms of each differ only in the mechanisms that may repath; [`Repathing`] describes them.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use netlab::{Fabric, Node};
use plb_netlink::daemon::{Daemon, Outcome, Way};
use plb_netlink::detector::Config;
use plb_netlink::diag::Filter;
use plb_netlink::envoy::{self, Side};
use plb_netlink::link;
use plb_netlink::relabel::Relabeller;
use prequal_testbed::{Agent, AgentOptions, Envoy, EnvoyConfig};

use crate::backends::{Backends, Fleet, ReplicaSpec};
use crate::load::{self, Arrivals, Plan};
use crate::stats::{Sample, Summary};
use crate::table;

/// PLB under the service: paths that lose every packet, and paths that are congested.
#[derive(clap::Args)]
pub(crate) struct Plb {
    /// Seconds of load in each arm; the trouble begins after a quarter of it
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(8..=600))]
    seconds: u64,
}

/// Agents and backends, in `h2`.
#[derive(clap::Args)]
pub(crate) struct Servers {
    /// Start the agents with `--plb`
    #[arg(long)]
    plb: bool,
}

/// Load and Envoy, in `h1`.
#[derive(clap::Args)]
pub(crate) struct Client {
    /// Addresses of the agents
    #[arg(required = true)]
    agents: Vec<SocketAddr>,
    #[arg(long)]
    seconds: u64,
    /// Bytes in the body of each request
    #[arg(long)]
    body: usize,
    /// Give Envoy the socket options of `plb envoy`
    #[arg(long)]
    plb: bool,
}

/// Mechanisms that may move a connection to another path.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Repathing {
    /// The kernel's defaults: a timeout changes a connection's label.
    Defaults,
    /// `net.core.txrehash=0` on both hosts: nothing ever changes a label.
    Off,
    /// As [`Off`](Self::Off), but with the socket options of `plb envoy` and with agents that run with `--plb`.
    SetUp,
    /// The fabric's hash ignores the label, so a new label does not change the path.
    BlindFabric,
    /// The kernel's defaults, with `plb run` on the sender's host.
    Run,
}

impl Repathing {
    fn label(self) -> &'static str {
        match self {
            Self::Defaults => "kernel defaults",
            Self::Off => "repathing off (txrehash=0)",
            Self::SetUp => "txrehash=0, but plb's set-up",
            Self::BlindFabric => "fabric hash without the label",
            Self::Run => "plb run",
        }
    }
}

/// The fault on paths 1 and 2.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Trouble {
    BlackHole,
    Congestion,
}

/// Runs every arm and prints the tables.
pub(crate) fn run(args: &Plb) -> Result<ExitCode> {
    if let Some(why) = netlab::missing() {
        eprintln!("{why}");
        return Ok(ExitCode::from(2));
    }
    println!(
        "Two of four paths lose every packet after the first quarter of the run. Kernels repath by themselves after a\n\
         timeout: that is the first arm. The second arm disables this. In the third, the fabric ignores new labels.\n\
         The fourth disables it too, but has plb's set-up.\n"
    );
    let arms = [Repathing::Defaults, Repathing::Off, Repathing::BlindFabric, Repathing::SetUp];
    let black_hole = table_of(args, Trouble::BlackHole, &arms, 0)?;
    println!("{}", black_hole.text);
    println!(
        "Two of four paths are congested: 2 Mbit/s each and every packet marked. Requests carry 20 kB. This kernel\n\
         has no DCTCP, so it does not repath for congestion; the DCTCP case is `cargo xtask plb-guest`.\n"
    );
    let congestion = table_of(args, Trouble::Congestion, &[Repathing::Defaults, Repathing::Run], 20_000)?;
    println!("{}", congestion.text);
    let stuck = |table: &Table, arm| table.of(arm).map_or(0, |summary| summary.failed);
    let p99 = |arm| congestion.of(arm).map_or(f64::NAN, |summary| summary.quantile_ms(0.99));
    let goals = [
        (
            "a black hole causes fewer failed requests with plb's set-up than without repathing",
            stuck(&black_hole, Repathing::SetUp) < stuck(&black_hole, Repathing::Off),
        ),
        (
            "under congestion `plb run` lowers the 99th percentile",
            p99(Repathing::Run) < p99(Repathing::Defaults),
        ),
    ];
    for (goal, met) in goals {
        println!("{}  {goal}", if met { "met    " } else { "NOT met" });
    }
    Ok(if goals.iter().all(|(_, met)| *met) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The results for one kind of trouble.
struct Table {
    text: String,
    arms: Vec<(Repathing, Summary)>,
}

impl Table {
    fn of(&self, arm: Repathing) -> Option<&Summary> {
        self.arms.iter().find(|(a, _)| *a == arm).map(|(_, summary)| summary)
    }
}

fn table_of(args: &Plb, trouble: Trouble, arms: &[Repathing], body: usize) -> Result<Table> {
    let mut rows = Vec::new();
    let mut results = Vec::new();
    for arm in arms {
        eprintln!("    {trouble:?}: {} ({} s)", arm.label(), args.seconds);
        let (samples, moves) = one(args.seconds, trouble, *arm, body)?;
        // Only requests that were due after the trouble began.
        let begin = Duration::from_secs(args.seconds) / 4;
        let after: Vec<&Sample> = samples.iter().filter(|sample| sample.due >= begin).collect();
        let summary = Summary::of(after.iter().copied(), |_| false);
        let slow = after.iter().filter(|s| s.latency.is_none_or(|latency| latency.as_secs() >= 1)).count();
        rows.push(vec![
            arm.label().to_owned(),
            summary.samples.to_string(),
            summary.failed.to_string(),
            slow.to_string(),
            table::ms(summary.quantile_ms(0.5)),
            table::ms(summary.quantile_ms(0.99)),
            table::ms(summary.quantile_ms(1.0)),
            moves.to_string(),
        ]);
        results.push((*arm, summary));
    }
    let header = ["arm", "requests", "failed", "over 1 s", "p50 ms", "p99 ms", "max ms", "moves of plb"];
    Ok(Table { text: table::render(&header, &rows), arms: results })
}

/// Runs one arm on a new fabric; returns the samples and how often `plb run` moved a connection.
fn one(seconds: u64, trouble: Trouble, arm: Repathing, body: usize) -> Result<(Vec<Sample>, u64)> {
    let lab = |error: String| anyhow::anyhow!(error);
    let fabric = Fabric::build().map_err(lab)?;
    for node in [Node::H1, Node::H2] {
        fabric.set(node, "net.ipv4.tcp_ecn", "1").map_err(lab)?;
        if matches!(arm, Repathing::Off | Repathing::SetUp) {
            fabric.set(node, "net.core.txrehash", "0").map_err(lab)?;
        }
    }
    if arm == Repathing::BlindFabric {
        for node in [Node::R1, Node::R2] {
            fabric.set(node, "net.ipv6.fib_multipath_hash_fields", "55").map_err(lab)?;
        }
    }
    let with_plb = arm == Repathing::SetUp;
    let mut servers =
        NamespaceProcess::start(&fabric, Node::H2, "plb-servers", with_plb.then_some("--plb"), &[])?;
    let agents = servers.until_ready()?;
    let (seconds_text, body) = (seconds.to_string(), body.to_string());
    let mut words = vec!["--seconds", &seconds_text, "--body", &body];
    words.extend(agents.iter().map(String::as_str));
    let mut client =
        NamespaceProcess::start(&fabric, Node::H1, "plb-client", with_plb.then_some("--plb"), &words)?;
    client.until_ready()?;

    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = (arm == Repathing::Run).then(|| scope.spawn(|| watch(&fabric, &stop)));
        std::thread::sleep(Duration::from_secs(seconds) / 4);
        let made = make_trouble(&fabric, trouble);
        let samples = made.and_then(|guards| {
            let samples = client.samples();
            drop(guards);
            samples
        });
        stop.store(true, Ordering::Relaxed);
        let moves = match watcher {
            Some(thread) => thread.join().map_err(|_| anyhow::anyhow!("plb run panicked"))??,
            None => 0,
        };
        Ok((samples?, moves))
    })
}

/// Starts the trouble. It lasts until the returned value is dropped.
fn make_trouble(fabric: &Fabric, trouble: Trouble) -> Result<Vec<plb_netlink::bpf::Attached>> {
    let lab = |error: String| anyhow::anyhow!(error);
    let paths = [1, 2];
    match trouble {
        Trouble::BlackHole => {
            for path in paths {
                fabric.black_hole(path).map_err(lab)?;
            }
            Ok(Vec::new())
        }
        Trouble::Congestion => {
            for path in paths {
                let queue = "root tbf rate 2mbit burst 10kb latency 200ms";
                fabric.tc(&format!("-n {{r1}} qdisc add dev p{path} {queue}")).map_err(lab)?;
            }
            fabric.congest(&paths).map_err(lab)
        }
    }
}

/// Runs the work of `plb run` in `h1` until `stop` is set; returns how often it moved a connection.
fn watch(fabric: &Fabric, stop: &AtomicBool) -> Result<u64> {
    let moves = fabric.within(Node::H1, || {
        let work = || -> plb_netlink::Result<u64> {
            let relabeller = Relabeller::attach(&[link::named("u0")?])?;
            let mut daemon = Daemon::new(Config::default(), Filter::default(), Way::Bpf(relabeller));
            let started = Instant::now();
            let mut moves = 0;
            while !stop.load(Ordering::Relaxed) {
                let events = daemon.step(started.elapsed())?;
                moves += events.iter().filter(|e| matches!(e.outcome, Outcome::Relabelled(_))).count() as u64;
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(moves)
        };
        work().map_err(|error| error.to_string())
    });
    moves.map_err(|error| anyhow::anyhow!(error))
}

/// Another process of this program, inside a namespace. Dropping the value ends it.
struct NamespaceProcess {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    _stdin: ChildStdin,
}

impl NamespaceProcess {
    fn start(fabric: &Fabric, node: Node, part: &str, flag: Option<&str>, words: &[&str]) -> Result<Self> {
        let mut child = Command::new("ip")
            .args(["netns", "exec", &fabric.name(node)])
            .arg(std::env::current_exe()?)
            .arg(part)
            .args(flag)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {part}"))?;
        let stdout = child.stdout.take().context("no stdout")?;
        let stdin = child.stdin.take().context("no stdin")?;
        Ok(Self { child, lines: BufReader::new(stdout).lines(), _stdin: stdin })
    }

    /// Waits for the line `ready`; returns the lines before it.
    fn until_ready(&mut self) -> Result<Vec<String>> {
        let mut before = Vec::new();
        for line in &mut self.lines {
            let line = line?;
            if line == "ready" {
                return Ok(before);
            }
            before.push(line);
        }
        bail!("a part of the benchmark ended before it was ready")
    }

    /// Reads the client's samples, one per line: due time in µs, then latency in µs, or `-` if the request failed.
    fn samples(&mut self) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for line in &mut self.lines {
            let line = line?;
            let (due, latency) = line.split_once(' ').context("a sample")?;
            let latency = if latency == "-" { None } else { Some(Duration::from_micros(latency.parse()?)) };
            samples.push(Sample { due: Duration::from_micros(due.parse()?), latency, ..Sample::default() });
        }
        ensure!(!samples.is_empty(), "the client measured nothing");
        Ok(samples)
    }
}

impl Drop for NamespaceProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process in `h2`: prints the agents' addresses and serves until standard input ends.
pub(crate) fn servers(args: &Servers) -> Result<()> {
    let backends = Backends::start(&Fleet::of(REPLICAS, ReplicaSpec::sleeping(5)))?;
    let options = AgentOptions {
        listen: format!("[{}]:0", netlab::H2),
        args: if args.plb { vec!["--plb".to_owned()] } else { Vec::new() },
        ..AgentOptions::default()
    };
    let agents: Vec<Agent> =
        backends.addresses.iter().map(|addr| Agent::start_with(*addr, &options)).collect::<Result<_>>()?;
    for agent in &agents {
        println!("{}", agent.addr());
    }
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// The process in `h1`: runs Envoy and the load, then prints the samples.
pub(crate) async fn client(args: &Client) -> Result<ExitCode> {
    let mut config = EnvoyConfig::for_replicas(&args.agents)?;
    if args.plb {
        let options: serde_json::Value = yaml_serde::from_str(&envoy::socket_options(Side::Cluster, None))?;
        for cluster in ["replicas", "replicas-agent"] {
            config.cluster_mut(cluster)["upstream_bind_config"] = options["upstream_bind_config"].clone();
        }
    }
    let envoy = Envoy::start(config)?;
    let run = load::LoadRun::start(Plan {
        targets: vec![envoy.addr()],
        spread: load::Spread::InTurn,
        arrivals: Arrivals::Constant(PER_SECOND),
        length: Duration::from_secs(args.seconds),
        body: Bytes::from(vec![b'x'; args.body]),
        keys: None,
        seed: 0,
    });
    println!("ready");
    for sample in run.finish().await {
        let latency =
            sample.latency.map_or_else(|| "-".to_owned(), |latency| latency.as_micros().to_string());
        println!("{} {latency}", sample.due.as_micros());
    }
    Ok(ExitCode::SUCCESS)
}

const REPLICAS: usize = 8;
const PER_SECOND: u32 = 100;
