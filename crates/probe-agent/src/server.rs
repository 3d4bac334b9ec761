//! Listening, accepting, draining.

use std::convert::Infallible;
use std::future::{self, Future};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use prequal_core::endpoint::Endpoint;
use prequal_core::probe::Route;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::admin;
use crate::config::{AgentConfig, Limits, UpstreamHttp2, ping_timeout};
use crate::conn::{self, ServerIo, Stream, Watch};
use crate::load::Load;
use crate::plb::Plb;
use crate::probe;
use crate::proxy::{self, Connection, Shared};
use crate::ready::Checker;
use crate::reporter::Reporter;
use crate::tls::{Acceptor, Connector, TlsError};
use crate::upstream::Pool;

/// Why an agent could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The address is taken, not ours, or not permitted.
    #[error("cannot listen on {addr} ({port})")]
    Listen {
        /// Which of the three ports.
        port: &'static str,
        /// The address asked for.
        addr: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// Certificates or keys are not usable.
    #[error("TLS")]
    Tls(#[from] TlsError),
    /// PLB was asked for.
    #[error("--plb: this program was built without the Cargo feature `plb`")]
    NoPlb,
}

/// An agent that listens and does not accept yet.
pub struct Agent {
    service: TcpListener,
    probe: Option<TcpListener>,
    admin: Option<TcpListener>,
    tls: Option<Acceptor>,
    shared: Arc<Shared>,
    checker: Arc<Checker>,
    limits: Arc<Limits>,
    advertise: Option<Endpoint>,
    addrs: Addrs,
}

/// The addresses an agent listens on.
#[derive(Clone, Copy, Debug)]
pub struct Addrs {
    /// The service port.
    pub service: SocketAddr,
    /// The probe port, if any.
    pub probe: Option<SocketAddr>,
    /// The admin port, if any.
    pub admin: Option<SocketAddr>,
}

impl Agent {
    /// Binds every port and reads every certificate. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// The first port that cannot be bound, or the first file that cannot be used.
    pub fn bind(config: AgentConfig) -> Result<Self, AgentError> {
        let tls = Acceptor::new(&config)?;
        let upstream_tls = match &config.upstream_tls {
            Some(tls) => {
                let name = tls.server_name.as_deref().unwrap_or(config.upstream.host());
                Some(Connector::new(tls.ca.clone(), name)?)
            }
            None => None,
        };
        if config.plb && !cfg!(feature = "plb") {
            return Err(AgentError::NoPlb);
        }
        let plb = config.plb.then(Plb::default);
        let service = listen("service", config.listen, plb.as_ref())?;
        let probe = config.probe_listen.map(|addr| listen("probe", addr, plb.as_ref())).transpose()?;
        let admin = config.admin.map(|addr| listen("admin", addr, None)).transpose()?;
        let local = |listener: &TcpListener, port, addr| {
            listener.local_addr().map_err(|source| AgentError::Listen { port, addr, source })
        };
        let addrs = Addrs {
            service: local(&service, "service", config.listen)?,
            probe: probe
                .as_ref()
                .zip(config.probe_listen)
                .map(|(l, addr)| local(l, "probe", addr))
                .transpose()?,
            admin: admin.as_ref().zip(config.admin).map(|(l, addr)| local(l, "admin", addr)).transpose()?,
        };
        let load = Load::new(config.tracker);
        // Whether the backend is there shows with the first connection to it.
        load.mark_unseen();
        let checker = Arc::new(Checker {
            check: config.ready_check,
            target: config.upstream.clone(),
            tls: upstream_tls.clone(),
            http2: config.upstream_http2 == UpstreamHttp2::Always,
            timeout: config.limits.ready_timeout,
            load: load.clone(),
        });
        let pool = Arc::new(Pool::new(config.upstream, upstream_tls, plb, &config.limits, load.clone()));
        let shared = Arc::new(Shared {
            reporter: Reporter {
                load,
                report: config.report,
                hints: config.hints,
                utilization: config.utilization,
            },
            pool,
            forward_hint: config.forward_hint,
            upstream_http2: config.upstream_http2,
            response_timeout: config.limits.response_timeout,
        });
        let limits = Arc::new(config.limits);
        Ok(Self { service, probe, admin, tls, shared, checker, limits, advertise: config.advertise, addrs })
    }

    /// Where it listens.
    pub fn addrs(&self) -> Addrs {
        self.addrs
    }

    /// The load it will count on.
    pub fn load(&self) -> Load {
        self.shared.reporter.load.clone()
    }

    /// Serves until `shutdown`, then drains: health fails, after `drain_delay` no connection is accepted and those
    /// open are closed as they fall idle, and after `drain_timeout` whatever is left is cut.
    ///
    /// Returns whether everything ended by itself.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> bool {
        let draining = Arc::new(AtomicBool::new(false));
        let (drain, open) = watch::channel(false);
        let mut tasks = vec![tokio::spawn(self.checker.clone().watch())];
        let (load, interval) = (&self.checker.load, self.limits.tls_reload_interval);
        tasks.extend(self.tls.iter().map(|tls| tokio::spawn(tls.watch(interval, load.clone()))));
        tasks.extend(self.checker.tls.iter().map(|tls| tokio::spawn(tls.watch(interval, load.clone()))));
        if let Some(listener) = self.admin {
            let (checker, draining) = (self.checker, draining.clone());
            tasks.push(tokio::spawn(accept(listener, move |tcp| {
                tokio::spawn(serve_admin(tcp, checker.clone(), draining.clone()));
            })));
        }
        let ports = Arc::new(Ports {
            shared: self.shared,
            limits: self.limits.clone(),
            tls: self.tls,
            advertise: self.advertise,
            service_port: self.addrs.service.port(),
            probe_port: self.addrs.probe.map(|addr| addr.port()),
        });
        let mut closing = Vec::new();
        if let Some(listener) = self.probe {
            let (ports, open) = (ports.clone(), open.clone());
            closing.push(tokio::spawn(accept(listener, move |tcp| {
                tokio::spawn(ports.clone().serve_probes(tcp, open.clone()));
            })));
        }
        closing.push(tokio::spawn(accept(self.service, move |tcp| {
            tokio::spawn(ports.clone().serve(tcp, open.clone()));
        })));

        shutdown.await;
        draining.store(true, Ordering::Relaxed);
        tokio::time::sleep(self.limits.drain_delay).await;
        abort(closing).await;
        let _ = drain.send(true);
        let drained = tokio::time::timeout(self.limits.drain_timeout, drain.closed()).await.is_ok();
        abort(tasks).await;
        drained
    }
}

async fn abort(tasks: Vec<JoinHandle<()>>) {
    for task in tasks {
        task.abort();
        // Wait until the task, and with it the listener, is gone.
        let _ = task.await;
    }
}

fn listen(port: &'static str, addr: SocketAddr, plb: Option<&Plb>) -> Result<TcpListener, AgentError> {
    let open = || {
        let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        socket.bind(addr)?;
        if let Some(plb) = plb {
            plb.prepare(port, &socket, addr.is_ipv6());
        }
        socket.listen(BACKLOG)
    };
    open().map_err(|source| AgentError::Listen { port, addr, source })
}

async fn accept(listener: TcpListener, mut serve: impl FnMut(TcpStream)) {
    loop {
        match listener.accept().await {
            Ok((tcp, _)) => {
                let _ = tcp.set_nodelay(true);
                serve(tcp);
            }
            // Out of file descriptors, or a client that left at once: neither ends the agent.
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// What the accept loops hand to each connection.
struct Ports {
    shared: Arc<Shared>,
    limits: Arc<Limits>,
    tls: Option<Acceptor>,
    advertise: Option<Endpoint>,
    service_port: u16,
    probe_port: Option<u16>,
}

impl Ports {
    /// Errors end the connection and have been seen by the client; there is nobody else to tell.
    async fn serve(self: Arc<Self>, tcp: TcpStream, open: watch::Receiver<bool>) {
        let Some(endpoint) = self.endpoint(&tcp) else { return };
        let mut drain = open.clone();
        let limits = &self.limits;
        let Some((stream, http2, replay)) = self.open(tcp, &mut drain).await else { return };
        let watch = Arc::new(Watch::new(http2));
        let conn = Arc::new(Connection {
            shared: self.shared.clone(),
            watch: watch.clone(),
            endpoint,
            probe_endpoint: self.probe_port.map(|port| endpoint.with_port(port)),
            open,
        });
        let io = TokioIo::new(ServerIo::new(stream, replay, watch.clone(), limits.header_timeout));
        let service = service_fn(move |req| proxy::serve(conn.clone(), req));
        if http2 {
            let served = http2_builder(limits).enable_connect_protocol().serve_connection(io, service);
            drive(pin!(served), http2::Connection::graceful_shutdown, &watch, drain, limits.idle_timeout)
                .await;
        } else {
            let served = http1_builder(limits).serve_connection(io, service).with_upgrades();
            let graceful = http1::UpgradeableConnection::graceful_shutdown;
            drive(pin!(served), graceful, &watch, drain, limits.idle_timeout).await;
        }
    }

    async fn serve_probes(self: Arc<Self>, tcp: TcpStream, mut drain: watch::Receiver<bool>) {
        let Some(endpoint) = self.endpoint(&tcp) else { return };
        let probe_endpoint = self.probe_port.map(|port| endpoint.with_port(port));
        let limits = &self.limits;
        let Some((stream, http2, replay)) = self.open(tcp, &mut drain).await else { return };
        let watch = Arc::new(Watch::new(http2));
        let io = TokioIo::new(ServerIo::new(stream, replay, watch.clone(), limits.header_timeout));
        let (reporter, requests) = (self.shared.reporter.clone(), watch.clone());
        let service = service_fn(move |req: Request<Incoming>| {
            let _busy = requests.begin(false);
            let response = match probe::route(req.method(), req.uri().path()) {
                Route::Probe => {
                    reporter.load.counters().count_probe(true);
                    reporter.answer(endpoint, probe_endpoint, req.headers())
                }
                Route::MethodNotAllowed => probe::method_not_allowed(),
                Route::Forward | Route::NotFound => probe::plain(StatusCode::NOT_FOUND, "not found\n"),
            };
            future::ready(Ok::<_, Infallible>(response.map(Full::new)))
        });
        if http2 {
            let served = http2_builder(limits).serve_connection(io, service);
            drive(pin!(served), http2::Connection::graceful_shutdown, &watch, drain, limits.idle_timeout)
                .await;
        } else {
            let served = http1_builder(limits).serve_connection(io, service);
            drive(pin!(served), http1::Connection::graceful_shutdown, &watch, drain, limits.idle_timeout)
                .await;
        }
    }

    /// The connection below HTTP: within TLS if the agent listens with it, whether it is HTTP/2, and what was read to
    /// know. `None` if it has failed, or the agent drains first.
    async fn open(
        &self,
        tcp: TcpStream,
        drain: &mut watch::Receiver<bool>,
    ) -> Option<(Stream, bool, Vec<u8>)> {
        let limits = &self.limits;
        let open = async {
            let mut stream = match &self.tls {
                None => Stream::Plain(tcp),
                Some(tls) => {
                    let tls = tokio::time::timeout(limits.header_timeout, tls.accept(tcp));
                    Stream::Tls(Box::new(tls.await.ok()?.ok()?))
                }
            };
            let (http2, replay) =
                conn::detect(&mut stream, limits.idle_timeout, limits.header_timeout).await.ok()??;
            Some((stream, http2, replay))
        };
        tokio::select! {
            opened = open => opened,
            _ = drain.wait_for(|drain| *drain) => None,
        }
    }

    /// The endpoint that this connection's client knows us by.
    fn endpoint(&self, tcp: &TcpStream) -> Option<Endpoint> {
        if self.advertise.is_some() {
            return self.advertise;
        }
        let local = tcp.local_addr().ok()?;
        // An IPv4 client of a dual-stack listener must find the IPv4 spelling.
        Some(SocketAddr::new(local.ip().to_canonical(), self.service_port).into())
    }
}

/// Runs a connection to its end, and asks it to end when the agent drains or nothing has happened for long.
async fn drive<C>(
    mut served: Pin<&mut C>,
    graceful: impl Fn(Pin<&mut C>),
    watch: &Watch,
    mut drain: watch::Receiver<bool>,
    idle: Duration,
) where
    C: Future,
{
    // Two looks without a request between them, and none in flight: idle for between half and all of the limit.
    let mut look = tokio::time::interval(idle / 2);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    look.reset();
    let mut last = watch.activity();
    let mut draining = pin!(drain.wait_for(|drain| *drain));
    loop {
        tokio::select! {
            biased;
            _ = served.as_mut() => return,
            _ = &mut draining => break,
            _ = look.tick() => {
                let now = watch.activity();
                if now == last && !now.1 {
                    break;
                }
                last = now;
            }
        }
    }
    graceful(served.as_mut());
    let _ = served.await;
}

fn http1_builder(limits: &Limits) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(None)
        .max_header_size(limits.max_header_bytes)
        .max_buf_size(limits.max_header_bytes.max(MIN_BUFFER));
    if limits.max_headers != HYPER_MAX_HEADERS {
        builder.max_headers(limits.max_headers);
    }
    builder
}

fn http2_builder(limits: &Limits) -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.max_streams)
        .max_header_list_size(u32::try_from(limits.max_header_bytes).unwrap_or(u32::MAX))
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW * 4)
        .max_send_buf_size(SEND_BUFFER);
    if let Some(interval) = limits.ping_interval {
        builder.keep_alive_interval(interval).keep_alive_timeout(ping_timeout(interval));
    }
    builder
}

async fn serve_admin(tcp: TcpStream, checker: Arc<Checker>, draining: Arc<AtomicBool>) {
    let service = service_fn(async |req: Request<Incoming>| {
        let draining = draining.load(Ordering::Relaxed);
        let response = admin::answer(req.method(), req.uri().path(), &checker, draining).await;
        Ok::<_, Infallible>(response.map(Full::new))
    });
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(ADMIN_IDLE)
        .max_buf_size(MIN_BUFFER)
        .serve_connection(TokioIo::new(tcp), service)
        .await;
}

const BACKLOG: u32 = 4096;
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// A scraper's connection is closed when it has been idle for this long.
const ADMIN_IDLE: Duration = Duration::from_secs(120);
/// hyper refuses a smaller read buffer.
const MIN_BUFFER: usize = 8192;
/// hyper's own limit, which costs nothing to keep.
const HYPER_MAX_HEADERS: usize = 100;
/// HTTP/2 flow-control window of a stream: what is buffered at most for a backend that reads slowly.
const WINDOW: u32 = 256 * 1024;
/// What is buffered at most per HTTP/2 stream towards a client that reads slowly.
const SEND_BUFFER: usize = 256 * 1024;
