//! The agent's settings, checked. Nothing here reads the command line or the environment; `main.rs` does, and takes the
//! names of choices from here.

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use prequal_core::endpoint::Endpoint;
use prequal_core::tracker::TrackerConfig;

use crate::backend_orca::FromBackend;
use crate::hint::Hook;
use crate::log::{Log, LogFormat};
use crate::orca::Orca;
pub use crate::reporter::Report;
use crate::utilization::Utilization;

/// Everything that an agent needs to run. Fields are public so that an embedder or a test can start from
/// [`AgentConfig::new`] and change what it cares about.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// The service port. Port 0 lets the system choose. A Unix socket needs `advertise`.
    pub listen: Listen,
    /// The one backend.
    pub upstream: Upstream,
    /// The endpoint that reports name. `None`: the local address of the connection, with the service port.
    pub advertise: Option<Endpoint>,
    /// A port that answers probes only.
    pub probe_listen: Option<SocketAddr>,
    /// `/metrics`, `/healthz` and `/readyz`.
    pub admin: Option<SocketAddr>,
    /// How `/readyz` asks the backend whether it can serve.
    pub ready_check: ReadyCheck,
    /// Where load is reported.
    pub report: Report,
    /// How probes with a query hint are answered. `None`: as all others.
    pub hints: Option<Hook>,
    /// Leave `x-prequal-hint` on requests. Default off: the backend does not see it.
    pub forward_hint: bool,
    /// Tell utilisation on responses, whatever `report` says. `None`: do not.
    pub utilization: Option<Utilization>,
    /// Tell load in the format of ORCA, whatever `report` says. Default: do not.
    pub orca: Orca,
    /// Ask the backend for its load in the format of ORCA, and report its utilisation in place of the agent's own. Default: do
    /// not.
    pub orca_from_backend: Option<FromBackend>,
    /// HTTP version towards the backend.
    pub upstream_http2: UpstreamHttp2,
    /// Certificate chain and key to listen with, PEM: on the service port and on the probe port.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Which certificates of clients are accepted there. `None`: none is asked for. Needs `tls`.
    pub tls_clients: Option<TlsClients>,
    /// TLS towards the backend.
    pub upstream_tls: Option<UpstreamTls>,
    /// Make the service and upstream sockets repathable (PLB), as far as the host allows; what it does not allow is
    /// logged. Default off.
    pub plb: bool,
    /// What the agent says of failures. Default [`Log::default`]: nothing.
    pub log: Log,
    /// The lines of both logs name the replica by the address that it listens on. Default off: a process has one.
    pub named: bool,
    /// Write a line to standard output for each request on the service port. Default none.
    pub access_log: Option<LogFormat>,
    /// Time and size limits.
    pub limits: Limits,
    /// The estimator.
    pub tracker: TrackerConfig,
}

impl AgentConfig {
    /// Defaults for everything but the two addresses.
    pub fn new(listen: impl Into<Listen>, upstream: Upstream) -> Self {
        Self {
            listen: listen.into(),
            upstream,
            advertise: None,
            probe_listen: None,
            admin: None,
            ready_check: ReadyCheck::Tcp,
            report: Report::Always,
            hints: None,
            forward_hint: false,
            utilization: None,
            orca: Orca::default(),
            orca_from_backend: None,
            upstream_http2: UpstreamHttp2::Auto,
            tls: None,
            tls_clients: None,
            upstream_tls: None,
            plb: false,
            log: Log::default(),
            named: false,
            access_log: None,
            limits: Limits::default(),
            tracker: TrackerConfig::default(),
        }
    }
}

/// How a backend shows that it can serve.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum ReadyCheck {
    /// It accepts a connection.
    #[default]
    Tcp,
    /// It answers a GET with 2xx or 3xx.
    Http {
        /// Path and query.
        path: String,
    },
    /// It answers `grpc.health.v1.Health/Check` with SERVING.
    Grpc {
        /// Empty: the server as a whole.
        service: String,
    },
}

impl FromStr for ReadyCheck {
    type Err = ReadyCheckError;

    fn from_str(text: &str) -> Result<Self, ReadyCheckError> {
        let visible = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        match text.split_once(':') {
            None if text == "tcp" => Ok(Self::Tcp),
            None if text == "grpc" => Ok(Self::Grpc { service: String::new() }),
            Some(("http", path)) if path.starts_with('/') && visible(path) => {
                Ok(Self::Http { path: path.to_owned() })
            }
            Some(("grpc", service)) if (1..=MAX_SERVICE).contains(&service.len()) && visible(service) => {
                Ok(Self::Grpc { service: service.to_owned() })
            }
            _ => Err(ReadyCheckError),
        }
    }
}

/// The text names no check.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("must be `tcp`, `http:/path`, `grpc` or `grpc:service`")]
pub struct ReadyCheckError;

/// Longest name of a service: its length is a single byte on the wire.
const MAX_SERVICE: usize = 120;

/// HTTP version towards the backend.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
pub enum UpstreamHttp2 {
    /// As the request came, but HTTP/1.1 to a backend that answers in something else than HTTP/2 (asked once a minute).
    /// gRPC always goes over HTTP/2.
    #[default]
    Auto,
    /// HTTP/1.1 always.
    Never,
    /// HTTP/2 always (cleartext with prior knowledge, or by ALPN). Upgrades of HTTP/1.1 are refused then; WebSockets over
    /// HTTP/2 (RFC 8441) pass if the backend takes them.
    Always,
}

/// Verification of clients by their certificates.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TlsClients {
    /// Authorities to trust, PEM.
    pub ca: PathBuf,
    /// What becomes of a client that shows none.
    pub verify: ClientVerify,
}

/// What becomes of a client without a certificate. One with a certificate that cannot be verified is always refused.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
pub enum ClientVerify {
    /// It is refused.
    #[default]
    Required,
    /// It is served.
    Optional,
}

/// TLS towards the backend.
#[derive(Clone, Debug, Default)]
pub struct UpstreamTls {
    /// Authorities to trust, PEM; `None`: the system's.
    pub ca: Option<PathBuf>,
    /// Name to verify and send as SNI; `None`: the host of the backend's address.
    pub server_name: Option<String>,
}

/// Limits. See each field for what happens past it.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections on the service port at most; others wait in the system's backlog. Default none.
    pub max_connections: Option<NonZeroU32>,
    /// A request head must be complete this long after its first byte, else the connection is closed; and so long the message
    /// that opens a stream of load reports may take. Default 10 s.
    pub header_timeout: Duration,
    /// A connection with nothing in flight is closed after about this long. Default 1 h, as Envoy's upstream side, so
    /// that the client closes first.
    pub idle_timeout: Duration,
    /// A connection on which nothing was ever sent is closed after this long. Default 60 s.
    pub silent_timeout: Duration,
    /// A request is cut when nothing has moved for this long on a body of it, up or down, or on the tunnel that it has become;
    /// the wait for a response's head does not count. Default none.
    pub body_idle_timeout: Option<Duration>,
    /// gRPC calls, event streams and tunnels are cut at this age. Default none.
    pub max_stream_age: Option<Duration>,
    /// Requests in flight at most; more are a 503 that clients retry elsewhere. Default none.
    pub max_rif: Option<NonZeroU32>,
    /// Longest request head, bytes; longer is answered with 431. Default 64 KiB.
    pub max_header_bytes: usize,
    /// Most request headers; more are answered with 431. Default 100. HTTP/2 is bounded by bytes alone.
    pub max_headers: usize,
    /// Streams at once on one HTTP/2 connection. Default 1024.
    pub max_streams: u32,
    /// The backend must accept a connection (and finish TLS) within this, else 504. Default 1 s.
    pub connect_timeout: Duration,
    /// A check of the backend must succeed within this. Default 1 s.
    pub ready_timeout: Duration,
    /// The backend must send its response head within this, else 504. Default none.
    pub response_timeout: Option<Duration>,
    /// An idle connection to the backend is not used after this long. Default 4 s: below the 5 s after which common
    /// servers close it, which would cost a request.
    pub upstream_idle_timeout: Duration,
    /// Idle connections to the backend kept at most. Default 1024.
    pub max_upstream_idle: usize,
    /// HTTP/2 connections to the backend at most. One more is opened when those there have as many streams as the backend
    /// allows. Default 16.
    pub max_upstream_connections: usize,
    /// Requests that wait for a stream of these at most, each for up to `connect_timeout`; more, or longer, is a 503.
    /// Default 1024.
    pub max_upstream_waiting: usize,
    /// A PING goes to clients over HTTP/2 that have been silent for this long, also while nothing is in flight; without an
    /// answer in the same time, 20 s at most, the connection ends. Default 60 s.
    pub ping_interval: Option<Duration>,
    /// The same towards the backend, while requests are in flight. Default 330 s: gRPC servers take more than one in 5 min
    /// for abuse.
    pub upstream_ping_interval: Option<Duration>,
    /// On SIGTERM, `/healthz` and `/readyz` fail but new connections are still taken for this long. Default 0.
    pub drain_delay: Duration,
    /// After that, connections of HTTP/1.1 without a request may bring one more for this long, and are then closed. Default
    /// 5 s: longer than clients take to learn that a replica leaves.
    pub drain_idle: Duration,
    /// Requests in flight may take this long to finish; what is left then is cut. Counts like `drain_idle` from the end of
    /// `drain_delay`. Default 30 s.
    pub drain_timeout: Duration,
    /// Files of certificates and keys are looked at this often, and used once they have not changed for as long. Default 1 s.
    pub tls_reload_interval: Duration,
}

/// How long a PING may be without an answer.
pub(crate) fn ping_timeout(interval: Duration) -> Duration {
    interval.min(Duration::from_secs(20))
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_connections: None,
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(3600),
            silent_timeout: Duration::from_secs(60),
            body_idle_timeout: None,
            max_stream_age: None,
            max_rif: None,
            max_header_bytes: 64 * 1024,
            max_headers: 100,
            max_streams: 1024,
            connect_timeout: Duration::from_secs(1),
            ready_timeout: Duration::from_secs(1),
            response_timeout: None,
            upstream_idle_timeout: Duration::from_secs(4),
            max_upstream_idle: 1024,
            max_upstream_connections: 16,
            max_upstream_waiting: 1024,
            ping_interval: Some(Duration::from_secs(60)),
            upstream_ping_interval: Some(Duration::from_secs(330)),
            drain_delay: Duration::ZERO,
            drain_idle: Duration::from_secs(5),
            drain_timeout: Duration::from_secs(30),
            tls_reload_interval: Duration::from_secs(1),
        }
    }
}

/// Where an agent listens: `ip:port`, or a Unix socket as `unix:/path`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Listen {
    /// A TCP port.
    Tcp(SocketAddr),
    /// A Unix socket. Its file is removed when the agent drains; one that an earlier process left behind is replaced.
    Unix(PathBuf),
}

impl Listen {
    /// The address, unless it is a Unix socket.
    pub fn tcp(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(addr) => Some(*addr),
            Self::Unix(_) => None,
        }
    }
}

impl From<SocketAddr> for Listen {
    fn from(addr: SocketAddr) -> Self {
        Self::Tcp(addr)
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(addr) => addr.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for Listen {
    type Err = ListenError;

    fn from_str(text: &str) -> Result<Self, ListenError> {
        if let Some(path) = unix_path(text) {
            return path.map(Self::Unix).ok_or(ListenError);
        }
        text.parse().map(Self::Tcp).map_err(|_| ListenError)
    }
}

/// The text is no address to listen on.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "must be `ip:port` with a port of 0 to 65535 (IPv6 as `[ip]:port`), or `unix:/path` of 1 to 107 bytes"
)]
pub struct ListenError;

/// The path of `unix:/path`, if it is one and usable.
fn unix_path(text: &str) -> Option<Option<PathBuf>> {
    let path = text.strip_prefix("unix:")?;
    Some((path.starts_with('/') && path.len() <= MAX_PATH && !path.contains('\0')).then(|| path.into()))
}

/// Longest path of a Unix socket, bytes.
const MAX_PATH: usize = 107;

/// The backend's address, `ip:port`, `name:port` or `unix:/path`. A name is resolved at every connect.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Upstream {
    host: String,
    port: u16,
    addr: Option<SocketAddr>,
    path: Option<PathBuf>,
}

impl Upstream {
    /// The host without brackets; `localhost` for a Unix socket.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port, 1 to 65535; 0 for a Unix socket.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Host and port as in a URI.
    pub(crate) fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if self.path.is_some() {
            return host.clone();
        }
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }

    /// The path of a Unix socket.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The address, unless a name has to be resolved first.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.addr
    }
}

impl From<SocketAddr> for Upstream {
    fn from(addr: SocketAddr) -> Self {
        Self { host: addr.ip().to_string(), port: addr.port(), addr: Some(addr), path: None }
    }
}

impl FromStr for Upstream {
    type Err = UpstreamError;

    fn from_str(text: &str) -> Result<Self, UpstreamError> {
        if let Some(path) = unix_path(text) {
            let path = Some(path.ok_or(UpstreamError)?);
            return Ok(Self { host: "localhost".to_owned(), port: 0, addr: None, path });
        }
        if let Ok(addr) = text.parse::<SocketAddr>() {
            return if addr.port() == 0 { Err(UpstreamError) } else { Ok(addr.into()) };
        }
        let (host, port) = text.rsplit_once(':').ok_or(UpstreamError)?;
        let port = port.parse::<u16>().ok().filter(|port| *port != 0).ok_or(UpstreamError)?;
        let plausible = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        if host.is_empty() || host.len() > 253 || !host.chars().all(plausible) {
            return Err(UpstreamError);
        }
        Ok(Self { host: host.to_owned(), port, addr: None, path: None })
    }
}

/// The text is no backend address.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "must be `ip:port` or `name:port` with a port of 1 to 65535 (IPv6 as `[ip]:port`), or `unix:/path` of 1 to 107 bytes"
)]
pub struct UpstreamError;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_checks() {
        let http = |path: &str| ReadyCheck::Http { path: path.to_owned() };
        let grpc = |service: &str| ReadyCheck::Grpc { service: service.to_owned() };
        for (text, expected) in [
            ("tcp", Some(ReadyCheck::Tcp)),
            ("http:/", Some(http("/"))),
            ("http:/healthz?deep=1", Some(http("/healthz?deep=1"))),
            ("grpc", Some(grpc(""))),
            ("grpc:shop.v1.Cart", Some(grpc("shop.v1.Cart"))),
            ("", None),
            ("http", None),
            ("http:healthz", None),
            ("http:/a b", None),
            ("http://host/", Some(http("//host/"))),
            ("grpc:", None),
            ("tcp:1", None),
        ] {
            assert_eq!(text.parse().ok(), expected, "{text}");
        }
        assert_eq!(format!("grpc:{}", "x".repeat(121)).parse::<ReadyCheck>(), Err(ReadyCheckError));
    }

    #[test]
    fn addresses_to_listen_on() {
        for text in ["127.0.0.1:0", "[::1]:8080", "unix:/run/agent.sock"] {
            assert_eq!(text.parse::<Listen>().unwrap().to_string(), text);
        }
        let long = format!("unix:/{}", "x".repeat(106));
        assert!(long.parse::<Listen>().is_ok());
        for text in ["", "8080", "a:80", "unix:", "unix:agent.sock", "unix:/a\0b", &format!("{long}x")] {
            assert_eq!(text.parse::<Listen>(), Err(ListenError), "{text}");
        }
    }

    #[test]
    fn backend_addresses() {
        for (text, expected) in [
            ("127.0.0.1:80", Some(("127.0.0.1", 80))),
            ("[::1]:8080", Some(("::1", 8080))),
            ("backend-1.svc:65535", Some(("backend-1.svc", 65535))),
            ("", None),
            (":80", None),
            ("a", None),
            ("a:0", None),
            ("127.0.0.1:0", None),
            ("a:70000", None),
            ("::1:80", None),
            ("a b:80", None),
            ("http://a:80", None),
            ("unix:/run/app.sock", Some(("localhost", 0))),
            ("unix:app.sock", None),
            ("unix:", None),
        ] {
            let got = text.parse::<Upstream>().ok();
            assert_eq!(got.as_ref().map(|u| (u.host(), u.port())), expected, "{text}");
        }
    }
}
