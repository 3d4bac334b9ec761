//! Certificates that change while the agent runs, clients that must have one, and the system's authorities.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{Running, agent, any_port, backend, fetch, text, within};
use probe_agent::Agent;
use probe_agent::config::{AgentConfig, ClientVerify, TlsClients, UpstreamTls};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// An authority, and a folder for its certificate and those that it issues.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: tempfile::TempDir,
}

/// Certificate and key, PEM.
type Pair = (String, String);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_after = rcgen::date_time_ymd(2035, 1, 1);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, dir }
    }

    fn ca(&self) -> PathBuf {
        self.path("ca.pem")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Issues a pair for `localhost`, valid until the first of January of `year`.
    fn issue(&self, year: i32) -> Pair {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    /// Writes a pair to the files that the agent reads.
    fn install(&self, pair: &Pair) -> (PathBuf, PathBuf) {
        let files = (self.path("cert.pem"), self.path("key.pem"));
        fs::write(&files.0, &pair.0).unwrap();
        fs::write(&files.1, &pair.1).unwrap();
        files
    }

    /// Connects as a client that trusts this authority and may have a certificate.
    async fn connect(&self, addr: SocketAddr, client: Option<&Pair>) -> io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match client {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => {
                let cert = CertificateDer::from_pem_slice(cert.as_bytes()).unwrap();
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
                builder.with_client_auth_cert(vec![cert], key).unwrap()
            }
        };
        let tcp = TcpStream::connect(addr).await?;
        let name = ServerName::try_from("localhost").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, tcp).await
    }

    /// Sends one GET. Returns the reply, and the certificate that the agent presented.
    async fn ask(&self, addr: SocketAddr, path: &str, client: Option<&Pair>) -> io::Result<(String, String)> {
        let mut tls = self.connect(addr, client).await?;
        let reply = get(&mut tls, path, "close").await?;
        let shown = tls.get_ref().1.peer_certificates().unwrap()[0].clone();
        Ok((reply, format!("{shown:?}")))
    }
}

async fn get(tls: &mut TlsStream<TcpStream>, path: &str, connection: &str) -> io::Result<String> {
    tls.write_all(format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: {connection}\r\n\r\n").as_bytes())
        .await?;
    let mut reply = vec![0; 1024];
    let n = within(tls.read(&mut reply)).await?;
    if n == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(String::from_utf8_lossy(&reply[..n]).into_owned())
}

fn shown(pair: &Pair) -> String {
    format!("{:?}", CertificateDer::from_pem_slice(pair.0.as_bytes()).unwrap())
}

async fn hello() -> SocketAddr {
    backend(|_| async { text("hello") }).await
}

/// Starts an agent that checks its files often, so that tests are quick.
fn tls_agent(upstream: SocketAddr, change: impl FnOnce(&mut AgentConfig)) -> Running {
    agent(upstream, |config| {
        config.limits.tls_reload_interval = Duration::from_millis(50);
        config.admin = Some(any_port());
        change(config);
    })
}

async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    for _ in 0..400 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("never: {what}");
}

async fn metric(agent: &Running, line: &str) -> bool {
    let (_, metrics) = fetch(agent.admin.unwrap(), "/metrics").await;
    String::from_utf8_lossy(&metrics).lines().any(|l| l == line)
}

#[tokio::test]
async fn a_new_certificate_is_used_and_connections_stay_open() {
    let ca = Authority::new();
    let (first, second) = (ca.issue(2030), ca.issue(2031));
    let files = ca.install(&first);
    let agent = tls_agent(hello().await, |config| config.tls = Some(files.clone()));
    let uses = async |pair| ca.ask(agent.addr, "/", None).await.unwrap().1 == shown(pair);
    let mut open = ca.connect(agent.addr, None).await.unwrap();
    assert!(get(&mut open, "/", "keep-alive").await.unwrap().starts_with("HTTP/1.1 200"));
    assert!(uses(&first).await);
    until("2030", || metric(&agent, "prequal_agent_certificate_expiry_timestamp_seconds 1893456000")).await;

    ca.install(&second);
    until("the second certificate", || uses(&second)).await;
    until("2031", || metric(&agent, "prequal_agent_certificate_expiry_timestamp_seconds 1924992000")).await;
    let [failed, used] = agent.load.counters().tls_reloads();
    assert!(used >= 1);

    // The key belongs to another certificate, as if only one of the two files had been copied so far.
    fs::write(&files.1, &first.1).unwrap();
    let failures = |n: u64| {
        let line = format!("prequal_agent_tls_reloads_total{{result=\"failed\"}} {n}");
        let agent = &agent;
        async move { metric(agent, &line).await }
    };
    until("a failed reload", || failures(failed + 1)).await;
    assert!(uses(&second).await, "the old pair stays");
    fs::write(&files.0, &first.0).unwrap();
    until("the first certificate again", || uses(&first)).await;
    let [failed, _] = agent.load.counters().tls_reloads();
    fs::remove_file(&files.0).unwrap();
    until("another failure", || failures(failed + 1)).await;
    assert!(uses(&first).await, "files that are gone change nothing");
    assert!(get(&mut open, "/", "close").await.unwrap().starts_with("HTTP/1.1 200"), "never cut");
}

/// The kubelet updates a Secret like this: `tls.crt` points to `..data/tls.crt`, `..data` points to a folder, and a
/// rename replaces the link `..data`.
#[tokio::test]
async fn a_secret_updated_by_kubernetes_is_read_again() {
    let ca = Authority::new();
    let pairs = [ca.issue(2030), ca.issue(2031)];
    for (version, pair) in ["..2026_1", "..2026_2"].iter().zip(&pairs) {
        fs::create_dir(ca.path(version)).unwrap();
        fs::write(ca.path(version).join("tls.crt"), &pair.0).unwrap();
        fs::write(ca.path(version).join("tls.key"), &pair.1).unwrap();
    }
    symlink("..2026_1", ca.path("..data")).unwrap();
    for name in ["tls.crt", "tls.key"] {
        symlink(Path::new("..data").join(name), ca.path(name)).unwrap();
    }
    let agent =
        tls_agent(hello().await, |config| config.tls = Some((ca.path("tls.crt"), ca.path("tls.key"))));
    let uses = async |pair| ca.ask(agent.addr, "/", None).await.unwrap().1 == shown(pair);
    assert!(uses(&pairs[0]).await);
    symlink("..2026_2", ca.path("..data_tmp")).unwrap();
    fs::rename(ca.path("..data_tmp"), ca.path("..data")).unwrap();
    fs::remove_dir_all(ca.path("..2026_1")).unwrap();
    until("the second certificate", || uses(&pairs[1])).await;
    assert_eq!(agent.load.counters().tls_reloads(), [0, 1], "never half of it");
}

#[tokio::test]
async fn clients_are_verified_on_both_ports() {
    let (ca, clients, strangers) = (Authority::new(), Authority::new(), Authority::new());
    let files = ca.install(&ca.issue(2030));
    let (friend, stranger) = (clients.issue(2030), strangers.issue(2030));
    for (verify, without) in [(ClientVerify::Required, false), (ClientVerify::Optional, true)] {
        let agent = tls_agent(hello().await, |config| {
            config.tls = Some(files.clone());
            config.tls_clients = Some(TlsClients { ca: clients.ca(), verify });
            config.probe_listen = Some(any_port());
        });
        for (addr, path) in [(agent.addr, "/"), (agent.probe.unwrap(), "/prequal/probe")] {
            let served = async |client| {
                ca.ask(addr, path, client).await.is_ok_and(|(reply, _)| reply.starts_with("HTTP/1.1 200"))
            };
            assert!(served(Some(&friend)).await, "{verify:?} {path}");
            assert!(!served(Some(&stranger)).await, "{verify:?} {path}");
            assert_eq!(served(None).await, without, "{verify:?} {path}");
        }
        assert!(!crate::common::raw(agent.probe.unwrap(), PROBE).await.contains("HTTP/1.1"), "no cleartext");
    }
}

const PROBE: &str = "GET /prequal/probe HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn changed_client_authorities_are_read_again() {
    let (ca, old, new) = (Authority::new(), Authority::new(), Authority::new());
    let files = ca.install(&ca.issue(2030));
    let trusted = ca.path("clients.pem");
    fs::copy(old.ca(), &trusted).unwrap();
    let agent = tls_agent(hello().await, |config| {
        config.tls = Some(files);
        config.tls_clients = Some(TlsClients { ca: trusted.clone(), verify: ClientVerify::Required });
    });
    let (before, after) = (old.issue(2030), new.issue(2030));
    let served = async |client| ca.ask(agent.addr, "/", Some(client)).await.is_ok();
    assert!(served(&before).await && !served(&after).await);
    fs::copy(new.ca(), &trusted).unwrap();
    until("the new authority", || served(&after)).await;
    assert!(!served(&before).await, "the old one is not trusted any more");
}

#[tokio::test]
async fn changed_backend_authorities_are_read_again() {
    let (first, second) = (Authority::new(), Authority::new());
    let files = first.install(&second.issue(2030));
    let inner = tls_agent(hello().await, |config| config.tls = Some(files));
    let trusted = first.path("trusted.pem");
    fs::copy(first.ca(), &trusted).unwrap();
    let outer = tls_agent(inner.addr, |config| {
        let server_name = Some("localhost".to_owned());
        config.upstream_tls = Some(UpstreamTls { ca: Some(trusted.clone()), server_name });
    });
    assert_eq!(fetch(outer.addr, "/").await.0.status, 502);
    fs::copy(second.ca(), &trusted).unwrap();
    until("the backend is trusted", async || fetch(outer.addr, "/").await.0.status == 200).await;
}

#[tokio::test]
async fn client_verification_without_a_server_certificate_is_refused() {
    let ca = Authority::new();
    let mut config = AgentConfig::new(any_port(), any_port().into());
    config.tls_clients = Some(TlsClients { ca: ca.ca(), verify: ClientVerify::Required });
    let error = Agent::bind(config.clone()).map(drop).unwrap_err();
    let chain = format!("{:#}", anyhow::Error::from(error));
    assert!(chain.contains("over TLS"), "{chain}");
    config.tls = Some(ca.install(&ca.issue(2030)));
    fs::write(ca.ca(), "nothing").unwrap();
    let error = Agent::bind(config).map(drop).unwrap_err();
    let chain = format!("{:#}", anyhow::Error::from(error));
    assert!(chain.contains("no certificate") && chain.contains("ca.pem"), "{chain}");
}

fn binary() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_probe-agent"));
    command.args(["--listen", "127.0.0.1:0"]).kill_on_drop(true);
    command
}

#[tokio::test]
async fn system_authorities_are_used_and_reported_if_missing() {
    let ca = Authority::new();
    let files = ca.install(&ca.issue(2030));
    let inner = tls_agent(hello().await, |config| config.tls = Some(files));
    let upstream = format!("localhost:{}", inner.addr.port());
    let flags = ["--upstream", &upstream, "--upstream-tls"];
    let empty = tempfile::tempdir().unwrap();
    let run = binary()
        .args(flags)
        .env("SSL_CERT_FILE", empty.path().join("none.pem"))
        .env("SSL_CERT_DIR", empty.path())
        .output();
    let output = within(run).await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("--upstream-ca"), "{stderr}");

    let mut child = binary()
        .args(flags)
        .env("SSL_CERT_FILE", ca.ca())
        .env("SSL_CERT_DIR", empty.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = within(lines.next_line()).await.unwrap().unwrap();
    let addr = line.strip_prefix("listening service=").unwrap().parse().unwrap();
    let (head, body) = fetch(addr, "/").await;
    assert_eq!((head.status.as_u16(), &body[..]), (200, &b"hello"[..]));
}

#[tokio::test]
async fn an_unusable_certificate_is_logged() {
    let ca = Authority::new();
    let (cert, key) = ca.install(&ca.issue(2030));
    let mut child = binary()
        .args(["--upstream", "127.0.0.1:1", "--tls-cert"])
        .arg(&cert)
        .arg("--tls-key")
        .arg(&key)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
    while within(out.next_line()).await.unwrap().unwrap() != "ready" {}
    fs::write(&key, ca.issue(2030).1).unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines();
    let line = within(stderr.next_line()).await.unwrap().unwrap();
    assert!(line.contains("cannot be used, the old ones stay"), "{line}");
}
