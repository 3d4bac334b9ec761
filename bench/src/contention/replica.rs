//! A replica: an HTTP server that burns CPU time for each query, with processor sharing among its queries.
//!
//! One thread serves all queries in turn, a slice each. Like the simulator, it continues to work on a query whose
//! client has given up; otherwise weighted round robin would not fail as it does in the paper. Responses carry the
//! replica's CPU utilisation in ORCA format; the paper's weighted round robin uses this value.

use std::cell::RefCell;
use std::convert::Infallible;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{HeaderValue, Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{LocalSet, spawn_local, yield_now};

use super::burn::{Pace, SLICE, burn, thread_cpu};
use super::scale::{CORE, allocation};
use crate::backends::REPLICA_HEADER;
use crate::sim::scenario::{Sizes, WORK_MS};

/// Header of the report.
const ORCA_HEADER: &str = "endpoint-load-metrics";
/// Interval at which the utilisation is computed.
const SAMPLED: Duration = Duration::from_millis(100);
/// Time constant of the mean utilisation. The agent's rates have the same time constant.
const FADING: Duration = Duration::from_secs(5);
/// Work of a query: a normal distribution whose standard deviation is its mean, truncated at zero (§5).
const SIZES: Sizes = Sizes::Normal { variation: 1.0 };

/// One replica.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Spec {
    pub(super) number: u16,
    pub(super) seed: u64,
}

/// Prints the address and serves until the process ends.
pub(super) fn serve(spec: &Spec) -> Result<()> {
    // The tasks of queries that burn CPU time are always ready to run, so the runtime must look for new data on
    // connections often.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().event_interval(4).build()?;
    LocalSet::new().block_on(&runtime, async {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        println!("{}", listener.local_addr()?);
        std::io::stdout().flush()?;
        let replica = Rc::new(Replica::new(spec));
        spawn_local(measure(replica.clone()));
        loop {
            let (stream, _) = listener.accept().await.context("accepting a connection")?;
            let _ = stream.set_nodelay(true);
            spawn_local(connection(stream, replica.clone()));
        }
    })
}

struct Replica {
    number: HeaderValue,
    state: RefCell<State>,
}

struct State {
    rng: SmallRng,
    /// CPU time spent on the work of queries.
    burnt: Duration,
    /// CPU time that the server itself needed and that has been deducted from the work of queries.
    deducted: Duration,
    /// CPU time used, relative to the allocation: a fading mean.
    utilisation: f64,
}

impl Replica {
    fn new(spec: &Spec) -> Self {
        Self {
            number: spec.number.into(),
            state: RefCell::new(State {
                rng: SmallRng::seed_from_u64(spec.seed),
                burnt: Duration::ZERO,
                deducted: thread_cpu(),
                utilisation: 0.0,
            }),
        }
    }

    /// Does the work of one query.
    async fn work(self: Rc<Self>) {
        let (mut length, speed) = self.state.borrow_mut().draw();
        let mut pace = Pace::from(Instant::now());
        while !length.is_zero() {
            let slice = length.min(SLICE);
            let cpu = slice.mul_f64(speed);
            burn(cpu);
            self.state.borrow_mut().burnt += cpu;
            length -= slice;
            let now = Instant::now();
            let next = pace.next(slice, now);
            if next > now {
                tokio::time::sleep_until(next.into()).await;
            } else {
                yield_now().await;
            }
        }
    }

    fn response(&self) -> Response<Full<Bytes>> {
        let utilisation = self.state.borrow().utilisation;
        let mut response = Response::new(Full::new(Bytes::from_static(b"done\n")));
        response.headers_mut().insert(REPLICA_HEADER, self.number.clone());
        if let Ok(report) = HeaderValue::from_str(&format!("TEXT cpu_utilization={utilisation:.4}")) {
            response.headers_mut().insert(ORCA_HEADER, report);
        }
        response
    }
}

impl State {
    /// Draws a query: its time if nothing holds it up, and its CPU time per unit of that time.
    ///
    /// Deducts the CPU time that the server has spent on connections and timers since the last query, and the time by
    /// which slices overran. So the mean CPU time of a query is that of its work.
    fn draw(&mut self) -> (Duration, f64) {
        let length = Duration::from_secs_f64(SIZES.draw(&mut self.rng) * WORK_MS / 1e3);
        let work = length.mul_f64(CORE);
        let overhead = thread_cpu().saturating_sub(self.burnt + self.deducted).min(work);
        self.deducted += overhead;
        let speed = if work.is_zero() { 0.0 } else { (work - overhead).div_duration_f64(length) };
        (length, speed)
    }
}

/// Updates the utilisation until the process ends.
async fn measure(replica: Rc<Replica>) {
    let (mut at, mut used) = (Instant::now(), thread_cpu());
    loop {
        tokio::time::sleep(SAMPLED).await;
        let (now, used_now) = (Instant::now(), thread_cpu());
        let current = (used_now - used).div_duration_f64(now - at) / allocation();
        let weight = 1.0 - (-(now - at).div_duration_f64(FADING)).exp();
        let utilisation = &mut replica.state.borrow_mut().utilisation;
        *utilisation += (current - *utilisation) * weight;
        (at, used) = (now, used_now);
    }
}

async fn connection(stream: TcpStream, replica: Rc<Replica>) {
    let answer = service_fn(move |_: Request<Incoming>| {
        let replica = replica.clone();
        async move {
            // A task of its own, which goes on if the connection ends. An error would mean that the runtime is ending.
            let _ = spawn_local(replica.clone().work()).await;
            Ok::<_, Infallible>(replica.response())
        }
    });
    // An error concerns one connection only: its client has given up.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::scenario::TRUNCATED_MEAN;

    #[test]
    fn the_servers_own_cpu_time_is_part_of_the_work() {
        let state = Replica::new(&Spec { number: 0, seed: 1 }).state;
        let mut state = state.borrow_mut();
        let before = state.deducted;
        let (mut work, mut length) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..2000 {
            let (drawn, speed) = state.draw();
            work += drawn.mul_f64(speed);
            length += drawn;
        }
        let mean_ms = length.as_secs_f64() * 1e3 / 2000.0;
        assert!((mean_ms / (WORK_MS * TRUNCATED_MEAN) - 1.0).abs() < 0.05, "{mean_ms}");
        let overhead = state.deducted - before;
        assert!(overhead > Duration::ZERO);
        let all = (work + overhead).div_duration_f64(length.mul_f64(CORE));
        assert!((all - 1.0).abs() < 1e-3, "{all}");
    }
}
