//! Headers of forwarded messages: which requests are refused, which headers are not forwarded because they apply to one
//! hop, and which names belong to Prequal.
//!
//! `Host`, `x-forwarded-*`, `Via` and all other end-to-end headers pass unchanged: the agent runs in the same pod as
//! its backend and should not show as a hop.

use http::header::{self, HeaderName};
use http::{HeaderMap, HeaderValue, Method, Request, Version};
use hyper::ext::Protocol;
use prequal_core::wire::report::HEADER_FAILURE;

/// Header that says whether a request that failed here may be sent again.
pub(crate) const FAILURE: HeaderName = HeaderName::from_static(HEADER_FAILURE);

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const PREFIX: &str = "x-prequal-";

/// Fails with the reason if a request must be refused with 400 before it is forwarded. hyper refuses the other cases
/// itself: malformed heads, differing `Content-Length`s, a `Transfer-Encoding` that does not end in `chunked`.
pub(crate) fn check_request<B>(req: &Request<B>) -> Result<(), &'static str> {
    let headers = req.headers();
    let http2 = req.version() == Version::HTTP_2;
    if !http2 && headers.contains_key(header::TRANSFER_ENCODING) {
        let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
        let first = codings.next().map(HeaderValue::as_bytes).unwrap_or_default();
        if codings.next().is_some() || !first.trim_ascii().eq_ignore_ascii_case(b"chunked") {
            return Err("transfer-encoding must be exactly \"chunked\"");
        }
    }
    let authority = req.uri().authority().filter(|_| http2);
    let mut hosts = headers.get_all(header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        (_, Some(_)) => Err("more than one host header"),
        (None, _) if req.version() == Version::HTTP_11 => Err("no host header"),
        // Host and `:authority` must agree (RFC 9113 §8.3.1). Otherwise, a check of one could be bypassed through the
        // other.
        (Some(host), _)
            if authority.is_some_and(|authority| {
                !host.as_bytes().eq_ignore_ascii_case(authority.as_str().as_bytes())
            }) =>
        {
            Err("host header differs from :authority")
        }
        _ => Ok(()),
    }
}

/// Converts an HTTP/2 request for a tunnel with `protocol` (RFC 8441) into an HTTP/1.1 upgrade.
pub(crate) fn upgrade_of_tunnel<B>(req: &mut Request<B>, protocol: &Protocol) -> Option<HeaderValue> {
    // Another protocol might be a version of HTTP, whose requests would bypass every check here.
    if !protocol.as_str().eq_ignore_ascii_case("websocket") {
        return None;
    }
    *req.method_mut() = Method::GET;
    req.extensions_mut().remove::<Protocol>();
    // HTTP/2 has no such key. In HTTP/1.1, the key proves that a server supports WebSockets, and any value will do.
    req.headers_mut()
        .entry(header::SEC_WEBSOCKET_KEY)
        .or_insert(HeaderValue::from_static("AQIDBAUGBwgJCgsMDQ4PEA=="));
    Some(HeaderValue::from_static("websocket"))
}

/// Returns the protocol that a request asks to switch to, if the request is a valid upgrade.
pub(crate) fn upgrade_of<B>(req: &Request<B>) -> Option<HeaderValue> {
    if req.version() != Version::HTTP_11 || req.method() == Method::CONNECT {
        return None;
    }
    let upgrade = req.headers().get(header::UPGRADE)?;
    // Forwarding an upgrade to cleartext HTTP/2 would open a tunnel past every check here.
    let smuggles = upgrade.as_bytes().to_ascii_lowercase().windows(3).any(|part| part == b"h2c");
    (!smuggles && connection_lists(req.headers(), "upgrade")).then(|| upgrade.clone())
}

fn connection_lists(headers: &HeaderMap, token: &str) -> bool {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|item| item.trim().eq_ignore_ascii_case(token))
}

/// Returns whether a message is gRPC proper, which exists only over HTTP/2, and not grpc-web.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return false };
    let value = value.as_bytes();
    value.get(..GRPC.len()).is_some_and(|start| start.eq_ignore_ascii_case(GRPC))
        && matches!(value.get(GRPC.len()), None | Some(b'+' | b';' | b' '))
}

const GRPC: &[u8] = b"application/grpc";

/// Removes the headers that RFC 9110 §7.6.1 limits to one hop, and every `x-prequal-*`, so that neither side can forge
/// the headers of the agent.
pub(crate) fn strip(headers: &mut HeaderMap, request: bool) {
    // One pass over the names finds what to remove; most messages then need no removal.
    let mut found = Found::default();
    for name in headers.keys() {
        match *name {
            header::CONNECTION => found.connection = true,
            header::TE => found.te = true,
            header::TRANSFER_ENCODING => found.transfer_encoding = true,
            header::UPGRADE => found.upgrade = true,
            header::EXPECT => found.expect = true,
            _ => {
                let name = name.as_str();
                match name.as_bytes().first() {
                    Some(b'x') => found.prequal |= name.starts_with(PREFIX),
                    Some(b'k') => found.keep_alive |= name == KEEP_ALIVE.as_str(),
                    Some(b'p') => found.proxy_connection |= name == PROXY_CONNECTION.as_str(),
                    _ => {}
                }
            }
        }
    }
    let trailers = request && found.te && te_trailers(headers);
    if found.connection {
        strip_connection(headers);
    }
    if found.keep_alive {
        headers.remove(KEEP_ALIVE);
    }
    if found.proxy_connection {
        headers.remove(PROXY_CONNECTION);
    }
    if found.transfer_encoding {
        headers.remove(header::TRANSFER_ENCODING);
    }
    if found.upgrade {
        headers.remove(header::UPGRADE);
    }
    if found.expect && request {
        // hyper itself sends 100-continue to the client when the agent reads the body.
        headers.remove(header::EXPECT);
    }
    if found.te {
        headers.remove(header::TE);
    }
    if trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    if found.prequal {
        let names: Vec<HeaderName> =
            headers.keys().filter(|name| name.as_str().starts_with(PREFIX)).cloned().collect();
        for name in names {
            headers.remove(name);
        }
    }
}

#[derive(Default)]
struct Found {
    connection: bool,
    te: bool,
    transfer_encoding: bool,
    upgrade: bool,
    expect: bool,
    keep_alive: bool,
    proxy_connection: bool,
    prequal: bool,
}

fn te_trailers(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::TE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|item| item.trim().eq_ignore_ascii_case("trailers"))
}

fn strip_connection(headers: &mut HeaderMap) {
    let nominated: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|item| HeaderName::try_from(item.trim()).ok())
        .collect();
    for name in nominated {
        // A client must not be able to remove these (RFC 9110 §7.6.1: end-to-end fields must not be nominated).
        let kept = [header::HOST, header::CONTENT_LENGTH, header::AUTHORIZATION, header::COOKIE];
        if !kept.contains(&name) && !name.as_str().starts_with("x-forwarded-") {
            headers.remove(name);
        }
    }
    headers.remove(header::CONNECTION);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in fields {
            map.append(*name, HeaderValue::from_static(value));
        }
        map
    }

    fn names(map: &HeaderMap) -> Vec<&str> {
        let mut names: Vec<&str> = map.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn hop_by_hop_headers_are_removed() {
        let mut headers = map(&[
            ("connection", "close, x-mine, host, x-forwarded-for"),
            ("x-mine", "1"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "close"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("te", "gzip, trailers"),
            ("expect", "100-continue"),
            ("trailer", "grpc-status"),
            ("host", "a"),
            ("x-forwarded-for", "1.2.3.4"),
            ("x-prequal-load", "0;1;9.9.9.9:1"),
            ("x-prequal-anything", "x"),
            ("x-preq", "stays"),
        ]);
        strip(&mut headers, true);
        assert_eq!(names(&headers), ["host", "te", "trailer", "x-forwarded-for", "x-preq"]);
        assert_eq!(headers["te"], "trailers");
    }

    #[test]
    fn an_ordinary_request_is_unchanged() {
        let fields = [("host", "a"), ("accept", "*/*"), ("x-request-id", "1"), ("authorization", "b")];
        let mut headers = map(&fields);
        strip(&mut headers, true);
        assert_eq!(headers, map(&fields));
    }

    #[test]
    fn only_valid_upgrades_are_recognised() {
        let req = |version, fields: &[(&'static str, &'static str)]| {
            let mut req = Request::new(());
            *req.version_mut() = version;
            *req.headers_mut() = map(fields);
            req
        };
        let both = [("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")];
        assert_eq!(upgrade_of(&req(Version::HTTP_11, &both)).unwrap(), "websocket");
        assert!(upgrade_of(&req(Version::HTTP_10, &both)).is_none());
        assert!(upgrade_of(&req(Version::HTTP_11, &both[1..])).is_none());
        assert!(upgrade_of(&req(Version::HTTP_11, &both[..1])).is_none());
    }
}
