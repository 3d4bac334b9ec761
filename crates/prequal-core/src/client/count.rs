//! The events that a balancer counts. The embedder (Envoy filter, native module, simulator) decides on the names and
//! labels of metrics.

use crate::client::ejection::Change;
use crate::client::pool::Branch;
use crate::shared::cas::{UpdateEnd, Updated};
use crate::wire::report::ReportError;

/// Receiver of the counts.
pub trait Counters {
    /// Counts one event.
    fn count(&self, what: Count);

    /// Counts the conflicts and damaged values of a transaction on the shared state.
    fn updated<T>(&self, updated: &Updated<T>) {
        let given_up = updated.end == UpdateEnd::GivenUp;
        if updated.conflicts > 0 || updated.replaced > 0 {
            self.count(Count::Shared { conflicts: updated.conflicts, given_up, replaced: updated.replaced });
        }
    }
}

/// Counters of embedders that count nothing.
impl Counters for () {
    fn count(&self, _: Count) {}
}

/// An event to count.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Count {
    /// A request was placed.
    Pick(Branch),
    /// A request was placed as a trial.
    Trial,
    /// A probe has ended.
    Probe(ProbeEnd),
    /// A response carried a report.
    Report(ReportEnd),
    /// A request has ended.
    Outcome(Class),
    /// A request was served by a replica other than the chosen one.
    Diverted,
    /// How an update changed the ejection table, if at all.
    Ejection(Change),
    /// Number of records that the ejection table had no room for.
    Overflow(u32),
    /// Number of updates or notes dropped because too many were waiting.
    Dropped(u32),
    /// Number of times that the membership had no room for a replica.
    Refused(u32),
    /// A transaction on the shared state met conflicts or damaged values.
    Shared {
        /// Number of times that other workers had written in the meantime.
        conflicts: u32,
        /// Whether the write was given up after too many conflicts. Pending updates are retried later; the effect of
        /// the pick itself is lost.
        given_up: bool,
        /// Number of values that did not decode and were replaced.
        replaced: u32,
    },
}

/// How a probe ended. While no probe is in flight, the number of probes sent equals the sum of all of these.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ProbeEnd {
    /// Its report counts.
    Used,
    /// Another host answered, or the report names another replica. Another host answers if the host that was asked has
    /// left the cluster.
    WrongEndpoint,
    /// The reply has no report.
    NoReport,
    /// The report names no endpoint, so it proves nothing.
    NoEndpoint,
    /// `verified_probes` is set, but the probe cluster does not say which host answered.
    NoHost,
    /// The status of the reply is not 200. A 504 or 503 without a report counts as [`Self::Timeout`] or
    /// [`Self::Refused`] instead.
    Status,
    /// The reply has several reports.
    Duplicate,
    /// The report does not parse.
    BadReport(ReportError),
    /// No answer came in time.
    Timeout,
    /// There was no connection, or it broke.
    Refused,
}

/// How a report on a response was judged.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ReportEnd {
    /// It counts.
    Used,
    /// It names a replica other than the one that served.
    WrongEndpoint,
    /// The proxy does not know which replica served.
    NoEndpoint,
    /// It does not parse.
    Bad(ReportError),
    /// It is in the ORCA format and unusable: it does not parse, or lacks the utilisation.
    BadOrca,
}

/// The party that ended a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Class {
    /// The replica, with an answer.
    Answer,
    /// The replica, with a failure: refused, reset, too late, or an error as its answer.
    UpstreamFailure,
    /// The client went away.
    ClientAbort,
    /// The proxy itself.
    Local,
}
