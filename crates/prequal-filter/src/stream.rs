//! One request: the pick, the report on its response, the outcome.
//!
//! The common path makes one shared-data transaction and one header read. It hardly ever reads a property, because a
//! report from the chosen replica shows that this replica answered. Properties are read only if no such report came, if
//! the balancer has reason to doubt the report, or if the response did not end properly. If no report came, the filter
//! checks whether a retry rescued the request. It does so when the response headers arrive, because Envoy does not know
//! the answer earlier.

use std::mem;
use std::rc::Rc;

use prequal_core::client::policies::zuul::{HEADER_UTILISATION, parse_utilisation};
use prequal_core::client::settings::Mode;
use prequal_core::client::{Balancer, Class, Request, Witness};
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;
use prequal_core::wire::headers::{self, Headers as _, is_grpc, is_server_error};
use prequal_core::wire::orca;
use prequal_core::wire::report::{HEADER_HINT, HEADER_LOAD, LoadReport};
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::{Action, MapType};

use crate::filter::{Ask, Cluster, Filter, Placed, Waiter};
use crate::host::{self, Headers};
use crate::metrics::{Metrics, WaitEnd};
use crate::outcome::{Progress, grpc_failed};
use crate::steer::steer;
use crate::store::Blobs;

/// One request.
pub(crate) struct Stream {
    id: u32,
    filter: Rc<Filter>,
    /// Index of the upstream cluster, once the request is known to be for a configured cluster.
    cluster: Option<usize>,
    request: Request,
    /// Cell in which the root leaves the choice for a waiting request.
    placed: Option<Placed>,
    progress: Progress,
    /// Whether the response carries an error: a 5xx, or an error in gRPC's `grpc-status`.
    failed: bool,
    /// Whether the response is gRPC, whose trailers may also carry an error.
    grpc: bool,
}

impl Stream {
    pub(crate) fn new(id: u32, filter: Rc<Filter>) -> Self {
        Self {
            id,
            filter,
            cluster: None,
            request: Request::default(),
            placed: None,
            progress: Progress::default(),
            failed: false,
            grpc: false,
        }
    }

    /// Makes the request wait for its own probes. Returns false if there is nothing to wait for.
    fn wait(&mut self, filter: &Filter, index: usize, cluster: &Cluster, now: Micros) -> bool {
        let hint = {
            let balancer = cluster.balancer.borrow();
            let source = balancer.config().choice.hint.as_ref();
            source.map(|source| {
                let read = |name: &str| host::header_bytes(MapType::HttpRequestHeaders, name);
                let header = source.header.as_deref().and_then(read);
                let path = source.path_segment.and_then(|_| read(":path"));
                let hint = source.hint(header.as_deref(), path.as_deref());
                // The hint goes to the replica that serves the request, so that the replica learns which hints it has
                // served.
                let text = hint.map(|hint| hint.to_string());
                host::set_request_header(HEADER_HINT, text.as_deref().map(str::as_bytes));
                hint
            })
        };
        let placed = Placed::default();
        let whole = self.progress.request_whole;
        let waiter = Waiter { cluster: index, hint: hint.flatten(), whole, placed: Rc::clone(&placed) };
        filter.ask.set(Some(Ask { stream: self.id, began: now, waiter }));
        self.placed = Some(placed);
        host::wake(filter.root_id);
        filter.waits.borrow().contains(self.id)
    }

    /// Takes over the root's choice, if the root has made one.
    fn take_placed(&mut self) {
        if let Some(request) = self.placed.as_ref().and_then(|placed| placed.take()) {
            self.placed = None;
            self.request = request;
        }
    }

    /// Ends the wait: a request that is answered or ends while it waits is not resumed.
    fn stop_waiting(&mut self) {
        self.take_placed();
        if self.placed.take().is_some()
            && self.filter.waits.borrow_mut().forget(self.id)
            && let Some(cluster) = self.cluster.and_then(|index| self.filter.clusters.get(index))
        {
            cluster.metrics.waited(WaitEnd::Aborted);
        }
    }

    /// Handles the end of the client's request. From now on the request waits for the replica.
    fn request_ended(&mut self) {
        self.progress.request_whole = true;
        // The first callbacks after a wait are those of the body and the trailers, so the root's choice may still have
        // to be taken over.
        self.take_placed();
        if let Some(cluster) = self.cluster.and_then(|index| self.filter.clusters.get(index)) {
            let witness =
                EnvoyWitness { filter: &self.filter, cluster: self.cluster, progress: self.progress };
            cluster.balancer.borrow_mut().completed(&self.request, &witness);
        }
    }
}

/// Envoy's account of the request that is the effective context.
struct EnvoyWitness<'a> {
    filter: &'a Filter,
    cluster: Option<usize>,
    progress: Progress,
}

impl Witness for EnvoyWitness<'_> {
    fn now(&self) -> Micros {
        host::now()
    }

    /// The first request that is not for a configured cluster turns the lookup on. A request that was looked up is
    /// checked too, because the route may have changed since.
    fn is_ours(&self) -> bool {
        let ours = self.filter.routed_cluster() == self.cluster;
        if !ours {
            self.filter.look_up_cluster.set(true);
        }
        ours
    }

    fn served_by(&self) -> Option<Endpoint> {
        host::upstream_address()
    }

    fn class(&self) -> Class {
        self.progress.class()
    }

    fn attempts(&self) -> u64 {
        host::number_property(&["upstream", "request_attempt_count"]).unwrap_or(1)
    }
}

/// Returns the utilisation from an ORCA report in headers or trailers.
fn orca_utilisation(balancer: &Balancer<Blobs, Metrics>, headers: &Headers) -> Option<f64> {
    balancer.orca_utilisation(headers.all(orca::HEADER), headers.all(orca::HEADER_BIN))
}

impl Context for Stream {}

impl HttpContext for Stream {
    fn on_http_request_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        #[cfg(feature = "crash-test")]
        host::crash_on_demand();
        let filter = Rc::clone(&self.filter);
        // The property takes 2 µs to read. With a single configured cluster, it is not read until a request turns out
        // to have gone elsewhere.
        self.cluster = if filter.look_up_cluster.get() { filter.routed_cluster() } else { Some(0) };
        let found = self.cluster.and_then(|index| Some((index, filter.clusters.get(index)?)));
        let Some((index, cluster)) = found else {
            steer(filter.shim, &self.request);
            return Action::Continue;
        };
        let now = host::now();
        self.progress.request_whole = end_of_stream;
        if cluster.mode() == Mode::Sync && self.wait(&filter, index, cluster, now) {
            return Action::Pause;
        }
        self.request = filter.begin(cluster, now, &[], end_of_stream);
        steer(filter.shim, &self.request);
        let probes = self.request.pick.probes;
        if !probes.is_empty() {
            cluster.probes_due.set(probes);
            host::wake(filter.root_id);
        }
        Action::Continue
    }

    fn on_http_request_body(&mut self, _size: usize, end_of_stream: bool) -> Action {
        if end_of_stream {
            self.request_ended();
        }
        Action::Continue
    }

    fn on_http_request_trailers(&mut self, _count: usize) -> Action {
        self.request_ended();
        Action::Continue
    }

    fn on_http_response_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        self.stop_waiting();
        self.progress.begun = true;
        let Some(cluster) = self.cluster.and_then(|index| self.filter.clusters.get(index)) else {
            return Action::Continue;
        };
        // A gRPC error without a message is a response that consists of headers alone.
        self.progress.complete = end_of_stream;
        let headers = Headers::of(MapType::HttpResponseHeaders);
        self.grpc = headers.get("content-type").is_some_and(is_grpc);
        self.failed = is_server_error(&headers)
            || (end_of_stream && self.grpc && grpc_failed(MapType::HttpResponseHeaders));
        let mut balancer = cluster.balancer.borrow_mut();
        if balancer.config().choice.rule.is_probe_free() {
            let utilisation = headers.get(HEADER_UTILISATION).and_then(|text| std::str::from_utf8(text).ok());
            let utilisation =
                utilisation.and_then(parse_utilisation).or_else(|| orca_utilisation(&balancer, &headers));
            let report = headers.get(HEADER_LOAD).and_then(|text| LoadReport::parse(text).ok());
            self.request.set_response_load(report.map(|report| report.rif), utilisation);
        } else if balancer.config().probe.piggyback {
            let report = headers::report(&headers);
            let witness =
                EnvoyWitness { filter: &self.filter, cluster: self.cluster, progress: self.progress };
            let now = host::now();
            balancer.response(now, &mut self.request, self.failed, report, &witness);
            balancer.settle(now, &mut *self.filter.rng.borrow_mut());
        }
        Action::Continue
    }

    fn on_http_response_body(&mut self, _size: usize, end_of_stream: bool) -> Action {
        self.progress.complete |= end_of_stream;
        Action::Continue
    }

    fn on_http_response_trailers(&mut self, _count: usize) -> Action {
        self.progress.complete = true;
        self.failed |= self.grpc && grpc_failed(MapType::HttpResponseTrailers);
        if let Some(cluster) = self.cluster.and_then(|index| self.filter.clusters.get(index)) {
            let balancer = cluster.balancer.borrow();
            // gRPC servers send ORCA reports in trailers. The trailers are read only if the configuration asks for it.
            if balancer.config().choice.orca.is_some() {
                self.request.set_late_utilisation(|| {
                    orca_utilisation(&balancer, &Headers::of(MapType::HttpResponseTrailers))
                });
            }
        }
        Action::Continue
    }
}

/// Envoy drops the stream when it is done with the request and knows its outcome. `on_log`, which Envoy calls just
/// before, would cost one more call per request. The SDK keeps its table of streams borrowed during the drop, so
/// nothing here may call back into the module, as [`host::wake`] does.
impl Drop for Stream {
    fn drop(&mut self) {
        self.stop_waiting();
        let Some(cluster) = self.cluster.and_then(|index| self.filter.clusters.get(index)) else { return };
        let request = mem::take(&mut self.request);
        let witness = EnvoyWitness { filter: &self.filter, cluster: self.cluster, progress: self.progress };
        cluster.balancer.borrow_mut().ended(request, self.progress.complete, self.failed, &witness);
    }
}
