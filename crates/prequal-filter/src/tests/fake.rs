//! A fake Envoy for testing the module natively. It implements the ABI functions that the SDK calls, with separate
//! state for each test's thread, and logs the calls in order. The SDK is the real one, with its dispatch, its borrows
//! and its panics.

use std::cell::RefCell;
use std::collections::HashMap;
use std::slice;
use std::sync::Mutex;

use prequal_core::wire::report::HEADER_LOAD;
use proxy_wasm::types::{Action, Bytes, LogLevel, MapType, MetricType, Status};

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

fn with<T>(look: impl FnOnce(&mut State) -> T) -> T {
    STATE.with_borrow_mut(look)
}

fn note(what: String) {
    with(|state| state.log.push(what));
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
        // The SDK sets its logger once for all threads, without taking a lock.
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
        with(|state| state.context = self.0);
        assert!(proxy_on_response_body(self.0, 1, end) == Action::Continue);
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

fn map_name(map: MapType) -> &'static str {
    match map {
        MapType::HttpRequestHeaders => "request",
        MapType::HttpResponseHeaders => "response",
        MapType::HttpCallResponseHeaders => "reply",
        _ => "trailers",
    }
}

/// Returns the text that the module passes.
fn text(data: *const u8, size: usize) -> String {
    String::from_utf8(bytes(data, size)).expect("text")
}

fn bytes(data: *const u8, size: usize) -> Bytes {
    if size == 0 {
        return Bytes::new();
    }
    // SAFETY: the SDK passes slices by address and size.
    unsafe { slice::from_raw_parts(data, size) }.into()
}

/// Hands bytes to the SDK, which turns them into a `Vec` of exactly that capacity.
fn give(value: Bytes, data: *mut *mut u8, size: *mut usize) -> Status {
    let value = value.into_boxed_slice();
    // SAFETY: the SDK passes two addresses to write to.
    unsafe {
        *size = value.len();
        *data = Box::into_raw(value).cast();
    }
    Status::Ok
}

fn set<T>(place: *mut T, value: T) -> Status {
    // SAFETY: the SDK passes an address to write to.
    unsafe { place.write(value) };
    Status::Ok
}

/// Parses a map as the ABI writes it.
fn parse_map(bytes: &[u8]) -> Headers {
    let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
    let count = if bytes.is_empty() { 0 } else { number(0) };
    let mut at = 4 + 8 * count;
    let mut take = |size: usize| {
        at += size + 1;
        String::from_utf8(bytes[at - size - 1..at - 1].to_vec()).expect("text")
    };
    (0..count).map(|n| (take(number(4 + 8 * n)), take(number(8 + 8 * n)))).collect()
}

fn write_map(headers: &Headers) -> Bytes {
    let mut bytes = (headers.len() as u32).to_le_bytes().to_vec();
    for (key, value) in headers {
        bytes.extend((key.len() as u32).to_le_bytes());
        bytes.extend((value.len() as u32).to_le_bytes());
    }
    for (key, value) in headers {
        bytes.extend([key.as_bytes(), b"\0", value.as_bytes(), b"\0"].concat());
    }
    bytes
}

#[unsafe(no_mangle)]
extern "C" fn proxy_log(_: LogLevel, data: *const u8, size: usize) -> Status {
    let said = text(data, size);
    // The SDK replaces the panic hook, so the message of a failed assertion arrives here.
    eprintln!("{said}");
    note(format!("log {said}"));
    Status::Ok
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_current_time_nanoseconds(time: *mut u64) -> Status {
    note("time".into());
    set(time, with(|state| state.now_us * 1000))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_set_tick_period_milliseconds(period: u32) -> Status {
    note(format!("tick in {period} ms"));
    Status::Ok
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_buffer_bytes(
    _: u32,
    _: usize,
    _: usize,
    data: *mut *mut u8,
    size: *mut usize,
) -> Status {
    give(with(|state| state.config.clone()), data, size)
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_header_map_pairs(map: MapType, data: *mut *mut u8, size: *mut usize) -> Status {
    note(format!("all {}", map_name(map)));
    let headers = with(|state| state.maps.get(&(state.context, map as u32)).cloned()).unwrap_or_default();
    give(write_map(&headers), data, size)
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_header_map_value(
    map: MapType,
    key: *const u8,
    key_size: usize,
    data: *mut *mut u8,
    size: *mut usize,
) -> Status {
    let key = text(key, key_size);
    note(format!("{} {key}", map_name(map)));
    match value_of(with(|state| state.context), map, &key) {
        Some(value) => give(value.into(), data, size),
        None => Status::NotFound,
    }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_replace_header_map_value(
    map: MapType,
    key: *const u8,
    key_size: usize,
    value: *const u8,
    value_size: usize,
) -> Status {
    let (key, value) = (text(key, key_size), text(value, value_size));
    note(format!("set {} {key}", map_name(map)));
    with(|state| {
        let headers = state.maps.entry((state.context, map as u32)).or_default();
        headers.retain(|(known, _)| *known != key);
        headers.push((key, value));
    });
    Status::Ok
}

#[unsafe(no_mangle)]
extern "C" fn proxy_remove_header_map_value(map: MapType, key: *const u8, size: usize) -> Status {
    let key = text(key, size);
    note(format!("remove {} {key}", map_name(map)));
    with(|state| {
        let headers = state.maps.entry((state.context, map as u32)).or_default();
        headers.retain(|(known, _)| *known != key);
    });
    Status::Ok
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_property(
    path: *const u8,
    path_size: usize,
    data: *mut *mut u8,
    size: *mut usize,
) -> Status {
    let path = text(path, path_size).replace('\0', ".");
    note(format!("property {path}"));
    match with(|state| state.properties.get(&(state.context, path)).cloned()) {
        Some(value) => give(value, data, size),
        None => Status::NotFound,
    }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_shared_data(
    key: *const u8,
    key_size: usize,
    data: *mut *mut u8,
    size: *mut usize,
    number: *mut u32,
) -> Status {
    let key = text(key, key_size);
    note(format!("read {}", key.rsplit('/').next().unwrap_or_default()));
    match with(|state| state.shared.get(&key).cloned()) {
        Some((value, at)) => {
            set(number, at);
            give(value, data, size)
        }
        None => Status::NotFound,
    }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_set_shared_data(
    key: *const u8,
    key_size: usize,
    data: *const u8,
    size: usize,
    number: u32,
) -> Status {
    let key = text(key, key_size);
    note(format!("write {}", key.rsplit('/').next().unwrap_or_default()));
    with(|state| {
        let known = state.shared.get(&key).map(|(_, number)| *number);
        if number != 0 && known.is_some_and(|known| known != number) {
            return Status::CasMismatch;
        }
        state.writes += 1;
        state.shared.insert(key, (bytes(data, size), state.writes));
        Status::Ok
    })
}

#[unsafe(no_mangle)]
extern "C" fn proxy_http_call(
    _upstream: *const u8,
    _upstream_size: usize,
    headers: *const u8,
    headers_size: usize,
    _body: *const u8,
    _body_size: usize,
    _trailers: *const u8,
    _trailers_size: usize,
    timeout_ms: u32,
    token: *mut u32,
) -> Status {
    let headers = parse_map(&bytes(headers, headers_size));
    note("call".into());
    with(|state| {
        if state.unreachable {
            return Status::BadArgument;
        }
        state.tokens += 1;
        state.calls.push(Call { token: state.tokens, headers, timeout_ms });
        set(token, state.tokens)
    })
}

#[unsafe(no_mangle)]
extern "C" fn proxy_set_effective_context(context: u32) -> Status {
    note(format!("as {context}"));
    with(|state| state.context = context);
    Status::Ok
}

#[unsafe(no_mangle)]
extern "C" fn proxy_continue_stream(_: u32) -> Status {
    note(format!("resume {}", with(|state| state.context)));
    Status::Ok
}

#[unsafe(no_mangle)]
extern "C" fn proxy_define_metric(_: MetricType, name: *const u8, size: usize, id: *mut u32) -> Status {
    let name = text(name, size);
    set(
        id,
        with(|state| {
            let known = state.metrics.iter().position(|(known, _)| *known == name);
            known.unwrap_or_else(|| {
                state.metrics.push((name, 0));
                state.metrics.len() - 1
            }) as u32
        }),
    )
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_metric(id: u32, value: *mut u64) -> Status {
    set(value, with(|state| state.metrics[id as usize].1 as u64))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_record_metric(id: u32, value: u64) -> Status {
    with(|state| state.metrics[id as usize].1 = value as i64);
    Status::Ok
}

#[unsafe(no_mangle)]
extern "C" fn proxy_increment_metric(id: u32, by: i64) -> Status {
    note("count".into());
    with(|state| state.metrics[id as usize].1 += by);
    Status::Ok
}

/// Functions that the SDK could call, but this module never does.
macro_rules! never {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> Status {
            unreachable!(stringify!($name))
        }
    )*};
}

never! {
    proxy_get_log_level proxy_set_buffer_bytes proxy_set_header_map_pairs proxy_add_header_map_value proxy_set_property
    proxy_register_shared_queue proxy_resolve_shared_queue proxy_dequeue_shared_queue proxy_enqueue_shared_queue
    proxy_close_stream proxy_send_local_response proxy_grpc_call proxy_grpc_stream proxy_grpc_send proxy_grpc_cancel
    proxy_grpc_close proxy_get_status proxy_call_foreign_function proxy_done
}
