//! Base latency and knee as the agent measures and reports them, and what does not count against the replica.

use std::net::SocketAddr;
use std::time::Duration;

use crate::common::{
    Reply, Running, agent, any_port, backend, client1, eventually, fetch, get, text, within,
};
use bytes::Bytes;
use http::Response;
use http_body_util::{BodyExt, Full};
use prequal_core::wire::report::LoadReport;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const SERVICE: Duration = Duration::from_millis(40);

/// Starts a backend that reads the whole request and answers 40 ms later. `/large` gets 16 MiB.
async fn sleeping() -> SocketAddr {
    backend(|req| async {
        let large = req.uri().path() == "/large";
        let _ = req.into_body().collect().await;
        tokio::time::sleep(SERVICE).await;
        if large { blob(16 << 20) } else { text("done") }
    })
    .await
}

fn blob(size: usize) -> Reply {
    Response::new(Full::new(Bytes::from(vec![b'x'; size])).map_err(|never| match never {}).boxed())
}

async fn reports(agent: &Running) -> [LoadReport; 2] {
    let parse = |head: http::response::Parts| {
        LoadReport::parse(head.headers["x-prequal-load"].to_str().unwrap()).unwrap()
    };
    let of_service = parse(fetch(agent.addr, "/prequal/probe").await.0);
    [of_service, parse(fetch(agent.probe.unwrap(), "/prequal/probe").await.0)]
}

/// Asserts that probes report about `ms` as latency and as base latency.
#[track_caller]
fn assert_takes(reports: &[LoadReport], ms: std::ops::RangeInclusive<u32>) {
    let us = ms.start() * 1000..=ms.end() * 1000;
    for report in reports {
        let base_us = report.capacity.map(|capacity| capacity.base_us);
        for reported in [report.latency_us, base_us] {
            assert!(reported.is_some_and(|reported| us.contains(&reported)), "not {ms:?} ms: {report:?}");
        }
    }
}

/// Sends up to three requests at once, with pauses so that they do not start and end in step.
async fn out_of_step(agent: &Running) {
    let one = |pause_ms| {
        let addr = agent.addr;
        async move {
            for _ in 0..20 {
                fetch(addr, "/").await;
                tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            }
        }
    };
    tokio::join!(one(7), one(18), one(29));
}

#[tokio::test]
async fn responses_probes_and_metrics_report_base_latency_and_knee() {
    let agent = agent(sleeping().await, |config| {
        config.probe_listen = Some(any_port());
        config.admin = Some(any_port());
    });
    assert!(reports(&agent).await.iter().all(|report| report.capacity.is_none()), "nothing has been served");
    let metrics = async || {
        let (_, metrics) = fetch(agent.admin.unwrap(), "/metrics").await;
        String::from_utf8_lossy(&metrics).into_owned()
    };
    let value = |metrics: &str, name: &str| {
        metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok())
    };
    assert_eq!(value(&metrics().await, "prequal_agent_knee "), None);
    out_of_step(&agent).await;
    let (head, _) = fetch(agent.addr, "/").await;
    let response = LoadReport::parse(head.headers["x-prequal-load"].to_str().unwrap()).unwrap();
    let all = [&reports(&agent).await[..], &[response]].concat();
    assert_takes(&all, 30..=70);
    for report in all {
        let knee = report.capacity.unwrap().knee;
        assert!((1..=5).contains(&knee), "three at once: {report:?}");
    }
    let metrics = metrics().await;
    let base = value(&metrics, "prequal_agent_base_latency_seconds ").unwrap();
    let knee = value(&metrics, "prequal_agent_knee ").unwrap();
    assert!((0.03..0.07).contains(&base) && (1.0..=5.0).contains(&knee), "{metrics}");
}

#[tokio::test]
async fn a_slow_upload_does_not_count_as_latency() {
    let agent = agent(sleeping().await, |config| config.probe_listen = Some(any_port()));
    let head = "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n";
    let sized = format!("{head}content-length: 8\r\n\r\nhalf");
    let chunked = format!("{head}transfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n");
    for (first, rest) in [(sized, "half"), (chunked, "4\r\nhalf\r\n0\r\n\r\n")] {
        let upload = async |pause_ms| {
            let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
            tcp.write_all(first.as_bytes()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            assert!(agent.load.rif() > 0, "it is in flight");
            tcp.write_all(rest.as_bytes()).await.unwrap();
            let mut answer = String::new();
            within(tcp.read_to_string(&mut answer)).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        };
        tokio::join!(upload(600), upload(700), upload(800));
    }
    agent.at_rest([6, 0, 0, 0]).await;
    assert_takes(&reports(&agent).await, 35..=90);
}

#[tokio::test]
async fn a_slow_download_does_not_count_as_latency() {
    let agent = agent(sleeping().await, |config| config.probe_listen = Some(any_port()));
    let download = async || {
        let response = client1(agent.addr).await.send_request(get("/large")).await.unwrap();
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(agent.load.rif() > 0, "it is in flight");
        let body = within(response.into_body().collect()).await.unwrap();
        assert_eq!(body.to_bytes().len(), 16 << 20);
    };
    tokio::join!(download(), download(), download());
    agent.at_rest([3, 0, 0, 0]).await;
    // Forwarding 16 MiB takes time. If three downloads overlap, each may appear to have taken a third of the time.
    assert_takes(&reports(&agent).await, 10..=1000);
}

#[tokio::test]
async fn an_abort_counts_neither_as_departure_nor_as_latency() {
    let agent = agent(sleeping().await, |config| config.probe_listen = Some(any_port()));
    for _ in 0..10 {
        fetch(agent.addr, "/").await;
    }
    let before = reports(&agent).await;
    for _ in 0..40 {
        let mut client = client1(agent.addr).await;
        let given_up = tokio::time::timeout(Duration::from_millis(10), client.send_request(get("/")));
        assert!(given_up.await.is_err());
    }
    eventually("all have ended", || agent.load.rif() == 0).await;
    agent.at_rest([10, 0, 40, 0]).await;
    let after = reports(&agent).await;
    assert_eq!(after[0].latency_us, before[0].latency_us);
    // The time of the aborted requests counts, but no request was served during that time. If the aborts counted as
    // departures, the base latency would be 16 ms.
    let base_us = after[0].capacity.unwrap().base_us;
    assert!((35_000..=200_000).contains(&base_us), "{after:?}");
}
