//! TLS towards clients and towards the backend, for use outside a mesh. Uses rustls with ring. Certificates come from
//! PEM files, which are read again when they change.
//!
//! Open connections keep the certificates with which they began. The backend gets no client certificate.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{AlertDescription, ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use x509_cert::Certificate;
use x509_cert::der::Decode as _;

use crate::config::{AgentConfig, ClientVerify, TlsClients};
use crate::load::Load;
use crate::log::Log;
use crate::reload::Reloaded;
use crate::socket::Socket;

/// TLS stream from a client.
pub(crate) type ClientTls = tokio_rustls::server::TlsStream<Socket>;
/// TLS stream to the backend.
pub(crate) type BackendTls = tokio_rustls::client::TlsStream<Socket>;

/// Reason why TLS could not be set up. In most cases, the cause is a file or a name that the operator gave.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// The file is missing or unreadable, or holds no PEM of the expected kind.
    #[error("{what} in {}", path.display())]
    Pem {
        /// Description of the missing content.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Reason from the parser.
        source: rustls::pki_types::pem::Error,
    },
    /// The certificate and key do not match, or are of an unsupported kind.
    #[error("certificate or key not usable")]
    Rustls(#[from] rustls::Error),
    /// The file holds no usable CA certificate.
    #[error("no usable CA certificate in {}", path.display())]
    NoRoots {
        /// Path of the file.
        path: PathBuf,
    },
    /// The system has no bundle of authorities that can be read.
    #[error(
        "no CA certificates found in SSL_CERT_FILE, in SSL_CERT_DIR or in OpenSSL's default locations{}: set --upstream-ca",
        reasons.iter().map(|reason| format!("; {reason}")).collect::<String>()
    )]
    NoSystemRoots {
        /// Reasons why bundles could not be read.
        reasons: Vec<String>,
    },
    /// The CA certificates of clients cannot be used to verify them.
    #[error("cannot verify clients with the CA certificates in {}", path.display())]
    Clients {
        /// Path of the file.
        path: PathBuf,
        /// Reason from the verifier.
        source: rustls::server::VerifierBuilderError,
    },
    /// Clients must be verified, but there is no certificate to listen with.
    #[error("clients can only be verified over TLS: also give a certificate and key to listen with")]
    NoCertificate,
    /// The name to verify is neither a DNS name nor an address.
    #[error("`{0}` is neither a DNS name nor an IP address")]
    Name(String),
    /// The task that reads the files failed.
    #[error("the task that reads the files failed")]
    Io(#[from] io::Error),
}

/// Accepts TLS with the certificate that is in use now.
pub(crate) struct Acceptor(Arc<Reloaded<Listening, TlsError>>);

#[derive(Clone)]
struct Listening {
    acceptor: TlsAcceptor,
    /// Earliest expiry of a certificate in the chain, seconds since 1970.
    expiry: Option<u64>,
}

impl Acceptor {
    /// Returns `None` if the agent listens without TLS.
    pub(crate) fn new(config: &AgentConfig) -> Result<Option<Self>, TlsError> {
        let Some((cert, key)) = config.tls.clone() else {
            return if config.tls_clients.is_some() { Err(TlsError::NoCertificate) } else { Ok(None) };
        };
        let clients = config.tls_clients.clone();
        let ca = clients.as_ref().map(|clients| clients.ca.clone());
        let files = [cert.clone(), key.clone()].into_iter().chain(ca).collect();
        let make = Box::new(move || listening(&cert, &key, clients.as_ref()));
        Ok(Some(Self(Arc::new(Reloaded::new(files, make)?))))
    }

    /// Performs the handshake.
    pub(crate) async fn accept(&self, socket: Socket) -> io::Result<ClientTls> {
        self.0.current().acceptor.accept(socket).await
    }

    /// Uses new files as they appear. Never ends.
    pub(crate) fn watch(
        &self,
        interval: Duration,
        load: Load,
        log: Log,
    ) -> impl Future<Output = ()> + Send + use<> {
        load.counters().set_certificate_expiry(self.0.current().expiry);
        self.0.clone().watch(interval, move |made| {
            if let Ok(listening) = &made {
                load.counters().set_certificate_expiry(listening.expiry);
            }
            note("listening", &made, &load, &log);
        })
    }
}

/// Opens TLS connections to the backend.
#[derive(Clone)]
pub(crate) struct Connector {
    with: Arc<Reloaded<Connecting, TlsError>>,
    name: ServerName<'static>,
}

#[derive(Clone)]
struct Connecting {
    http1: TlsConnector,
    http2: TlsConnector,
}

impl Connector {
    /// Creates a connector that verifies the backend as `name` against `ca`, or against the system's authorities.
    pub(crate) fn new(ca: Option<PathBuf>, name: &str) -> Result<Self, TlsError> {
        let name = ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Name(name.to_owned()))?;
        let files = ca.iter().cloned().collect();
        let make = Box::new(move || connecting(ca.as_deref()));
        Ok(Self { with: Arc::new(Reloaded::new(files, make)?), name })
    }

    /// Performs the handshake, offering one version of HTTP.
    pub(crate) async fn connect(&self, http2: bool, socket: Socket) -> io::Result<BackendTls> {
        let with = self.with.current();
        let connector = if http2 { with.http2 } else { with.http1 };
        connector.connect(self.name.clone(), socket).await
    }

    /// Uses new files as they appear. Never ends.
    pub(crate) fn watch(
        &self,
        interval: Duration,
        load: Load,
        log: Log,
    ) -> impl Future<Output = ()> + Send + use<> {
        self.with.clone().watch(interval, move |made| note("upstream", &made, &load, &log))
    }
}

/// Returns whether the client asked for HTTP/2; `None` if it left that open.
pub(crate) fn accepted_http2(stream: &ClientTls) -> Option<bool> {
    stream.get_ref().1.alpn_protocol().map(|protocol| protocol == b"h2")
}

/// Returns whether the backend agreed to HTTP/2.
pub(crate) fn connected_http2(stream: &BackendTls) -> bool {
    stream.get_ref().1.alpn_protocol() == Some(b"h2")
}

/// Returns whether the backend broke off the handshake because it does not speak the version of HTTP that the agent
/// offered (RFC 7301 §3.2).
pub(crate) fn refused_protocol(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|error| error.downcast_ref());
    matches!(error, Some(rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol)))
}

/// Counts and logs an attempt to use new files.
fn note<T>(side: &str, made: &Result<T, TlsError>, load: &Load, log: &Log) {
    load.counters().count_tls_reload(made.is_ok());
    match made {
        Ok(_) => log.note(&format!("TLS, {side}: certificates changed, new connections use them")),
        Err(error) => {
            let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
            let causes: String = causes.map(|cause| format!(": {cause}")).collect();
            log.note(&format!(
                "TLS, {side}: certificates changed and cannot be used, the old ones stay: {error}{causes}"
            ));
        }
    }
}

/// Reads this certificate chain and key, to listen with HTTP/2 and HTTP/1.1.
fn listening(cert: &Path, key: &Path, clients: Option<&TlsClients>) -> Result<Listening, TlsError> {
    let chain = certificates(cert)?;
    let expiry = chain.iter().filter_map(expiry).min();
    let key = PrivateKeyDer::from_pem_file(key).map_err(|source| TlsError::Pem {
        what: "no private key",
        path: key.into(),
        source,
    })?;
    let builder = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?;
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(clients) => builder.with_client_cert_verifier(verifier(clients)?),
    };
    let mut config = builder.with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Listening { acceptor: TlsAcceptor::from(Arc::new(config)), expiry })
}

fn verifier(clients: &TlsClients) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(&clients.ca)?), provider);
    let builder = match clients.verify {
        ClientVerify::Required => builder,
        ClientVerify::Optional => builder.allow_unauthenticated(),
    };
    builder.build().map_err(|source| TlsError::Clients { path: clients.ca.clone(), source })
}

fn connecting(ca: Option<&Path>) -> Result<Connecting, TlsError> {
    let roots = match ca {
        Some(ca) => roots(ca)?,
        None => system_roots()?,
    };
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let with_alpn = |protocol: &[u8]| {
        let mut config = config.clone();
        config.alpn_protocols = vec![protocol.to_vec()];
        TlsConnector::from(Arc::new(config))
    };
    Ok(Connecting { http1: with_alpn(b"http/1.1"), http2: with_alpn(b"h2") })
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates(path)?);
    if roots.is_empty() { Err(TlsError::NoRoots { path: path.into() }) } else { Ok(roots) }
}

fn system_roots() -> Result<RootCertStore, TlsError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let reasons = found.errors.iter().map(ToString::to_string).collect();
        return Err(TlsError::NoSystemRoots { reasons });
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let error = |source| TlsError::Pem { what: "no certificate", path: path.into(), source };
    let found: Vec<_> =
        CertificateDer::pem_file_iter(path).map_err(error)?.collect::<Result<_, _>>().map_err(error)?;
    if found.is_empty() { Err(error(rustls::pki_types::pem::Error::NoItemsFound)) } else { Ok(found) }
}

/// Returns the expiry of a certificate, seconds since 1970. `None` if this parser does not understand it, although
/// rustls may.
fn expiry(certificate: &CertificateDer<'_>) -> Option<u64> {
    let certificate = Certificate::from_der(certificate).ok()?;
    Some(certificate.tbs_certificate().validity().not_after.to_unix_duration().as_secs())
}
