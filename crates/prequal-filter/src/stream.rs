//! One request: the pick, the report on its response, the outcome.
//!
//! The common path makes one shared-data transaction, one header read and no property read: a report from the chosen
//! replica proves that it answered. Properties are read only where no such report came.

use std::rc::Rc;

use prequal_core::config::Mode;
use prequal_core::endpoint::Endpoint;
use prequal_core::exceptions::flights::Flight;
use prequal_core::members::{Evidence, Standing};
use prequal_core::report::{HEADER_HINT, HEADER_LATENCY, HEADER_LOAD, HEADER_RIF, LoadReport};
use prequal_core::time::Micros;
use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::{Action, MapType};

use crate::filter::{Cluster, Filter};
use crate::host;
use crate::metrics::{Class, ReportEnd};
use crate::outcome::{class_of, grpc_failed, is_grpc};
use crate::root::wake;
use crate::rule::Watch;
use crate::steer::{Choice, steer};
use crate::sync::{Ask, Placed, abort, take_hint};

/// One request.
pub(crate) struct Stream {
    id: u32,
    filter: Rc<Filter>,
    /// Index of the upstream cluster, once the request is known to be for one of ours.
    cluster: Option<usize>,
    chosen: Option<Endpoint>,
    /// Where a retry was told to go.
    runner_up: Option<Endpoint>,
    /// Where the root leaves the choice for a request that waits.
    placed: Option<Placed>,
    /// For the rules that keep a state of their own.
    watch: Watch,
    /// The request to `chosen` until something is known of its end.
    flight: Option<Flight>,
    /// It is a trial, and has been answered.
    trial: bool,
    /// The replica's failure of this request has been told.
    blamed: bool,
    /// The placement that the choice rests on.
    standing: Standing,
    /// The chosen replica is a candidate: Envoy must say that it served.
    verify: bool,
    /// The replica that was chosen reported on the response.
    answered: bool,
    /// The latency that it reported, microseconds.
    reported_us: Option<u32>,
    /// The response ended as a response should.
    complete: bool,
    /// The response carries an error: a 5xx, or what gRPC says in `grpc-status`.
    failed: bool,
    /// So it is if it is gRPC's, by its trailers. They come without the headers, which are there again at the end.
    failed_if_grpc: bool,
}

impl Stream {
    pub(crate) fn new(id: u32, filter: Rc<Filter>) -> Self {
        Self {
            id,
            filter,
            cluster: None,
            chosen: None,
            runner_up: None,
            placed: None,
            watch: Watch::default(),
            flight: None,
            trial: false,
            blamed: false,
            standing: Standing::even(0),
            verify: false,
            answered: false,
            reported_us: None,
            complete: false,
            failed: false,
            failed_if_grpc: false,
        }
    }

    /// The cluster that the route names. With a single configured cluster the property (2 µs) is not read until a
    /// request turns out to have gone elsewhere.
    fn find_cluster(&self) -> Option<usize> {
        if self.filter.look_up_cluster.get() { self.routed_cluster() } else { Some(0) }
    }

    fn routed_cluster(&self) -> Option<usize> {
        let name = host::text_property(&["xds", "cluster_name"])?;
        self.filter.clusters.iter().position(|cluster| cluster.config.cluster == name)
    }

    /// Lets the request wait for probes of its own. False if there is nothing to wait for.
    fn wait(&mut self, filter: &Filter, cluster: &Cluster, now: Micros) -> bool {
        let hint = take_hint(cluster.config.choice.hint.as_ref());
        if cluster.config.choice.hint.is_some() {
            // The replica that serves it learns what it has served.
            let text = hint.map(|hint| hint.to_string());
            let _ = hostcalls::set_map_value(MapType::HttpRequestHeaders, HEADER_HINT, text.as_deref());
        }
        let placed = Placed::default();
        let Some(index) = self.cluster else { return false };
        let ask = Ask { stream: self.id, cluster: index, hint, began: now, placed: Rc::clone(&placed) };
        filter.waits.ask.set(Some(ask));
        wake(filter.root_id);
        self.placed = Some(placed);
        filter.waits.contains(self.id)
    }

    fn remember(&mut self, choice: Choice) {
        self.flight = choice.flight;
        self.chosen = choice.pick.replica;
        self.verify = choice.pick.verify;
        self.standing = choice.pick.standing;
        self.runner_up = choice.runner_up;
    }

    /// Takes over what the root chose meanwhile; a request that is answered or ends while it waits is not resumed.
    fn stop_waiting(&mut self, filter: &Filter) {
        let Some(placed) = self.placed.take() else { return };
        match placed.take() {
            Some(choice) => self.remember(choice),
            None => abort(filter, self.id, self.cluster),
        }
    }

    /// Judges the report on the response (design §3, "Trust").
    fn take_report(&mut self, cluster: &Cluster, now: Micros) -> Option<ReportEnd> {
        let header = |name| host::header_bytes(MapType::HttpResponseHeaders, name);
        let parsed = match header(HEADER_LOAD) {
            Some(load) => LoadReport::parse(load),
            None => LoadReport::parse_pair(&header(HEADER_RIF)?, header(HEADER_LATENCY).as_deref()),
        };
        let report = match parsed {
            Ok(report) => report,
            Err(error) => return Some(ReportEnd::Bad(error)),
        };
        self.reported_us = report.latency_us;
        if self.chosen.is_some() && self.chosen == report.endpoint && !self.verify {
            self.answered = true;
            self.count(cluster, report.endpoint?, now, &report, self.standing);
            return Some(ReportEnd::Used);
        }
        // Not steered, Envoy used another host, or a report without a name: who answered is what Envoy says.
        let Some(served) = host::upstream_address() else { return Some(ReportEnd::NoEndpoint) };
        if report.endpoint.is_some_and(|named| named != served) {
            return Some(ReportEnd::WrongEndpoint);
        }
        self.answered = self.chosen == Some(served);
        // A retry went where this filter said, which shows nothing of Envoy's own policy.
        let on_purpose = self.answered || self.runner_up == Some(served);
        let evidence = if on_purpose { Evidence::Served } else { Evidence::Placed };
        let standing = cluster.confirm(now, served, Some(&report), evidence);
        self.count(cluster, served, now, &report, standing);
        Some(ReportEnd::Used)
    }

    /// What a failed response says of load is not recorded: a replica that fails at once is idle and looks fast.
    fn count(
        &self,
        cluster: &Cluster,
        replica: Endpoint,
        now: Micros,
        report: &LoadReport,
        standing: Standing,
    ) {
        if !self.failed {
            cluster.report(now, replica, report, standing);
        }
    }

    /// The chosen replica has answered or failed. An answer may fail later, but a request fails once.
    fn land(&mut self, cluster: &Cluster, now: Micros, failed: bool) {
        if let Some(flight) = self.flight.take() {
            self.trial = cluster.landed(now, flight, failed, self.reported_us);
        } else if failed
            && !self.blamed
            && let Some(chosen) = self.chosen
        {
            cluster.failed_late(now, chosen, self.trial);
        }
        self.blamed |= failed;
    }

    /// Whether the request really went to a configured cluster; the first that did not turns the look-up on.
    fn is_ours(&mut self) -> bool {
        if self.filter.look_up_cluster.get() {
            return true;
        }
        let ours = self.routed_cluster().is_some();
        if !ours {
            self.filter.look_up_cluster.set(true);
            self.cluster = None;
        }
        ours
    }

    /// The outcome of a request without a report from the replica that was chosen.
    fn classify(&mut self, filter: &Filter) -> Option<Class> {
        if !self.is_ours() {
            return None;
        }
        let cluster = filter.clusters.get(self.cluster?)?;
        let details = host::text_property(&["response", "code_details"]).unwrap_or_default();
        let class = class_of(&details);
        if class == Class::ClientAbort {
            return Some(class);
        }
        let now = host::now();
        let served_by = host::upstream_address();
        if class == Class::Local && served_by.is_none() {
            // It was sent to nobody.
            return Some(class);
        }
        if let Some(chosen) = self.chosen {
            let diverted = served_by.is_some_and(|served| served != chosen);
            if diverted {
                cluster.metrics.diverted.one();
            }
            if class == Class::UpstreamFailure || (diverted && (self.verify || attempts() > 1)) {
                // Refused, reset, timed out, perhaps retried elsewhere; or an invention.
                cluster.bar(now, chosen);
                self.land(cluster, now, true);
            } else if diverted {
                // Vetoed by Envoy's health state.
                cluster.refused(now, chosen);
            } else if class == Class::Answer && served_by == Some(chosen) && self.flight.is_some() {
                // It answered without a report.
                self.land(cluster, now, self.failed);
            }
            if self.verify && served_by == Some(chosen) {
                cluster.confirm(now, chosen, None, Evidence::Served);
            } else if self.verify {
                cluster.forget(now, chosen);
            }
        }
        Some(class)
    }
}

impl Context for Stream {}

impl HttpContext for Stream {
    fn on_http_request_headers(&mut self, _count: usize, _end_of_stream: bool) -> Action {
        #[cfg(feature = "crash-test")]
        host::crash_on_demand();
        let filter = Rc::clone(&self.filter);
        self.cluster = self.find_cluster();
        let Some(cluster) = self.cluster.and_then(|index| filter.clusters.get(index)) else {
            steer(filter.shim, None);
            return Action::Continue;
        };
        let now = host::now();
        self.watch.began = now;
        if filter.mode(cluster) == Mode::Sync && self.wait(&filter, cluster, now) {
            return Action::Pause;
        }
        let choice = filter.choose(cluster, now, &[]);
        let probes = choice.pick.probes;
        steer(filter.shim, Some(&choice));
        self.remember(choice);
        if !probes.is_empty() {
            cluster.probes_due.set(probes);
            wake(filter.root_id);
        }
        Action::Continue
    }

    fn on_http_response_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        let filter = Rc::clone(&self.filter);
        self.stop_waiting(&filter);
        if let Some(cluster) = self.cluster.and_then(|index| filter.clusters.get(index)) {
            // A gRPC error without a message is a response of headers alone.
            self.complete = end_of_stream;
            self.failed = server_error()
                || (end_of_stream && grpc_failed(MapType::HttpResponseHeaders) && grpc_response());
            if cluster.config.choice.rule.is_probe_free() {
                self.watch.response();
            } else if cluster.config.probe.piggyback {
                let now = host::now();
                if let Some(end) = self.take_report(cluster, now) {
                    cluster.metrics.report(end);
                }
                if self.answered {
                    self.land(cluster, now, self.failed);
                }
            }
        }
        Action::Continue
    }

    fn on_http_response_body(&mut self, _size: usize, end_of_stream: bool) -> Action {
        self.complete |= end_of_stream;
        Action::Continue
    }

    fn on_http_response_trailers(&mut self, _count: usize) -> Action {
        self.complete = true;
        self.failed_if_grpc = grpc_failed(MapType::HttpResponseTrailers);
        Action::Continue
    }

    fn on_log(&mut self) {
        let filter = Rc::clone(&self.filter);
        self.stop_waiting(&filter);
        let picked = self.cluster;
        if self.failed_if_grpc && grpc_response() {
            self.failed = true;
            if self.answered
                && let Some(cluster) = picked.and_then(|index| filter.clusters.get(index))
            {
                self.land(cluster, host::now(), true);
            }
        }
        // A report and a proper end prove an answer without a property read.
        let class = if self.answered && self.complete { Some(Class::Answer) } else { self.classify(&filter) };
        if let Some(flight) = self.flight.take()
            && let Some(cluster) = picked.and_then(|index| filter.clusters.get(index))
        {
            cluster.gone(flight);
        }
        let Some(cluster) = self.cluster.and_then(|index| filter.clusters.get(index)) else { return };
        let class = match class {
            Some(Class::Answer) if self.failed => Some(Class::UpstreamFailure),
            class => class,
        };
        if cluster.config.choice.rule.keeps_state() {
            self.watch.ended(cluster, self.chosen, class, attempts());
        }
        if let Some(class) = class {
            cluster.metrics.outcome(class);
        }
    }
}

/// How often Envoy sent the request.
fn attempts() -> u64 {
    host::number_property(&["upstream", "request_attempt_count"]).unwrap_or(1)
}

/// Whether the response is gRPC's. For where its headers are known to be at hand: with them and at the end.
fn grpc_response() -> bool {
    let content_type = host::header_bytes(MapType::HttpResponseHeaders, "content-type");
    content_type.is_some_and(|content_type| is_grpc(&content_type))
}

/// Whether the response's status is a 5xx.
fn server_error() -> bool {
    let status = host::header_bytes(MapType::HttpResponseHeaders, ":status");
    status.is_some_and(|status| status.starts_with(b"5"))
}
