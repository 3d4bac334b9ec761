//! The closed-loop generator: each connection sends its next request as soon as the previous one is answered.
//!
//! It saturates its target, which is how throughput and CPU time per request are measured. Its latencies hide queueing
//! and say nothing about tails; for those see `load`. To leave the CPU to what is measured, it parses only the status
//! and length of an answer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::stats::Sample;

/// Time excluded at the start of every round, while connections are made.
const WARM_UP: Duration = Duration::from_millis(200);

/// One round's result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    /// CPU time per request of the processes under measurement.
    pub(crate) cpu_us: f64,
    pub(crate) per_second: f64,
    /// Median time from sending to the end of the answer.
    pub(crate) median_us: f64,
}

/// Runs one round of GETs against `target`. The connections are assigned to `paths` in turn, and each repeats its path.
/// `cpu` returns the CPU time so far of the processes under measurement.
///
/// # Errors
/// If any answer is not a 200 with a length: a number that includes errors would be meaningless.
pub(crate) async fn round(
    target: SocketAddr,
    paths: &[String],
    connections: usize,
    length: Duration,
    cpu: impl Fn() -> Result<Duration>,
) -> Result<Round> {
    let shared = Arc::new(Shared::new());
    let mut tasks = JoinSet::new();
    for path in paths.iter().cycle().take(connections) {
        tasks.spawn(one_connection(target, path.clone(), shared.clone()));
    }
    tokio::time::sleep(WARM_UP).await;
    let (cpu_before, count_before, begin) = (cpu()?, shared.count.load(Ordering::Relaxed), Instant::now());
    shared.record.store(true, Ordering::Relaxed);
    tokio::time::sleep(length).await;
    shared.record.store(false, Ordering::Relaxed);
    let (cpu_after, count, elapsed) = (cpu()?, shared.count.load(Ordering::Relaxed), begin.elapsed());
    shared.stop.store(true, Ordering::Relaxed);
    let mut latencies = Vec::new();
    for outcome in tasks.join_all().await {
        latencies.extend(outcome.with_context(|| format!("requests to {target}"))?);
    }
    let requests = (count - count_before) as f64;
    ensure!(requests > 0.0, "{target} answered nothing");
    Ok(Round {
        cpu_us: cpu_after.saturating_sub(cpu_before).as_secs_f64() * 1e6 / requests,
        per_second: requests / elapsed.as_secs_f64(),
        median_us: crate::stats::median(latencies.iter().map(|(_, latency)| latency.as_secs_f64() * 1e6)),
    })
}

/// Sends requests over `connections` connections for `length`; returns samples whose due time is the time of sending.
///
/// # Errors
/// As for [`round`].
pub(crate) async fn run(target: SocketAddr, connections: usize, length: Duration) -> Result<Vec<Sample>> {
    let shared = Arc::new(Shared { record: AtomicBool::new(true), ..Shared::new() });
    let mut tasks = JoinSet::new();
    for _ in 0..connections {
        tasks.spawn(one_connection(target, "/".to_owned(), shared.clone()));
    }
    tokio::time::sleep(length).await;
    shared.stop.store(true, Ordering::Relaxed);
    let mut samples = Vec::new();
    for outcome in tasks.join_all().await {
        samples.extend(outcome?.into_iter().map(|(due, latency)| Sample {
            due,
            latency: Some(latency),
            status: Some(200),
            ..Sample::default()
        }));
    }
    Ok(samples)
}

/// Sends `requests` in total and waits for the answers.
pub(crate) async fn send(target: SocketAddr, connections: usize, requests: u64) -> Result<()> {
    let shared = Arc::new(Shared { limit: Some(requests), ..Shared::new() });
    let mut tasks = JoinSet::new();
    for _ in 0..connections {
        tasks.spawn(one_connection(target, "/".to_owned(), shared.clone()));
    }
    for outcome in tasks.join_all().await {
        outcome?;
    }
    Ok(())
}

struct Shared {
    origin: Instant,
    count: AtomicU64,
    record: AtomicBool,
    stop: AtomicBool,
    limit: Option<u64>,
}

impl Shared {
    fn new() -> Self {
        Self {
            origin: Instant::now(),
            count: AtomicU64::new(0),
            record: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            limit: None,
        }
    }

    fn continues(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
            && self.limit.is_none_or(|limit| self.count.load(Ordering::Relaxed) < limit)
    }
}

/// A connection that repeats one request.
pub(crate) struct Connection {
    stream: TcpStream,
    request: Vec<u8>,
    buffer: Vec<u8>,
}

impl Connection {
    pub(crate) async fn open(target: SocketAddr, path: &str) -> Result<Self> {
        let stream = TcpStream::connect(target).await?;
        stream.set_nodelay(true)?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: {target}\r\n\r\n").into_bytes();
        Ok(Self { stream, request, buffer: Vec::with_capacity(4096) })
    }

    /// Sends the request and waits for the end of the answer.
    ///
    /// # Errors
    /// If it is not a 200 with a length.
    pub(crate) async fn get(&mut self) -> Result<()> {
        self.stream.write_all(&self.request).await?;
        self.buffer.clear();
        let mut expected = None;
        while expected.is_none_or(|expected| self.buffer.len() < expected) {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                bail!("the connection was closed in the middle of an answer");
            }
            if expected.is_none() {
                expected = answer_length(&self.buffer)?;
            }
        }
        Ok(())
    }
}

/// Returns the send time, counted from [`Shared::origin`], and the latency of each recorded request.
async fn one_connection(
    target: SocketAddr,
    path: String,
    shared: Arc<Shared>,
) -> Result<Vec<(Duration, Duration)>> {
    let mut connection = Connection::open(target, &path).await?;
    let mut latencies = Vec::new();
    while shared.continues() {
        let sent = Instant::now();
        connection.get().await?;
        shared.count.fetch_add(1, Ordering::Relaxed);
        if shared.record.load(Ordering::Relaxed) {
            latencies.push((sent.saturating_duration_since(shared.origin), sent.elapsed()));
        }
    }
    Ok(latencies)
}

/// Length of the whole answer in bytes, once its header is complete.
fn answer_length(buffer: &[u8]) -> Result<Option<usize>> {
    let Some(head) = buffer.windows(4).position(|window| window == b"\r\n\r\n") else { return Ok(None) };
    let text = std::str::from_utf8(&buffer[..head])?;
    let mut lines = text.split("\r\n");
    let status = lines.next().unwrap_or_default();
    ensure!(status.starts_with("HTTP/1.1 200"), "answered {status:?}");
    let length = lines
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .context("an answer without content-length")?;
    Ok(Some(head + 4 + length.1.trim().parse::<usize>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_is_known_once_the_header_is_complete() {
        let whole = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n";
        assert_eq!(answer_length(&whole[..30]).unwrap(), None);
        assert_eq!(answer_length(whole).unwrap(), Some(whole.len()));
        assert!(answer_length(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n").is_err());
        assert!(answer_length(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
    }
}
