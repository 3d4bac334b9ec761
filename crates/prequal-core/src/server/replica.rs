//! Load, failures and age as a replica measures them itself, and the report made from them.
//!
//! The embedder counts the requests: the agent counts all of them, and a worker of an Envoy counts its own. If there
//! are several workers, each records the results of the others' requests ([`Replica::record`]) and is given the number
//! of all requests in flight ([`Replica::report_at`]).

use std::sync::Arc;

use crate::server::failures::FailureShare;
use crate::server::rates::Rates;
use crate::server::tracker::{Ended, Present, Ticket, Tracker, TrackerConfig, Visit};
use crate::shared::endpoint::Endpoint;
use crate::shared::outcome::Outcome;
use crate::shared::time::Micros;
use crate::wire::orca::OrcaReport;
use crate::wire::orca::backend::BackendReport;
use crate::wire::report::LoadReport;

/// Age below which a replica's reports contain its age, seconds. The reports of older replicas stay short.
pub const YOUNG_S: u32 = 600;

/// Time for which a backend's own load report counts, microseconds, unless the report itself specifies it.
pub const BACKEND_FRESH_US: u64 = 10_000_000;

/// Load, failures and age of one replica.
#[derive(Debug)]
pub struct Replica {
    /// Requests in flight and their latencies.
    pub tracker: Tracker,
    failures: FailureShare,
    /// Rates, if load is reported in the ORCA format too.
    rates: Option<Rates>,
    /// Last load report of the backend itself, if it sends any, and until when it counts.
    backend: Option<(Micros, Arc<BackendReport>)>,
    /// Time since which the replica has been able to serve; `None` while it cannot.
    up: Option<Micros>,
}

impl Replica {
    /// Creates an idle replica that has been able to serve since `up`.
    pub fn new(config: TrackerConfig, up: Option<Micros>) -> Self {
        let (tracker, failures) = (Tracker::new(config), FailureShare::default());
        Self { tracker, failures, rates: None, backend: None, up }
    }

    /// Starts to count rates for [`Self::orca`], as means that fade with a time constant of `window_us`. If rates are
    /// counted already, only the time constant changes.
    pub fn count_rates(&mut self, now: Micros, window_us: u64) {
        match &mut self.rates {
            Some(rates) => rates.set_window(now, window_us),
            None => self.rates = Some(Rates::new(now, window_us)),
        }
    }

    /// Whether rates are counted.
    pub fn counts_rates(&self) -> bool {
        self.rates.is_some()
    }

    /// Records that `rif` requests are in flight, here and elsewhere. If other workers serve the replica too, the mean
    /// number in flight comes from these samples.
    pub fn sample(&mut self, now: Micros, rif: u32) {
        if let Some(rates) = &mut self.rates {
            rates.moved(now, rif);
        }
    }

    /// Records the backend's own load report, which [`Self::orca`] passes on.
    pub fn backend_reports(&mut self, now: Micros, report: BackendReport) {
        self.backend_reports_for(now, report, BACKEND_FRESH_US);
    }

    /// Like [`Self::backend_reports`], with a report that counts for `fresh_us`. It replaces the previous report, but
    /// counts for at least as long as that one would have: a report on a response may arrive between two reports of a
    /// stream.
    pub fn backend_reports_for(&mut self, now: Micros, report: BackendReport, fresh_us: u64) {
        let until = Micros(now.0.saturating_add(fresh_us));
        let until = self.backend.as_ref().map_or(until, |(before, _)| until.max(*before));
        self.backend = Some((until, Arc::new(report)));
    }

    /// Records that the backend's stream of reports has ended. The last report counts for [`BACKEND_FRESH_US`] at most.
    pub fn backend_stream_ended(&mut self, now: Micros) {
        if let Some((until, _)) = &mut self.backend {
            *until = (*until).min(Micros(now.0.saturating_add(BACKEND_FRESH_US)));
        }
    }

    /// Returns the backend's own load report, unless it is too old.
    pub fn backend(&self, now: Micros) -> Option<&Arc<BackendReport>> {
        let (until, report) = self.backend.as_ref()?;
        (now <= *until).then_some(report)
    }

    /// Advances the time to `now`. Call it before [`Self::record`] for the requests that ended before `now`.
    pub fn pass(&mut self, now: Micros) {
        if let Some(rates) = &mut self.rates {
            rates.pass(now);
        }
    }

    /// Records that `count` requests ended elsewhere and that their results are lost.
    pub fn missed(&mut self, count: u64) {
        if let Some(rates) = &mut self.rates {
            rates.missed(count);
        }
    }

    /// Records that a request arrives.
    pub fn start(&mut self, now: Micros) -> Ticket {
        self.start_behind(now, self.tracker.present())
    }

    /// Like [`Self::start`], with `others` in flight, here and elsewhere.
    pub fn start_behind(&mut self, now: Micros, others: Present) -> Ticket {
        self.sample(now, others.rif.saturating_add(1));
        self.tracker.start_behind(now, others)
    }

    /// Records that a request ends, with any outcome. Returns its result, which is then already recorded.
    pub fn finish(&mut self, ticket: Ticket, now: Micros, outcome: Outcome) -> Ended {
        self.finish_among(ticket, now, outcome, self.tracker.present())
    }

    /// Like [`Self::finish`], with `present` in flight, here and elsewhere, including the request itself.
    pub fn finish_among(&mut self, ticket: Ticket, now: Micros, outcome: Outcome, present: Present) -> Ended {
        self.failures.record(now, outcome);
        if let Some(rates) = &mut self.rates {
            rates.ended(now, present.rif.saturating_sub(1), outcome);
        }
        self.tracker.finish_among(ticket, now, outcome, present)
    }

    /// Records the result of a request that ended elsewhere.
    pub fn record(&mut self, ended: Ended) {
        self.failures.record(ended.at, ended.outcome);
        if let Some(rates) = &mut self.rates {
            rates.heard(ended.at, ended.outcome);
        }
        self.tracker.record(ended);
    }

    /// Returns the share of requests that failed through the replica's own fault, per mille, 0 to 1000.
    pub fn failing(&self, now: Micros) -> u16 {
        self.failures.per_mille(now)
    }

    /// Returns the time since which the replica has been able to serve; `None` if it cannot.
    pub fn up(&self) -> Option<Micros> {
        self.up
    }

    /// Sets the time since which the replica has been able to serve. A replica that has returned is as cold as a new
    /// one.
    pub fn set_up(&mut self, up: Option<Micros>) {
        self.up = up;
    }

    /// Returns for how long the replica has been able to serve, seconds; 0 while it cannot.
    pub fn up_s(&self, now: Micros) -> u32 {
        self.up.map_or(0, |since| u32::try_from(now.saturating_since(since) / 1_000_000).unwrap_or(u32::MAX))
    }

    /// Returns this replica's report, which names the replica `endpoint` and counts the requests in flight here.
    ///
    /// `leaving` is the request whose response carries the report. When the client reads the report, that response is
    /// over, so the report must describe the load that the *next* request would meet.
    pub fn report(
        &mut self,
        now: Micros,
        endpoint: Endpoint,
        probe_endpoint: Option<Endpoint>,
        leaving: Option<Visit>,
    ) -> LoadReport {
        self.report_at(now, self.tracker.present(), endpoint, probe_endpoint, leaving)
    }

    /// Like [`Self::report`], with `present` in flight, here and elsewhere.
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
            away: present.away.min(rif),
            latency_us: self.tracker.latency_at(now, rif, leaving),
            capacity: self.tracker.capacity_after(now, present.away, leaving),
            endpoint: Some(endpoint),
            probe_endpoint,
            failing: self.failing(now),
            up_s: Some(self.up_s(now)).filter(|up| *up < YOUNG_S),
        }
    }

    /// Returns `report`, which was just made, in the ORCA format; `None` without [`Self::count_rates`]. `leaves` is
    /// true if the report goes on the response to a request that is still counted.
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
