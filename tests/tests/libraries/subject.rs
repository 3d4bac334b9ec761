//! A library under test: the address of its application, and how it plays traces.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use prequal_core::wire::report::LoadReport;
use prequal_testbed::eventually;

use crate::http::{Answer, exchange};
use crate::trace::Trace;

/// Maximum time to wait for anything that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

type Play = dyn Fn(&Trace) -> Result<String>;
type Ended = dyn Fn() -> Result<[u64; 4]>;

/// A server that uses the library; it ends on drop.
pub(crate) struct Subject {
    pub(crate) name: &'static str,
    /// The address of the application.
    pub(crate) service: SocketAddr,
    /// The address of its gRPC service, if the library supports gRPC.
    pub(crate) calls: Option<SocketAddr>,
    /// Plays a trace; returns one line per report.
    pub(crate) play: Box<Play>,
    /// Number of requests that have ended: successes, failures, aborts, streams.
    pub(crate) ended: Box<Ended>,
    _process: Option<Process>,
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Subject {
    /// A server in this process.
    pub(crate) fn own(
        name: &'static str,
        service: SocketAddr,
        play: impl Fn(&Trace) -> Result<String> + 'static,
        ended: impl Fn() -> Result<[u64; 4]> + 'static,
    ) -> Self {
        Self { name, service, calls: None, play: Box::new(play), ended: Box::new(ended), _process: None }
    }

    /// Starts a conformance server, which prints its addresses.
    pub(crate) fn program(name: &'static str, mut command: Command) -> Result<Self> {
        let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("{command:?}"))?;
        let stdout = child.stdout.take().context("piped")?;
        let process = Process(child);
        let line = BufReader::new(stdout).lines().next().context("it prints nothing")??;
        let at = |key: &str| -> Option<SocketAddr> {
            line.split(' ').find_map(|field| field.strip_prefix(key)?.strip_prefix('='))?.parse().ok()
        };
        let (service, control) = (at("service").context("service")?, at("control").context("control")?);
        let play = move |trace: &Trace| {
            let answer = exchange(control, "POST", "/trace", &[], trace.to_string().as_bytes())?;
            ensure!(answer.status == 200, "{answer:?}");
            Ok(answer.body)
        };
        let ended = move || {
            let answer = exchange(control, "GET", "/ended", &[], b"")?;
            let counts: Vec<u64> =
                answer.body.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
            counts.try_into().ok().context("four counts")
        };
        let (play, ended) = (Box::new(play), Box::new(ended));
        Ok(Self { name, service, calls: at("grpc"), play, ended, _process: Some(process) })
    }

    pub(crate) fn get(&self, path: &str) -> Result<Answer> {
        exchange(self.service, "GET", path, &[], b"")
    }

    pub(crate) fn probe(&self) -> Result<LoadReport> {
        self.get("/prequal/probe")?.report()
    }

    /// Waits until the given numbers of requests have ended in addition to `before`, and none is in flight.
    pub(crate) fn at_rest(&self, before: [u64; 4], more: [u64; 4]) -> Result<()> {
        let expected: [u64; 4] = std::array::from_fn(|i| before[i] + more[i]);
        eventually(&format!("{}: {expected:?} ended", self.name), PATIENCE, || {
            let rests = self.probe().ok()?.rif == 0 && (self.ended)().ok()? == expected;
            rests.then_some(())
        });
        Ok(())
    }
}
