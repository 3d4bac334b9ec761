//! Load in ORCA format: on responses, and out of band as gRPC clients ask for it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use crate::common::{
    Running, agent, any_port, backend, client1, client2, eventually, fetch, get, text, within,
};
use base64::Engine as _;
use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, header};
use http_body_util::channel::{Channel, Sender};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use probe_agent::orca::{Orca, OrcaClass, OrcaFormat};
use prost::Message as _;
use tokio::net::TcpStream;
use tokio::task::{JoinHandle, JoinSet};

const TEXT: &str = "endpoint-load-metrics";
const BINARY: &str = "endpoint-load-metrics-bin";
pub const METHOD: &str = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics";

/// `xds.data.orca.v3.OrcaLoadReport`, including the fields of the protobuf definition that the agent does not send.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Report {
    #[prost(double, tag = "1")]
    pub cpu_utilization: f64,
    #[prost(double, tag = "2")]
    pub mem_utilization: f64,
    #[prost(uint64, tag = "3")]
    pub rps: u64,
    #[prost(double, tag = "6")]
    pub rps_fractional: f64,
    #[prost(double, tag = "7")]
    pub eps: f64,
    #[prost(btree_map = "string, double", tag = "8")]
    pub named_metrics: BTreeMap<String, f64>,
    #[prost(double, tag = "9")]
    pub application_utilization: f64,
}

fn orca(format: OrcaFormat) -> Orca {
    let limit = NonZeroU32::new(1000);
    Orca { format: Some(format), limit, window: Duration::from_millis(400), streams: 1, ..Orca::default() }
}

/// Returns the load reports on a response.
fn load_headers(headers: &HeaderMap) -> Vec<(&str, &str)> {
    let reports = headers.iter().filter(|(name, _)| name.as_str().starts_with("endpoint-load-metrics"));
    reports.map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect()
}

#[tokio::test]
async fn responses_carry_load_in_the_configured_format() {
    let addr = backend(|req: Request<Incoming>| async move {
        let mut reply = text("hello");
        let kind = req.headers().get("x-kind").cloned().unwrap_or(HeaderValue::from_static("text/plain"));
        reply.headers_mut().insert(header::CONTENT_TYPE, kind);
        reply
            .headers_mut()
            .insert("endpoint-load-metrics", HeaderValue::from_static("TEXT cpu_utilization=0.9"));
        reply
    })
    .await;
    let off = agent(addr, |_| {});
    let (head, _) = fetch(off.addr, "/").await;
    assert_eq!(
        load_headers(&head.headers),
        [("endpoint-load-metrics", "TEXT cpu_utilization=0.9")],
        "as it came"
    );

    for format in [OrcaFormat::Text, OrcaFormat::Json, OrcaFormat::Binary] {
        let agent = agent(addr, |config| config.orca = orca(format));
        let first = fetch(agent.addr, "/").await.0.headers;
        let (head, _) = fetch(agent.addr, "/").await;
        let reports = load_headers(&head.headers);
        assert_eq!(reports.len(), 1, "one report, and not the backend's: {reports:?}");
        let (name, value) = reports[0];
        if format == OrcaFormat::Binary {
            assert_eq!(name, "endpoint-load-metrics-bin");
            let bytes = base64::engine::general_purpose::STANDARD.decode(value).unwrap();
            let report = Report::decode(&bytes[..]).unwrap();
            assert!(report.rps_fractional > 0.0 && report.application_utilization > 0.0, "{report:?}");
            assert!(report.named_metrics.contains_key("prequal_base_latency_us"), "{report:?}");
            assert_eq!((report.cpu_utilization, report.mem_utilization, report.rps), (0.0, 0.0, 0));
        } else {
            assert_eq!(name, "endpoint-load-metrics");
            let begins =
                if format == OrcaFormat::Text { "TEXT application_utilization=0." } else { "JSON {\"appl" };
            assert!(value.starts_with(begins) && value.contains("rps_fractional"), "{value}");
            let first = load_headers(&first)[0].1;
            assert!(
                first.contains("rps_fractional"),
                "the first response too, before any request has ended: {first}"
            );
        }
        assert!(head.headers.contains_key("x-prequal-load"), "beside the usual report");
        assert_eq!(agent.load.counters().orca_reports(), [2, 0]);
    }

    let grpc_alone = agent(addr, |config| {
        config.orca = Orca { class: OrcaClass::Grpc, ..orca(OrcaFormat::Text) };
    });
    for (kind, replaced) in [("text/plain", false), ("application/grpc", true)] {
        let mut request = get("/");
        request.headers_mut().insert("x-kind", kind.parse().unwrap());
        let response = within(client1(grpc_alone.addr).await.send_request(request)).await.unwrap();
        let report = load_headers(response.headers())[0].1;
        assert_eq!(report != "TEXT cpu_utilization=0.9", replaced, "{kind}: {report}");
    }
}

/// `OrcaLoadReportRequest` with an interval in milliseconds, as a gRPC message.
pub fn asking(interval_ms: u32) -> Vec<u8> {
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    struct Interval {
        #[prost(int64, tag = "1")]
        seconds: i64,
        #[prost(int32, tag = "2")]
        nanos: i32,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    struct Asks {
        #[prost(message, optional, tag = "1")]
        report_interval: Option<Interval>,
    }
    let (seconds, nanos) = (i64::from(interval_ms / 1000), (interval_ms % 1000 * 1_000_000) as i32);
    let message = Asks { report_interval: Some(Interval { seconds, nanos }) }.encode_to_vec();
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[0], &length[..], &message].concat()
}

fn posted<B>(body: B) -> Request<B> {
    Request::post(format!("http://replica{METHOD}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(body)
        .unwrap()
}

async fn call(addr: SocketAddr, body: Vec<u8>) -> Response<Incoming> {
    within(client2(addr).await.send_request(posted(Full::new(Bytes::from(body))))).await.unwrap()
}

/// Returns the next report of a stream.
async fn next(response: &mut Response<Incoming>) -> Report {
    let mut data = within(response.frame()).await.expect("a report").unwrap().into_data().expect("data");
    assert_eq!(data.get_u8(), 0);
    assert_eq!(data.get_u32() as usize, data.remaining());
    Report::decode(data).unwrap()
}

fn streaming(addr: SocketAddr) -> Running {
    agent(addr, |config| {
        config.probe_listen = Some(any_port());
        config.orca = Orca { format: None, ..orca(OrcaFormat::Text) };
    })
}

#[tokio::test]
async fn a_stream_sends_reports_at_the_requested_interval() {
    let addr = backend(|_| async { text("hello") }).await;
    let agent = streaming(addr);
    fetch(agent.addr, "/").await;
    let mut stream = call(agent.addr, asking(150)).await;
    assert_eq!(stream.headers()["content-type"], "application/grpc");
    let begin = Instant::now();
    let first = next(&mut stream).await;
    assert!(first.rps_fractional > 0.0 && first.application_utilization > 0.0, "{first:?}");
    assert_eq!(first.named_metrics["prequal_rif"], 0.0, "a stream is no request");
    for _ in 0..4 {
        next(&mut stream).await;
    }
    let took = begin.elapsed();
    assert!(took >= Duration::from_millis(550), "four intervals in {took:?}");
    assert_eq!((agent.load.rif(), agent.load.counters().orca_streams()), (0, 1));

    let mut second = call(agent.addr, asking(150)).await;
    assert_eq!(second.headers()["grpc-status"], "8", "one stream is all that was allowed");
    assert!(within(second.frame()).await.is_none());
    drop(stream);
    eventually("the stream ends with its client", || agent.load.counters().orca_streams() == 0).await;
    let mut at_probe_port = call(agent.probe.unwrap(), asking(1)).await;
    let begin = Instant::now();
    for _ in 0..4 {
        next(&mut at_probe_port).await;
    }
    assert!(begin.elapsed() >= Duration::from_millis(250), "not below the shortest interval");
    assert!(agent.load.counters().orca_reports()[1] >= 9);
}

#[tokio::test]
async fn invalid_calls_are_refused_and_other_requests_reach_the_backend() {
    let addr = backend(|_| async { text("mine") }).await;
    let agent = streaming(addr);
    for (body, status) in [
        (vec![], "3"),
        (vec![0, 0, 0, 0, 9, 1], "3"),
        (vec![1, 0, 0, 0, 0], "12"),
        (vec![0, 255, 255, 255, 255], "8"),
        (vec![0, 0, 0, 0, 2, 10, 255], "3"),
    ] {
        let answer = call(agent.addr, body.clone()).await;
        assert_eq!(answer.headers()["grpc-status"], status, "{body:?}");
    }
    assert_eq!(agent.load.counters().orca_refused(), 5);
    let (_, body) = fetch(agent.addr, METHOD).await;
    assert_eq!(body, "mine", "over HTTP/1.1 there is no gRPC");

    let off =
        crate::common::agent(addr, |config| config.orca = Orca { streams: 0, ..orca(OrcaFormat::Text) });
    let answer = call(off.addr, asking(100)).await;
    let body = within(answer.into_body().collect()).await.unwrap().to_bytes();
    assert_eq!(body, "mine", "the backend's own service is not shadowed");
}

#[tokio::test]
async fn a_drain_ends_streams() {
    let addr = backend(|_| async { text("hello") }).await;
    let mut agent = streaming(addr);
    let mut stream = call(agent.addr, asking(1000)).await;
    next(&mut stream).await;
    let begin = Instant::now();
    agent.begin_stop();
    let trailers = within(stream.frame()).await.unwrap().unwrap().into_trailers().unwrap();
    assert_eq!(trailers["grpc-status"], "14");
    assert!(within(stream.frame()).await.is_none());
    drop(stream);
    eventually("no stream is left", || agent.load.counters().orca_streams() == 0).await;
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
}

/// Makes a call whose request does not arrive as long as the sender lives.
async fn silent(addr: SocketAddr) -> (Sender<Bytes>, JoinHandle<Response<Incoming>>) {
    let (sender, body) = Channel::<Bytes, Infallible>::new(1);
    let mut client = client2(addr).await;
    (sender, tokio::spawn(async move { client.send_request(posted(body)).await.unwrap() }))
}

/// Returns the status of a call with an invalid request. The call is refused even if there is room, so it keeps no
/// place.
async fn refusal(addr: SocketAddr) -> HeaderValue {
    call(addr, vec![]).await.headers()["grpc-status"].clone()
}

#[tokio::test]
async fn a_call_without_its_request_message_times_out() {
    let addr = backend(|_| async { text("hello") }).await;
    let stalled = |limit| {
        agent(addr, move |config| {
            config.probe_listen = Some(any_port());
            config.orca = Orca { format: None, ..orca(OrcaFormat::Text) };
            config.limits.header_timeout = limit;
        })
    };
    let agent = stalled(Duration::from_millis(200));
    for port in [agent.addr, agent.probe.unwrap()] {
        let (_sender, answer) = silent(port).await;
        let answer = within(answer).await.unwrap();
        assert_eq!(answer.headers()["grpc-status"], "4");
        // The request begins, but does not continue.
        let (mut sender, answer) = silent(port).await;
        sender.send_data(Bytes::from_static(&[0, 0, 0, 0, 9, 10])).await.unwrap();
        assert_eq!(within(answer).await.unwrap().headers()["grpc-status"], "4");
    }
    assert_eq!(agent.load.counters().orca_refused(), 4);
    next(&mut call(agent.addr, asking(100)).await).await;

    // Until its request arrives or times out, a call takes a place; otherwise such calls would be unlimited. A drain
    // does not wait for the call.
    let mut agent = stalled(Duration::from_secs(3600));
    let (_sender, answer) = silent(agent.addr).await;
    let begin = Instant::now();
    while refusal(agent.addr).await != "8" {
        assert!(begin.elapsed() < Duration::from_secs(10), "it does not occupy a slot");
    }
    assert_eq!(fetch(agent.addr, "/").await.1, "hello");
    agent.begin_stop();
    assert_eq!(within(answer).await.unwrap().headers()["grpc-status"], "14");
}

#[tokio::test]
async fn a_client_that_does_not_read_gets_no_more_than_its_window() {
    let addr = backend(|_| async { text("hello") }).await;
    let agent = agent(addr, |config| {
        config.orca = Orca { format: None, streams: 2, ..orca(OrcaFormat::Text) };
        config.limits.drain_timeout = Duration::from_millis(200);
    });
    // Reports have metrics once a request has ended.
    fetch(agent.addr, "/").await;
    agent.at_rest([1, 0, 0, 0]).await;
    let tcp = TcpStream::connect(agent.addr).await.unwrap();
    let window = 200;
    let mut builder = http2::Builder::new(TokioExecutor::new());
    let handshake = builder.initial_stream_window_size(window).handshake(TokioIo::new(tcp));
    let (mut client, conn) = handshake.await.unwrap();
    tokio::spawn(conn);
    let request = || posted(Full::new(Bytes::from(asking(100))));
    let mut stalled = within(client.send_request(request())).await.unwrap();
    let mut read = call(agent.addr, asking(100)).await;
    for _ in 0..20 {
        next(&mut read).await;
    }
    // A report has at least 40 bytes, and one more may be waiting for room in the window.
    let sent = agent.load.counters().orca_reports()[1];
    assert!((22..=21 + u64::from(window) / 40 + 1).contains(&sent), "{sent} reports, 20 of them read");
    // The same connection serves other requests, and the stream goes on once its client reads.
    let mut refused = within(client.send_request(request())).await.unwrap();
    assert_eq!(refused.headers()["grpc-status"], "8", "it holds its place");
    assert!(within(refused.frame()).await.is_none());
    let plain = Request::get("http://replica/").body(Full::new(Bytes::new())).unwrap();
    let plain = within(client.send_request(plain)).await.unwrap();
    assert_eq!(within(plain.into_body().collect()).await.unwrap().to_bytes(), "hello");
    let mut bytes = 0;
    while bytes < 2 * window as usize {
        bytes += within(stalled.frame()).await.unwrap().unwrap().into_data().unwrap().len();
    }
    drop(read);
    // The client no longer reads. A drain waits for it only until the drain's own limit.
    assert_eq!(within(agent.stop()).await, 0, "a stream is no request");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_calls_is_refused_and_counted_while_requests_succeed() {
    const PLACES: u32 = 3;
    const FLOOD: u64 = 400;
    let addr = backend(|_| async { text("hello") }).await;
    let agent = agent(addr, |config| {
        config.orca = Orca { format: None, streams: PLACES, ..orca(OrcaFormat::Text) };
    });
    let mut held = Vec::new();
    for _ in 0..PLACES {
        held.push(call(agent.addr, asking(100)).await);
    }
    let mut calls = JoinSet::new();
    for _ in 0..4 {
        let client = client2(agent.addr).await;
        for number in 0..FLOOD / 4 {
            let mut client = client.clone();
            // Every other call never sends its request.
            let (mut sender, body) = Channel::<Bytes, Infallible>::new(1);
            calls.spawn(async move {
                if number % 2 == 0 {
                    sender.send_data(Bytes::from(asking(100))).await.unwrap();
                }
                let answer = within(client.send_request(posted(body))).await.unwrap();
                answer.headers()["grpc-status"].clone()
            });
        }
    }
    let client = client2(agent.addr).await;
    for _ in 0..20 {
        let plain = Request::get("http://replica/").body(Full::new(Bytes::new())).unwrap();
        let plain = within(client.clone().send_request(plain)).await.unwrap();
        assert_eq!(within(plain.into_body().collect()).await.unwrap().to_bytes(), "hello");
    }
    for status in calls.join_all().await {
        assert_eq!(status, "8");
    }
    let counters = agent.load.counters();
    assert_eq!((counters.orca_refused(), counters.orca_streams()), (FLOOD, u64::from(PLACES)));
    for stream in &mut held {
        next(stream).await;
    }
    drop(held);
    eventually("all streams end", || agent.load.counters().orca_streams() == 0).await;
    agent.at_rest([20, 0, 0, 0]).await;
    next(&mut call(agent.addr, asking(100)).await).await;
}

#[tokio::test]
async fn the_reports_of_a_backend_provide_the_utilisation() {
    let addr = backend(|req: Request<Incoming>| async move {
        let asked = req.headers().get("endpoint-load-metrics-format").cloned();
        let mut reply = text("hello");
        let path = req.uri().path();
        let headers = reply.headers_mut();
        headers.insert("x-asked", asked.unwrap_or(HeaderValue::from_static("no")));
        let mut report = |value: &'static str| {
            headers.append(TEXT, HeaderValue::from_static(value));
        };
        match path {
            "/says" => report("TEXT cpu_utilization=0.625, named_metrics.kv=0.25"),
            "/high" => report("TEXT application_utilization=1e30,named_metrics.kv=NaN"),
            "/broken" => report("TEXT cpu_utilization"),
            "/twice" => ["TEXT cpu_utilization=0.1", "TEXT cpu_utilization=0.2"].into_iter().for_each(report),
            _ => {}
        }
        reply
    })
    .await;
    let reads = |from: &str, format| {
        let from = Some(from.parse().unwrap());
        agent(addr, move |config| {
            config.orca_from_backend = from;
            config.orca = Orca { format, streams: 1, ..orca(OrcaFormat::Text) };
            config.admin = Some(any_port());
        })
    };
    let on = reads("utilization", Some(OrcaFormat::Text));
    let (head, _) = fetch(on.addr, "/").await;
    assert!(
        load_headers(&head.headers)[0].1.starts_with("TEXT application_utilization=0."),
        "the report of the agent until then"
    );
    assert_eq!(head.headers["x-asked"], "text");

    let (head, _) = fetch(on.addr, "/says").await;
    let reports = load_headers(&head.headers);
    assert_eq!(reports.len(), 1, "{reports:?}");
    let value = reports[0].1;
    assert!(value.starts_with("TEXT cpu_utilization=0.625000,rps_fractional="), "{value}");
    assert!(
        value.contains(",named_metrics.prequal_rif=0,") && value.ends_with(",named_metrics.kv=0.25"),
        "{value}"
    );
    // The backend's load is also passed on with responses that carry no report of the backend, out of band, and as a
    // metric.
    let (head, _) = fetch(on.addr, "/").await;
    assert!(load_headers(&head.headers)[0].1.contains("cpu_utilization=0.625000"));
    let mut stream = call(on.addr, asking(100)).await;
    let report = next(&mut stream).await;
    assert_eq!((report.cpu_utilization, report.application_utilization), (0.625, 0.0));
    assert_eq!(report.named_metrics.get("kv"), Some(&0.25));
    drop(stream);
    assert_eq!(on.load.backend_utilization_micro(), Some(625_000));

    for path in ["/broken", "/twice"] {
        let (head, _) = fetch(on.addr, path).await;
        assert!(
            load_headers(&head.headers)[0].1.contains("cpu_utilization=0.625000"),
            "{path}: what was known counts on"
        );
    }
    let (head, _) = fetch(on.addr, "/high").await;
    let value = load_headers(&head.headers)[0].1;
    assert!(value.starts_with("TEXT application_utilization=1000,rps") && !value.contains("kv"), "{value}");
    let (_, page) = fetch(on.admin.unwrap(), "/metrics").await;
    for line in [
        "prequal_agent_backend_utilization_ratio 1000\n",
        "prequal_agent_backend_reports_total{result=\"used\"} 1\n",
        "prequal_agent_backend_reports_total{result=\"partial\"} 1\n",
        "prequal_agent_backend_reports_total{result=\"malformed\"} 1\n",
        "prequal_agent_backend_reports_total{result=\"contradictory\"} 1\n",
    ] {
        assert!(String::from_utf8_lossy(&page).contains(line), "{line}");
    }

    // Here, another metric of the backend is used as its utilisation. The agent asked for the report, so the client
    // does not get it. A client that asks for it itself does.
    let named = reads("named_metrics.kv", None);
    let (head, _) = fetch(named.addr, "/says").await;
    assert_eq!(
        (load_headers(&head.headers).len(), named.load.backend_utilization_micro()),
        (0, Some(250_000))
    );
    let mut request = get("/says");
    request.headers_mut().insert("endpoint-load-metrics-format", HeaderValue::from_static("json"));
    let response = within(client1(named.addr).await.send_request(request)).await.unwrap();
    assert_eq!(response.headers()["x-asked"], "json");
    assert_eq!(load_headers(response.headers()).len(), 1);

    let off = agent(addr, |_| {});
    let (head, _) = fetch(off.addr, "/says").await;
    assert_eq!((load_headers(&head.headers).len(), off.load.backend_utilization_micro()), (1, None));
    assert_eq!(head.headers["x-asked"], "no");
}

/// Starts a backend that sends `headers`. Its trailers are the gRPC status 0 and `trailers`.
async fn with_trailers(
    headers: &'static [(&'static str, &'static str)],
    trailers: Vec<(&'static str, HeaderValue)>,
) -> SocketAddr {
    backend(move |_: Request<Incoming>| {
        let mut map =
            HeaderMap::from_iter([(HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))]);
        trailers.iter().for_each(|(name, value)| {
            map.append(HeaderName::from_static(name), value.clone());
        });
        async move {
            let body = Full::new(Bytes::from_static(b"\0\0\0\0\0"))
                .with_trailers(std::future::ready(Some(Ok(map))))
                .map_err(|never: Infallible| match never {});
            let mut response = Response::builder().header("content-type", "application/grpc");
            for (name, value) in headers {
                response = response.header(*name, *value);
            }
            response.body(body.boxed()).unwrap()
        }
    })
    .await
}

/// Returns the trailers of a gRPC call.
async fn trailers_of_a_call(addr: SocketAddr) -> HeaderMap {
    let request = Request::post("http://replica/Say")
        .header("te", "trailers")
        .header("content-type", "application/grpc");
    let request = request.body(Full::new(Bytes::new())).unwrap();
    let response = within(client2(addr).await.send_request(request)).await.unwrap();
    within(response.into_body().collect()).await.unwrap().trailers().unwrap().clone()
}

fn in_base64(report: &Report) -> HeaderValue {
    base64::engine::general_purpose::STANDARD_NO_PAD.encode(report.encode_to_vec()).parse().unwrap()
}

#[tokio::test]
async fn a_report_in_trailers_is_used_and_forwarded() {
    let report = Report { application_utilization: 0.125, ..Report::default() };
    let addr = with_trailers(&[], vec![(BINARY, in_base64(&report))]).await;
    let agent = agent(addr, |config| config.orca_from_backend = Some("utilization".parse().unwrap()));
    let trailers = trailers_of_a_call(agent.addr).await;
    assert!(trailers.contains_key(BINARY), "for gRPC's own client");
    assert_eq!(agent.load.backend_utilization_micro(), Some(125_000));
}

#[tokio::test]
async fn bad_reports_in_trailers_are_counted_and_forwarded_unchanged() {
    let text = |value: &str| (TEXT, HeaderValue::from_str(value).unwrap());
    let cpu = |cpu_utilization| (BINARY, in_base64(&Report { cpu_utilization, ..Report::default() }));
    let huge = format!("TEXT cpu_utilization=0.{}", "1".repeat(8000));
    for (trailers, result, utilization) in [
        (vec![text(&huge)], "too_long", None),
        (vec![(BINARY, "A".repeat(8000).parse().unwrap())], "too_long", None),
        (vec![(TEXT, HeaderValue::from_bytes(b"TEXT a=\xff").unwrap())], "malformed", None),
        (vec![(BINARY, HeaderValue::from_static("CQ"))], "malformed", None),
        (vec![text("TEXT cpu_utilization=0.5"), text("TEXT cpu_utilization=0.5")], "contradictory", None),
        (vec![text("TEXT cpu_utilization=0.5"), cpu(0.5)], "contradictory", None),
        (vec![cpu(0.5), cpu(0.6)], "contradictory", None),
        (vec![text("TEXT cpu_utilization=0.1,cpu_utilization=0.9")], "contradictory", None),
        (vec![text("TEXT cpu_utilization=NaN")], "partial", None),
        (vec![cpu(f64::NAN)], "partial", None),
        (vec![text("TEXT cpu_utilization=-0.5")], "partial", None),
        (vec![cpu(-0.5)], "partial", None),
        (vec![cpu(f64::INFINITY)], "partial", None),
        (vec![text("TEXT application_utilization=1e9")], "partial", Some(1_000_000_000)),
        (vec![cpu(1.5)], "used", Some(1_500_000)),
    ] {
        let addr = with_trailers(&[], trailers.clone()).await;
        let agent = agent(addr, |config| {
            config.orca_from_backend = Some("utilization".parse().unwrap());
            config.admin = Some(any_port());
        });
        let came = trailers_of_a_call(agent.addr).await;
        for name in [TEXT, BINARY] {
            let sent = trailers.iter().filter(|(of, _)| *of == name).map(|(_, value)| value);
            assert!(came.get_all(name).iter().eq(sent), "{trailers:?} became {came:?}");
        }
        assert_eq!(agent.load.backend_utilization_micro(), utilization, "{trailers:?}");
        let (_, page) = fetch(agent.admin.unwrap(), "/metrics").await;
        let line = format!("prequal_agent_backend_reports_total{{result=\"{result}\"}} 1\n");
        assert!(String::from_utf8_lossy(&page).contains(&line), "{trailers:?}: {line}");
        agent.at_rest([1, 0, 0, 0]).await;
    }
}

#[tokio::test]
async fn grpc_trailers_carry_the_report_of_the_agent() {
    let cpu = |cpu_utilization| (BINARY, in_base64(&Report { cpu_utilization, ..Report::default() }));
    for (from_backend, cpu_utilization) in [(None, 0.0), (Some("utilization".parse().unwrap()), 0.25)] {
        let addr = with_trailers(&[(TEXT, "TEXT cpu_utilization=0.9")], vec![cpu(0.25)]).await;
        let agent = agent(addr, |config| {
            config.orca = orca(OrcaFormat::Binary);
            config.orca_from_backend = from_backend;
        });
        trailers_of_a_call(agent.addr).await;
        let trailers = trailers_of_a_call(agent.addr).await;
        assert_eq!(
            (trailers["grpc-status"].clone(), load_headers(&trailers).len()),
            ("0".parse().unwrap(), 1)
        );
        let bytes = base64::engine::general_purpose::STANDARD.decode(load_headers(&trailers)[0].1).unwrap();
        let report = Report::decode(&bytes[..]).unwrap();
        assert_eq!(report.cpu_utilization, cpu_utilization, "the backend's only if it is read");
        assert!(report.rps_fractional > 0.0, "{report:?}");
        assert_eq!(report.named_metrics["prequal_rif"], 0.0, "the call has ended");
    }
    // Trailers of responses that the settings do not select stay as they came.
    let addr = with_trailers(&[], vec![cpu(0.25)]).await;
    let http = agent(addr, |config| {
        config.orca = Orca { class: OrcaClass::Http, ..orca(OrcaFormat::Binary) };
    });
    assert_eq!(trailers_of_a_call(http.addr).await[BINARY], cpu(0.25).1);
}

#[tokio::test]
async fn trailers_take_precedence_over_headers() {
    const HEADERS: &[(&str, &str)] = &[(TEXT, "TEXT cpu_utilization=0.25")];
    for (trailer, utilization) in [("TEXT cpu_utilization=0.75", 750_000), ("TEXT cpu_utilization", 250_000)]
    {
        let addr = with_trailers(HEADERS, vec![(TEXT, HeaderValue::from_static(trailer))]).await;
        let agent = agent(addr, |config| config.orca_from_backend = Some("utilization".parse().unwrap()));
        trailers_of_a_call(agent.addr).await;
        assert_eq!(agent.load.backend_utilization_micro(), Some(utilization), "{trailer}");
    }
}
