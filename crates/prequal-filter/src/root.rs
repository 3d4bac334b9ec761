//! The root context: configuration, the slow tick, and the calls that carry probes.
//!
//! A stream wakes the root by re-entering the module; see [`host::wake`].

use std::rc::Rc;
use std::time::Duration;

use prequal_core::config::Config;
use prequal_core::shared::time::Micros;
use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{ContextType, LogLevel};

use crate::filter::{Cluster, Filter};
use crate::host::{self, WAKE};
use crate::inbound::stream::InboundStream;
use crate::inbound::{self, Inbound};
use crate::probes::Probes;
use crate::stream::Stream;
use crate::sync;

/// Period of the slow tick, which does work that is not urgent: the pending updates of an idle worker, the gauges, and
/// idle probes, which are sent while no requests arrive. The period is long because a tick costs 33 µs in every VM.
/// Only deadlines of waiting requests cause earlier ticks. Counters are passed to Envoy at every tick.
const TICK: Duration = Duration::from_millis(250);
const SLOW_TICK_US: u64 = TICK.as_micros() as u64 * 9 / 10;

/// The root context of one configuration on one worker.
pub(crate) struct Root {
    id: u32,
    filter: Option<Rc<Filter>>,
    /// State of the inbound role. A root has either this or `filter`.
    inbound: Option<Rc<Inbound>>,
    probes: Probes,
    /// Time of the tick that [`Self::arm`] has scheduled; `None` before the first one, and in a tick until `arm` runs.
    ticks_at: Option<Micros>,
    slow_ticked: Option<Micros>,
}

impl Root {
    pub(crate) fn new(id: u32) -> Self {
        Self { id, filter: None, inbound: None, probes: Probes::default(), ticks_at: None, slow_ticked: None }
    }

    /// Schedules the next tick: at the earliest deadline, or after [`TICK`].
    fn arm(&mut self, filter: &Filter, now: Micros) {
        let tick = TICK.as_micros() as u64;
        let deadline = filter.waits.borrow().earliest();
        let in_us = deadline.map_or(tick, |at| at.saturating_since(now).clamp(1, tick));
        let at = now.plus(in_us);
        // A tick that is due earlier is good enough, because every tick schedules the next one.
        let in_time = self.ticks_at.is_some_and(|ticks_at| ticks_at <= at && ticks_at.plus(tick) > now);
        if !in_time {
            let period = Duration::from_millis(in_us.div_ceil(1000));
            let _ = hostcalls::set_tick_period(period);
            self.ticks_at = Some(now.plus(period.as_micros() as u64));
        }
    }

    /// Returns whether this tick is also a slow tick.
    fn slow_tick(&mut self, now: Micros) -> bool {
        // Envoy's timers may come a few milliseconds early.
        let due = self.slow_ticked.is_none_or(|at| now.saturating_since(at) >= SLOW_TICK_US || now < at);
        if due {
            self.slow_ticked = Some(now);
        }
        due
    }
}

impl Context for Root {
    fn on_http_call_response(&mut self, token: u32, headers: usize, _body: usize, _trailers: usize) {
        let Some(filter) = self.filter.clone() else { return };
        let now = host::now();
        if let Some((stream, answer)) = self.probes.replied(&filter, token, headers, now) {
            sync::probe_ended(&mut self.probes, &filter, stream, answer, now);
        }
        sync::expire(&mut self.probes, &filter, now);
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
        sync::expire(&mut self.probes, &filter, now);
        filter.clusters.iter().for_each(|cluster| cluster.metrics.flush());
        if self.slow_tick(now) {
            let awake = |(_, cluster): &(usize, &Cluster)| !cluster.balancer.borrow().is_resting();
            for (index, cluster) in filter.clusters.iter().enumerate().filter(awake) {
                self.probes.send(&filter, index, filter.tick(cluster, now), now);
            }
        }
        self.arm(&filter, now);
    }

    fn on_queue_ready(&mut self, queue_id: u32) {
        let Some(filter) = self.filter.clone().filter(|_| queue_id == WAKE) else { return };
        let now = host::now();
        if let Some(ask) = filter.ask.take()
            && sync::ask(&mut self.probes, &filter, ask)
        {
            self.arm(&filter, now);
        }
        for (index, cluster) in filter.clusters.iter().enumerate() {
            self.probes.send(&filter, index, cluster.probes_due.take(), now);
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
