//! What a replica knows of itself: load, failures, age; and the report made of them.
//!
//! Its embedder counts the requests: the agent all of them, a worker of an Envoy its own. Where there are several, each records
//! what the others' requests showed ([`Replica::record`]) and is given how many are in flight in all ([`Replica::report_at`]).

use std::sync::Arc;

use crate::endpoint::Endpoint;
use crate::failures::FailureShare;
use crate::orca::OrcaReport;
use crate::orca::backend::BackendReport;
use crate::rates::Rates;
use crate::report::LoadReport;
use crate::time::Micros;
use crate::tracker::{Ended, Outcome, Present, Ticket, Tracker, TrackerConfig, Visit};

/// Reports hold the age of a replica below this, seconds; older ones stay short.
pub const YOUNG_S: u32 = 600;

/// What a backend said of its load counts for this long, microseconds.
pub const BACKEND_FRESH_US: u64 = 10_000_000;

/// Load, failures and age of one replica.
#[derive(Debug)]
pub struct Replica {
    /// Requests in flight and what they took.
    pub tracker: Tracker,
    failures: FailureShare,
    /// If load is reported in the format of ORCA too.
    rates: Option<Rates>,
    /// What the backend said last of its load, if it does, and when.
    backend: Option<(Micros, Arc<BackendReport>)>,
    /// Since when it can serve; `None` while it cannot.
    up: Option<Micros>,
}

impl Replica {
    /// An idle replica that can serve since `up`.
    pub fn new(config: TrackerConfig, up: Option<Micros>) -> Self {
        let (tracker, failures) = (Tracker::new(config), FailureShare::default());
        Self { tracker, failures, rates: None, backend: None, up }
    }

    /// Counts rates from now on, as means that fade with a time constant of `window_us`, for [`Self::orca`]. Where it does
    /// already, only the time constant changes.
    pub fn count_rates(&mut self, now: Micros, window_us: u64) {
        match &mut self.rates {
            Some(rates) => rates.set_window(now, window_us),
            None => self.rates = Some(Rates::new(now, window_us)),
        }
    }

    /// Whether it counts rates.
    pub fn counts_rates(&self) -> bool {
        self.rates.is_some()
    }

    /// `rif` are in flight, here and elsewhere: what the mean in flight is made of, where others serve too.
    pub fn sample(&mut self, now: Micros, rif: u32) {
        if let Some(rates) = &mut self.rates {
            rates.moved(now, rif);
        }
    }

    /// The backend says of its load what [`Self::orca`] is to carry on.
    pub fn backend_reports(&mut self, now: Micros, report: BackendReport) {
        self.backend = Some((now, Arc::new(report)));
    }

    /// What the backend said of its load, unless that was too long ago.
    pub fn backend(&self, now: Micros) -> Option<&Arc<BackendReport>> {
        let (at, report) = self.backend.as_ref()?;
        (now.saturating_since(*at) <= BACKEND_FRESH_US).then_some(report)
    }

    /// Time passes: before [`Self::record`] of what ended until `now`.
    pub fn pass(&mut self, now: Micros) {
        if let Some(rates) = &mut self.rates {
            rates.pass(now);
        }
    }

    /// `count` requests ended elsewhere, and what they showed is lost.
    pub fn missed(&mut self, count: u64) {
        if let Some(rates) = &mut self.rates {
            rates.missed(count);
        }
    }

    /// A request arrives.
    pub fn start(&mut self, now: Micros) -> Ticket {
        self.start_behind(now, self.tracker.present())
    }

    /// The same where `others` are in flight, here and elsewhere.
    pub fn start_behind(&mut self, now: Micros, others: Present) -> Ticket {
        self.sample(now, others.rif.saturating_add(1));
        self.tracker.start_behind(now, others)
    }

    /// A request ends, however it ends. Returns what it showed, which is recorded.
    pub fn finish(&mut self, ticket: Ticket, now: Micros, outcome: Outcome) -> Ended {
        self.finish_among(ticket, now, outcome, self.tracker.present())
    }

    /// The same where `present` are in flight, here and elsewhere, itself included.
    pub fn finish_among(&mut self, ticket: Ticket, now: Micros, outcome: Outcome, present: Present) -> Ended {
        self.failures.record(now, outcome);
        if let Some(rates) = &mut self.rates {
            rates.ended(now, present.rif.saturating_sub(1), outcome);
        }
        self.tracker.finish_among(ticket, now, outcome, present)
    }

    /// Takes in what a request showed that ended elsewhere.
    pub fn record(&mut self, ended: Ended) {
        self.failures.record(ended.at, ended.outcome);
        if let Some(rates) = &mut self.rates {
            rates.heard(ended.at, ended.outcome);
        }
        self.tracker.record(ended);
    }

    /// The share of requests that failed by the replica's own making, per mille, 0 to 1000.
    pub fn failing(&self, now: Micros) -> u16 {
        self.failures.per_mille(now)
    }

    /// Since when it can serve; `None`: it cannot.
    pub fn up(&self) -> Option<Micros> {
        self.up
    }

    /// Sets since when it can serve; a replica that came back is as cold as a new one.
    pub fn set_up(&mut self, up: Option<Micros>) {
        self.up = up;
    }

    /// How long it can serve, seconds; 0 while it cannot.
    pub fn up_s(&self, now: Micros) -> u32 {
        self.up.map_or(0, |since| u32::try_from(now.saturating_since(since) / 1_000_000).unwrap_or(u32::MAX))
    }

    /// The report of this replica as `endpoint`, with what is in flight here.
    ///
    /// `leaving` is the request on whose response the report goes: the client reads it when that response is over, and it
    /// must say what the *next* request would find.
    pub fn report(
        &mut self,
        now: Micros,
        endpoint: Endpoint,
        probe_endpoint: Option<Endpoint>,
        leaving: Option<Visit>,
    ) -> LoadReport {
        self.report_at(now, self.tracker.present(), endpoint, probe_endpoint, leaving)
    }

    /// The same where `present` are in flight, here and elsewhere.
    pub fn report_at(
        &mut self,
        now: Micros,
        present: Present,
        endpoint: Endpoint,
        probe_endpoint: Option<Endpoint>,
        leaving: Option<Visit>,
    ) -> LoadReport {
        let rif = present.rif.saturating_sub(leaving.is_some().into());
        LoadReport {
            rif,
            latency_us: self.tracker.latency_at(now, rif, leaving),
            capacity: self.tracker.capacity_after(now, present.away, leaving),
            endpoint: Some(endpoint),
            probe_endpoint,
            failing: self.failing(now),
            up_s: Some(self.up_s(now)).filter(|up| *up < YOUNG_S),
        }
    }

    /// `report`, which was made just now, in the format of ORCA; `None` without [`Self::count_rates`]. `leaves`: on the response
    /// to a request that still counts.
    pub fn orca(
        &mut self,
        now: Micros,
        report: &LoadReport,
        leaves: bool,
        limit: Option<u32>,
    ) -> Option<OrcaReport> {
        let rates = self.rates.as_mut()?;
        let rates = if leaves { rates.over_with_leaving(now) } else { rates.over(now) };
        let backend = self.backend(now).cloned();
        Some(OrcaReport { backend, ..OrcaReport::new(report, rates, limit) })
    }
}
