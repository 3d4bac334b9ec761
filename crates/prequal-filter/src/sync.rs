//! Synchronous mode: requests that wait for probes of their own (`docs/adr/0006-sync-mode.md`).
//!
//! A stream puts itself down as the one that asks, wakes the root, and pauses if the root then holds a wait for it. The
//! root owns the calls and the waits. It places a request when its wait is over and resumes it. A stream that ends first
//! takes its wait away, so a dead stream is never resumed; a wait whose calls cannot be sent never begins, so no request
//! is left hanging.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use prequal_core::hint::{Hint, HintSource};
use prequal_core::sync::{Answer, Ending, Waiting};
use prequal_core::time::Micros;
use proxy_wasm::hostcalls;
use proxy_wasm::types::MapType;

use crate::filter::Filter;
use crate::host;
use crate::metrics::WaitEnd;
use crate::root::{Call, Root, TICK};
use crate::steer::{Choice, steer};

/// The choice for a request that waits; the stream looks here once it goes on.
pub(crate) type Placed = Rc<Cell<Option<Choice>>>;

/// A request that wants to wait.
pub(crate) struct Ask {
    pub(crate) stream: u32,
    pub(crate) cluster: usize,
    pub(crate) hint: Option<Hint>,
    pub(crate) began: Micros,
    pub(crate) placed: Placed,
}

/// A request that waits.
struct Wait {
    cluster: usize,
    hinted: bool,
    began: Micros,
    deadline: Micros,
    waiting: Waiting,
    placed: Placed,
}

/// The waiting requests of one root.
#[derive(Default)]
pub(crate) struct Waits {
    /// From the stream that wakes the root, to the root.
    pub(crate) ask: Cell<Option<Ask>>,
    open: RefCell<HashMap<u32, Wait>>,
    /// No deadline comes before this.
    earliest: Cell<Option<Micros>>,
    /// The latest look at the clock.
    looked: Cell<Micros>,
}

impl Waits {
    pub(crate) fn contains(&self, stream: u32) -> bool {
        self.open.borrow().contains_key(&stream)
    }

    /// The stream has ended, or something else answers it. True if it still waited.
    pub(crate) fn forget(&self, stream: u32) -> bool {
        self.open.borrow_mut().remove(&stream).is_some()
    }

    fn begin(&self, stream: u32, wait: Wait) {
        let deadline = wait.deadline;
        self.open.borrow_mut().insert(stream, wait);
        self.earliest.set(Some(self.earliest.get().map_or(deadline, |earliest| earliest.min(deadline))));
    }

    /// A call of the stream has ended; the wait, if that was the end of it.
    fn ended(&self, stream: u32, answer: Option<Answer>) -> Option<(Wait, Ending)> {
        let mut open = self.open.borrow_mut();
        let ending = open.get_mut(&stream)?.waiting.ended(answer)?;
        Some((open.remove(&stream)?, ending))
    }

    /// Those whose deadline has passed. A clock that steps back ends all waits: none may outlive its deadline.
    fn expired(&self, now: Micros) -> Vec<(u32, Wait)> {
        let stepped_back = now < self.looked.replace(now);
        if !stepped_back && self.earliest.get().is_none_or(|earliest| now < earliest) {
            return Vec::new();
        }
        let mut open = self.open.borrow_mut();
        let over = |wait: &Wait| stepped_back || now >= wait.deadline;
        let expired: Vec<u32> =
            open.iter().filter(|(_, wait)| over(wait)).map(|(stream, _)| *stream).collect();
        let expired = expired.iter().filter_map(|stream| open.remove_entry(stream)).collect();
        self.earliest.set(open.values().map(|wait| wait.deadline).min());
        expired
    }
}

/// The hint of the request that is the effective context, put on it for the replica that will serve it.
pub(crate) fn take_hint(source: Option<&HintSource>) -> Option<Hint> {
    let source = source?;
    let read = |name: &str| hostcalls::get_map_value_bytes(MapType::HttpRequestHeaders, name).ok().flatten();
    let header = source.header.as_deref().and_then(read);
    let path = source.path_segment.and_then(|_| read(":path"));
    source.hint(header.as_deref(), path.as_deref())
}

impl Root {
    /// Sends the probes of a request that wants to wait. No wait begins where there is nothing to compare, or nothing
    /// could be sent: the stream then goes on at once.
    pub(crate) fn ask(&mut self, filter: &Filter, ask: Ask, now: Micros) {
        let Some(cluster) = filter.clusters.get(ask.cluster) else { return };
        let settings = cluster.config.choice.sync;
        // The answer of one that is out would count as one of `d` and then not be taken.
        let exceptions = cluster.exceptions();
        let is_out = |replica| exceptions.as_ref().is_some_and(|table| table.is_out(replica));
        let targets = cluster.rule.with_members(cluster, now, |members| {
            members.sample_in_use(settings.d, &mut *filter.rng.borrow_mut(), is_out)
        });
        if targets.len() < 2 {
            return cluster.metrics.waited(WaitEnd::Unasked);
        }
        let timeout_ms =
            cluster.config.probe.timeout_ms.max(u64::from(settings.deadline_ms) + TIMER_SLACK_MS);
        let mut waiting = Waiting::new(settings.d, targets.len());
        let mut over = None;
        for target in targets {
            let call = Call { target: Some(target), waiter: Some(ask.stream), hint: ask.hint, timeout_ms };
            if !self.dispatch(ask.cluster, cluster, call) {
                over = waiting.ended(None);
            }
        }
        if over.is_some() {
            return cluster.metrics.waited(WaitEnd::Unasked);
        }
        let deadline = ask.began.plus(u64::from(settings.deadline_ms) * 1000);
        filter.waits.begin(
            ask.stream,
            Wait {
                cluster: ask.cluster,
                hinted: ask.hint.is_some(),
                began: ask.began,
                deadline,
                waiting,
                placed: ask.placed,
            },
        );
        self.arm(filter, now);
    }

    /// A probe of a waiting request has ended.
    pub(crate) fn heard(&mut self, filter: &Filter, stream: u32, answer: Option<Answer>, now: Micros) {
        if let Some((wait, ending)) = filter.waits.ended(stream, answer) {
            self.place(filter, stream, wait, ending, now);
        }
    }

    /// Places the requests whose deadline has passed.
    pub(crate) fn expire(&mut self, filter: &Filter, now: Micros) {
        for (stream, wait) in filter.waits.expired(now) {
            self.place(filter, stream, wait, Ending::Deadline, now);
        }
    }

    /// Chooses for a request that has waited, and lets it go on.
    fn place(&mut self, filter: &Filter, stream: u32, wait: Wait, ending: Ending, now: Micros) {
        let Some(cluster) = filter.clusters.get(wait.cluster) else { return };
        // The stream took its wait away when it ended; should the host know better, there is nobody to resume.
        if hostcalls::set_effective_context(stream).is_err() {
            return;
        }
        let answers = wait.waiting.answers();
        let choice = filter.choose(cluster, now, answers);
        cluster.metrics.waited(WaitEnd::Decided(ending));
        cluster.metrics.sync_answers.add(answers.len() as u32);
        cluster.metrics.sync_wait.record(now.saturating_since(wait.began));
        let mut due = choice.pick.probes;
        steer(filter.shim, Some(&choice));
        wait.placed.set(Some(choice));
        let _ = hostcalls::resume_http_request();
        let _ = hostcalls::set_effective_context(self.id);
        if !wait.hinted {
            // The answers have filled the pool.
            due.addressed = 0;
        }
        if !due.is_empty() {
            self.send(filter, wait.cluster, cluster, due, now);
        }
    }

    /// Sets the tick to the next deadline, or back to its slow pace.
    pub(crate) fn arm(&mut self, filter: &Filter, now: Micros) {
        let tick = TICK.as_micros() as u64;
        let in_us = filter.waits.earliest.get().map_or(tick, |at| at.saturating_since(now).clamp(1, tick));
        let at = now.plus(in_us);
        // A tick that comes a little sooner serves as well. After it the period has to be set again.
        let in_time = self.ticks_at.is_some_and(|ticks_at| ticks_at <= at && ticks_at.plus(tick) > now);
        if !in_time {
            let period = Duration::from_millis(in_us.div_ceil(1000));
            let _ = hostcalls::set_tick_period(period);
            self.ticks_at = Some(now.plus(period.as_micros() as u64));
        }
    }

    /// Whether a slow tick is due at this one.
    pub(crate) fn slow_tick(&mut self, now: Micros) -> bool {
        // Envoy's timers may come a few milliseconds early.
        let due = self.slow_ticked.is_none_or(|at| now.saturating_since(at) >= SLOW_TICK_US || now < at);
        if due {
            self.slow_ticked = Some(now);
        }
        due
    }
}

/// Envoy's timers are off by up to 4 ms either way: a call must not time out before the deadline.
const TIMER_SLACK_MS: u64 = 10;
const SLOW_TICK_US: u64 = TICK.as_micros() as u64 * 9 / 10;

/// Marks a stream's wait as aborted if it still waits.
pub(crate) fn abort(filter: &Filter, stream: u32, cluster: Option<usize>) {
    if filter.waits.forget(stream)
        && let Some(cluster) = cluster.and_then(|index| filter.clusters.get(index))
    {
        cluster.metrics.waited(WaitEnd::Aborted);
    }
}

/// The route that Envoy has found, for [`prequal_core::config::ChoiceSettings::route_modes`].
pub(crate) fn route_name() -> Option<String> {
    host::text_property(&["xds", "route_name"])
}
