//! Headers that the agent and the layer read and write.

use http::header::HeaderName;
use prequal_core::wire::report::{HEADER_HINT, HEADER_LATENCY, HEADER_LOAD, HEADER_RIF};

/// Combined report.
pub(crate) const LOAD: HeaderName = HeaderName::from_static(HEADER_LOAD);
/// RIF alone.
pub(crate) const RIF: HeaderName = HeaderName::from_static(HEADER_RIF);
/// Latency estimate alone.
pub(crate) const LATENCY: HeaderName = HeaderName::from_static(HEADER_LATENCY);
/// Hint of a query, on probes and requests.
pub(crate) const HINT: HeaderName = HeaderName::from_static(HEADER_HINT);
/// Zuul's utilisation header.
pub(crate) const UTILIZATION: HeaderName = HeaderName::from_static("x-netflix.server.utilization");
