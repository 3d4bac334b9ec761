//! A replica's load, as a report of it tells.

use crate::capacity::Capacity;
use crate::report::LoadReport;

/// Where a report stood.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Source {
    /// On the reply to a probe: any replica's.
    Probe,
    /// On a response: a chosen replica's, so its RIF is low for the fleet's.
    Response,
}

/// What a replica reports.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Load {
    /// Requests in flight; counted up to 65 535.
    pub rif: u32,
    /// Median latency at that RIF, microseconds, if known.
    pub latency_us: Option<u32>,
    /// Base latency and knee; `None` when it knows nothing.
    pub capacity: Option<Capacity>,
    /// How long ago it started, seconds; `None`: long ago.
    pub up_s: Option<u32>,
    /// Share of recent requests that it failed, per mille.
    pub failing: u16,
    /// Where it was reported.
    pub source: Source,
}

impl Load {
    /// Of a replica that reports no capacity, as agents did before.
    pub fn at_face_value(rif: u32, latency_us: Option<u32>) -> Self {
        let capacity = latency_us.map(|latency_us| Capacity::at_face_value(latency_us, rif));
        Self { rif, latency_us, capacity, up_s: None, failing: 0, source: Source::Probe }
    }
}

impl From<&LoadReport> for Load {
    fn from(report: &LoadReport) -> Self {
        let load = Self::at_face_value(report.rif, report.latency_us);
        let capacity = report.capacity.or(load.capacity);
        Self { capacity, up_s: report.up_s, failing: report.failing, ..load }
    }
}
