//! A real agent in this process: sockets on loopback, one thread, and a backend that answers normally or sends the
//! input's bytes.
//!
//! The agent accepts only sockets, so the bytes go through the kernel. Clients connect from many loopback addresses:
//! with a single one, ports would run out after a few seconds because of TIME_WAIT.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use probe_agent::Agent;
use probe_agent::config::{AgentConfig, UpstreamHttp2};
use probe_agent::load::Load;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Runtime;
use tokio::task::LocalSet;
use tokio::time::timeout;

/// The preface of HTTP/2, without the SETTINGS that follow it.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Maximum duration of a hostile connection. The agent closes it by itself, because its peer has closed it for writing.
const PATIENCE: Duration = Duration::from_millis(300);
/// Time limit for a well-formed request on a busy machine.
const LIMIT: Duration = Duration::from_secs(8);

thread_local! {
    static WORLD: World = World::start();
    static CLIENTS: Cell<u32> = const { Cell::new(0) };
}

/// An agent and its backend.
struct Side {
    agent: SocketAddr,
    load: Load,
    hostile: Rc<RefCell<Option<Vec<u8>>>>,
}

struct World {
    runtime: Runtime,
    tasks: LocalSet,
    /// For backends with HTTP/1.1 and with HTTP/2.
    sides: [Side; 2],
}

impl World {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let tasks = LocalSet::new();
        let sides = runtime.block_on(
            tasks.run_until(async { [side(UpstreamHttp2::Never).await, side(UpstreamHttp2::Always).await] }),
        );
        Self { runtime, tasks, sides }
    }
}

async fn side(version: UpstreamHttp2) -> Side {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let backend = TcpListener::bind(any).await.expect("a port");
    let mut config = AgentConfig::new(any, backend.local_addr().expect("an address").into());
    config.upstream_http2 = version;
    config.limits.response_timeout = Some(Duration::from_secs(2));
    config.limits.header_timeout = Duration::from_secs(1);
    config.limits.connect_timeout = Duration::from_secs(4);
    let agent = Agent::bind(config).expect("an agent");
    let addr = agent.addrs().service.tcp().expect("a TCP port");
    let load = agent.load();
    tokio::task::spawn_local(agent.run(std::future::pending()));
    let hostile = Rc::new(RefCell::new(None));
    tokio::task::spawn_local(serve(backend, hostile.clone()));
    Side { agent: addr, load, hostile }
}

async fn serve(backend: TcpListener, hostile: Rc<RefCell<Option<Vec<u8>>>>) {
    loop {
        let Ok((mut tcp, _)) = backend.accept().await else { continue };
        let bytes = hostile.borrow().clone();
        tokio::task::spawn_local(async move {
            let Some(bytes) = bytes else {
                let connection = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                let _ = connection.serve_connection(TokioIo::new(tcp), service_fn(answer)).await;
                return;
            };
            // The bytes must follow a request. If they came earlier, the agent might consider the connection broken.
            let _ = timeout(PATIENCE, tcp.read(&mut [0; 4096])).await;
            let _ = tcp.write_all(&bytes).await;
            let _ = tcp.shutdown().await;
            let _ = timeout(PATIENCE, drain(&mut tcp)).await;
        });
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<bytes::Bytes>>, Infallible> {
    let _ = request.into_body().collect().await;
    Ok(Response::new("hello".into()))
}

async fn drain(tcp: &mut TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    let _ = tcp.read_to_end(&mut all).await;
    all
}

/// Sends `bytes` in `pieces` pieces, closes for writing, and reads until the connection ends or `patience` is over.
async fn exchange(to: SocketAddr, bytes: &[u8], pieces: usize, patience: Duration) -> Option<Vec<u8>> {
    let number = CLIENTS.with(|clients| clients.replace(clients.get().wrapping_add(1)));
    let [_, a, b, c] = (number % 0x00ff_0000).to_be_bytes();
    let socket = TcpSocket::new_v4().expect("a socket");
    // Addresses from 127.1.0.0 up.
    socket.bind((Ipv4Addr::new(127, a + 1, b, c), 0).into()).expect("an address of loopback");
    let mut tcp = timeout(patience, socket.connect(to)).await.ok()?.ok()?;
    let _ = tcp.set_nodelay(true);
    for piece in bytes.chunks(bytes.len().div_ceil(pieces.max(1)).max(1)) {
        if tcp.write_all(piece).await.is_err() {
            break;
        }
        tokio::task::yield_now().await;
    }
    let _ = tcp.shutdown().await;
    timeout(patience, drain(&mut tcp)).await.ok()
}

/// Sends a request as users do; fails with what came instead of the expected answer.
async fn honest(side: &Side) -> Result<(), String> {
    let request = b"GET /after HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    let number = CLIENTS.with(|clients| clients.replace(clients.get().wrapping_add(1)));
    let [_, a, b, c] = (number % 0x00ff_0000).to_be_bytes();
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind((Ipv4Addr::new(127, a + 1, b, c), 0).into()).expect("an address of loopback");
    let all = async {
        let mut tcp = socket.connect(side.agent).await.map_err(|error| format!("connect: {error}"))?;
        tcp.write_all(request).await.map_err(|error| format!("send: {error}"))?;
        let mut reply = Vec::new();
        let end = tcp.read_to_end(&mut reply).await;
        if reply.starts_with(b"HTTP/1.1 200 ") && reply.ends_with(b"hello") {
            return Ok(());
        }
        Err(format!("answered {:?}, then {end:?}", String::from_utf8_lossy(&reply)))
    };
    timeout(LIMIT, all).await.unwrap_or_else(|_| Err(format!("no complete answer within {LIMIT:?}")))
}

/// Checks that everything from the hostile connection is gone, and that a well-formed request is answered.
async fn recovers(side: &Side, tries: u32) {
    let mut answered = honest(side).await;
    for _ in 1..tries {
        if answered.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        answered = honest(side).await;
    }
    if let Err(reason) = answered {
        panic!("a well-formed request failed afterwards: {reason}");
    }
    for wait in 0..2000 {
        if side.load.rif() == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(if wait < 100 { 1 } else { 5 })).await;
    }
    panic!("{} requests are still in flight after all connections have ended", side.load.rif());
}

/// A client of the agent sends `bytes`. With `http2`, the agent speaks HTTP/2 to its backend.
pub fn client(bytes: &[u8], pieces: usize, http2: bool) {
    WORLD.with(|world| {
        let side = &world.sides[usize::from(http2)];
        world.runtime.block_on(world.tasks.run_until(async {
            exchange(side.agent, bytes, pieces, PATIENCE).await;
            recovers(side, 1).await;
        }));
    });
}

/// The agent's backend answers `request` with `bytes`.
pub fn backend(request: &[u8], bytes: &[u8], http2: bool) {
    WORLD.with(|world| {
        let side = &world.sides[usize::from(http2)];
        world.runtime.block_on(world.tasks.run_until(async {
            side.hostile.replace(Some(bytes.to_vec()));
            exchange(side.agent, request, 1, PATIENCE).await;
            side.hostile.replace(None);
            // The agent may still use earlier connections that it believes to be intact.
            recovers(side, 20).await;
        }));
    });
}

/// Appends an HTTP/2 frame with the right length.
pub fn frame(to: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).expect("a short payload").to_be_bytes();
    to.extend_from_slice(&length[1..]);
    to.extend_from_slice(&[kind, flags]);
    to.extend_from_slice(&stream.to_be_bytes());
    to.extend_from_slice(payload);
}

/// Makes frames from a script: one byte each for kind, flags, stream and length, then the payload.
pub fn frames(mut bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let [kind, flags, stream, length, rest @ ..] = bytes {
        let (payload, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        frame(&mut out, kind % 12, *flags, u32::from(*stream), payload);
        bytes = rest;
    }
    out
}
