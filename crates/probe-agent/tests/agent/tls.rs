//! TLS on both sides, and what happens if the certificate is not the backend's.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use crate::common::{agent, any_port, backend, client2, fetch, raw, raw_backend, serve, text, within};
use bytes::Bytes;
use http::{Request, StatusCode, Version};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use probe_agent::Agent;
use probe_agent::config::{AgentConfig, UpstreamTls};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// A self-signed certificate for `localhost`, on disk as operators have it.
struct Files {
    _dir: tempfile::TempDir,
    cert: PathBuf,
    key: PathBuf,
}

impl Files {
    fn new() -> Self {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
        std::fs::write(&cert, made.cert.pem()).unwrap();
        std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        Self { _dir: dir, cert, key }
    }

    fn upstream(&self) -> Option<UpstreamTls> {
        Some(UpstreamTls { ca: Some(self.cert.clone()), server_name: Some("localhost".to_owned()) })
    }

    async fn connect(&self, addr: SocketAddr, alpn: &str) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&self.cert).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
        let tcp = TcpStream::connect(addr).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap()
    }
}

#[tokio::test]
async fn tls_to_tls_in_both_versions() {
    let files = Files::new();
    // The backend with TLS is another agent, in front of a backend without TLS.
    let plain = backend(|req| async move {
        let mut reply = text("hello");
        reply.headers_mut().insert("x-version", format!("{:?}", req.version()).parse().unwrap());
        reply
    })
    .await;
    let inner = agent(plain, |config| config.tls = Some((files.cert.clone(), files.key.clone())));
    let outer = agent(inner.addr, |config| {
        config.tls = Some((files.cert.clone(), files.key.clone()));
        config.upstream_tls = files.upstream();
    });
    let io = TokioIo::new(files.connect(outer.addr, "http/1.1").await);
    let (mut client, conn) = http1::handshake(io).await.unwrap();
    tokio::spawn(conn);
    let request = Request::get("/").header("host", "localhost").body(Empty::<Bytes>::new()).unwrap();
    let response = client.send_request(request).await.unwrap();
    assert_eq!(response.headers()["x-version"], "HTTP/1.1");
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "hello");

    let io = TokioIo::new(files.connect(outer.addr, "h2").await);
    let (mut client, conn) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(conn);
    let request = Request::get("https://localhost/").body(Empty::<Bytes>::new()).unwrap();
    let response = client.send_request(request).await.unwrap();
    assert_eq!(
        (response.version(), &response.headers()["x-version"]),
        (Version::HTTP_2, &"HTTP/2.0".parse().unwrap())
    );
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "hello");
    outer.at_rest([2, 0, 0, 0]).await;
}

#[tokio::test]
async fn a_tls_backend_with_http1_alone_gets_all_requests_but_grpc() {
    let files = Files::new();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from_pem_file(&files.cert).unwrap()],
            PrivateKeyDer::from_pem_file(&files.key).unwrap(),
        )
        .unwrap();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let addr = raw_backend(move |tcp| {
        let acceptor = acceptor.clone();
        async move {
            if let Ok(tls) = acceptor.accept(tcp).await {
                serve(tls, |req| async move {
                    text(if req.version() == Version::HTTP_11 { "HTTP/1.1" } else { "other" })
                })
                .await;
            }
        }
    })
    .await;
    let agent = agent(addr, |config| config.upstream_tls = files.upstream());
    let client = client2(agent.addr).await;
    for _ in 0..2 {
        let request = Request::get("http://a/").body(Empty::<Bytes>::new()).unwrap();
        let response = within(client.clone().send_request(request)).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "HTTP/1.1");
    }
    let grpc = Request::post("http://a/").header("content-type", "application/grpc");
    let response = within(client.clone().send_request(grpc.body(Empty::new()).unwrap())).await.unwrap();
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "probe-agent: backend does not speak HTTP/2\n");
    agent.at_rest([2, 1, 0, 0]).await;
}

#[tokio::test]
async fn an_untrusted_backend_certificate_causes_a_502() {
    let (trusted, other) = (Files::new(), Files::new());
    let plain = backend(|_| async { text("hello") }).await;
    let impostor = agent(plain, |config| config.tls = Some((other.cert.clone(), other.key.clone())));
    let agent = agent(impostor.addr, |config| config.upstream_tls = trusted.upstream());
    assert_eq!(fetch(agent.addr, "/").await.0.status, StatusCode::BAD_GATEWAY);
    let request = Request::get("http://a/").body(Empty::<Bytes>::new()).unwrap();
    let response = client2(agent.addr).await.send_request(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    agent.at_rest([0, 2, 0, 0]).await;
}

#[tokio::test]
async fn cleartext_on_a_tls_port_gets_no_http_response() {
    let files = Files::new();
    let plain = backend(|_| async { text("hello") }).await;
    let agent = agent(plain, |config| config.tls = Some((files.cert.clone(), files.key.clone())));
    assert!(!raw(agent.addr, "GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.contains("HTTP/1.1"));
}

#[tokio::test]
async fn unusable_tls_files_are_named() {
    let files = Files::new();
    let mut config = AgentConfig::new(any_port(), any_port().into());
    config.tls = Some(("/nowhere/cert.pem".into(), files.key.clone()));
    let error = Agent::bind(config.clone()).map(drop).unwrap_err();
    let chain = format!("{:#}", anyhow::Error::from(error));
    assert!(chain.contains("/nowhere/cert.pem"), "{chain}");
    config.tls = Some((files.cert.clone(), files.cert.clone()));
    let error = Agent::bind(config).map(drop).unwrap_err();
    assert!(format!("{:#}", anyhow::Error::from(error)).contains("no private key"));
}
