//! TLS on either side, for use outside a mesh: rustls with ring, certificates from PEM files.
//!
//! No client certificates are asked for or sent: a mesh does that better.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Why TLS could not be set up. Always a file or a name that the operator gave.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// The file is missing, unreadable or holds no PEM of that kind.
    #[error("{what} in {}", path.display())]
    Pem {
        /// What was looked for.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// The parser's reason.
        source: rustls::pki_types::pem::Error,
    },
    /// Certificate and key do not fit, or are of an unsupported kind.
    #[error("certificate or key not usable")]
    Rustls(#[from] rustls::Error),
    /// No certificate of authority found.
    #[error("no CA certificate in {}: give --upstream-ca", path.display())]
    NoRoots {
        /// Where they were looked for.
        path: PathBuf,
    },
    /// The name to verify is neither a DNS name nor an address.
    #[error("`{0}` is no DNS name or IP address")]
    Name(String),
}

/// Accepts TLS with this certificate chain and key, offering HTTP/2 and HTTP/1.1.
pub(crate) fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
    let chain = certificates(cert)?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(|source| TlsError::Pem {
        what: "no private key",
        path: key.into(),
        source,
    })?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// TLS to the backend.
#[derive(Clone)]
pub(crate) struct Connector {
    pub(crate) http1: TlsConnector,
    pub(crate) http2: TlsConnector,
    pub(crate) name: ServerName<'static>,
}

/// Verifies the backend as `name` against `ca`, or against the system's bundle.
pub(crate) fn connector(ca: Option<&Path>, name: &str) -> Result<Connector, TlsError> {
    let path = match ca {
        Some(ca) => ca.to_owned(),
        None => std::env::var_os("SSL_CERT_FILE").map_or_else(|| SYSTEM_BUNDLE.into(), PathBuf::from),
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates(&path)?);
    if roots.is_empty() {
        return Err(TlsError::NoRoots { path });
    }
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let with_alpn = |protocol: &[u8]| {
        let mut config = config.clone();
        config.alpn_protocols = vec![protocol.to_vec()];
        TlsConnector::from(Arc::new(config))
    };
    Ok(Connector {
        http1: with_alpn(b"http/1.1"),
        http2: with_alpn(b"h2"),
        name: ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Name(name.to_owned()))?,
    })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let error = |source| TlsError::Pem { what: "no certificate", path: path.into(), source };
    CertificateDer::pem_file_iter(path).map_err(error)?.collect::<Result<_, _>>().map_err(error)
}

const SYSTEM_BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";
