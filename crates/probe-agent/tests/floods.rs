//! Hostile peers on the service port of the real program: floods of frames, stalled windows, silent and slow
//! connections, endless pipelines. Meanwhile, all requests of well-behaved clients must be answered and the program's
//! memory must stay bounded. Afterwards, nothing may be left in flight.
//!
//! The floods write frames by hand. Only the socket and short pauses between writes slow them down. Clients and backend
//! share a thread of their own, so that any delay is caused by the agent. One flood is left out: requests that are
//! reset once the backend has them, which a backend may answer by ending the shared connection
//! (docs/design/security.md).
//!
//! `PREQUAL_SILENT_CONNECTIONS` sets the number of connections that stay silent. `cargo xtask silent` runs the release
//! build with 100 000 of them in a guest machine, without the floods (`PREQUAL_ONLY_SILENT`), for which an emulated CPU
//! is too slow.

mod common;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{fetch, frame, text};
use http::Request;
use http_body_util::{BodyExt, Empty, Full};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

/// Number of well-behaved requests a second.
const RATE: u32 = if cfg!(debug_assertions) { 60 } else { 200 };
/// Duration of each flood, and of all of them together at the end.
const FLOOD: Duration = Duration::from_millis(1200);
const ALL: Duration = Duration::from_millis(2500);
/// Time for which silent connections are held if there are no floods.
const HOLD: Duration = Duration::from_secs(20);
/// Maximum time for a well-behaved request. This is far more than it should take, because the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(8);
/// Memory that a flood may take. All together may take twice as much.
const MEMORY_KB: u64 = 96 * 1024;
/// Memory that each silent connection may take.
const SILENT_KB: u64 = 8;
/// Number of silent connections that may wait to be accepted.
const AT_ONCE: u64 = 1000;
/// Number of the agent's other connections, which come and go.
const OTHERS: u64 = 50;
/// Number of addresses from which silent connections come: a single address has too few ports for 100 000.
const SOURCES: u64 = 16;
/// First port at each address, where the test chooses the ports.
const FIRST_PORT: u16 = 2000;
/// Share of the rate that must be served. Less than all, because the last requests are still under way at the end.
const SERVED: f64 = 0.95;

#[test]
fn floods_do_not_affect_other_clients() {
    let silent =
        std::env::var("PREQUAL_SILENT_CONNECTIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(2000);
    let silent = allow_descriptors(silent);
    let well = Runtime::new_single();
    let backend = well.block_on(slow_and_large());
    let only_silent = std::env::var_os("PREQUAL_ONLY_SILENT").is_some();
    // An emulated CPU takes minutes to open the connections. The agent must not close them as silent before that.
    let options: &[&str] = if only_silent { &["--silent-timeout-ms", "3600000"] } else { &[] };
    let agent = Agent::start(backend, options);
    let clients = Arc::new(Clients::default());
    let (thread, running) = (clients.clone(), agent.service);
    let began = Instant::now();
    let well = std::thread::spawn(move || well.block_on(thread.run(running)));

    let hostile = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let held = hostile.block_on(async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let (mut held, descriptors, idle) = (Vec::new(), agent.descriptors(), agent.memory_kb());
        for number in 0..silent {
            held.push(connect_from(source(number, only_silent), agent.service).await.unwrap());
            // If more of them waited than the backlog holds, the kernel would drop some.
            if (number + 1) % AT_ONCE != 0 && number + 1 != silent {
                continue;
            }
            let began = Instant::now();
            while agent.descriptors() + OTHERS <= descriptors + number {
                let accepted = agent.descriptors().saturating_sub(descriptors);
                assert!(began.elapsed() < PATIENCE, "{accepted} of {} accepted", number + 1);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        let before = agent.memory_kb();
        let cost = before.saturating_sub(idle);
        let each = cost as f64 / silent.max(1) as f64;
        println!("{:>17}: {silent} connections; {cost} KB, {each:.2} KB each; {clients}", "Silent");
        assert!(
            before < idle + SILENT_KB * silent + 4096,
            "{before} KB after {idle} with {silent} silent connections"
        );
        if only_silent {
            let answered = clients.served.load(Ordering::Relaxed);
            tokio::time::sleep(HOLD).await;
            println!("{:>17}: {} KB; {clients}", "held", agent.memory_kb());
            clients.all_well("held");
            assert!(agent.memory_kb() < before + 4096, "{} KB after {before}", agent.memory_kb());
            return Some((clients.served.load(Ordering::Relaxed) - answered, HOLD));
        }
        // These windows stay closed until the end of the test, which shows whether they block anything forever.
        let service = agent.service;
        let stalled =
            tokio::spawn(async move { Flood::ZeroWindow.run(service, Duration::from_secs(600)).await });
        for flood in FLOODS {
            let done = flood.run(agent.service, FLOOD).await;
            println!("{:>17}: {done}; {} KB; {clients}", flood.name(), agent.memory_kb());
            assert!(agent.memory_kb() < before + MEMORY_KB, "{} costs too much memory", flood.name());
            clients.all_well(flood.name());
        }
        let mut floods = JoinSet::new();
        for flood in FLOODS {
            let service = agent.service;
            floods.spawn(async move { flood.run(service, ALL).await });
        }
        floods.join_all().await;
        println!("{:>17}: {} KB; {clients}", "all at once", agent.memory_kb());
        clients.all_well("all at once");
        stalled.abort();
        let bound = before + 2 * MEMORY_KB;
        assert!(agent.memory_kb() < bound, "{} KB", agent.memory_kb());
        None
    });
    drop(hostile);
    clients.stop.store(true, Ordering::Relaxed);
    well.join().unwrap();
    clients.all_well("in the end");
    // An emulated CPU is too slow for the full rate while it opens the silent connections.
    let whole = (clients.served.load(Ordering::Relaxed), began.elapsed());
    let (served, time) = held.unwrap_or(whole);
    let seconds = time.as_secs_f64();
    let rate = served as f64 / seconds;
    println!("{:>17}: {rate:.0} well-behaved requests a second for {seconds:.0} s", "in the end");
    assert!(served > u64::from(RATE) * 3, "only {served} well-behaved requests");
    // An unoptimised build on a busy machine may fall behind.
    assert!(
        cfg!(debug_assertions) || rate > f64::from(RATE) * SERVED,
        "only {rate:.0} well-behaved requests a second, not {RATE}"
    );
    let rest = Runtime::new_single();
    rest.block_on(agent.at_rest());
}

/// Returns the address from which silent connection `number` comes. With `fixed_port`, the test chooses the port,
/// because the kernel takes longer and longer to find a free one. Other programs may use these ports, so use
/// `fixed_port` only on a dedicated machine.
fn source(number: u64, fixed_port: bool) -> SocketAddr {
    let host = Ipv4Addr::new(127, 0, 0, 2 + u8::try_from(number % SOURCES).unwrap());
    let port = FIRST_PORT + u16::try_from(number / SOURCES).unwrap();
    (host, if fixed_port { port } else { 0 }).into()
}

async fn connect_from(source: SocketAddr, addr: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(source)?;
    socket.connect(addr).await
}

/// Behaviour of a hostile peer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Flood {
    RapidReset,
    Continuation,
    EmptyContinuation,
    Ping,
    UnreadPing,
    Settings,
    ZeroWindow,
    SlowHead,
    SlowBody,
    Pipeline,
}

const FLOODS: [Flood; 9] = [
    Flood::RapidReset,
    Flood::Continuation,
    Flood::EmptyContinuation,
    Flood::Ping,
    Flood::UnreadPing,
    Flood::Settings,
    Flood::SlowHead,
    Flood::SlowBody,
    Flood::Pipeline,
];

impl Flood {
    fn name(self) -> String {
        format!("{self:?}")
    }

    /// Floods for `time` over several connections, and opens a new one whenever the agent ends one. Returns a
    /// description of what was done.
    async fn run(self, addr: SocketAddr, time: Duration) -> String {
        let connections = match self {
            Self::SlowHead | Self::SlowBody => 200,
            Self::ZeroWindow | Self::Pipeline => 8,
            _ => 2,
        };
        let end = Instant::now() + time;
        let mut peers = JoinSet::new();
        for _ in 0..connections {
            peers.spawn(async move {
                let (mut opened, mut written) = (0_u64, 0_u64);
                while Instant::now() < end {
                    opened += 1;
                    let left = end.saturating_duration_since(Instant::now());
                    // The agent may refuse, reset or stop reading: all are allowed.
                    let _ = tokio::time::timeout(left, self.flood(addr, &mut written)).await;
                }
                (opened, written)
            });
        }
        let (mut opened, mut written) = (0, 0);
        for (o, w) in peers.join_all().await {
            opened += o;
            written += w;
        }
        format!("{opened} connections, {written} units")
    }

    /// Floods one connection until the agent ends it.
    async fn flood(self, addr: SocketAddr, written: &mut u64) -> std::io::Result<()> {
        let mut tcp = TcpStream::connect(addr).await?;
        match self {
            Self::SlowHead | Self::SlowBody => return self.dribble(tcp, written).await,
            Self::Pipeline => {
                let many = "GET /large HTTP/1.1\r\nhost: a\r\n\r\n".repeat(100);
                loop {
                    tcp.write_all(many.as_bytes()).await?;
                    *written += 100;
                }
            }
            _ => {}
        }
        let window: &[u8] = if self == Self::ZeroWindow { &[0, 4, 0, 0, 0, 0] } else { &[] };
        tcp.write_all(
            &[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(SETTINGS, 0, 0, window)].concat(),
        )
        .await?;
        let (mut from, mut to) = tcp.into_split();
        let ended = async {
            if self == Self::UnreadPing {
                return std::future::pending().await;
            }
            let mut buf = vec![0; 16384];
            while from.read(&mut buf).await? > 0 {}
            Err(std::io::ErrorKind::ConnectionReset.into())
        };
        let flood = async {
            for round in 0_u32.. {
                let (bytes, units) = self.bytes(round);
                to.write_all(&bytes).await?;
                *written += units;
                // Leave some time for the others on this machine.
                tokio::time::sleep(Duration::from_millis(1)).await;
                if self == Self::ZeroWindow {
                    std::future::pending().await
                }
            }
            Ok(())
        };
        tokio::select! {
            ended = ended => ended,
            done = flood => done,
        }
    }

    /// Returns the bytes of one write, and the number of frames or requests in them.
    fn bytes(self, round: u32) -> (Vec<u8>, u64) {
        match self {
            Self::RapidReset => {
                let streams = (0..100).map(|n| 2 * (100 * round + n) + 1);
                let one = |stream| {
                    [
                        frame(HEADERS, END_STREAM | END_HEADERS, stream, &get("/wait")),
                        frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]),
                    ]
                    .concat()
                };
                (streams.flat_map(one).collect(), 100)
            }
            Self::Continuation | Self::EmptyContinuation => {
                let mut bytes = Vec::new();
                if round == 0 {
                    bytes = frame(HEADERS, END_STREAM, 1, &get("/"));
                }
                let more: &[u8] =
                    if self == Self::Continuation { b"\0\x01x\x04abcd\0\x01y\x04abcd" } else { b"" };
                for _ in 0..100 {
                    bytes.extend(frame(CONTINUATION, 0, 1, more));
                }
                (bytes, 100)
            }
            Self::Ping | Self::UnreadPing => (frame(PING, 0, 0, &[7; 8]).repeat(500), 500),
            Self::Settings => {
                let (table, window) = ([0, 1, 0, 0, 16, 0], [0, 4, 0, 1, 0, 0]);
                let two = [frame(SETTINGS, 0, 0, &table), frame(SETTINGS, 0, 0, &window)].concat();
                (two.repeat(250), 500)
            }
            Self::ZeroWindow => {
                let one = |n: u32| frame(HEADERS, END_STREAM | END_HEADERS, 2 * n + 1, &get("/large"));
                ((0..16).flat_map(one).collect(), 16)
            }
            Self::SlowHead | Self::SlowBody | Self::Pipeline => (Vec::new(), 0),
        }
    }

    /// Sends a head or a body byte by byte.
    async fn dribble(self, mut tcp: TcpStream, written: &mut u64) -> std::io::Result<()> {
        let start: &[u8] = if self == Self::SlowHead {
            b"GET / HTTP/1.1\r\nx: "
        } else {
            b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n"
        };
        tcp.write_all(start).await?;
        loop {
            tcp.write_all(b"y").await?;
            *written += 1;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Returns a `GET` of a short path in HPACK, with names from the static table and nothing indexed.
fn get(path: &str) -> Vec<u8> {
    let length = u8::try_from(path.len()).unwrap();
    [&[0x82, 0x86, 0x01, 1, b'a', 0x04, length], path.as_bytes()].concat()
}

trait Single {
    fn new_single() -> Runtime;
}

impl Single for Runtime {
    fn new_single() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }
}

/// Starts a backend: `/wait` takes a while, `/large` is larger than any window.
async fn slow_and_large() -> SocketAddr {
    common::backend(|req| async move {
        match req.uri().path() {
            "/wait" => tokio::time::sleep(Duration::from_millis(50)).await,
            "/large" => {
                let body = Full::new(Bytes::from_static(&[b'x'; 1 << 20]));
                return http::Response::new(body.map_err(|never| match never {}).boxed());
            }
            _ => {
                let _ = req.into_body().collect().await;
            }
        }
        text("hello")
    })
    .await
}

/// Well-behaved clients and their results.
#[derive(Default)]
struct Clients {
    served: AtomicU64,
    slowest_ms: AtomicU64,
    failures: Mutex<Vec<String>>,
    stop: AtomicBool,
}

impl std::fmt::Display for Clients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [served, slowest] = [&self.served, &self.slowest_ms].map(|n| n.load(Ordering::Relaxed));
        write!(f, "{served} well-behaved so far, {slowest} ms at most")
    }
}

impl Clients {
    fn all_well(&self, when: impl std::fmt::Display) {
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(failures.is_empty(), "{when}: {} failed: {failures:?}", failures.len());
    }

    fn fail(&self, why: String) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).push(why);
    }

    /// Sends requests until `stop`: a third each over one HTTP/1.1 connection, over one HTTP/2 connection, and over new
    /// connections.
    async fn run(self: Arc<Self>, addr: SocketAddr) {
        let mut ticks = tokio::time::interval(Duration::from_secs(1) / RATE);
        let mut kept = None;
        let two = Arc::new(tokio::sync::Mutex::new(None));
        let mut tasks = JoinSet::new();
        for turn in 0_u32.. {
            ticks.tick().await;
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            let (this, began) = (self.clone(), Instant::now());
            match turn % 3 {
                0 => {
                    let done = tokio::time::timeout(PATIENCE, over_http1(addr, &mut kept)).await;
                    this.judge("kept", began, done);
                }
                1 => {
                    let two = two.clone();
                    tasks.spawn(async move {
                        let done = tokio::time::timeout(PATIENCE, over_http2(addr, &two)).await;
                        this.judge("HTTP/2", began, done);
                    });
                }
                _ => {
                    tasks.spawn(async move {
                        let done = tokio::time::timeout(PATIENCE, over_http1(addr, &mut None)).await;
                        this.judge("new", began, done);
                    });
                }
            }
        }
        tasks.join_all().await;
    }

    fn judge(
        &self,
        how: &str,
        began: Instant,
        done: Result<anyhow::Result<()>, tokio::time::error::Elapsed>,
    ) {
        let took = u64::try_from(began.elapsed().as_millis()).unwrap();
        self.slowest_ms.fetch_max(took, Ordering::Relaxed);
        match done {
            Ok(Ok(())) => {
                self.served.fetch_add(1, Ordering::Relaxed);
            }
            Ok(Err(error)) => self.fail(format!("{how}: {error:#}")),
            Err(_) => self.fail(format!("{how}: no answer")),
        }
    }
}

type Kept = Option<http1::SendRequest<Empty<Bytes>>>;

async fn over_http1(addr: SocketAddr, kept: &mut Kept) -> anyhow::Result<()> {
    let mut sender = match kept.take() {
        Some(sender) => sender,
        None => {
            let (sender, conn) = http1::handshake(TokioIo::new(TcpStream::connect(addr).await?)).await?;
            tokio::spawn(conn);
            sender
        }
    };
    sender.ready().await?;
    is_hello(sender.send_request(common::get("/")).await?).await?;
    *kept = Some(sender);
    Ok(())
}

type Shared = tokio::sync::Mutex<Option<http2::SendRequest<Empty<Bytes>>>>;

async fn over_http2(addr: SocketAddr, shared: &Shared) -> anyhow::Result<()> {
    let mut sender = {
        let mut shared = shared.lock().await;
        if shared.is_none() {
            let io = TokioIo::new(TcpStream::connect(addr).await?);
            let (sender, conn) = http2::handshake(TokioExecutor::new(), io).await?;
            tokio::spawn(conn);
            *shared = Some(sender);
        }
        shared.clone().unwrap()
    };
    let request = Request::get("http://a/").body(Empty::new())?;
    is_hello(sender.send_request(request).await?).await
}

async fn is_hello(response: http::Response<hyper::body::Incoming>) -> anyhow::Result<()> {
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    anyhow::ensure!(status == 200 && body == "hello", "{status} {body:?}");
    Ok(())
}

/// The program itself. Dropping this kills it.
struct Agent {
    child: Child,
    service: SocketAddr,
    admin: SocketAddr,
}

impl Agent {
    fn start(upstream: SocketAddr, options: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_probe-agent"))
            .args(["--listen", "127.0.0.1:0", "--admin", "0", "--threads", "2"])
            .args(["--upstream", &upstream.to_string()])
            .args(options)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let lines: Vec<String> = lines.map(Result::unwrap).take_while(|line| line != "ready").collect();
        let port = |name: &str| {
            let find = |line: &String| Some(line.strip_prefix(name)?.parse().unwrap());
            lines.iter().find_map(find).unwrap()
        };
        Self { child, service: port("listening service="), admin: port("listening admin=") }
    }

    /// Returns the resident memory.
    fn memory_kb(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("the agent runs");
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    fn descriptors(&self) -> u64 {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count() as u64
    }

    async fn at_rest(&self) {
        let began = Instant::now();
        loop {
            let (_, metrics) = fetch(self.admin, "/metrics").await;
            let metrics = String::from_utf8_lossy(&metrics).into_owned();
            if metrics.lines().any(|line| line == "prequal_agent_rif 0") {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(10), "requests are left in flight:\n{metrics}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Raises this process's limit of file descriptors, which the agent inherits. Returns the number of silent connections
/// that the limit allows. Raising the hard limit requires CAP_SYS_RESOURCE.
fn allow_descriptors(wanted: u64) -> u64 {
    let pid = std::process::id().to_string();
    let limit = |which: &str| {
        let output = Command::new("prlimit")
            .args(["--pid", &pid, "--nofile", "--noheadings", "--output", which])
            .output();
        let output = output.expect("prlimit, of util-linux").stdout;
        String::from_utf8_lossy(&output).trim().parse::<u64>().unwrap_or(u64::MAX)
    };
    let set = |soft: u64, hard: u64| {
        let limits = format!("--nofile={soft}:{hard}");
        let done = Command::new("prlimit").args(["--pid", &pid, &limits]).stderr(Stdio::null()).status();
        done.is_ok_and(|status| status.success())
    };
    let (needed, hard) = (wanted + SPARE, limit("HARD"));
    if limit("SOFT") < needed && !set(needed, hard.max(needed)) {
        set(needed.min(hard), hard);
    }
    let allowed = limit("SOFT").saturating_sub(SPARE).min(wanted);
    if allowed < wanted {
        println!("{allowed} silent connections instead of {wanted}: the limit of descriptors is {hard}");
    }
    allowed
}

/// Number of descriptors for everything else.
const SPARE: u64 = 3000;
