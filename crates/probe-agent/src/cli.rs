//! The command line and the environment. `docs/reference/configuration.md` lists these flags.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use prequal_core::shared::endpoint::Endpoint;

use crate::another::Another;
use crate::backend_orca::FromBackend;
use crate::config::{
    AgentConfig, ClientVerify, Limits, Listen, ReadyCheck, Report, TlsClients, Upstream, UpstreamHttp2,
    UpstreamTls,
};
use crate::hint::Hook;
use crate::log::{Log, LogFormat};
use crate::orca::{Orca, OrcaClass, OrcaFormat};
use crate::utilization::Utilization;

/// Runs in front of one backend, counts its requests in flight, measures their latency, and reports both to clients: in
/// `x-prequal-load` on every response, and at `GET /prequal/probe`.
///
/// Each option can also be set through the environment variable in brackets below it.
#[derive(Debug, Parser)]
#[command(name = "probe-agent", version, next_line_help = true)]
pub struct Cli {
    /// Listen on this service address: `ip:port` (with port 0, the system chooses), or `unix:/path`, which needs
    /// --advertise
    #[arg(long, value_name = "ADDR", env = "PROBE_AGENT_LISTEN")]
    listen: Listen,

    /// Forward requests to this backend: `ip:port`, `name:port` (resolved at every connect) or `unix:/path`
    #[arg(long, value_name = "ADDR", env = "PROBE_AGENT_UPSTREAM")]
    upstream: Upstream,

    /// Serve one more replica in this process: `listen=ADDR,upstream=ADDR`, optionally with `,advertise=IP:PORT` and
    /// `,probe-listen=IP:PORT`. It counts, reports and answers probes separately. All other settings are those of the
    /// first replica. Repeat the flag for more replicas; in the environment, separate them with `;`
    #[arg(long, value_name = "REPLICA", env = "PROBE_AGENT_REPLICA", value_delimiter = ';')]
    replica: Vec<Another>,

    /// Report this endpoint, exactly as clients' clusters name this replica; default: the local address of the
    /// connection, with the service port
    #[arg(long, value_name = "IP:PORT", env = "PROBE_AGENT_ADVERTISE")]
    advertise: Option<Endpoint>,

    /// Also answer probes on this separate port; reports then name it
    #[arg(long, value_name = "IP:PORT", env = "PROBE_AGENT_PROBE_LISTEN", value_parser = socket_addr)]
    probe_listen: Option<SocketAddr>,

    /// Serve /metrics, /healthz and /readyz on this address; a bare port listens on loopback only
    #[arg(long, value_name = "[IP:]PORT", env = "PROBE_AGENT_ADMIN", value_parser = admin_addr)]
    admin: Option<SocketAddr>,

    /// Choose how /readyz checks the backend: `tcp` (it accepts a connection), `http:/path` (it answers 2xx or 3xx),
    /// `grpc` or `grpc:service` (grpc.health.v1 says SERVING)
    #[arg(long, value_name = "CHECK", default_value = "tcp", env = "PROBE_AGENT_READY_CHECK")]
    ready_check: ReadyCheck,

    /// Choose where load is reported
    #[arg(long, value_enum, default_value = "always", env = "PROBE_AGENT_REPORT")]
    report: Report,

    /// Remember this many query hints (`x-prequal-hint`, about 50 bytes each), 0 (off) to 1000000. The reply to a probe
    /// for a query that was served here recently reports a tenth of the load (see --hint-divisor)
    #[arg(long, value_name = "N", default_value_t = 0, env = "PROBE_AGENT_HINT_CACHE",
          value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    hint_cache: u32,

    /// Divide the load in replies to probes whose query hint is remembered by this number, 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 10, env = "PROBE_AGENT_HINT_DIVISOR", requires = "hint_cache",
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    hint_divisor: u32,

    /// Keep x-prequal-hint on requests to the backend
    #[arg(long, env = "PROBE_AGENT_FORWARD_HINT")]
    forward_hint: bool,

    /// Put X-Netflix.server.utilization on responses: requests in flight as a percentage of this number, 1 to 1000000
    #[arg(long, value_name = "MAX", env = "PROBE_AGENT_NETFLIX_UTILIZATION",
          value_parser = requests)]
    netflix_utilization: Option<NonZeroU32>,

    /// Send this target utilisation as `target=` in X-Netflix.server.utilization, in percent, 1 to 100
    #[arg(long, value_name = "PERCENT", env = "PROBE_AGENT_NETFLIX_TARGET", requires = "netflix_utilization",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    netflix_target: Option<u32>,

    /// Put load on responses in ORCA format, which Envoy's client_side_weighted_round_robin and gRPC read
    /// (docs/guide/orca.md)
    #[arg(long, value_enum, value_name = "FORMAT", env = "PROBE_AGENT_ORCA")]
    orca: Option<OrcaFormat>,

    /// Choose the responses that carry ORCA load: all, those of gRPC, or all others
    #[arg(long, value_enum, default_value = "all", env = "PROBE_AGENT_ORCA_FOR", requires = "orca")]
    orca_for: OrcaClass,

    /// Answer xds.service.orca.v3.OpenRcaService over HTTP/2, on the service port and the probe port, with at most this
    /// many streams, 0 (off: the backend gets those calls) to 100000
    #[arg(long, value_name = "N", default_value_t = 0, env = "PROBE_AGENT_ORCA_STREAMS",
          value_parser = clap::value_parser!(u32).range(0..=100_000))]
    orca_streams: u32,

    /// Make ORCA utilisation relative to this number of concurrent requests, 1 to 1000000, while the knee (how many the
    /// backend serves at once) is unknown. While the knee may be higher than estimated, the larger of the two counts.
    /// Default: always the estimate
    #[arg(long, value_name = "N", env = "PROBE_AGENT_ORCA_LIMIT", value_parser = requests)]
    orca_limit: Option<NonZeroU32>,

    /// Time constant of the moving averages of ORCA rates and utilisation, 100 to 600000
    #[arg(long, value_name = "MS", default_value_t = 5_000, env = "PROBE_AGENT_ORCA_WINDOW_MS",
          value_parser = clap::value_parser!(u64).range(100..=600_000))]
    orca_window_ms: u64,

    /// Ask the backend for its load in ORCA format, and report its utilisation instead of the agent's own; METRIC is
    /// `utilization` (application_utilization, else cpu_utilization) or a `named_metrics.NAME`
    #[arg(long, value_name = "METRIC", env = "PROBE_AGENT_ORCA_FROM_BACKEND")]
    orca_from_backend: Option<FromBackend>,

    /// Also call the OpenRcaService of a gRPC backend for a stream of load reports with this interval, 100 to 3600000;
    /// default: no stream
    #[arg(long, value_name = "MS", env = "PROBE_AGENT_ORCA_BACKEND_STREAM_MS", requires = "orca_from_backend",
          value_parser = clap::value_parser!(u64).range(100..=3_600_000))]
    orca_backend_stream_ms: Option<u64>,

    /// Choose the HTTP version towards the backend
    #[arg(long, value_enum, default_value = "auto", env = "PROBE_AGENT_UPSTREAM_HTTP2")]
    upstream_http2: UpstreamHttp2,

    /// Use this many threads, 1 to 1024; default: one per core, or one per whole core in the CPU limit of the cgroup
    #[arg(long, value_name = "N", env = "PROBE_AGENT_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,

    /// Listen with TLS on the service port and the probe port, with this certificate chain, PEM. New connections use
    /// new files within a few seconds; while new files cannot be used, the old ones stay in use
    #[arg(long, value_name = "FILE", env = "PROBE_AGENT_TLS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,

    /// Listen with TLS, with this private key, PEM
    #[arg(long, value_name = "FILE", env = "PROBE_AGENT_TLS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,

    /// Verify client certificates against these authorities, PEM
    #[arg(long, value_name = "FILE", env = "PROBE_AGENT_TLS_CLIENT_CA", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,

    /// Choose whether a client without a certificate is refused or served
    #[arg(
        long,
        value_enum,
        default_value = "required",
        env = "PROBE_AGENT_TLS_CLIENT_VERIFY",
        requires = "tls_client_ca"
    )]
    tls_client_verify: ClientVerify,

    /// Use TLS towards the backend
    #[arg(long, env = "PROBE_AGENT_UPSTREAM_TLS")]
    upstream_tls: bool,

    /// Trust these authorities instead of the system's, PEM
    #[arg(long, value_name = "FILE", env = "PROBE_AGENT_UPSTREAM_CA", requires = "upstream_tls")]
    upstream_ca: Option<PathBuf>,

    /// Verify this name in the backend's certificate; default: the host of --upstream
    #[arg(long, value_name = "NAME", env = "PROBE_AGENT_UPSTREAM_SERVER_NAME", requires = "upstream_tls")]
    upstream_server_name: Option<String>,

    /// Allow the network to move connections off congested and broken paths (PLB): DCTCP with ECN, SO_TXREHASH and
    /// automatic flow labels on the service and upstream sockets; the log names what this host does not allow
    #[arg(long, env = "PROBE_AGENT_PLB")]
    plb: bool,

    /// Choose the format of the log on standard error, which has at most one line a second for each class of failure
    #[arg(long, value_enum, default_value = "text", env = "PROBE_AGENT_LOG_FORMAT")]
    log_format: LogFormat,

    /// Write a line in the format of --log-format to standard output for each request on the service port, without the
    /// query of its path
    #[arg(long, env = "PROBE_AGENT_ACCESS_LOG")]
    access_log: bool,

    /// Accept at most this many connections on the service port, 0 (no limit) to 1000000; others wait in the system's
    /// backlog until there is room
    #[arg(long, value_name = "N", default_value_t = 0, env = "PROBE_AGENT_MAX_CONNECTIONS",
          value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    max_connections: u32,

    /// Close a connection whose request head is incomplete this long after its first byte, 1 to 600000
    #[arg(long, value_name = "MS", default_value_t = 10_000, env = "PROBE_AGENT_HEADER_TIMEOUT_MS",
          value_parser = clap::value_parser!(u64).range(1..=600_000))]
    header_timeout_ms: u64,

    /// Close connections that have had nothing in flight for this long, or up to a quarter longer, 1000 to 86400000
    #[arg(long, value_name = "MS", default_value_t = 3_600_000, env = "PROBE_AGENT_IDLE_TIMEOUT_MS",
          value_parser = clap::value_parser!(u64).range(1_000..=86_400_000))]
    idle_timeout_ms: u64,

    /// Close a connection after this long if nothing was ever sent on it, 1000 to 86400000
    #[arg(long, value_name = "MS", default_value_t = 60_000, env = "PROBE_AGENT_SILENT_TIMEOUT_MS",
          value_parser = clap::value_parser!(u64).range(1_000..=86_400_000))]
    silent_timeout_ms: u64,

    /// Cut a request when nothing has moved for this long on its request body, response body or tunnel, 0 (never) to
    /// 86400000
    #[arg(long, value_name = "MS", default_value_t = 0, env = "PROBE_AGENT_BODY_IDLE_TIMEOUT_MS",
          value_parser = clap::value_parser!(u64).range(0..=86_400_000))]
    body_idle_timeout_ms: u64,

    /// Cut gRPC calls, event streams and tunnels at this age, 0 (never) to 604800000
    #[arg(long, value_name = "MS", default_value_t = 0, env = "PROBE_AGENT_MAX_STREAM_AGE_MS",
          value_parser = clap::value_parser!(u64).range(0..=604_800_000))]
    max_stream_age_ms: u64,

    /// Serve at most this many requests at once, 0 (no limit) to 1000000; answer others with a 503 that the shipped
    /// retry policies retry on another replica
    #[arg(long, value_name = "N", default_value_t = 0, env = "PROBE_AGENT_MAX_RIF",
          value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    max_rif: u32,

    /// Accept request heads up to this length, 1024 to 1048576; answer longer ones with 431
    #[arg(long, value_name = "BYTES", default_value_t = 65_536, env = "PROBE_AGENT_MAX_HEADER_BYTES",
          value_parser = clap::value_parser!(u64).range(1_024..=1_048_576))]
    max_header_bytes: u64,

    /// Accept at most this many headers in an HTTP/1 request, 8 to 4096; answer more with 431
    #[arg(long, value_name = "N", default_value_t = 100, env = "PROBE_AGENT_MAX_HEADERS",
          value_parser = clap::value_parser!(u64).range(8..=4096))]
    max_headers: u64,

    /// Allow this many concurrent streams on one HTTP/2 connection, 1 to 1000000
    #[arg(long, value_name = "N", default_value_t = 1024, env = "PROBE_AGENT_MAX_STREAMS",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    max_streams: u32,

    /// Allow the backend this long to accept a connection, 1 to 600000; then answer 504
    #[arg(long, value_name = "MS", default_value_t = 1_000, env = "PROBE_AGENT_CONNECT_TIMEOUT_MS",
          value_parser = clap::value_parser!(u64).range(1..=600_000))]
    connect_timeout_ms: u64,

    /// Allow a check of the backend this long to succeed, 1 to 600000
    #[arg(long, value_name = "MS", default_value_t = 1_000, env = "PROBE_AGENT_READY_TIMEOUT_MS",
          value_parser = clap::value_parser!(u64).range(1..=600_000))]
    ready_timeout_ms: u64,

    /// Allow the backend this long to send its response head, 0 (no limit) to 86400000; then answer 504
    #[arg(long, value_name = "MS", default_value_t = 0, env = "PROBE_AGENT_RESPONSE_TIMEOUT_MS",
          value_parser = clap::value_parser!(u64).range(0..=86_400_000))]
    response_timeout_ms: u64,

    /// Stop using an idle connection to the backend after this long, 1 to 86400000; keep it below the backend's own
    /// keep-alive time
    #[arg(long, value_name = "MS", default_value_t = 4_000, env = "PROBE_AGENT_UPSTREAM_IDLE_TIMEOUT_MS",
          value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    upstream_idle_timeout_ms: u64,

    /// Open at most this many HTTP/2 connections to the backend, 1 to 1000; another is opened when the existing ones
    /// have 128 requests each, or as many as the backend allows
    #[arg(long, value_name = "N", default_value_t = 16, env = "PROBE_AGENT_MAX_UPSTREAM_CONNECTIONS",
          value_parser = clap::value_parser!(u64).range(1..=1_000))]
    max_upstream_connections: u64,

    /// Queue at most this many requests for an HTTP/2 stream to the backend, 0 to 1000000; answer others, and those
    /// that wait longer than --connect-timeout-ms, with 503
    #[arg(long, value_name = "N", default_value_t = 1024, env = "PROBE_AGENT_MAX_UPSTREAM_WAITING",
          value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    max_upstream_waiting: u64,

    /// PING HTTP/2 clients that have been silent for this long, 0 (never) to 86400000; end the connection if no
    /// answer comes within the same time, 20 s at most
    #[arg(long, value_name = "MS", default_value_t = 60_000, env = "PROBE_AGENT_PING_MS",
          value_parser = clap::value_parser!(u64).range(0..=86_400_000))]
    ping_ms: u64,

    /// PING the backend after this much silence while requests are in flight, 0 (never) to 86400000; by default, gRPC
    /// servers close connections that PING more often than every 5 minutes
    #[arg(long, value_name = "MS", default_value_t = 330_000, env = "PROBE_AGENT_UPSTREAM_PING_MS",
          value_parser = clap::value_parser!(u64).range(0..=86_400_000))]
    upstream_ping_ms: u64,

    /// On SIGTERM, fail /healthz and /readyz but accept new connections for this long, 0 to 600000
    #[arg(long, value_name = "MS", default_value_t = 0, env = "PROBE_AGENT_DRAIN_DELAY_MS",
          value_parser = clap::value_parser!(u64).range(0..=600_000))]
    drain_delay_ms: u64,

    /// On SIGTERM, keep idle HTTP/1.1 connections open for one more request for this long, 0 to 600000, then close them
    #[arg(long, value_name = "MS", default_value_t = 5_000, env = "PROBE_AGENT_DRAIN_IDLE_MS",
          value_parser = clap::value_parser!(u64).range(0..=600_000))]
    drain_idle_ms: u64,

    /// On SIGTERM, allow requests in flight this long to finish, 0 to 3600000; then cut the rest and exit with status 3
    #[arg(long, value_name = "MS", default_value_t = 30_000, env = "PROBE_AGENT_DRAIN_TIMEOUT_MS",
          value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    drain_timeout_ms: u64,
}

impl Cli {
    /// Returns the log for messages about the process as a whole.
    pub fn log(&self) -> Log {
        Log::new(self.log_format)
    }

    /// Returns the configuration of every replica. The first has the admin port.
    pub fn configs(self) -> Vec<AgentConfig> {
        let hints = (self.hint_cache, self.hint_divisor);
        let others = self.replica.clone();
        let first = AgentConfig { named: !others.is_empty(), ..AgentConfig::from(self) };
        let others: Vec<_> = others
            .into_iter()
            .map(|Another { listen, upstream, advertise, probe_listen }| AgentConfig {
                listen,
                upstream,
                advertise,
                probe_listen,
                admin: None,
                // Each replica remembers only the hints that it has served.
                hints: hook(hints),
                ..first.clone()
            })
            .collect();
        [first].into_iter().chain(others).collect()
    }
}

fn hook((cache, divisor): (u32, u32)) -> Option<Hook> {
    (cache > 0).then(|| Hook::recent(usize::try_from(cache).unwrap_or(usize::MAX), divisor))
}

impl From<Cli> for AgentConfig {
    fn from(cli: Cli) -> Self {
        let ms = Duration::from_millis;
        let unless_zero = |n: u64| Some(n).filter(|n| *n > 0).map(ms);
        let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Self {
            advertise: cli.advertise,
            probe_listen: cli.probe_listen,
            admin: cli.admin,
            ready_check: cli.ready_check,
            report: cli.report,
            hints: hook((cli.hint_cache, cli.hint_divisor)),
            forward_hint: cli.forward_hint,
            utilization: cli.netflix_utilization.map(|max| Utilization { max, target: cli.netflix_target }),
            orca: Orca {
                format: cli.orca,
                class: cli.orca_for,
                limit: cli.orca_limit,
                window: ms(cli.orca_window_ms),
                streams: cli.orca_streams,
            },
            orca_from_backend: cli.orca_from_backend,
            orca_backend_stream: cli.orca_backend_stream_ms.map(ms),
            upstream_http2: cli.upstream_http2,
            plb: cli.plb,
            log: Log::new(cli.log_format),
            access_log: cli.access_log.then_some(cli.log_format),
            tls: cli.tls_cert.zip(cli.tls_key),
            tls_clients: cli.tls_client_ca.map(|ca| TlsClients { ca, verify: cli.tls_client_verify }),
            upstream_tls: cli
                .upstream_tls
                .then_some(UpstreamTls { ca: cli.upstream_ca, server_name: cli.upstream_server_name }),
            limits: Limits {
                max_connections: NonZeroU32::new(cli.max_connections),
                header_timeout: ms(cli.header_timeout_ms),
                idle_timeout: ms(cli.idle_timeout_ms),
                silent_timeout: ms(cli.silent_timeout_ms),
                body_idle_timeout: unless_zero(cli.body_idle_timeout_ms),
                max_stream_age: unless_zero(cli.max_stream_age_ms),
                max_rif: NonZeroU32::new(cli.max_rif),
                max_header_bytes: size(cli.max_header_bytes),
                max_headers: size(cli.max_headers),
                max_streams: cli.max_streams,
                connect_timeout: ms(cli.connect_timeout_ms),
                ready_timeout: ms(cli.ready_timeout_ms),
                response_timeout: unless_zero(cli.response_timeout_ms),
                upstream_idle_timeout: ms(cli.upstream_idle_timeout_ms),
                max_upstream_connections: size(cli.max_upstream_connections),
                max_upstream_waiting: size(cli.max_upstream_waiting),
                ping_interval: unless_zero(cli.ping_ms),
                upstream_ping_interval: unless_zero(cli.upstream_ping_ms),
                drain_delay: ms(cli.drain_delay_ms),
                drain_idle: ms(cli.drain_idle_ms),
                drain_timeout: ms(cli.drain_timeout_ms),
                ..Limits::default()
            },
            ..Self::new(cli.listen, cli.upstream)
        }
    }
}

fn socket_addr(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "must be `ip:port` with a port of 0 to 65535 (IPv6 as `[ip]:port`)".to_owned())
}

fn requests(text: &str) -> Result<NonZeroU32, String> {
    let max = text.parse().ok().filter(|max: &NonZeroU32| max.get() <= 1_000_000);
    max.ok_or_else(|| "must be a whole number of requests from 1 to 1000000".to_owned())
}

fn admin_addr(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    }
    text.parse().map_err(|_| "must be a port (0 to 65535, on loopback) or `ip:port`".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    fn parse(extra: &[&str]) -> Result<Cli, String> {
        let args = ["probe-agent", "--listen", "127.0.0.1:0", "--upstream", "127.0.0.1:1"];
        Cli::try_parse_from(args.iter().chain(extra)).map_err(|error| error.to_string())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_is_in_the_environment_under_its_name() {
        for arg in Cli::command().get_arguments() {
            let Some(flag) = arg.get_long() else { continue };
            let name = format!("PROBE_AGENT_{}", flag.to_uppercase().replace('-', "_"));
            assert_eq!(arg.get_env().and_then(|env| env.to_str()), Some(name.as_str()), "--{flag}");
        }
    }

    /// Parses the lowest and highest value from a flag's help, such as `1 to 1000` or `0 (off) to 1000`. The reference
    /// shows the same text.
    fn range(help: &str) -> Option<(u64, u64)> {
        let mut places = help.match_indices(" to ").map(|(at, to)| (&help[..at], &help[at + to.len()..]));
        let (before, after) = places.find(|(before, _)| before.ends_with(is_bound))?;
        let before = before.rsplit_once(" (").map_or(before, |(number, _)| number);
        let low = before.rsplit([' ', ',']).next()?;
        let high = after.split(|c: char| !c.is_ascii_digit()).next()?;
        Some((low.parse().ok()?, high.parse().ok()?))
    }

    fn is_bound(c: char) -> bool {
        c.is_ascii_digit() || c == ')'
    }

    #[test]
    fn ranges_in_the_help_are_the_enforced_ones() {
        let numbers = ["N", "MS", "BYTES", "MAX", "PERCENT"];
        let mut checked = 0;
        for arg in Cli::command().get_arguments() {
            let names = arg.get_value_names().unwrap_or_default();
            if !names.iter().any(|name| numbers.contains(&name.as_str())) {
                continue;
            }
            let flag = format!("--{}", arg.get_long().expect("a long flag"));
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            let (low, high) = range(&help).unwrap_or_else(|| panic!("{flag} does not say its range: {help}"));
            let companion: &[&str] = match flag.as_str() {
                "--netflix-target" => &["--netflix-utilization", "5"],
                "--hint-divisor" => &["--hint-cache", "5"],
                "--orca-backend-stream-ms" => &["--orca-from-backend", "utilization"],
                _ => &[],
            };
            let accepted = |value: u64| {
                let value = value.to_string();
                parse(&[companion, &[&flag, &value]].concat()).is_ok()
            };
            assert!(accepted(low) && accepted(high), "{flag}: {low} to {high}");
            assert!(!accepted(high + 1) && (low == 0 || !accepted(low - 1)), "{flag}: {low} to {high}");
            checked += 1;
        }
        assert!(checked >= 15, "{checked}");
    }

    #[test]
    fn the_admin_port_is_on_loopback_by_default() {
        assert_eq!(parse(&["--admin", "9000"]).unwrap().admin, Some("127.0.0.1:9000".parse().unwrap()));
        assert_eq!(parse(&["--admin", "0.0.0.0:9000"]).unwrap().admin, Some("0.0.0.0:9000".parse().unwrap()));
    }

    #[test]
    fn the_error_for_a_bad_value_names_flag_and_range() {
        for (flag, value, says) in [
            ("--threads", "0", "1..=1024"),
            ("--threads", "many", "invalid digit"),
            ("--header-timeout-ms", "0", "1..=600000"),
            ("--max-header-bytes", "9", "1024..=1048576"),
            ("--report", "never", "always, probe-only"),
            ("--ready-check", "https:/", "`http:/path`"),
            ("--replica", "listen=127.0.0.1:0", "`upstream=` are needed"),
            ("--upstream-http2", "maybe", "auto, never, always"),
            ("--advertise", "me:80", "1 to 65535"),
            ("--admin", "x", "on loopback"),
            ("--probe-listen", "1.2.3.4", "0 to 65535"),
            ("--hint-cache", "1000001", "0..=1000000"),
            ("--hint-divisor", "0", "1..=1000"),
            ("--hint-divisor", "10", "--hint-cache"),
            ("--netflix-utilization", "0", "from 1 to 1000000"),
            ("--netflix-utilization", "1000001", "from 1 to 1000000"),
            ("--netflix-target", "101", "1..=100"),
            ("--netflix-target", "60", "--netflix-utilization"),
            ("--orca", "xml", "text, json, binary"),
            ("--orca-for", "grpc", "--orca"),
            ("--orca-limit", "0", "from 1 to 1000000"),
            ("--orca-streams", "100001", "0..=100000"),
            ("--orca-window-ms", "99", "100..=600000"),
            ("--orca-from-backend", "cpu", "named_metrics.NAME"),
            ("--orca-backend-stream-ms", "99", "100..=3600000"),
            ("--orca-backend-stream-ms", "100", "--orca-from-backend"),
            ("--tls-cert", "a.pem", "--tls-key"),
            ("--tls-client-ca", "a.pem", "--tls-cert"),
            ("--tls-client-verify", "optional", "--tls-client-ca"),
            ("--tls-client-verify", "never", "required, optional"),
            ("--upstream-ca", "a.pem", "--upstream-tls"),
        ] {
            let error = parse(&[flag, value]).unwrap_err();
            // If a flag lacks its companion, the error names the companion.
            assert!(error.contains(flag) || says.starts_with("--"), "{error}");
            assert!(error.contains(says), "{flag} {value}: {error}");
        }
        let error = Cli::try_parse_from(["probe-agent", "--listen", "127.0.0.1:0", "--upstream", "nowhere"]);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("--upstream") && error.contains("`name:port`"), "{error}");
    }
}
