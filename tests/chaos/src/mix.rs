//! The mix of requests: which kinds there are, how often each is sent, and what load and backend have agreed on about
//! them. How a request is sent is in `load`, how it is answered in `backend`.

use std::time::Duration;

use bytes::Bytes;

/// Names the replica that answers.
pub(crate) const REPLICA: &str = "x-replica";
/// Answered at once.
pub(crate) const PLAIN: &str = "/plain";
/// The length of what was sent.
pub(crate) const UPLOAD: &str = "/upload";
/// [`PARTS`] parts of [`PART`] bytes.
pub(crate) const DOWNLOAD: &str = "/download";
/// Echoes bytes after an upgrade.
pub(crate) const SOCKET: &str = "/socket";
/// One message in, one out.
pub(crate) const UNARY: &str = "/chaos.Echo/Unary";
/// Every message comes back.
pub(crate) const STREAMING: &str = "/chaos.Echo/Streaming";

/// Of uploads and downloads.
pub(crate) const PARTS: usize = 8;
/// Bytes of a part.
pub(crate) const PART: usize = 16 * 1024;
/// Between two parts of an upload or download.
pub(crate) const PART_GAP: Duration = Duration::from_millis(10);
/// Messages of a stream or WebSocket.
pub(crate) const MESSAGES: usize = 10;
/// Between two of them. A stream is over well before a listener that drains (2 s) is.
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
    /// The kind of request number `drawn`, which is random, among all: its share is the second of the pair in [`SHARES`].
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

    /// For messages.
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
