//! The hooks that Envoy calls: the module, the policy, the HTTP filters, the access logger, the bootstrap extension.
//!
//! The numbered invariants are those of [`crate::envoy`]. A panic in a hook would end Envoy. [`guarded`] catches it and
//! returns the result that does the least harm: no host, an attempt without a report, no probe.

use std::borrow::Cow;
use std::ffi::c_char;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use prequal_core::wire::headers::Headers as _;
use prequal_core::wire::report::HEADER_LOAD;

use crate::abi::*;
use crate::attempt::{self, Attempt};
use crate::detour;
use crate::envoy::{Bootstrap, Incoming, Lb, LbConfig, List, Response, Retry, Scheduler, bytes, log};
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

/// Returns what is behind a pointer that a `new` hook of this module returned.
///
/// # Safety
/// `pointer` must come from [`give`] with the same type, and nothing else may use it during `'a` (invariants 1 to 3).
unsafe fn borrow<'a, T>(pointer: Ptr) -> Option<&'a mut T> {
    // SAFETY: as above.
    unsafe { pointer.cast::<T>().as_mut() }
}

/// Gives Envoy an object; [`take_back`] takes it back.
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

// ---- hooks: the module ----

/// Handles the loading of the module. Returns the version of the ABI.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_program_init() -> *const c_char {
    VERSION.as_ptr()
}

// ---- hooks: the load-balancing policy ----

/// Reads a configuration. Returns null to refuse it.
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

/// Chooses a host. Returns false if there is none.
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

// ---- hooks: the HTTP filters ----

/// Purpose of a filter, according to the name in its configuration. The filter has no other settings.
enum FilterKind {
    /// A cluster's upstream filter: one attempt.
    Attempt,
    /// A listener's filter, called `prequal_detour`: one request, before its host is chosen.
    Detour,
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_config_new(
    _config: Ptr,
    name: Buffer,
    _text: Buffer,
) -> Ptr {
    // SAFETY: invariant 4.
    let detour = unsafe { bytes(name) } == DETOUR_NAME;
    give(if detour { FilterKind::Detour } else { FilterKind::Attempt })
}

/// Name of the listener's filter in its configuration.
const DETOUR_NAME: &[u8] = b"prequal_detour";

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_config_destroy(config: Ptr) {
    // SAFETY: invariant 2.
    let _ = unsafe { take_back::<FilterKind>(config) };
}

/// A filter.
enum Filter {
    Attempt(Attempt),
    /// An attempt to the named cluster whose host this module's policy did not choose.
    Other(String),
    Detour,
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_new(config: Ptr, filter: Ptr) -> Ptr {
    guarded(ptr::null_mut(), || {
        // SAFETY: invariants 1 and 2; the kind is only read.
        if let Some(FilterKind::Detour) = unsafe { config.cast::<FilterKind>().as_ref() } {
            return give(Filter::Detour);
        }
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

/// Handles the headers of the request, or a part of its body.
fn request_part(filter: Ptr, end_of_stream: bool) -> u32 {
    if end_of_stream { attempt(filter, Attempt::request_ended) } else { OK }
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_request_headers(
    envoy: Ptr,
    filter: Ptr,
    end_of_stream: bool,
) -> u32 {
    guarded((), || {
        // SAFETY: invariants 1 to 3.
        if let Some(Filter::Detour) = unsafe { borrow::<Filter>(filter) } {
            let request = Incoming(envoy, PhantomData);
            if let Some(host) = detour::choose(request.cluster()) {
                request.send_to(host);
            }
        }
    });
    request_part(filter, end_of_stream)
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_request_body(
    _envoy: Ptr,
    filter: Ptr,
    end_of_stream: bool,
) -> u32 {
    request_part(filter, end_of_stream)
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
        let headers = response.headers();
        attempt.response(&headers, end_of_stream);
        // Clients must not see the load. The listener's `prequal-strip` removes the pair of headers that a replica may
        // send instead. It also removes `x-prequal-failure`, which the retry policy reads after this filter.
        if headers.get(HEADER_LOAD).is_some() {
            response.remove(HEADER_LOAD, headers);
        }
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
        let trailers = Response { filter: envoy, kind: RESPONSE_TRAILER, during: PhantomData };
        attempt.response_trailers(&trailers.headers());
    })
}

/// The last hook of a filter. Envoy 1.40 calls it a little later than the attempt's end, when nothing can be read any
/// more.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_destroy(filter: Ptr) {
    guarded((), || {
        // SAFETY: invariant 2.
        match unsafe { take_back::<Filter>(filter) } {
            Some(Filter::Attempt(attempt)) => attempt.destroyed(),
            Some(Filter::Other(cluster)) => attempt::destroyed_without_a_choice(&cluster),
            Some(Filter::Detour) | None => {}
        }
    });
}

/// Defines hooks that Envoy requires and that this module does not use; they do nothing.
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

/// Handles the log entry of an attempt. Only a log entry shows the attempt's own response flags.
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

/// This module's object for the extension. It keeps Envoy's timer, which the hooks do not pass.
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
        // SAFETY: invariant 1. Without the signal, Envoy would never open a listener.
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

/// This module's object for the configuration is also its object for the extension.
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
            .then(|| List(Cow::Borrowed(unsafe { std::slice::from_raw_parts(headers, header_count) })));
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

/// Handles a request to the admin port. This module registers no handler for such requests. Returns an HTTP status.
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
