//! A request as a backend sees it, and the ways to answer it.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode, Version};

/// How a backend answers one request.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Service time: how long it waits before it answers.
    pub delay: Duration,
    /// Whether it waits until the backend's gate is open ([`crate::Backend::set_gate`]).
    pub gated: bool,
    /// Whether it reads the whole request first.
    pub reads_first: bool,
    /// Status of the response.
    pub status: StatusCode,
    /// Headers added to the response.
    pub headers: Vec<(String, String)>,
    /// Body of the response, or how the response fails.
    pub body: Body,
}

/// The body of a [`Reply`].
#[derive(Clone, Debug)]
pub enum Body {
    /// These bytes, with a content length.
    Full(Bytes),
    /// `count` copies of `chunk`, `gap` apart, without a content length.
    Stream {
        /// One chunk.
        chunk: Bytes,
        /// Number of chunks.
        count: usize,
        /// Time between two chunks.
        gap: Duration,
    },
    /// Some bytes, then trailers.
    Trailers(Bytes, HeaderMap),
    /// One chunk, then the connection (HTTP/2: the stream) is aborted.
    Broken(Bytes),
    /// Echoes the client's body.
    Echo,
    /// Accepts an `Upgrade` with 101 and echoes bytes until the other side closes.
    Upgrade,
    /// No response; the connection stays open.
    Hang,
    /// No response; the connection (HTTP/2: the stream) is closed.
    Reset,
}

impl Reply {
    /// An empty response with `status`, sent at once.
    pub fn status(status: u16) -> Self {
        let status = StatusCode::from_u16(status).expect("a status between 100 and 999");
        Self {
            delay: Duration::ZERO,
            gated: false,
            reads_first: false,
            status,
            headers: Vec::new(),
            body: Body::Full(Bytes::new()),
        }
    }

    /// 200 with the body `ok`, sent at once.
    pub fn ok() -> Self {
        Self::status(200).body(Body::Full(Bytes::from_static(b"ok")))
    }

    /// Sets the delay.
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Answers only while the backend's gate is open ([`crate::Backend::set_gate`]).
    #[must_use]
    pub fn gated(mut self) -> Self {
        self.gated = true;
        self
    }

    /// Answers only once the whole request has been read.
    #[must_use]
    pub fn reads_first(mut self) -> Self {
        self.reads_first = true;
        self
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sets the body.
    #[must_use]
    pub fn body(mut self, body: Body) -> Self {
        self.body = body;
        self
    }
}

/// A request as the backend saw it, without its body.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Method.
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// HTTP version of the hop to the backend.
    pub version: Version,
    /// All headers.
    pub headers: HeaderMap,
}

impl Seen {
    /// The header `name` as text, if there is one.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}
