//! How operators observe an agent: connections are counted and limited, failures are logged and counted, requests are
//! logged.

use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::common::{
    Process, backend, client1, client2, dead_backend, eventually, fetch, get, held_backend, raw, raw_backend,
    read_head, text, within,
};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::unix::pipe;
use tokio::process::Command;

/// Returns the value of a sample, as printed.
fn sample<'a>(metrics: &'a str, name: &str) -> &'a str {
    let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("{name} not in\n{metrics}"))
}

async fn becomes(process: &Process, name: &str, value: &str) {
    let began = Instant::now();
    loop {
        let metrics = process.metrics().await;
        if sample(&metrics, name) == value {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(10), "{name} never {value}:\n{metrics}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn connections_beyond_the_limit_wait() {
    let addr = backend(|_| async { text("hello") }).await;
    let process = Process::start(addr, &["--max-connections", "2", "--drain-idle-ms", "0"]).await;
    let mut first = client1(process.service).await;
    let second = client1::<Empty<bytes::Bytes>>(process.service).await;
    first.send_request(get("/")).await.unwrap().into_body().collect().await.unwrap();
    let waits = tokio::spawn({
        let service = process.service;
        async move { fetch(service, "/").await.0.status }
    });
    becomes(&process, "prequal_agent_max_connections_total", "1").await;
    becomes(&process, "prequal_agent_connections{port=\"service\"}", "2").await;
    assert!(!waits.is_finished());
    drop(second);
    assert_eq!(within(waits).await.unwrap(), StatusCode::OK);
    becomes(&process, "prequal_agent_connections{port=\"service\"}", "1").await;
    becomes(&process, "prequal_agent_connections_total{port=\"service\"}", "3").await;
    process.terminate().await;
    let (status, stderr) = process.end().await;
    assert_eq!((status, stderr.contains("--max-connections reached")), (Some(0), true), "{stderr}");
}

/// Returns the CPU time of a process so far, in hundredths of a second.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[tokio::test]
async fn an_agent_without_file_descriptors_waits_and_recovers() {
    let addr = backend(|_| async { text("hello") }).await;
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 40; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_probe-agent")]);
    command.args(["--listen", "127.0.0.1:0", "--admin", "0", "--upstream", &addr.to_string()]);
    let process = Process::spawn(command).await;
    assert_eq!(sample(&process.metrics().await, "process_max_fds"), "40");
    let mut crowd = Vec::new();
    for _ in 0..60 {
        crowd.push(TcpStream::connect(process.service).await.unwrap());
    }
    let mut late = TcpStream::connect(process.service).await.unwrap();
    late.write_all(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
    let pid = process.child.id().unwrap();
    let open = || std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    eventually("no descriptor is left", || open() >= 40).await;
    let before = ticks(pid);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let spent = ticks(pid) - before;
    assert!(spent < 40, "{spent} hundredths of a second in two seconds of waiting");
    drop(crowd);
    let mut reply = String::new();
    within(late.read_to_string(&mut reply)).await.unwrap();
    assert!(reply.ends_with("hello"), "{reply}");
    let metrics = process.metrics().await;
    let failures: u64 =
        sample(&metrics, "prequal_agent_accept_errors_total{reason=\"descriptors\"}").parse().unwrap();
    assert!((2..100).contains(&failures), "{failures} failures");
    process.terminate().await;
    let (status, stderr) = process.end().await;
    assert_eq!(
        (status, stderr.contains("probe-agent: accept: Too many open files")),
        (Some(0), true),
        "{stderr}"
    );
}

#[tokio::test]
async fn failures_are_logged_once_a_second_and_counted_exactly() {
    let dead = dead_backend().await;
    for json in [false, true] {
        let process = Process::start(dead, &["--log-format", if json { "json" } else { "text" }]).await;
        for _ in 0..20 {
            assert_eq!(fetch(process.service, "/").await.0.status, StatusCode::BAD_GATEWAY);
        }
        raw(process.service, "this is no HTTP\r\n\r\n").await;
        becomes(&process, "prequal_agent_closed_total{reason=\"protocol\"}", "1").await;
        tokio::time::sleep(Duration::from_millis(1100)).await;
        fetch(process.service, "/").await;
        becomes(&process, "prequal_agent_upstream_errors_total{reason=\"connect\"}", "21").await;
        process.terminate().await;
        let (status, stderr) = process.end().await;
        assert_eq!(status, Some(0));
        let mut backend = 0;
        let mut left_out = 0;
        for line in stderr.lines() {
            if json {
                let line: serde_json::Value = serde_json::from_str(line).unwrap();
                assert!(line["ts"].as_f64().unwrap() > 1e9, "{line}");
                if line["class"] == "backend connect" {
                    assert!(line["message"].as_str().unwrap().contains("Connection refused"), "{line}");
                    backend += 1;
                    left_out += line["suppressed"].as_u64().unwrap_or(0);
                } else {
                    assert_eq!(line["class"], "client");
                }
            } else if line.starts_with("probe-agent: backend connect: connect failed: Connection refused") {
                backend += 1;
                let more =
                    line.rsplit_once(" (").and_then(|(_, more)| more.strip_suffix(" more not logged)"));
                left_out += more.map_or(0, |more| more.parse::<u64>().unwrap());
            } else {
                assert!(line.starts_with("probe-agent: client: "), "{line}");
            }
        }
        assert!((2..=6).contains(&backend) && backend + left_out == 21, "{stderr}");
    }
}

#[tokio::test]
async fn requests_are_answered_after_standard_error_is_closed() {
    let mut process = Process::start(dead_backend().await, &[]).await;
    drop(process.child.stderr.take());
    assert_eq!(fetch(process.service, "/").await.0.status, StatusCode::BAD_GATEWAY);
    raw(process.service, "this is no HTTP\r\n\r\n").await;
    assert_eq!(fetch(process.service, "/").await.0.status, StatusCode::BAD_GATEWAY);
}

#[tokio::test]
async fn requests_are_answered_while_standard_error_is_not_read() {
    let (_unread, stderr) = std::io::pipe().unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), stderr.as_raw_fd());
    let full = pipe::OpenOptions::new().open_sender(&path).unwrap();
    full.writable().await.unwrap();
    // Writes of whole pages fill the pipe completely.
    while full.try_write(&[b'x'; 4096]).is_ok() {}
    let dead = dead_backend().await.to_string();
    let mut command = Command::new("sh");
    command.args(["-c", &format!("exec \"$@\" 2>{path}"), "sh", env!("CARGO_BIN_EXE_probe-agent")]);
    command.args(["--listen", "127.0.0.1:0", "--admin", "0", "--threads", "1", "--upstream", &dead]);
    let process = Process::spawn(command).await;
    for _ in 0..3 {
        assert_eq!(within(fetch(process.service, "/")).await.0.status, StatusCode::BAD_GATEWAY);
    }
}

#[tokio::test]
async fn a_failed_tls_handshake_is_counted() {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    std::fs::write(&cert, certified.cert.pem()).unwrap();
    std::fs::write(&key, certified.signing_key.serialize_pem()).unwrap();
    let addr = backend(|_| async { text("hello") }).await;
    let flags = ["--tls-cert", cert.to_str().unwrap(), "--tls-key", key.to_str().unwrap()];
    let process = Process::start(addr, &flags).await;
    // A health check that connects and leaves is not a failed handshake.
    drop(TcpStream::connect(process.service).await.unwrap());
    becomes(&process, "prequal_agent_connections_total{port=\"service\"}", "1").await;
    becomes(&process, "prequal_agent_connections{port=\"service\"}", "0").await;
    raw(process.service, "GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    becomes(&process, "prequal_agent_tls_handshake_errors_total", "1").await;
    process.terminate().await;
    let (_, stderr) = process.end().await;
    assert!(stderr.starts_with("probe-agent: tls: "), "{stderr}");
}

#[tokio::test]
async fn the_access_log_has_a_line_for_each_request() {
    let addr = raw_backend(|mut tcp| async move {
        loop {
            let head = read_head(&mut tcp).await;
            let reply: &[u8] = match head.split(' ').nth(1) {
                Some("/short") => b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhel",
                Some("/switch") => {
                    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
                }
                Some(_) => b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\nhello",
                None => return,
            };
            tcp.write_all(reply).await.unwrap();
            if head.starts_with("GET /s") {
                return;
            }
        }
    })
    .await;
    let mut process = Process::start(addr, &["--access-log", "--log-format", "json"]).await;
    let service = process.service;
    fetch(service, "/there?token=secret").await;
    let short = client1(service).await.send_request(get("/short")).await.unwrap();
    assert!(within(short.into_body().collect()).await.is_err());
    let request = Request::get(format!("http://{service}/two")).body(Empty::<bytes::Bytes>::new()).unwrap();
    let response = client2(service).await.send_request(request).await.unwrap();
    response.into_body().collect().await.unwrap();
    fetch(service, "/prequal/probe").await;
    process.terminate().await;
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let mut seen = Vec::new();
    while let Some(line) = within(lines.next_line()).await.unwrap() {
        assert!(!line.contains("secret"), "{line}");
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert!(line["client"].as_str().unwrap().parse::<SocketAddr>().is_ok(), "{line}");
        assert!(line["duration_ms"].as_f64().unwrap() > 0.0, "{line}");
        seen.push(format!(
            "{} {} {} {} {} {}",
            line["method"].as_str().unwrap(),
            line["path"].as_str().unwrap(),
            line["version"].as_str().unwrap(),
            line["status"],
            line["bytes"],
            line["complete"]
        ));
    }
    seen.sort();
    assert_eq!(
        seen,
        [
            "GET /prequal/probe HTTP/1.1 200 0 true",
            "GET /short HTTP/1.1 200 3 false",
            "GET /there HTTP/1.1 404 5 true",
            "GET /two HTTP/2.0 404 5 true",
        ]
    );
}

#[tokio::test]
async fn the_access_log_is_complete_before_the_process_exits() {
    const REQUESTS: usize = 100;
    let addr = backend(|_| async { text("hello") }).await;
    let mut process = Process::start(addr, &["--access-log", "--drain-idle-ms", "0"]).await;
    let mut client = client1(process.service).await;
    // The path is long, so that all lines together exceed what a pipe holds.
    let path = format!("/{}", "x".repeat(4000));
    for _ in 0..REQUESTS {
        client.send_request(get(&path)).await.unwrap().into_body().collect().await.unwrap();
    }
    drop(client);
    process.terminate().await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut lines = String::new();
    within(process.stdout.take().unwrap().read_to_string(&mut lines)).await.unwrap();
    assert_eq!(lines.lines().count(), REQUESTS);
}

#[tokio::test]
async fn metrics_include_the_process_and_its_build() {
    let (addr, arrived, go) = held_backend().await;
    let process = Process::start(addr, &[]).await;
    let metrics = process.metrics().await;
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(sample(&metrics, &format!("prequal_agent_build_info{{version=\"{version}\"}}")), "1");
    let rss: f64 = sample(&metrics, "process_resident_memory_bytes").parse().unwrap();
    let pid = process.child.id().unwrap();
    let statm = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let kib: f64 = statm
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap()
        .trim()
        .strip_suffix(" kB")
        .unwrap()
        .parse()
        .unwrap();
    assert!((rss / 1024.0 / kib - 1.0).abs() < 0.2, "{rss} bytes, {kib} KiB");
    for name in
        ["process_cpu_seconds_total", "process_start_time_seconds", "process_open_fds", "process_max_fds"]
    {
        assert!(sample(&metrics, name).parse::<f64>().unwrap() >= 0.0, "{name}");
    }
    let before: f64 = sample(&metrics, "process_open_fds").parse().unwrap();
    let mut client = client1(process.service).await;
    let request = tokio::spawn(async move { client.send_request(get("/")).await.unwrap().status() });
    within(arrived.notified()).await;
    let during: f64 = sample(&process.metrics().await, "process_open_fds").parse().unwrap();
    assert!(during >= before + 2.0, "{before} {during}");
    go.notify_one();
    assert_eq!(within(request).await.unwrap(), StatusCode::OK);
}
