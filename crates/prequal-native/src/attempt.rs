//! One attempt to serve a request: from the choice of its host to its end.
//!
//! Envoy chooses a host and then, on the same call stack, creates the upstream filters of the attempt. So the choice
//! waits in this thread's memory until the filter is created and takes it over.
//!
//! A filter does not learn why an attempt ended without a whole response. An access logger in the router's
//! `upstream_log` does. Envoy logs each attempt once, shortly before or after it destroys the attempt's filter.
//! Envoy 1.40 logs first and calls the filter's last hook a little later, so log entries wait in a queue, in the order
//! of the filters. Earlier versions call the hook first and log immediately afterwards, so at most one attempt at a
//! time waits for its log entry. If no logger is configured, an attempt without a whole response counts as ended by the
//! client.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use prequal_core::client::policies::zuul::{HEADER_UTILISATION, parse_utilisation};
use prequal_core::client::{Class, Request, Witness};
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::outcome::grpc_blames_server;
use prequal_core::shared::time::Micros;
use prequal_core::wire::headers::{self, Headers, is_grpc, is_server_error};
use prequal_core::wire::orca;
use prequal_core::wire::report::{HEADER_LOAD, LoadReport};

use crate::worker::{Worker, WorkerRef};
use crate::{clock, envoy};

thread_local! {
    /// The choice that no filter has taken over yet.
    static CHOSEN: RefCell<Option<Attempt>> = const { RefCell::new(None) };
    /// The endings, by cluster. They outlive configurations, because an attempt may end after an update.
    static ENDINGS: RefCell<Vec<(String, EndingsRef)>> = const { RefCell::new(Vec::new()) };
}

pub(crate) type EndingsRef = Rc<RefCell<Endings>>;

/// Returns the endings that the attempts of the cluster share on this thread.
pub(crate) fn endings_of(cluster: &str) -> EndingsRef {
    ENDINGS.with_borrow_mut(|all| {
        if let Some((_, endings)) = all.iter().find(|(name, _)| name == cluster) {
            return Rc::clone(endings);
        }
        let new = Rc::default();
        all.push((cluster.to_owned(), Rc::clone(&new)));
        new
    })
}

/// One attempt.
pub(crate) struct Attempt {
    worker: WorkerRef,
    endings: EndingsRef,
    request: Request,
    /// The host that Envoy sends the request to; `None` if it has no IP address, or if there is no host.
    served_by: Option<Endpoint>,
    /// Whether the response has ended properly.
    complete: bool,
    /// Whether the response carries an error.
    failed: bool,
    /// Whether the response is gRPC, whose trailers may also carry an error.
    grpc: bool,
}

/// Records that a host was chosen for an attempt. Without a host, the attempt has ended.
pub(crate) fn chosen(
    worker: &WorkerRef,
    endings: &EndingsRef,
    request: Request,
    served_by: Option<Endpoint>,
    placed: bool,
) {
    let (worker, endings) = (Rc::clone(worker), Rc::clone(endings));
    let attempt =
        Attempt { worker, endings, request, served_by, complete: false, failed: false, grpc: false };
    let (waits, ended) = if placed { (Some(attempt), None) } else { (None, Some(attempt)) };
    // An attempt that no filter took over was never sent, or the cluster has no filter of this module.
    let before = CHOSEN.replace(waits);
    for attempt in [before, ended].into_iter().flatten() {
        attempt.ended_by(Class::Local);
    }
}

/// Takes over the attempt to `cluster` whose host was chosen last on this thread. Returns `None` if this module's
/// policy did not choose the host: another extension named it, or the cluster has another policy.
pub(crate) fn take(cluster: &[u8]) -> Option<Attempt> {
    let attempt = CHOSEN.take()?;
    if attempt.worker.borrow().cluster().as_bytes() == cluster {
        return Some(attempt);
    }
    attempt.ended_by(Class::Local);
    None
}

/// Drops a choice that waits for a filter, when its policy ends.
pub(crate) fn forget(worker: &WorkerRef) {
    let of_worker = |attempt: &mut Attempt| Rc::ptr_eq(&attempt.worker, worker);
    if let Some(attempt) = CHOSEN.with_borrow_mut(|chosen| chosen.take_if(of_worker)) {
        attempt.ended_by(Class::Local);
    }
}

impl Attempt {
    /// Handles the end of the client's request. From now on the request waits for the replica.
    pub(crate) fn request_ended(&mut self) {
        let facts = Facts { class: Class::Local, served_by: self.served_by };
        self.worker.borrow_mut().balancer.completed(&self.request, &facts);
    }

    /// Handles the response headers.
    pub(crate) fn response(&mut self, headers: &impl Headers, end_of_stream: bool) {
        self.complete = end_of_stream;
        self.grpc = headers.get("content-type").is_some_and(is_grpc);
        self.failed = is_server_error(headers) || (end_of_stream && self.grpc_failed(headers));
        let Worker { balancer, rng, .. } = &mut *self.worker.borrow_mut();
        if balancer.config().choice.rule.is_probe_free() {
            let utilisation = headers.get(HEADER_UTILISATION).and_then(|text| std::str::from_utf8(text).ok());
            let utilisation = utilisation.and_then(parse_utilisation).or_else(|| {
                balancer.orca_utilisation(headers.all(orca::HEADER), headers.all(orca::HEADER_BIN))
            });
            let report = headers.get(HEADER_LOAD).and_then(|text| LoadReport::parse(text).ok());
            self.request.set_response_load(report.map(|report| report.rif), utilisation);
        } else if balancer.config().probe.piggyback {
            let facts = Facts { class: Class::Answer, served_by: self.served_by };
            let report = headers::report(headers);
            let now = clock::now();
            balancer.response(now, &mut self.request, self.failed, report, &facts);
            balancer.settle(now, rng);
        }
    }

    /// Handles a part of the response's body.
    pub(crate) fn response_body(&mut self, end_of_stream: bool) {
        self.complete |= end_of_stream;
    }

    /// Handles the response's trailers.
    pub(crate) fn response_trailers(&mut self, trailers: &impl Headers) {
        self.complete = true;
        self.failed |= self.grpc_failed(trailers);
        let worker = self.worker.borrow();
        let balancer = &worker.balancer;
        if balancer.config().choice.orca.is_some() {
            self.request.set_late_utilisation(|| {
                balancer.orca_utilisation(trailers.all(orca::HEADER), trailers.all(orca::HEADER_BIN))
            });
        }
    }

    fn grpc_failed(&self, headers: &impl Headers) -> bool {
        self.grpc && headers.get("grpc-status").is_some_and(grpc_blames_server)
    }

    /// Handles the destruction of the filter: pairs the attempt with its log entry.
    pub(crate) fn destroyed(self) {
        let endings = Rc::clone(&self.endings);
        let flags = take_flags(&endings);
        if self.complete || flags.is_some() || envoy::logs_first() {
            self.ended(flags.unwrap_or(0));
        } else {
            endings.borrow_mut().waiting = Some(self);
        }
    }

    /// Handles the end of the attempt. `flags` are Envoy's response flags.
    fn ended(self, flags: u64) {
        let class = match self.complete {
            true => Class::Answer,
            false => class_of(flags),
        };
        self.ended_by(class);
    }

    fn ended_by(self, class: Class) {
        let facts = Facts { class, served_by: self.served_by };
        let Worker { balancer, rng, .. } = &mut *self.worker.borrow_mut();
        balancer.ended(self.request, self.complete, self.failed, &facts);
        balancer.settle(clock::now(), rng);
    }
}

/// Handles the destruction of a filter whose attempt went to a host that this module's policy did not choose.
pub(crate) fn destroyed_without_a_choice(cluster: &str) {
    take_flags(&endings_of(cluster));
}

/// Returns the response flags of the attempt whose filter is being destroyed, if its log entry has arrived. Ends an
/// attempt that still waits for its log entry, because none will come.
fn take_flags(endings: &RefCell<Endings>) -> Option<u64> {
    let (before, flags) = {
        let Endings { logged, waiting } = &mut *endings.borrow_mut();
        // Old entries belong to attempts without a filter of this module.
        while logged.front().is_some_and(|(at, _)| clock::now().saturating_since(*at) > STALE_US) {
            logged.pop_front();
        }
        (waiting.take(), logged.pop_front().map(|(_, flags)| flags))
    };
    if let Some(before) = before {
        // No logger is configured: otherwise the entry would have arrived before the end of this filter.
        before.ended(0);
    }
    flags
}

/// Attempts of one cluster that have ended on one thread and still wait for one of two events: their log entry, or the
/// destruction of their filter.
#[derive(Default)]
pub(crate) struct Endings {
    /// Response flags of attempts whose filters Envoy has not destroyed yet, each with the time of its log entry.
    logged: VecDeque<(Micros, u64)>,
    /// The attempt whose filter has been destroyed and whose log entry has not arrived.
    waiting: Option<Attempt>,
}

/// Maximum number of log entries that wait for the destruction of their filters. It is reached only if the cluster's
/// attempts have no filter of this module.
const MAX_LOGGED: usize = 1024;
/// Age above which a log entry belongs to no filter, microseconds. Envoy writes the entry and destroys the filter in
/// the same iteration of its event loop.
const STALE_US: u64 = 1_000_000;

/// Handles a log entry: the response flags of an attempt to `cluster`.
pub(crate) fn logged(cluster: &[u8], flags: u64) {
    let known = |(name, _): &&(String, _)| name.as_bytes() == cluster;
    let Some(endings) = ENDINGS.with_borrow(|all| all.iter().find(known).map(|(_, found)| Rc::clone(found)))
    else {
        return;
    };
    let waiting = {
        let Endings { logged, waiting } = &mut *endings.borrow_mut();
        if envoy::logs_first() && logged.len() < MAX_LOGGED {
            logged.push_back((clock::now(), flags));
        }
        waiting.take()
    };
    if let Some(attempt) = waiting {
        attempt.ended(flags);
    }
}

/// Envoy's response flags that mean that the host failed: the request timed out, the host reset it, Envoy could not
/// connect to the host, the connection was lost, or the host broke the protocol.
const HOST_FAILED: u64 = 1 << 2 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 23;
/// Envoy's response flags that mean that Envoy ended the attempt for reasons of its own: Envoy reset it, a circuit
/// breaker was full, or a limit on a stream's idle time or duration was reached.
const ENVOY_ENDED: u64 = 1 << 3 | 1 << 7 | 1 << 16 | 1 << 19 | 1 << 22;

/// Returns who ended an attempt without a whole response. Without a flag, the client ended it, or the timeout of the
/// whole request did, which sets no flag. The two need no distinction: a host that makes requests wait that long is
/// found unresponsive long before.
fn class_of(flags: u64) -> Class {
    if flags & HOST_FAILED != 0 {
        Class::UpstreamFailure
    } else if flags & ENVOY_ENDED != 0 {
        Class::Local
    } else {
        Class::ClientAbort
    }
}

/// What is known about an attempt. Each attempt has one host.
struct Facts {
    class: Class,
    served_by: Option<Endpoint>,
}

impl Witness for Facts {
    fn now(&self) -> Micros {
        clock::now()
    }

    fn is_ours(&self) -> bool {
        true
    }

    fn served_by(&self) -> Option<Endpoint> {
        self.served_by
    }

    fn class(&self) -> Class {
        self.class
    }

    fn attempts(&self) -> u64 {
        1
    }
}
