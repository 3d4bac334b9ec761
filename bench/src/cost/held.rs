//! Requests that stay in flight through an agent while others are measured or memory is read.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{Empty, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prequal_testbed::Agent;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// The path that the backend never answers.
const HELD: &str = "/held";
/// Streams per connection: fewer than an agent allows by default.
const STREAMS: usize = 500;
/// Maximum time until all requests are in flight.
const PATIENCE: Duration = Duration::from_secs(30);

/// A backend within this process that answers every request at once, except those that are to stay in flight.
pub(super) struct Backend {
    pub(super) address: SocketAddr,
    accepts: JoinHandle<()>,
}

impl Backend {
    pub(super) async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let accepts = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(async move {
                    // A connection that breaks off shows in the agent's answers.
                    let _ = stream.set_nodelay(true);
                    let _ = http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service_fn(answer))
                        .await;
                });
            }
        });
        Ok(Self { address, accepts })
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.accepts.abort();
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    if request.uri().path() == HELD {
        std::future::pending::<()>().await;
    }
    Ok(Response::new(Full::new(Bytes::from_static(b"ok\n"))))
}

/// Requests in flight; dropping them breaks them off.
pub(super) struct Requests {
    _tasks: JoinSet<()>,
}

/// Sends `count` requests over HTTP/2 through `agent`, which must be in front of a [`Backend`]. Waits until the agent
/// counts all of them as in flight.
pub(super) async fn hold(agent: &Agent, count: usize) -> Result<Requests> {
    let mut tasks = JoinSet::new();
    for first in (0..count).step_by(STREAMS) {
        let stream = TcpStream::connect(agent.addr()).await?;
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
        tasks.spawn(async move {
            // If the connection ends, so do its requests, and the agent's count shows it.
            let _ = connection.await;
        });
        for _ in first..count.min(first + STREAMS) {
            let mut sender = sender.clone();
            let request =
                Request::get(format!("http://{}{HELD}", agent.addr())).body(Empty::<Bytes>::new())?;
            tasks.spawn(async move {
                let _ = sender.send_request(request).await;
            });
        }
    }
    let begin = Instant::now();
    loop {
        let rif = tokio::task::block_in_place(|| agent.rif()).context("reading RIF")? as usize;
        if rif == count {
            return Ok(Requests { _tasks: tasks });
        }
        ensure!(begin.elapsed() < PATIENCE, "the agent has {rif} requests in flight, not {count}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
