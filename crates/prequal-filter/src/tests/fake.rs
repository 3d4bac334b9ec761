//! A fake Envoy for testing the module natively. This file has the fake's state and the callbacks with which the fake
//! drives the module. Each test runs on its own thread and has its own state. [`abi`] has the functions that the module
//! calls. The fake logs these calls in order. The SDK in between is the real one, with its dispatch, its borrows and
//! its panics.

mod abi;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Mutex;

use prequal_core::wire::report::HEADER_LOAD;
use proxy_wasm::types::{Action, Bytes, MapType};

/// The root context of every test.
pub(super) const ROOT: u32 = 1;

type Headers = Vec<(String, String)>;

/// An HTTP call that was sent and has not been answered.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) token: u32,
    pub(super) headers: Headers,
    pub(super) timeout_ms: u32,
}

#[derive(Default)]
struct State {
    now_us: u64,
    /// The context whose maps and properties are in effect.
    context: u32,
    config: Bytes,
    /// The part of the response's body that is being delivered.
    body: Bytes,
    maps: HashMap<(u32, u32), Headers>,
    properties: HashMap<(u32, String), Bytes>,
    shared: HashMap<String, (Bytes, u32)>,
    writes: u32,
    metrics: Vec<(String, i64)>,
    calls: Vec<Call>,
    tokens: u32,
    /// Whether HTTP calls are refused.
    unreachable: bool,
    log: Vec<String>,
}

static INITIALIZE: Mutex<()> = Mutex::new(());

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

fn with<T>(access: impl FnOnce(&mut State) -> T) -> T {
    STATE.with_borrow_mut(access)
}

fn note(call: String) {
    with(|state| state.log.push(call));
}

unsafe extern "C" {
    safe fn _initialize();
    safe fn proxy_on_context_create(context: u32, root: u32);
    safe fn proxy_on_configure(root: u32, size: usize) -> bool;
    safe fn proxy_on_tick(root: u32);
    safe fn proxy_on_request_headers(context: u32, count: usize, end: bool) -> Action;
    safe fn proxy_on_request_body(context: u32, size: usize, end: bool) -> Action;
    safe fn proxy_on_response_headers(context: u32, count: usize, end: bool) -> Action;
    safe fn proxy_on_response_body(context: u32, size: usize, end: bool) -> Action;
    safe fn proxy_on_response_trailers(context: u32, count: usize) -> Action;
    safe fn proxy_on_http_call_response(root: u32, token: u32, headers: usize, body: usize, trailers: usize);
    safe fn proxy_on_delete(context: u32);
}

/// Starts a worker with this configuration. Returns whether it is accepted.
pub(super) fn start(config: &str) -> bool {
    with(|state| (state.now_us, state.config) = (1_000_000_000, config.into()));
    {
        // The SDK sets its logger once for all threads, without a lock.
        let _alone = INITIALIZE.lock();
        _initialize();
    }
    proxy_on_context_create(ROOT, 0);
    proxy_on_configure(ROOT, config.len())
}

pub(super) fn pass(us: u64) {
    with(|state| state.now_us += us);
}

pub(super) fn tick() {
    with(|state| state.context = ROOT);
    proxy_on_tick(ROOT);
}

/// Returns the host calls since the last call of this function.
pub(super) fn log() -> Vec<String> {
    with(|state| std::mem::take(&mut state.log))
}

pub(super) fn refuse_calls(refuse: bool) {
    with(|state| state.unreachable = refuse);
}

pub(super) fn set_property(context: u32, path: &str, value: &str) {
    with(|state| state.properties.insert((context, path.into()), value.into()));
}

pub(super) fn set_number(context: u32, path: &str, value: u64) {
    with(|state| state.properties.insert((context, path.into()), value.to_le_bytes().into()));
}

/// Returns the sum of the metrics whose names begin with `name`, after the worker has passed its counts on.
pub(super) fn metric(name: &str) -> i64 {
    tick();
    with(|state| {
        state.metrics.iter().filter(|(known, _)| known.starts_with(name)).map(|(_, value)| value).sum()
    })
}

/// Returns the HTTP calls that have been sent, and clears the list.
pub(super) fn calls() -> Vec<Call> {
    with(|state| std::mem::take(&mut state.calls))
}

/// Simulates a write by another worker of the same Envoy to every key with this ending.
pub(super) fn touch(key: &str) {
    with(|state| {
        for (known, (_, number)) in &mut state.shared {
            if known.ends_with(key) {
                state.writes += 1;
                *number = state.writes;
            }
        }
    });
}

impl Call {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| &**value)
    }

    /// Delivers the reply; without headers, it is a reply that was cut off.
    pub(super) fn reply(&self, headers: &[(&str, &str)]) {
        set_map(ROOT, MapType::HttpCallResponseHeaders, headers);
        proxy_on_http_call_response(ROOT, self.token, headers.len(), 0, 0);
    }

    /// Delivers an answer of the probed replica with this load.
    pub(super) fn answer(&self, rif: u32, latency_us: u32) {
        let replica = self.header("x-prequal-dest").expect("an address");
        self.reply(&[(":status", "200"), (HEADER_LOAD, &format!("{rif};{latency_us};{replica}"))]);
    }
}

/// One request as Envoy sees it.
pub(super) struct Stream(pub(super) u32);

impl Stream {
    /// Begins a request. Returns it with the filter's action.
    pub(super) fn begin(id: u32, headers: &[(&str, &str)]) -> (Self, Action) {
        Self::upload(id, headers, true)
    }

    /// Begins a request whose body is still to come unless `end` is true.
    pub(super) fn upload(id: u32, headers: &[(&str, &str)], end: bool) -> (Self, Action) {
        proxy_on_context_create(id, ROOT);
        set_map(id, MapType::HttpRequestHeaders, headers);
        (Self(id), proxy_on_request_headers(id, headers.len(), end))
    }

    /// Delivers the rest of the client's request.
    pub(super) fn uploaded(&self) {
        with(|state| state.context = self.0);
        assert!(proxy_on_request_body(self.0, 1, true) == Action::Continue);
    }

    pub(super) fn request_header(&self, name: &str) -> Option<String> {
        value_of(self.0, MapType::HttpRequestHeaders, name)
    }

    pub(super) fn property(&self, path: &str, value: &str) {
        set_property(self.0, path, value);
    }

    pub(super) fn headers(&self, headers: &[(&str, &str)], end: bool) {
        set_map(self.0, MapType::HttpResponseHeaders, headers);
        assert!(proxy_on_response_headers(self.0, headers.len(), end) == Action::Continue);
    }

    pub(super) fn body(&self, end: bool) {
        self.data(b" ", end);
    }

    /// Delivers a part of the response's body.
    pub(super) fn data(&self, part: &[u8], end: bool) {
        with(|state| (state.context, state.body) = (self.0, part.into()));
        assert!(proxy_on_response_body(self.0, part.len(), end) == Action::Continue);
    }

    pub(super) fn trailers(&self, trailers: &[(&str, &str)]) {
        set_map(self.0, MapType::HttpResponseTrailers, trailers);
        assert!(proxy_on_response_trailers(self.0, trailers.len()) == Action::Continue);
    }

    /// Ends the request, whatever its outcome.
    pub(super) fn end(self) {
        with(|state| state.context = self.0);
        proxy_on_delete(self.0);
    }
}

fn set_map(context: u32, map: MapType, headers: &[(&str, &str)]) {
    let headers = headers.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
    with(|state| {
        state.context = context;
        state.maps.insert((context, map as u32), headers);
    });
}

fn value_of(context: u32, map: MapType, name: &str) -> Option<String> {
    let headers = with(|state| state.maps.get(&(context, map as u32)).cloned())?;
    headers.into_iter().find(|(key, _)| key == name).map(|(_, value)| value)
}
