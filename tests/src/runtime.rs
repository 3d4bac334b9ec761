//! The background runtime, and polling with a deadline.

use std::future::Future;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle, Runtime};

/// Handle of the runtime for backends and clients. It lives as long as the process.
pub fn handle() -> &'static Handle {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME
        .get_or_init(|| {
            Builder::new_multi_thread()
                .worker_threads(2)
                .thread_name("testbed")
                .enable_all()
                .build()
                .expect("a tokio runtime")
        })
        .handle()
}

/// Runs `future` on the background runtime and waits for its result.
///
/// Unlike `Runtime::block_on`, this may be called inside another runtime.
pub fn block_on<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> T {
    let (send, receive) = std::sync::mpsc::sync_channel(1);
    handle().spawn(async move {
        // The receiver waits below for as long as the task runs.
        let _ = send.send(future.await);
    });
    receive.recv().expect("the task panicked, see above")
}

/// Polls `probe` every few milliseconds until it yields a value; panics with `what` after `limit`.
#[track_caller]
pub fn eventually<T>(what: &str, limit: Duration, mut probe: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = probe() {
            return value;
        }
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
