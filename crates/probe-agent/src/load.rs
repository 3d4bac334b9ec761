//! State of one replica: its load, failures and age behind a lock, and the counters for `/metrics`. A guard for each
//! request lowers RIF exactly once.
//!
//! This module does not decide what counts as a success: the caller does, see [`crate::body`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prequal_core::server::replica::Replica;
use prequal_core::server::tracker::{Ticket, TrackerConfig, Visit};
use prequal_core::shared::capacity::Capacity;
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::outcome::Outcome;
use prequal_core::shared::time::Micros;
use prequal_core::wire::orca::OrcaReport;
#[cfg(feature = "proxy")]
use prequal_core::wire::orca::backend::BackendReport;
use prequal_core::wire::report::{LoadReport, MAX_FAILING};
use tokio::sync::watch;

/// Load of one replica, shared by everything that serves its requests. Clones share it.
#[derive(Clone)]
pub struct Load(Arc<Inner>);

struct Inner {
    replica: Mutex<Replica>,
    clock: Box<dyn Fn() -> Micros + Send + Sync>,
    counters: Counters,
    backend: watch::Sender<Backend>,
}

/// Whether the backend can serve, according to the last connection or check.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Backend {
    Ready,
    /// The backend refused a connection.
    Refuses,
    /// A check failed.
    Unready,
}

impl Load {
    /// Creates the load of an idle replica that has just started. Its clock starts now.
    pub fn new(config: TrackerConfig) -> Self {
        let origin = Instant::now();
        Self::with_clock(config, move || {
            Micros(u64::try_from(origin.elapsed().as_micros()).unwrap_or(u64::MAX))
        })
    }

    /// Creates the load of an idle replica that takes the time from `clock`, for tests and simulation.
    pub fn with_clock(config: TrackerConfig, clock: impl Fn() -> Micros + Send + Sync + 'static) -> Self {
        let up = Some(clock());
        Self(Arc::new(Inner {
            replica: Mutex::new(Replica::new(config, up)),
            clock: Box::new(clock),
            counters: Counters::default(),
            backend: watch::Sender::new(Backend::Ready),
        }))
    }

    /// Counts a request that arrives: RIF rises until the guard is finished or dropped.
    pub fn start(&self) -> InFlight {
        let now = self.now();
        let ticket = self.replica().start(now);
        self.in_flight(ticket, now)
    }

    /// Counts a request that arrives, unless `limit` requests are already in flight.
    pub fn start_below(&self, limit: u32) -> Option<InFlight> {
        let now = self.now();
        let mut replica = self.replica();
        let ticket = (replica.tracker.rif() < limit).then(|| replica.start(now))?;
        drop(replica);
        Some(self.in_flight(ticket, now))
    }

    fn in_flight(&self, ticket: Ticket, now: Micros) -> InFlight {
        InFlight { load: self.clone(), ticket: Some(ticket), started: now, on_drop: Outcome::Aborted }
    }

    /// Returns the number of requests in flight.
    pub fn rif(&self) -> u32 {
        self.replica().tracker.rif()
    }

    /// Returns the latency that a request arriving now may expect, microseconds; `None` if it is unknown.
    pub fn latency_us(&self) -> Option<u32> {
        let now = self.now();
        self.replica().tracker.latency(now)
    }

    /// Returns the replica's base latency and knee; `None` until it has served a request.
    pub fn capacity(&self) -> Option<Capacity> {
        let now = self.now();
        self.replica().tracker.capacity(now)
    }

    /// Returns the share of requests that failed through the replica's fault, per mille, 0 to 1000. The older a
    /// request, the less it counts. While the backend cannot serve, the share is 1000.
    pub fn failing(&self) -> u16 {
        let now = self.now();
        if self.is_ready() { self.replica().failing(now) } else { MAX_FAILING }
    }

    /// Returns whether the backend can serve, according to the last connection or check.
    pub fn is_ready(&self) -> bool {
        *self.0.backend.borrow() == Backend::Ready
    }

    /// Returns the time since the backend last became reachable, seconds; 0 while it refuses connections. A failed
    /// readiness check does not reset it.
    pub fn up_s(&self) -> u32 {
        let now = self.now();
        self.replica().up_s(now)
    }

    /// Marks the backend as not reached yet: reports say `up=0` until a connection or a check succeeds. After a failed
    /// check, only a successful check ends this.
    pub(crate) fn mark_unseen(&self) {
        self.replica().set_up(None);
    }

    /// Marks the backend as down: reports say `up=0`, and that everything fails, until a connection ([`Load::mark_up`])
    /// or a check succeeds. After a failed check, only a successful check ends this.
    pub fn mark_down(&self) {
        self.replica().set_up(None);
        self.change(|backend| if backend == Backend::Ready { Backend::Refuses } else { backend });
    }

    /// Marks the backend as up. If it was down, its age starts now: a replica that came back counts as a new one.
    pub fn mark_up(&self) {
        // An accepted connection does not refute a failed check.
        if *self.0.backend.borrow() != Backend::Unready {
            self.start_up();
        }
        self.change(|backend| if backend == Backend::Refuses { Backend::Ready } else { backend });
    }

    /// Records the result of a check of the backend.
    pub(crate) fn mark_ready(&self, ready: bool) {
        if ready {
            self.start_up();
        }
        self.change(|_| if ready { Backend::Ready } else { Backend::Unready });
    }

    /// Waits until the backend cannot serve.
    pub(crate) async fn until_not_ready(&self) {
        let mut backend = self.0.backend.subscribe();
        // The sender lives as long as `self`.
        let _ = backend.wait_for(|backend| *backend != Backend::Ready).await;
    }

    fn change(&self, next: impl FnOnce(Backend) -> Backend) {
        self.0.backend.send_if_modified(|backend| {
            let before = std::mem::replace(backend, next(*backend));
            before != *backend
        });
    }

    fn start_up(&self) {
        let now = self.now();
        let mut replica = self.replica();
        if replica.up().is_none() {
            replica.set_up(Some(now));
        }
    }

    /// Returns the report of this replica, which names the replica by `endpoint`.
    ///
    /// `leaving` is the request whose response carries the report, if that request is about to end. The client reads
    /// the report when the response is over, so the report must say what the *next* request would find.
    pub fn report(
        &self,
        endpoint: Endpoint,
        probe_endpoint: Option<Endpoint>,
        leaving: Option<Visit>,
    ) -> LoadReport {
        let now = self.now();
        let report = self.replica().report(now, endpoint, probe_endpoint, leaving);
        LoadReport { failing: if self.is_ready() { report.failing } else { MAX_FAILING }, ..report }
    }

    /// Returns the report, and its ORCA form with this `limit`. The ORCA form is `None` before [`Load::count_rates`].
    pub(crate) fn report_with_orca(
        &self,
        endpoint: Endpoint,
        probe_endpoint: Option<Endpoint>,
        leaving: Option<Visit>,
        limit: Option<u32>,
    ) -> (LoadReport, Option<OrcaReport>) {
        let now = self.now();
        let mut replica = self.replica();
        let report = replica.report(now, endpoint, probe_endpoint, leaving);
        let orca = replica.orca(now, &report, leaving.is_some(), limit);
        drop(replica);
        (LoadReport { failing: if self.is_ready() { report.failing } else { MAX_FAILING }, ..report }, orca)
    }

    /// Records the load that the backend reported, so that ORCA reports can pass it on. The report is valid for the
    /// time `fresh`.
    #[cfg(feature = "proxy")]
    pub(crate) fn backend_reports(&self, report: BackendReport, fresh: Duration) {
        let now = self.now();
        let fresh = u64::try_from(fresh.as_micros()).unwrap_or(u64::MAX);
        self.replica().backend_reports_for(now, report, fresh);
    }

    /// Records that the backend's stream of reports has ended.
    #[cfg(feature = "proxy")]
    pub(crate) fn backend_stream_ended(&self, end: BackendStreamEnd) {
        let now = self.now();
        self.replica().backend_stream_ended(now);
        bump(&self.counters().backend_streams[end as usize]);
    }

    /// Returns the utilisation that the backend last reported, in millionths, unless that report is too old.
    pub fn backend_utilization_micro(&self) -> Option<u64> {
        let now = self.now();
        self.replica().backend(now)?.utilization_micro()
    }

    /// Counts rates over `window` from now on.
    pub(crate) fn count_rates(&self, window: Duration) {
        let now = self.now();
        self.replica().count_rates(now, u64::try_from(window.as_micros()).unwrap_or(u64::MAX));
    }

    /// Returns the counters behind `/metrics`.
    pub fn counters(&self) -> &Counters {
        &self.0.counters
    }

    fn client_waits(&self, visit: Visit, waits: bool) {
        let now = self.now();
        let mut replica = self.replica();
        if waits {
            replica.tracker.client_waits(visit, now);
        } else {
            replica.tracker.client_is_back(visit, now);
        }
    }

    fn now(&self) -> Micros {
        (self.0.clock)()
    }

    fn replica(&self) -> MutexGuard<'_, Replica> {
        // No code that can panic runs under the lock, and a stale count is better than none.
        self.0.replica.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One request in flight. RIF falls once: at [`InFlight::finish`], or when the guard is dropped because its owner died
/// (client gone, stream reset, task cancelled).
#[must_use = "dropping the guard ends the request"]
pub struct InFlight {
    load: Load,
    ticket: Option<Ticket>,
    started: Micros,
    on_drop: Outcome,
}

impl InFlight {
    /// Ends the request with this outcome. Only [`Outcome::Success`] feeds the latency estimate.
    pub fn finish(mut self, outcome: Outcome) {
        self.on_drop = outcome;
    }

    /// Sets the outcome that is recorded if the guard is dropped. Initially [`Outcome::Aborted`].
    pub fn set_on_drop(&mut self, outcome: Outcome) {
        self.on_drop = outcome;
    }

    /// Marks the request as a stream (WebSocket, long gRPC). It stays in flight, but its age says nothing about the
    /// replica's speed.
    pub fn mark_streaming(&mut self) {
        if let Some(ticket) = &self.ticket {
            let now = self.load.now();
            self.load.replica().tracker.streaming(ticket, now);
        }
        self.on_drop = Outcome::Streaming;
    }

    /// Returns the load that counts this request.
    pub fn load(&self) -> &Load {
        &self.load
    }

    /// Returns the identifier of the request, for [`Load::report`].
    pub fn visit(&self) -> Option<Visit> {
        self.ticket.as_ref().map(Ticket::visit)
    }

    /// Returns a handle to the client of the request, which records when the client keeps the replica waiting.
    pub(crate) fn client(&self) -> Client {
        Client { load: self.load.clone(), visit: self.visit() }
    }

    /// Records whether the response waits for its client to read more.
    pub(crate) fn set_client_waits(&self, waits: bool) {
        if let Some(visit) = self.visit() {
            self.load.client_waits(visit, waits);
        }
    }
}

/// Client of a request, which may keep the replica waiting. Can outlive the request.
pub(crate) struct Client {
    load: Load,
    visit: Option<Visit>,
}

impl Client {
    /// Records whether the replica waits for the client to send more.
    pub(crate) fn set_waits(&self, waits: bool) {
        if let Some(visit) = self.visit {
            self.load.client_waits(visit, waits);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        let now = self.load.now();
        let mut replica = self.load.replica();
        replica.finish(ticket, now, self.on_drop);
        drop(replica);
        self.load.counters().record(self.on_drop, now.saturating_since(self.started));
    }
}

/// Counters of one replica. They only rise. The exception is [`Counters::certificate_expiry`], which is a time and not
/// a count. Each value is exact, but two values may be read at different moments.
#[derive(Debug, Default)]
pub struct Counters {
    success: AtomicU64,
    failure: AtomicU64,
    aborted: AtomicU64,
    streaming: AtomicU64,
    latency_buckets: [AtomicU64; LATENCY_BOUNDS_US.len()],
    latency_sum_us: AtomicU64,
    probes: [AtomicU64; 2],
    rejected: AtomicU64,
    hints: [AtomicU64; HINTS.len()],
    upstream_errors: [AtomicU64; UPSTREAM_ERRORS.len()],
    upstream_connections: AtomicU64,
    refused: AtomicU64,
    resent: AtomicU64,
    tls_reloads: [AtomicU64; 2],
    certificate_expiry: AtomicU64,
    orca: [AtomicU64; 2],
    orca_opened: AtomicU64,
    orca_closed: AtomicU64,
    orca_refused: AtomicU64,
    backend_reports: [AtomicU64; BACKEND_SAYS.len()],
    backend_streams: [AtomicU64; BACKEND_STREAM_ENDS.len()],
}

impl Counters {
    fn record(&self, outcome: Outcome, took_us: u64) {
        bump(match outcome {
            Outcome::Success => &self.success,
            Outcome::Failure => &self.failure,
            Outcome::Aborted => &self.aborted,
            Outcome::Streaming => &self.streaming,
        });
        if outcome == Outcome::Success {
            let index = LATENCY_BOUNDS_US.partition_point(|bound| *bound < took_us);
            if let Some(bucket) = self.latency_buckets.get(index) {
                bump(bucket);
            }
            self.latency_sum_us.fetch_add(took_us, Ordering::Relaxed);
        }
    }

    /// Returns the number of requests that ended with this outcome.
    pub fn ended(&self, outcome: Outcome) -> u64 {
        match outcome {
            Outcome::Success => &self.success,
            Outcome::Failure => &self.failure,
            Outcome::Aborted => &self.aborted,
            Outcome::Streaming => &self.streaming,
        }
        .load(Ordering::Relaxed)
    }

    /// Returns the number of successful requests per latency bound (see [`LATENCY_BOUNDS_US`]), not cumulative. The
    /// number of slower ones is [`Counters::ended`] minus their sum.
    pub fn latency_buckets(&self) -> [u64; LATENCY_BOUNDS_US.len()] {
        std::array::from_fn(|i| self.latency_buckets.get(i).map_or(0, |b| b.load(Ordering::Relaxed)))
    }

    /// Returns the sum of the latencies of successful requests, microseconds.
    pub fn latency_sum_us(&self) -> u64 {
        self.latency_sum_us.load(Ordering::Relaxed)
    }

    /// Counts a probe that was answered on the service port or on the probe port.
    pub fn count_probe(&self, on_probe_port: bool) {
        bump(&self.probes[usize::from(on_probe_port)]);
    }

    /// Returns the number of probes answered on the service port and on the probe port.
    pub fn probes(&self) -> [u64; 2] {
        [self.probes[0].load(Ordering::Relaxed), self.probes[1].load(Ordering::Relaxed)]
    }

    /// Counts a request that was refused as malformed before it counted as in flight.
    pub fn count_rejected(&self) {
        bump(&self.rejected);
    }

    /// Returns the number of requests that the agent's checks refused as malformed. hyper's own refusals are not
    /// included.
    pub fn rejected(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }

    pub(crate) fn count_hint(&self, seen: HintSeen) {
        bump(&self.hints[seen as usize]);
    }

    /// Returns the number of hints with this result. Hints on requests are counted only if they are ignored.
    pub fn hints(&self, seen: HintSeen) -> u64 {
        self.hints[seen as usize].load(Ordering::Relaxed)
    }

    pub(crate) fn count_upstream_error(&self, label: &str) {
        if let Some(index) = UPSTREAM_ERRORS.iter().position(|known| *known == label) {
            bump(&self.upstream_errors[index]);
        }
    }

    /// Returns the upstream errors by label.
    pub fn upstream_errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        UPSTREAM_ERRORS
            .iter()
            .zip(&self.upstream_errors)
            .map(|(label, n)| (*label, n.load(Ordering::Relaxed)))
    }

    pub(crate) fn count_upstream_connection(&self) {
        bump(&self.upstream_connections);
    }

    pub(crate) fn count_refused(&self) {
        bump(&self.refused);
    }

    /// Returns how often an HTTP/2 request came back unprocessed, from the backend or from a connection that was
    /// closing.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    pub(crate) fn count_resent(&self) {
        bump(&self.resent);
    }

    /// Returns how often a request was sent a second time because the backend closed a reused HTTP/1.1 connection.
    pub fn resent(&self) -> u64 {
        self.resent.load(Ordering::Relaxed)
    }

    #[cfg(feature = "tls")]
    pub(crate) fn count_tls_reload(&self, usable: bool) {
        bump(&self.tls_reloads[usize::from(usable)]);
    }

    /// Returns how often changed certificate files could not be used, and how often they could.
    pub fn tls_reloads(&self) -> [u64; 2] {
        [self.tls_reloads[0].load(Ordering::Relaxed), self.tls_reloads[1].load(Ordering::Relaxed)]
    }

    #[cfg(feature = "tls")]
    pub(crate) fn set_certificate_expiry(&self, seconds: Option<u64>) {
        self.certificate_expiry.store(seconds.unwrap_or(0), Ordering::Relaxed);
    }

    /// Returns the earliest expiry in the certificate chain that the agent listens with, seconds since 1970.
    pub fn certificate_expiry(&self) -> Option<u64> {
        Some(self.certificate_expiry.load(Ordering::Relaxed)).filter(|seconds| *seconds > 0)
    }

    /// Counts an ORCA report that went out on a response or out of band.
    pub(crate) fn count_orca(&self, out_of_band: bool) {
        bump(&self.orca[usize::from(out_of_band)]);
    }

    /// Returns the number of ORCA reports on responses and out of band.
    pub fn orca_reports(&self) -> [u64; 2] {
        [self.orca[0].load(Ordering::Relaxed), self.orca[1].load(Ordering::Relaxed)]
    }

    pub(crate) fn count_orca_stream(&self, opened: bool) {
        bump(if opened { &self.orca_opened } else { &self.orca_closed });
    }

    /// Returns the number of open streams of reports.
    pub fn orca_streams(&self) -> u64 {
        let closed = self.orca_closed.load(Ordering::Relaxed);
        self.orca_opened.load(Ordering::Relaxed).saturating_sub(closed)
    }

    pub(crate) fn count_orca_refused(&self) {
        bump(&self.orca_refused);
    }

    /// Returns the number of refused streams of reports: too many streams, a bad or missing request, or a draining
    /// agent.
    pub fn orca_refused(&self) -> u64 {
        self.orca_refused.load(Ordering::Relaxed)
    }

    #[cfg(feature = "proxy")]
    pub(crate) fn count_backend_report(&self, result: BackendSaid) {
        bump(&self.backend_reports[result as usize]);
    }

    /// Returns the number of load reports from the backend with this result.
    pub fn backend_reports(&self, result: BackendSaid) -> u64 {
        self.backend_reports[result as usize].load(Ordering::Relaxed)
    }

    /// Returns the number of streams of load reports from the backend that ended in this way.
    pub fn backend_streams(&self, end: BackendStreamEnd) -> u64 {
        self.backend_streams[end as usize].load(Ordering::Relaxed)
    }

    /// Returns the number of connections opened to the backend.
    pub fn upstream_connections(&self) -> u64 {
        self.upstream_connections.load(Ordering::Relaxed)
    }
}

fn bump(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Upper bounds of the latency histogram, microseconds: 1-2-5 steps from 0.1 ms to 20 s, then 30 s and 60 s.
pub const LATENCY_BOUNDS_US: [u64; 19] = [
    100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000,
    2_000_000, 5_000_000, 10_000_000, 20_000_000, 30_000_000, 60_000_000,
];

/// Result of a query hint.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum HintSeen {
    /// On a probe: the reply had a reduced load.
    Scaled,
    /// On a probe: the reply had the full load.
    Unscaled,
    /// On a probe or request: longer than 64 bytes, empty, not visible ASCII, or not the only hint.
    Ignored,
}

/// Labels of [`Counters::hints`].
pub(crate) const HINTS: [(&str, HintSeen); 3] =
    [("scaled", HintSeen::Scaled), ("unscaled", HintSeen::Unscaled), ("ignored", HintSeen::Ignored)];

/// Result of a load report from the backend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum BackendSaid {
    /// The report was used.
    Used,
    /// The report was used without its invalid values, or with some values left out or reduced because they exceed a
    /// limit.
    Partial,
    /// The text is not a report.
    Malformed,
    /// The report is longer than 4096 bytes.
    TooLong,
    /// A metric appears twice, or there are two reports.
    Contradictory,
}

/// Labels of [`Counters::backend_reports`].
pub(crate) const BACKEND_SAYS: [(&str, BackendSaid); 5] = [
    ("used", BackendSaid::Used),
    ("partial", BackendSaid::Partial),
    ("malformed", BackendSaid::Malformed),
    ("too_long", BackendSaid::TooLong),
    ("contradictory", BackendSaid::Contradictory),
];

/// How a stream of load reports from the backend ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum BackendStreamEnd {
    /// The agent could not open it: no connection, no HTTP/2, or no answer.
    Unopened,
    /// The backend does not offer the service.
    Unimplemented,
    /// The backend ended it, or is closing its connection.
    Closed,
    /// No report came for too long.
    Stalled,
    /// The backend sent far more than the agent asked for.
    Flooded,
    /// The backend sent something other than gRPC messages of at most 4096 bytes.
    Malformed,
}

/// Labels of [`Counters::backend_streams`].
pub(crate) const BACKEND_STREAM_ENDS: [(&str, BackendStreamEnd); 6] = [
    ("unopened", BackendStreamEnd::Unopened),
    ("unimplemented", BackendStreamEnd::Unimplemented),
    ("closed", BackendStreamEnd::Closed),
    ("stalled", BackendStreamEnd::Stalled),
    ("flooded", BackendStreamEnd::Flooded),
    ("malformed", BackendStreamEnd::Malformed),
];

/// Labels of [`Counters::upstream_errors`].
pub const UPSTREAM_ERRORS: [&str; 8] =
    ["connect", "connect_timeout", "no_stream", "refused", "reset", "response_timeout", "body", "upgrade"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_end_decrements_rif_once() {
        let load = Load::new(TrackerConfig::default());
        let done = load.start();
        let dropped = load.start();
        let mut stream = load.start();
        stream.mark_streaming();
        assert_eq!(load.rif(), 3);
        done.finish(Outcome::Success);
        assert_eq!(load.rif(), 2);
        drop(dropped);
        drop(stream);
        assert_eq!(load.rif(), 0);
        let ended = [Outcome::Success, Outcome::Aborted, Outcome::Streaming, Outcome::Failure]
            .map(|outcome| load.counters().ended(outcome));
        assert_eq!(ended, [1, 1, 1, 0]);
    }

    #[test]
    fn only_successes_are_latency_samples() {
        let load = Load::new(TrackerConfig::default());
        load.start().finish(Outcome::Streaming);
        drop(load.start());
        assert_eq!(load.latency_us(), None);
        load.start().finish(Outcome::Success);
        assert!(load.latency_us().is_some());
        assert_eq!(load.counters().latency_buckets().iter().sum::<u64>(), 1);
    }

    /// Returns a load, and the seconds on its clock.
    fn with_clock() -> (Load, Arc<AtomicU64>) {
        let seconds = Arc::new(AtomicU64::new(1_000_000));
        let clock = seconds.clone();
        let now = move || Micros(clock.load(Ordering::Relaxed) * 1_000_000);
        (Load::with_clock(TrackerConfig::default(), now), seconds)
    }

    fn report(load: &Load) -> String {
        let report = load.report("127.0.0.1:80".parse().unwrap(), None, None);
        LoadReport { capacity: None, ..report }.to_string()
    }

    #[test]
    fn failures_are_reported_and_decay_and_aborts_do_not_count() {
        let (load, seconds) = with_clock();
        seconds.fetch_add(1000, Ordering::Relaxed);
        for outcome in [Outcome::Success, Outcome::Failure, Outcome::Success, Outcome::Streaming] {
            load.start().finish(outcome);
            drop(load.start());
        }
        assert_eq!(report(&load), "0;0;127.0.0.1:80;fail=250");
        seconds.fetch_add(60, Ordering::Relaxed);
        assert_eq!(report(&load), "0;;127.0.0.1:80");
    }

    #[test]
    fn a_young_replica_reports_its_age() {
        let (load, seconds) = with_clock();
        assert_eq!(report(&load), "0;;127.0.0.1:80;up=0");
        seconds.fetch_add(599, Ordering::Relaxed);
        assert_eq!(report(&load), "0;;127.0.0.1:80;up=599");
        seconds.fetch_add(1, Ordering::Relaxed);
        assert_eq!((report(&load).as_str(), load.up_s()), ("0;;127.0.0.1:80", 600));
        load.mark_down();
        seconds.fetch_add(7, Ordering::Relaxed);
        assert_eq!(report(&load), "0;;127.0.0.1:80;fail=1000;up=0");
        load.mark_up();
        seconds.fetch_add(5, Ordering::Relaxed);
        load.mark_up();
        assert_eq!(report(&load), "0;;127.0.0.1:80;up=5", "it was up already");
        load.mark_ready(false);
        load.mark_up();
        assert_eq!(report(&load), "0;;127.0.0.1:80;fail=1000;up=5", "a failed check outweighs a connection");
        load.mark_ready(true);
        assert_eq!(report(&load), "0;;127.0.0.1:80;up=5");
        seconds.store(0, Ordering::Relaxed);
        assert_eq!(report(&load), "0;;127.0.0.1:80;up=0", "if the clock steps back, the replica is young");
    }

    #[test]
    fn a_request_about_to_end_is_not_reported() {
        let load = Load::new(TrackerConfig::default());
        let one = load.start();
        let _two = load.start();
        let endpoint: Endpoint = "127.0.0.1:80".parse().unwrap();
        assert_eq!(load.report(endpoint, None, None).rif, 2);
        assert_eq!(load.report(endpoint, None, one.visit()).rif, 1);
    }

    #[test]
    fn the_response_of_a_slow_request_does_not_report_its_own_age() {
        let (load, seconds) = with_clock();
        let report = |leaving| load.report("127.0.0.1:80".parse().unwrap(), None, leaving).latency_us;
        for _ in 0..8 {
            let request = load.start();
            seconds.fetch_add(1, Ordering::Relaxed);
            request.finish(Outcome::Success);
        }
        let slow = load.start();
        seconds.fetch_add(10, Ordering::Relaxed);
        assert_eq!(report(None), Some(10_000_000), "a probe sees that a request is stuck");
        assert_eq!(report(slow.visit()), Some(1_000_000), "its own response does not");
        let _other = load.start();
        seconds.fetch_add(4, Ordering::Relaxed);
        assert_eq!(report(slow.visit()), Some(4_000_000), "another request may be stuck");
    }

    #[test]
    fn time_spent_waiting_for_the_client_is_not_latency() {
        let (load, seconds) = with_clock();
        let pass = |s: u64| seconds.fetch_add(s, Ordering::Relaxed);
        let request = load.start();
        let client = request.client();
        client.set_waits(true);
        pass(50);
        client.set_waits(false);
        pass(1);
        request.set_client_waits(true);
        pass(50);
        assert_eq!(load.rif(), 1, "it is in flight");
        request.finish(Outcome::Success);
        client.set_waits(true);
        assert_eq!(load.latency_us(), Some(1_000_000));
        let next = load.start();
        pass(1);
        next.finish(Outcome::Success);
        let capacity = load.capacity().unwrap();
        assert!(capacity.knee == 1 && capacity.base_us <= 1_000_000, "{capacity:?}");
    }
}
