//! Runs a client's connection in hyper: chooses hyper's settings, and decides when to ask the connection to end.

use std::error::Error as _;
use std::future::Future;
use std::pin::{Pin, pin};
use std::time::Instant;

use hyper::server::conn::{http1, http2};
use hyper_util::rt::TokioTimer;

use crate::config::{Limits, ping_timeout};
use crate::conn::Watch;
use crate::leash::{Patrol, Rules, Tasks};
use crate::log::Log;
use crate::phase::{Life, Phase};
use crate::traffic::{Event, Traffic};

/// Runs a connection to its end. Asks it to end when the agent drains, or when nothing has happened for a long time.
///
/// HTTP/2 can be asked at once: after GOAWAY, the streams that the client was just opening are still served. HTTP/1.1
/// has no such message, and a request may be on its way when the connection is closed. So until `Phase::Closing`,
/// HTTP/1.1 connections end with a response that says `Connection: close`.
pub(crate) async fn drive<C>(
    mut served: Pin<&mut C>,
    graceful: impl Fn(Pin<&mut C>),
    watch: &Watch,
    mut life: Life,
    limits: &Limits,
    traffic: &Traffic,
    log: &Log,
) where
    C: Future<Output = Result<(), hyper::Error>>,
{
    // Over HTTP/2, each request has its own task that watches it.
    let rules = Rules::of(limits).filter(|_| !watch.is_http2());
    let often = limits.idle_timeout / 8;
    let mut look = tokio::time::interval(rules.map_or(often, |rules| rules.period().min(often)));
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    look.reset();
    let mut last = watch.activity();
    let mut since = Instant::now();
    let mut patrol: Option<Patrol> = None;
    let asks = if watch.is_http2() { Phase::Draining } else { Phase::Closing };
    {
        let mut asked = pin!(life.reaches(asks));
        loop {
            tokio::select! {
                biased;
                ended = served.as_mut() => {
                    if let Err(error) = ended {
                        failed(&error, watch, traffic, log);
                    }
                    return;
                }
                () = &mut asked => break,
                _ = look.tick() => {
                    // `since` is the time of the check that noticed the latest activity, so the connection has been
                    // idle at least since then.
                    let now = watch.activity();
                    if now != last || now.1 {
                        (last, since) = (now, Instant::now());
                    } else if since.elapsed() >= limits.idle_timeout {
                        traffic.count(Event::Idle);
                        break;
                    }
                    if let Some(cut) = rules.and_then(|rules| look_after(&mut patrol, watch, rules)) {
                        traffic.count(cut);
                        return;
                    }
                }
            }
        }
    }
    watch.part();
    graceful(served.as_mut());
    tokio::select! {
        biased;
        _ = served => {}
        () = life.reaches(Phase::Cut) => {}
    }
}

/// Handles a broken connection. Counts and logs it if the client violated the protocol; a client that leaves is not a
/// failure.
fn failed(error: &hyper::Error, watch: &Watch, traffic: &Traffic, log: &Log) {
    let h2 = error.source().and_then(|source| source.downcast_ref::<h2::Error>());
    if watch.is_slow() {
        traffic.count(Event::SlowHead);
        log.failure("client", || "a request head took too long");
    } else if error.is_parse() || h2.is_some_and(h2::Error::is_library) {
        traffic.count(Event::Protocol);
        log.failure("client", || match error.source() {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        });
    }
}

/// Checks the last request of an HTTP/1 connection.
fn look_after(patrol: &mut Option<Patrol>, watch: &Watch, rules: Rules) -> Option<Event> {
    let (leash, wrote) = watch.leash();
    let leash = leash?;
    if !patrol.as_ref().is_some_and(|patrol| patrol.follows(&leash)) {
        *patrol = Some(Patrol::new(leash, rules));
    }
    patrol.as_mut()?.look(wrote)
}

pub(crate) fn http1_builder(limits: &Limits) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(None)
        .max_header_size(limits.max_header_bytes)
        .max_buf_size(limits.max_header_bytes.max(MIN_BUFFER));
    if limits.max_headers != HYPER_MAX_HEADERS {
        builder.max_headers(limits.max_headers);
    }
    builder
}

pub(crate) fn http2_builder(limits: &Limits, tasks: Tasks) -> http2::Builder<Tasks> {
    let mut builder = http2::Builder::new(tasks);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.max_streams)
        .max_header_list_size(u32::try_from(limits.max_header_bytes).unwrap_or(u32::MAX))
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER);
    if let Some(interval) = limits.ping_interval {
        builder.keep_alive_interval(interval).keep_alive_timeout(ping_timeout(interval));
    }
    builder
}

/// Smallest read buffer that hyper accepts, bytes.
pub(crate) const MIN_BUFFER: usize = 8192;
/// hyper's default limit. It is not set explicitly, because hyper is slower once a limit is set.
const HYPER_MAX_HEADERS: usize = 100;
/// HTTP/2 flow-control window of a stream: maximum data buffered for a backend that reads slowly, bytes.
const WINDOW: u32 = 64 * 1024;
/// HTTP/2 flow-control window of a connection, bytes. Uploads that the backend does not read block the others only if
/// they fill this window. That takes five times as many as the shipped Envoy has on a connection.
///
/// h2 also ends a connection that holds too many small unread frames. Each counts as the difference between 256 bytes and
/// its payload, and the sum may reach half of this window. A single upload cannot reach it, even in frames of one byte.
const CONNECTION_WINDOW: u32 = 512 * WINDOW;
/// Maximum data buffered per HTTP/2 stream for a client that reads slowly, bytes.
const SEND_BUFFER: usize = 256 * 1024;
