//! Decides which reports of a replica's load go to which peers. The agent and the layer share this part.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use prequal_core::server::affinity::{self, Hint};
use prequal_core::server::tracker::Visit;
use prequal_core::shared::endpoint::Endpoint;

#[cfg(feature = "proxy")]
use crate::body;
use crate::hint::{self, Hook};
use crate::load::{HintSeen, Load};
use crate::names;
#[cfg(feature = "proxy")]
use crate::orca::OrcaFormat;
use crate::orca::{self, Orca};
use crate::probe;
use crate::utilization::Utilization;

/// Where load is reported.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[cfg_attr(feature = "proxy", derive(clap::ValueEnum))]
pub enum Report {
    /// On probe replies and on every proxied response.
    #[default]
    Always,
    /// On probe replies only.
    ProbeOnly,
}

/// Load of a replica, and the settings of its reports.
#[derive(Clone)]
pub(crate) struct Reporter {
    pub(crate) load: Load,
    pub(crate) report: Report,
    pub(crate) hints: Option<Hook>,
    pub(crate) utilization: Option<Utilization>,
    pub(crate) orca: Orca,
}

impl Reporter {
    /// Returns the reply to a probe with these headers.
    pub(crate) fn answer(
        &self,
        endpoint: Endpoint,
        probe_endpoint: Option<Endpoint>,
        request: &HeaderMap,
    ) -> Response<Bytes> {
        let report = self.load.report(endpoint, probe_endpoint, None);
        let divisor = self.divisor(request);
        probe::reply(&affinity::scaled(&report, divisor), divisor, request)
    }

    fn divisor(&self, request: &HeaderMap) -> u32 {
        let counters = self.load.counters();
        let Some(hook) = &self.hints else { return 1 };
        let Some(hint) = hint::of(request, counters).and_then(|hint| Hint::parse(hint.as_bytes())) else {
            return 1;
        };
        let divisor = hook.divisor(hint).max(1);
        counters.count_hint(if divisor > 1 { HintSeen::Scaled } else { HintSeen::Unscaled });
        divisor
    }

    /// Puts the report, the utilisation and the ORCA report on a response, each if the settings ask for it.
    pub(crate) fn stamp(
        &self,
        response: &mut HeaderMap,
        endpoint: Endpoint,
        probe_endpoint: Option<Endpoint>,
        leaving: Option<Visit>,
    ) {
        let format = self.orca.format_for(response);
        if self.report == Report::ProbeOnly && self.utilization.is_none() && format.is_none() {
            return;
        }
        let report = match format {
            None => self.load.report(endpoint, probe_endpoint, leaving),
            Some(format) => {
                let limit = self.orca.limit();
                let (report, orca) = self.load.report_with_orca(endpoint, probe_endpoint, leaving, limit);
                if let Some(orca) = orca {
                    orca::stamp(response, &orca, format);
                    self.load.counters().count_orca(false);
                }
                report
            }
        };
        if self.report == Report::Always
            && let Some(value) = probe::header_value(&report, 1)
        {
            response.insert(names::LOAD, value);
        }
        if let Some(utilization) = &self.utilization
            && let Some(value) = utilization.header_value(report.rif)
        {
            response.insert(names::UTILIZATION, value);
        }
    }

    /// Returns the format of the ORCA report that the trailers of a response with these headers carry. gRPC's clients
    /// read reports from trailers only.
    #[cfg(feature = "proxy")]
    pub(crate) fn format_in_trailers(&self, response: &HeaderMap) -> Option<OrcaFormat> {
        self.orca.format_for(response).filter(|_| body::is_grpc(response))
    }

    /// Puts the ORCA report in trailers. By then, the request is no longer in flight.
    #[cfg(feature = "proxy")]
    pub(crate) fn stamp_trailers(&self, trailers: &mut HeaderMap, endpoint: Endpoint, format: OrcaFormat) {
        let (_, orca) = self.load.report_with_orca(endpoint, None, None, self.orca.limit());
        if let Some(orca) = orca {
            orca::stamp(trailers, &orca, format);
        }
    }

    /// Returns the hint of a request, if hints are in use.
    pub(crate) fn hint_of(&self, request: &HeaderMap) -> Option<HeaderValue> {
        self.hints.as_ref()?;
        hint::of(request, self.load.counters()).cloned()
    }

    /// Records that a request with this hint is being answered.
    pub(crate) fn served(&self, hint: Option<&HeaderValue>, status: StatusCode, failed: bool) {
        if let (Some(hook), Some(hint)) = (&self.hints, hint)
            && !failed
            && status.as_u16() < 400
        {
            hook.served(hint);
        }
    }
}
