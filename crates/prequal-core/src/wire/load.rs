//! A replica's load as taken from its report.

use crate::shared::capacity::Capacity;
use crate::wire::report::LoadReport;

/// The message that carried a report.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Source {
    /// The reply to a probe, which may come from any replica.
    Probe,
    /// A response. It comes from a chosen replica, so its RIF is low compared with the fleet's.
    Response,
}

/// The load that a replica reports.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Load {
    /// Requests in flight. The pool counts up to 65 535.
    pub rif: u32,
    /// Number of those that the server is not working on. The knee counts them, too.
    pub away: u32,
    /// Median latency at that RIF, microseconds, if known.
    pub latency_us: Option<u32>,
    /// Base latency and knee; `None` if the replica does not know them.
    pub capacity: Option<Capacity>,
    /// Time since the replica last became reachable, seconds; `None` if that is long ago.
    pub up_s: Option<u32>,
    /// Share of recent requests that failed, per mille.
    pub failing: u16,
    /// The message that carried the report.
    pub source: Source,
}

impl Load {
    /// Returns the load of a replica that reports no capacity, as earlier agents did.
    pub fn at_face_value(rif: u32, latency_us: Option<u32>) -> Self {
        let capacity = latency_us.map(|latency_us| Capacity::at_face_value(latency_us, rif));
        Self { rif, away: 0, latency_us, capacity, up_s: None, failing: 0, source: Source::Probe }
    }
}

impl From<&LoadReport> for Load {
    fn from(report: &LoadReport) -> Self {
        let load = Self::at_face_value(report.rif, report.latency_us);
        let capacity = report.capacity.or(load.capacity);
        Self { away: report.away, capacity, up_s: report.up_s, failing: report.failing, ..load }
    }
}
