//! Envoy's ABI for dynamic modules, as far as this module uses it: the functions that Envoy provides, and the values
//! that they take. [`crate::envoy`] wraps them.
//!
//! Names and signatures are those of Envoy 1.38 to 1.40 (`source/extensions/dynamic_modules/abi/abi.h`). If a function
//! is missing, Envoy refuses to load the module. If a signature differs, the behaviour is undefined, so tests load the
//! module into every supported Envoy.

use std::ffi::{c_char, c_void};
use std::ptr;

/// A pointer to an object of Envoy or of this module. Neither side looks into the other's objects.
pub(crate) type Ptr = *mut c_void;

/// Bytes that belong to the side that passes them. They are valid during the call unless noted otherwise.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Buffer {
    pub(crate) data: *const u8,
    pub(crate) length: usize,
}

impl Buffer {
    pub(crate) const EMPTY: Self = Self { data: ptr::null(), length: 0 };

    pub(crate) const fn of(bytes: &[u8]) -> Self {
        Self { data: bytes.as_ptr(), length: bytes.len() }
    }
}

/// One header of a message.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) name: *const u8,
    pub(crate) name_length: usize,
    pub(crate) value: *const u8,
    pub(crate) value_length: usize,
}

impl Header {
    pub(crate) const EMPTY: Self =
        Self { name: ptr::null(), name_length: 0, value: ptr::null(), value_length: 0 };
}

/// The version of the ABI that this module is built for, which Envoy 1.40 expects. Envoy only warns about any other
/// version.
pub(crate) const VERSION: &std::ffi::CStr = c"v0.2.0";

/// `envoy_dynamic_module_type_log_level`.
pub(crate) const LOG_WARN: u32 = 3;
pub(crate) const LOG_ERROR: u32 = 4;
/// `envoy_dynamic_module_type_http_header_type`.
pub(crate) const RESPONSE_HEADER: u32 = 2;
pub(crate) const RESPONSE_TRAILER: u32 = 3;
/// `envoy_dynamic_module_type_host_stat`: requests in flight.
pub(crate) const STAT_RQ_ACTIVE: u32 = 7;
/// `envoy_dynamic_module_type_host_health`.
pub(crate) const HEALTH_DEGRADED: u32 = 1;
/// `envoy_dynamic_module_type_access_log_type`: an attempt has ended.
pub(crate) const LOG_UPSTREAM_END: u32 = 9;
/// The result of callouts, metrics and filter hooks that means success, or "continue".
pub(crate) const OK: u32 = 0;

unsafe extern "C" {
    /// Finds a function by name, null if there is none (POSIX).
    pub(crate) fn dlsym(handle: Ptr, name: *const c_char) -> Ptr;

    /// Writes to Envoy's log.
    pub(crate) fn envoy_dynamic_module_callback_log(level: u32, message: Buffer);

    /// The cluster's name; it lives as long as `lb`.
    pub(crate) fn envoy_dynamic_module_callback_lb_get_cluster_name(lb: Ptr, name: *mut Buffer);
    /// Number of priorities.
    pub(crate) fn envoy_dynamic_module_callback_lb_get_priority_set_size(lb: Ptr) -> usize;
    /// Number of hosts of a priority.
    pub(crate) fn envoy_dynamic_module_callback_lb_get_hosts_count(lb: Ptr, priority: u32) -> usize;
    /// Address of a host, by its index among all; it lives until the host set changes.
    pub(crate) fn envoy_dynamic_module_callback_lb_get_host_address(
        lb: Ptr,
        priority: u32,
        index: usize,
        address: *mut Buffer,
    ) -> bool;
    /// Address of a healthy host, by its index among those; it lives until the host set changes.
    pub(crate) fn envoy_dynamic_module_callback_lb_get_healthy_host_address(
        lb: Ptr,
        priority: u32,
        index: usize,
        address: *mut Buffer,
    ) -> bool;
    /// Weight of a host, by its index among all.
    pub(crate) fn envoy_dynamic_module_callback_lb_get_host_weight(
        lb: Ptr,
        priority: u32,
        index: usize,
    ) -> u32;
    /// Health of a host at this moment, by its index among all.
    pub(crate) fn envoy_dynamic_module_callback_lb_get_host_health(
        lb: Ptr,
        priority: u32,
        index: usize,
    ) -> u32;
    /// Number of degraded hosts of a priority.
    pub(crate) fn envoy_dynamic_module_callback_lb_get_degraded_hosts_count(lb: Ptr, priority: u32) -> usize;
    /// Names of a host's locality, by the host's index among all; they live until the host set changes.
    pub(crate) fn envoy_dynamic_module_callback_lb_get_host_locality(
        lb: Ptr,
        priority: u32,
        index: usize,
        region: *mut Buffer,
        zone: *mut Buffer,
        sub_zone: *mut Buffer,
    ) -> bool;
    /// Number of localities of a priority.
    pub(crate) fn envoy_dynamic_module_callback_lb_get_locality_count(lb: Ptr, priority: u32) -> usize;
    /// Weight of a locality, 0 if localities have none.
    pub(crate) fn envoy_dynamic_module_callback_lb_get_locality_weight(
        lb: Ptr,
        priority: u32,
        locality: usize,
    ) -> u32;
    /// Address of a healthy host of a locality, by its index among those; it lives until the host set changes.
    pub(crate) fn envoy_dynamic_module_callback_lb_get_locality_host_address(
        lb: Ptr,
        priority: u32,
        locality: usize,
        index: usize,
        address: *mut Buffer,
    ) -> bool;
    /// One of Envoy's statistics of a host, by its index among all.
    pub(crate) fn envoy_dynamic_module_callback_lb_get_host_stat(
        lb: Ptr,
        priority: u32,
        index: usize,
        stat: u32,
    ) -> u64;
    /// Maximum number of times to choose again if a retry refuses the host.
    pub(crate) fn envoy_dynamic_module_callback_lb_context_get_host_selection_retry_count(
        context: Ptr,
    ) -> u32;
    /// Whether a retry refuses the host, by its index among all.
    pub(crate) fn envoy_dynamic_module_callback_lb_context_should_select_another_host(
        lb: Ptr,
        context: Ptr,
        priority: u32,
        index: usize,
    ) -> bool;
    /// A header of the request for which a host is chosen, by its index among the headers of that name.
    #[cfg(feature = "crash-test")]
    pub(crate) fn envoy_dynamic_module_callback_lb_context_get_downstream_header(
        context: Ptr,
        name: Buffer,
        value: *mut Buffer,
        index: usize,
        count: *mut usize,
    ) -> bool;
    /// Defines or finds a counter. Possible only while the configuration is read.
    pub(crate) fn envoy_dynamic_module_callback_lb_config_define_counter(
        config: Ptr,
        name: Buffer,
        labels: *mut Buffer,
        label_count: usize,
        id: *mut usize,
    ) -> u32;
    /// Adds to a counter, from any thread.
    pub(crate) fn envoy_dynamic_module_callback_lb_config_increment_counter(
        config: Ptr,
        id: usize,
        labels: *mut Buffer,
        label_count: usize,
        value: u64,
    ) -> u32;
    /// Defines or finds a gauge. Possible only while the configuration is read.
    pub(crate) fn envoy_dynamic_module_callback_lb_config_define_gauge(
        config: Ptr,
        name: Buffer,
        labels: *mut Buffer,
        label_count: usize,
        id: *mut usize,
    ) -> u32;
    /// Sets a gauge, from any thread.
    pub(crate) fn envoy_dynamic_module_callback_lb_config_set_gauge(
        config: Ptr,
        id: usize,
        labels: *mut Buffer,
        label_count: usize,
        value: u64,
    ) -> u32;

    /// Lets Envoy open its listeners.
    pub(crate) fn envoy_dynamic_module_callback_bootstrap_extension_config_signal_init_complete(config: Ptr);
    /// Creates a scheduler of events for the main thread.
    pub(crate) fn envoy_dynamic_module_callback_bootstrap_extension_config_scheduler_new(config: Ptr) -> Ptr;
    /// Schedules an event, from any thread.
    pub(crate) fn envoy_dynamic_module_callback_bootstrap_extension_config_scheduler_commit(
        scheduler: Ptr,
        event: u64,
    );
    /// Creates a timer on the main thread.
    pub(crate) fn envoy_dynamic_module_callback_bootstrap_extension_timer_new(config: Ptr) -> Ptr;
    /// Makes the timer fire once.
    pub(crate) fn envoy_dynamic_module_callback_bootstrap_extension_timer_enable(
        timer: Ptr,
        milliseconds: u64,
    );
    /// Sends a request, from the main thread. If Envoy refuses it, the hook for its end may run during this call.
    pub(crate) fn envoy_dynamic_module_callback_bootstrap_extension_http_callout(
        config: Ptr,
        id: *mut u64,
        cluster: Buffer,
        headers: *mut Header,
        header_count: usize,
        body: Buffer,
        timeout_ms: u64,
    ) -> u32;

    /// Number of headers of a message.
    pub(crate) fn envoy_dynamic_module_callback_http_get_headers_size(filter: Ptr, kind: u32) -> usize;
    /// Writes all headers of a message to `headers`, which must have room for all of them. Names and values live during
    /// the hook, until a header is changed.
    pub(crate) fn envoy_dynamic_module_callback_http_get_headers(
        filter: Ptr,
        kind: u32,
        headers: *mut Header,
    ) -> bool;
    /// Sets a header, or removes it if the value has no address.
    pub(crate) fn envoy_dynamic_module_callback_http_set_header(
        filter: Ptr,
        kind: u32,
        name: Buffer,
        value: Buffer,
    ) -> bool;
    /// Name of the cluster that the request is routed to; it lives during the hook.
    pub(crate) fn envoy_dynamic_module_callback_http_get_cluster_name(filter: Ptr, name: *mut Buffer)
    -> bool;

    /// Names the host of the request. If `strict` is false and the host cannot be used, the policy chooses.
    pub(crate) fn envoy_dynamic_module_callback_http_set_upstream_override_host(
        filter: Ptr,
        host: Buffer,
        strict: bool,
    ) -> bool;

    /// Name of the cluster of the request that this hook logs; it lives during the hook.
    pub(crate) fn envoy_dynamic_module_callback_access_logger_get_upstream_cluster(
        log: Ptr,
        name: *mut Buffer,
    ) -> bool;
    /// Envoy's response flags of the request that this hook logs, one bit each.
    pub(crate) fn envoy_dynamic_module_callback_access_logger_get_response_flags(log: Ptr) -> u64;
}

/// The function that the hook `shutdown` in [`crate::hooks`] must call.
pub(crate) type Completion = unsafe extern "C" fn(Ptr);
