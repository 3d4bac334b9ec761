//! The replicas of every benchmark, many in one child process, so that their CPU time is apart.
//!
//! `serve` is that process: each replica listens on a port of its own, waits its service time and
//! answers with its number. `PUT /bench/delay/<ms>` sent to a replica changes its service time at run
//! time. With `trivial` there is no wait, no parsing to speak of and a load report made up by the
//! replica itself: the cheapest upstream that the filter will believe.
//!
//! The parent's end is [`Backends`]. The child ends when its standard input does, hence also when the
//! parent is killed.

use std::convert::Infallible;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::Args;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Carries the number of the replica that answered.
pub(crate) const REPLICA_HEADER: &str = "x-bench-replica";

const DELAY_PATH: &str = "/bench/delay/";

/// Arguments of the child process.
#[derive(Args, Clone, Debug)]
pub(crate) struct Fleet {
    /// Replicas with the short service time; they have the lower numbers
    #[arg(long, default_value_t = 14)]
    pub(crate) fast: u16,
    /// Replicas with the long service time
    #[arg(long, default_value_t = 2)]
    pub(crate) slow: u16,
    /// Short service time
    #[arg(long, default_value_t = 50)]
    pub(crate) fast_ms: u64,
    /// Long service time
    #[arg(long, default_value_t = 800)]
    pub(crate) slow_ms: u64,
    /// Answer at once, with a fixed load report; all replicas alike
    #[arg(long)]
    pub(crate) trivial: bool,
}

/// A running child process with its replicas.
pub(crate) struct Backends {
    /// Serving addresses by number.
    pub(crate) addresses: Vec<SocketAddr>,
    fleet: Fleet,
    child: Child,
    /// Closing it ends the child.
    _stdin: ChildStdin,
}

impl Backends {
    /// Starts the child and waits until every replica listens.
    pub(crate) fn start(fleet: &Fleet) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("backends");
        for (name, value) in [
            ("--fast", u64::from(fleet.fast)),
            ("--slow", u64::from(fleet.slow)),
            ("--fast-ms", fleet.fast_ms),
            ("--slow-ms", fleet.slow_ms),
        ] {
            command.arg(name).arg(value.to_string());
        }
        if fleet.trivial {
            command.arg("--trivial");
        }
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("starting backends")?;
        let stdin = child.stdin.take().context("no stdin")?;
        let stdout = child.stdout.take().context("no stdout")?;
        let mut backends = Self { addresses: Vec::new(), fleet: fleet.clone(), child, _stdin: stdin };
        for line in BufReader::new(stdout).lines() {
            let line = line?;
            if line == "ready" {
                return Ok(backends);
            }
            let address = line.parse().with_context(|| format!("a backend said {line:?}"))?;
            backends.addresses.push(address);
        }
        bail!("the backends ended before they were ready");
    }

    /// The process, for accounting.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether the replica with this number belongs to the slow pair.
    pub(crate) fn is_slow(&self, replica: u16) -> bool {
        replica >= self.fleet.fast
    }

    /// Gives one replica another service time, from its next request on.
    pub(crate) async fn set_delay(&self, replica: u16, delay: Duration) -> Result<()> {
        let address = self.addresses.get(usize::from(replica)).context("no such replica")?;
        let stream = TcpStream::connect(address).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(connection);
        let request = Request::put(format!("{DELAY_PATH}{}", delay.as_millis()))
            .header("host", address.to_string())
            .body(Empty::<Bytes>::new())?;
        let status = sender.send_request(request).await?.status();
        drop(sender);
        connection.abort();
        if status != StatusCode::NO_CONTENT {
            bail!("replica {replica} answered {status} to a change of delay");
        }
        Ok(())
    }
}

impl Drop for Backends {
    fn drop(&mut self) {
        // Already gone is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The child process: serves until standard input ends.
pub(crate) fn serve(fleet: &Fleet) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        for number in 0..fleet.fast + fleet.slow {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            let address = listener.local_addr()?;
            if fleet.trivial {
                let load = format!("1;100;{address}");
                tokio::spawn(accept_trivial(listener, Replica { number, delay_ms: None, load: Some(load) }));
            } else {
                let ms = if number < fleet.fast { fleet.fast_ms } else { fleet.slow_ms };
                let delay_ms = Some(Arc::new(AtomicU64::new(ms)));
                tokio::spawn(accept(listener, Replica { number, delay_ms, load: None }));
            }
            println!("{address}");
        }
        println!("ready");
        std::io::stdout().flush()?;
        // A plain thread: tokio's stdin would keep the runtime from ending.
        let (done, ended) = tokio::sync::oneshot::channel::<()>();
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            drop(done);
        });
        let _ = ended.await;
        Ok(())
    })
}

#[derive(Clone)]
struct Replica {
    number: u16,
    /// `None`: answers at once.
    delay_ms: Option<Arc<AtomicU64>>,
    load: Option<String>,
}

impl Replica {
    async fn answer(self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
        let mut response = Response::new(Full::new(Bytes::new()));
        let Some(delay) = &self.delay_ms else {
            if let Some(value) = self.load.and_then(|load| load.parse().ok()) {
                response.headers_mut().insert("x-prequal-load", value);
            }
            return Ok(response);
        };
        if let Some(ms) = request.uri().path().strip_prefix(DELAY_PATH) {
            *response.status_mut() = match ms.parse() {
                Ok(ms) if request.method() == Method::PUT => {
                    delay.store(ms, Ordering::Relaxed);
                    StatusCode::NO_CONTENT
                }
                _ => StatusCode::BAD_REQUEST,
            };
            return Ok(response);
        }
        let delay = Duration::from_millis(delay.load(Ordering::Relaxed));
        tokio::time::sleep(delay).await;
        // A body that was not read would close the connection.
        let _ = request.into_body().collect().await;
        response.headers_mut().insert(REPLICA_HEADER, self.number.into());
        *response.body_mut() = Full::new(Bytes::from_static(b"ok\n"));
        Ok(response)
    }
}

async fn accept(listener: TcpListener, replica: Replica) {
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        tokio::spawn(serve_http(stream, replica.clone()));
    }
}

async fn serve_http(stream: TcpStream, replica: Replica) {
    let service = service_fn(move |request| replica.clone().answer(request));
    // A connection that the peer broke off concerns nobody here.
    let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
}

/// HTTP/1.1 without bodies in requests is answered with next to no CPU time; HTTP/2 as it has to be.
async fn accept_trivial(listener: TcpListener, replica: Replica) {
    let load = replica.load.as_deref().unwrap_or_default();
    let number = replica.number;
    let canned: Arc<str> = format!(
        "HTTP/1.1 200 OK\r\n{REPLICA_HEADER}: {number}\r\nx-prequal-load: {load}\r\ncontent-length: 3\r\n\r\nok\n"
    )
    .into();
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let (canned, replica) = (canned.clone(), replica.clone());
        tokio::spawn(async move {
            let mut preface = [0; 3];
            match stream.peek(&mut preface).await {
                Ok(_) if &preface == b"PRI" => serve_http(stream, replica).await,
                _ => serve_canned(stream, &canned).await,
            }
        });
    }
}

async fn serve_canned(mut stream: TcpStream, canned: &str) {
    let mut head = Vec::with_capacity(2048);
    while stream.read_buf(&mut head).await.is_ok_and(|n| n > 0) {
        if head.ends_with(b"\r\n\r\n") {
            head.clear();
            if stream.write_all(canned.as_bytes()).await.is_err() {
                return;
            }
        }
    }
}
