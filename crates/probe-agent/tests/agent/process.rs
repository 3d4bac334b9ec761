//! The binary as operators see it: its output, and its messages about bad flags.

use crate::common::{Process, any_port, backend, client1, fetch, get, held_backend, text, within};
use http::StatusCode;
use http_body_util::BodyExt;
use tokio::process::Command;

#[tokio::test]
async fn settings_come_from_the_environment_and_metrics_are_served() {
    let addr = backend(|_| async { text("hello") }).await;
    let process = Process::start(addr, &["--report", "probe-only"]).await;
    let (head, _) = fetch(process.service, "/").await;
    assert!(!head.headers.contains_key("x-prequal-load"));
    let (head, body) = fetch(process.admin, "/metrics").await;
    assert!(head.headers["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
    assert!(String::from_utf8_lossy(&body).contains("\nprequal_agent_requests_total{class=\"success\"} 1\n"));

    let output = Command::new(env!("CARGO_BIN_EXE_probe-agent"))
        .args(["--upstream", "127.0.0.1:1"])
        .env("PROBE_AGENT_LISTEN", "nonsense")
        .output()
        .await
        .unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("--listen"), "{output:?}");
}

#[tokio::test]
async fn hints_and_utilisation_have_flags() {
    let (addr, arrived, go) = held_backend().await;
    let flags = [
        "--hint-cache",
        "100",
        "--hint-divisor",
        "4",
        "--netflix-utilization",
        "5",
        "--netflix-target",
        "60",
    ];
    let process = Process::start(addr, &flags).await;
    let with_hint = |path: &str| {
        let mut request = get(path);
        request.headers_mut().insert("x-prequal-hint", "warm".parse().unwrap());
        request
    };
    go.notify_one();
    let response = client1(process.service).await.send_request(with_hint("/")).await.unwrap();
    assert_eq!(response.headers()["x-netflix.server.utilization"], "0, target=60");
    let _ = response.into_body().collect().await;
    within(arrived.notified()).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut client = client1(process.service).await;
        held.push(tokio::spawn(async move { client.send_request(get("/")).await.unwrap().status() }));
        within(arrived.notified()).await;
    }
    let rif = async |request| {
        let response = client1(process.service).await.send_request(request).await.unwrap();
        response.headers()["x-prequal-rif"].clone()
    };
    assert_eq!(rif(get("/prequal/probe")).await, "2");
    assert_eq!(rif(with_hint("/prequal/probe")).await, "1", "a quarter of two, rounded up");
    for held in held {
        go.notify_one();
        assert_eq!(within(held).await.unwrap(), StatusCode::OK);
    }
    let (_, metrics) = fetch(process.admin, "/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics);
    for line in [
        "prequal_agent_hints_total{result=\"scaled\"} 1",
        "prequal_agent_failing_ratio 0",
        "# TYPE prequal_agent_up_seconds gauge",
        "# TYPE prequal_agent_backend_ready gauge",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} not in\n{metrics}");
    }
}

#[tokio::test]
async fn an_address_in_use_is_named() {
    let taken = tokio::net::TcpListener::bind(any_port()).await.unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_probe-agent"))
        .args(["--listen", &addr, "--upstream", "127.0.0.1:1"])
        .output()
        .await
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains(&addr) && stderr.contains("service"), "{stderr}");
}
