//! The sample service: some CPU, some waiting, and the faults that happen inside a program.
//!
//! Every fault has an end time: the service heals itself, even if the program that switched the fault on is gone.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::Bytes;
use http::{Method, Response, StatusCode};
use http_body_util::Full;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use rand_distr::{Distribution as _, Exp1};

use crate::web::{self, Call};

/// Header with the number of the replica that answered.
pub(crate) const REPLICA_HEADER: &str = "x-demo-replica";

/// Port on which faults are switched on.
pub(crate) const ADMIN_PORT: u16 = 8082;

/// Longest fault, seconds.
pub(crate) const MAX_SECONDS: u64 = 600;

/// A sample service: waits, computes, answers; faults are switched on at its admin port.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Number of this replica, 1 to 99
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=99))]
    replica: u16,
    /// Address for requests
    #[arg(long, default_value = "127.0.0.1:8081")]
    listen: SocketAddr,
    /// Address of the control port, which switches faults on
    #[arg(long, default_value_t = SocketAddr::from(([0, 0, 0, 0], ADMIN_PORT)))]
    admin: SocketAddr,
    /// Minimum wait of every request, ms; an exponentially distributed time with half of this as its mean is added
    #[arg(long, default_value_t = 14, value_parser = clap::value_parser!(u64).range(0..=10_000))]
    wait_ms: u64,
    /// Steps of computation in every request; a step takes about a nanosecond on an idle core
    #[arg(long, default_value_t = 300_000, value_parser = clap::value_parser!(u32).range(0..=1_000_000_000))]
    work: u32,
}

/// The faults that are active. Each ends by itself.
#[derive(Debug, Default)]
struct Faults {
    slow: Option<(f64, Instant)>,
    sinkhole: Option<(f64, Instant)>,
    hang: Option<Instant>,
}

impl Faults {
    fn slow(&self, now: Instant) -> f64 {
        self.slow.filter(|(_, end)| now < *end).map_or(1.0, |(factor, _)| factor)
    }

    fn sinkhole(&self, now: Instant) -> f64 {
        self.sinkhole.filter(|(_, end)| now < *end).map_or(0.0, |(share, _)| share)
    }

    fn hang(&self, now: Instant) -> Option<Instant> {
        self.hang.filter(|end| now < *end)
    }
}

struct Service {
    args: Args,
    faults: Mutex<Faults>,
    rng: Mutex<SmallRng>,
}

pub(crate) async fn run(args: Args) -> Result<()> {
    let seed = std::time::UNIX_EPOCH.elapsed()?.as_nanos() as u64 ^ u64::from(args.replica);
    let (listen, admin) = (args.listen, args.admin);
    let service =
        Arc::new(Service { args, faults: Mutex::default(), rng: Mutex::new(SmallRng::seed_from_u64(seed)) });
    let serving = service.clone();
    let requests = web::serve(listen, move |_| {
        let service = serving.clone();
        async move { service.answer().await }
    });
    let orders = web::serve(admin, move |call| {
        let reply = service.order(&call);
        async move { reply }
    });
    tokio::try_join!(requests, orders)?;
    Ok(())
}

impl Service {
    async fn answer(&self) -> Response<Full<Bytes>> {
        let now = Instant::now();
        let (slow, sinkhole) = {
            let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
            (faults.slow(now), faults.sinkhole(now))
        };
        let (wait, drawn) = {
            let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
            let extra: f64 = Exp1.sample(&mut *rng);
            (self.args.wait_ms as f64 * (1.0 + extra / 2.0) * slow, rng.random::<f64>())
        };
        let mut response = if drawn < sinkhole {
            web::text(StatusCode::SERVICE_UNAVAILABLE, "sinkhole\n")
        } else {
            tokio::time::sleep(Duration::from_secs_f64(wait / 1e3)).await;
            compute(self.args.work);
            web::text(StatusCode::OK, "ok\n")
        };
        // This comes last, so that a hang also affects the requests that were in flight when it began.
        while let Some(end) = self.hanging() {
            tokio::time::sleep_until(end.into()).await;
        }
        response.headers_mut().insert(REPLICA_HEADER, self.args.replica.into());
        response
    }

    fn hanging(&self) -> Option<Instant> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).hang(Instant::now())
    }

    /// `GET /healthz`; `POST /fault/slow?factor=10&seconds=20`, `/fault/sinkhole?share=0.5&seconds=20`,
    /// `/fault/hang?seconds=20`, `/fault/crash`, `/heal`.
    fn order(&self, call: &Call) -> Response<Full<Bytes>> {
        if call.method == Method::GET && call.path == "/healthz" {
            return web::text(StatusCode::OK, "ok\n");
        }
        if call.method != Method::POST {
            return web::text(StatusCode::METHOD_NOT_ALLOWED, "POST /fault/...\n");
        }
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        let end = seconds(call).map(|seconds| Instant::now() + Duration::from_secs(seconds));
        match (call.path.as_str(), end) {
            ("/heal", _) => *faults = Faults::default(),
            // As after a bug: requests in flight get no answer, and nothing is cleaned up. Docker restarts the service.
            ("/fault/crash", _) => std::process::exit(101),
            ("/fault/hang", Ok(end)) => faults.hang = Some(end),
            ("/fault/slow", Ok(end)) => match number(call, "factor", 1.0, 1000.0) {
                Ok(factor) => faults.slow = Some((factor, end)),
                Err(why) => return web::text(StatusCode::BAD_REQUEST, why),
            },
            ("/fault/sinkhole", Ok(end)) => match number(call, "share", 0.0, 1.0) {
                Ok(share) => faults.sinkhole = Some((share, end)),
                Err(why) => return web::text(StatusCode::BAD_REQUEST, why),
            },
            ("/fault/hang" | "/fault/slow" | "/fault/sinkhole", Err(why)) => {
                return web::text(StatusCode::BAD_REQUEST, why);
            }
            _ => return web::text(StatusCode::NOT_FOUND, "no such fault\n"),
        }
        web::text(StatusCode::OK, "ok\n")
    }
}

/// The duration of a fault, from the query.
pub(crate) fn seconds(call: &Call) -> Result<u64, String> {
    call.query("seconds")
        .and_then(|text| text.parse().ok())
        .filter(|seconds| (1..=MAX_SECONDS).contains(seconds))
        .ok_or_else(|| format!("`seconds` must be 1 to {MAX_SECONDS}\n"))
}

fn number(call: &Call, key: &str, least: f64, most: f64) -> Result<f64, String> {
    call.query(key)
        .and_then(|text| text.parse().ok())
        .filter(|value| (least..=most).contains(value))
        .ok_or_else(|| format!("`{key}` must be {least} to {most}\n"))
}

/// A fixed amount of work, so that it takes longer if an antagonist uses the core.
pub(crate) fn compute(steps: u32) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..steps {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
    }
    std::hint::black_box(state);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service() -> Service {
        Service {
            args: Args {
                replica: 3,
                listen: SocketAddr::from(([127, 0, 0, 1], 0)),
                admin: SocketAddr::from(([127, 0, 0, 1], 0)),
                wait_ms: 0,
                work: 0,
            },
            faults: Mutex::default(),
            rng: Mutex::new(SmallRng::seed_from_u64(1)),
        }
    }

    fn post(path_and_query: &str) -> Call {
        let (path, query) = path_and_query.split_once('?').unwrap_or((path_and_query, ""));
        Call {
            method: Method::POST,
            path: path.to_owned(),
            query: query.to_owned(),
            headers: http::HeaderMap::new(),
            body: Bytes::new(),
        }
    }

    #[tokio::test]
    async fn a_sinkhole_fails_its_share_at_once_and_heals() {
        let service = service();
        assert_eq!(service.order(&post("/fault/sinkhole?share=0.5&seconds=600")).status(), 200);
        let mut failed = 0;
        for _ in 0..1000 {
            failed += u32::from(service.answer().await.status() == 503);
        }
        assert!((400..600).contains(&failed), "{failed} of 1000");
        assert_eq!(service.order(&post("/heal")).status(), 200);
        let healed = service.answer().await;
        assert_eq!(healed.status(), 200);
        assert_eq!(healed.headers()[REPLICA_HEADER], "3");
    }

    #[tokio::test]
    async fn a_fault_ends_by_itself() {
        let service = service();
        assert_eq!(service.order(&post("/fault/hang?seconds=1")).status(), 200);
        let hung = tokio::time::timeout(Duration::from_millis(50), service.answer()).await;
        assert!(hung.is_err(), "answered although it hangs");
        let faults = service.faults.lock().unwrap();
        let later = Instant::now() + Duration::from_secs(2);
        assert_eq!(faults.hang(later), None);
    }

    #[test]
    fn bad_orders_are_refused() {
        let service = service();
        for (order, status) in [
            ("/fault/slow?factor=10&seconds=5", 200),
            ("/fault/slow?factor=0&seconds=5", 400),
            ("/fault/slow?factor=NaN&seconds=5", 400),
            ("/fault/slow?factor=10", 400),
            ("/fault/slow?factor=10&seconds=601", 400),
            ("/fault/sinkhole?share=1.5&seconds=5", 400),
            ("/fault/hang?seconds=0", 400),
            ("/fault/flood?seconds=5", 404),
        ] {
            assert_eq!(service.order(&post(order)).status(), status, "{order}");
        }
    }
}
