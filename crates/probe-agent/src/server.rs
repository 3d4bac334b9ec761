//! Binds the ports, accepts connections, and drains.

use std::convert::Infallible;
use std::future::{self, Future};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use http_body::Body as _;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::wire::probe::Route;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::accept::{Admitted, Door, accept};
use crate::access::AccessLog;
use crate::admin::{Page, Replica};
use crate::backend_stream::BackendStream;
use crate::config::{AgentConfig, Limits, Listen, UpstreamHttp2};
use crate::conn::{self, Busy, ServerIo, Stream, Undetected, Watch};
use crate::drive::{MIN_BUFFER, drive, http1_builder, http2_builder};
use crate::leash::{Leash, Rules, Tasks};
use crate::load::Load;
use crate::oob::Oob;
use crate::phase::{Life, Phase};
use crate::plb::Plb;
use crate::probe;
use crate::proxy::{self, AgentBody, Connection, Shared};
use crate::ready::Checker;
use crate::reporter::Reporter;
use crate::socket::{Listener, Socket};
use crate::tls::{Acceptor, Connector, TlsError};
use crate::traffic::{Event, Port, Traffic};
use crate::upstream::Pool;

/// Reason why an agent could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The address is taken, not local, or not permitted.
    #[error("cannot listen on {addr} ({port})")]
    Listen {
        /// Name of the port: `service`, `probe` or `admin`.
        port: &'static str,
        /// Address that was asked for.
        addr: Listen,
        /// Reason given by the system.
        source: io::Error,
    },
    /// Reports must name an endpoint, but a Unix socket has none.
    #[error("--listen on a Unix socket needs --advertise: reports name an ip:port")]
    NoEndpoint,
    /// The system has no thread left.
    #[error("cannot start the access log")]
    AccessLog(#[from] io::Error),
    /// A certificate or key is not usable.
    #[error("TLS")]
    Tls(#[from] TlsError),
    /// PLB was asked for in a build without it.
    #[error("--plb: this program was built without the Cargo feature `plb`")]
    NoPlb,
}

/// Agent that listens but does not accept connections yet.
pub struct Agent {
    service: Listener,
    probe: Option<Listener>,
    admin: Option<Listener>,
    tls: Option<Acceptor>,
    backend_stream: Option<BackendStream>,
    shared: Arc<Shared>,
    page: Page,
    limits: Arc<Limits>,
    advertise: Option<Endpoint>,
    addrs: Addrs,
}

/// Addresses that an agent listens on.
#[derive(Clone, Debug)]
pub struct Addrs {
    /// The service port.
    pub service: Listen,
    /// The probe port, if any.
    pub probe: Option<SocketAddr>,
    /// The admin port, if any.
    pub admin: Option<SocketAddr>,
}

impl Agent {
    /// Binds every port and reads every certificate. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// Returns an error for the first port that cannot be bound, or the first file that cannot be used.
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
        let plb = config.plb.then(|| Plb::new(config.log.clone()));
        let listen = |port, addr: Listen, plb| {
            let bound = Listener::bind(port, &addr, plb);
            let named = bound.and_then(|listener| Ok((listener.local()?, listener)));
            named.map_err(|source| AgentError::Listen { port, addr, source })
        };
        if matches!(config.listen, Listen::Unix(_)) && config.advertise.is_none() {
            return Err(AgentError::NoEndpoint);
        }
        let (at, service) = listen("service", config.listen, plb.as_ref())?;
        let probe = config.probe_listen.map(|addr| listen("probe", addr.into(), plb.as_ref())).transpose()?;
        let admin = config.admin.map(|addr| listen("admin", addr.into(), None)).transpose()?;
        let (probe_at, probe) = probe.unzip();
        let (admin_at, admin) = admin.unzip();
        let addrs = Addrs {
            service: at,
            probe: probe_at.and_then(|at| at.tcp()),
            admin: admin_at.and_then(|at| at.tcp()),
        };
        let load = Load::new(config.tracker);
        if config.orca.is_on() {
            load.count_rates(config.orca.window);
        }
        // The first connection to the backend shows whether it is up.
        load.mark_unseen();
        let traffic = Arc::<Traffic>::default();
        let name: Option<Arc<str>> = config.named.then(|| addrs.service.to_string().into());
        let access_log = config
            .access_log
            .map(|format| AccessLog::start(format, name.clone(), traffic.clone()))
            .transpose()?;
        let checker = Arc::new(Checker {
            check: config.ready_check,
            target: config.upstream.clone(),
            tls: upstream_tls.clone(),
            http2: config.upstream_http2 == UpstreamHttp2::Always,
            timeout: config.limits.ready_timeout,
            load: load.clone(),
        });
        let pool = Arc::new(Pool::new(config.upstream, upstream_tls, plb, &config.limits, load.clone()));
        let log = config.log.of(name);
        let backend_stream =
            config.orca_from_backend.clone().zip(config.orca_backend_stream).map(|(from, interval)| {
                BackendStream {
                    pool: pool.clone(),
                    load: load.clone(),
                    log: log.clone(),
                    from,
                    interval,
                    silence: config.limits.backend_stream_silence,
                }
            });
        let shared = Arc::new(Shared {
            reporter: Reporter {
                load,
                report: config.report,
                hints: config.hints,
                utilization: config.utilization,
                orca: config.orca,
            },
            oob: Oob::new(&config.orca, config.limits.header_timeout),
            from_backend: config.orca_from_backend,
            pool,
            forward_hint: config.forward_hint,
            upstream_http2: config.upstream_http2,
            response_timeout: config.limits.response_timeout,
            max_rif: config.limits.max_rif,
            rules: Rules::of(&config.limits),
            access_log: access_log.map(Arc::new),
            traffic: traffic.clone(),
            log,
            leaving: AtomicBool::new(false),
        });
        let limits = Arc::new(config.limits);
        let replicas = vec![Replica { name: addrs.service.to_string(), checker, traffic }];
        let page = Page { replicas, draining: AtomicBool::new(false) };
        Ok(Self {
            service,
            probe,
            admin,
            tls,
            backend_stream,
            shared,
            page,
            limits,
            advertise: config.advertise,
            addrs,
        })
    }

    /// Also shows another agent's replica on this agent's admin port. Metrics then have the label `replica`, which is
    /// the replica's listen address, and `/readyz` checks all replicas.
    pub fn show(&mut self, other: &Self) {
        self.page.replicas.extend(other.page.replicas.iter().cloned());
    }

    /// Returns the addresses that the agent listens on.
    pub fn addrs(&self) -> Addrs {
        self.addrs.clone()
    }

    /// Returns the load, which counts the agent's requests.
    pub fn load(&self) -> Load {
        self.shared.reporter.load.clone()
    }

    fn door(&self, port: Port, room: Option<Arc<Semaphore>>) -> Door {
        let Shared { traffic, log, .. } = &*self.shared;
        Door { port, traffic: traffic.clone(), log: log.clone(), room }
    }

    /// Serves until `shutdown`, then drains. Health checks fail at once. After `drain_delay` the agent accepts nothing
    /// new, and each connection ends with its next response. After `drain_idle` it closes connections without a
    /// request. After `drain_timeout` it cuts everything that is left.
    ///
    /// Returns the number of requests, streams and tunnels that were cut: 0 if all ended by themselves.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> u32 {
        let (phase, life) = Life::begin();
        let room = self.limits.max_connections.map(|max| Arc::new(Semaphore::new(max.get() as usize)));
        let door = self.door(Port::Service, room);
        let [probe_door, admin_door] = [Port::Probe, Port::Admin].map(|port| self.door(port, None));
        let page = Arc::new(self.page);
        let mut tasks = Vec::new();
        tasks.extend(self.backend_stream.map(|stream| tokio::spawn(stream.keep_open())));
        if let Some(own) = page.replicas.first() {
            let (checker, load) = (&own.checker, &own.checker.load);
            let interval = self.limits.tls_reload_interval;
            tasks.push(tokio::spawn(checker.clone().watch()));
            let log = &self.shared.log;
            tasks.extend(
                self.tls.iter().map(|tls| tokio::spawn(tls.watch(interval, load.clone(), log.clone()))),
            );
            tasks.extend(
                checker.tls.iter().map(|tls| tokio::spawn(tls.watch(interval, load.clone(), log.clone()))),
            );
        }
        if let Some(listener) = self.admin {
            let page = page.clone();
            tasks.push(tokio::spawn(accept(
                listener,
                admin_door,
                future::pending(),
                move |socket, admitted| {
                    tokio::spawn(serve_admin(socket, admitted, page.clone()));
                },
            )));
        }
        let ports = Arc::new(Ports {
            shared: self.shared.clone(),
            limits: self.limits.clone(),
            tls: self.tls,
            advertise: self.advertise,
            service_port: self.addrs.service.tcp().map(|addr| addr.port()),
            probe_port: self.addrs.probe.map(|addr| addr.port()),
        });
        let mut accepting = Vec::new();
        if let Some(listener) = self.probe {
            let (ports, each) = (ports.clone(), life.clone());
            accepting.push(tokio::spawn(accept(
                listener,
                probe_door,
                life.clone().until(Phase::Draining),
                move |socket, admitted| {
                    tokio::spawn(ports.clone().serve_probes(socket, admitted, each.clone()));
                },
            )));
        }
        let each = life.clone();
        accepting.push(tokio::spawn(accept(
            self.service,
            door,
            life.until(Phase::Draining),
            move |socket, admitted| {
                tokio::spawn(ports.clone().serve(socket, admitted, each.clone()));
            },
        )));

        shutdown.await;
        page.draining.store(true, Ordering::Relaxed);
        tokio::time::sleep(self.limits.drain_delay).await;
        self.shared.leaving.store(true, Ordering::Relaxed);
        let began = Instant::now();
        let _ = phase.send(Phase::Draining);
        for task in accepting {
            // The listener ends with its task.
            let _ = task.await;
        }
        let mut cut = 0;
        let Limits { drain_idle, drain_timeout, .. } = *self.limits;
        for (limit, next) in [(drain_idle.min(drain_timeout), Phase::Closing), (drain_timeout, Phase::Cut)] {
            let until = (began + limit).max(Instant::now() + CLOSES);
            if tokio::time::timeout_at(until, phase.closed()).await.is_ok() {
                break;
            }
            if next == Phase::Cut {
                cut = self.shared.reporter.load.rif();
            }
            let _ = phase.send(next);
        }
        let _ = tokio::time::timeout(CLOSES, phase.closed()).await;
        if let Some(log) = &self.shared.access_log {
            log.flush().await;
        }
        self.shared.log.flush().await;
        abort(tasks).await;
        cut
    }
}

async fn abort(tasks: Vec<JoinHandle<()>>) {
    for task in tasks {
        task.abort();
        // Wait until the task and its listener are gone.
        let _ = task.await;
    }
}

/// State that the accept loops hand to each connection.
struct Ports {
    shared: Arc<Shared>,
    limits: Arc<Limits>,
    tls: Option<Acceptor>,
    advertise: Option<Endpoint>,
    /// `None` for a Unix socket.
    service_port: Option<u16>,
    probe_port: Option<u16>,
}

/// One connection on the probe port.
struct ProbeConnection {
    shared: Arc<Shared>,
    watch: Arc<Watch>,
    endpoint: Endpoint,
    probe_endpoint: Option<Endpoint>,
    life: Life,
}

impl ProbeConnection {
    async fn answer(
        self: Arc<Self>,
        req: Request<Incoming>,
        busy: Busy,
    ) -> Result<Response<AgentBody>, Infallible> {
        let Shared { reporter, oob, .. } = &*self.shared;
        if let Some(oob) = oob.as_ref().filter(|oob| oob.is_for(&req)) {
            let response = Box::pin(oob.serve(req, &reporter.load, self.endpoint, self.life.clone())).await;
            return Ok(response.map(|body| AgentBody::Reports { body, busy }));
        }
        let response = match probe::route(req.method(), req.uri().path()) {
            Route::Probe => {
                reporter.load.counters().count_probe(true);
                reporter.answer(self.endpoint, self.probe_endpoint, req.headers())
            }
            Route::MethodNotAllowed => probe::method_not_allowed(),
            Route::Forward | Route::NotFound => probe::plain(StatusCode::NOT_FOUND, "not found\n"),
        };
        let mut response = proxy::own(response, busy);
        self.shared.part(!self.watch.is_http2(), response.headers_mut());
        Ok(response)
    }
}

impl Ports {
    /// Serves one connection. An error ends the connection; the client has already seen it.
    async fn serve(self: Arc<Self>, socket: Socket, admitted: Admitted, mut life: Life) {
        let Some(endpoint) = self.endpoint(&socket) else { return };
        let client = self.shared.access_log.as_ref().and_then(|_| socket.tcp()?.peer_addr().ok());
        let limits = &self.limits;
        let Some((io, watch)) = self.open(socket, &mut life).await else { return };
        let http2 = watch.is_http2();
        let conn = Arc::new(Connection {
            shared: self.shared.clone(),
            watch: watch.clone(),
            endpoint,
            probe_endpoint: self.probe_port.map(|port| endpoint.with_port(port)),
            client,
            _admitted: admitted,
            life: life.clone(),
        });
        let (shared, requests) = (&self.shared, watch.clone());
        let service = service_fn(move |req| {
            let leash = conn.shared.rules.map(|_| Leash::begin());
            if let Some(leash) = &leash {
                if http2 { Tasks::announce(leash.clone()) } else { requests.follow(leash.clone()) }
            }
            proxy::serve(conn.clone(), req, leash)
        });
        if http2 {
            let tasks = Tasks(shared.rules.map(|rules| (rules, shared.traffic.clone())));
            let served = http2_builder(limits, tasks).enable_connect_protocol().serve_connection(io, service);
            self.drive(pin!(served), http2::Connection::graceful_shutdown, &watch, life).await;
        } else {
            let served = http1_builder(limits).serve_connection(io, service).with_upgrades();
            let graceful = http1::UpgradeableConnection::graceful_shutdown;
            self.drive(pin!(served), graceful, &watch, life).await;
        }
    }

    async fn serve_probes(self: Arc<Self>, socket: Socket, _admitted: Admitted, mut life: Life) {
        let Some(endpoint) = self.endpoint(&socket) else { return };
        let probe_endpoint = self.probe_port.map(|port| endpoint.with_port(port));
        let limits = &self.limits;
        let Some((io, watch)) = self.open(socket, &mut life).await else { return };
        let http2 = watch.is_http2();
        let conn = Arc::new(ProbeConnection {
            shared: self.shared.clone(),
            watch: watch.clone(),
            endpoint,
            probe_endpoint,
            life: life.clone(),
        });
        let service = service_fn(move |req: Request<Incoming>| {
            let (busy, _) = conn.watch.begin(false, !req.body().is_end_stream());
            conn.clone().answer(req, busy)
        });
        if http2 {
            let served = http2_builder(limits, Tasks(None)).serve_connection(io, service);
            self.drive(pin!(served), http2::Connection::graceful_shutdown, &watch, life).await;
        } else {
            let served = http1_builder(limits).serve_connection(io, service);
            self.drive(pin!(served), http1::Connection::graceful_shutdown, &watch, life).await;
        }
    }

    /// Runs a connection to its end. See [`drive`].
    async fn drive<C>(&self, served: Pin<&mut C>, graceful: impl Fn(Pin<&mut C>), watch: &Watch, life: Life)
    where
        C: Future<Output = Result<(), hyper::Error>>,
    {
        let Shared { traffic, log, .. } = &*self.shared;
        drive(served, graceful, watch, life, &self.limits, traffic, log).await;
    }

    /// Sets up the connection below HTTP: performs the TLS handshake if the agent listens with TLS, and detects HTTP/1
    /// or HTTP/2. Returns `None` if this fails, or if the agent drains first.
    async fn open(&self, socket: Socket, life: &mut Life) -> Option<(TokioIo<ServerIo>, Arc<Watch>)> {
        let limits = &self.limits;
        let open = async {
            let mut stream = match &self.tls {
                None => Stream::Plain(socket),
                Some(tls) => {
                    let accept = async {
                        // A health check that only connects is not a failed handshake.
                        if socket.is_abandoned().await { None } else { Some(tls.accept(socket).await) }
                    };
                    let tls = tokio::time::timeout(limits.header_timeout, accept).await;
                    let tls = tls.unwrap_or_else(|_| Some(Err(io::ErrorKind::TimedOut.into())))?;
                    Stream::Tls(Box::new(tls.inspect_err(|error| self.no_tls(error)).ok()?))
                }
            };
            let (http2, replay) = self.detect(&mut stream).await?;
            let watch = Arc::new(Watch::new(http2));
            let io = ServerIo::new(stream, replay, watch.clone(), limits.header_timeout);
            Some((TokioIo::new(io), watch))
        };
        tokio::select! {
            opened = open => opened,
            () = life.reaches(Phase::Closing) => None,
        }
    }

    fn no_tls(&self, error: &io::Error) {
        self.shared.traffic.count(Event::TlsHandshake);
        self.shared.log.failure("tls", || error.to_string());
    }

    /// Detects whether a connection speaks HTTP/2. Also returns the bytes read to detect it, or `None` if the
    /// connection is over.
    async fn detect(&self, stream: &mut Stream) -> Option<(bool, Vec<u8>)> {
        let Limits { silent_timeout, idle_timeout, header_timeout, .. } = *self.limits;
        let silent = silent_timeout.min(idle_timeout);
        let detected = conn::detect(stream, silent, header_timeout).await;
        match &detected {
            Err(Undetected::Silent) => self.shared.traffic.count(Event::Silent),
            Err(Undetected::Slow) => self.shared.traffic.count(Event::SlowHead),
            Err(Undetected::Gone) | Ok(_) => {}
        }
        detected.ok()
    }

    /// Returns the endpoint by which this connection's client knows this replica.
    fn endpoint(&self, socket: &Socket) -> Option<Endpoint> {
        if self.advertise.is_some() {
            return self.advertise;
        }
        let local = socket.tcp()?.local_addr().ok()?;
        // An IPv4 client of a dual-stack listener must get the IPv4 form of the address.
        Some(SocketAddr::new(local.ip().to_canonical(), self.service_port?).into())
    }
}

async fn serve_admin(socket: Socket, _admitted: Admitted, page: Arc<Page>) {
    let service = service_fn(async |req: Request<Incoming>| {
        let response = page.answer(req.method(), req.uri().path()).await;
        Ok::<_, Infallible>(response.map(Full::new))
    });
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(ADMIN_IDLE)
        .max_buf_size(MIN_BUFFER)
        .serve_connection(TokioIo::new(socket), service)
        .await;
}

/// Time for connections to end once they have been asked to.
const CLOSES: Duration = Duration::from_millis(100);
/// Idle time after which a connection on the admin port is closed.
const ADMIN_IDLE: Duration = Duration::from_secs(120);
