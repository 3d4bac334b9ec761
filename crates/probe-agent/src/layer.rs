//! Tower layer for an application that reports its own load, without an agent beside it.
//!
//! The layer answers probes, counts all other requests, and puts the report on responses. The application must supply
//! its own endpoint, because a layer does not see the connection.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use pin_project_lite::pin_project;
// Types that an application passes in. With these re-exports, it need not depend on the core.
pub use prequal_core::server::affinity::Hint;
pub use prequal_core::server::tracker::TrackerConfig;
pub use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::outcome::Outcome;
use prequal_core::wire::probe::Route;
use tower_layer::Layer;
use tower_service::Service;

use crate::body::TrackedBody;
use crate::hint::Hook;
use crate::load::{InFlight, Load};
use crate::orca::Orca;
use crate::probe;
pub use crate::reporter::Report;
use crate::reporter::Reporter;
use crate::utilization::Utilization;

/// Wraps a service so that it reports its load. Clone it freely: one [`Load`] counts the requests of all clones.
///
/// ```
/// use probe_agent::layer::{PrequalLayer, TrackerConfig};
/// use probe_agent::load::Load;
///
/// let load = Load::new(TrackerConfig::default());
/// let layer = PrequalLayer::new(load, "10.0.0.7:8080".parse().unwrap());
/// ```
#[derive(Clone)]
pub struct PrequalLayer {
    reporter: Reporter,
    endpoint: Endpoint,
}

impl PrequalLayer {
    /// Creates a layer that reports `load` in replies to probes and on every response. Reports name the replica by
    /// `endpoint`, the address under which clients know it.
    pub fn new(load: Load, endpoint: Endpoint) -> Self {
        let reporter =
            Reporter { load, report: Report::Always, hints: None, utilization: None, orca: Orca::default() };
        Self { reporter, endpoint }
    }

    /// Sets where load is reported. Default [`Report::Always`].
    #[must_use]
    pub fn report(mut self, report: Report) -> Self {
        self.reporter.report = report;
        self
    }

    /// Sets the hook that decides the load in replies to probes with a query hint. Default: none, so all probes get the
    /// same load. Requests keep their hint on their way to the application.
    ///
    /// ```
    /// # use probe_agent::{hint::Hook, layer::{Hint, PrequalLayer, TrackerConfig}, load::Load};
    /// # let load = Load::new(TrackerConfig::default());
    /// # let layer = PrequalLayer::new(load, "10.0.0.7:8080".parse().unwrap());
    /// # fn is_cached(_: &str) -> bool { true }
    /// let layer = layer.hints(Hook::new(|hint: Hint<'_>| if is_cached(hint.as_str()) { 10 } else { 1 }));
    /// ```
    #[must_use]
    pub fn hints(mut self, hook: Hook) -> Self {
        self.reporter.hints = Some(hook);
        self
    }

    /// Also reports utilisation on responses. Default off.
    #[must_use]
    pub fn utilization(mut self, utilization: Utilization) -> Self {
        self.reporter.utilization = Some(utilization);
        self
    }

    /// Also reports load in ORCA format on responses. Default off. The layer has no out-of-band streams of reports.
    #[must_use]
    pub fn orca(mut self, orca: Orca) -> Self {
        self.reporter.load.count_rates(orca.window);
        self.reporter.orca = orca;
        self
    }
}

impl<S> Layer<S> for PrequalLayer {
    type Service = Prequal<S>;

    fn layer(&self, inner: S) -> Prequal<S> {
        Prequal { inner, layer: self.clone() }
    }
}

/// Service made by [`PrequalLayer`].
#[derive(Clone)]
pub struct Prequal<S> {
    inner: S,
    layer: PrequalLayer,
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for Prequal<S>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    ResBody: Body<Data = Bytes>,
{
    type Response = Response<PrequalBody<ResBody>>;
    type Error = S::Error;
    type Future = PrequalFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, req: Request<ReqBody>) -> Self::Future {
        let own = match probe::route(req.method(), req.uri().path()) {
            Route::Forward => {
                let guard = Some(self.layer.reporter.load.start());
                let hint = self.layer.reporter.hint_of(req.headers());
                let call = self.inner.call(req);
                return PrequalFuture { state: State::Call { call, guard, hint, layer: self.layer.clone() } };
            }
            Route::Probe => {
                self.layer.reporter.load.counters().count_probe(false);
                self.layer.reporter.answer(self.layer.endpoint, None, req.headers())
            }
            Route::MethodNotAllowed => probe::method_not_allowed(),
            Route::NotFound => probe::plain(StatusCode::NOT_FOUND, "not found\n"),
        };
        PrequalFuture { state: State::Own { response: Some(own) } }
    }
}

pin_project! {
    /// Future of [`Prequal`]. Dropping it ends its request as aborted.
    pub struct PrequalFuture<F> {
        #[pin]
        state: State<F>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F> {
        Own { response: Option<Response<Bytes>> },
        Call { #[pin] call: F, guard: Option<InFlight>, hint: Option<HeaderValue>, layer: PrequalLayer },
    }
}

impl<F, B, E> Future for PrequalFuture<F>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: Body<Data = Bytes>,
{
    type Output = Result<Response<PrequalBody<B>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProj::Own { response } => match response.take() {
                Some(response) => Poll::Ready(Ok(response.map(PrequalBody::own))),
                None => Poll::Pending,
            },
            StateProj::Call { call, guard, hint, layer } => {
                let answer = ready!(call.poll(cx));
                let Some(guard) = guard.take() else { return Poll::Pending };
                match answer {
                    Ok(response) => Poll::Ready(Ok(finish(response, guard, hint.as_ref(), layer))),
                    Err(error) => {
                        guard.finish(Outcome::Failure);
                        Poll::Ready(Err(error))
                    }
                }
            }
        }
    }
}

fn finish<B: Body<Data = Bytes>>(
    response: Response<B>,
    mut guard: InFlight,
    hint: Option<&HeaderValue>,
    layer: &PrequalLayer,
) -> Response<PrequalBody<B>> {
    let (mut head, body) = response.into_parts();
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        // The layer does not see the upgraded connection, so the request ends here and gives no latency sample.
        guard.mark_streaming();
    }
    let body = TrackedBody::new(body, guard, head.status, &head.headers);
    layer.reporter.served(hint, head.status, body.failed());
    layer.reporter.stamp(&mut head.headers, layer.endpoint, None, body.leaving());
    Response::from_parts(head, PrequalBody::application(body))
}

pin_project! {
    /// Response body of [`Prequal`].
    pub struct PrequalBody<B> {
        #[pin]
        kind: BodyKind<B>,
    }
}

pin_project! {
    #[project = BodyKindProj]
    enum BodyKind<B> {
        Own { body: Full<Bytes> },
        Application { #[pin] body: TrackedBody<B> },
    }
}

impl<B> PrequalBody<B> {
    fn own(text: Bytes) -> Self {
        Self { kind: BodyKind::Own { body: Full::new(text) } }
    }

    fn application(body: TrackedBody<B>) -> Self {
        Self { kind: BodyKind::Application { body } }
    }
}

impl<B: Body<Data = Bytes>> Body for PrequalBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            BodyKindProj::Own { body } => Pin::new(body).poll_frame(cx).map_err(|never| match never {}),
            BodyKindProj::Application { body } => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            BodyKind::Own { body } => body.is_end_stream(),
            BodyKind::Application { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            BodyKind::Own { body } => body.size_hint(),
            BodyKind::Application { body } => body.size_hint(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hint::HintHook;
    use crate::load::HintSeen;
    use http_body_util::{BodyExt, Empty};
    use prequal_core::server::tracker::TrackerConfig;
    use std::convert::Infallible;
    use std::num::NonZeroU32;
    use std::sync::{Arc, Mutex};

    #[derive(Clone)]
    struct App(u16);

    impl Service<Request<Empty<Bytes>>> for App {
        type Response = Response<Full<Bytes>>;
        type Error = Infallible;
        type Future = std::future::Ready<Result<Self::Response, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request<Empty<Bytes>>) -> Self::Future {
            let mut response = Response::new(Full::new(Bytes::from_static(b"hello")));
            *response.status_mut() = StatusCode::from_u16(self.0).unwrap();
            std::future::ready(Ok(response))
        }
    }

    fn get(path: &str) -> Request<Empty<Bytes>> {
        Request::get(path).body(Empty::new()).unwrap()
    }

    #[tokio::test]
    async fn an_application_reports_its_own_load() {
        let load = Load::new(TrackerConfig::default());
        let layer = PrequalLayer::new(load.clone(), "10.0.0.7:80".parse().unwrap());
        let mut service = layer.layer(App(200));
        let response = service.call(get("/x")).await.unwrap();
        let report = response.headers()["x-prequal-load"].to_str().unwrap();
        assert!(report.starts_with("0;;10.0.0.7:80;up=0;base="), "the ending request is left out: {report}");
        assert!(report.ends_with(";knee=1;open=1;rse=100"), "the ending request counts as served: {report}");
        assert_eq!(load.rif(), 1);
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "hello");
        assert_eq!(load.rif(), 0);
        let probe = service.call(get("/prequal/probe")).await.unwrap();
        assert_eq!(probe.headers()["x-prequal-rif"], "0");
        assert_eq!(service.call(get("/prequal/x")).await.unwrap().status(), 404);
        assert_eq!(load.counters().ended(Outcome::Success), 1);
    }

    /// An application that knows the contents of its cache.
    #[derive(Default)]
    struct Cache {
        served: Mutex<Vec<String>>,
    }

    impl HintHook for Arc<Cache> {
        fn divisor(&self, hint: Hint<'_>) -> u32 {
            if self.served.lock().unwrap().iter().any(|served| served == hint.as_str()) { 10 } else { 0 }
        }

        fn served(&self, hint: Hint<'_>) {
            self.served.lock().unwrap().push(hint.as_str().to_owned());
        }
    }

    #[tokio::test]
    async fn the_hook_of_an_application_sees_served_hints_and_scales_replies() {
        let load = Load::new(TrackerConfig::default());
        let cache = Arc::new(Cache::default());
        let layer = PrequalLayer::new(load.clone(), "10.0.0.7:80".parse().unwrap())
            .hints(Hook::new(cache.clone()))
            .utilization(Utilization { max: NonZeroU32::new(40).unwrap(), target: None });
        let in_flight: Vec<_> = (0..20).map(|_| load.start()).collect();
        let with = |path: &str, hint: &str| {
            let mut request = get(path);
            request.headers_mut().insert("x-prequal-hint", hint.parse().unwrap());
            request
        };
        for (status, hint) in [(200, "warm"), (500, "broken"), (404, "missing"), (200, "no hint")] {
            let response = layer.layer(App(status)).call(with("/x", hint)).await.unwrap();
            assert_eq!(response.headers()["x-prequal-load"].to_str().unwrap().split(';').next(), Some("20"));
            assert_eq!(response.headers()["x-netflix.server.utilization"], "50");
            let _ = response.into_body().collect().await;
        }
        assert_eq!(*cache.served.lock().unwrap(), ["warm"], "only hints of successful requests");
        let rif = async |hint: &str| {
            let probe = layer.layer(App(200)).call(with("/prequal/probe", hint)).await.unwrap();
            (
                probe.headers()["x-prequal-rif"].to_str().unwrap().to_owned(),
                probe.headers()["x-prequal-load"].clone(),
            )
        };
        assert_eq!(rif("warm").await.0, "2");
        assert!(rif("warm").await.1.to_str().unwrap().ends_with(";scaled=10"));
        assert_eq!(rif("cold").await.0, "20");
        assert!(!rif("cold").await.1.to_str().unwrap().contains("scaled"));
        let hints =
            [HintSeen::Scaled, HintSeen::Unscaled, HintSeen::Ignored].map(|seen| load.counters().hints(seen));
        assert_eq!(hints, [2, 2, 1]);
        drop(in_flight);
    }

    #[tokio::test]
    async fn dropped_and_failed_calls_end() {
        let load = Load::new(TrackerConfig::default());
        let layer = PrequalLayer::new(load.clone(), "10.0.0.7:80".parse().unwrap()).report(Report::ProbeOnly);
        drop(layer.layer(App(200)).call(get("/x")));
        let response = layer.layer(App(500)).call(get("/x")).await.unwrap();
        assert!(!response.headers().contains_key("x-prequal-load"));
        let _ = response.into_body().collect().await;
        assert_eq!(load.rif(), 0);
        assert_eq!([Outcome::Aborted, Outcome::Failure].map(|o| load.counters().ended(o)), [1, 1]);
    }
}
