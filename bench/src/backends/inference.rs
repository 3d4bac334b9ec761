//! How a replica with an inference engine handles requests: it runs the iterations, and streams the tokens.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, header};
use hyper::body::{Body, Frame};
use tokio::sync::{Notify, mpsc};

use super::clock::Clock;
use super::engine::{Chunk, Engine, EngineSpec, Sequence};
use super::{Answers, CACHE_HEADER, CONTEXT_HEADER, GENERATED_HEADER, KEY_HEADER, Tokens};

/// A running engine.
pub(super) struct Inference {
    engine: Mutex<Engine>,
    /// Wakes an engine that has nothing to do.
    arrived: Notify,
    answers: Answers,
}

impl Inference {
    /// Starts an engine that runs until its runtime ends. Must be called within a runtime.
    pub(super) fn start(spec: EngineSpec, answers: Answers, clock: Arc<Clock>) -> Arc<Self> {
        let engine = Mutex::new(Engine::new(spec));
        let inference = Arc::new(Self { engine, arrived: Notify::new(), answers });
        tokio::spawn(inference.clone().run(clock));
        inference
    }

    async fn run(self: Arc<Self>, clock: Arc<Clock>) {
        // The scheduled end of the last iteration, so that the lateness of a busy machine does not add up.
        let mut at = Instant::now();
        loop {
            let begun = self.engine().begin();
            match begun {
                Some(time) => {
                    at += time;
                    clock.sleep_until(at).await;
                    self.engine().finish();
                }
                None => {
                    self.arrived.notified().await;
                    at = Instant::now();
                }
            }
        }
    }

    fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the first token and returns the response; `None` if the engine could never serve the request.
    pub(super) async fn answer(&self, request: &HeaderMap) -> Option<Response<TokenStream>> {
        let text = |name| request.get(name).and_then(|value| value.to_str().ok());
        let number = |name| text(name).and_then(|text| text.parse().ok()).unwrap_or(1);
        let tokens = Tokens { context: number(CONTEXT_HEADER), generated: number(GENERATED_HEADER) };
        let (client, mut chunks) = mpsc::unbounded_channel();
        let key = text(KEY_HEADER).map(str::to_owned);
        if !self.engine().submit(Sequence { key, tokens, client }) {
            return None;
        }
        self.arrived.notify_one();
        let first = chunks.recv().await?;
        let mut response = Response::new(TokenStream { first: Some(first), chunks });
        let cache = if first.hit { "hit" } else { "miss" };
        response.headers_mut().insert(CACHE_HEADER, HeaderValue::from_static(cache));
        let content_type = match self.answers {
            Answers::EventStream => "text/event-stream",
            Answers::Plain => "text/plain",
        };
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        Some(response)
    }
}

/// The body of an answer, chunk by chunk.
pub(super) struct TokenStream {
    first: Option<Chunk>,
    chunks: mpsc::UnboundedReceiver<Chunk>,
}

impl Body for TokenStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let event = |chunk: Chunk| Ok(Frame::data(Bytes::from(format!("data: {}\n\n", chunk.generated))));
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(event(first)));
        }
        self.chunks.poll_recv(context).map(|chunk| chunk.map(event))
    }
}
