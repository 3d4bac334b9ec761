//! Reasons why a request got no response from the backend, and what the client gets instead.

use std::error::Error as _;
use std::io;

use http::StatusCode;
use prequal_core::wire::report::{UNANSWERED, UNSENT};

use crate::upload::UploadError;

/// Reason why no response came, and the answer that the client gets instead.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ForwardError {
    #[error("connect failed")]
    Connect(#[source] io::Error),
    #[error("connect timed out")]
    ConnectTimeout,
    #[error("HTTP/2 refused")]
    NoHttp2,
    #[error("closed before it spoke HTTP/2")]
    Silent,
    #[error("no free HTTP/2 stream")]
    NoStream,
    /// Nothing was processed, according to the backend.
    #[error("refused by the backend")]
    Refused,
    #[error("closed before a response")]
    Reset(#[source] hyper::Error),
    #[error("no response in time")]
    ResponseTimeout,
    /// The client's own body broke off; the backend did nothing wrong.
    #[error("request body broke off")]
    RequestBody,
    #[error("switched protocols unasked")]
    Upgrade,
    #[error("did not switch protocols")]
    NoUpgrade,
    /// Neither the agent nor the backend supports such a tunnel.
    #[error("no way to switch protocols")]
    NoTunnel,
}

impl ForwardError {
    pub(super) fn sending(error: hyper::Error) -> Self {
        if is_of_body(&error) { Self::RequestBody } else { Self::Reset(error) }
    }

    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Connect(_)
            | Self::NoHttp2
            | Self::Silent
            | Self::Reset(_)
            | Self::Upgrade
            | Self::NoUpgrade => StatusCode::BAD_GATEWAY,
            Self::NoStream | Self::Refused => StatusCode::SERVICE_UNAVAILABLE,
            Self::ConnectTimeout | Self::ResponseTimeout => StatusCode::GATEWAY_TIMEOUT,
            Self::RequestBody => StatusCode::BAD_REQUEST,
            Self::NoTunnel => StatusCode::NOT_IMPLEMENTED,
        }
    }

    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Connect(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                "probe-agent: backend refused the connection\n"
            }
            Self::Connect(_) => "probe-agent: backend not reachable\n",
            Self::NoHttp2 => "probe-agent: backend does not speak HTTP/2\n",
            Self::Silent => "probe-agent: backend closed the connection before it spoke HTTP/2\n",
            Self::NoStream => "probe-agent: backend has no HTTP/2 stream free\n",
            Self::Refused => "probe-agent: backend refused the request\n",
            Self::ConnectTimeout => "probe-agent: backend did not accept the connection in time\n",
            Self::Reset(_) => "probe-agent: backend closed the connection before a response\n",
            Self::ResponseTimeout => "probe-agent: backend did not respond in time\n",
            Self::RequestBody => "probe-agent: request body broke off\n",
            Self::Upgrade => "probe-agent: backend switched protocols unasked\n",
            Self::NoUpgrade => "probe-agent: backend did not switch protocols\n",
            Self::NoTunnel => "probe-agent: agent or backend does not support this tunnel\n",
        }
    }

    /// Returns the value of `x-prequal-failure`, which says whether the client may retry. `None` if the response did
    /// not come in time: the backend may still work on the request, and a second one would add to its load. Also `None`
    /// if the client's body broke off, or if a switch to another protocol went wrong or was impossible.
    pub(crate) fn failure(&self) -> Option<&'static str> {
        match self {
            Self::Connect(_)
            | Self::ConnectTimeout
            | Self::NoHttp2
            | Self::Silent
            | Self::NoStream
            | Self::Refused => Some(UNSENT),
            Self::Reset(_) => Some(UNANSWERED),
            Self::ResponseTimeout | Self::RequestBody | Self::Upgrade | Self::NoUpgrade | Self::NoTunnel => {
                None
            }
        }
    }

    /// Returns the class for the log.
    pub(crate) fn class(&self) -> &'static str {
        match self {
            Self::Connect(_) | Self::ConnectTimeout | Self::NoHttp2 | Self::Silent => "backend connect",
            Self::NoStream | Self::Refused => "backend stream",
            Self::Reset(_) => "backend reset",
            Self::ResponseTimeout => "backend timeout",
            Self::Upgrade | Self::NoUpgrade => "backend upgrade",
            Self::RequestBody | Self::NoTunnel => "client",
        }
    }

    /// Returns the label for metrics; `None` if the backend is not the cause.
    pub(crate) fn label(&self) -> Option<&'static str> {
        match self {
            Self::Connect(_) | Self::NoHttp2 | Self::Silent => Some("connect"),
            Self::NoStream => Some("no_stream"),
            Self::Refused => Some("refused"),
            Self::ConnectTimeout => Some("connect_timeout"),
            Self::Reset(_) => Some("reset"),
            Self::ResponseTimeout => Some("response_timeout"),
            Self::Upgrade | Self::NoUpgrade => Some("upgrade"),
            Self::RequestBody | Self::NoTunnel => None,
        }
    }
}

/// Returns whether the error comes from the request body, and not from sending it.
pub(super) fn is_of_body(error: &hyper::Error) -> bool {
    error.is_user() && error.source().is_some_and(|source| source.is::<UploadError>())
}
