//! How a request ended, as both sides count it.

/// How a request ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// A real response; its latency is a sample.
    Success,
    /// An error of the replica (5xx, reset); not a sample.
    Failure,
    /// The client went away, which says nothing about the replica.
    Aborted,
    /// A WebSocket or long stream; its duration is not a latency.
    Streaming,
}

/// Whether a gRPC status means that the server failed: UNKNOWN, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE, DATA_LOSS.
/// All other statuses count as valid responses, even DEADLINE_EXCEEDED: the client chose the deadline, and a slow
/// server shows in its latency.
pub fn grpc_blames_server(status: &[u8]) -> bool {
    matches!(status, b"2" | b"8" | b"13" | b"14" | b"15")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_that_the_client_causes_are_not_blamed_on_the_server() {
        let blamed: Vec<u8> = (0..17).filter(|s| grpc_blames_server(s.to_string().as_bytes())).collect();
        assert_eq!(blamed, [2, 8, 13, 14, 15]);
    }
}
