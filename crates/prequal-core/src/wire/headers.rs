//! What the headers of a response, or of the reply to a probe, mean to a client. The embedder provides the headers.

use crate::wire::report::{HEADER_LATENCY, HEADER_LOAD, HEADER_RIF, LoadReport, ReportError};

/// The headers of one message.
pub trait Headers {
    /// Returns the values of a header, in order. `name` is in lower case.
    fn all<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a [u8]>;

    /// Returns the value of the first header of this name.
    fn get(&self, name: &str) -> Option<&[u8]> {
        self.all(name).next()
    }
}

/// Returns the report in the headers, if there is one.
pub fn report(headers: &impl Headers) -> Option<Result<LoadReport, ReportError>> {
    Some(match headers.get(HEADER_LOAD) {
        Some(load) => LoadReport::parse(load),
        None => LoadReport::parse_pair(headers.get(HEADER_RIF)?, headers.get(HEADER_LATENCY)),
    })
}

/// Returns whether the response's status is a 5xx.
pub fn is_server_error(headers: &impl Headers) -> bool {
    headers.get(":status").is_some_and(|status| status.starts_with(b"5"))
}

/// Returns whether a message of this content type is gRPC.
pub fn is_grpc(content_type: &[u8]) -> bool {
    content_type.starts_with(b"application/grpc")
}
