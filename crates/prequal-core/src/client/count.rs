//! What a balancer counts.

use crate::exceptions::Change;
use crate::pool::Branch;
use crate::report::ReportError;
use crate::shared::{End, Updated};

/// Where the counts go.
pub trait Counters {
    /// Something has happened.
    fn count(&self, what: Count);

    /// What came of a transaction on the shared state.
    fn updated<T>(&self, updated: &Updated<T>) {
        if updated.conflicts > 0 {
            self.count(Count::Conflicts(updated.conflicts));
        }
        if updated.end == End::GivenUp {
            self.count(Count::GivenUp);
        }
        if updated.replaced > 0 {
            self.count(Count::Replaced(updated.replaced));
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
    /// What became of a record in the exceptions table.
    Exception(Change),
    /// Too many updates waited: one was dropped.
    Dropped,
    /// Others had written meanwhile, so often.
    Conflicts(u32),
    /// A change was lost to conflicts.
    GivenUp,
    /// So many shared values did not decode and were replaced.
    Replaced(u32),
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
