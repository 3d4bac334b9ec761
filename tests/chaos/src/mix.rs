//! The mix of requests: the kinds, how often each is sent, and the conventions that load and backend share. `load`
//! sends requests, `backend` answers them.

use std::time::Duration;

use bytes::Bytes;

/// Header with the number of the replica that answers.
pub(crate) const REPLICA: &str = "x-replica";
/// Path that is answered at once.
pub(crate) const PLAIN: &str = "/plain";
/// Path that is answered with the length of what was sent.
pub(crate) const UPLOAD: &str = "/upload";
/// Path that is answered with [`PARTS`] parts of [`PART`] bytes.
pub(crate) const DOWNLOAD: &str = "/download";
/// Path that echoes bytes after an upgrade.
pub(crate) const SOCKET: &str = "/socket";
/// gRPC method with one message in each direction.
pub(crate) const UNARY: &str = "/chaos.Echo/Unary";
/// gRPC method that echoes every message.
pub(crate) const STREAMING: &str = "/chaos.Echo/Streaming";

/// Number of parts of uploads and downloads.
pub(crate) const PARTS: usize = 8;
/// Bytes of a part.
pub(crate) const PART: usize = 16 * 1024;
/// Time between two parts of an upload or download.
pub(crate) const PART_GAP: Duration = Duration::from_millis(10);
/// Messages of a stream or WebSocket.
pub(crate) const MESSAGES: usize = 10;
/// Time between two messages. A stream ends well before the drain of a listener (2 s) does.
pub(crate) const MESSAGE_GAP: Duration = Duration::from_millis(50);

/// One kind of request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    Http1,
    Http2,
    Unary,
    Streaming,
    WebSocket,
    Upload,
    Download,
}

impl Kind {
    /// The kind for the random number `drawn`; the probability of each kind is given in [`SHARES`].
    pub(crate) fn of(drawn: u32) -> Self {
        let mut left = drawn % SHARES.iter().map(|(_, share)| share).sum::<u32>();
        for (kind, share) in SHARES {
            if left < share {
                return kind;
            }
            left -= share;
        }
        Self::Http1
    }

    /// Name in error messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Http1 => "HTTP/1.1",
            Self::Http2 => "HTTP/2",
            Self::Unary => "gRPC",
            Self::Streaming => "gRPC stream",
            Self::WebSocket => "WebSocket",
            Self::Upload => "upload",
            Self::Download => "download",
        }
    }
}

/// Percent of all requests.
const SHARES: [(Kind, u32); 7] = [
    (Kind::Http1, 40),
    (Kind::Http2, 24),
    (Kind::Unary, 20),
    (Kind::Streaming, 4),
    (Kind::WebSocket, 2),
    (Kind::Upload, 5),
    (Kind::Download, 5),
];

/// The only message of the gRPC calls, with its five bytes of framing.
pub(crate) fn message() -> Bytes {
    Bytes::from_static(b"\0\0\0\0\x05hello")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_share() {
        let drawn: Vec<Kind> = (0..1000).map(Kind::of).collect();
        for (kind, share) in SHARES {
            assert_eq!(drawn.iter().filter(|one| **one == kind).count() as u32, share * 10, "{kind:?}");
        }
    }
}
