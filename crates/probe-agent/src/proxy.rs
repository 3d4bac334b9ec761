//! Handles one request: answers, refuses or forwards it, and puts the report on its response.

use std::convert::Infallible;
use std::error::Error as _;
use std::mem;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::uri::{self, Authority, PathAndQuery, Scheme, Uri};
use http::{Method, Request, Response, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::ext::Protocol;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use prequal_core::server::tracker::Visit;
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::outcome::Outcome;
use prequal_core::wire::probe::Route;
use prequal_core::wire::report::UNSENT;

use crate::accept::Admitted;
use crate::access::{AccessLog, Entry};
use crate::backend_orca::FromBackend;
use crate::body::TrackedBody;
use crate::config::UpstreamHttp2;
use crate::conn::{Begun, Busy, Watch};
use crate::headers;
use crate::hint;
use crate::leash::{Leash, Open, Patrol, Rules, Watched};
use crate::load::InFlight;
use crate::log::Log;
use crate::names;
use crate::oob::{Oob, Reports};
use crate::orca::OrcaFormat;
use crate::phase::{Life, Phase};
use crate::probe;
use crate::received::BrokenOff;
use crate::reporter::Reporter;
use crate::traffic::{Event, Traffic};
use crate::upload::Upload;
use crate::upstream::{ForwardError, Pool, Slot, UpstreamBody};

/// State shared by all connections.
pub(crate) struct Shared {
    pub(crate) reporter: Reporter,
    /// Set if the agent answers calls for load reports.
    pub(crate) oob: Option<Oob>,
    /// Set if the backend reports its load itself.
    pub(crate) from_backend: Option<FromBackend>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) forward_hint: bool,
    pub(crate) upstream_http2: UpstreamHttp2,
    pub(crate) response_timeout: Option<Duration>,
    pub(crate) max_rif: Option<NonZeroU32>,
    pub(crate) rules: Option<Rules>,
    pub(crate) traffic: Arc<Traffic>,
    pub(crate) log: Log,
    pub(crate) access_log: Option<Arc<AccessLog>>,
    /// Whether the agent is draining.
    pub(crate) leaving: AtomicBool,
}

impl Shared {
    /// Marks a response as the last one of its HTTP/1.1 connection, if the agent is draining.
    pub(crate) fn part(&self, http1: bool, headers: &mut HeaderMap) {
        if http1 && self.leaving.load(Ordering::Relaxed) {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
    }
}

/// One connection of a client.
pub(crate) struct Connection {
    pub(crate) shared: Arc<Shared>,
    pub(crate) watch: Arc<Watch>,
    pub(crate) endpoint: Endpoint,
    pub(crate) probe_endpoint: Option<Endpoint>,
    /// Address of the client for the access log, if there is one.
    pub(crate) client: Option<SocketAddr>,
    /// Held so that this connection, and the tunnel that it was upgraded to, counts as open.
    pub(crate) _admitted: Admitted,
    /// Held so that a drain waits for this connection, and for the tunnel that it was upgraded to.
    pub(crate) life: Life,
}

/// Answers one request on the service port. The request counts as begun when this function returns, even though the
/// future has not run yet. Otherwise, if hyper read from the connection before the future ran, the head would look
/// incomplete, although it is already parsed.
pub(crate) fn serve(
    conn: Arc<Connection>,
    req: Request<Incoming>,
    leash: Option<Arc<Leash>>,
) -> impl Future<Output = Result<Response<AgentBody>, Infallible>> {
    let chunked = req.version() != Version::HTTP_2 && req.headers().contains_key(header::TRANSFER_ENCODING);
    let begun = conn.watch.begin(chunked, !req.body().is_end_stream());
    logged(conn, req, leash, begun)
}

/// Answers a request, and writes it to the access log.
async fn logged(
    conn: Arc<Connection>,
    req: Request<Incoming>,
    leash: Option<Arc<Leash>>,
    begun: Begun,
) -> Result<Response<AgentBody>, Infallible> {
    let entry = conn.shared.access_log.as_ref().map(|log| Entry::new(log.clone(), conn.client, &req));
    let mut response = answer(conn, req, leash, begun).await?;
    if let Some(mut entry) = entry {
        entry.answered(response.status());
        if response.body().is_end_stream() {
            entry.complete();
        }
        match response.body_mut() {
            AgentBody::Own { busy, .. }
            | AgentBody::Proxied { busy, .. }
            | AgentBody::Reports { busy, .. } => {
                busy.log(entry);
            }
        }
    }
    Ok(response)
}

async fn answer(
    conn: Arc<Connection>,
    req: Request<Incoming>,
    leash: Option<Arc<Leash>>,
    (busy, framing): Begun,
) -> Result<Response<AgentBody>, Infallible> {
    let load = &conn.shared.reporter.load;
    if let Err(reason) = framing.and_then(|()| headers::check_request(&req)) {
        load.counters().count_rejected();
        let mut response = probe::plain(StatusCode::BAD_REQUEST, reason);
        // The start of the next request is unknown.
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        return Ok(own(response, busy));
    }
    match probe::route(req.method(), req.uri().path()) {
        Route::Forward => {}
        Route::Probe => {
            load.counters().count_probe(false);
            let reporter = &conn.shared.reporter;
            let mut response = reporter.answer(conn.endpoint, conn.probe_endpoint, req.headers());
            conn.shared.part(!conn.watch.is_http2(), response.headers_mut());
            return Ok(own(response, busy));
        }
        Route::MethodNotAllowed => return Ok(own(probe::method_not_allowed(), busy)),
        Route::NotFound => return Ok(own(probe::plain(StatusCode::NOT_FOUND, "not found\n"), busy)),
    }
    if req.method() == Method::CONNECT && req.extensions().get::<Protocol>().is_none() {
        return Ok(own(probe::plain(StatusCode::METHOD_NOT_ALLOWED, "CONNECT is not supported\n"), busy));
    }
    if let Some(oob) = conn.shared.oob.as_ref().filter(|oob| oob.is_for(&req)) {
        let response = Box::pin(oob.serve(req, load, conn.endpoint, conn.life.clone())).await;
        return Ok(response.map(|body| AgentBody::Reports { body, busy }));
    }
    let guard = match conn.shared.max_rif {
        None => load.start(),
        Some(max) => match load.start_below(max.get()) {
            Some(guard) => guard,
            None => {
                if read_rest(req.into_body()).await {
                    conn.watch.body_ended();
                }
                return Ok(shed(&conn, busy));
            }
        },
    };
    Ok(forward(conn, req, leash, guard, busy).await)
}

/// Refuses a request beyond the limit. Such requests do not count as failures, so the replica stays in rotation.
fn shed(conn: &Connection, busy: Busy) -> Response<AgentBody> {
    conn.shared.traffic.count(Event::Shed);
    let reason = "probe-agent: too many requests in flight\n";
    let mut response = own(probe::plain(StatusCode::SERVICE_UNAVAILABLE, reason), busy);
    response.headers_mut().insert(headers::FAILURE, HeaderValue::from_static(UNSENT));
    finish(conn, response)
}

/// Reads a short body that the agent does not forward, so that its connection can be used again. Returns whether it was
/// read.
async fn read_rest(body: Incoming) -> bool {
    let short = body.size_hint().upper().is_some_and(|len| len <= MAX_READ_REST);
    short && tokio::time::timeout(READ_REST_PATIENCE, body.collect()).await.is_ok_and(|read| read.is_ok())
}

/// Adds headers to a response that the agent writes in the backend's place: the request was beyond the limit, or could
/// not be forwarded.
fn finish(conn: &Connection, mut response: Response<AgentBody>) -> Response<AgentBody> {
    add_report(conn, response.headers_mut(), None);
    if conn.watch.is_unread() {
        // Otherwise Envoy would send the next request on a connection that is about to close.
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    conn.shared.part(!conn.watch.is_http2(), response.headers_mut());
    response
}

async fn forward(
    conn: Arc<Connection>,
    mut req: Request<Incoming>,
    leash: Option<Arc<Leash>>,
    guard: InFlight,
    busy: Busy,
) -> Response<AgentBody> {
    let shared = &conn.shared;
    let slot = match shared.upstream_http2 {
        UpstreamHttp2::Auto if req.version() == Version::HTTP_2 => {
            shared.pool.stream(headers::is_grpc(req.headers())).await
        }
        UpstreamHttp2::Auto | UpstreamHttp2::Never => Ok(None),
        UpstreamHttp2::Always => shared.pool.stream(true).await,
    };
    let mut slot = match slot {
        Ok(slot) => slot,
        Err(error) => return failed(&conn, &error, guard, busy),
    };
    let tunnel = req.extensions().get::<Protocol>().cloned();
    if tunnel.is_some() && shared.upstream_http2 == UpstreamHttp2::Auto {
        slot = slot.filter(Slot::extended_connect);
    }
    let upgrade = match (&slot, &tunnel) {
        (None, None) => headers::upgrade_of(&req),
        (None, Some(protocol)) => headers::upgrade_of_tunnel(&mut req, protocol),
        (Some(_), _) => None,
    };
    let over_http2 = slot.as_ref().is_some_and(Slot::extended_connect);
    if tunnel.is_some() && upgrade.is_none() && !over_http2 {
        return failed(&conn, &ForwardError::NoTunnel, guard, busy);
    }
    let client = (upgrade.is_some() || tunnel.is_some()).then(|| hyper::upgrade::on(&mut req));
    let hint = if shared.forward_hint {
        hint::of(req.headers(), shared.reporter.load.counters()).cloned()
    } else {
        shared.reporter.hint_of(req.headers())
    };
    headers::strip(req.headers_mut(), true);
    if shared.forward_hint
        && let Some(hint) = &hint
    {
        req.headers_mut().insert(names::HINT, hint.clone());
    }
    let asked = shared.from_backend.as_ref().is_some_and(|backend| backend.ask(req.headers_mut()));
    if slot.is_some() {
        to_http2(&mut req, &shared.pool);
    } else {
        to_http1(&mut req, &shared.pool);
        if let Some(protocol) = upgrade {
            req.headers_mut().insert(header::UPGRADE, protocol);
            req.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        }
    }

    let req = req.map(|body| Upload::new(body, guard.client(), leash.as_ref(), &conn.watch));
    let sent = {
        // Pinned here, so that it is stored once for both arms.
        let sending = pin!(send(&shared.pool, req, slot));
        match shared.response_timeout {
            None => sending.await,
            Some(limit) => {
                tokio::time::timeout(limit, sending).await.unwrap_or(Err(ForwardError::ResponseTimeout))
            }
        }
    };
    match sent {
        Err(error) => failed(&conn, &error, guard, busy),
        Ok(response)
            if response.status() == StatusCode::SWITCHING_PROTOCOLS
                || tunnel.is_some() && over_http2 && response.status() == StatusCode::OK =>
        {
            match client {
                Some(client) => switch(conn, response, client, tunnel.is_some(), leash, guard, busy),
                None => failed(&conn, &ForwardError::Upgrade, guard, busy),
            }
        }
        Ok(response) if tunnel.is_some() && response.status().is_success() => {
            failed(&conn, &ForwardError::NoUpgrade, guard, busy)
        }
        Ok(response) => {
            let (mut head, body) = response.into_parts();
            headers::strip(&mut head.headers, false);
            head.version = Version::HTTP_11;
            if let Some(backend) = &shared.from_backend {
                backend.hear(&head.headers, &shared.reporter.load);
                if asked {
                    FromBackend::consume(&mut head.headers);
                }
            }
            let body = TrackedBody::new(body, guard, head.status, &head.headers);
            shared.reporter.served(hint.as_ref(), head.status, body.failed());
            add_report(&conn, &mut head.headers, body.leaving());
            shared.part(!conn.watch.is_http2(), &mut head.headers);
            let open = leash.filter(|_| !body.is_end_stream()).map(|leash| {
                if body.may_stream() {
                    leash.mark_stream();
                }
                Open::new(leash)
            });
            let format = shared.reporter.format_in_trailers(&head.headers);
            let trailers = (shared.from_backend.is_some() || format.is_some())
                .then(|| Box::new(Trailers { shared: conn.shared.clone(), endpoint: conn.endpoint, format }));
            Response::from_parts(head, AgentBody::Proxied { body, open, trailers, busy })
        }
    }
}

async fn send(
    pool: &Arc<Pool>,
    req: Request<Upload>,
    slot: Option<Slot>,
) -> Result<Response<UpstreamBody>, ForwardError> {
    match slot {
        Some(slot) => Box::pin(pool.send_http2(req, slot)).await,
        None => pool.send_http1(req).await,
    }
}

fn failed(conn: &Connection, error: &ForwardError, guard: InFlight, busy: Busy) -> Response<AgentBody> {
    match error.label() {
        Some(label) => {
            conn.shared.reporter.load.counters().count_upstream_error(label);
            conn.shared.log.failure(error.class(), || match error.source() {
                Some(source) => format!("{error}: {source}"),
                None => error.to_string(),
            });
            guard.finish(Outcome::Failure);
        }
        None => guard.finish(Outcome::Aborted),
    }
    let mut response = own(probe::plain(error.status(), error.reason()), busy);
    if let Some(failure) = error.failure() {
        response.headers_mut().insert(headers::FAILURE, HeaderValue::from_static(failure));
    }
    finish(conn, response)
}

/// Joins the client's connection or stream with the backend's. They count as one request until both directions are
/// closed.
fn switch(
    conn: Arc<Connection>,
    mut response: Response<UpstreamBody>,
    client: OnUpgrade,
    tunnel: bool,
    leash: Option<Arc<Leash>>,
    mut guard: InFlight,
    busy: Busy,
) -> Response<AgentBody> {
    let backend = hyper::upgrade::on(&mut response);
    guard.mark_streaming();
    conn.watch.upgraded();
    let (mut head, _) = response.into_parts();
    let protocol = head.headers.remove(header::UPGRADE);
    headers::strip(&mut head.headers, false);
    if tunnel {
        head.status = StatusCode::OK;
        head.headers.remove(header::SEC_WEBSOCKET_ACCEPT);
    } else {
        if let Some(protocol) = protocol {
            head.headers.insert(header::UPGRADE, protocol);
        }
        head.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    }
    add_report(&conn, &mut head.headers, None);
    let (mut life, stream) = (conn.life.clone(), mem::take(&mut head.extensions));
    tokio::spawn(async move {
        let _open = conn.shared.traffic.tunnel();
        let joined = async {
            let (Ok(client), Ok(backend)) = tokio::join!(client, backend) else { return };
            // Tunnels usually end with an error; neither side needs to know.
            let mut client = Watched::new(TokioIo::new(client), leash.clone());
            let _ = tokio::io::copy_bidirectional(&mut client, &mut TokioIo::new(backend)).await;
        };
        let joined = async {
            match (conn.shared.rules, &leash) {
                (Some(rules), Some(leash)) => {
                    leash.mark_stream();
                    Patrol::new(leash.clone(), rules).walk(joined, &conn.shared.traffic).await;
                }
                _ => joined.await,
            }
        };
        tokio::select! {
            biased;
            () = joined => {}
            () = life.reaches(Phase::Cut) => {}
        }
        drop((guard, stream));
    });
    let body = Full::new(Bytes::new());
    Response::from_parts(head, AgentBody::Own { body, busy })
}

fn add_report(conn: &Connection, headers: &mut HeaderMap, leaving: Option<Visit>) {
    conn.shared.reporter.stamp(headers, conn.endpoint, conn.probe_endpoint, leaving);
}

fn to_http1(req: &mut Request<Incoming>, pool: &Pool) {
    let from_http2 = req.version() == Version::HTTP_2;
    *req.version_mut() = Version::HTTP_11;
    if let Some(authority) = req.uri().authority() {
        // An absolute target overrides Host (RFC 9112 §3.2.2), and so does :authority (RFC 9113 §8.3.1).
        if let Ok(host) = HeaderValue::from_str(host_of(authority)) {
            req.headers_mut().insert(header::HOST, host);
        }
        let path = req.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        *req.uri_mut() = Uri::from(path);
    } else if !req.headers().contains_key(header::HOST)
        && let Ok(host) = HeaderValue::try_from(pool.authority())
    {
        // HTTP/1.0 can do without this header; HTTP/1.1 cannot.
        req.headers_mut().insert(header::HOST, host);
    }
    if !req.body().is_end_stream() && req.body().size_hint().exact().is_none() {
        // Without this header, hyper drops the body of GET and HEAD.
        req.headers_mut().insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    if from_http2 && req.headers().get_all(header::COOKIE).iter().nth(1).is_some() {
        join_cookies(req.headers_mut());
    }
}

/// Returns the authority without user information.
fn host_of(authority: &Authority) -> &str {
    authority.as_str().rsplit('@').next().unwrap_or_default()
}

/// Joins cookies. HTTP/2 may split them over several fields; HTTP/1.1 may not (RFC 9113 §8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let all: Vec<&[u8]> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if let Ok(joined) = HeaderValue::from_bytes(&all.join(&b"; "[..])) {
        headers.insert(header::COOKIE, joined);
    }
}

fn to_http2(req: &mut Request<Incoming>, pool: &Pool) {
    let from_http2 = req.version() == Version::HTTP_2;
    *req.version_mut() = Version::HTTP_2;
    // The authority replaces this header (RFC 9113 §8.3.1).
    let host = req.headers_mut().remove(header::HOST);
    if from_http2 && req.uri().authority().is_some() && req.uri().scheme().is_some() {
        return;
    }
    let authority = req
        .uri()
        .authority()
        .cloned()
        .or_else(|| Authority::try_from(host?.as_bytes()).ok())
        .or_else(|| Authority::try_from(pool.authority()).ok());
    let mut parts = uri::Parts::default();
    parts.scheme = Some(if pool.is_tls() { Scheme::HTTPS } else { Scheme::HTTP });
    parts.authority = authority;
    parts.path_and_query =
        Some(req.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/")));
    if let Ok(uri) = Uri::from_parts(parts) {
        *req.uri_mut() = uri;
    }
}

pub(crate) fn own(response: Response<Bytes>, busy: Busy) -> Response<AgentBody> {
    response.map(|body| AgentBody::Own { body: Full::new(body), busy })
}

/// Response body on the service port.
pub(crate) enum AgentBody {
    /// Written by the agent.
    Own {
        /// Text of the body.
        body: Full<Bytes>,
        busy: Busy,
    },
    /// Streamed from the backend.
    Proxied {
        /// Body of the backend. The request ends with it.
        body: TrackedBody<UpstreamBody>,
        /// Set if the request may be cut.
        open: Option<Open>,
        /// Set if trailers carry load.
        trailers: Option<Box<Trailers>>,
        busy: Busy,
    },
    /// Out-of-band load reports.
    Reports {
        /// Reports until the client or the agent ends them.
        body: Reports,
        busy: Busy,
    },
}

/// Load in the trailers of a proxied response.
pub(crate) struct Trailers {
    shared: Arc<Shared>,
    endpoint: Endpoint,
    /// Format of the agent's own report. `None`: the trailers carry none.
    format: Option<OrcaFormat>,
}

impl Trailers {
    /// Reads the backend's report, then adds the agent's own.
    fn exchange(&self, trailers: &mut HeaderMap) {
        let Shared { reporter, from_backend, .. } = &*self.shared;
        if let Some(backend) = from_backend {
            backend.hear(trailers, &reporter.load);
        }
        if let Some(format) = self.format {
            reporter.stamp_trailers(trailers, self.endpoint, format);
        }
    }
}

/// Records a frame for the access log.
fn note(busy: &mut Busy, frame: &Poll<Option<Result<Frame<Bytes>, BrokenOff>>>, ends: bool) {
    let Some(entry) = busy.entry() else { return };
    match frame {
        Poll::Ready(Some(Ok(frame))) => {
            entry.sent(frame.data_ref().map_or(0, |data| data.len() as u64));
            if ends || frame.is_trailers() {
                entry.complete();
            }
        }
        Poll::Ready(None) => entry.complete(),
        Poll::Ready(Some(Err(_))) | Poll::Pending => {}
    }
}

impl Body for AgentBody {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        match &mut *self {
            Self::Own { body, busy } => {
                let frame = Pin::new(&mut *body).poll_frame(cx).map_err(|never| match never {});
                note(busy, &frame, body.is_end_stream());
                frame
            }
            Self::Proxied { body, open, trailers, busy } => {
                let mut frame = Pin::new(&mut *body).poll_frame(cx);
                if let Some(load) = trailers
                    && let Poll::Ready(Some(Ok(frame))) = &mut frame
                    && let Some(trailers) = frame.trailers_mut()
                {
                    load.exchange(trailers);
                }
                note(busy, &frame, body.is_end_stream());
                if let Some(open) = open
                    && frame.is_ready()
                {
                    open.moved();
                }
                frame
            }
            Self::Reports { body, busy } => {
                let frame = Pin::new(&mut *body).poll_frame(cx).map_err(|never| match never {});
                note(busy, &frame, body.is_end_stream());
                frame
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Reports { body, .. } => body.is_end_stream(),
            Self::Own { body, .. } => body.is_end_stream(),
            Self::Proxied { body, .. } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Reports { body, .. } => body.size_hint(),
            Self::Own { body, .. } => body.size_hint(),
            Self::Proxied { body, .. } => body.size_hint(),
        }
    }
}

/// Limits for reading a body that the agent does not forward: its length in bytes, and the time.
const MAX_READ_REST: u64 = 64 * 1024;
const READ_REST_PATIENCE: Duration = Duration::from_millis(10);
