//! The root context: configuration, the slow tick, and every probe of the outbound role.
//!
//! Probes are dispatched here and not by the stream that triggers them: the SDK drops replies whose stream has ended
//! (`docs/adr/0001-root-owned-probes.md`). A stream wakes the root by re-entering the module, see [`wake`].

use std::collections::HashMap;
use std::iter::repeat_n;
use std::rc::Rc;
use std::time::Duration;

use prequal_core::config::Config;
use prequal_core::endpoint::Endpoint;
use prequal_core::hint::Hint;
use prequal_core::members::Target;
use prequal_core::pool::ProbesDue;
use prequal_core::report::{
    HEADER_DEST, HEADER_HINT, HEADER_HOST, HEADER_LATENCY, HEADER_LOAD, HEADER_RIF, LoadReport, PROBE_PATH,
};
use prequal_core::sync::Answer;
use prequal_core::time::Micros;
use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{ContextType, LogLevel, MapType};

use crate::filter::{Cluster, Filter};
use crate::host;
use crate::inbound::stream::InboundStream;
use crate::inbound::{self, Inbound};
use crate::metrics::ProbeEnd;
use crate::stream::Stream;

/// Ticks cost 33 µs each in every VM, so nothing urgent waits for them: news of a quiet worker, gauges, idle probing.
/// Only the deadlines of requests that wait hasten them.
pub(crate) const TICK: Duration = Duration::from_millis(250);

/// Most probes in flight per worker. Beyond, the probe cluster is not answering and more would not help.
const MAX_IN_FLIGHT: usize = 1024;

/// A queue id that Envoy never gives out.
const WAKE: u32 = u32::MAX;

unsafe extern "C" {
    /// Exported by the SDK as part of the ABI.
    safe fn proxy_on_queue_ready(root_id: u32, queue_id: u32);
}

/// Lets the root send the probes that are due, now and as its own. Only from a stream's callback, as the last thing
/// it does (the root is the active context afterwards), and with nothing of [`Filter`] borrowed.
pub(crate) fn wake(root_id: u32) {
    proxy_on_queue_ready(root_id, WAKE);
}

/// The root context of one configuration on one worker.
pub(crate) struct Root {
    pub(crate) id: u32,
    filter: Option<Rc<Filter>>,
    /// In the other role, instead of `filter`.
    inbound: Option<Rc<Inbound>>,
    in_flight: HashMap<u32, Probe>,
    /// When the next tick is due, unless it comes at the pace of [`TICK`]; see `crate::sync`.
    pub(crate) ticks_at: Option<Micros>,
    pub(crate) slow_ticked: Option<Micros>,
}

/// A probe whose reply has not come.
struct Probe {
    cluster: usize,
    call: Call,
}

/// A probe to send.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    /// Who is asked; `None` where the cluster's policy chooses.
    pub(crate) target: Option<Target>,
    /// The stream that waits for it.
    pub(crate) waiter: Option<u32>,
    pub(crate) hint: Option<Hint>,
    pub(crate) timeout_ms: u64,
}

impl Root {
    pub(crate) fn new(id: u32) -> Self {
        Self { id, filter: None, inbound: None, in_flight: HashMap::new(), ticks_at: None, slow_ticked: None }
    }

    fn send_due(&mut self, filter: &Filter, now: Micros) {
        for (index, cluster) in filter.clusters.iter().enumerate() {
            let due = cluster.probes_due.take();
            if !due.is_empty() {
                self.send(filter, index, cluster, due, now);
            }
        }
    }

    /// Sends what is due: to distinct sampled replicas, and to whomever the probe cluster's policy finds.
    pub(crate) fn send(
        &mut self,
        filter: &Filter,
        index: usize,
        cluster: &Cluster,
        due: ProbesDue,
        now: Micros,
    ) {
        let addressed = due.addressed as usize;
        let mut targets = Vec::new();
        if addressed > 0 {
            let pool = cluster.store.pool(&cluster.metrics);
            let members = cluster.store.update_members(&cluster.metrics, |members| {
                // Replicas heard on responses are alive, though nobody probes them.
                let mut news = false;
                for replica in pool.replicas() {
                    news |= members.renew(replica, now);
                }
                news | members.expire(now)
            });
            let fresh_ms = cluster.config.pool.max_age_ms / 10;
            let mut rng = filter.rng.borrow_mut();
            targets =
                members.sample(addressed, &mut *rng, |replica| pool.heard_within(replica, now, fresh_ms));
        }
        // With nobody to address, every probe is one of discovery.
        let unaddressed = due.discovery as usize + if targets.is_empty() { addressed } else { 0 };
        let timeout_ms = cluster.config.probe.timeout_ms;
        let targets = targets.into_iter().map(Some).chain(repeat_n(None, unaddressed));
        for target in targets {
            self.dispatch(index, cluster, Call { target, waiter: None, hint: None, timeout_ms });
        }
    }

    /// True if the probe is on its way.
    pub(crate) fn dispatch(&mut self, index: usize, cluster: &Cluster, call: Call) -> bool {
        if self.in_flight.len() >= MAX_IN_FLIGHT {
            cluster.metrics.undispatched.one();
            return false;
        }
        let address = call.target.map(|target| target.probe.to_string());
        let hint = call.hint.map(|hint| hint.to_string());
        let mut headers = vec![(":method", "GET"), (":path", PROBE_PATH), (":authority", "prequal")];
        if let Some(address) = &address {
            headers.push((HEADER_DEST, address));
        }
        if let Some(hint) = &hint {
            headers.push((HEADER_HINT, hint));
        }
        let timeout = Duration::from_millis(call.timeout_ms);
        match hostcalls::dispatch_http_call(&cluster.config.probe_cluster, headers, None, Vec::new(), timeout)
        {
            Ok(token) => {
                cluster.metrics.sent.one();
                self.in_flight.insert(token, Probe { cluster: index, call });
                true
            }
            Err(_) => {
                cluster.metrics.undispatched.one();
                false
            }
        }
    }

    /// Reads the reply that is being delivered.
    fn reply() -> Result<LoadReport, ProbeEnd> {
        let header = |name| host::header_bytes(MapType::HttpCallResponseHeaders, name);
        let status = header(":status").unwrap_or_default();
        let (load, rif) = (header(HEADER_LOAD), header(HEADER_RIF));
        let reported = load.is_some() || rif.is_some();
        match status.as_slice() {
            b"200" => {}
            // Envoy's own words for a call that failed; an agent would have added a report.
            b"504" if !reported => return Err(ProbeEnd::Timeout),
            b"503" if !reported => return Err(ProbeEnd::Refused),
            _ => return Err(ProbeEnd::Status),
        }
        if host::any_twice(MapType::HttpCallResponseHeaders, &[HEADER_LOAD, HEADER_RIF, HEADER_LATENCY]) {
            return Err(ProbeEnd::Duplicate);
        }
        match (load, rif) {
            (Some(load), _) => LoadReport::parse(load),
            (None, Some(rif)) => LoadReport::parse_pair(&rif, header(HEADER_LATENCY).as_deref()),
            (None, None) => return Err(ProbeEnd::NoReport),
        }
        .map_err(ProbeEnd::BadReport)
    }

    /// Judges a reply and takes from it what it may tell (design §3, "Trust"): the membership learns, and the load of the
    /// replica that answered, if it may be believed, comes back. A reply can have to be rejected and tell a load all the
    /// same: that of another host than was asked.
    fn take_reply(cluster: &Cluster, call: &Call, now: Micros) -> (Option<Answer>, ProbeEnd) {
        let report = match Self::reply() {
            Ok(report) => report,
            Err(end) => return (None, end),
        };
        let taken = if cluster.config.pool.verified_probes {
            Self::take_verified(cluster, call.target, &report, now)
        } else {
            Self::take_unverified(cluster, call.target, &report, now)
        };
        // A load told for one query is scaled for it, so it is no report of the replica's load.
        if let (Ok((Some(answer), _)), None) = (&taken, call.hint) {
            cluster.report(now, answer.replica, &report, answer.standing);
        }
        taken.unwrap_or_else(|end| (None, end))
    }

    fn take_unverified(
        cluster: &Cluster,
        target: Option<Target>,
        report: &LoadReport,
        now: Micros,
    ) -> Result<(Option<Answer>, ProbeEnd), ProbeEnd> {
        let replica = report.endpoint.ok_or(ProbeEnd::NoEndpoint)?;
        let Some(asked) = target else {
            // Nobody was asked by name: a name, but no load.
            cluster.hear_of(now, replica, report);
            return Ok((None, ProbeEnd::Used));
        };
        if asked.replica != replica {
            // The probe cluster does not know the host that was asked: it has left.
            cluster.forget(now, asked.replica);
            cluster.hear_of(now, replica, report);
            return Err(ProbeEnd::WrongEndpoint);
        }
        Ok((cluster.probed(now, replica, report), ProbeEnd::Used))
    }

    /// The same where Envoy says which host answered.
    fn take_verified(
        cluster: &Cluster,
        target: Option<Target>,
        report: &LoadReport,
        now: Micros,
    ) -> Result<(Option<Answer>, ProbeEnd), ProbeEnd> {
        let host = host::header(MapType::HttpCallResponseHeaders, HEADER_HOST);
        let host: Endpoint = host.and_then(|host| host.parse().ok()).ok_or(ProbeEnd::NoHost)?;
        if let Some(asked) = target {
            if asked.probe == host {
                if report.endpoint.is_some_and(|named| named != asked.replica) {
                    return Err(ProbeEnd::WrongEndpoint);
                }
                return Ok((cluster.probed(now, asked.replica, report), ProbeEnd::Used));
            }
            // Envoy does not know the host that was asked, so its policy chose: the probe has become a sample.
            cluster.forget(now, asked.replica);
        }
        let end = if target.is_some() { ProbeEnd::WrongEndpoint } else { ProbeEnd::Used };
        let replica = match (cluster.answering_at(host), report.endpoint) {
            (Some(replica), Some(named)) if replica != named => return Err(ProbeEnd::WrongEndpoint),
            (Some(replica), _) => replica,
            (None, Some(named)) if named != host => {
                if report.probe_endpoint != Some(host) {
                    return Err(ProbeEnd::WrongEndpoint);
                }
                // A separate probe port: that it belongs to the named replica is for a request to show.
                cluster.hear_of(now, named, report);
                return Ok((None, end));
            }
            (None, _) => host,
        };
        Ok((Some(cluster.sample_met(now, replica, report)), end))
    }
}

impl Context for Root {
    fn on_http_call_response(&mut self, token: u32, headers: usize, _body: usize, _trailers: usize) {
        let Some(filter) = self.filter.clone() else { return };
        let Some(Probe { cluster: index, call }) = self.in_flight.remove(&token) else { return };
        let Some(cluster) = filter.clusters.get(index) else { return };
        let now = host::now();
        // Without headers the reply broke off in its body; asking for a header then makes the SDK panic.
        let (answer, end) =
            if headers == 0 { (None, ProbeEnd::Refused) } else { Self::take_reply(cluster, &call, now) };
        cluster.metrics.probe(end);
        if let Some(stream) = call.waiter {
            self.heard(&filter, stream, answer, now);
        }
        self.expire(&filter, now);
    }
}

impl RootContext for Root {
    fn on_configure(&mut self, _size: usize) -> bool {
        let text = self.get_plugin_configuration().unwrap_or_default();
        let parsed = match std::str::from_utf8(&text) {
            Ok(text) => Config::parse(text).map_err(|errors| errors.to_string()),
            Err(_) => Err("`configuration` is not UTF-8".to_owned()),
        };
        match parsed {
            Ok(Config::Inbound(config)) => {
                self.inbound = Some(Rc::new(Inbound::new(config)));
                self.set_tick_period(inbound::TICK);
                true
            }
            Ok(Config::Outbound(config)) => {
                let name = host::text_property(&["plugin_root_id"]).unwrap_or_default();
                self.filter = Some(Rc::new(Filter::new(self.id, &name, config, host::now())));
                self.set_tick_period(TICK);
                true
            }
            Err(errors) => {
                host::log(LogLevel::Error, &format!("prequal: configuration refused: {errors}"));
                false
            }
        }
    }

    fn on_tick(&mut self) {
        if let Some(inbound) = &self.inbound {
            inbound.tick(host::now());
        }
        let Some(filter) = self.filter.clone() else { return };
        let now = host::now();
        self.ticks_at = None;
        self.expire(&filter, now);
        if self.slow_tick(now) {
            for (index, cluster) in filter.clusters.iter().enumerate() {
                let probes = filter.flush(cluster, now);
                if !probes.is_empty() {
                    self.send(&filter, index, cluster, probes, now);
                }
            }
        }
        self.arm(&filter, now);
    }

    fn on_queue_ready(&mut self, queue_id: u32) {
        if queue_id == WAKE
            && let Some(filter) = self.filter.clone()
        {
            let now = host::now();
            if let Some(ask) = filter.waits.ask.take() {
                self.ask(&filter, ask, now);
            }
            self.send_due(&filter, now);
        }
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        if let Some(inbound) = self.inbound.clone() {
            return Some(Box::new(InboundStream::new(inbound)));
        }
        self.filter.clone().map(|filter| Box::new(Stream::new(id, filter)) as Box<dyn HttpContext>)
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}
