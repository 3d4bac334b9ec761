//! A backend in a process of its own: answers every kind of request in the mix, and misbehaves as its parent orders in
//! a line on standard input ([`Mode`]). It counts the requests that it broke on purpose, so that they are attributed to
//! the fault.
//!
//! It ends when its standard input is closed, and therefore also when its parent ends.

use std::convert::Infallible;
use std::io::BufRead as _;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Version, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Channel, Full};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use prequal_testbed::{block_on, handle};
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, watch};

use crate::mix::{self, PART, PART_GAP, PARTS};

/// Service time of every request.
const SERVICE: Duration = Duration::from_millis(10);
/// Path of a probe.
const PROBE: &str = "/prequal/probe";
/// How long a connection works before it is half-closed or gets GOAWAY.
const CONNECTION_LIFE: Duration = Duration::from_millis(200);

/// How a backend behaves. Its `Display` is the line that orders this behaviour.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mode {
    /// Behaves correctly.
    Well,
    /// Takes this many milliseconds longer.
    Slow(u64),
    /// Answers this percentage of requests with 503, at once.
    Fail(u64),
    /// Breaks the connection off (RST) on this percentage of requests.
    Reset(u64),
    /// Ends each connection gracefully soon after it was made: GOAWAY, or `connection: close` on the next response.
    GoAway,
    /// Sends an empty DATA frame after each gRPC message, which HTTP/2 allows.
    EmptyFrames,
    /// Closes its half of each connection soon after it was made, and continues to read.
    HalfClose,
    /// Accepts connections and sends nothing on them for this many milliseconds: no SETTINGS, no answer.
    Mute(u64),
    /// Replaces its agent and lies: claims to be idle and fast, but is neither.
    LieIdle,
    /// Replaces its agent and claims to be busier than any other replica.
    LieBusy,
    /// Replaces its agent and sends reports that make no sense.
    LieGarbage,
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Well => write!(f, "well 0"),
            Self::Slow(ms) => write!(f, "slow {ms}"),
            Self::Fail(percent) => write!(f, "fail {percent}"),
            Self::Reset(percent) => write!(f, "reset {percent}"),
            Self::GoAway => write!(f, "goaway 0"),
            Self::EmptyFrames => write!(f, "empty-frames 0"),
            Self::HalfClose => write!(f, "half-close 0"),
            Self::Mute(ms) => write!(f, "mute {ms}"),
            Self::LieIdle => write!(f, "lie-idle 0"),
            Self::LieBusy => write!(f, "lie-busy 0"),
            Self::LieGarbage => write!(f, "lie-garbage 0"),
        }
    }
}

impl std::str::FromStr for Mode {
    type Err = anyhow::Error;

    fn from_str(line: &str) -> Result<Self> {
        let (name, number) = line.split_once(' ').context("a name and a number")?;
        let number = number.parse().context("a number")?;
        Ok(match name {
            "well" => Self::Well,
            "slow" => Self::Slow(number),
            "fail" => Self::Fail(number),
            "reset" => Self::Reset(number),
            "goaway" => Self::GoAway,
            "empty-frames" => Self::EmptyFrames,
            "half-close" => Self::HalfClose,
            "mute" => Self::Mute(number),
            "lie-idle" => Self::LieIdle,
            "lie-busy" => Self::LieBusy,
            "lie-garbage" => Self::LieGarbage,
            other => bail!("no such mode: {other}"),
        })
    }
}

/// The line that requests the counts; the answer is the number in flight and the number broken on purpose.
pub(crate) const COUNTS: &str = "counts";

struct Shared {
    addr: SocketAddr,
    number: usize,
    mode: watch::Sender<Mode>,
    in_flight: AtomicU64,
    broken: AtomicU64,
    drawn: AtomicU64,
}

/// One connection.
struct Connection {
    shared: Arc<Shared>,
    in_flight: AtomicU64,
    half_closed: AtomicBool,
    http1: AtomicBool,
    /// Whether its next response is its last.
    last: AtomicBool,
    reset: Notify,
}

/// A request in flight, until its response has been sent.
struct InFlight(Arc<Connection>);

impl InFlight {
    fn new(connection: &Arc<Connection>) -> Self {
        connection.in_flight.fetch_add(1, Relaxed);
        connection.shared.in_flight.fetch_add(1, Relaxed);
        Self(Arc::clone(connection))
    }
}

impl Connection {
    /// Whether the connection must end and has not been asked to end yet.
    fn ends(&self, mode: Mode) -> bool {
        matches!(mode, Mode::GoAway | Mode::HalfClose) && !self.last.load(Relaxed)
    }

    /// Ends the connection without losing a request. An idle HTTP/1.1 connection must not be closed, because a request
    /// may be on its way.
    fn finish(&self, shut_down: impl FnOnce()) {
        self.last.store(true, Relaxed);
        if !self.http1.load(Relaxed) {
            shut_down();
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
        self.0.shared.in_flight.fetch_sub(1, Relaxed);
    }
}

impl Shared {
    /// True for `percent` per cent of all calls, evenly spread.
    fn draws(&self, percent: u64) -> bool {
        self.drawn.fetch_add(percent, Relaxed) % 100 < percent
    }
}

impl Shared {
    /// The report of a lying agent.
    fn lie(&self, mode: Mode) -> Option<String> {
        let addr = self.addr;
        Some(match mode {
            Mode::LieIdle => format!("0;100;{addr};base=100;knee=1000"),
            Mode::LieBusy => format!("100000;10000000;{addr};base=10000000;knee=1"),
            Mode::LieGarbage => {
                let garbage = [
                    String::new(),
                    ";;;;;".to_owned(),
                    format!("-1;100;{addr}"),
                    format!("4294967296;100;{addr}"),
                    format!("0;99999999999999999999;{addr}"),
                    format!("0;100;{addr};base=0;knee=0"),
                    format!("0;100;{addr};fail=-5;up=abc"),
                    "0;100;[::1]:99999".to_owned(),
                    "\u{e4}".repeat(200),
                    "9".repeat(4000),
                ];
                let next = self.drawn.fetch_add(1, Relaxed) as usize % garbage.len();
                garbage[next].clone()
            }
            _ => return None,
        })
    }
}

/// Serves replica `number` at `addr` until standard input ends.
pub(crate) fn serve(addr: SocketAddr, number: usize) -> Result<()> {
    let shared = Arc::new(Shared {
        addr,
        number,
        mode: watch::Sender::new(Mode::Well),
        in_flight: AtomicU64::new(0),
        broken: AtomicU64::new(0),
        drawn: AtomicU64::new(0),
    });
    let listener = block_on(async move {
        let socket = TcpSocket::new_v4()?;
        socket.set_reuseaddr(true)?;
        socket.bind(addr)?;
        socket.listen(1024)
    })?;
    handle().spawn(accept(listener, Arc::clone(&shared)));
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line == COUNTS {
            println!("{} {}", shared.in_flight.load(Relaxed), shared.broken.load(Relaxed));
        } else {
            shared.mode.send_replace(line.parse()?);
            println!("ok");
        }
    }
    Ok(())
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let _ = stream.set_nodelay(true);
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            // An error means that one of the sides broke the connection off.
            let _ = converse(stream, shared).await;
        });
    }
}

async fn converse(stream: TcpStream, shared: Arc<Shared>) -> Result<()> {
    let mut modes = shared.mode.subscribe();
    let first = *modes.borrow_and_update();
    if let Mode::Mute(ms) = first {
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }
    let socket = std::net::TcpStream::from(stream.as_fd().try_clone_to_owned()?);
    let connection = Arc::new(Connection {
        shared: Arc::clone(&shared),
        in_flight: AtomicU64::new(0),
        half_closed: AtomicBool::new(false),
        http1: AtomicBool::new(false),
        last: AtomicBool::new(false),
        reset: Notify::new(),
    });
    let of_service = Arc::clone(&connection);
    let service = service_fn(move |request| respond(request, Arc::clone(&of_service)));
    let builder = auto::Builder::new(TokioExecutor::new());
    let mut served = pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    loop {
        let mode = *modes.borrow_and_update();
        tokio::select! {
            done = served.as_mut() => return done.map_err(|error| anyhow::anyhow!(error)),
            () = connection.reset.notified() => {
                shared.broken.fetch_add(connection.in_flight.load(Relaxed), Relaxed);
                SockRef::from(&socket).set_linger(Some(Duration::ZERO))?;
                return Ok(());
            }
            () = tokio::time::sleep(CONNECTION_LIFE), if connection.ends(mode) => {
                if mode == Mode::HalfClose {
                    connection.half_closed.store(true, Relaxed);
                    shared.broken.fetch_add(connection.in_flight.load(Relaxed), Relaxed);
                    socket.shutdown(std::net::Shutdown::Write)?;
                    return served.await.map_err(|error| anyhow::anyhow!(error));
                }
                connection.finish(|| served.as_mut().graceful_shutdown());
            }
            changed = modes.changed() => {
                changed?;
                // Force new connections, because this mode affects only those.
                if matches!(*modes.borrow(), Mode::Mute(_)) {
                    connection.finish(|| served.as_mut().graceful_shutdown());
                }
            }
        }
    }
}

type Body = UnsyncBoxBody<Bytes, hyper::Error>;

async fn respond(request: Request<Incoming>, connection: Arc<Connection>) -> Result<Response<Body>> {
    let in_flight = InFlight::new(&connection);
    let shared = &connection.shared;
    let is_http1 = request.version() != Version::HTTP_2;
    connection.http1.store(is_http1, Relaxed);
    if connection.half_closed.load(Relaxed) {
        shared.broken.fetch_add(1, Relaxed);
    }
    let mode = *shared.mode.borrow();
    let report = shared.lie(mode);
    let mut delay = SERVICE;
    let mut fails = false;
    match mode {
        _ if request.uri().path() == PROBE => delay = Duration::ZERO,
        // It is slower than it claims.
        Mode::LieIdle => delay *= 4,
        Mode::Slow(ms) => delay += Duration::from_millis(ms),
        Mode::Fail(percent) if shared.draws(percent) => fails = true,
        Mode::Reset(percent) if shared.draws(percent) => connection.reset.notify_one(),
        _ => {}
    }
    if fails {
        shared.broken.fetch_add(1, Relaxed);
    }
    let (mut response, grpc) = if fails {
        (status(StatusCode::SERVICE_UNAVAILABLE), false)
    } else {
        tokio::time::sleep(delay).await;
        answer(request, mode).await?
    };
    let replica = HeaderValue::from_str(&shared.number.to_string())?;
    response.headers_mut().insert(mix::REPLICA, replica);
    if is_http1 && connection.last.load(Relaxed) && response.status() != StatusCode::SWITCHING_PROTOCOLS {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    if let Some(report) = report {
        response.headers_mut().insert("x-prequal-load", HeaderValue::from_bytes(report.as_bytes())?);
    }
    Ok(response.map(|body| {
        let held = body.map_frame(move |frame| {
            let _ = &in_flight;
            frame
        });
        if grpc {
            let trailers = HeaderMap::from_iter([(
                http::HeaderName::from_static("grpc-status"),
                HeaderValue::from_static("0"),
            )]);
            held.with_trailers(std::future::ready(Some(Ok(trailers)))).boxed_unsync()
        } else {
            held.boxed_unsync()
        }
    }))
}

/// The answer, and whether gRPC's trailers follow it.
async fn answer(mut request: Request<Incoming>, mode: Mode) -> Result<(Response<Body>, bool)> {
    let path = request.uri().path().to_owned();
    let is_grpc = request.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/grpc");
    if is_grpc {
        // It is an error if an agent sends gRPC as HTTP/1.1, and the user must see it.
        if request.version() != Version::HTTP_2 {
            return Ok((status(StatusCode::HTTP_VERSION_NOT_SUPPORTED), false));
        }
        let empty_frames = mode == Mode::EmptyFrames;
        let messages = Messages { from: request.into_body(), empty_frames, empty_next: false };
        let mut response = Response::new(messages.boxed_unsync());
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        return Ok((response, true));
    }
    let response = match path.as_str() {
        mix::UPLOAD => {
            let length = request.body_mut().collect().await?.to_bytes().len();
            Response::new(full(Bytes::from(length.to_string())))
        }
        mix::DOWNLOAD => Response::new(download()),
        mix::SOCKET => {
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                if let Ok(upgraded) = upgrade.await {
                    echo(TokioIo::new(upgraded)).await;
                }
            });
            let mut response = status(StatusCode::SWITCHING_PROTOCOLS);
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
            response.headers_mut().insert(header::UPGRADE, HeaderValue::from_static("websocket"));
            response
        }
        _ => Response::new(full(Bytes::from_static(b"ok"))),
    };
    Ok((response, false))
}

/// The request's body as it arrives, to be echoed. Empty frames are dropped, because a request ends with one, which
/// must not be echoed before the trailers. With `empty_frames`, an empty frame is added after each echoed frame.
struct Messages {
    from: Incoming,
    empty_frames: bool,
    /// Whether an empty frame comes next.
    empty_next: bool,
}

impl hyper::body::Body for Messages {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        if std::mem::take(&mut self.empty_next) {
            return Poll::Ready(Some(Ok(Frame::data(Bytes::new()))));
        }
        while let Some(frame) = ready!(Pin::new(&mut self.from).poll_frame(cx)?) {
            let data = frame.into_data().unwrap_or_default();
            if !data.is_empty() {
                self.empty_next = self.empty_frames;
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
        }
        Poll::Ready(None)
    }
}

fn status(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(full(Bytes::new()));
    *response.status_mut() = status;
    response
}

fn full(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never: Infallible| match never {}).boxed_unsync()
}

fn download() -> Body {
    let (mut sender, body) = Channel::<Bytes, hyper::Error>::new(1);
    tokio::spawn(async move {
        for _ in 0..PARTS {
            if sender.send(Frame::data(Bytes::from(vec![b'd'; PART]))).await.is_err() {
                return;
            }
            tokio::time::sleep(PART_GAP).await;
        }
    });
    body.boxed_unsync()
}

async fn echo(mut io: TokioIo<hyper::upgrade::Upgraded>) {
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = io.read(&mut buffer).await {
        if io.write_all(&buffer[..length]).await.is_err() || io.flush().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_is_parsed_as_it_is_written() {
        for mode in [
            Mode::Well,
            Mode::Slow(5),
            Mode::Fail(30),
            Mode::Reset(10),
            Mode::GoAway,
            Mode::EmptyFrames,
            Mode::HalfClose,
            Mode::Mute(700),
            Mode::LieIdle,
            Mode::LieBusy,
            Mode::LieGarbage,
        ] {
            assert_eq!(mode.to_string().parse::<Mode>().unwrap(), mode);
        }
        assert!("well".parse::<Mode>().is_err() && "odd 1".parse::<Mode>().is_err());
    }
}
