//! A minimal HTTP/1.1 server and client for the demo, with small requests and replies.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpListener;

/// Maximum body size of requests and replies, bytes: Envoy's statistics are the longest.
const MAX_BODY: usize = 4 << 20;

/// A request with its body read.
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Call {
    /// The raw value of `key` in the query: no value here needs escapes.
    pub(crate) fn query(&self, key: &str) -> Option<&str> {
        self.query.split('&').find_map(|pair| pair.split_once('=').filter(|(k, _)| *k == key).map(|(_, v)| v))
    }
}

/// Serves until the listener fails. A request whose body cannot be read is answered with 400.
pub(crate) async fn serve<H, F>(listen: SocketAddr, handler: H) -> Result<()>
where
    H: Fn(Call) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let listener = TcpListener::bind(listen).await.with_context(|| format!("listening on {listen}"))?;
    loop {
        let (stream, _) = listener.accept().await?;
        let _ = stream.set_nodelay(true);
        let handler = handler.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request: Request<hyper::body::Incoming>| {
                let handler = handler.clone();
                async move {
                    let (head, body) = request.into_parts();
                    let Ok(body) = Limited::new(body, MAX_BODY).collect().await else {
                        return Ok(text(StatusCode::BAD_REQUEST, "the body could not be read\n"));
                    };
                    let call = Call {
                        method: head.method,
                        path: head.uri.path().to_owned(),
                        query: head.uri.query().unwrap_or_default().to_owned(),
                        headers: head.headers,
                        body: body.to_bytes(),
                    };
                    Ok::<_, Infallible>(handler(call).await)
                }
            });
            // Nothing needs to be done if the peer breaks the connection.
            let _ = http1::Builder::new()
                .timer(TokioTimer::new())
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

/// A plain-text reply.
pub(crate) fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    typed(status, "text/plain; charset=utf-8", body)
}

/// A JSON reply.
pub(crate) fn json(value: &serde_json::Value) -> Response<Full<Bytes>> {
    typed(StatusCode::OK, "application/json", value.to_string())
}

/// A reply of the content type `kind`, never cached.
pub(crate) fn typed(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// The response of a server.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// A client with keep-alive connections.
#[derive(Clone)]
pub(crate) struct Client(HyperClient<HttpConnector, Full<Bytes>>);

impl Client {
    pub(crate) fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Self(
            HyperClient::builder(TokioExecutor::new())
                .pool_timer(TokioTimer::new())
                .pool_idle_timeout(Duration::from_secs(60))
                .build(connector),
        )
    }

    /// The whole response to a GET within `limit`, whatever its status.
    pub(crate) async fn get(&self, url: &str, limit: Duration) -> Result<Answer> {
        self.send(Method::GET, url, limit).await
    }

    /// The whole response to a POST without a body.
    pub(crate) async fn post(&self, url: &str, limit: Duration) -> Result<Answer> {
        self.send(Method::POST, url, limit).await
    }

    async fn send(&self, method: Method, url: &str, limit: Duration) -> Result<Answer> {
        let request = Request::builder().method(method).uri(url).body(Full::default())?;
        let answer = async {
            let (head, body) = self.0.request(request).await?.into_parts();
            let body = Limited::new(body, MAX_BODY).collect().await.map_err(anyhow::Error::from_boxed)?;
            anyhow::Ok(Answer { status: head.status, headers: head.headers, body: body.to_bytes() })
        };
        tokio::time::timeout(limit, answer)
            .await
            .with_context(|| format!("{url}: no answer within {} ms", limit.as_millis()))?
            .with_context(|| url.to_owned())
    }
}
