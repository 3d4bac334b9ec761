//! Real sockets for the agent's tests: scripted backends, raw clients, and waiting without blind sleeps.

#![allow(dead_code, reason = "each test program uses its part")]

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prequal_core::shared::outcome::Outcome;
use probe_agent::Agent;
use probe_agent::config::AgentConfig;
use probe_agent::load::Load;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

pub type Reply = Response<BoxBody<Bytes, std::io::Error>>;

/// A running agent. Dropping it stops it immediately.
pub struct Running {
    pub addr: SocketAddr,
    pub probe: Option<SocketAddr>,
    pub admin: Option<SocketAddr>,
    pub load: Load,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<u32>,
}

impl Running {
    /// Stops the agent, and returns the number of requests that were cut.
    pub async fn stop(mut self) -> u32 {
        let _ = self.stop.take().unwrap().send(());
        (&mut self.task).await.unwrap()
    }

    pub fn begin_stop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    /// Returns [success, failure, aborted, streaming].
    pub fn ended(&self) -> [u64; 4] {
        [Outcome::Success, Outcome::Failure, Outcome::Aborted, Outcome::Streaming]
            .map(|outcome| self.load.counters().ended(outcome))
    }

    pub async fn at_rest(&self, ended: [u64; 4]) {
        eventually(&format!("rif 0 and {ended:?} ended"), || self.load.rif() == 0 && self.ended() == ended)
            .await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts an agent in front of `backend`, with its settings changed by `change`.
pub fn agent(backend: SocketAddr, change: impl FnOnce(&mut AgentConfig)) -> Running {
    let mut config = AgentConfig::new(any_port(), backend.into());
    change(&mut config);
    let agent = Agent::bind(config).unwrap();
    let (addrs, load) = (agent.addrs(), agent.load());
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(agent.run(async move {
        // A test that drops the handle aborts the task. Only a message means shutdown.
        if stopped.await.is_err() {
            std::future::pending::<()>().await;
        }
    }));
    Running {
        addr: addrs.service.tcp().unwrap_or_else(any_port),
        probe: addrs.probe,
        admin: addrs.admin,
        load,
        stop: Some(stop),
        task,
    }
}

pub fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// Starts a backend that speaks both versions of HTTP.
pub async fn backend<F, R>(answer: F) -> SocketAddr
where
    F: Fn(Request<Incoming>) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Reply> + Send + 'static,
{
    let listener = TcpListener::bind(any_port()).await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            tokio::spawn(serve(tcp, answer.clone()));
        }
    });
    addr
}

/// Serves one connection of a backend that speaks both versions.
pub async fn serve<T, F, R>(tcp: T, answer: F)
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    F: Fn(Request<Incoming>) -> R + Send + 'static,
    R: Future<Output = Reply> + Send + 'static,
{
    let service = service_fn(move |req| {
        let answer = answer(req);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let _ = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new())
        .serve_connection_with_upgrades(TokioIo::new(tcp), service)
        .await;
}

/// Starts a backend below HTTP: `talk` gets every connection.
pub async fn raw_backend<F, R>(talk: F) -> SocketAddr
where
    F: Fn(TcpStream) -> R + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind(any_port()).await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            tokio::spawn(talk(tcp));
        }
    });
    addr
}

/// Starts a backend that signals the arrival of a request, and answers when it may go on.
pub async fn held_backend() -> (SocketAddr, Arc<Notify>, Arc<Notify>) {
    let (arrived, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (on_arrival, wait) = (arrived.clone(), go.clone());
    let addr = backend(move |_| {
        on_arrival.notify_one();
        let wait = wait.clone();
        async move {
            wait.notified().await;
            text("finished")
        }
    })
    .await;
    (addr, arrived, go)
}

/// The binary, run as operators do.
pub struct Process {
    /// Standard output after `ready`.
    pub stdout: Option<ChildStdout>,
    pub child: Child,
    pub service: SocketAddr,
    pub admin: SocketAddr,
}

impl Process {
    pub async fn start(upstream: SocketAddr, extra: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_probe-agent"));
        command
            .args(["--listen", "127.0.0.1:0", "--admin", "0", "--upstream", &upstream.to_string()])
            .args(extra);
        Self::spawn(command).await
    }

    /// Starts `command`, which must run an agent with an admin port.
    pub async fn spawn(mut command: Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut stdout = BufReader::with_capacity(1, child.stdout.take().unwrap());
        let mut lines = (&mut stdout).lines();
        let (mut service, mut admin) = (None, None);
        while let Some(line) = within(lines.next_line()).await.unwrap() {
            if let Some(addr) = line.strip_prefix("listening service=") {
                // A Unix socket has no such address.
                service = Some(addr.parse().unwrap_or_else(|_| any_port()));
            } else if let Some(addr) = line.strip_prefix("listening admin=") {
                admin = Some(addr.parse().unwrap());
            } else if line == "ready" {
                break;
            }
        }
        let stdout = Some(stdout.into_inner());
        Self { stdout, child, service: service.unwrap(), admin: admin.unwrap() }
    }

    /// Waits for the end of the process. Returns its exit status and its standard error.
    pub async fn end(mut self) -> (Option<i32>, String) {
        let mut stderr = String::new();
        within(self.child.stderr.take().unwrap().read_to_string(&mut stderr)).await.unwrap();
        (within(self.child.wait()).await.unwrap().code(), stderr)
    }

    pub async fn metrics(&self) -> String {
        let (_, body) = fetch(self.admin, "/metrics").await;
        String::from_utf8(body.to_vec()).unwrap()
    }

    pub async fn terminate(&self) {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
    }
}

/// Returns an address that refuses every connection until a test listens there. The system gives the port to no other
/// test, because a socket stays bound to it. `SO_REUSEADDR` on both sockets lets the test bind the same port.
pub async fn dead_backend() -> SocketAddr {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(any_port()).unwrap();
    let addr = socket.local_addr().unwrap();
    std::mem::forget(socket);
    addr
}

pub fn text(body: &'static str) -> Reply {
    Response::new(Full::new(Bytes::from_static(body.as_bytes())).map_err(|never| match never {}).boxed())
}

pub async fn read_head(tcp: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match tcp.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8(head).unwrap()
}

/// Sends bytes, and reads until the agent closes the connection.
pub async fn raw(addr: SocketAddr, bytes: &str) -> String {
    let mut tcp = TcpStream::connect(addr).await.unwrap();
    tcp.write_all(bytes.as_bytes()).await.unwrap();
    let mut reply = Vec::new();
    let _ = within(tcp.read_to_end(&mut reply)).await;
    String::from_utf8_lossy(&reply).into_owned()
}

/// One HTTP/2 frame, written by hand.
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

pub async fn read_frame(tcp: &mut TcpStream) -> std::io::Result<Frame> {
    let mut head = [0; 9];
    tcp.read_exact(&mut head).await?;
    let [a, b, c, kind, flags, stream @ ..] = head;
    let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
    tcp.read_exact(&mut payload).await?;
    Ok(Frame { kind, flags, stream: u32::from_be_bytes(stream), payload })
}

pub async fn client1<B>(addr: SocketAddr) -> http1::SendRequest<B>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let tcp = TcpStream::connect(addr).await.unwrap();
    let (sender, conn) = http1::handshake(TokioIo::new(tcp)).await.unwrap();
    tokio::spawn(conn.with_upgrades());
    sender
}

pub async fn client2<B>(addr: SocketAddr) -> http2::SendRequest<B>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let tcp = TcpStream::connect(addr).await.unwrap();
    let (sender, conn) = http2::handshake(TokioExecutor::new(), TokioIo::new(tcp)).await.unwrap();
    tokio::spawn(conn);
    sender
}

pub fn get(path: &str) -> Request<Empty<Bytes>> {
    Request::get(path).header("host", "app.example").body(Empty::new()).unwrap()
}

/// Sends one GET on a new connection.
pub async fn fetch(addr: SocketAddr, path: &str) -> (http::response::Parts, Bytes) {
    let response = client1(addr).await.send_request(get(path)).await.unwrap();
    let (head, body) = response.into_parts();
    (head, body.collect().await.unwrap().to_bytes())
}

pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

pub async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("took too long")
}

const PATIENCE: Duration = Duration::from_secs(10);
