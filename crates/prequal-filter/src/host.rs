//! Host calls in the form that this filter needs: every failure is returned as data.
//!
//! Only the SDK's byte forms are used: its string forms panic on header values that are not UTF-8.

use std::ptr;

use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;
use prequal_core::wire::headers;
use proxy_wasm::hostcalls;
use proxy_wasm::types::{LogLevel, MapType, Status};

/// Queue id that Envoy never assigns.
pub(crate) const WAKE: u32 = u32::MAX;

unsafe extern "C" {
    /// Exported by the SDK as part of the ABI.
    safe fn proxy_on_queue_ready(root_id: u32, queue_id: u32);

    /// Declared here because the SDK's own call returns a date. Converting that to microseconds takes a 128-bit
    /// multiplication, which wasm does not have.
    fn proxy_get_current_time_nanoseconds(time: *mut u64) -> Status;

    /// Declared here because the SDK's own call turns every header into two strings.
    fn proxy_get_header_map_pairs(map: MapType, data: *mut *mut u8, size: *mut usize) -> Status;
}

/// Wakes the root. Before this call returns, the root handles the work that a stream has left for it, in the root's own
/// context. Call this only as the last step of a stream's callback, because the root is the active context afterwards.
/// Nothing that the root needs may be borrowed during the call.
pub(crate) fn wake(root_id: u32) {
    proxy_on_queue_ready(root_id, WAKE);
}

/// Returns the host's clock, microseconds since the epoch.
pub(crate) fn now() -> Micros {
    let mut nanoseconds = 0;
    // SAFETY: the host writes to this address, or leaves it alone.
    let _ = unsafe { proxy_get_current_time_nanoseconds(&raw mut nanoseconds) };
    Micros(nanoseconds / 1000)
}

/// Returns a header's value; `None` when absent.
pub(crate) fn header_bytes(map: MapType, name: &str) -> Option<Vec<u8>> {
    hostcalls::get_map_value_bytes(map, name).ok()?
}

/// Returns a header's value; `None` when absent or not UTF-8.
pub(crate) fn header(map: MapType, name: &str) -> Option<String> {
    String::from_utf8(header_bytes(map, name)?).ok()
}

/// All headers of a map, read at once: each host call is expensive, and so is the memory that the host requests for
/// its answer.
pub(crate) struct Headers(Vec<u8>);

impl Headers {
    /// Reads the headers of the map; none if there is no such map.
    pub(crate) fn of(map: MapType) -> Self {
        let (mut data, mut size) = (ptr::null_mut(), 0);
        // SAFETY: the host writes to the two addresses, or leaves them alone. It returns memory that the SDK allocated
        // as a vector of this capacity.
        let bytes = unsafe {
            match proxy_get_header_map_pairs(map, &raw mut data, &raw mut size) {
                Status::Ok if !data.is_null() => Vec::from_raw_parts(data, size, size),
                _ => Vec::new(),
            }
        };
        Self(bytes)
    }
}

impl headers::Headers for Headers {
    #[inline(never)]
    fn get(&self, name: &str) -> Option<&[u8]> {
        self.all(name).next()
    }

    /// The ABI's format is the number of headers, then the sizes of each name and value, then the names and values,
    /// each followed by a zero byte.
    fn all<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        let (count, rest) = number(&self.0).unwrap_or_default();
        let (mut sizes, mut texts) = rest.split_at_checked(count.saturating_mul(8)).unwrap_or_default();
        std::iter::from_fn(move || {
            loop {
                let (name_size, rest) = number(sizes)?;
                let (value_size, rest) = number(rest)?;
                sizes = rest;
                let (found, rest) = texts.split_at_checked(name_size)?;
                let (value, rest) = rest.get(1..)?.split_at_checked(value_size)?;
                texts = rest.get(1..)?;
                if found == name.as_bytes() {
                    return Some(value);
                }
            }
        })
    }
}

/// Reads the number at the start, and returns it with the bytes that follow it.
fn number(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u32::from_le_bytes(*number) as usize, rest))
}

/// Sets a header, or removes it if `value` is `None`.
pub(crate) fn set_header(map: MapType, name: &str, value: Option<&[u8]>) {
    // Envoy refuses only if there is no such map. The SDK then panics instead of returning an error, so call this only
    // while the map exists.
    let _ = hostcalls::set_map_value_bytes(map, name, value);
}

/// Sets a header of the request, or removes it if `value` is `None`. Without either, the request stays as it is, because
/// Envoy evaluates the route again after every change of the headers.
pub(crate) fn set_request_header(name: &str, value: Option<&[u8]>) {
    let map = MapType::HttpRequestHeaders;
    if value.is_some() || header_bytes(map, name).is_some() {
        set_header(map, name, value);
    }
}

/// Returns a text property; `None` when absent.
pub(crate) fn text_property(path: &[&str]) -> Option<String> {
    let bytes = hostcalls::get_property(path.to_vec()).ok()??;
    String::from_utf8(bytes).ok()
}

/// Returns a numeric property; `None` when absent.
pub(crate) fn number_property(path: &[&str]) -> Option<u64> {
    let bytes = hostcalls::get_property(path.to_vec()).ok()??;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// Returns the address of the host that Envoy used last.
pub(crate) fn upstream_address() -> Option<Endpoint> {
    text_property(&["upstream", "address"])?.parse().ok()
}

/// Writes to Envoy's log.
pub(crate) fn log(level: LogLevel, message: &str) {
    // If a log line cannot be written, there is nowhere to report that.
    let _ = hostcalls::log(level, message);
}

/// Panics if the request asks for it.
#[cfg(feature = "crash-test")]
#[allow(clippy::panic, reason = "the crash test needs a crash")]
pub(crate) fn crash_on_demand() {
    if header(MapType::HttpRequestHeaders, "x-crash-prequal").is_some() {
        panic!("crash test");
    }
}
