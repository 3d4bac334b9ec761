//! The functions of the ABI that the SDK calls.

use std::slice;

use proxy_wasm::types::{BufferType, Bytes, LogLevel, MapType, MetricType, Status};

use super::{Call, Headers, note, value_of, with};

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
    buffer: BufferType,
    start: usize,
    max: usize,
    data: *mut *mut u8,
    size: *mut usize,
) -> Status {
    let all = with(|state| match buffer {
        BufferType::HttpResponseBody => state.body.clone(),
        _ => state.config.clone(),
    });
    give(all.into_iter().skip(start).take(max).collect(), data, size)
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

/// Functions that the SDK could call, but this filter never uses.
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
