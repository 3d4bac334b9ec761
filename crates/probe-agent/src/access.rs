//! The access log: a line on standard output for each request on the service port, once the request is over. Off by
//! default.
//!
//! A separate thread writes the lines, so that a slow reader of standard output does not hold up requests. Lines that
//! the reader does not take in time are lost, and counted. A terminating agent waits briefly for the remaining lines.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use http::{Method, Request, StatusCode, Uri, Version};

use crate::lines::Lines;
use crate::log::{LogFormat, stamped};
use crate::traffic::{Event, Traffic};

/// Writer of the access log.
pub(crate) struct AccessLog {
    format: LogFormat,
    /// Replica named in the lines, if the process has several.
    replica: Option<Arc<str>>,
    lines: Lines,
    traffic: Arc<Traffic>,
}

impl AccessLog {
    pub(crate) fn start(
        format: LogFormat,
        replica: Option<Arc<str>>,
        traffic: Arc<Traffic>,
    ) -> std::io::Result<Self> {
        let lost = traffic.clone();
        let lines = Lines::start(
            "access-log",
            || std::io::stdout().lock(),
            move || {
                lost.count(Event::AccessLost);
            },
        )?;
        Ok(Self { format, replica, lines, traffic })
    }

    /// Waits briefly until the lines so far are written.
    pub(crate) async fn flush(&self) {
        self.lines.flush().await;
    }
}

/// One request. Writes its line when it is dropped.
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

    /// Records that the whole response has been handed to hyper.
    pub(crate) fn complete(&mut self) {
        self.complete = true;
    }

    fn line(&self) -> String {
        // The query is left out: it may hold secrets.
        let path = self.target.path();
        let status = self.status.map_or(0, |status| status.as_u16());
        let ms = self.began.elapsed().as_micros() as f64 / 1e3;
        let client = self.client.map_or_else(|| "-".to_owned(), |client| client.to_string());
        let (method, version, sent) = (&self.method, self.version, self.sent);
        match self.log.format {
            LogFormat::Text => {
                let end = if self.complete { "" } else { " incomplete" };
                let replica =
                    self.log.replica.as_ref().map(|replica| format!("{replica} ")).unwrap_or_default();
                format!("{replica}{client} {method} {path} {version:?} {status} {sent} B {ms:.1} ms{end}")
            }
            LogFormat::Json => {
                let mut line = stamped(self.log.replica.as_deref());
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
        if !self.log.lines.put(self.line()) {
            self.log.traffic.count(Event::AccessLost);
        }
    }
}
