//! A small proxy with linkerd's policy: the less loaded of two endpoints drawn at random, by peak EWMA.
//!
//! The policy is `tower`'s, which linkerd's proxy uses too. All threads share one balancer, as in linkerd.

use std::convert::Infallible;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{self, Poll, ready};
use std::time::Duration;

use anyhow::{Context, Result};
use bytes::Bytes;
use http::uri::{Authority, Scheme};
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty, combinators::BoxBody};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, ResponseFuture};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpListener, TcpStream};
use tower::balance::p2c::Balance;
use tower::discover::ServiceList;
use tower::load::{PeakEwmaDiscover, TrackCompletion};
use tower::{BoxError, Service};

use super::Setup;

/// Latency that an endpoint without samples is assumed to have, and the time constant of the average:
/// `EWMA_DEFAULT_RTT` and `EWMA_DECAY` of linkerd2-proxy (`linkerd/app/outbound/src/lib.rs`; later `DEFAULT_EWMA`).
const DEFAULT_RTT: Duration = Duration::from_millis(30);
const DECAY: Duration = Duration::from_secs(10);

/// Arguments of the hidden command `p2c`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// The address for requests
    #[arg(long)]
    listen: SocketAddr,
    /// Number of threads
    #[arg(long)]
    workers: usize,
    /// The addresses to which requests are forwarded
    #[arg(required = true)]
    replicas: Vec<SocketAddr>,
}

/// A command that runs this program as the proxy.
pub(super) fn command(setup: &Setup) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("p2c").args(["--listen", &setup.listen.to_string()]);
    command.args(["--workers", &setup.workers.to_string()]);
    command.args(setup.replicas.iter().map(ToString::to_string));
    Ok(command)
}

/// Name and version of the library.
pub(super) fn version() -> String {
    let lock = include_str!("../../../Cargo.lock");
    let (_, rest) = lock.split_once("name = \"tower\"\nversion = \"").unwrap_or_default();
    format!("tower {}", rest.split('"').next().unwrap_or_default())
}

/// Serves until the process is killed.
pub(crate) fn serve(args: &Args) -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(args.workers).enable_all().build()?;
    // The main thread is not one of the workers.
    runtime.block_on(async { tokio::spawn(accept(args.clone())).await? })
}

async fn accept(args: Args) -> Result<()> {
    let listener = TcpListener::bind(args.listen).await.with_context(|| format!("{}", args.listen))?;
    let balancer = Arc::new(Mutex::new(balancer(&args.replicas)?));
    loop {
        let (stream, _) = listener.accept().await.context("accepting a connection")?;
        tokio::spawn(connection(stream, balancer.clone()));
    }
}

type TowerBalancer =
    Balance<Pin<Box<PeakEwmaDiscover<ServiceList<Vec<Endpoint>>, UntilFirstData>>>, Request<Incoming>>;

fn balancer(replicas: &[SocketAddr]) -> Result<TowerBalancer> {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client = Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(usize::MAX)
        .pool_idle_timeout(None)
        .retry_canceled_requests(false)
        .build(connector);
    let endpoints = replicas.iter().map(|replica| {
        let authority = replica.to_string().parse().context("an address is an authority")?;
        Ok(Endpoint { client: client.clone(), authority })
    });
    let endpoints = ServiceList::new::<Request<Incoming>>(endpoints.collect::<Result<Vec<_>>>()?);
    let discover = PeakEwmaDiscover::new(endpoints, DEFAULT_RTT, DECAY, UntilFirstData);
    Ok(Balance::new(Box::pin(discover)))
}

async fn connection(stream: TcpStream, balancer: Arc<Mutex<TowerBalancer>>) {
    // A connection without this option still serves.
    let _ = stream.set_nodelay(true);
    let service = service_fn(|request| {
        let balancer = balancer.clone();
        async move { Ok::<_, Infallible>(forward(&balancer, request).await) }
    });
    // An error means that the client is gone.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

/// Forwards one request; answers 502 if its endpoint does not reply.
async fn forward(
    balancer: &Mutex<TowerBalancer>,
    request: Request<Incoming>,
) -> Response<BoxBody<Bytes, hyper::Error>> {
    let response = match choose(balancer, request).await {
        Ok(response) => response.await,
        Err(error) => Err(error),
    };
    match response {
        Ok(response) => response.map(BodyExt::boxed),
        Err(error) => {
            eprintln!("a request failed: {error}");
            let mut response = Response::new(Empty::new().map_err(|never| match never {}).boxed());
            *response.status_mut() = StatusCode::BAD_GATEWAY;
            response
        }
    }
}

/// Chooses the endpoint and starts the request, under one lock.
async fn choose(
    balancer: &Mutex<TowerBalancer>,
    request: Request<Incoming>,
) -> Result<<TowerBalancer as Service<Request<Incoming>>>::Future, BoxError> {
    let mut request = Some(request);
    poll_fn(|context| {
        let mut balancer = balancer.lock().unwrap_or_else(PoisonError::into_inner);
        ready!(balancer.poll_ready(context))?;
        let request = request.take().ok_or("polled after it was ready")?;
        Poll::Ready(Ok(balancer.call(request)))
    })
    .await
}

/// One replica.
#[derive(Clone)]
struct Endpoint {
    client: Client<HttpConnector, Incoming>,
    authority: Authority,
}

impl Service<Request<Incoming>> for Endpoint {
    type Response = Response<Incoming>;
    type Error = hyper_util::client::legacy::Error;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, _: &mut task::Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Incoming>) -> Self::Future {
        request.headers_mut().remove(header::CONNECTION);
        let mut parts = std::mem::take(request.uri_mut()).into_parts();
        parts.scheme = Some(Scheme::HTTP);
        parts.authority = Some(self.authority.clone());
        // The client refuses a request that lacks scheme, authority or path.
        *request.uri_mut() = parts.try_into().unwrap_or_default();
        self.client.request(request)
    }
}

/// Counts a request as pending until the first data of its response, as linkerd2-proxy does
/// (`hyper-balance/src/lib.rs`, `PendingUntilFirstData`).
#[derive(Clone)]
struct UntilFirstData;

impl<H> TrackCompletion<H, Response<Incoming>> for UntilFirstData {
    type Output = Response<Tracked<H>>;

    fn track_completion(&self, handle: H, response: Response<Incoming>) -> Self::Output {
        response.map(|body| Tracked { handle: (!body.is_end_stream()).then_some(handle), body })
    }
}

/// A response body with the handle that counts its request as pending.
struct Tracked<H> {
    handle: Option<H>,
    body: Incoming,
}

impl<H: Unpin> Body for Tracked<H> {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut task::Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        self.handle = None;
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_version_is_that_of_the_lock_file() {
        let version = super::version();
        assert!(version.starts_with("tower 0."), "{version}");
    }
}
