//! Label values of the metrics, each list in the order that its comment names. Every embedder uses them, so that one
//! dashboard fits them all.

use super::count::{ProbeEnd, ReportEnd};

/// Values of `branch` of `picks_total`, in the order of [`Branch`](crate::client::pool::Branch).
pub const PICKS: [&str; 7] = ["cold", "hot", "trial", "fallback", "sync", "scored", "agentless"];
/// Values of `class` of `outcomes_total`, in the order of [`Class`](super::Class).
pub const OUTCOMES: [&str; 4] = ["answer", "upstream_failure", "client_abort", "local"];
/// Values of `reason` of `ejections_total` and `returned_total`: why replicas are ejected, in the order of
/// [`Reason`](super::ejection::Reason).
pub const REASONS: [&str; 3] = ["failing", "reported", "unresponsive"];
/// Values of `result` of `probes_total`, in the order of [`probe`].
pub const PROBES: [&str; 17] = [
    "used",
    "timeout",
    "refused",
    "rejected_wrong_endpoint",
    "rejected_no_report",
    "rejected_no_endpoint",
    "rejected_no_host",
    "rejected_status",
    "rejected_duplicate",
    "rejected_too_long",
    "rejected_bad_rif",
    "rejected_bad_latency",
    "rejected_bad_endpoint",
    "rejected_bad_probe_endpoint",
    "rejected_bad_fail",
    "rejected_bad_up",
    "rejected_bad_capacity",
];
/// Values of `result` of `reports_total`, in the order of [`report`].
pub const REPORTS: [&str; 12] = [
    "used",
    "wrong_endpoint",
    "no_endpoint",
    "too_long",
    "bad_rif",
    "bad_latency",
    "bad_endpoint",
    "bad_probe_endpoint",
    "bad_fail",
    "bad_up",
    "bad_capacity",
    "bad_orca",
];

/// Index of a probe's result in [`PROBES`].
#[inline]
pub fn probe(end: ProbeEnd) -> usize {
    match end {
        ProbeEnd::Used => 0,
        ProbeEnd::Timeout => 1,
        ProbeEnd::Refused => 2,
        ProbeEnd::WrongEndpoint => 3,
        ProbeEnd::NoReport => 4,
        ProbeEnd::NoEndpoint => 5,
        ProbeEnd::NoHost => 6,
        ProbeEnd::Status => 7,
        ProbeEnd::Duplicate => 8,
        ProbeEnd::BadReport(error) => 9 + error as usize,
    }
}

/// Index of a report's result in [`REPORTS`].
#[inline]
pub fn report(end: ReportEnd) -> usize {
    match end {
        ReportEnd::Used => 0,
        ReportEnd::WrongEndpoint => 1,
        ReportEnd::NoEndpoint => 2,
        ReportEnd::Bad(error) => 3 + error as usize,
        ReportEnd::BadOrca => REPORTS.len() - 1,
    }
}

/// Converts text to a label's value. A dot would end the value.
pub fn value(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect()
}
