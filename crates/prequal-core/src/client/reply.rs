//! Replies to probes.

use super::count::ProbeEnd;
use crate::shared::endpoint::Endpoint;
use crate::wire::headers::{Headers, report};
use crate::wire::report::{HEADER_HOST, HEADER_LATENCY, HEADER_LOAD, HEADER_RIF, LoadReport};

/// The reply to a probe.
#[derive(Clone, Copy, Debug)]
pub struct Reply {
    /// The report, or why there is none that can be read.
    pub report: Result<LoadReport, ProbeEnd>,
    /// The host that answered, according to the proxy; used only with `verified_probes`.
    pub host: Option<Endpoint>,
}

impl Reply {
    /// Reads the reply to a probe. `verified` is true if the proxy writes the address of the host that answered into
    /// the reply.
    ///
    /// # Errors
    /// The reason if the probe failed, or if the reply is ambiguous.
    pub fn read(headers: &impl Headers, verified: bool) -> Result<Self, ProbeEnd> {
        let report = report(headers);
        let report = match headers.get(":status").unwrap_or_default() {
            b"200" => report.ok_or(ProbeEnd::NoReport).and_then(|report| report.map_err(ProbeEnd::BadReport)),
            // Envoy's own statuses for a call that failed; an agent would have added a report.
            b"504" if report.is_none() => return Err(ProbeEnd::Timeout),
            b"503" if report.is_none() => return Err(ProbeEnd::Refused),
            _ => Err(ProbeEnd::Status),
        };
        if [HEADER_LOAD, HEADER_RIF, HEADER_LATENCY].iter().any(|name| headers.all(name).nth(1).is_some()) {
            return Err(ProbeEnd::Duplicate);
        }
        let host = verified.then(|| std::str::from_utf8(headers.get(HEADER_HOST)?).ok()?.parse().ok());
        Ok(Self { report, host: host.flatten() })
    }
}
