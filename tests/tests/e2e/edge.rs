//! Abusive clients: slow headers and bodies, idle connections, responses that are never read. The tests reach each
//! limit of the shipped listener, and check that well-behaved clients are not affected.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use h2::client::SendRequest;
use http_body_util::{BodyExt as _, Channel};
use hyper::body::Frame;
use hyper_util::client::legacy::Client as Pool;
use hyper_util::rt::TokioExecutor;
use prequal_testbed::{
    Body, Client, Envoy, EnvoyConfig, Fleet, Reply, Request, Response, WebSocket, block_on, eventually,
    handle, missing_descriptors, needs,
};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpSocket;
use tokio::task::JoinHandle;

use crate::support::{PROBE_PATH, assert_all_ok, bed, warm};

const SECOND: Duration = Duration::from_secs(1);
const BIG: usize = 4 << 20;

/// The replicas of all tests in this file. They answer by path.
fn fleet() -> Result<Fleet> {
    let fleet = Fleet::uniform(2, &Reply::ok())?;
    let big = Bytes::from(vec![b'b'; BIG]);
    for replica in fleet.iter() {
        let big = big.clone();
        replica.backend.set_handler(move |seen| match seen.path.as_str() {
            "/big" => Reply::ok().body(Body::Full(big.clone())),
            "/read" => Reply::ok().reads_first(),
            "/echo" => Reply::ok().body(Body::Echo),
            "/grpc" => Reply::ok().header("content-type", "application/grpc").body(Body::Echo),
            "/socket" => Reply::ok().body(Body::Upgrade),
            _ => Reply::ok(),
        });
    }
    Ok(fleet)
}

fn start(fleet: &Fleet, change: impl FnOnce(&mut EnvoyConfig)) -> Result<Envoy> {
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&fleet.addrs())?.edit(change))?;
    warm(&envoy, 2);
    Ok(envoy)
}

/// A connection on which `bytes` have been sent.
fn sent(addr: SocketAddr, bytes: &[u8]) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(addr)?;
    stream.set_read_timeout(Some(30 * SECOND))?;
    stream.write_all(bytes)?;
    Ok(stream)
}

/// Everything that arrives until the connection is closed.
fn rest(mut stream: TcpStream) -> Result<String> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => Err(error.into()),
        _ => Ok(String::from_utf8_lossy(&bytes).into_owned()),
    }
}

const HEAD: &[u8] = b"GET / HTTP/1.1\r\nhost: edge\r\nslow: a";
const BODY: &[u8] = b"POST /read HTTP/1.1\r\nhost: edge\r\ncontent-length: 1000000\r\n\r\nabc";

/// An HTTP/2 connection whose responses are read only if the caller reads them.
async fn http2(addr: SocketAddr) -> Result<SendRequest<Bytes>> {
    let stream = tokio::net::TcpStream::connect(addr).await?;
    let (client, connection) = h2::client::handshake(stream).await?;
    tokio::spawn(connection);
    Ok(client)
}

#[test]
fn slow_request_headers_are_cut_off() -> Result<()> {
    bed!();
    let fleet = fleet()?;
    let envoy = start(&fleet, |_| {})?;
    let started = Instant::now();
    let slow = sent(envoy.addr(), HEAD)?;
    let mut writing = slow.try_clone()?;
    std::thread::spawn(move || {
        while writing.write_all(b"a").is_ok() {
            std::thread::sleep(SECOND / 2);
        }
    });
    let received = rest(slow)?;
    assert!(received.is_empty() || received.starts_with("HTTP/1.1 408"), "{received}");
    let limit = 9 * SECOND..20 * SECOND;
    assert!(limit.contains(&started.elapsed()), "{:?}", started.elapsed());
    assert_eq!(envoy.stat("http.ingress.downstream_rq_header_timeout")?, 1);
    Ok(())
}

#[test]
fn an_http2_client_receives_its_limits() -> Result<()> {
    bed!();
    let fleet = fleet()?;
    let envoy = start(&fleet, |_| {})?;
    let mut stream = sent(envoy.addr(), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")?;
    let (mut settings, mut window) = (Vec::new(), 65_535);
    while settings.is_empty() || window == 65_535 {
        let mut head = [0; 9];
        stream.read_exact(&mut head)?;
        let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
        stream.read_exact(&mut payload)?;
        let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        match head[3] {
            4 if head[4] == 0 => {
                settings = payload.chunks(6).map(|it| (number(&it[..2]), number(&it[2..]))).collect();
            }
            8 if head[5..] == [0; 4] => window += number(&payload),
            _ => {}
        }
    }
    // MAX_CONCURRENT_STREAMS and INITIAL_WINDOW_SIZE of RFC 9113.
    assert!(settings.contains(&(3, 100)) && settings.contains(&(4, 65_536)), "{settings:?}");
    assert_eq!(window, 1 << 20);
    Ok(())
}

#[test]
fn stalled_requests_are_cut_off() -> Result<()> {
    bed!();
    let fleet = fleet()?;
    let envoy = start(&fleet, |config| {
        assert_eq!(config.http_mut()["stream_idle_timeout"], "300s");
        config.http_mut()["stream_idle_timeout"] = json!("1s");
    })?;
    let received = rest(sent(envoy.addr(), BODY)?)?;
    assert!(received.starts_with("HTTP/1.1 408"), "{received}");
    let addr = envoy.addr();
    block_on(async move {
        let mut client = http2(addr).await?.ready().await?;
        let request = http::Request::get(format!("http://{addr}/big")).body(())?;
        let mut body = client.send_request(request, true)?.0.await?.into_body();
        tokio::time::sleep(3 * SECOND).await;
        let mut taken = 0;
        let end = loop {
            match body.data().await {
                Some(Ok(data)) => {
                    taken += data.len();
                    let _ = body.flow_control().release_capacity(data.len());
                }
                end => break end,
            }
        };
        ensure!(end.is_some_and(|end| end.is_err()) && taken < BIG, "{taken} bytes came");
        Ok(())
    })?;
    assert!(envoy.stat("http.ingress.downstream_rq_idle_timeout")? >= 1);
    fleet.assert_idle();
    Ok(())
}

/// The resource monitor that has the setting `field`.
fn monitor<'a>(config: &'a mut EnvoyConfig, field: &str) -> &'a mut Value {
    let monitors = config.root_mut()["overload_manager"]["resource_monitors"].as_array_mut();
    let mut fields = monitors.into_iter().flatten().map(|monitor| &mut monitor["typed_config"]);
    let found = fields.find(|settings| settings.get(field).is_some());
    &mut found.expect("such a monitor")[field]
}

#[test]
fn connections_beyond_the_limit_are_refused() -> Result<()> {
    bed!();
    let fleet = fleet()?;
    let envoy = start(&fleet, |config| {
        *monitor(config, "max_active_downstream_connections") = json!(20);
    })?;
    let active = || envoy.stat("http.ingress.downstream_cx_active");
    // First wait until the connections of the warm-up are closed.
    eventually("all are closed", 10 * SECOND, || (active().ok()? == 0).then_some(()));
    let silent = (0..20).map(|_| TcpStream::connect(envoy.addr())).collect::<std::io::Result<Vec<_>>>()?;
    eventually("the limit is reached", 10 * SECOND, || (active().ok()? == 20).then_some(()));
    for _ in 0..3 {
        assert!(envoy.client().get("/").is_err(), "one connection more");
    }
    // The admin interface still answers, because its connections do not count towards the limit.
    let refused =
        |(name, count): (String, u64)| name.ends_with("downstream_global_cx_overflow").then_some(count);
    assert!(envoy.stats()?.into_iter().filter_map(refused).sum::<u64>() >= 3);
    drop(silent);
    eventually("there is room again", 10 * SECOND, || {
        (envoy.client().get("/").ok()?.status == 200).then_some(())
    });
    Ok(())
}

#[test]
fn requests_beyond_the_heap_are_refused() -> Result<()> {
    bed!();
    let fleet = fleet()?;
    let mut config = EnvoyConfig::for_replicas(&fleet.addrs())?;
    *monitor(&mut config, "max_heap_size_bytes") = json!(1 << 20);
    let envoy = Envoy::start(config)?;
    eventually("a request is refused", 10 * SECOND, || {
        (envoy.client().get("/").ok()?.status == 503).then_some(())
    });
    assert!(envoy.stat("http.ingress.downstream_rq_overload_close")? >= 1);
    assert_eq!(envoy.admin_get("/ready")?, "LIVE\n");
    Ok(())
}

#[test]
fn ambiguous_header_names_and_paths_are_refused() -> Result<()> {
    bed!();
    let fleet = fleet()?;
    let envoy = start(&fleet, |_| {})?;
    fleet.clear();
    let client = envoy.client();
    assert_eq!(client.send(Request::get("/").header("x_prequal_dest", "x"))?.status, 400);
    assert!(Client::http2(envoy.addr()).send(Request::get("/").header("x_prequal_dest", "x")).is_err());
    let moved = client.get(&PROBE_PATH.replace("l/", "l%2F"))?;
    assert_eq!((moved.status.as_u16(), moved.header("location")), (307, Some(PROBE_PATH)));
    assert_eq!(fleet.served(), [0, 0]);
    Ok(())
}

/// Opens `count` connections and requests the big response without reading it: little of it fits into the socket.
async fn unread(addr: SocketAddr, count: usize) -> Result<Vec<tokio::net::TcpStream>> {
    let mut streams = Vec::new();
    for _ in 0..count {
        let socket = TcpSocket::new_v4()?;
        socket.set_recv_buffer_size(16 << 10)?;
        let mut stream = socket.connect(addr).await?;
        stream.write_all(b"GET /big HTTP/1.1\r\nhost: edge\r\n\r\n").await?;
        streams.push(stream);
    }
    Ok(streams)
}

/// The same over one connection; the responses are kept, so that its streams stay open.
async fn unread_http2(addr: SocketAddr, count: usize) -> Result<Vec<http::Response<h2::RecvStream>>> {
    let mut client = http2(addr).await?;
    let mut answers = Vec::new();
    for _ in 0..count {
        client = client.ready().await?;
        let request = http::Request::get(format!("http://{addr}/big")).body(())?;
        answers.push(client.send_request(request, true)?.0);
    }
    let mut bodies = Vec::new();
    for answer in answers {
        bodies.push(answer.await?);
    }
    Ok(bodies)
}

#[test]
fn unread_answers_are_not_kept_in_memory() -> Result<()> {
    bed!();
    const COUNT: usize = 40;
    let fleet = fleet()?;
    let envoy = start(&fleet, |_| {})?;
    let allocated = || -> Result<u64> {
        let memory: Value = serde_json::from_str(&envoy.admin_get("/memory")?)?;
        memory["allocated"].as_str().and_then(|text| text.parse().ok()).context("no number")
    };
    let before = allocated()?;
    let addr = envoy.addr();
    let slow = block_on(unread(addr, COUNT))?;
    let slower = block_on(unread_http2(addr, COUNT))?;
    std::thread::sleep(2 * SECOND);
    let each = (allocated()?.saturating_sub(before)) / (2 * COUNT as u64);
    assert!(each < 300_000, "{each} bytes each");
    drop((slow, slower));
    Ok(())
}

/// Acts like well-behaved clients until stopped. Each task returns the number of its rounds, or its first failure.
struct WellBehaved {
    stop: Arc<AtomicBool>,
    tasks: Vec<(&'static str, JoinHandle<Result<u32>>)>,
}

impl WellBehaved {
    fn start(addr: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut tasks = Vec::new();
        for (name, http2) in [("HTTP/1.1", false), ("HTTP/2", true)] {
            let client = if http2 { Client::http2(addr) } else { Client::new(addr) };
            let upload = client.clone();
            tasks.push((name, again(&stop, move || request(client.clone(), Request::get("/"), 2))));
            let body = Bytes::from(vec![b'u'; BIG]);
            let post = move || request(upload.clone(), Request::post("/echo", body.clone()), BIG);
            tasks.push((name, again(&stop, post)));
        }
        let stopped = Arc::clone(&stop);
        tasks.push(("gRPC", handle().spawn(grpc(addr, stopped))));
        let stopped = Arc::clone(&stop);
        let socket = move || {
            let mut socket = WebSocket::connect(addr, "/socket")?;
            let mut count = 0;
            while !stopped.load(Ordering::Relaxed) {
                ensure!(socket.round_trip(b"to and fro")? == b"to and fro", "another message");
                count += 1;
                std::thread::sleep(SECOND / 20);
            }
            Ok(count)
        };
        tasks.push(("WebSocket", handle().spawn_blocking(socket)));
        Self { stop, tasks }
    }

    fn finish(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        for (name, task) in self.tasks {
            let count = block_on(task)?.context(name)?;
            ensure!(count >= 5, "{name}: only {count}");
        }
        Ok(())
    }
}

fn again<T: Future<Output = Result<()>> + Send>(
    stop: &Arc<AtomicBool>,
    mut act: impl FnMut() -> T + Send + 'static,
) -> JoinHandle<Result<u32>> {
    let stop = Arc::clone(stop);
    handle().spawn(async move {
        let mut count = 0;
        while !stop.load(Ordering::Relaxed) {
            act().await.with_context(|| format!("after {count}"))?;
            count += 1;
            tokio::time::sleep(SECOND / 50).await;
        }
        Ok(count)
    })
}

async fn request(client: Client, request: Request, length: usize) -> Result<()> {
    let answer: Response = client.send_async(request).await?;
    ensure!(answer.status == 200 && answer.body.len() == length, "{} {}", answer.status, answer.text());
    Ok(())
}

/// One stream on which messages are echoed.
async fn grpc(addr: SocketAddr, stop: Arc<AtomicBool>) -> Result<u32> {
    let message = Bytes::from_static(b"\0\0\0\0\x03abc");
    let pool = Pool::builder(TokioExecutor::new()).http2_only(true).build_http();
    let (mut sender, body) = Channel::<Bytes, std::io::Error>::new(1);
    let call = http::Request::post(format!("http://{addr}/grpc"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(body)?;
    sender.send(Frame::data(message.clone())).await?;
    let mut answer = pool.request(call).await?.into_body();
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut length = 0;
        while length < message.len() {
            let frame =
                tokio::time::timeout(10 * SECOND, answer.frame()).await.context("no message in 10 s")?;
            length += frame.context("the stream ended")??.data_ref().map_or(0, Bytes::len);
        }
        count += 1;
        tokio::time::sleep(SECOND / 20).await;
        sender.send(Frame::data(message.clone())).await?;
    }
    Ok(count)
}

#[test]
fn slow_clients_do_not_affect_other_clients() -> Result<()> {
    bed!();
    needs!(missing_descriptors(1024));
    let fleet = fleet()?;
    let envoy = start(&fleet, |_| {})?;
    let addr = envoy.addr();
    let good = WellBehaved::start(addr);
    let idle = (0..400).map(|_| TcpStream::connect(addr)).collect::<std::io::Result<Vec<_>>>()?;
    let mut slow = Vec::new();
    for _ in 0..100 {
        slow.extend([sent(addr, HEAD)?, sent(addr, BODY)?]);
    }
    let unread = block_on(unread(addr, 100))?;
    let unread_http2 = (0..5).map(|_| block_on(unread_http2(addr, 100))).collect::<Result<Vec<_>>>()?;
    // Continue for longer than request headers may take.
    for _ in 0..24 {
        std::thread::sleep(SECOND / 2);
        for stream in &mut slow {
            // This fails on connections that Envoy has closed.
            let _ = stream.write_all(b"a");
        }
    }
    good.finish()?;
    assert_eq!(envoy.stat("http.ingress.downstream_rq_header_timeout")?, 100);
    assert_all_ok(&envoy.client().burst(50, 4, |_| Request::get("/")));
    drop((idle, slow, unread, unread_http2));
    fleet.assert_idle();
    Ok(())
}
