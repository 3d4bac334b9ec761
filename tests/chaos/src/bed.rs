//! The system under test: backends and agents as real processes, behind a real Envoy with the shipped configuration.
//! Everything that ends a process records that in [`Harm`], which finds the requests that the process was working on.
//! `faults` decides what happens when.

mod backend;
mod edge;
mod pod;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use prequal_testbed::{Client, target_dir};

pub(crate) use edge::{CLUSTER, Edge, Module, Open, PROBE_CLUSTER};
pub(crate) use pod::Pod;

use crate::cgroup::Tight;
use crate::harm::Harm;
use crate::mix;

/// Number of replicas of the service.
pub(crate) const REPLICAS: usize = 8;

/// Everything under test, and what the faults have left behind.
pub(crate) struct Bed {
    pub(crate) pods: Vec<Pod>,
    edge: Arc<Mutex<Edge>>,
    pub(crate) harm: Harm,
    /// Processes that faults have started and that are not part of the service.
    pub(crate) hogs: Mutex<Vec<std::process::Child>>,
    /// The control group in which a fault lets memory run out.
    pub(crate) tight: Mutex<Option<Tight>>,
    /// The file that holds the offset of Envoy's clock, if the clock can be stepped.
    pub(crate) clock: Option<PathBuf>,
    pub(crate) module: Module,
}

impl Bed {
    /// Starts everything and sends requests until each replica serves and is known to the filter.
    pub(crate) fn start(clock: Option<PathBuf>, module: Module) -> Result<Self> {
        let pods = (0..REPLICAS).map(Pod::start).collect::<Result<Vec<_>>>()?;
        let addrs: Vec<SocketAddr> = pods.iter().map(Pod::addr).collect();
        let edge = Arc::new(Mutex::new(Edge::start(&addrs, module)?));
        let bed = Self {
            pods,
            edge,
            harm: Harm::default(),
            hogs: Mutex::default(),
            tight: Mutex::default(),
            clock,
            module,
        };
        bed.warm()?;
        Ok(bed)
    }

    /// The Envoy that takes new connections.
    pub(crate) fn edge(&self) -> MutexGuard<'_, Edge> {
        self.edge.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts another Envoy that takes over; returns when the old one has ended.
    pub(crate) fn hot_restart(&self) -> Result<()> {
        let edge = Arc::clone(&self.edge);
        on_lasting_thread(move || edge.lock().unwrap_or_else(PoisonError::into_inner).hot_restart())?
    }

    /// The pods of these replicas.
    pub(crate) fn of<'a>(&'a self, replicas: &'a [usize]) -> impl Iterator<Item = &'a Pod> {
        replicas.iter().map(|replica| &self.pods[*replica])
    }

    /// Ends the processes that faults have left running besides the service.
    pub(crate) fn end_hogs(&self) {
        for mut hog in self.hogs.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = hog.kill();
            let _ = hog.wait();
        }
    }

    /// The requests and probes that the filter has begun and not ended; constant at rest, except for idle probes.
    pub(crate) fn open(&self) -> Result<Open> {
        self.edge().open()
    }

    /// Returns the counters that do not balance although no request is in flight. Polls until all balance or `limit`
    /// has passed. With `ejected`, also requires that no replica is ejected. That holds only once all replicas have
    /// their traffic back. The filter's counters are compared with those `before`, unless the filter or Envoy was
    /// killed: what they had counted is then lost.
    pub(crate) fn unbalanced(&self, limit: Duration, ejected: bool, before: Open) -> Result<Vec<String>> {
        let before = (!self.harm.of_proxy()).then_some(before);
        let start = Instant::now();
        loop {
            let mut found = Vec::new();
            for pod in &self.pods {
                found.extend(pod.unbalanced()?);
            }
            found.extend(self.edge().unbalanced(ejected, before)?);
            if found.is_empty() || start.elapsed() > limit {
                return Ok(found);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The failure counts of every process since its start, to explain a miss.
    pub(crate) fn evidence(&self) -> Vec<String> {
        let mut found = self.edge().evidence();
        found.extend(self.pods.iter().flat_map(Pod::evidence));
        found
    }

    fn warm(&self) -> Result<()> {
        let addr = self.edge().addr();
        let start = Instant::now();
        loop {
            Client::new(addr).burst(50, 4, |_| prequal_testbed::Request::get(mix::PLAIN));
            if self.edge().members()? >= REPLICAS as u64 {
                return Ok(());
            }
            ensure!(start.elapsed() < Duration::from_secs(20), "the filter does not know all replicas");
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.end_hogs();
    }
}

/// Runs `work` on a thread that lives as long as this process, because an Envoy ends with the thread that started it.
fn on_lasting_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    static THREAD: OnceLock<Sender<Box<dyn FnOnce() + Send>>> = OnceLock::new();
    let thread = THREAD.get_or_init(|| {
        let (orders, ordered) = channel::<Box<dyn FnOnce() + Send>>();
        std::thread::spawn(move || ordered.into_iter().for_each(|work| work()));
        orders
    });
    let (done, result) = channel();
    // The receiver waits below.
    thread.send(Box::new(move || drop(done.send(work())))).ok().context("the lasting thread has ended")?;
    result.recv().context("it panicked, see above")
}

/// The module that can crash. It stores its data under another version, as another release would.
pub(crate) fn crashing_module() -> PathBuf {
    std::env::var_os("PREQUAL_DIST_TEST")
        .map_or_else(|| target_dir().join("dist-test"), PathBuf::from)
        .join("prequal_filter_crash.wasm")
}
