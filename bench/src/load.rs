//! The open-loop generator: requests are due at instants fixed in advance, regardless of what happened to earlier ones.
//!
//! Latency is measured from the instant at which a request was *due*, so a stall of the generator, of Envoy or of a
//! replica shows in every request that it delayed. The generator's own lateness is recorded with each sample. Requests
//! go to the targets in rotation or at random ([`Spread`]), over as many keep-alive HTTP/1.1 connections as are needed.
//! `stats` turns the samples into figures.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::ValueEnum;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng};
use rand_distr::{Distribution, Exp1, Zipf};
use tokio::sync::mpsc;

use crate::backends::{CACHE_HEADER, CONTEXT_HEADER, GENERATED_HEADER, KEY_HEADER, REPLICA_HEADER, Tokens};
use crate::stats::Sample;

/// A request that takes longer counts as failed.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The same for a request of known size, which may generate thousands of tokens.
const LONG_TIMEOUT: Duration = Duration::from_secs(60);

/// How requests are spaced, and their rate per second over all targets together.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arrivals {
    Constant(u32),
    Poisson(u32),
}

impl Arrivals {
    pub(crate) fn per_second(self) -> u32 {
        match self {
            Self::Constant(rate) | Self::Poisson(rate) => rate,
        }
    }

    /// Returns an endless sequence of due times, ascending, from the start of the run.
    fn instants(self, mut rng: SmallRng) -> impl Iterator<Item = Duration> {
        let mean = 1.0 / f64::from(self.per_second());
        let mut last = 0.0;
        (0u32..).map(move |number| match self {
            // Multiply instead of adding up, so that rounding errors do not accumulate.
            Self::Constant(_) => Duration::from_secs_f64(mean * f64::from(number)),
            Self::Poisson(_) => {
                let gap: f64 = Exp1.sample(&mut rng);
                last += gap * mean;
                Duration::from_secs_f64(last)
            }
        })
    }
}

/// The keys of requests, which are the numbers from 1 to `count`. They follow Zipf's law: the probability of key k is
/// proportional to k^-exponent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Keys {
    pub(crate) count: u32,
    pub(crate) exponent: f64,
}

/// How requests are spread over several targets.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Spread {
    /// Each target in turn, as from a load balancer in front of them
    InTurn,
    /// A random target for each request, as from clients that do not know each other
    Random,
}

impl Spread {
    /// Returns the target of one request after another, as an index below `targets`.
    fn positions(self, targets: usize, seed: u64) -> impl Iterator<Item = usize> {
        let mut rng = SmallRng::seed_from_u64(seed ^ 2);
        (0..).map(move |number: usize| match self {
            Self::InTurn => number % targets,
            Self::Random => rng.random_range(0..targets),
        })
    }
}

/// The requests of a run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) targets: Vec<SocketAddr>,
    pub(crate) spread: Spread,
    pub(crate) arrivals: Arrivals,
    pub(crate) length: Duration,
    /// Body of every request, sent by POST; if empty, requests are GETs.
    pub(crate) body: Bytes,
    /// Keys of the requests, sent in [`KEY_HEADER`].
    pub(crate) keys: Option<Keys>,
    /// Two runs with the same seed send the same keys at the same instants.
    pub(crate) seed: u64,
}

/// Counters of a run under way, for progress lines.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) answered: AtomicU64,
    pub(crate) failed: AtomicU64,
}

/// A run under way.
pub(crate) struct LoadRun {
    /// The instant at which the first request was due.
    pub(crate) start: Instant,
    pub(crate) progress: Arc<Progress>,
    samples: mpsc::UnboundedReceiver<Sample>,
}

/// A request that is due.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Due {
    /// Index of its target.
    pub(crate) target: usize,
    /// From the start of the run.
    pub(crate) at: Duration,
    pub(crate) key: Option<u32>,
    /// Its size, for replicas with an inference engine.
    pub(crate) tokens: Option<Tokens>,
}

impl LoadRun {
    /// Starts sending at once. Must be called within a tokio runtime.
    pub(crate) fn start(plan: Plan) -> Self {
        let (length, seed) = (plan.length, plan.seed);
        let positions = plan.spread.positions(plan.targets.len(), seed);
        let instants = plan.arrivals.instants(SmallRng::seed_from_u64(seed));
        let mut draw = plan.keys.map(|keys| drawer(keys, SmallRng::seed_from_u64(seed ^ 1)));
        let due = positions.zip(instants).map(move |(target, at)| {
            let key = draw.as_mut().map(|draw| draw());
            Due { target, at, key, tokens: None }
        });
        Self::send(plan.targets, plan.body, due.take_while(move |due| due.at < length))
    }

    /// Starts sending these requests, in order of their due times. Must be called within a tokio runtime.
    pub(crate) fn replay(targets: Vec<SocketAddr>, requests: Vec<Due>) -> Self {
        Self::send(targets, Bytes::new(), requests.into_iter())
    }

    fn send(
        targets: Vec<SocketAddr>,
        body: Bytes,
        requests: impl Iterator<Item = Due> + Send + 'static,
    ) -> Self {
        let start = Instant::now() + Duration::from_millis(20);
        let progress = Arc::new(Progress::default());
        let (sink, samples) = mpsc::unbounded_channel();
        let (pace, due) = mpsc::unbounded_channel();
        // Tokio's timers have a resolution of a millisecond; a separate thread sleeps to within about 0.1 ms.
        std::thread::spawn(move || {
            for request in requests {
                let wait = (start + request.at).saturating_duration_since(Instant::now());
                if !wait.is_zero() {
                    std::thread::sleep(wait);
                }
                if pace.send(request).is_err() {
                    return;
                }
            }
        });
        tokio::spawn(send_all(targets, body, start, due, sink, progress.clone()));
        Self { start, progress, samples }
    }

    /// Waits for the last answer; samples are in the order in which the requests ended.
    pub(crate) async fn finish(mut self) -> Vec<Sample> {
        let mut all = Vec::new();
        while let Some(sample) = self.samples.recv().await {
            all.push(sample);
        }
        all
    }
}

/// Returns a function that draws one key after another, each from 1 to `keys.count`.
pub(crate) fn drawer(keys: Keys, mut rng: SmallRng) -> impl FnMut() -> u32 {
    let zipf = Zipf::new(f64::from(keys.count), keys.exponent);
    move || zipf.as_ref().map_or(0, |zipf| zipf.sample(&mut rng) as u32)
}

type HttpClient = Client<HttpConnector, Full<Bytes>>;

async fn send_all(
    targets: Vec<SocketAddr>,
    body: Bytes,
    start: Instant,
    mut due: mpsc::UnboundedReceiver<Due>,
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
    while let Some(request) = due.recv().await {
        let (client, sink, progress) = (client.clone(), sink.clone(), progress.clone());
        let (uri, body) = (uris[request.target].clone(), body.clone());
        tokio::spawn(async move {
            let late = start.elapsed().saturating_sub(request.at);
            let timeout = if request.tokens.is_some() { LONG_TIMEOUT } else { TIMEOUT };
            let answer = tokio::time::timeout(timeout, one(&client, uri, body, &request)).await;
            let latency = start.elapsed().saturating_sub(request.at);
            let generated = request.tokens.map_or(0, |tokens| tokens.generated);
            let mut sample = Sample { due: request.at, late, generated, ..Sample::default() };
            if let Ok(Some((status, headers, begun))) = answer {
                sample.read(status, &headers);
                if status == StatusCode::OK {
                    sample.latency = Some(latency);
                    sample.first_byte = Some(begun.saturating_duration_since(start + request.at));
                }
            }
            let answered = sample.latency.is_some();
            let counter = if answered { &progress.answered } else { &progress.failed };
            counter.fetch_add(1, Ordering::Relaxed);
            // The receiver is gone only if the run was abandoned.
            let _ = sink.send(sample);
        });
    }
}

impl Sample {
    fn read(&mut self, status: StatusCode, headers: &HeaderMap) {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        self.status = Some(status.as_u16());
        self.replica = text(REPLICA_HEADER).and_then(|number| number.parse().ok());
        self.cache_hit = text(CACHE_HEADER).map(|said| said == "hit");
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

/// Sends one request; returns status, headers and the instant at which these arrived, or `None` if no complete answer
/// arrived.
async fn one(
    client: &HttpClient,
    uri: http::Uri,
    body: Bytes,
    due: &Due,
) -> Option<(StatusCode, HeaderMap, Instant)> {
    let mut request = if body.is_empty() { Request::get(uri) } else { Request::post(uri) };
    if let Some(key) = due.key {
        request = request.header(KEY_HEADER, key);
    }
    if let Some(Tokens { context, generated }) = due.tokens {
        request = request.header(CONTEXT_HEADER, context).header(GENERATED_HEADER, generated);
    }
    let response = client.request(request.body(Full::new(body)).ok()?).await.ok()?;
    let begun = Instant::now();
    let (parts, body) = response.into_parts();
    body.collect().await.ok()?;
    Some((parts.status, parts.headers, begun))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instants(arrivals: Arrivals, seed: u64) -> Vec<Duration> {
        let within = |at: &Duration| *at < Duration::from_secs(20);
        arrivals.instants(SmallRng::seed_from_u64(seed)).take_while(within).collect()
    }

    #[test]
    fn constant_arrivals_are_evenly_spaced() {
        let instants = instants(Arrivals::Constant(1000), 1);
        assert_eq!(instants.len(), 20_000);
        assert_eq!(instants[12_345], Duration::from_millis(12_345));
    }

    #[test]
    fn poisson_arrivals_have_the_rate_and_the_spread() {
        let arrivals = Arrivals::Poisson(800);
        let instants = instants(arrivals, 1);
        let count = instants.len() as f64;
        assert!((count - 16_000.0).abs() < 5.0 * 16_000f64.sqrt(), "{count}");
        let gaps: Vec<f64> = instants.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / count;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / count;
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.1, "an exponential's deviation is its mean");
    }

    #[test]
    fn requests_are_spread_in_turn_or_at_random() {
        let positions = |spread: Spread| spread.positions(4, 1).take(8000).collect::<Vec<_>>();
        assert_eq!(positions(Spread::InTurn)[..6], [0, 1, 2, 3, 0, 1]);
        let random = positions(Spread::Random);
        assert_eq!(random, positions(Spread::Random), "the seed fixes them");
        for target in 0..4 {
            let count = random.iter().filter(|position| **position == target).count() as f64;
            assert!((count - 2000.0).abs() < 5.0 * 1500f64.sqrt(), "{target}: {count}");
        }
    }

    #[test]
    fn the_seed_fixes_the_arrivals() {
        let arrivals = Arrivals::Poisson(800);
        assert_eq!(instants(arrivals, 7), instants(arrivals, 7));
        assert_ne!(instants(arrivals, 7), instants(arrivals, 8));
    }

    #[test]
    fn keys_follow_zipf() {
        let mut draw = drawer(Keys { count: 100, exponent: 1.0 }, SmallRng::seed_from_u64(3));
        let mut counts = [0u32; 101];
        for _ in 0..20_000 {
            counts[draw() as usize] += 1;
        }
        // The harmonic number of 100 is 5.19.
        assert!((f64::from(counts[1]) / 20_000.0 - 1.0 / 5.19).abs() < 0.02, "{}", counts[1]);
        assert!((f64::from(counts[1]) / f64::from(counts[4]) - 4.0).abs() < 0.8, "{}", counts[4]);
    }
}
