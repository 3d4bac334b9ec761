//! The child process: how a replica handles connections, requests and changes.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::convert::Infallible;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Either, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Normal};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use super::clock::Clock;
use super::cores::{Share, SharedCores};
use super::inference::{Inference, TokenStream};
use super::{
    CACHE_HEADER, Change, ChangeOrder, DONE, Fleet, KEY_HEADER, REPLICA_HEADER, ReplicaSpec, Service, Slots,
};

/// The child process: serves until standard input ends.
pub(crate) fn serve() -> Result<()> {
    let mut lines = std::io::stdin().lines();
    let fleet: Fleet = serde_json::from_str(&lines.next().context("no fleet")??)?;
    // Replicas that sleep share a thread; one that uses CPU has its own, so that it does not delay the others.
    let (shared, accepted) = mpsc::unbounded_channel();
    std::thread::spawn(move || host(accepted));
    let mut running = Vec::new();
    for (number, replica) in fleet.0.into_iter().enumerate() {
        let to = if matches!(replica.service, Service::Cpu { .. }) {
            let (own, accepted) = mpsc::unbounded_channel();
            std::thread::spawn(move || host(accepted));
            own
        } else {
            shared.clone()
        };
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let (orders, ordered) = mpsc::unbounded_channel();
        to.send(Start { number: number as u16, replica, listener, ordered }).context("the thread ended")?;
        println!("{address}");
        running.push(orders);
    }
    std::io::stdout().flush()?;
    for line in lines {
        let order: ChangeOrder = serde_json::from_str(&line?)?;
        let (done, answer) = std::sync::mpsc::channel();
        let sent = running.get(usize::from(order.replica)).map(|to| to.send((order.change, done)));
        let outcome = match sent {
            Some(Ok(())) => answer.recv().context("the replica has ended")?,
            _ => Err("no such replica, or a trivial one".to_owned()),
        };
        println!("{}", outcome.err().unwrap_or_else(|| DONE.to_owned()));
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// An order for a replica, and the channel for its outcome.
type Ordered = (Change, std::sync::mpsc::Sender<Result<(), String>>);

struct Start {
    number: u16,
    replica: ReplicaSpec,
    listener: std::net::TcpListener,
    ordered: mpsc::UnboundedReceiver<Ordered>,
}

/// A thread that runs the replicas sent to it.
fn host(mut accepted: mpsc::UnboundedReceiver<Start>) -> Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let clock = Clock::start()?;
        let mut replicas = JoinSet::new();
        while let Some(Start { number, replica, listener, ordered }) = accepted.recv().await {
            listener.set_nonblocking(true)?;
            let listener = TcpListener::from_std(listener)?;
            if replica.service == Service::Trivial {
                replicas.spawn(accept_trivial(listener, number));
            } else {
                let state = Arc::new(ReplicaState::new(number, replica, clock.clone()));
                replicas.spawn(async move {
                    if let Err(error) = run(state, listener, ordered).await {
                        eprintln!("replica {number} ended: {error}");
                    }
                });
            }
        }
        replicas.join_all().await;
        Ok(())
    })
}

/// The listening port: open, or reserved while connections are refused.
enum Door {
    Open(TcpListener),
    Shut(TcpSocket),
}

impl Door {
    async fn accept(&self) -> Option<TcpStream> {
        match self {
            Self::Open(listener) => listener.accept().await.ok().map(|(stream, _)| stream),
            Self::Shut(_) => std::future::pending().await,
        }
    }

    fn refuse(self, address: SocketAddr) -> std::io::Result<Self> {
        // A second socket can have the port only once the first has released it.
        drop(self);
        let socket = TcpSocket::new_v4()?;
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok(Self::Shut(socket))
    }

    fn reopen(self) -> std::io::Result<Self> {
        match self {
            Self::Open(_) => Ok(self),
            Self::Shut(socket) => socket.listen(1024).map(Self::Open),
        }
    }
}

/// Accepts connections and carries out orders until no more orders can come.
async fn run(
    state: Arc<ReplicaState>,
    listener: TcpListener,
    mut ordered: mpsc::UnboundedReceiver<Ordered>,
) -> std::io::Result<()> {
    let address = listener.local_addr()?;
    let mut door = Door::Open(listener);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            stream = door.accept() => {
                let Some(stream) = stream else { continue };
                let _ = stream.set_nodelay(true);
                connections.spawn(serve_http(stream, state.clone()));
            }
            Some(_) = connections.join_next() => {}
            order = ordered.recv() => {
                let Some((change, done)) = order else { return Ok(()) };
                match change {
                    Change::Refusing(true) => {
                        door = door.refuse(address)?;
                        connections.shutdown().await;
                    }
                    Change::Refusing(false) => door = door.reopen()?,
                    Change::Service(service) => state.behaviour().service = service,
                    Change::Failing(share) => state.behaviour().failing = share,
                }
                // An error means that the sender of the order no longer waits, because the process is ending.
                let _ = done.send(Ok(()));
            }
        }
    }
}

struct ReplicaState {
    number: u16,
    slots: Option<(Semaphore, Slots)>,
    waiting: AtomicUsize,
    behaviour: Mutex<Behaviour>,
    inference: Option<Arc<Inference>>,
    clock: Arc<Clock>,
}

/// A response that is complete, or one that is streamed.
type Answer = Response<Either<Full<Bytes>, TokenStream>>;

/// The state that decides how a request is handled.
struct Behaviour {
    service: Service,
    failing: f64,
    rng: SmallRng,
    /// Cached keys, the most recently used at the back.
    keys: VecDeque<String>,
    queue: Queue,
    cores: SharedCores,
}

/// The instants at which the slots become free.
///
/// Service times are drawn on arrival, so the end of every queued request is known in advance. A slot becomes free when
/// its request should have been answered, not when this busy machine actually answered it. Otherwise lateness would
/// accumulate and raise the load above the scenario's.
#[derive(Default)]
struct Queue(BinaryHeap<Reverse<Instant>>);

impl Queue {
    /// Queues a request that arrives `now` and takes `time`; returns when it ends.
    fn done(&mut self, slots: usize, now: Instant, time: Duration) -> Instant {
        let mut start = now;
        while self.0.len() >= slots.max(1) {
            let Some(Reverse(free)) = self.0.pop() else { break };
            start = now.max(free);
        }
        let done = start + time;
        self.0.push(Reverse(done));
        done
    }
}

/// The cost of a request on this replica.
#[derive(Debug, PartialEq)]
enum RequestCost {
    /// Time to sleep, and whether the cache had the key; `None` if there is no cache.
    Sleep(Duration, Option<bool>),
    Cpu(Duration),
    /// Instant at which the request, after any wait, has been served.
    Until(Instant),
    /// Share of the replica's cores.
    Shared(Share),
}

impl Behaviour {
    fn new(number: u16, service: Service) -> Self {
        // With its number as the seed, each replica has its own sequence, and every run repeats it.
        let rng = SmallRng::seed_from_u64(u64::from(number));
        Self {
            service,
            failing: 0.0,
            rng,
            keys: VecDeque::new(),
            queue: Queue::default(),
            cores: SharedCores::default(),
        }
    }

    fn fails(&mut self) -> bool {
        self.failing > 0.0 && self.rng.random::<f64>() < self.failing
    }

    fn cost(&mut self, key: Option<&str>) -> RequestCost {
        match self.service {
            Service::Sleep { ms } => RequestCost::Sleep(Duration::from_millis(ms), None),
            Service::Normal { mean_ms, sd_ms } => {
                let drawn =
                    Normal::new(mean_ms, sd_ms).map_or(mean_ms, |normal| normal.sample(&mut self.rng));
                RequestCost::Sleep(Duration::from_secs_f64(drawn.max(0.0) / 1e3), None)
            }
            Service::Cpu { us } => RequestCost::Cpu(Duration::from_micros(us)),
            Service::Cache { entries, hit_ms, miss_ms } => {
                let hit = key.is_some_and(|key| self.remember(key, entries));
                RequestCost::Sleep(Duration::from_millis(if hit { hit_ms } else { miss_ms }), Some(hit))
            }
            Service::Queue { slots, times } => {
                let time = times.sample(&mut self.rng);
                RequestCost::Until(self.queue.done(slots, Instant::now(), time))
            }
            Service::Cores { cores, times } => {
                let time = times.sample(&mut self.rng);
                RequestCost::Shared(self.cores.add(cores, Instant::now(), time))
            }
            Service::Inference { .. } | Service::Trivial => RequestCost::Sleep(Duration::ZERO, None),
        }
    }

    /// Makes `key` the most recently used; returns whether it was cached.
    fn remember(&mut self, key: &str, entries: usize) -> bool {
        let found = self.keys.iter().position(|known| known == key);
        let known = found.and_then(|index| self.keys.remove(index));
        let hit = known.is_some();
        self.keys.push_back(known.unwrap_or_else(|| key.to_owned()));
        while self.keys.len() > entries {
            self.keys.pop_front();
        }
        hit
    }
}

impl ReplicaState {
    fn new(number: u16, replica: ReplicaSpec, clock: Arc<Clock>) -> Self {
        let inference = match replica.service {
            Service::Inference { engine, answers } => Some(Inference::start(engine, answers, clock.clone())),
            _ => None,
        };
        Self {
            number,
            slots: replica.slots.map(|slots| (Semaphore::new(slots.serving), slots)),
            waiting: AtomicUsize::new(0),
            behaviour: Mutex::new(Behaviour::new(number, replica.service)),
            inference,
            clock,
        }
    }

    fn behaviour(&self) -> MutexGuard<'_, Behaviour> {
        self.behaviour.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Answer, Infallible> {
        if let Some(protocol) = request.headers().get(header::UPGRADE) {
            let protocol = protocol.clone();
            return Ok(self.keep_open(request, protocol));
        }
        if let Some(inference) = &self.inference {
            return Ok(self.infer(inference, &request).await);
        }
        let mut response = Response::new(Full::new(Bytes::new()));
        response.headers_mut().insert(REPLICA_HEADER, self.number.into());
        let served = self.work(&request, &mut response).await;
        // An unread body would close the connection.
        let _ = request.into_body().collect().await;
        if served {
            *response.body_mut() = Full::new(Bytes::from_static(b"ok\n"));
        } else {
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        }
        Ok(response.map(Either::Left))
    }

    /// Accepts an upgrade, and keeps the connection open until the client closes it.
    fn keep_open(&self, request: Request<Incoming>, protocol: HeaderValue) -> Answer {
        tokio::spawn(async move {
            if let Ok(upgraded) = hyper::upgrade::on(request).await {
                // A broken connection has ended, too.
                let _ = tokio::io::copy(&mut TokioIo::new(upgraded), &mut tokio::io::sink()).await;
            }
        });
        let mut response = Response::new(Either::Left(Full::new(Bytes::new())));
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(header::UPGRADE, protocol);
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(REPLICA_HEADER, self.number.into());
        response
    }

    async fn infer(&self, inference: &Inference, request: &Request<Incoming>) -> Answer {
        let answer = if self.behaviour().fails() { None } else { inference.answer(request.headers()).await };
        let mut response = answer.map_or_else(
            || {
                let mut unavailable = Response::new(Either::Left(Full::new(Bytes::new())));
                *unavailable.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
                unavailable
            },
            |answer| answer.map(Either::Right),
        );
        response.headers_mut().insert(REPLICA_HEADER, self.number.into());
        response
    }

    /// Returns false if the request fails or there is no room for it.
    async fn work(&self, request: &Request<Incoming>, response: &mut Response<Full<Bytes>>) -> bool {
        if self.behaviour().fails() {
            return false;
        }
        let _slot = match &self.slots {
            None => None,
            Some((semaphore, slots)) => match self.slot(semaphore, *slots).await {
                None => return false,
                slot => slot,
            },
        };
        let key = request.headers().get(KEY_HEADER).and_then(|value| value.to_str().ok());
        let cost = self.behaviour().cost(key);
        match cost {
            RequestCost::Sleep(time, hit) => {
                if let Some(hit) = hit {
                    let value = HeaderValue::from_static(if hit { "hit" } else { "miss" });
                    response.headers_mut().insert(CACHE_HEADER, value);
                }
                tokio::time::sleep(time).await;
            }
            RequestCost::Cpu(time) => burn(time),
            RequestCost::Until(done) => self.clock.sleep_until(done).await,
            RequestCost::Shared(share) => self.share_cores(share).await,
        }
        true
    }

    /// Waits until the request that has this share has been served. Requests that arrive meanwhile delay it.
    async fn share_cores(&self, share: Share) {
        loop {
            let end = self.behaviour().cores.end(share, Instant::now());
            let Some(end) = end else { return };
            self.clock.sleep_until(end).await;
        }
    }

    /// Waits for a slot; returns `None` if too many requests are already waiting.
    async fn slot<'a>(
        &self,
        semaphore: &'a Semaphore,
        slots: Slots,
    ) -> Option<tokio::sync::SemaphorePermit<'a>> {
        if let Ok(slot) = semaphore.try_acquire() {
            return Some(slot);
        }
        if self.waiting.load(Ordering::Relaxed) >= slots.waiting {
            return None;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // Decremented even if the client goes away and this future is dropped.
        let _waiting = Waiting(&self.waiting);
        semaphore.acquire().await.ok()
    }
}

struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Uses CPU until this thread has used `time` more CPU time. Time in which the core runs other threads does not count.
fn burn(time: Duration) {
    let end = thread_cpu_time() + time;
    while thread_cpu_time() < end {
        for _ in 0..100 {
            std::hint::spin_loop();
        }
    }
}

fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to a valid local value.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

async fn serve_http(stream: TcpStream, state: Arc<ReplicaState>) {
    let service = service_fn(move |request| {
        let state = state.clone();
        async move { state.answer(request).await }
    });
    // A connection that the peer breaks off needs no handling here.
    let _ = auto::Builder::new(TokioExecutor::new())
        .serve_connection_with_upgrades(TokioIo::new(stream), service)
        .await;
}

/// Answers HTTP/1.1 requests that have no body, at almost no cost in CPU time. HTTP/2 takes the usual path.
async fn accept_trivial(listener: TcpListener, number: u16) {
    let Ok(address) = listener.local_addr() else { return };
    let load = format!("1;100;{address}");
    let canned: Arc<str> = format!(
        "HTTP/1.1 200 OK\r\n{REPLICA_HEADER}: {number}\r\nx-prequal-load: {load}\r\ncontent-length: 3\r\n\r\nok\n"
    )
    .into();
    let load = HeaderValue::try_from(load).unwrap_or_else(|_| HeaderValue::from_static(""));
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let (canned, load) = (canned.clone(), load.clone());
        tokio::spawn(async move {
            let mut preface = [0; 3];
            match stream.peek(&mut preface).await {
                Ok(_) if &preface == b"PRI" => serve_trivial(stream, load).await,
                _ => serve_canned(stream, &canned).await,
            }
        });
    }
}

async fn serve_trivial(stream: TcpStream, load: HeaderValue) {
    let service = service_fn(move |_: Request<Incoming>| {
        let mut response = Response::new(Full::new(Bytes::new()));
        response.headers_mut().insert("x-prequal-load", load.clone());
        std::future::ready(Ok::<_, Infallible>(response))
    });
    // A connection that the peer breaks off needs no handling here.
    let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
}

async fn serve_canned(mut stream: TcpStream, canned: &str) {
    let mut head = Vec::with_capacity(2048);
    while stream.read_buf(&mut head).await.is_ok_and(|n| n > 0) {
        if head.ends_with(b"\r\n\r\n") {
            head.clear();
            if stream.write_all(canned.as_bytes()).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::Empty;
    use hyper_util::client::legacy::Client;

    use super::super::{Answers, EngineSpec, Times};
    use super::*;

    /// A replica on this thread's runtime, as the child process runs it.
    #[derive(Clone)]
    struct TestReplica {
        address: SocketAddr,
        orders: mpsc::UnboundedSender<Ordered>,
        client: Client<hyper_util::client::legacy::connect::HttpConnector, Empty<Bytes>>,
    }

    impl TestReplica {
        async fn start(replica: ReplicaSpec) -> Self {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let address = listener.local_addr().unwrap();
            let (orders, ordered) = mpsc::unbounded_channel();
            let state = ReplicaState::new(3, replica, Clock::start().unwrap());
            tokio::spawn(run(Arc::new(state), listener, ordered));
            Self { address, orders, client: Client::builder(TokioExecutor::new()).build_http() }
        }

        async fn change(&self, change: Change) {
            let (done, answer) = std::sync::mpsc::channel();
            self.orders.send((change, done)).unwrap();
            loop {
                match answer.try_recv() {
                    Ok(outcome) => return outcome.unwrap(),
                    Err(std::sync::mpsc::TryRecvError::Empty) => tokio::task::yield_now().await,
                    Err(gone) => panic!("the replica ended: {gone}"),
                }
            }
        }

        /// The status and whether the cache had the key; an error if there was no response.
        async fn get(&self, key: &str) -> Result<(u16, Option<bool>)> {
            let request = Request::get(format!("http://{}/", self.address)).header(KEY_HEADER, key);
            let response = self.client.request(request.body(Empty::new())?).await?;
            assert_eq!(response.headers()[REPLICA_HEADER], "3");
            let hit = response.headers().get(CACHE_HEADER).map(|value| value == "hit");
            let status = response.status().as_u16();
            response.into_body().collect().await?;
            Ok((status, hit))
        }

        async fn at_once(&self, count: usize) -> Vec<u16> {
            let mut requests = JoinSet::new();
            for _ in 0..count {
                let replica = self.clone();
                requests.spawn(async move { replica.get("a").await.unwrap().0 });
            }
            requests.join_all().await
        }

        async fn statuses(&self, count: usize) -> Vec<u16> {
            let mut statuses = Vec::new();
            for _ in 0..count {
                statuses.push(self.get("a").await.unwrap().0);
            }
            statuses
        }
    }

    #[tokio::test]
    async fn service_time_changes_at_run_time() {
        let replica = TestReplica::start(ReplicaSpec::sleeping(0)).await;
        assert_eq!(replica.statuses(1).await, [200]);
        replica.change(Change::Service(Service::Sleep { ms: 60 })).await;
        let begin = Instant::now();
        assert_eq!(replica.statuses(1).await, [200]);
        assert!(begin.elapsed() >= Duration::from_millis(60));
    }

    #[tokio::test]
    async fn the_requested_share_fails_at_once() {
        let replica = TestReplica::start(ReplicaSpec::sleeping(0)).await;
        replica.change(Change::Failing(0.5)).await;
        let failed = replica.statuses(400).await.iter().filter(|status| **status == 503).count();
        // Five standard deviations of a fair coin.
        assert!((150..=250).contains(&failed), "{failed} of 400");
        replica.change(Change::Service(Service::Sleep { ms: 10_000 })).await;
        replica.change(Change::Failing(1.0)).await;
        let begin = Instant::now();
        assert_eq!(replica.statuses(3).await, [503; 3]);
        assert!(begin.elapsed() < Duration::from_secs(10), "a failure waits for nothing");
    }

    #[tokio::test]
    async fn connections_are_refused_until_refusing_is_switched_off() {
        let replica = TestReplica::start(ReplicaSpec::sleeping(0)).await;
        assert_eq!(replica.statuses(1).await, [200]);
        replica.change(Change::Refusing(true)).await;
        // The pooled connection is closed, and new ones are refused.
        for _ in 0..3 {
            assert!(replica.get("a").await.is_err());
        }
        let refused = TcpStream::connect(replica.address).await.unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        replica.change(Change::Refusing(false)).await;
        assert_eq!(replica.statuses(1).await, [200]);
    }

    #[tokio::test]
    async fn beyond_slots_and_queue_requests_are_rejected() {
        let replica = TestReplica::start(ReplicaSpec::sleeping(200).with_slots(2, 3)).await;
        let begin = Instant::now();
        let mut statuses = replica.at_once(8).await;
        statuses.sort_unstable();
        assert_eq!(statuses, [200, 200, 200, 200, 200, 503, 503, 503]);
        // Five requests, two at a time.
        assert!(begin.elapsed() >= Duration::from_millis(600));
    }

    #[tokio::test]
    async fn cpu_work_runs_one_request_at_a_time() {
        let replica = TestReplica::start(ReplicaSpec::new(Service::Cpu { us: 20_000 })).await;
        let before = thread_cpu_time();
        assert_eq!(replica.at_once(3).await, [200; 3]);
        assert!(thread_cpu_time() - before >= Duration::from_millis(60));
    }

    #[tokio::test]
    async fn a_cache_holds_the_most_recently_used_keys() {
        let cache = Service::Cache { entries: 2, hit_ms: 0, miss_ms: 1 };
        let replica = TestReplica::start(ReplicaSpec::new(cache)).await;
        let mut hits = Vec::new();
        // `c` evicts `b`, because `a` was used more recently.
        for key in ["a", "b", "a", "c", "a", "b"] {
            hits.push(replica.get(key).await.unwrap().1.unwrap());
        }
        assert_eq!(hits, [false, false, true, false, true, false]);
    }

    #[test]
    fn a_queue_serves_in_order_on_the_slot_that_is_free_first() {
        let begin = Instant::now();
        let ms = Duration::from_millis;
        let mut queue = Queue::default();
        let mut done = |slots, at, time| queue.done(slots, begin + ms(at), ms(time)) - begin;
        assert_eq!(done(2, 0, 100), ms(100));
        assert_eq!(done(2, 10, 20), ms(30), "the second slot was free");
        assert_eq!(done(2, 15, 30), ms(60), "waits for the second, free at 30");
        assert_eq!(done(2, 20, 10), ms(70), "and again");
        assert_eq!(done(2, 200, 5), ms(205), "nothing waits any more");
        assert_eq!(done(1, 201, 5), ms(210), "one slot fewer: waits for the request in service");
    }

    #[tokio::test]
    async fn any_number_waits_for_a_slot() {
        let times = Times::Exactly { ms: 10.5 };
        let replica = TestReplica::start(ReplicaSpec::new(Service::Queue { slots: 4, times })).await;
        let begin = Instant::now();
        assert_eq!(replica.at_once(40).await, [200; 40]);
        // Ten rounds of 10.5 ms. If the machine is late in the first rounds, that does not delay the later ones.
        let took = begin.elapsed();
        assert!(took >= Duration::from_millis(105), "{took:?}");
    }

    #[tokio::test]
    async fn requests_that_share_a_core_delay_each_other() {
        let times = Times::Exactly { ms: 10.0 };
        let replica = TestReplica::start(ReplicaSpec::new(Service::Cores { cores: 1, times })).await;
        let begin = Instant::now();
        assert_eq!(replica.at_once(10).await, [200; 10]);
        let took = begin.elapsed();
        assert!(took >= Duration::from_millis(100), "{took:?}");
    }

    #[tokio::test]
    async fn an_engine_answers_reports_cache_hits_and_can_fail() {
        let service = Service::Inference {
            engine: EngineSpec::LLAMA2_70B.faster(100.0),
            answers: Answers::EventStream,
        };
        let replica = TestReplica::start(ReplicaSpec::new(service)).await;
        assert_eq!(replica.get("a").await.unwrap(), (200, Some(false)));
        assert_eq!(replica.get("a").await.unwrap(), (200, Some(true)));
        replica.change(Change::Failing(1.0)).await;
        assert_eq!(replica.get("a").await.unwrap(), (503, None));
    }

    #[test]
    fn normal_times_have_the_requested_mean() {
        let mut behaviour = Behaviour::new(0, Service::Normal { mean_ms: 167.0, sd_ms: 5.0 });
        let mut times: Vec<f64> = (0..1000)
            .map(|_| match behaviour.cost(None) {
                RequestCost::Sleep(time, None) => time.as_secs_f64() * 1e3,
                other => panic!("{other:?}"),
            })
            .collect();
        times.sort_by(f64::total_cmp);
        assert!((times[500] - 167.0).abs() < 1.0, "{}", times[500]);
        assert!((times[841] - 172.0).abs() < 1.0, "one standard deviation up: {}", times[841]);
    }
}
