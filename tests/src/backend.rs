//! An HTTP server in this process that answers as a test specifies, and counts requests.
//!
//! It serves HTTP/1.1 and cleartext HTTP/2 on one port. A handler maps each request to a [`Reply`], so a backend can
//! also act as an agent that lies.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Channel, Full};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use crate::reply::{Body, Reply, Seen};
use crate::runtime::{block_on, handle};

/// A running server; it stops, with its connections, on drop.
pub struct Backend {
    addr: SocketAddr,
    shared: Arc<Shared>,
    acceptor: AbortHandle,
}

type Handler = Arc<dyn Fn(&Seen) -> Reply + Send + Sync>;
type BoxBody = UnsyncBoxBody<Bytes, std::io::Error>;

struct Shared {
    handler: RwLock<Handler>,
    served: AtomicU64,
    active: AtomicI64,
    recorded: AtomicU64,
    seen: Mutex<Vec<Seen>>,
    /// Set when connections should end after their requests.
    finish: watch::Sender<bool>,
    gate: watch::Sender<bool>,
}

/// Maximum number of requests recorded until [`Backend::clear`]; later ones are only counted.
const RECORDED: u64 = 512;

impl Backend {
    /// Starts a server on a free port of 127.0.0.1 that answers every request with `reply`.
    pub fn start(reply: Reply) -> Result<Self> {
        Self::start_on("127.0.0.1:0", move |_| reply.clone())
    }

    /// Starts a server on `addr` (for instance `[::1]:0`) that answers with `handler`.
    pub fn start_on(addr: &str, handler: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Result<Self> {
        let listener = std::net::TcpListener::bind(addr).with_context(|| format!("cannot bind {addr}"))?;
        Self::on(listener, handler)
    }

    /// Starts a server on an existing `listener` that answers with `handler`.
    pub fn on(
        listener: std::net::TcpListener,
        handler: impl Fn(&Seen) -> Reply + Send + Sync + 'static,
    ) -> Result<Self> {
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared {
            handler: RwLock::new(Arc::new(handler)),
            served: AtomicU64::new(0),
            active: AtomicI64::new(0),
            recorded: AtomicU64::new(0),
            seen: Mutex::new(Vec::new()),
            finish: watch::Sender::new(false),
            gate: watch::Sender::new(false),
        });
        let state = Arc::clone(&shared);
        let acceptor = handle().spawn(async move {
            let Ok(listener) = TcpListener::from_std(listener) else { return };
            accept(listener, state).await;
        });
        Ok(Self { addr, shared, acceptor: acceptor.abort_handle() })
    }

    /// The listening address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Answers every request with `reply` from now on.
    pub fn set(&self, reply: Reply) {
        self.set_handler(move |_| reply.clone());
    }

    /// Answers with `handler` from now on.
    pub fn set_handler(&self, handler: impl Fn(&Seen) -> Reply + Send + Sync + 'static) {
        *self.shared.handler.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(handler);
    }

    /// Opens or closes the gate of gated replies. It is closed at the start.
    pub fn set_gate(&self, open: bool) {
        self.shared.gate.send_replace(open);
    }

    /// Number of requests that have arrived.
    pub fn served(&self) -> u64 {
        self.shared.served.load(Ordering::Relaxed)
    }

    /// Number of requests that have arrived and whose response has not begun.
    pub fn active(&self) -> i64 {
        self.shared.active.load(Ordering::Relaxed)
    }

    /// The first requests since the start or the last [`Self::clear`] (up to 512).
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Forgets the recorded requests and sets the count to zero.
    pub fn clear(&self) {
        self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.shared.recorded.store(0, Ordering::Relaxed);
        self.shared.served.store(0, Ordering::Relaxed);
    }

    /// Stops accepting connections, and waits until every request that has arrived is answered.
    pub fn finish(self) {
        self.shared.finish.send_replace(true);
        let acceptor = self.acceptor.clone();
        block_on(async move {
            while !acceptor.is_finished() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.acceptor.abort();
        // The port is free only once the task has ended; a caller that binds it again must not race with the task.
        let handle = self.acceptor.clone();
        if tokio::runtime::Handle::try_current().is_err() {
            block_on(async move {
                while !handle.is_finished() {
                    tokio::task::yield_now().await;
                }
            });
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    let mut finish = shared.finish.subscribe();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                let _ = stream.set_nodelay(true);
                connections.spawn(serve(stream, Arc::clone(&shared)));
            }
            Some(_) = connections.join_next() => {}
            _ = finish.wait_for(|finish| *finish) => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    let mut finish = shared.finish.subscribe();
    let service = service_fn(move |request| respond(request, Arc::clone(&shared)));
    let builder = auto::Builder::new(TokioExecutor::new());
    let mut served = pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    // An error means that the peer closed the connection, or that a `Reset` did.
    tokio::select! {
        _ = served.as_mut() => return,
        _ = finish.wait_for(|finish| *finish) => {}
    }
    served.as_mut().graceful_shutdown();
    let _ = served.await;
}

/// Counts a request as active until its response begins or it is aborted.
struct Active<'a>(&'a AtomicI64);

impl Drop for Active<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn respond(
    mut request: http::Request<Incoming>,
    shared: Arc<Shared>,
) -> Result<http::Response<BoxBody>, std::io::Error> {
    shared.served.fetch_add(1, Ordering::Relaxed);
    shared.active.fetch_add(1, Ordering::Relaxed);
    let _active = Active(&shared.active);
    let seen = Seen {
        method: request.method().clone(),
        path: request.uri().path_and_query().map_or_else(String::new, ToString::to_string),
        version: request.version(),
        headers: request.headers().clone(),
    };
    let handler = Arc::clone(&shared.handler.read().unwrap_or_else(PoisonError::into_inner));
    let reply = handler(&seen);
    if shared.recorded.fetch_add(1, Ordering::Relaxed) < RECORDED {
        shared.seen.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
    }
    if reply.reads_first {
        let _ = request.body_mut().collect().await;
    }
    if reply.gated {
        let _ = shared.gate.subscribe().wait_for(|open| *open).await;
    }
    if !reply.delay.is_zero() {
        tokio::time::sleep(reply.delay).await;
    }
    let mut status = reply.status;
    let body = match reply.body {
        Body::Full(bytes) => full(bytes),
        Body::Stream { chunk, count, gap } => {
            let (mut sender, body) = Channel::<Bytes, std::io::Error>::new(1);
            tokio::spawn(async move {
                for _ in 0..count {
                    if sender.send(Frame::data(chunk.clone())).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(gap).await;
                }
            });
            body.boxed_unsync()
        }
        Body::Trailers(bytes, trailers) => {
            full(bytes).with_trailers(std::future::ready(Some(Ok(trailers)))).boxed_unsync()
        }
        Body::Broken(bytes) => {
            let (mut sender, body) = Channel::<Bytes, std::io::Error>::new(1);
            tokio::spawn(async move {
                let _ = sender.send(Frame::data(bytes)).await;
                // Let the first chunk leave before the abort.
                tokio::time::sleep(Duration::from_millis(20)).await;
                sender.abort(broken());
            });
            body.boxed_unsync()
        }
        Body::Echo => request.into_body().map_err(std::io::Error::other).boxed_unsync(),
        Body::Upgrade => {
            status = StatusCode::SWITCHING_PROTOCOLS;
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                if let Ok(upgraded) = upgrade.await {
                    echo(TokioIo::new(upgraded)).await;
                }
            });
            full(Bytes::new())
        }
        Body::Hang => std::future::pending::<BoxBody>().await,
        Body::Reset => return Err(broken()),
    };
    let mut response = http::Response::new(body);
    *response.status_mut() = status;
    if status == StatusCode::SWITCHING_PROTOCOLS {
        response.headers_mut().insert(http::header::CONNECTION, HeaderValue::from_static("upgrade"));
        response.headers_mut().insert(http::header::UPGRADE, HeaderValue::from_static("websocket"));
    }
    for (name, value) in &reply.headers {
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(std::io::Error::other)?;
        let value = HeaderValue::from_str(value).map_err(std::io::Error::other)?;
        response.headers_mut().append(name, value);
    }
    Ok(response)
}

async fn echo(mut io: TokioIo<hyper::upgrade::Upgraded>) {
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = io.read(&mut buffer).await {
        if io.write_all(&buffer[..length]).await.is_err() || io.flush().await.is_err() {
            return;
        }
    }
}

fn full(bytes: Bytes) -> BoxBody {
    Full::new(bytes).map_err(|never: Infallible| match never {}).boxed_unsync()
}

fn broken() -> std::io::Error {
    std::io::Error::other("broken off on purpose")
}
