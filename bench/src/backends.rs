//! The replicas of most benchmarks, in a child process so that their CPU time is counted separately.
//!
//! This file defines what a replica can be ([`ReplicaSpec`], [`Change`]); `backends/replica.rs` implements its
//! behaviour. Parent and child communicate over the child's standard streams, one JSON line per message: first the
//! whole [`Fleet`], then one [`Change`] at a time. The child ends when its standard input is closed, and therefore also
//! when the parent is killed.

mod clock;
mod cores;
mod engine;
mod inference;
mod replica;
mod times;

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

pub(crate) use engine::EngineSpec;
pub(crate) use replica::serve;
pub(crate) use times::Times;

/// Response header with the number of the replica that answered, even if it rejected the request.
pub(crate) const REPLICA_HEADER: &str = "x-bench-replica";
/// Request header with the request's key; replicas with a cache look it up.
pub(crate) const KEY_HEADER: &str = "x-bench-key";
/// Response header of a replica with a cache: `hit` if it had the key, else `miss`.
pub(crate) const CACHE_HEADER: &str = "x-bench-cache";

/// Request header with the number of tokens in the request's context; read by replicas with an inference engine.
pub(crate) const CONTEXT_HEADER: &str = "x-bench-context-tokens";
/// Request header with the number of tokens to generate; read by replicas with an inference engine.
pub(crate) const GENERATED_HEADER: &str = "x-bench-generated-tokens";

/// The size of a request to an inference service, tokens.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Tokens {
    pub(crate) context: u32,
    pub(crate) generated: u32,
}

impl Tokens {
    pub(crate) fn total(self) -> u32 {
        self.context.saturating_add(self.generated)
    }
}

/// How an inference service streams its tokens.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize, ValueEnum)]
pub(crate) enum Answers {
    /// Server-sent events, as vLLM and other servers with OpenAI's interface do
    EventStream,
    /// The same chunks as plain text
    Plain,
}

/// How a replica spends its time on a request.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) enum Service {
    /// Sleeps.
    Sleep { ms: u64 },
    /// Sleeps for a normally distributed time, never below zero.
    Normal { mean_ms: f64, sd_ms: f64 },
    /// Uses this much CPU time on its own thread, one request after the other.
    Cpu { us: u64 },
    /// Sleeps `hit_ms` if the request's key is among the `entries` most recently used keys, else `miss_ms`.
    Cache { entries: usize, hit_ms: u64, miss_ms: u64 },
    /// Serves `slots` requests at a time, each for a time drawn from a seeded generator. Any number of requests can
    /// wait, and they are served in order of arrival. Accurate to about 0.1 ms; a late reply does not delay other
    /// requests.
    Queue { slots: usize, times: Times },
    /// Serves all requests at once. Each needs a core for a time drawn from a seeded generator. If there are more
    /// requests than cores, all slow down equally. Uses no CPU time, and is as accurate as `Queue`.
    Cores { cores: usize, times: Times },
    /// Serves requests by continuous batching and streams the answers. Cannot be changed at run time.
    Inference { engine: EngineSpec, answers: Answers },
    /// Answers at once with almost no CPU time and a made-up load report: the cheapest upstream that the filter
    /// accepts. Cannot be changed at run time.
    Trivial,
}

/// Number of requests that a replica serves at a time, and number that may wait. Further requests get a 503 at once.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Slots {
    pub(crate) serving: usize,
    pub(crate) waiting: usize,
}

/// One replica as it starts.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct ReplicaSpec {
    pub(crate) service: Service,
    /// `None`: no limit.
    pub(crate) slots: Option<Slots>,
    /// Weight of the endpoint in Envoy's configuration, 1 to 128. Load balancers other than Envoy ignore it.
    pub(crate) weight: u32,
}

impl ReplicaSpec {
    pub(crate) fn new(service: Service) -> Self {
        Self { service, slots: None, weight: 1 }
    }

    /// A replica that sleeps `ms`.
    pub(crate) fn sleeping(ms: u64) -> Self {
        Self::new(Service::Sleep { ms })
    }

    pub(crate) fn with_slots(self, serving: usize, waiting: usize) -> Self {
        Self { slots: Some(Slots { serving, waiting }), ..self }
    }

    pub(crate) fn with_weight(self, weight: u32) -> Self {
        Self { weight, ..self }
    }
}

/// All replicas, numbered from 0.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Fleet(pub(crate) Vec<ReplicaSpec>);

impl Fleet {
    /// `count` identical replicas.
    pub(crate) fn of(count: usize, replica: ReplicaSpec) -> Self {
        Self::default().and(count, replica)
    }

    /// Adds `count` more replicas.
    pub(crate) fn and(mut self, count: usize, replica: ReplicaSpec) -> Self {
        self.0.extend(std::iter::repeat_n(replica, count));
        self
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// A change at run time, effective from the next request.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) enum Change {
    Service(Service),
    /// Answers this share of the requests with a 503 at once.
    Failing(f64),
    /// `true` refuses connections and breaks off existing ones; `false` accepts connections again.
    Refusing(bool),
}

/// A change and its replica, as the child reads it.
#[derive(Debug, Deserialize, Serialize)]
struct ChangeOrder {
    replica: u16,
    change: Change,
}

/// The child's reply once a change is in effect.
const DONE: &str = "done";

/// A running child process with its replicas.
pub(crate) struct Backends {
    /// Serving addresses by number.
    pub(crate) addresses: Vec<SocketAddr>,
    child: Child,
    control: Mutex<Control>,
}

struct Control {
    /// Closing it ends the child.
    stdin: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Backends {
    /// Starts the child and waits until every replica listens.
    pub(crate) fn start(fleet: &Fleet) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("backends")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting backends")?;
        let stdin = child.stdin.take().context("no stdin")?;
        let stdout = child.stdout.take().context("no stdout")?;
        let control = Mutex::new(Control { stdin, answers: BufReader::new(stdout).lines() });
        let mut backends = Self { addresses: Vec::new(), child, control };
        let addresses = backends.control().start(fleet)?;
        backends.addresses = addresses;
        Ok(backends)
    }

    /// The process, for accounting.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Changes one replica; returns once the change is in effect. Blocks for a moment.
    pub(crate) fn change(&self, replica: u16, change: Change) -> Result<()> {
        self.control().order(&ChangeOrder { replica, change })
    }

    fn control(&self) -> std::sync::MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Control {
    fn start(&mut self, fleet: &Fleet) -> Result<Vec<SocketAddr>> {
        self.write(fleet)?;
        let mut addresses = Vec::new();
        for _ in &fleet.0 {
            let line = self.read()?;
            addresses.push(
                line.parse()
                    .with_context(|| format!("the backends printed {line:?} instead of an address"))?,
            );
        }
        Ok(addresses)
    }

    fn order(&mut self, order: &ChangeOrder) -> Result<()> {
        self.write(order)?;
        let answer = self.read()?;
        if answer != DONE {
            bail!("{order:?}: {answer}");
        }
        Ok(())
    }

    fn write(&mut self, message: &impl Serialize) -> Result<()> {
        writeln!(self.stdin, "{}", serde_json::to_string(message)?).context("the backends have ended")
    }

    fn read(&mut self) -> Result<String> {
        self.answers.next().context("the backends have ended")?.context("reading from the backends")
    }
}

impl Drop for Backends {
    fn drop(&mut self) {
        // An error means that it has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
