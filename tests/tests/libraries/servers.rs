//! Servers in other languages as backends of the agent: under load from another client, and while they restart
//! gracefully.

mod program;

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use prequal_core::shared::outcome::Outcome;
use prequal_testbed::{Client, Request, Response, block_on, eventually, handle, needs};
use probe_agent::Agent;
use probe_agent::config::{AgentConfig, UpstreamHttp2};
use probe_agent::load::Load;
use program::{Kind, Server};

use crate::subject::PATIENCE;
use crate::tools::missing;

/// An agent; it stops on drop.
struct Proxy {
    addr: SocketAddr,
    load: Load,
    task: tokio::task::JoinHandle<u32>,
}

impl Proxy {
    /// Starts an agent in front of `server` with the default settings, except for servers that speak only HTTP/2.
    fn start(server: &Server) -> Result<Self> {
        let _entered = handle().enter();
        let mut config = AgentConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)), server.addr().into());
        if server.kind().only_http2() {
            config.upstream_http2 = UpstreamHttp2::Always;
        }
        let agent = Agent::bind(config)?;
        let (addr, load) = (agent.addrs().service.tcp().context("an address")?, agent.load());
        Ok(Self { addr, load, task: handle().spawn(agent.run(std::future::pending())) })
    }

    fn succeeded(&self) -> u64 {
        self.load.counters().ended(Outcome::Success)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn request(kind: Kind) -> Request {
    if kind == Kind::GoGrpc {
        // An empty message: the health of the whole server.
        return Request::post("/grpc.health.v1.Health/Check", &[0; 5][..])
            .header("content-type", "application/grpc")
            .header("te", "trailers");
    }
    Request::post("/", vec![b'x'; 10_000])
}

/// Fails unless the request was answered completely, or was not sent: in that case, Envoy would send it to another
/// replica.
fn was_answered(kind: Kind, answer: &Response) -> Result<()> {
    if answer.header("x-prequal-failure") == Some("unsent") {
        return Ok(());
    }
    let complete = match kind {
        Kind::GoGrpc => answer.trailers.get("grpc-status").is_some_and(|status| status == "0"),
        _ => answer.text() == "hello",
    };
    ensure!(answer.status == 200 && complete, "{} {}", answer.status, answer.text());
    Ok(())
}

/// Sends requests one after the other. Returns those that failed.
async fn work(kind: Kind, client: Client, stop: Arc<AtomicBool>) -> Vec<String> {
    let mut failures = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let answer = client.send_async(request(kind)).await;
        if let Err(error) = answer.and_then(|answer| was_answered(kind, &answer)) {
            failures.push(format!("{error:#}"));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    failures
}

const RESTARTS: usize = 3;
const WORKERS: usize = 8;
/// Over HTTP/1.1, a server may close an idle connection just as a request arrives on it. The agent cannot know whether
/// the request was processed.
const RACE: &str = "502 Bad Gateway probe-agent: backend closed the connection before a response";

impl Kind {
    /// Maximum number of requests that a restart may cost, because connections close as the requests arrive.
    fn most_raced(self) -> usize {
        match self {
            Self::NginxHttp2 | Self::NginxFewRequests | Self::NodeHttp2 | Self::GoGrpc => 0,
            Self::Nginx | Self::Node | Self::Go | Self::Java => WORKERS,
        }
    }
}

/// Restarts the server under load. Every request must be answered completely, remain unsent, or lose the race with a
/// connection that closes ([`RACE`]).
fn restarts(kind: Kind) -> Result<()> {
    needs!(kind.missing());
    let mut server = Server::start(kind)?;
    let agent = Proxy::start(&server)?;
    let client = if kind == Kind::GoGrpc { Client::http2(agent.addr) } else { Client::new(agent.addr) };
    let stop = Arc::<AtomicBool>::default();
    let workers: Vec<_> =
        (0..WORKERS).map(|_| handle().spawn(work(kind, client.clone(), stop.clone()))).collect();
    let serves = || {
        let before = agent.succeeded();
        eventually("requests are answered", PATIENCE, || (agent.succeeded() > before + 200).then_some(()));
    };
    for _ in 0..RESTARTS {
        serves();
        server.restart()?;
    }
    serves();
    stop.store(true, Ordering::Relaxed);
    let failures: Vec<String> =
        workers.into_iter().flat_map(|worker| block_on(worker).expect("it ran")).collect();
    eprintln!("{kind:?}: {} answered, {} failed", agent.succeeded(), failures.len());
    let raced = failures.iter().filter(|failure| failure.contains(RACE)).count();
    ensure!(raced == failures.len() && raced <= kind.most_raced() * RESTARTS, "{kind:?}: {failures:#?}");
    ensure!(agent.load.rif() == 0);
    Ok(())
}

/// h2load, which is built on nghttp2, sends requests over HTTP/1.1 and HTTP/2, with and without a body.
fn serves_h2load(kind: Kind) -> Result<()> {
    needs!(missing("h2load", &["--version"], "nghttp2-client"));
    needs!(kind.missing());
    let server = Server::start(kind)?;
    let agent = Proxy::start(&server)?;
    let mut body = tempfile::NamedTempFile::new()?;
    body.write_all(&[b'x'; 10_000])?;
    let data = format!("--data={}", body.path().display());
    for options in [&["--h1"][..], &["--max-concurrent-streams=10"], &["--max-concurrent-streams=10", &data]]
    {
        let mut h2load = Command::new("h2load");
        h2load.args(["--requests=1000", "--clients=8", "--connection-active-timeout=20"]).args(options);
        let output = h2load.arg(format!("http://{}/", agent.addr)).output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(
            output.status.success() && said.contains("status codes: 1000 2xx"),
            "{kind:?} {options:?}: {said}"
        );
    }
    eventually("no request is in flight", PATIENCE, || (agent.load.rif() == 0).then_some(()));
    Ok(())
}

#[test]
fn h2load_is_served_by_every_server() -> Result<()> {
    Kind::ALL.into_iter().filter(|kind| *kind != Kind::GoGrpc).try_for_each(serves_h2load)
}

#[test]
fn nginx_restarts_under_load() -> Result<()> {
    restarts(Kind::Nginx)?;
    restarts(Kind::NginxHttp2)?;
    restarts(Kind::NginxFewRequests)
}

#[test]
fn node_restarts_under_load() -> Result<()> {
    restarts(Kind::Node)?;
    restarts(Kind::NodeHttp2)
}

#[test]
fn go_restarts_under_load() -> Result<()> {
    restarts(Kind::Go)?;
    restarts(Kind::GoGrpc)
}

#[test]
fn java_restarts_under_load() -> Result<()> {
    restarts(Kind::Java)
}
