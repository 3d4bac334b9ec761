//! Prequal's own layer for tower, which passes the same conformance program as the libraries. It runs in this process,
//! with hyper in front of it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ::http::{Request, Response, StatusCode, header};
use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Channel, Empty, Full, channel};
use hyper::body::{Body, Frame, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use prequal_core::server::tracker::TrackerConfig;
use prequal_core::shared::outcome::Outcome;
use prequal_core::shared::time::Micros;
use prequal_testbed::handle;
use probe_agent::layer::{Prequal, PrequalBody, PrequalFuture, PrequalLayer};
use probe_agent::load::Load;
use probe_agent::orca::{Orca, OrcaFormat};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tower_layer::Layer as _;
use tower_service::Service;

use crate::subject::Subject;
use crate::trace::{ENDPOINT, Kind, Trace, What};

type AppBody = UnsyncBoxBody<Bytes, std::io::Error>;

/// The layer in a server in this process.
pub(crate) fn subject() -> Result<Subject> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let addr = listener.local_addr()?;
    let load = Load::new(TrackerConfig::default());
    let orca = Orca { format: Some(OrcaFormat::Text), ..Orca::default() };
    let layer = PrequalLayer::new(load.clone(), addr.into()).orca(orca);
    handle().spawn(serve(listener, layer));
    let ended = move || {
        let outcomes = [Outcome::Success, Outcome::Failure, Outcome::Aborted, Outcome::Streaming];
        Ok(outcomes.map(|outcome| load.counters().ended(outcome)))
    };
    Ok(Subject::own("tower", addr, play, ended))
}

async fn serve(listener: std::net::TcpListener, layer: PrequalLayer) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    while let Ok((tcp, _)) = listener.accept().await {
        let layer = layer.clone();
        let service = service_fn(move |request| layer.layer(Application).call(request));
        tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(tcp), service));
    }
}

#[derive(Clone)]
struct Application;

impl<B: Send + 'static> Service<Request<B>> for Application {
    type Response = Response<AppBody>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = std::io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let uri = request.uri().clone();
        Box::pin(async move {
            let ms = uri.query().and_then(|query| query.strip_prefix("ms=")?.parse().ok()).unwrap_or(0);
            tokio::time::sleep(Duration::from_millis(ms)).await;
            answer(uri.path()).await
        })
    }
}

async fn answer(path: &str) -> std::io::Result<Response<AppBody>> {
    let text = |status, text: &'static str| {
        let body = Full::new(Bytes::from_static(text.as_bytes())).map_err(|never| match never {});
        let mut response = Response::new(body.boxed_unsync());
        *response.status_mut() = status;
        response
    };
    Ok(match path {
        "/ok" => text(StatusCode::OK, "ok"),
        "/empty" => text(StatusCode::OK, ""),
        "/missing" => text(StatusCode::NOT_FOUND, "missing"),
        "/error" => text(StatusCode::INTERNAL_SERVER_ERROR, "error"),
        "/panic" => return Err(std::io::Error::other("no answer, on purpose")),
        "/hang" => std::future::pending().await,
        "/break" | "/events" => {
            let (mut sender, body) = Channel::new(1);
            let mut response = Response::new(body.boxed_unsync());
            let breaks = path == "/break";
            if !breaks {
                let kind = header::HeaderValue::from_static("text/event-stream");
                response.headers_mut().insert(header::CONTENT_TYPE, kind);
            }
            tokio::spawn(async move {
                let _ = sender.send(Frame::data(Bytes::from_static(b"data: 1\n\n"))).await;
                if breaks {
                    // Let the first chunk leave before the abort.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    sender.abort(std::io::Error::other("broken off on purpose"));
                } else {
                    std::future::pending().await
                }
            });
            response
        }
        "/large" => Response::new(Large(32 << 20).map_err(|never| match never {}).boxed_unsync()),
        "/lies" => {
            let mut response = text(StatusCode::OK, "lies");
            for name in ["x-prequal-load", "endpoint-load-metrics", "endpoint-load-metrics-bin"] {
                response.headers_mut().insert(name, header::HeaderValue::from_static("a lie"));
            }
            response
        }
        _ => text(StatusCode::IM_A_TEAPOT, "the application's"),
    })
}

/// A body with this many bytes left, sent in small pieces.
struct Large(u64);

impl Body for Large {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        static PART: [u8; 1 << 16] = [0; 1 << 16];
        if self.0 == 0 {
            return Poll::Ready(None);
        }
        self.0 -= PART.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&PART)))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0)
    }
}

/// An application that answers when a trace says so.
#[derive(Clone)]
struct Scripted(Arc<std::sync::Mutex<Option<oneshot::Receiver<Response<TraceBody>>>>>);

type TraceBody = Channel<Bytes, Infallible>;
/// The application's end of a response, and the server's.
type Begun = (channel::Sender<Bytes, Infallible>, Pin<Box<PrequalBody<TraceBody>>>);

impl Service<Request<Empty<Bytes>>> for Scripted {
    type Response = Response<TraceBody>;
    type Error = oneshot::error::RecvError;
    type Future = oneshot::Receiver<Response<TraceBody>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Empty<Bytes>>) -> Self::Future {
        let next = self.0.lock().ok().and_then(|mut next| next.take());
        // A trace sets the receiver before each call.
        next.unwrap_or_else(|| oneshot::channel().1)
    }
}

/// The state of a request in a trace.
struct InFlight {
    answer: Option<oneshot::Sender<Response<TraceBody>>>,
    call: Pin<Box<PrequalFuture<oneshot::Receiver<Response<TraceBody>>>>>,
    body: Option<Begun>,
}

/// Plays a trace by calling the layer and polling the futures that it returns.
fn play(trace: &Trace) -> Result<String> {
    let clock = Arc::new(AtomicU64::new(trace.begin));
    let reader = clock.clone();
    let load = Load::with_clock(TrackerConfig::default(), move || Micros(reader.load(Ordering::Relaxed)));
    let orca = Orca {
        format: Some(if trace.json { OrcaFormat::Json } else { OrcaFormat::Text }),
        limit: trace.limit.try_into().ok(),
        window: Duration::from_micros(trace.window_us),
        ..Orca::default()
    };
    let layer = PrequalLayer::new(load, ENDPOINT.parse()?).orca(orca);
    let script = Scripted(Arc::default());
    let mut service = layer.layer(script.clone());
    let mut requests: BTreeMap<u32, InFlight> = BTreeMap::new();
    let mut cx = Context::from_waker(Waker::noop());
    let mut lines = String::new();
    for event in &trace.events {
        clock.store(event.at, Ordering::Relaxed);
        match event.what {
            What::Start(id) => {
                let (answer, receiver) = oneshot::channel();
                *script.0.lock().ok().context("a lock")? = Some(receiver);
                let call = Box::pin(service.call(Request::get("/").body(Empty::new())?));
                requests.insert(id, InFlight { answer: Some(answer), call, body: None });
            }
            What::Probe => lines += &probe(&mut service, &mut cx)?,
            What::Head(id, kind) => {
                let request = requests.get_mut(&id).context("no such request")?;
                lines += &head(request, kind, &mut cx)?;
            }
            What::Wait(id) => {
                let (sender, body) = body(&mut requests, id)?;
                sender.try_send(Frame::data(Bytes::from_static(b"x"))).ok().context("room")?;
                anyhow::ensure!(body.as_mut().poll_frame(&mut cx).is_ready());
            }
            What::Back(id) => {
                let (_, body) = body(&mut requests, id)?;
                anyhow::ensure!(body.as_mut().poll_frame(&mut cx).is_pending());
            }
            What::Finish(id) => {
                let (sender, mut body) =
                    requests.remove(&id).and_then(|request| request.body).context("a body")?;
                drop(sender);
                anyhow::ensure!(matches!(body.as_mut().poll_frame(&mut cx), Poll::Ready(None)));
            }
            What::Abort(id) => drop(requests.remove(&id).context("no such request")?),
        }
    }
    Ok(lines)
}

fn body(requests: &mut BTreeMap<u32, InFlight>, id: u32) -> Result<&mut Begun> {
    requests.get_mut(&id).and_then(|request| request.body.as_mut()).context("a body")
}

fn probe(service: &mut Prequal<Scripted>, cx: &mut Context<'_>) -> Result<String> {
    let mut call = Box::pin(service.call(Request::get("/prequal/probe").body(Empty::new())?));
    let Poll::Ready(answer) = call.as_mut().poll(cx) else { bail!("probes are answered at once") };
    Ok(format!("{}\n", answer?.headers()["x-prequal-load"].to_str()?))
}

fn head(request: &mut InFlight, kind: Kind, cx: &mut Context<'_>) -> Result<String> {
    let (sender, body) = Channel::new(1);
    let mut response = Response::new(body);
    match kind {
        Kind::Ok => {}
        Kind::Fail => *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR,
        Kind::Stream => {
            let kind = header::HeaderValue::from_static("text/event-stream");
            response.headers_mut().insert(header::CONTENT_TYPE, kind);
        }
    }
    request.answer.take().context("one answer")?.send(response).ok().context("it waits")?;
    let Poll::Ready(answer) = request.call.as_mut().poll(cx) else { bail!("the answer is there") };
    let (head, body) = answer?.into_parts();
    request.body = Some((sender, Box::pin(body)));
    let field =
        |name| Ok::<_, anyhow::Error>(head.headers.get(name).context("a report")?.to_str()?.to_owned());
    Ok(format!("{}\t{}\n", field("x-prequal-load")?, field("endpoint-load-metrics")?))
}
