//! The load generator: open loop, half of the requests through each Envoy.
//!
//! Requests are due at fixed instants, regardless of what happened to earlier ones. Latency is measured from the due
//! time, so that a stall anywhere shows in every request that it delayed. The generator stops by itself.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use http::StatusCode;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::service::REPLICA_HEADER;
use crate::web::{self, Client};
use crate::windows::{Figures, Outcome, Windows};

/// Port on which the figures are read.
pub(crate) const PORT: u16 = 8090;

/// A request that takes longer counts as failed. Envoy gives up earlier.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The two sides, as the page calls them.
pub(crate) const SIDES: [&str; 2] = ["prequal", "baseline"];

/// Sends a constant rate of requests, half of them through each of two Envoys.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// The Envoy with Prequal, `http://host:port/`
    #[arg(long)]
    prequal: String,
    /// The other Envoy
    #[arg(long)]
    baseline: String,
    /// Requests a second through each Envoy
    #[arg(long, default_value_t = 220, env = "DEMO_RATE", value_parser = clap::value_parser!(u32).range(1..=5000))]
    rate: u32,
    /// Stop sending after this many seconds; restarting the container starts a new run
    #[arg(long, default_value_t = 3600, env = "DEMO_SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Address on which the figures are read
    #[arg(long, default_value_t = SocketAddr::from(([0, 0, 0, 0], PORT)))]
    listen: SocketAddr,
}

struct Load {
    args: Args,
    start: Instant,
    sides: [Mutex<Windows>; 2],
    /// Lateness of the generator itself, almost zero on a quiet machine.
    lag: Mutex<Windows>,
    ended: AtomicBool,
}

pub(crate) async fn run(args: Args) -> Result<()> {
    for url in [&args.prequal, &args.baseline] {
        ensure!(
            url.parse::<http::Uri>().is_ok_and(|uri| uri.host().is_some()),
            "`{url}` is not an http address"
        );
    }
    wait_for(&[&args.prequal, &args.baseline]).await;
    let listen = args.listen;
    let load = Arc::new(Load {
        args,
        start: Instant::now(),
        sides: [Mutex::new(Windows::new()), Mutex::new(Windows::new())],
        lag: Mutex::new(Windows::new()),
        ended: AtomicBool::new(false),
    });
    tokio::spawn(load.clone().send_all());
    web::serve(listen, move |call| {
        let reply = match call.path.as_str() {
            "/healthz" => web::text(StatusCode::OK, "ok\n"),
            "/stats" => web::json(&load.stats(call.query("since").and_then(|s| s.parse().ok()).unwrap_or(0))),
            _ => web::text(StatusCode::NOT_FOUND, "/stats?since=SECOND\n"),
        };
        async move { reply }
    })
    .await
}

/// Waits until each of `urls` has answered 200 once, so that no request is lost while the fleet starts.
async fn wait_for(urls: &[&String]) {
    let client = Client::new();
    for url in urls {
        while !client.get(url, TIMEOUT).await.is_ok_and(|answer| answer.status == StatusCode::OK) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

impl Load {
    async fn send_all(self: Arc<Self>) {
        let clients = [Client::new(), Client::new()];
        let (pace, mut due) = mpsc::unbounded_channel();
        let interval = Duration::from_secs(1) / (2 * self.args.rate);
        let count = self.args.seconds * 2 * u64::from(self.args.rate);
        let load = self.clone();
        let start = self.start;
        // Tokio's timers have a resolution of a millisecond; a separate thread sleeps to within about 0.1 ms.
        std::thread::spawn(move || {
            for number in 0..count {
                let due = start + interval.mul_f64(number as f64);
                let wait = due.saturating_duration_since(Instant::now());
                if !wait.is_zero() {
                    std::thread::sleep(wait);
                }
                load.late(Instant::now().saturating_duration_since(due));
                if pace.send((number, due)).is_err() {
                    return;
                }
            }
        });
        while let Some((number, due)) = due.recv().await {
            let side = (number % 2) as usize;
            let (load, client) = (self.clone(), clients[side].clone());
            tokio::spawn(async move { load.send(side, &client, due).await });
        }
        self.ended.store(true, Ordering::Relaxed);
    }

    async fn send(&self, side: usize, client: &Client, due: Instant) {
        let url = if side == 0 { &self.args.prequal } else { &self.args.baseline };
        let answer = client.get(url, TIMEOUT).await;
        let end = Instant::now();
        let outcome = Outcome {
            latency_us: u32::try_from(end.saturating_duration_since(due).as_micros()).unwrap_or(u32::MAX),
            ok: answer.as_ref().is_ok_and(|answer| answer.status == StatusCode::OK),
            replica: answer.ok().and_then(|answer| {
                answer.headers.get(REPLICA_HEADER).and_then(|value| value.to_str().ok()?.parse().ok())
            }),
        };
        let second = end.saturating_duration_since(self.start).as_secs();
        self.side(side).record(second, outcome);
    }

    fn late(&self, by: Duration) {
        let latency_us = u32::try_from(by.as_micros()).unwrap_or(u32::MAX);
        let second = self.start.elapsed().as_secs();
        self.lag
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .record(second, Outcome { latency_us, ok: true, replica: None });
    }

    fn side(&self, side: usize) -> std::sync::MutexGuard<'_, Windows> {
        self.sides[side].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stats(&self, since: u64) -> Value {
        let now = self.start.elapsed().as_secs();
        let lags = self.lag.lock().unwrap_or_else(PoisonError::into_inner).since(since, now);
        let lag = |second| lags.iter().find(|lag| lag.second == second).map_or(0.0, |lag| lag.p99_ms);
        let sides: serde_json::Map<String, Value> = SIDES
            .iter()
            .enumerate()
            .map(|(side, name)| {
                let mut windows = self.side(side);
                let figures: Vec<Value> = windows
                    .since(since, now)
                    .iter()
                    .map(|figures| window(figures, lag(figures.second)))
                    .collect();
                let value = json!({"ok": windows.ok, "failed": windows.failed, "windows": figures});
                ((*name).to_owned(), value)
            })
            .collect();
        json!({
            "second": now,
            "rate": self.args.rate,
            "ended": self.ended.load(Ordering::Relaxed),
            "sides": sides,
        })
    }
}

fn window(figures: &Figures, lag_p99_ms: f64) -> Value {
    json!({
        "second": figures.second,
        "samples": figures.samples,
        "failed": figures.failed,
        "failed_now": figures.failed_now,
        "p50_ms": figures.p50_ms,
        "p99_ms": figures.p99_ms,
        "p999_ms": figures.p999_ms,
        "answered": figures.answered,
        "lag_p99_ms": lag_p99_ms,
    })
}
