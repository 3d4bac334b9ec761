//! `--replica`: one more replica in the same process, with its own addresses and backend. Its other settings are those
//! of the first replica.

use std::net::SocketAddr;
use std::str::FromStr;

use prequal_core::shared::endpoint::Endpoint;

use crate::config::{Listen, ListenError, Upstream, UpstreamError};

/// Settings of an additional replica.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Another {
    /// Service port.
    pub(crate) listen: Listen,
    /// Backend.
    pub(crate) upstream: Upstream,
    /// Endpoint named in its reports.
    pub(crate) advertise: Option<Endpoint>,
    /// Probe port.
    pub(crate) probe_listen: Option<SocketAddr>,
}

impl FromStr for Another {
    type Err = AnotherError;

    fn from_str(text: &str) -> Result<Self, AnotherError> {
        let (mut listen, mut upstream, mut advertise, mut probe_listen) = (None, None, None, None);
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(|| AnotherError::Key(part.to_owned()))?;
            let bad = |reason: String| AnotherError::Value { key: key.to_owned(), reason };
            let repeated = match key {
                "listen" => {
                    listen.replace(value.parse().map_err(|e: ListenError| bad(e.to_string()))?).is_some()
                }
                "upstream" => {
                    upstream.replace(value.parse().map_err(|e: UpstreamError| bad(e.to_string()))?).is_some()
                }
                "advertise" => {
                    let endpoint: Result<Endpoint, _> = value.parse();
                    advertise.replace(endpoint.map_err(|error| bad(error.to_string()))?).is_some()
                }
                "probe-listen" => {
                    let addr = value.parse().map_err(|_| bad("must be `ip:port`".to_owned()))?;
                    probe_listen.replace(addr).is_some()
                }
                _ => return Err(AnotherError::Key(key.to_owned())),
            };
            if repeated {
                return Err(bad("is given twice".to_owned()));
            }
        }
        let (Some(listen), Some(upstream)) = (listen, upstream) else { return Err(AnotherError::Missing) };
        Ok(Self { listen, upstream, advertise, probe_listen })
    }
}

/// Error for text that does not describe a replica.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum AnotherError {
    /// A part is not `key=value` with a known key.
    #[error("`{0}` is none of `listen=`, `upstream=`, `advertise=` and `probe-listen=`")]
    Key(String),
    /// A value is not usable.
    #[error("`{key}` {reason}")]
    Value {
        /// Key of the value.
        key: String,
        /// Reason.
        reason: String,
    },
    /// `listen=` or `upstream=` is missing.
    #[error("`listen=` and `upstream=` are needed")]
    Missing,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replica_arguments_are_parsed() {
        let another: Another =
            "listen=127.0.0.1:8081,upstream=app:81,advertise=10.0.0.1:8081,probe-listen=[::1]:9"
                .parse()
                .unwrap();
        assert_eq!(another.listen.to_string(), "127.0.0.1:8081");
        assert_eq!((another.upstream.host(), another.upstream.port()), ("app", 81));
        assert_eq!(another.advertise, Some("10.0.0.1:8081".parse().unwrap()));
        assert_eq!(another.probe_listen, Some("[::1]:9".parse().unwrap()));
        for (text, says) in [
            ("", "none of"),
            ("listen=127.0.0.1:1", "needed"),
            ("upstream=a:1", "needed"),
            ("listen=127.0.0.1:1,upstream=a", "`upstream` must"),
            ("listen=1,upstream=a:1", "`listen` must"),
            ("listen=127.0.0.1:1,upstream=a:1,colour=red", "`colour`"),
            ("listen=127.0.0.1:1,upstream=a:1,upstream=b:1", "twice"),
            ("listen=127.0.0.1:1,upstream=a:1,advertise=b", "`advertise`"),
            ("listen=127.0.0.1:1,upstream=a:1,probe-listen=b", "`probe-listen`"),
        ] {
            let error = text.parse::<Another>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
