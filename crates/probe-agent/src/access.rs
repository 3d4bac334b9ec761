//! The access log: a line on standard output for each request on the service port, once it is over. Off by default.
//!
//! Lines go through a thread of their own: a slow reader of standard output must not hold requests. What it does not take in
//! time is lost, and counted. An agent that ends waits a moment for the lines that are left.

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use http::{Method, Request, StatusCode, Uri, Version};
use tokio::sync::oneshot;

use crate::log::{LogFormat, stamped};
use crate::traffic::{Event, Traffic};

/// Where lines go.
pub(crate) struct AccessLog {
    format: LogFormat,
    lines: SyncSender<Line>,
    traffic: Arc<Traffic>,
}

enum Line {
    Of(String),
    /// All lines before it are to be written out.
    Flush(oneshot::Sender<()>),
}

impl AccessLog {
    pub(crate) fn start(format: LogFormat, traffic: Arc<Traffic>) -> std::io::Result<Self> {
        let (lines, written) = sync_channel(CAPACITY);
        let lost = traffic.clone();
        std::thread::Builder::new().name("access-log".to_owned()).spawn(move || write(&written, &lost))?;
        Ok(Self { format, lines, traffic })
    }

    /// Waits until the lines so far are written, but no longer than [`PATIENCE`].
    pub(crate) async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        let flush = async {
            let mut line = Line::Flush(done);
            while let Err(TrySendError::Full(again)) = self.lines.try_send(line) {
                line = again;
                tokio::time::sleep(PATIENCE / 100).await;
            }
            let _ = flushed.await;
        };
        let _ = tokio::time::timeout(PATIENCE, flush).await;
    }
}

fn write(lines: &Receiver<Line>, traffic: &Traffic) {
    while let Ok(first) = lines.recv() {
        let mut out = std::io::stdout().lock();
        for line in [first].into_iter().chain(lines.try_iter().take(CAPACITY)) {
            match line {
                Line::Of(line) => {
                    if writeln!(out, "{line}").is_err() {
                        traffic.count(Event::AccessLost);
                    }
                }
                Line::Flush(done) => {
                    let _ = out.flush();
                    let _ = done.send(());
                }
            }
        }
        let _ = out.flush();
    }
}

/// A request. Writes its line when it is dropped.
pub(crate) struct Entry {
    log: Arc<AccessLog>,
    began: Instant,
    client: Option<SocketAddr>,
    method: Method,
    target: Uri,
    version: Version,
    status: Option<StatusCode>,
    sent: u64,
    complete: bool,
}

impl Entry {
    pub(crate) fn new<B>(log: Arc<AccessLog>, client: Option<SocketAddr>, request: &Request<B>) -> Box<Self> {
        Box::new(Self {
            log,
            began: Instant::now(),
            client,
            method: request.method().clone(),
            target: request.uri().clone(),
            version: request.version(),
            status: None,
            sent: 0,
            complete: false,
        })
    }

    pub(crate) fn answered(&mut self, status: StatusCode) {
        self.status = Some(status);
    }

    pub(crate) fn sent(&mut self, bytes: u64) {
        self.sent += bytes;
    }

    /// Everything has been handed over.
    pub(crate) fn complete(&mut self) {
        self.complete = true;
    }

    fn line(&self) -> String {
        // Without the query, which may hold what is secret.
        let path = self.target.path();
        let status = self.status.map_or(0, |status| status.as_u16());
        let ms = self.began.elapsed().as_micros() as f64 / 1e3;
        let client = self.client.map_or_else(|| "-".to_owned(), |client| client.to_string());
        let (method, version, sent) = (&self.method, self.version, self.sent);
        match self.log.format {
            LogFormat::Text => {
                let end = if self.complete { "" } else { " incomplete" };
                format!("{client} {method} {path} {version:?} {status} {sent} B {ms:.1} ms{end}")
            }
            LogFormat::Json => {
                let mut line = stamped();
                for (name, value) in [
                    ("client", client.into()),
                    ("method", method.as_str().into()),
                    ("path", path.into()),
                    ("version", format!("{version:?}").into()),
                    ("status", status.into()),
                    ("bytes", sent.into()),
                    ("duration_ms", ms.into()),
                    ("complete", self.complete.into()),
                ] {
                    line.insert(name.to_owned(), value);
                }
                serde_json::Value::Object(line).to_string()
            }
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.log.lines.try_send(Line::Of(self.line())).is_err() {
            self.log.traffic.count(Event::AccessLost);
        }
    }
}

/// Lines that may wait.
const CAPACITY: usize = 4096;
/// How long an agent that ends waits for a slow reader.
const PATIENCE: Duration = Duration::from_secs(1);
