//! Several replicas in one process, and the number of its threads.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::common::{Process, backend, dead_backend, eventually, fetch, text, within};
use http::StatusCode;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;

#[tokio::test]
async fn each_pair_is_a_separate_replica_on_one_metrics_page() {
    let (one, two) = (backend(|_| async { text("one") }).await, backend(|_| async { text("two") }).await);
    let dead = dead_backend().await;
    let dir = tempfile::tempdir().unwrap();
    let unix = dir.path().join("three.sock");
    // Any free port would do, but the test must know its number.
    let port = dead_backend().await.port();
    let second = format!("listen=127.0.0.1:{port},upstream={two},probe-listen=127.0.0.1:0");
    let third = format!("listen=unix:{},upstream={dead},advertise=10.1.2.3:80", unix.display());
    let flags = ["--replica", &second, "--replica", &third, "--drain-idle-ms", "0", "--access-log"];
    let mut process = Process::start(one, &flags).await;
    let second: std::net::SocketAddr = ([127, 0, 0, 1], port).into();
    for (addr, body, times) in [(process.service, "one", 3), (second, "two", 1)] {
        for _ in 0..times {
            let (head, answer) = fetch(addr, "/").await;
            assert_eq!(answer, body);
            let load = head.headers["x-prequal-load"].to_str().unwrap().to_owned();
            assert!(load.starts_with("0;") && load.contains(&format!(";{addr}")), "{load}");
        }
    }
    assert!(unix.exists());
    let metrics = process.metrics().await;
    for (addr, count) in [(process.service.to_string(), 3), (second.to_string(), 1)] {
        let line = format!("prequal_agent_requests_total{{replica=\"{addr}\",class=\"success\"}} {count}");
        assert!(metrics.lines().any(|l| l == line), "{line} not in\n{metrics}");
    }
    for once in ["# TYPE prequal_agent_rif gauge", "process_open_fds ", "prequal_agent_build_info{"] {
        assert_eq!(metrics.lines().filter(|line| line.starts_with(once)).count(), 1, "{once}");
    }
    assert_eq!(metrics.lines().filter(|line| line.starts_with("prequal_agent_rif{")).count(), 3);
    let (head, body) = fetch(process.admin, "/readyz").await;
    assert_eq!(head.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(String::from_utf8_lossy(&body).contains("three.sock"), "{body:?}");
    assert_eq!(fetch(second, "/").await.0.status, StatusCode::OK);
    // The third replica has no backend, and reports this under its own name.
    let mut tcp = tokio::net::UnixStream::connect(&unix).await.unwrap();
    tcp.write_all(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
    within(tcp.read_to_string(&mut String::new())).await.unwrap();
    process.terminate().await;
    let mut lines = String::new();
    within(process.stdout.take().unwrap().read_to_string(&mut lines)).await.unwrap();
    for addr in [process.service, second] {
        let of_it = lines.lines().filter(|line| line.starts_with(&format!("{addr} 127.0.0.1:"))).count();
        assert!(of_it > 0, "{addr} not in\n{lines}");
    }
    let (status, stderr) = process.end().await;
    let failed = format!("probe-agent: unix:{}: backend connect: ", unix.display());
    assert!(stderr.contains(&failed), "{stderr}");
    assert_eq!((status, unix.exists()), (Some(0), false));
    assert!(std::net::TcpStream::connect(second).is_err());
}

#[tokio::test]
async fn the_number_of_threads_follows_the_cgroup() {
    // The hierarchy of cgroup v2 also exists if v1 controls the CPU, but then it has no CPU controller.
    let (root, v2) = (Path::new("/sys/fs/cgroup"), Path::new("/sys/fs/cgroup/cgroup.controllers").exists());
    let hierarchy = if v2 { root.to_owned() } else { root.join("cpu") };
    let group = hierarchy.join(format!("probe-agent-{}", std::process::id()));
    if let Err(error) = std::fs::create_dir(&group) {
        eprintln!("skipped: no cgroup can be made at {}: {error}", group.display());
        return;
    }
    let cores = std::thread::available_parallelism().unwrap().get();
    let set = |limit: usize| {
        if v2 {
            return std::fs::write(group.join("cpu.max"), format!("{} 100000", limit * 100_000));
        }
        std::fs::write(group.join("cpu.cfs_quota_us"), (limit * 100_000).to_string())
    };
    let mut counted = Vec::new();
    for limit in [1, cores] {
        if let Err(error) = set(limit) {
            eprintln!("skipped: the cgroup takes no CPU limit: {error}");
            break;
        }
        let mut command = Command::new("sh");
        let enter = format!("echo $$ > {}/cgroup.procs; exec \"$@\"", group.display());
        command.args(["-c", &enter, "sh", env!("CARGO_BIN_EXE_probe-agent")]);
        command.args(["--listen", "127.0.0.1:0", "--upstream", "127.0.0.1:1"]);
        let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        while within(lines.next_line()).await.unwrap().expect("it starts") != "ready" {}
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id().unwrap())).unwrap();
        let threads = status.lines().find_map(|line| line.strip_prefix("Threads:")).unwrap();
        counted.push((limit, threads.trim().parse::<usize>().unwrap()));
        child.kill().await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    eventually("the cgroup is empty", || std::fs::remove_dir(&group).is_ok()).await;
    for (limit, threads) in counted {
        // A runtime with several threads also has the main thread.
        let expected = if limit == 1 { 1 } else { limit + 1 };
        assert_eq!(threads, expected, "a limit of {limit} of {cores} cores");
    }
}
