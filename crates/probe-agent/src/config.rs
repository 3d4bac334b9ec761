//! The agent's settings and their checks. This module does not read the command line or the environment: `cli.rs` does.
//! The enums here define the values that its flags accept.

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use prequal_core::server::tracker::TrackerConfig;
use prequal_core::shared::endpoint::Endpoint;

use crate::backend_orca::FromBackend;
use crate::hint::Hook;
use crate::log::{Log, LogFormat};
use crate::orca::Orca;
pub use crate::reporter::Report;
use crate::utilization::Utilization;

/// All settings of an agent. Fields are public so that an embedder or a test can start from [`AgentConfig::new`] and
/// change only some of them.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Service port. With port 0, the system chooses. A Unix socket needs `advertise`.
    pub listen: Listen,
    /// The single backend.
    pub upstream: Upstream,
    /// Endpoint named in reports. `None`: the local address of the connection, with the service port.
    pub advertise: Option<Endpoint>,
    /// Separate port for probes.
    pub probe_listen: Option<SocketAddr>,
    /// Port of `/metrics`, `/healthz` and `/readyz`.
    pub admin: Option<SocketAddr>,
    /// How `/readyz` checks the backend.
    pub ready_check: ReadyCheck,
    /// Where load is reported.
    pub report: Report,
    /// How probes with a query hint are answered. `None`: like all other probes.
    pub hints: Option<Hook>,
    /// Whether requests keep `x-prequal-hint` on their way to the backend. Default off.
    pub forward_hint: bool,
    /// Utilisation header on responses, regardless of `report`. `None`: no header.
    pub utilization: Option<Utilization>,
    /// Load reports in ORCA format, regardless of `report`. Default: no reports.
    pub orca: Orca,
    /// Set if the agent asks the backend for its load in ORCA format, and reports the backend's utilisation instead of
    /// its own. Default: off.
    pub orca_from_backend: Option<FromBackend>,
    /// Interval of the reports that a gRPC backend is asked to send as a stream, at least 100 ms. Needs
    /// `orca_from_backend`. `None`: no stream.
    pub orca_backend_stream: Option<Duration>,
    /// HTTP version towards the backend.
    pub upstream_http2: UpstreamHttp2,
    /// Certificate chain and key for the service port and the probe port, PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Verification of client certificates on those ports. `None`: clients are not asked for one. Needs `tls`.
    pub tls_clients: Option<TlsClients>,
    /// TLS towards the backend.
    pub upstream_tls: Option<UpstreamTls>,
    /// Whether the network may move the service and upstream sockets to other paths (PLB, Protective Load Balancing),
    /// as far as the host allows. The log names what the host does not allow. Default off.
    pub plb: bool,
    /// Log of failures. Default [`Log::default`]: writes nothing.
    pub log: Log,
    /// Whether the lines of both logs name the replica by its listen address. Default off, for a process with one
    /// replica.
    pub named: bool,
    /// Format of the access log, which writes a line to standard output for each request on the service port. Default:
    /// no access log.
    pub access_log: Option<LogFormat>,
    /// Time and size limits.
    pub limits: Limits,
    /// Settings of the estimator.
    pub tracker: TrackerConfig,
}

impl AgentConfig {
    /// Returns the defaults for everything except the two addresses.
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
            orca_backend_stream: None,
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

/// How to check whether a backend can serve.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum ReadyCheck {
    /// The backend accepts a connection.
    #[default]
    Tcp,
    /// The backend answers a GET with 2xx or 3xx.
    Http {
        /// Path and query.
        path: String,
    },
    /// The backend answers `grpc.health.v1.Health/Check` with SERVING.
    Grpc {
        /// Name of the service. Empty: the server as a whole.
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

/// Error for text that does not name a check.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("must be `tcp`, `http:/path`, `grpc` or `grpc:service`")]
pub struct ReadyCheckError;

/// Maximum length of a service name, bytes, so that its length is a single byte on the wire.
const MAX_SERVICE: usize = 120;

/// HTTP version towards the backend.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
pub enum UpstreamHttp2 {
    /// Use the version of the request. Once the backend has answered an HTTP/2 connection in another protocol, use
    /// HTTP/1.1 for all requests, and try HTTP/2 again once a minute. gRPC always uses HTTP/2.
    #[default]
    Auto,
    /// Always use HTTP/1.1.
    Never,
    /// Always use HTTP/2 (cleartext with prior knowledge, or by ALPN). HTTP/1.1 upgrades are then ignored; WebSockets
    /// over HTTP/2 (RFC 8441) pass if the backend supports them.
    Always,
}

/// Verification of client certificates.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TlsClients {
    /// Authorities to trust, PEM.
    pub ca: PathBuf,
    /// Treatment of clients without a certificate.
    pub verify: ClientVerify,
}

/// Treatment of a client without a certificate. A client whose certificate cannot be verified is always refused.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
pub enum ClientVerify {
    /// Refuse the client.
    #[default]
    Required,
    /// Serve the client.
    Optional,
}

/// TLS towards the backend.
#[derive(Clone, Debug, Default)]
pub struct UpstreamTls {
    /// Authorities to trust, PEM. `None`: those of the system.
    pub ca: Option<PathBuf>,
    /// Name to verify and to send as SNI. `None`: the host of the backend's address.
    pub server_name: Option<String>,
}

/// Limits, timeouts and intervals.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Maximum number of connections on the service port. Others wait in the system's backlog. Default: no limit.
    pub max_connections: Option<NonZeroU32>,
    /// Time from the first byte of a request head to its end, after which the connection is closed. The request message
    /// of an ORCA stream has the same limit. Default 10 s.
    pub header_timeout: Duration,
    /// Time without anything in flight after which a connection is closed. Closing may take a quarter longer. Default
    /// 1 h, the idle timeout of Envoy's upstream connections, so that Envoy closes first.
    pub idle_timeout: Duration,
    /// Time after which a connection on which nothing was ever sent is closed. Default 60 s.
    pub silent_timeout: Duration,
    /// Time without any data on a request's bodies, or on the tunnel that the request became, after which the request
    /// is cut. The wait for a response head does not count. Default: no limit.
    pub body_idle_timeout: Option<Duration>,
    /// Age at which gRPC calls, event streams and tunnels are cut. Default: no limit.
    pub max_stream_age: Option<Duration>,
    /// Maximum number of requests in flight. Others get a 503, which clients retry elsewhere. Default: no limit.
    pub max_rif: Option<NonZeroU32>,
    /// Maximum length of a request head, bytes. A longer one gets a 431. Default 64 KiB.
    pub max_header_bytes: usize,
    /// Maximum number of request headers. A request with more gets a 431. Default 100. HTTP/2 requests are limited by
    /// bytes only.
    pub max_headers: usize,
    /// Maximum number of concurrent streams on one HTTP/2 connection. Default 1024.
    pub max_streams: u32,
    /// Time for the backend to accept a connection (and finish TLS), after which the answer is 504. Default 1 s.
    pub connect_timeout: Duration,
    /// Time within which a check of the backend must succeed. Default 1 s.
    pub ready_timeout: Duration,
    /// Time for the backend to send its response head, after which the answer is 504. Default: no limit.
    pub response_timeout: Option<Duration>,
    /// Idle time after which a connection to the backend is not used again. Default 4 s. Common servers close idle
    /// connections after 5 s, and a request sent at that moment could be lost.
    pub upstream_idle_timeout: Duration,
    /// Maximum number of idle connections to the backend that are kept. Default 1024.
    pub max_upstream_idle: usize,
    /// Maximum number of HTTP/2 connections to the backend. Another is opened when the existing ones have 128 requests
    /// each, or as many as the backend allows. Default 16.
    pub max_upstream_connections: usize,
    /// Maximum number of requests that wait for an HTTP/2 stream to the backend, each for up to `connect_timeout`.
    /// Further requests, and those that wait longer, get a 503. Default 1024.
    pub max_upstream_waiting: usize,
    /// Silence after which an HTTP/2 client gets a PING, even with nothing in flight. If no answer comes within the
    /// same time (at most 20 s), the connection ends. Default 60 s.
    pub ping_interval: Option<Duration>,
    /// Silence after which the backend gets a PING, while requests are in flight. Default 330 s: gRPC servers treat
    /// more than one PING in 5 min as abuse.
    pub upstream_ping_interval: Option<Duration>,
    /// Time after SIGTERM during which `/healthz` and `/readyz` fail but new connections are still accepted. Default 0.
    pub drain_delay: Duration,
    /// Time for which an idle HTTP/1.1 connection stays open for one more request. Starts at the end of `drain_delay`.
    /// Default 5 s: longer than clients take to learn that a replica is leaving.
    pub drain_idle: Duration,
    /// Time for requests in flight to finish, after which the rest are cut. Starts, like `drain_idle`, at the end of
    /// `drain_delay`. Default 30 s.
    pub drain_timeout: Duration,
    /// Time without a report after which the agent reopens its stream of the backend's load reports. Once the interval
    /// between the reports is known, the agent may reopen the stream earlier. Default 90 s: three times the interval of
    /// gRPC's servers.
    pub backend_stream_silence: Duration,
    /// Interval between two checks of the certificate and key files for changes. New content is used once the files
    /// have not changed for one interval. Default 1 s.
    pub tls_reload_interval: Duration,
}

/// Returns how long a PING may stay unanswered.
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
            backend_stream_silence: Duration::from_secs(90),
            tls_reload_interval: Duration::from_secs(1),
        }
    }
}

/// Where an agent listens: `ip:port`, or a Unix socket as `unix:/path`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Listen {
    /// A TCP port.
    Tcp(SocketAddr),
    /// A Unix socket. Its file is removed when the agent drains; a file left behind by an earlier process is replaced.
    Unix(PathBuf),
}

impl Listen {
    /// Returns the address, unless it is a Unix socket.
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

/// Error for text that is not an address to listen on.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "must be `ip:port` with a port of 0 to 65535 (IPv6 as `[ip]:port`), or `unix:/path` of 1 to 107 bytes"
)]
pub struct ListenError;

/// Returns the path of `unix:/path`: `None` if the text has another form, and `Some(None)` if the path is not usable.
fn unix_path(text: &str) -> Option<Option<PathBuf>> {
    let path = text.strip_prefix("unix:")?;
    Some((path.starts_with('/') && path.len() <= MAX_PATH && !path.contains('\0')).then(|| path.into()))
}

/// Maximum length of a Unix socket's path, bytes.
const MAX_PATH: usize = 107;

/// Address of the backend: `ip:port`, `name:port` or `unix:/path`. A name is resolved at every connect.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Upstream {
    host: String,
    port: u16,
    addr: Option<SocketAddr>,
    path: Option<PathBuf>,
}

impl Upstream {
    /// Returns the host without brackets, or `localhost` for a Unix socket.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the port, 1 to 65535, or 0 for a Unix socket.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the host and port as in a URI.
    pub(crate) fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if self.path.is_some() {
            return host.clone();
        }
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }

    /// Returns the path of a Unix socket.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns the address, unless a name must be resolved first.
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

/// Error for text that is not a backend address.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "must be `ip:port` or `name:port` with a port of 1 to 65535 (IPv6 as `[ip]:port`), or `unix:/path` of 1 to 107 bytes"
)]
pub struct UpstreamError;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_checks_are_parsed() {
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
    fn listen_addresses_are_parsed() {
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
    fn backend_addresses_are_parsed() {
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
