//! Open-loop load: requests at a steady rate, regardless of what happened to earlier ones. Each is recorded when it is
//! sent and again when it has ended. This module decides what counts as an error; `run` decides whose error it is.

mod send;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use prequal_testbed::handle;
use rand::rngs::SmallRng;
use rand::{RngCore as _, SeedableRng as _};

use crate::mix::Kind;
use send::Clients;

/// A request that takes longer than this is an error. The shipped route gives up after 15 s.
const PATIENCE: Duration = Duration::from_secs(20);

/// One request of a user.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) kind: Kind,
    pub(crate) begun: Instant,
    /// `None` while it is in flight.
    pub(crate) ended: Option<Instant>,
    /// The replica that answered, if response headers arrived.
    pub(crate) replica: Option<usize>,
    /// What was wrong, if anything.
    pub(crate) error: Option<String>,
}

/// The outcome of one request.
#[derive(Debug, Default)]
struct Ending {
    replica: Option<usize>,
    error: Option<String>,
}

/// Load in progress, until [`Self::stop`].
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    samples: Arc<Mutex<Vec<Sample>>>,
    in_flight: Arc<AtomicUsize>,
    pace: Option<JoinHandle<()>>,
}

impl Load {
    /// Sends `rate` requests a second to `addr`.
    pub(crate) fn start(addr: SocketAddr, rate: u32, seed: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let samples = Arc::new(Mutex::new(Vec::new()));
        let in_flight = Arc::new(AtomicUsize::new(0));
        let (stopped, recorded, counted) = (Arc::clone(&stop), Arc::clone(&samples), Arc::clone(&in_flight));
        let pace = std::thread::spawn(move || {
            let clients = Clients::new(addr);
            let mut rng = SmallRng::seed_from_u64(seed);
            let mut due = Instant::now();
            while !stopped.load(Ordering::Relaxed) {
                let now = Instant::now();
                // After a stall of the machine, only a limited number of missed requests is made up for, to avoid a
                // flood.
                due = (due + Duration::from_secs(1) / rate).max(now.checked_sub(CATCH_UP).unwrap_or(now));
                std::thread::sleep(due.saturating_duration_since(now));
                send_one(&clients, Kind::of(rng.next_u32()), &recorded, &counted);
            }
        });
        Self { stop, samples, in_flight, pace: Some(pace) }
    }

    /// All requests so far.
    pub(crate) fn samples(&self) -> MutexGuard<'_, Vec<Sample>> {
        lock(&self.samples)
    }

    /// Stops sending, waits for requests in flight, and returns all samples.
    pub(crate) fn stop(mut self) -> Vec<Sample> {
        self.end_pace();
        let limit = Instant::now() + PATIENCE + Duration::from_secs(1);
        while self.in_flight.load(Ordering::Acquire) > 0 && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(10));
        }
        std::mem::take(&mut *self.samples())
    }

    fn end_pace(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The panic hook has printed any panic.
        let _ = self.pace.take().map(JoinHandle::join);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.end_pace();
    }
}

fn send_one(clients: &Clients, kind: Kind, samples: &Arc<Mutex<Vec<Sample>>>, in_flight: &Arc<AtomicUsize>) {
    let (clients, samples, in_flight) = (clients.clone(), Arc::clone(samples), Arc::clone(in_flight));
    let index = {
        let mut samples = lock(&samples);
        samples.push(Sample { kind, begun: Instant::now(), ended: None, replica: None, error: None });
        samples.len() - 1
    };
    in_flight.fetch_add(1, Ordering::Release);
    handle().spawn(async move {
        let mut ending = Ending::default();
        if tokio::time::timeout(PATIENCE, send::send(kind, &clients, &mut ending)).await.is_err() {
            ending.error = Some(format!("no end within {} s", PATIENCE.as_secs()));
        }
        // The sample is gone if the load was stopped without waiting for it.
        if let Some(sample) = lock(&samples).get_mut(index) {
            sample.ended = Some(Instant::now());
            sample.replica = ending.replica;
            sample.error = ending.error;
        }
        in_flight.fetch_sub(1, Ordering::Release);
    });
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Missed requests that were due longer ago than this are not made up for.
const CATCH_UP: Duration = Duration::from_millis(100);
