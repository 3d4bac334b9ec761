//! Safe wrappers of Envoy's ABI, and the hooks that Envoy calls.
//!
//! The invariants that the unsafe blocks rely on, all guaranteed by Envoy:
//!
//! 1. Pointers that Envoy passes to a hook are valid during that hook; configurations, load balancers and filters also until
//!    their `destroy` hook. Wrappers with a lifetime exist only during a hook.
//! 2. A pointer that a `new` hook returned comes back unchanged, and not after the `destroy` hook.
//! 3. A load balancer and a filter are used by one thread alone. A policy's configuration is shared by all threads; what it
//!    holds here can be.
//! 4. Buffers are valid UTF-8 or not, but readable during the hook in which Envoy filled them in.
//!
//! A panic in a hook would end Envoy. [`guarded`] catches it and returns what does least harm: no host, an attempt without
//! report, no probe.

use std::ffi::c_char;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::OnceLock;

use prequal_core::client::headers::Headers;
use prequal_core::endpoint::Endpoint;
use prequal_core::report::HEADER_LOAD;

use crate::abi::*;
use crate::attempt::{self, Attempt};
use crate::hosts::{Host, Level, Place};
use crate::policy::{Policy, PolicyConfig};
use crate::prober;

/// Runs a hook. If it panics, the panic is logged and `otherwise` is the result.
fn guarded<T>(otherwise: T, hook: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(hook)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("unknown");
        log(LOG_ERROR, &format!("prequal: a panic was caught; please report it: {text}"));
        otherwise
    })
}

/// Writes a warning to Envoy's log.
pub(crate) fn warn(message: &str) {
    log(LOG_WARN, message);
}

fn log(level: u32, message: &str) {
    // SAFETY: Envoy reads the message during the call.
    unsafe { envoy_dynamic_module_callback_log(level, Buffer::of(message.as_bytes())) }
}

/// Returns whether this Envoy logs an attempt before it calls the last hook of the attempt's filter, as versions from 1.40 on
/// do. Those also have this function, which is not used otherwise.
pub(crate) fn logs_first() -> bool {
    static FIRST: OnceLock<bool> = OnceLock::new();
    *FIRST.get_or_init(|| {
        // SAFETY: the name is a C string; a null handle means all that is loaded.
        unsafe { !dlsym(ptr::null_mut(), c"envoy_dynamic_module_callback_log_v2".as_ptr()).is_null() }
    })
}

/// Returns the bytes of a buffer that Envoy has filled in.
///
/// # Safety
/// The buffer must be empty or readable for `'a` (invariant 4).
unsafe fn bytes<'a>(buffer: Buffer) -> &'a [u8] {
    if buffer.data.is_null() || buffer.length == 0 {
        return &[];
    }
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(buffer.data, buffer.length) }
}

/// Returns what is behind a pointer that a `new` hook of this module returned.
///
/// # Safety
/// `pointer` must come from [`give`] with the same type, and nobody else may use it during `'a` (invariants 1 to 3).
unsafe fn borrow<'a, T>(pointer: Ptr) -> Option<&'a mut T> {
    // SAFETY: as above.
    unsafe { pointer.cast::<T>().as_mut() }
}

/// Gives Envoy an object, which it returns to [`take_back`].
fn give<T>(object: T) -> Ptr {
    Box::into_raw(Box::new(object)).cast()
}

/// Takes back an object that Envoy is done with.
///
/// # Safety
/// `pointer` must come from [`give`] with the same type, and not be used again (invariant 2).
unsafe fn take_back<T>(pointer: Ptr) -> Option<T> {
    // SAFETY: as above.
    (!pointer.is_null()).then(|| *unsafe { Box::from_raw(pointer.cast::<T>()) })
}

/// All threads read a policy's configuration (invariant 3).
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<PolicyConfig>();
};

/// A counter; `None` if Envoy did not define it. Nothing is counted then, and balancing continues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counter(Option<usize>);

/// A gauge, which holds the last value written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gauge(Option<usize>);

/// Envoy's side of a policy's configuration, which keeps its metrics. Only the main thread uses it after the configuration has
/// been read, and only while its own policy exists, which keeps Envoy's side alive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LbConfig(Ptr);

// SAFETY: Envoy's configuration object takes metrics from any thread, and lives as long as the module's (invariant 3).
unsafe impl Send for LbConfig {}
// SAFETY: as above.
unsafe impl Sync for LbConfig {}

impl LbConfig {
    /// Defines or finds a counter, while the configuration is read.
    pub(crate) fn counter(self, name: &str) -> Counter {
        let mut id = 0;
        let name = Buffer::of(name.as_bytes());
        // SAFETY: Envoy copies the name and writes the id during the call.
        let result = unsafe {
            envoy_dynamic_module_callback_lb_config_define_counter(
                self.0,
                name,
                ptr::null_mut(),
                0,
                &raw mut id,
            )
        };
        Counter((result == OK).then_some(id))
    }

    /// Defines or finds a gauge, while the configuration is read.
    pub(crate) fn gauge(self, name: &str) -> Gauge {
        let mut id = 0;
        let name = Buffer::of(name.as_bytes());
        // SAFETY: Envoy copies the name and writes the id during the call.
        let result = unsafe {
            envoy_dynamic_module_callback_lb_config_define_gauge(
                self.0,
                name,
                ptr::null_mut(),
                0,
                &raw mut id,
            )
        };
        Gauge((result == OK).then_some(id))
    }

    /// Adds to a counter.
    pub(crate) fn add(self, counter: Counter, count: u64) {
        if let (Some(id), 1..) = (counter.0, count) {
            // SAFETY: the id is one of this configuration's.
            unsafe {
                envoy_dynamic_module_callback_lb_config_increment_counter(
                    self.0,
                    id,
                    ptr::null_mut(),
                    0,
                    count,
                );
            }
        }
    }

    /// Sets a gauge.
    pub(crate) fn set(self, gauge: Gauge, value: u64) {
        if let Some(id) = gauge.0 {
            // SAFETY: the id is one of this configuration's.
            unsafe {
                envoy_dynamic_module_callback_lb_config_set_gauge(self.0, id, ptr::null_mut(), 0, value);
            }
        }
    }
}

/// Envoy's side of one thread's policy, during a hook.
#[derive(Clone, Copy)]
pub(crate) struct Lb<'a>(Ptr, PhantomData<&'a ()>);

impl Lb<'_> {
    fn cluster(self) -> String {
        let mut name = Buffer::EMPTY;
        // SAFETY: invariant 1; Envoy fills in the buffer, which lives as long as the load balancer.
        let name = unsafe {
            envoy_dynamic_module_callback_lb_get_cluster_name(self.0, &raw mut name);
            bytes(name)
        };
        String::from_utf8_lossy(name).into_owned()
    }

    /// Returns the hosts of every priority.
    pub(crate) fn levels(self) -> Vec<Level> {
        // SAFETY: invariant 1.
        let priorities = unsafe { envoy_dynamic_module_callback_lb_get_priority_set_size(self.0) };
        (0..priorities as u32).map(|priority| self.level(priority)).collect()
    }

    fn level(self, priority: u32) -> Level {
        // SAFETY: invariant 1.
        let (total, healthy) = unsafe {
            (
                envoy_dynamic_module_callback_lb_get_hosts_count(self.0, priority),
                envoy_dynamic_module_callback_lb_get_healthy_hosts_count(self.0, priority),
            )
        };
        // Healthy hosts are in the order of all hosts, so each one's index is found behind the last one's.
        let mut index = 0;
        let host = |at: usize| {
            let mut address = Buffer::EMPTY;
            // SAFETY: invariant 1; the address lives until the host set changes.
            let (found, address, weight) = unsafe {
                let found = envoy_dynamic_module_callback_lb_get_healthy_host_address(
                    self.0,
                    priority,
                    at,
                    &raw mut address,
                );
                let weight = envoy_dynamic_module_callback_lb_get_healthy_host_weight(self.0, priority, at);
                (found, bytes(address), weight)
            };
            if !found {
                return Host { endpoint: None, weight: 1, index };
            }
            while index < total && self.address(priority, index) != address {
                index += 1;
            }
            let host = Host { endpoint: endpoint(address), weight: weight.max(1), index };
            index += 1;
            host
        };
        Level { total, healthy: (0..healthy).map(host).collect() }
    }

    fn address(&self, priority: u32, index: usize) -> &[u8] {
        let mut address = Buffer::EMPTY;
        // SAFETY: invariant 1; the address lives until the host set changes, which it does not during a hook.
        unsafe {
            envoy_dynamic_module_callback_lb_get_host_address(self.0, priority, index, &raw mut address);
            bytes(address)
        }
    }

    /// Returns the number of requests in flight from this Envoy to the host.
    pub(crate) fn in_flight(self, place: Place) -> u64 {
        // SAFETY: invariant 1; Envoy checks the index.
        unsafe {
            envoy_dynamic_module_callback_lb_get_host_stat(
                self.0,
                place.priority,
                place.index,
                STAT_RQ_ACTIVE,
            )
        }
    }
}

fn endpoint(address: &[u8]) -> Option<Endpoint> {
    std::str::from_utf8(address).ok()?.parse().ok()
}

/// What Envoy says about retries of the request for which a host is being chosen.
#[derive(Clone, Copy)]
pub(crate) struct Retry<'a> {
    lb: Lb<'a>,
    /// Null if the choice is for no request.
    context: Ptr,
}

impl Retry<'_> {
    /// Panics if the request asks for it.
    #[cfg(feature = "crash-test")]
    #[allow(clippy::panic, reason = "the crash test needs a crash")]
    pub(crate) fn crash_on_demand(self) {
        let (mut value, name) = (Buffer::EMPTY, Buffer::of(b"x-prequal-crash-test"));
        // SAFETY: the context is valid during the hook.
        let asked = unsafe {
            envoy_dynamic_module_callback_lb_context_get_downstream_header(
                self.context,
                name,
                &raw mut value,
                0,
                ptr::null_mut(),
            )
        };
        if asked {
            panic!("crash test");
        }
    }

    /// Maximum number of times to choose again.
    pub(crate) fn tries(self) -> u32 {
        if self.context.is_null() {
            return 0;
        }
        // SAFETY: the context is valid during the hook.
        unsafe { envoy_dynamic_module_callback_lb_context_get_host_selection_retry_count(self.context) }
    }

    /// Whether this is a retry that must not use the host.
    pub(crate) fn refuses(self, place: Place) -> bool {
        // SAFETY: the context is valid during the hook; Envoy checks the index.
        !self.context.is_null()
            && unsafe {
                envoy_dynamic_module_callback_lb_context_should_select_another_host(
                    self.lb.0,
                    self.context,
                    place.priority,
                    place.index,
                )
            }
    }
}

/// Wakes the prober on the main thread.
#[derive(Debug)]
pub(crate) struct Scheduler(Ptr);

// SAFETY: Envoy's scheduler takes events from any thread. It is never deleted, and ignores events once its extension is gone.
unsafe impl Send for Scheduler {}
// SAFETY: as above.
unsafe impl Sync for Scheduler {}

impl Scheduler {
    /// Schedules the hook `config_scheduled`.
    pub(crate) fn commit(&self) {
        // SAFETY: as above.
        unsafe { envoy_dynamic_module_callback_bootstrap_extension_config_scheduler_commit(self.0, 0) }
    }
}

/// Envoy's side of the bootstrap extension, during a hook on the main thread.
#[derive(Clone, Copy)]
pub(crate) struct Bootstrap<'a>(Ptr, PhantomData<&'a ()>);

impl Bootstrap<'_> {
    /// Sends a request. Returns its number, or `None` if Envoy refused it.
    pub(crate) fn call(self, cluster: &str, headers: &[(&str, &str)], timeout_ms: u64) -> Option<u64> {
        let header = |(name, value): &(&str, &str)| Header {
            name: name.as_ptr(),
            name_length: name.len(),
            value: value.as_ptr(),
            value_length: value.len(),
        };
        let mut headers: Vec<Header> = headers.iter().map(header).collect();
        let mut number = 0;
        // SAFETY: Envoy copies all that is passed, and writes the number during the call.
        let result = unsafe {
            envoy_dynamic_module_callback_bootstrap_extension_http_callout(
                self.0,
                &raw mut number,
                Buffer::of(cluster.as_bytes()),
                headers.as_mut_ptr(),
                headers.len(),
                Buffer::EMPTY,
                timeout_ms,
            )
        };
        (result == OK).then_some(number)
    }
}

/// The response headers or trailers of an attempt, during a hook.
struct Response<'a> {
    filter: Ptr,
    kind: u32,
    during: PhantomData<&'a ()>,
}

impl Response<'_> {
    fn value(&self, name: &str, index: usize) -> Option<&[u8]> {
        let mut value = Buffer::EMPTY;
        // SAFETY: the filter and the value are valid during the hook, which `self` does not outlive.
        unsafe {
            envoy_dynamic_module_callback_http_get_header(
                self.filter,
                self.kind,
                Buffer::of(name.as_bytes()),
                &raw mut value,
                index,
                ptr::null_mut(),
            )
            .then(|| bytes(value))
        }
    }

    fn remove(&self, name: &str) {
        // SAFETY: the filter is valid during the hook.
        unsafe {
            envoy_dynamic_module_callback_http_set_header(
                self.filter,
                self.kind,
                Buffer::of(name.as_bytes()),
                Buffer::EMPTY,
            );
        }
    }
}

impl Headers for Response<'_> {
    fn all<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        let name = name.to_owned();
        (0..).map_while(move |index| self.value(&name, index))
    }

    fn get(&self, name: &str) -> Option<&[u8]> {
        self.value(name, 0)
    }
}

/// The headers of a reply to a call, during the hook.
struct Reply<'a>(&'a [Header]);

impl Headers for Reply<'_> {
    fn all<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        let name = name.to_owned();
        // SAFETY: invariant 4; `self` does not outlive the hook.
        let pair = |header: &Header| unsafe {
            (
                bytes(Buffer { data: header.name, length: header.name_length }),
                bytes(Buffer { data: header.value, length: header.value_length }),
            )
        };
        self.0.iter().map(pair).filter(move |(found, _)| *found == name.as_bytes()).map(|(_, value)| value)
    }
}

// ---- hooks: the module ----

/// Envoy has loaded the module.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_program_init() -> *const c_char {
    VERSION.as_ptr()
}

// ---- hooks: the load-balancing policy ----

/// Reads a configuration. Null refuses it.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_lb_config_new(config: Ptr, _name: Buffer, text: Buffer) -> Ptr {
    guarded(ptr::null_mut(), || {
        // SAFETY: invariant 4.
        match PolicyConfig::read(LbConfig(config), unsafe { bytes(text) }) {
            Ok(read) => give(read),
            Err(errors) => {
                log(LOG_ERROR, &format!("prequal: configuration refused: {errors}"));
                ptr::null_mut()
            }
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_lb_config_destroy(config: Ptr) {
    // SAFETY: invariant 2.
    guarded((), || drop(unsafe { take_back::<PolicyConfig>(config) }));
}

/// Creates one thread's policy.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_lb_new(config: Ptr, lb: Ptr) -> Ptr {
    guarded(ptr::null_mut(), || {
        // SAFETY: invariants 1 to 3; the configuration is only read.
        let config = unsafe { config.cast::<PolicyConfig>().as_ref() };
        let lb = Lb(lb, PhantomData);
        config.map_or(ptr::null_mut(), |config| {
            // The host set is empty here; Envoy announces it next.
            give(config.policy(&lb.cluster()))
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_lb_destroy(policy: Ptr) {
    // SAFETY: invariant 2.
    guarded((), || drop(unsafe { take_back::<Policy>(policy) }));
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_lb_on_host_membership_update(
    lb: Ptr,
    policy: Ptr,
    _added: usize,
    _removed: usize,
) {
    guarded((), || {
        // SAFETY: invariants 1 to 3.
        if let Some(policy) = unsafe { borrow::<Policy>(policy) } {
            policy.hosts_changed(Lb(lb, PhantomData));
        }
    });
}

/// Chooses a host. False if there is none.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_lb_choose_host(
    lb: Ptr,
    policy: Ptr,
    context: Ptr,
    priority: *mut u32,
    healthy: *mut u32,
) -> bool {
    guarded(false, || {
        let lb = Lb(lb, PhantomData);
        // SAFETY: invariants 1 to 3.
        let policy = unsafe { borrow::<Policy>(policy) };
        let Some(place) = policy.and_then(|policy| policy.choose(lb, Retry { lb, context })) else {
            return false;
        };
        // SAFETY: Envoy passes two places to write to.
        unsafe {
            priority.write(place.priority);
            healthy.write(place.healthy);
        }
        true
    })
}

// ---- hooks: the upstream HTTP filter ----

/// The filter has no settings.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_config_new(
    _config: Ptr,
    _name: Buffer,
    _text: Buffer,
) -> Ptr {
    give(())
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_config_destroy(config: Ptr) {
    // SAFETY: invariant 2.
    let _ = unsafe { take_back::<()>(config) };
}

/// A filter.
enum Filter {
    Attempt(Attempt),
    /// The policy was not asked for the host of this attempt to the cluster.
    Other(String),
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_new(_config: Ptr, filter: Ptr) -> Ptr {
    guarded(ptr::null_mut(), || {
        let mut name = Buffer::EMPTY;
        // SAFETY: the filter and the name are valid during the hook.
        let cluster = unsafe {
            envoy_dynamic_module_callback_http_get_cluster_name(filter, &raw mut name);
            bytes(name)
        };
        let other = || Filter::Other(String::from_utf8_lossy(cluster).into_owned());
        give(attempt::take(cluster).map_or_else(other, Filter::Attempt))
    })
}

/// Runs `with` on the filter's attempt, and lets Envoy continue.
fn attempt(filter: Ptr, with: impl FnOnce(&mut Attempt)) -> u32 {
    guarded((), || {
        // SAFETY: invariants 1 to 3.
        if let Some(Filter::Attempt(attempt)) = unsafe { borrow::<Filter>(filter) } {
            with(attempt);
        }
    });
    OK
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_request_headers(
    _envoy: Ptr,
    filter: Ptr,
    end_of_stream: bool,
) -> u32 {
    attempt(filter, |attempt| {
        if end_of_stream {
            attempt.request_ended();
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_request_body(
    _envoy: Ptr,
    filter: Ptr,
    end_of_stream: bool,
) -> u32 {
    attempt(filter, |attempt| {
        if end_of_stream {
            attempt.request_ended();
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_request_trailers(_envoy: Ptr, filter: Ptr) -> u32 {
    attempt(filter, Attempt::request_ended)
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_response_headers(
    envoy: Ptr,
    filter: Ptr,
    end_of_stream: bool,
) -> u32 {
    attempt(filter, |attempt| {
        let response = Response { filter: envoy, kind: RESPONSE_HEADER, during: PhantomData };
        attempt.response(&response, end_of_stream);
        // Clients must not read load. The header of the other form of a report is left to the listener's strip, as is
        // `x-prequal-failure`, which the retry policy reads after this filter.
        response.remove(HEADER_LOAD);
    })
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_response_body(
    _envoy: Ptr,
    filter: Ptr,
    end_of_stream: bool,
) -> u32 {
    attempt(filter, |attempt| attempt.response_body(end_of_stream))
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_response_trailers(envoy: Ptr, filter: Ptr) -> u32 {
    attempt(filter, |attempt| {
        attempt.response_trailers(&Response { filter: envoy, kind: RESPONSE_TRAILER, during: PhantomData });
    })
}

/// The last hook of a filter. Envoy 1.40 calls it a little later than the attempt's end, when nothing can be read any more.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_destroy(filter: Ptr) {
    guarded((), || {
        // SAFETY: invariant 2.
        match unsafe { take_back::<Filter>(filter) } {
            Some(Filter::Attempt(attempt)) => attempt.destroyed(),
            Some(Filter::Other(cluster)) => attempt::destroyed_without_a_choice(&cluster),
            None => {}
        }
    });
}

/// Hooks that Envoy requires of a filter, for functions that this one does not use.
macro_rules! unused {
    ($($name:ident($($argument:ty),*);)*) => {
        $(#[unsafe(no_mangle)] extern "C" fn $name($(_: $argument),*) {})*
    };
}

unused! {
    envoy_dynamic_module_on_http_filter_stream_complete(Ptr, Ptr);
    envoy_dynamic_module_on_http_filter_http_callout_done(Ptr, Ptr, u64, u32, *mut Header, usize, *mut Buffer, usize);
    envoy_dynamic_module_on_http_filter_scheduled(Ptr, Ptr, u64);
    envoy_dynamic_module_on_http_filter_downstream_above_write_buffer_high_watermark(Ptr, Ptr);
    envoy_dynamic_module_on_http_filter_downstream_below_write_buffer_low_watermark(Ptr, Ptr);
    envoy_dynamic_module_on_http_filter_http_stream_headers(Ptr, Ptr, u64, *mut Header, usize, bool);
    envoy_dynamic_module_on_http_filter_http_stream_data(Ptr, Ptr, u64, *const Buffer, usize, bool);
    envoy_dynamic_module_on_http_filter_http_stream_trailers(Ptr, Ptr, u64, *mut Header, usize);
    envoy_dynamic_module_on_http_filter_http_stream_complete(Ptr, Ptr, u64);
    envoy_dynamic_module_on_http_filter_http_stream_reset(Ptr, Ptr, u64, u32);
}

// ---- hooks: the upstream access logger ----

/// The logger has no settings.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_access_logger_config_new(
    _config: Ptr,
    _name: Buffer,
    _text: Buffer,
) -> Ptr {
    give(())
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_access_logger_config_destroy(config: Ptr) {
    // SAFETY: invariant 2.
    let _ = unsafe { take_back::<()>(config) };
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_access_logger_new(_config: Ptr, _logger: Ptr) -> Ptr {
    give(())
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_access_logger_destroy(logger: Ptr) {
    // SAFETY: invariant 2.
    let _ = unsafe { take_back::<()>(logger) };
}

/// Envoy logs an attempt: only here do its own response flags show.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_access_logger_log(log: Ptr, _logger: Ptr, kind: u32) {
    if kind != LOG_UPSTREAM_END {
        return;
    }
    guarded((), || {
        let mut cluster = Buffer::EMPTY;
        // SAFETY: the log entry and the name are valid during the hook.
        unsafe {
            if envoy_dynamic_module_callback_access_logger_get_upstream_cluster(log, &raw mut cluster) {
                let flags = envoy_dynamic_module_callback_access_logger_get_response_flags(log);
                attempt::logged(bytes(cluster), flags);
            }
        }
    });
}

// ---- hooks: the bootstrap extension ----

/// Envoy's side of the extension, kept for the hooks that do not name it.
struct Extension {
    timer: Ptr,
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_config_new(
    config: Ptr,
    _name: Buffer,
    _text: Buffer,
) -> Ptr {
    guarded(ptr::null_mut(), || {
        // SAFETY: invariant 1. Without the signal, Envoy would wait for ever before it opens a listener.
        let (scheduler, timer) = unsafe {
            envoy_dynamic_module_callback_bootstrap_extension_config_signal_init_complete(config);
            (
                envoy_dynamic_module_callback_bootstrap_extension_config_scheduler_new(config),
                envoy_dynamic_module_callback_bootstrap_extension_timer_new(config),
            )
        };
        match prober::start(Scheduler(scheduler)) {
            Ok(()) => give(Extension { timer }),
            Err(error) => {
                log(LOG_ERROR, &format!("prequal: {error}"));
                ptr::null_mut()
            }
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_config_destroy(config: Ptr) {
    // SAFETY: invariant 2. The timer belongs to Envoy's side, which ends as well.
    let _ = unsafe { take_back::<Extension>(config) };
}

/// The configuration is the extension; this pointer only passes it on.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_new(config: Ptr, _extension: Ptr) -> Ptr {
    config
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_server_initialized(_envoy: Ptr, extension: Ptr) {
    arm(extension);
}

fn arm(extension: Ptr) {
    guarded((), || {
        // SAFETY: invariants 1 to 3; the timer is Envoy's, created with the extension.
        unsafe {
            if let Some(extension) = borrow::<Extension>(extension) {
                envoy_dynamic_module_callback_bootstrap_extension_timer_enable(
                    extension.timer,
                    prober::TICK_MS,
                );
            }
        }
    });
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_timer_fired(
    config: Ptr,
    extension: Ptr,
    _timer: Ptr,
) {
    guarded((), || prober::tick(Bootstrap(config, PhantomData)));
    arm(extension);
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_config_scheduled(
    config: Ptr,
    _extension: Ptr,
    _event: u64,
) {
    guarded((), || prober::serve(Bootstrap(config, PhantomData)));
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_http_callout_done(
    _config: Ptr,
    _extension: Ptr,
    number: u64,
    result: u32,
    headers: *mut Header,
    header_count: usize,
    _body: *mut Buffer,
    _body_count: usize,
) {
    guarded((), || {
        // SAFETY: Envoy passes that many headers, valid during the hook.
        let headers = (result == OK && !headers.is_null())
            .then(|| Reply(unsafe { std::slice::from_raw_parts(headers, header_count) }));
        prober::replied(number, headers.as_ref());
    });
}

/// Envoy waits for the completion before it ends.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_shutdown(
    _envoy: Ptr,
    _extension: Ptr,
    completion: Completion,
    context: Ptr,
) {
    // SAFETY: Envoy passes the function and its argument, to be called once.
    unsafe { completion(context) }
}

/// A request to the admin port, for handlers that this module does not register. Zero is the status "not handled".
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_admin_request(
    _envoy: Ptr,
    _extension: Ptr,
    _method: Buffer,
    _path: Buffer,
    _body: Buffer,
) -> u32 {
    404
}

unused! {
    envoy_dynamic_module_on_bootstrap_extension_destroy(Ptr);
    envoy_dynamic_module_on_bootstrap_extension_worker_thread_initialized(Ptr, Ptr);
    envoy_dynamic_module_on_bootstrap_extension_drain_started(Ptr, Ptr);
    envoy_dynamic_module_on_bootstrap_extension_file_changed(Ptr, Ptr, Buffer, u32);
    envoy_dynamic_module_on_bootstrap_extension_cluster_add_or_update(Ptr, Ptr, Buffer);
    envoy_dynamic_module_on_bootstrap_extension_cluster_removal(Ptr, Ptr, Buffer);
    envoy_dynamic_module_on_bootstrap_extension_listener_add_or_update(Ptr, Ptr, Buffer);
    envoy_dynamic_module_on_bootstrap_extension_listener_removal(Ptr, Ptr, Buffer);
}
