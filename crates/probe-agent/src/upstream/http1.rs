//! HTTP/1.1 connections to the backend: a pool of idle ones, and the second attempt when the backend closes one of
//! them.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::{Request, Response, request};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::error::{ForwardError, is_of_body};
use super::patient::{Patient, Reads};
use super::{Lease, Pool, UpstreamBody};
use crate::upload::{Source, Upload};

pub(super) struct Http1 {
    sender: http1::SendRequest<Upload>,
    task: AbortHandle,
    reads: Reads,
}

pub(super) struct Idle {
    conn: Http1,
    since: Instant,
}

/// Reason why a request got no response.
enum NotSent {
    /// Nothing was written. Holds the request.
    Unwritten(Box<Request<Upload>>, hyper::Error),
    Broken(hyper::Error),
}

impl From<TrySendError<Request<Upload>>> for NotSent {
    fn from(mut error: TrySendError<Request<Upload>>) -> Self {
        match error.take_message() {
            Some(req) => Self::Unwritten(Box::new(req), error.into_error()),
            None => Self::Broken(error.into_error()),
        }
    }
}

impl Http1 {
    /// Returns the connection to the pool, at once if it is free, or as soon as it is.
    pub(super) fn release(mut self, pool: Arc<Pool>) {
        if self.sender.is_closed() {
            return;
        }
        if self.sender.is_ready() {
            pool.put_idle(self);
            return;
        }
        // The response is over before its connection is free: the request body is still being sent, or hyper's task has
        // not run yet.
        tokio::spawn(async move {
            match tokio::time::timeout(UPLOAD_GRACE, self.sender.ready()).await {
                Ok(Ok(())) => pool.put_idle(self),
                Ok(Err(_)) => {}
                Err(_) => self.task.abort(),
            }
        });
    }
}

/// Copy of a request, to send it a second time.
struct Replay {
    head: request::Parts,
    /// The body, once the first attempt returns it. `None`: there is no body.
    body: Option<oneshot::Receiver<Source>>,
}

impl Replay {
    /// Copies an idempotent request (RFC 9110 §9.2.2).
    fn of(req: Request<Upload>) -> (Request<Upload>, Option<Box<Self>>) {
        if !req.method().is_idempotent() {
            return (req, None);
        }
        let (head, mut upload) = req.into_parts();
        let mut body = None;
        if !upload.is_end_stream() {
            let (lent, returned) = upload.lend(None);
            (upload, body) = (lent, Some(returned));
        }
        let replay = Box::new(Self { head: head.clone(), body });
        (Request::from_parts(head, upload), Some(replay))
    }

    /// Returns the request, or `None` if too much of its body has been read.
    async fn request(self) -> Option<Request<Upload>> {
        let body = match self.body {
            None => Upload::empty(),
            Some(returned) => returned.await.ok()?.into(),
        };
        Some(Request::from_parts(self.head, body))
    }
}

impl Pool {
    /// Sends a request over HTTP/1.1 and waits for the head of the response.
    ///
    /// A backend may close an idle connection just as a request is sent on it (RFC 9112 §9.3.1). If nothing of the
    /// request was written, it is sent on another connection. Otherwise it is sent a second time, on a new connection,
    /// if it is idempotent.
    pub(crate) async fn send_http1(
        self: &Arc<Self>,
        mut req: Request<Upload>,
    ) -> Result<Response<UpstreamBody>, ForwardError> {
        while let Some(mut conn) = self.take_idle() {
            let (sent, replay) = Replay::of(req);
            let before = conn.reads.get();
            match conn.sender.try_send_request(sent).await.map_err(NotSent::from) {
                Ok(response) => return Ok(self.lease(conn, response)),
                Err(NotSent::Unwritten(unwritten, _)) => req = *unwritten,
                Err(NotSent::Broken(error)) => {
                    // hyper's task returns the body when it ends.
                    conn.task.abort();
                    let replay = replay.filter(|_| conn.reads.get() == before && !is_of_body(&error));
                    return match replay {
                        Some(replay) => self.send_again(replay, error).await,
                        None => Err(ForwardError::sending(error)),
                    };
                }
            }
        }
        let mut conn = Box::pin(self.connect_http1()).await?;
        match conn.sender.try_send_request(req).await.map_err(NotSent::from) {
            Ok(response) => Ok(self.lease(conn, response)),
            Err(NotSent::Unwritten(_, error)) => Err(ForwardError::Connect(io::Error::other(error))),
            Err(NotSent::Broken(error)) => Err(ForwardError::sending(error)),
        }
    }

    /// Sends a request a second time. If that fails, the error is still that of the first attempt, which the backend
    /// may have processed.
    async fn send_again(
        self: &Arc<Self>,
        replay: Box<Replay>,
        error: hyper::Error,
    ) -> Result<Response<UpstreamBody>, ForwardError> {
        let again = async {
            let req = replay.request().await?;
            self.load.counters().count_resent();
            let mut conn = Box::pin(self.connect_http1()).await.ok()?;
            let response = conn.sender.try_send_request(req).await.ok()?;
            Some(self.lease(conn, response))
        };
        Box::pin(again).await.ok_or(ForwardError::Reset(error))
    }

    fn lease(self: &Arc<Self>, conn: Http1, response: Response<Incoming>) -> Response<UpstreamBody> {
        response.map(|body| UpstreamBody::new(body, Lease::Connection { conn, pool: self.clone() }))
    }

    fn take_idle(&self) -> Option<Http1> {
        let mut idle = self.idle();
        // The most recent connection is the likeliest to be alive, and the others can age out.
        while let Some(Idle { conn, since }) = idle.pop_back() {
            if since.elapsed() >= self.idle_timeout {
                idle.clear();
                return None;
            }
            if conn.sender.is_ready() {
                return Some(conn);
            }
        }
        None
    }

    fn put_idle(&self, conn: Http1) {
        let now = Instant::now();
        let mut idle = self.idle();
        while idle.front().is_some_and(|old| now.saturating_duration_since(old.since) >= self.idle_timeout) {
            idle.pop_front();
        }
        if idle.len() < self.max_idle {
            idle.push_back(Idle { conn, since: now });
        }
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect_http1(&self) -> Result<Http1, ForwardError> {
        let connect = async {
            let socket = self.connect().await?;
            match &self.tls {
                None => self.handshake_http1(socket).await,
                Some(tls) => {
                    self.handshake_http1(tls.connect(false, socket).await.map_err(ForwardError::Connect)?)
                        .await
                }
            }
        };
        tokio::time::timeout(self.connect_timeout, Box::pin(connect))
            .await
            .map_err(|_| ForwardError::ConnectTimeout)?
    }

    async fn handshake_http1<T>(&self, io: T) -> Result<Http1, ForwardError>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let io = Patient::new(io);
        let reads = io.reads();
        let (sender, conn) = http1::Builder::new()
            .max_buf_size(self.max_response_head)
            .max_headers(RESPONSE_HEADERS)
            .handshake(TokioIo::new(io))
            .await
            .map_err(|error| ForwardError::Connect(io::Error::other(error)))?;
        // The errors of this task also surface in the request or body that they affect.
        let task = tokio::spawn(conn.with_upgrades()).abort_handle();
        Ok(Http1 { sender, task, reads })
    }
}

/// Time for which a client may go on sending once an HTTP/1.1 backend has answered in full.
const UPLOAD_GRACE: Duration = Duration::from_secs(1);
/// Maximum number of headers of a response.
const RESPONSE_HEADERS: usize = 256;
