//! What a balancer counts. Names and labels of metrics are the host's business.

use crate::ejection::Change;
use crate::pool::Branch;
use crate::report::ReportError;
use crate::shared::{End, Updated};

/// Where the counts go.
pub trait Counters {
    /// Something has happened.
    fn count(&self, what: Count);

    /// What came of a transaction on the shared state.
    fn updated<T>(&self, updated: &Updated<T>) {
        let given_up = updated.end == End::GivenUp;
        if updated.conflicts > 0 || updated.replaced > 0 {
            self.count(Count::Shared { conflicts: updated.conflicts, given_up, replaced: updated.replaced });
        }
    }
}

/// For hosts that count nothing.
impl Counters for () {
    fn count(&self, _: Count) {}
}

/// One thing to count.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Count {
    /// A request was placed.
    Pick(Branch),
    /// It is a trial.
    Trial,
    /// A probe has ended.
    Probe(ProbeEnd),
    /// A response carried a report.
    Report(ReportEnd),
    /// A request has ended.
    Outcome(Class),
    /// It was served by another replica than the chosen one.
    Diverted,
    /// What became of a record in the ejection table.
    Ejection(Change),
    /// The ejection table had no room for so many records.
    Overflow(u32),
    /// Too many updates or notes waited: so many were dropped.
    Dropped(u32),
    /// The membership had no room for a replica, so often.
    Refused(u32),
    /// A transaction on the shared state did not go smoothly.
    Shared {
        /// Others had written meanwhile, so often.
        conflicts: u32,
        /// And in the end the change was lost.
        given_up: bool,
        /// So many values did not decode, and were replaced.
        replaced: u32,
    },
}

/// How a probe ended. At rest: sent = sum of all others.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ProbeEnd {
    /// Its report counts.
    Used,
    /// The cluster's policy sent it elsewhere: the host asked has left.
    WrongEndpoint,
    /// A reply without a report.
    NoReport,
    /// A report without an endpoint proves nothing.
    NoEndpoint,
    /// `verified_probes` is set, yet the probe cluster does not say who answered.
    NoHost,
    /// A status other than 200 with a report.
    Status,
    /// Several reports in one reply.
    Duplicate,
    /// A report that does not parse.
    BadReport(ReportError),
    /// No answer in time.
    Timeout,
    /// No connection, or it broke.
    Refused,
}

/// What became of a report on a response.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ReportEnd {
    /// It counts.
    Used,
    /// It names another replica than the one that served.
    WrongEndpoint,
    /// It names nobody, and nobody knows who served.
    NoEndpoint,
    /// It does not parse.
    Bad(ReportError),
    /// One in the format of ORCA that cannot be used: it does not parse, or does not say the utilisation.
    BadOrca,
}

/// Who ended a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Class {
    /// The replica, with an answer.
    Answer,
    /// The replica, by failing: refused, reset, too late, or an answer that is an error.
    UpstreamFailure,
    /// The client went away.
    ClientAbort,
    /// The proxy itself.
    Local,
}
