//! Load in the format of ORCA: on responses, and out of band as gRPC clients ask for it.

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
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use probe_agent::orca::{Orca, OrcaClass, OrcaFormat};
use prost::Message as _;

const TEXT: &str = "endpoint-load-metrics";
const BINARY: &str = "endpoint-load-metrics-bin";
const METHOD: &str = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics";

/// `xds.data.orca.v3.OrcaLoadReport`, all that the protobuf definition has and the agent does not send included.
#[derive(Clone, PartialEq, prost::Message)]
struct Report {
    #[prost(double, tag = "1")]
    cpu_utilization: f64,
    #[prost(double, tag = "2")]
    mem_utilization: f64,
    #[prost(uint64, tag = "3")]
    rps: u64,
    #[prost(double, tag = "6")]
    rps_fractional: f64,
    #[prost(double, tag = "7")]
    eps: f64,
    #[prost(btree_map = "string, double", tag = "8")]
    named_metrics: BTreeMap<String, f64>,
    #[prost(double, tag = "9")]
    application_utilization: f64,
}

fn orca(format: OrcaFormat) -> Orca {
    let limit = NonZeroU32::new(1000);
    Orca { format: Some(format), limit, window: Duration::from_millis(400), streams: 1, ..Orca::default() }
}

/// What a response says of the load.
fn told(headers: &HeaderMap) -> Vec<(&str, &str)> {
    let ours = headers.iter().filter(|(name, _)| name.as_str().starts_with("endpoint-load-metrics"));
    ours.map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect()
}

#[tokio::test]
async fn responses_carry_the_load_in_the_format_that_was_asked_for() {
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
    assert_eq!(told(&head.headers), [("endpoint-load-metrics", "TEXT cpu_utilization=0.9")], "as it came");

    for format in [OrcaFormat::Text, OrcaFormat::Json, OrcaFormat::Binary] {
        let agent = agent(addr, |config| config.orca = orca(format));
        let first = fetch(agent.addr, "/").await.0.headers;
        let (head, _) = fetch(agent.addr, "/").await;
        let said = told(&head.headers);
        assert_eq!(said.len(), 1, "one report, and not the backend's: {said:?}");
        let (name, value) = said[0];
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
            let first = told(&first)[0].1;
            assert!(first.contains("rps_fractional"), "the first too, although none has ended: {first}");
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
        let said = told(response.headers())[0].1;
        assert_eq!(said != "TEXT cpu_utilization=0.9", replaced, "{kind}: {said}");
    }
}

/// `OrcaLoadReportRequest` with an interval in milliseconds, below 2 s.
fn asking(interval_ms: u32) -> Vec<u8> {
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

async fn call(addr: SocketAddr, body: Vec<u8>) -> Response<Incoming> {
    let request = Request::post(format!("http://replica{METHOD}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Full::new(Bytes::from(body)))
        .unwrap();
    within(client2(addr).await.send_request(request)).await.unwrap()
}

/// The next report of a stream.
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
async fn a_stream_brings_reports_at_the_interval_that_its_client_asks_for() {
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
async fn what_is_no_such_call_is_refused_or_the_backends() {
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

#[tokio::test]
async fn a_backend_that_reports_itself_provides_the_utilisation() {
    let addr = backend(|req: Request<Incoming>| async move {
        let asked = req.headers().get("endpoint-load-metrics-format").cloned();
        let mut reply = text("hello");
        let path = req.uri().path();
        let headers = reply.headers_mut();
        headers.insert("x-asked", asked.unwrap_or(HeaderValue::from_static("no")));
        let mut says = |value: &'static str| {
            headers.append(TEXT, HeaderValue::from_static(value));
        };
        match path {
            "/says" => says("TEXT cpu_utilization=0.625, named_metrics.kv=0.25"),
            "/high" => says("TEXT application_utilization=1e30,named_metrics.kv=NaN"),
            "/broken" => says("TEXT cpu_utilization"),
            "/twice" => ["TEXT cpu_utilization=0.1", "TEXT cpu_utilization=0.2"].into_iter().for_each(says),
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
    assert!(told(&head.headers)[0].1.starts_with("TEXT application_utilization=0."), "its own until then");
    assert_eq!(head.headers["x-asked"], "text");

    let (head, _) = fetch(on.addr, "/says").await;
    let said = told(&head.headers);
    assert_eq!(said.len(), 1, "{said:?}");
    let value = said[0].1;
    assert!(value.starts_with("TEXT cpu_utilization=0.625000,rps_fractional="), "{value}");
    assert!(
        value.contains(",named_metrics.prequal_rif=0,") && value.ends_with(",named_metrics.kv=0.25"),
        "{value}"
    );
    // And on responses that say nothing, out of band, and as a metric.
    let (head, _) = fetch(on.addr, "/").await;
    assert!(told(&head.headers)[0].1.contains("cpu_utilization=0.625000"));
    let mut stream = call(on.addr, asking(100)).await;
    let report = next(&mut stream).await;
    assert_eq!((report.cpu_utilization, report.application_utilization), (0.625, 0.0));
    assert_eq!(report.named_metrics.get("kv"), Some(&0.25));
    drop(stream);
    assert_eq!(on.load.backend_utilization_micro(), Some(625_000));

    for path in ["/broken", "/twice"] {
        let (head, _) = fetch(on.addr, path).await;
        assert!(
            told(&head.headers)[0].1.contains("cpu_utilization=0.625000"),
            "{path}: what was known counts on"
        );
    }
    let (head, _) = fetch(on.addr, "/high").await;
    let value = told(&head.headers)[0].1;
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

    // Another metric of the backend is the utilisation. The agent asked for the report: it ends here. A client that asks
    // itself gets it.
    let named = reads("named_metrics.kv", None);
    let (head, _) = fetch(named.addr, "/says").await;
    assert_eq!((told(&head.headers).len(), named.load.backend_utilization_micro()), (0, Some(250_000)));
    let mut request = get("/says");
    request.headers_mut().insert("endpoint-load-metrics-format", HeaderValue::from_static("json"));
    let response = within(client1(named.addr).await.send_request(request)).await.unwrap();
    assert_eq!(response.headers()["x-asked"], "json");
    assert_eq!(told(response.headers()).len(), 1);

    let off = agent(addr, |_| {});
    let (head, _) = fetch(off.addr, "/says").await;
    assert_eq!((told(&head.headers).len(), off.load.backend_utilization_micro()), (1, None));
    assert_eq!(head.headers["x-asked"], "no");
}

#[tokio::test]
async fn a_report_in_trailers_counts_and_goes_on() {
    let addr = backend(|_: Request<Incoming>| async move {
        let report = Report { application_utilization: 0.125, ..Report::default() };
        let value = base64::engine::general_purpose::STANDARD_NO_PAD.encode(report.encode_to_vec());
        let trailers = HeaderMap::from_iter([
            (HeaderName::from_static("grpc-status"), HeaderValue::from_static("0")),
            (HeaderName::from_static(BINARY), value.parse().unwrap()),
        ]);
        let body = Full::new(Bytes::from_static(b"\0\0\0\0\0"))
            .with_trailers(std::future::ready(Some(Ok(trailers))));
        let body = body.map_err(|never: Infallible| match never {}).boxed();
        Response::builder().header("content-type", "application/grpc").body(body).unwrap()
    })
    .await;
    let agent = agent(addr, |config| config.orca_from_backend = Some("utilization".parse().unwrap()));
    let request = Request::post("http://replica/Say")
        .header("te", "trailers")
        .header("content-type", "application/grpc");
    let request = request.body(Full::new(Bytes::new())).unwrap();
    let response = within(client2(agent.addr).await.send_request(request)).await.unwrap();
    let whole = within(response.into_body().collect()).await.unwrap();
    assert!(whole.trailers().unwrap().contains_key(BINARY), "for gRPC's own client");
    assert_eq!(agent.load.backend_utilization_micro(), Some(125_000));
}
