//! Cuts requests that might never end: those with a body on which nothing moves, and streams that are too old.
//!
//! Cutting is off by default. A leash is the state of a request that may be cut; by default, requests have none. The
//! wait for a response head does not count: no body moves in that time, and `response_timeout` limits it.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use hyper::rt::Executor;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::config::Limits;
use crate::traffic::{Event, Traffic};

/// Rules for cutting requests.
#[derive(Clone, Copy)]
pub(crate) struct Rules {
    idle: Option<Duration>,
    age: Option<Duration>,
}

impl Rules {
    /// Returns `None` if no request is ever cut.
    pub(crate) fn of(limits: &Limits) -> Option<Self> {
        let rules = Self { idle: limits.body_idle_timeout, age: limits.max_stream_age };
        (rules.idle.is_some() || rules.age.is_some()).then_some(rules)
    }

    /// Returns the time between two checks. A request outlives its limit by at most two such periods.
    pub(crate) fn period(self) -> Duration {
        let shortest = self.idle.into_iter().chain(self.age).min().unwrap_or(Duration::MAX);
        (shortest / 4).clamp(Duration::from_millis(1), Duration::from_secs(60))
    }
}

/// State of one request.
pub(crate) struct Leash {
    began: Instant,
    moved: AtomicU64,
    /// Number of bodies or tunnels that have not ended.
    open: AtomicU32,
    stream: AtomicBool,
    cut: AtomicBool,
    upload: Mutex<Option<Waker>>,
}

impl Leash {
    pub(crate) fn begin() -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            moved: AtomicU64::new(0),
            open: AtomicU32::new(0),
            stream: AtomicBool::new(false),
            cut: AtomicBool::new(false),
            upload: Mutex::default(),
        })
    }

    /// Marks the request as a stream or a tunnel, whose age is limited.
    pub(crate) fn mark_stream(&self) {
        self.stream.store(true, Ordering::Relaxed);
    }

    fn cut(&self) {
        self.cut.store(true, Ordering::Release);
        if let Some(waker) = self.upload().take() {
            waker.wake();
        }
    }

    fn upload(&self) -> MutexGuard<'_, Option<Waker>> {
        self.upload.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Body or tunnel that has not ended.
pub(crate) struct Open(Arc<Leash>);

impl Open {
    pub(crate) fn new(leash: Arc<Leash>) -> Self {
        leash.open.fetch_add(1, Ordering::Relaxed);
        Self(leash)
    }

    /// Records that something has moved.
    pub(crate) fn moved(&self) {
        self.0.moved.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether the request was cut. If another task cuts it later, the task of `cx` is woken: it polls the
    /// upload, and would not notice the cut otherwise.
    pub(crate) fn is_cut(&self, cx: &mut Context<'_>) -> bool {
        let mut waker = self.0.upload();
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            *waker = Some(cx.waker().clone());
        }
        self.0.cut.load(Ordering::Acquire)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Checks one request against the rules.
pub(crate) struct Patrol {
    leash: Arc<Leash>,
    rules: Rules,
    seen: u64,
    since: Instant,
}

impl Patrol {
    pub(crate) fn new(leash: Arc<Leash>, rules: Rules) -> Self {
        Self { leash, rules, seen: u64::MAX, since: Instant::now() }
    }

    pub(crate) fn follows(&self, leash: &Arc<Leash>) -> bool {
        Arc::ptr_eq(&self.leash, leash)
    }

    /// Cuts the request if it is over a limit, and returns the reason. `elsewhere` is the number of completed writes to
    /// the client; they count as movement too.
    pub(crate) fn look(&mut self, elsewhere: u64) -> Option<Event> {
        let now = Instant::now();
        let moved = self.leash.moved.load(Ordering::Relaxed).wrapping_add(elsewhere);
        let open = self.leash.open.load(Ordering::Relaxed) > 0;
        if moved != self.seen || !open {
            (self.seen, self.since) = (moved, now);
        }
        let over = |since: Instant, limit: Option<Duration>| {
            limit.is_some_and(|limit| now.saturating_duration_since(since) >= limit)
        };
        let stream = open && self.leash.stream.load(Ordering::Relaxed);
        let cut = if over(self.since, self.rules.idle) {
            Event::BodyIdle
        } else if stream && over(self.leash.began, self.rules.age) {
            Event::StreamAge
        } else {
            return None;
        };
        self.leash.cut();
        Some(cut)
    }

    /// Runs `request` until it ends or is cut.
    pub(crate) async fn walk(mut self, request: impl Future<Output = ()>, traffic: &Traffic) {
        let mut request = pin!(request);
        let mut look = tokio::time::interval(self.rules.period());
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = request.as_mut() => return,
                _ = look.tick() => {
                    if let Some(cut) = self.look(0) {
                        traffic.count(cut);
                        return;
                    }
                }
            }
        }
    }
}

thread_local! {
    /// Leash of the request whose task is about to start on this thread.
    static BEGUN: Cell<Option<Arc<Leash>>> = const { Cell::new(None) };
}

/// Starts hyper's tasks. Over HTTP/2, each request has its own. While a client reads nothing from a stream, hyper does
/// not poll that stream, so the only way to end it is to end its task.
#[derive(Clone)]
pub(crate) struct Tasks(pub(crate) Option<(Rules, Arc<Traffic>)>);

impl Tasks {
    /// Announces that the next task to start on this thread belongs to the request with this leash. hyper starts that
    /// task immediately after it has called the service.
    pub(crate) fn announce(leash: Arc<Leash>) {
        BEGUN.set(Some(leash));
    }
}

impl<F> Executor<F> for Tasks
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, task: F) {
        match (&self.0, BEGUN.take()) {
            (Some((rules, traffic)), Some(leash)) => {
                let (patrol, traffic) = (Patrol::new(leash, *rules), traffic.clone());
                tokio::spawn(async move {
                    let task = async {
                        task.await;
                    };
                    patrol.walk(task, &traffic).await;
                });
            }
            _ => drop(tokio::spawn(task)),
        }
    }
}

/// One side of a tunnel. Records when data moves.
pub(crate) struct Watched<T> {
    io: T,
    open: Option<Open>,
}

impl<T> Watched<T> {
    pub(crate) fn new(io: T, leash: Option<Arc<Leash>>) -> Self {
        Self { io, open: leash.map(Open::new) }
    }

    fn moved(&self) {
        if let Some(open) = &self.open {
            open.moved();
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Watched<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        if read.is_ready() {
            self.moved();
        }
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Watched<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.io).poll_write(cx, buf);
        if wrote.is_ready() {
            self.moved();
        }
        wrote
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
