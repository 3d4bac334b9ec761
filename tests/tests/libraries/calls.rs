//! What a library must do for gRPC: reports in headers and trailers, and how each call counts. The service is gRPC's
//! own health check, whose answer depends on the name that it is asked about.

use std::net::SocketAddr;

use ::http::{HeaderMap, Request};
use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prequal_core::wire::report::LoadReport;
use prequal_testbed::{block_on, eventually, handle};

use crate::subject::{PATIENCE, Subject};

/// The headers and trailers of a response.
type Answer = (HeaderMap, HeaderMap);

async fn call(addr: SocketAddr, method: &'static str, about: &'static str) -> Result<Answer> {
    let tcp = tokio::net::TcpStream::connect(addr).await?;
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(tcp)).await?;
    handle().spawn(connection);
    let length = u8::try_from(about.len())?;
    let message = [&[0x0a, length], about.as_bytes()].concat();
    let body = [&[0, 0, 0, 0, length + 2], &message[..]].concat();
    let request = Request::post(format!("http://app.test/grpc.health.v1.Health/{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Full::new(Bytes::from(body)))?;
    let (head, body) = sender.send_request(request).await?.into_parts();
    let trailers = body.collect().await?.trailers().cloned().unwrap_or_default();
    Ok((head.headers, trailers))
}

fn ask(addr: SocketAddr, method: &'static str, about: &'static str) -> Result<Answer> {
    block_on(call(addr, method, about))
}

fn text<'a>(fields: &'a HeaderMap, name: &str) -> Result<&'a str> {
    Ok(fields.get(name).with_context(|| format!("no {name}: {fields:?}"))?.to_str()?)
}

/// Checks everything at `addr`, on a server that has served other requests.
pub(crate) fn check(subject: &Subject, addr: SocketAddr) -> Result<()> {
    let before = (subject.ended)()?;
    let (headers, trailers) = ask(addr, "Check", "")?;
    let report = LoadReport::parse(text(&headers, "x-prequal-load")?)?;
    ensure!(report.rif == 0 && report.capacity.is_some(), "{report}");
    ensure!(text(&trailers, "grpc-status")? == "0", "{trailers:?}");
    let metrics =
        STANDARD_NO_PAD.decode(text(&trailers, "endpoint-load-metrics-bin")?.trim_end_matches('='))?;
    ensure!(contains(&metrics, b"prequal_knee"), "{metrics:?}");
    subject.at_rest(before, [1, 0, 0, 0])?;

    let (headers, trailers) = ask(addr, "Check", "internal")?;
    ensure!(LoadReport::parse(text(&headers, "x-prequal-load")?).is_ok());
    ensure!(text(&trailers, "grpc-status")? == "13", "{trailers:?}");
    subject.at_rest(before, [1, 1, 0, 0])?;
    ask(addr, "Check", "missing")?;
    subject.at_rest(before, [2, 1, 0, 0])?;

    // Streams with a single response count as ordinary calls.
    ask(addr, "Watch", "one")?;
    subject.at_rest(before, [3, 1, 0, 0])?;
    ask(addr, "Watch", "two")?;
    subject.at_rest(before, [3, 1, 0, 1])?;
    ask(addr, "Watch", "broken")?;
    subject.at_rest(before, [3, 2, 0, 1])?;

    let hangs = handle().spawn(call(addr, "Check", "hang"));
    eventually("one in flight", PATIENCE, || (subject.probe().ok()?.rif == 1).then_some(()));
    hangs.abort();
    subject.at_rest(before, [3, 2, 1, 1])
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}
