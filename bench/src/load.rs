//! The open-loop generator: requests are due at fixed instants, whatever became of the ones before.
//!
//! Latency counts from the instant a request was *due*, so a stall of the generator, of Envoy or of a
//! replica shows in every request that it delayed. Requests go to the targets in turn, over as many
//! keep-alive HTTP/1.1 connections as are needed. What the samples mean is decided in `stats`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::sync::mpsc;

use crate::backends::REPLICA_HEADER;
use crate::stats::Sample;

/// A request that took longer has failed.
const TIMEOUT: Duration = Duration::from_secs(10);

/// What to send.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) targets: Vec<SocketAddr>,
    /// Over all targets together.
    pub(crate) per_second: u32,
    pub(crate) length: Duration,
    /// Sent with every request, as a POST; empty: a GET.
    pub(crate) body: Bytes,
}

/// Counters of a run under way, for progress lines.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) answered: AtomicU64,
    pub(crate) failed: AtomicU64,
}

/// A run under way.
pub(crate) struct Run {
    /// The instant at which the first request was due.
    pub(crate) start: Instant,
    pub(crate) progress: Arc<Progress>,
    samples: mpsc::UnboundedReceiver<Sample>,
}

impl Run {
    /// Starts sending at once. Must be called within a tokio runtime.
    pub(crate) fn start(plan: Plan) -> Self {
        let start = Instant::now() + Duration::from_millis(20);
        let progress = Arc::new(Progress::default());
        let (sink, samples) = mpsc::unbounded_channel();
        let (pace, due) = mpsc::unbounded_channel();
        let interval = Duration::from_secs(1) / plan.per_second;
        let count = (plan.length.as_secs_f64() * f64::from(plan.per_second)).round() as u32;

        // Tokio's timers are a millisecond coarse; a thread of its own sleeps to within some 0.1 ms.
        std::thread::spawn(move || {
            for number in 0..count {
                let due = interval * number;
                let wait = (start + due).saturating_duration_since(Instant::now());
                if !wait.is_zero() {
                    std::thread::sleep(wait);
                }
                if pace.send((number as usize, due)).is_err() {
                    return;
                }
            }
        });
        tokio::spawn(send_all(plan.targets, plan.body, start, due, sink, progress.clone()));
        Self { start, progress, samples }
    }

    /// Waits for the last answer; the samples are in the order in which the requests ended.
    pub(crate) async fn finish(mut self) -> Vec<Sample> {
        let mut all = Vec::new();
        while let Some(sample) = self.samples.recv().await {
            all.push(sample);
        }
        all
    }
}

type HttpClient = Client<HttpConnector, Full<Bytes>>;

async fn send_all(
    targets: Vec<SocketAddr>,
    body: Bytes,
    start: Instant,
    mut due: mpsc::UnboundedReceiver<(usize, Duration)>,
    sink: mpsc::UnboundedSender<Sample>,
    progress: Arc<Progress>,
) {
    let client = client();
    let uris: Vec<http::Uri> = targets
        .iter()
        .map(|target| {
            http::Uri::builder()
                .scheme("http")
                .authority(target.to_string())
                .path_and_query("/")
                .build()
                .unwrap_or_else(|error| unreachable!("a socket address is an authority: {error}"))
        })
        .collect();
    while let Some((number, due)) = due.recv().await {
        let (client, sink, progress) = (client.clone(), sink.clone(), progress.clone());
        let (uri, body) = (uris[number % uris.len()].clone(), body.clone());
        tokio::spawn(async move {
            let answer = tokio::time::timeout(TIMEOUT, one(&client, uri, body)).await.unwrap_or(Err(()));
            let latency = Instant::now().saturating_duration_since(start + due);
            let sample = match answer {
                Ok(replica) => Sample { due, latency: Some(latency), replica },
                Err(()) => Sample { due, latency: None, replica: None },
            };
            let counter = if answer.is_ok() { &progress.answered } else { &progress.failed };
            counter.fetch_add(1, Ordering::Relaxed);
            // The receiver is gone only when the run was given up.
            let _ = sink.send(sample);
        });
    }
}

fn client() -> HttpClient {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(Duration::from_secs(60))
        .pool_max_idle_per_host(usize::MAX)
        .build(connector)
}

/// Sends one request; anything but a whole 200 is an error.
async fn one(client: &HttpClient, uri: http::Uri, body: Bytes) -> Result<Option<u16>, ()> {
    let request = if body.is_empty() { Request::get(uri) } else { Request::post(uri) };
    let request = request.body(Full::new(body)).map_err(drop)?;
    let response = client.request(request).await.map_err(drop)?;
    let (parts, body) = response.into_parts();
    body.collect().await.map_err(drop)?;
    if parts.status != http::StatusCode::OK {
        return Err(());
    }
    Ok(parts.headers.get(REPLICA_HEADER).and_then(|v| v.to_str().ok()).and_then(|v| v.parse().ok()))
}
