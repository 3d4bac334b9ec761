//! The kinds of requests in a soak: how often each is sent, how the backend answers, and how the request must end.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use prequal_testbed::{Body, Client, Reply, Request, Response, WebSocket};

/// Path on which Envoy times out requests after 50 ms.
pub(super) const TIMEOUT_PATH: &str = "/timeout";
/// Time that a client waits before it aborts its request.
const PATIENCE: Duration = Duration::from_millis(15);
const UPLOAD: usize = 32 * 1024;
const DOWNLOAD: usize = 64 * 1024;
/// One in this many requests is a WebSocket.
const WEB_SOCKET_EVERY: u64 = 1000;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum RequestKind {
    Http1,
    Http2,
    Grpc,
    Upload,
    Download,
    Stream,
    WebSocket,
    Error,
    GrpcError,
    Broken,
    Abort,
    Timeout,
}

impl RequestKind {
    pub(super) const ALL: [Self; 12] = [
        Self::Http1,
        Self::Http2,
        Self::Grpc,
        Self::Upload,
        Self::Download,
        Self::Stream,
        Self::WebSocket,
        Self::Error,
        Self::GrpcError,
        Self::Broken,
        Self::Abort,
        Self::Timeout,
    ];
    pub(super) const COUNT: usize = Self::ALL.len();

    /// Returns the kind of request number `number`. Of 1000 requests, 35 fail or are given up.
    pub(super) fn of(number: u64) -> Self {
        if number % WEB_SOCKET_EVERY == WEB_SOCKET_EVERY - 1 {
            return Self::WebSocket;
        }
        match number % 200 {
            0..=1 => Self::Error,
            2 => Self::GrpcError,
            3 => Self::Broken,
            4..=5 => Self::Abort,
            6 => Self::Timeout,
            7..=16 => Self::Upload,
            17..=22 => Self::Download,
            23..=24 => Self::Stream,
            25..=54 => Self::Grpc,
            55..=104 => Self::Http2,
            _ => Self::Http1,
        }
    }

    pub(super) fn what(self) -> &'static str {
        match self {
            Self::Http1 => "GET, HTTP/1.1",
            Self::Http2 => "GET, HTTP/2",
            Self::Grpc => "gRPC",
            Self::Upload => "upload, 32 KiB",
            Self::Download => "download, 64 KiB",
            Self::Stream => "streamed response",
            Self::WebSocket => "WebSocket",
            Self::Error => "answered with 500",
            Self::GrpcError => "gRPC, UNAVAILABLE",
            Self::Broken => "broken off in the response",
            Self::Abort => "given up by the client",
            Self::Timeout => "given up by Envoy",
        }
    }

    fn path(self) -> &'static str {
        match self {
            Self::Http1 | Self::Http2 => "/",
            Self::Grpc => "/soak.Soak/Call",
            Self::Upload => "/upload",
            Self::Download => "/download",
            Self::Stream => "/stream",
            Self::WebSocket => "/socket",
            Self::Error => "/error",
            Self::GrpcError => "/soak.Soak/Fail",
            Self::Broken => "/broken",
            Self::Abort => "/hang",
            Self::Timeout => TIMEOUT_PATH,
        }
    }

    /// Sends one request; returns whether it ended as expected of its kind.
    pub(super) async fn send(self, [http1, http2]: &[Client; 2], target: SocketAddr) -> bool {
        let path = self.path();
        match self {
            Self::WebSocket => {
                tokio::task::spawn_blocking(move || socket(target, path)).await.unwrap_or(false)
            }
            Self::Abort => {
                let request = http1.send_async(Request::get(path));
                tokio::time::timeout(PATIENCE, request).await.is_err()
            }
            Self::Grpc | Self::GrpcError => {
                let request = Request::post(path, Bytes::from_static(&[0, 0, 0, 0, 2, b'h', b'i']))
                    .header("content-type", "application/grpc")
                    .header("te", "trailers");
                http2.send_async(request).await.is_ok_and(|response| self.fits(&response))
            }
            Self::Upload => {
                let request = Request::post(path, Bytes::from_static(&[b'u'; UPLOAD]));
                http1.send_async(request).await.is_ok_and(|response| self.fits(&response))
            }
            Self::Broken => http1.send_async(Request::get(path)).await.is_err(),
            Self::Http2 | Self::Download => {
                http2.send_async(Request::get(path)).await.is_ok_and(|response| self.fits(&response))
            }
            Self::Http1 | Self::Stream | Self::Error | Self::Timeout => {
                http1.send_async(Request::get(path)).await.is_ok_and(|response| self.fits(&response))
            }
        }
    }

    fn fits(self, response: &Response) -> bool {
        let status = response.trailers.get("grpc-status").and_then(|status| status.to_str().ok());
        let expected = match self {
            Self::Error => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Timeout => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::OK,
        };
        let whole = match self {
            Self::Download => response.body.len() == DOWNLOAD,
            Self::Stream => response.body.len() == 4,
            Self::Grpc => status == Some("0"),
            Self::GrpcError => status == Some("14"),
            _ => true,
        };
        response.status == expected && whole
    }
}

fn socket(target: SocketAddr, path: &str) -> bool {
    let round_trip = || WebSocket::connect(target, path)?.round_trip(b"hello");
    round_trip().is_ok_and(|back| back == b"hello")
}

/// The backend's reply to a request.
pub(super) fn reply(path: &str) -> Reply {
    let grpc = |status: &'static str| {
        let trailers = HeaderMap::from_iter([(
            "grpc-status".parse().expect("a name"),
            HeaderValue::from_static(status),
        )]);
        let message = Bytes::from_static(&[0, 0, 0, 0, 2, b'h', b'i']);
        Reply::ok()
            .reads_first()
            .header("content-type", "application/grpc")
            .body(Body::Trailers(message, trailers))
    };
    match path {
        "/upload" => Reply::ok().reads_first(),
        "/download" => Reply::ok().body(Body::Full(Bytes::from_static(&[b'd'; DOWNLOAD]))),
        "/stream" => Reply::ok().body(Body::Stream {
            chunk: Bytes::from_static(b"s"),
            count: 4,
            gap: Duration::from_millis(2),
        }),
        "/socket" => Reply::ok().body(Body::Upgrade),
        "/error" => Reply::status(500),
        "/broken" => Reply::ok().body(Body::Broken(Bytes::from_static(b"part"))),
        "/soak.Soak/Call" => grpc("0"),
        "/soak.Soak/Fail" => grpc("14"),
        "/hang" | TIMEOUT_PATH => Reply::ok().body(Body::Hang),
        _ => Reply::ok().delay(Duration::from_millis(1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_sent() {
        for (index, kind) in RequestKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
            assert!((0..WEB_SOCKET_EVERY).any(|number| RequestKind::of(number) == kind), "{kind:?}");
        }
        let faulty = |kind| {
            matches!(
                kind,
                RequestKind::Error
                    | RequestKind::GrpcError
                    | RequestKind::Broken
                    | RequestKind::Abort
                    | RequestKind::Timeout
            )
        };
        assert_eq!((0..1000).filter(|number| faulty(RequestKind::of(*number))).count(), 35);
    }
}
