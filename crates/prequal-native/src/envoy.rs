//! Safe wrappers of what Envoy provides. [`crate::hooks`] has what Envoy calls.
//!
//! The invariants that the unsafe blocks rely on, all guaranteed by Envoy:
//!
//! 1. Pointers that Envoy passes to a hook are valid during that hook; configurations, load balancers and filters also
//!    until their `destroy` hook. Wrappers with a lifetime exist only during a hook.
//! 2. A pointer that a `new` hook returned comes back unchanged, and not after the `destroy` hook.
//! 3. Each load balancer and each filter is used by one thread only. A policy's configuration is shared by all threads;
//!    everything that this module keeps in it can be shared.
//! 4. Buffers need not be valid UTF-8, but they are readable during the hook in which Envoy filled them in.

use std::borrow::Cow;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::ptr;
use std::sync::OnceLock;

use prequal_core::shared::endpoint::Endpoint;
use prequal_core::wire::headers::Headers;

use crate::abi::*;
use crate::hosts::{Health, Host, Level, Place};
use crate::localities;

/// Writes a warning to Envoy's log.
pub(crate) fn warn(message: &str) {
    log(LOG_WARN, message);
}

/// Writes to Envoy's log.
pub(crate) fn log(level: u32, message: &str) {
    // SAFETY: Envoy reads the message during the call.
    unsafe { envoy_dynamic_module_callback_log(level, Buffer::of(message.as_bytes())) }
}

/// Returns whether this Envoy logs an attempt before it calls the last hook of the attempt's filter, as versions from
/// 1.40 on do. These versions also have the function named below, which is not used otherwise.
pub(crate) fn logs_first() -> bool {
    static FIRST: OnceLock<bool> = OnceLock::new();
    *FIRST.get_or_init(|| {
        // SAFETY: the name is a C string; with a null handle, everything that is loaded is searched.
        unsafe { !dlsym(ptr::null_mut(), c"envoy_dynamic_module_callback_log_v2".as_ptr()).is_null() }
    })
}

/// Returns the bytes of a buffer that Envoy has filled in.
///
/// # Safety
/// The buffer must be empty or readable for `'a` (invariant 4).
pub(crate) unsafe fn bytes<'a>(buffer: Buffer) -> &'a [u8] {
    if buffer.data.is_null() || buffer.length == 0 {
        return &[];
    }
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(buffer.data, buffer.length) }
}

/// A function that defines a metric. Its arguments are the configuration, the metric's name, the labels, the number of
/// labels, and the address to which it writes the metric's id.
type Define = unsafe extern "C" fn(Ptr, Buffer, *mut Buffer, usize, *mut usize) -> u32;

/// A counter; `None` if Envoy did not define it. Nothing is counted then, and balancing continues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counter(Option<usize>);

/// A gauge, which holds the last value written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gauge(Option<usize>);

/// Envoy's side of a policy's configuration, which keeps the metrics. All threads share the module's side, which holds
/// this pointer, but only the main thread uses the pointer. It does so while the configuration is read, and later only
/// while its own policy exists: that policy keeps Envoy's side alive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LbConfig(pub(crate) Ptr);

// SAFETY: other threads hold the pointer, but only the main thread uses it, and only while Envoy's object exists. The
// type's comment says why.
unsafe impl Send for LbConfig {}
// SAFETY: as above.
unsafe impl Sync for LbConfig {}

impl LbConfig {
    /// Defines or finds a counter. Possible only while the configuration is read.
    pub(crate) fn counter(self, name: &str) -> Counter {
        Counter(self.define(name, envoy_dynamic_module_callback_lb_config_define_counter))
    }

    /// Defines or finds a gauge. Possible only while the configuration is read.
    pub(crate) fn gauge(self, name: &str) -> Gauge {
        Gauge(self.define(name, envoy_dynamic_module_callback_lb_config_define_gauge))
    }

    /// Returns the number that Envoy gives the metric.
    fn define(self, name: &str, define: Define) -> Option<usize> {
        let mut id = 0;
        // SAFETY: Envoy copies the name and writes the id during the call.
        let result = unsafe { define(self.0, Buffer::of(name.as_bytes()), ptr::null_mut(), 0, &raw mut id) };
        (result == OK).then_some(id)
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
pub(crate) struct Lb<'a>(pub(crate) Ptr, pub(crate) PhantomData<&'a ()>);

impl Lb<'_> {
    /// Returns the name of the cluster.
    pub(crate) fn cluster(self) -> String {
        let mut name = Buffer::EMPTY;
        // SAFETY: invariant 1; Envoy fills in the buffer, which lives as long as the load balancer.
        let name = unsafe {
            envoy_dynamic_module_callback_lb_get_cluster_name(self.0, &raw mut name);
            bytes(name)
        };
        String::from_utf8_lossy(name).into_owned()
    }

    /// Returns the hosts of every priority. Without `locality_weighted`, localities do not count, although Envoy shows
    /// their weights to a module in any case.
    pub(crate) fn levels(self, locality_weighted: bool) -> Vec<Level> {
        // SAFETY: invariant 1.
        let priorities = unsafe { envoy_dynamic_module_callback_lb_get_priority_set_size(self.0) };
        (0..priorities as u32).map(|priority| self.level(priority, locality_weighted)).collect()
    }

    fn level(self, priority: u32, locality_weighted: bool) -> Level {
        // SAFETY: invariant 1.
        let (total, degraded) = unsafe {
            (
                envoy_dynamic_module_callback_lb_get_hosts_count(self.0, priority),
                envoy_dynamic_module_callback_lb_get_degraded_hosts_count(self.0, priority),
            )
        };
        let (localities, numbers) = match locality_weighted {
            true => self.localities(priority, total),
            false => Default::default(),
        };
        // Envoy lists healthy hosts in the same order as in the list of all hosts.
        let mut healthy = 0;
        let host = |index: usize| {
            let address = self.address(priority, index);
            // SAFETY: invariant 1.
            let weight = unsafe { envoy_dynamic_module_callback_lb_get_host_weight(self.0, priority, index) };
            let health = if self.healthy_address(priority, healthy) == Some(address) {
                healthy += 1;
                Health::Healthy
            } else if degraded > 0 && self.is_degraded(priority, index) {
                Health::Degraded
            } else {
                Health::Unhealthy
            };
            let locality = numbers.get(index).copied().unwrap_or(0);
            Host { endpoint: endpoint(address), weight: weight.max(1), health, locality }
        };
        Level { hosts: (0..total).map(host).collect(), localities }
    }

    /// Returns the weights of the priority's localities by number, and the number of each host's locality; nothing if
    /// localities do not count.
    fn localities(&self, priority: u32, hosts: usize) -> (Vec<u32>, Vec<usize>) {
        // SAFETY: invariant 1; Envoy checks the number of the locality.
        let weights: Vec<u32> = unsafe {
            let count = envoy_dynamic_module_callback_lb_get_locality_count(self.0, priority);
            let weight =
                |number| envoy_dynamic_module_callback_lb_get_locality_weight(self.0, priority, number);
            (0..count).map(weight).collect()
        };
        if weights.iter().all(|weight| *weight == 0) {
            return (Vec::new(), Vec::new());
        }
        let names: Vec<_> = (0..hosts).map(|index| self.locality(priority, index)).collect();
        let by_address: HashMap<&[u8], usize> =
            (0..hosts).map(|index| (self.address(priority, index), index)).collect();
        let numbered = |number: usize| {
            let index = by_address.get(self.locality_address(priority, number)?)?;
            names.get(*index).copied()
        };
        let numbered: Vec<_> = (0..weights.len()).map(numbered).collect();
        let numbers = localities::numbers(&names, &numbered);
        (weights, numbers)
    }

    /// Returns the region, zone and sub-zone of a host.
    fn locality(&self, priority: u32, index: usize) -> [&[u8]; 3] {
        let (mut region, mut zone, mut sub_zone) = (Buffer::EMPTY, Buffer::EMPTY, Buffer::EMPTY);
        // SAFETY: invariant 1; the names live until the host set changes, which it does not during a hook.
        unsafe {
            envoy_dynamic_module_callback_lb_get_host_locality(
                self.0,
                priority,
                index,
                &raw mut region,
                &raw mut zone,
                &raw mut sub_zone,
            );
            [bytes(region), bytes(zone), bytes(sub_zone)]
        }
    }

    /// Returns the address of the first healthy host of a locality.
    fn locality_address(&self, priority: u32, number: usize) -> Option<&[u8]> {
        let mut address = Buffer::EMPTY;
        // SAFETY: invariant 1; the address lives until the host set changes, which it does not during a hook.
        unsafe {
            envoy_dynamic_module_callback_lb_get_locality_host_address(
                self.0,
                priority,
                number,
                0,
                &raw mut address,
            )
            .then(|| bytes(address))
        }
    }

    /// Returns the address of a healthy host, by its index among those.
    fn healthy_address(&self, priority: u32, index: usize) -> Option<&[u8]> {
        let mut address = Buffer::EMPTY;
        // SAFETY: invariant 1; the address lives until the host set changes, which it does not during a hook.
        unsafe {
            envoy_dynamic_module_callback_lb_get_healthy_host_address(
                self.0,
                priority,
                index,
                &raw mut address,
            )
            .then(|| bytes(address))
        }
    }

    fn is_degraded(self, priority: u32, index: usize) -> bool {
        // SAFETY: invariant 1.
        let health = unsafe { envoy_dynamic_module_callback_lb_get_host_health(self.0, priority, index) };
        health == HEALTH_DEGRADED
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
    pub(crate) lb: Lb<'a>,
    /// Null if the choice is for no request.
    pub(crate) context: Ptr,
}

impl Retry<'_> {
    /// Panics if the request asks for it.
    #[cfg(feature = "crash-test")]
    #[allow(clippy::panic, reason = "the crash test needs a crash")]
    pub(crate) fn crash_on_demand(self) {
        let (mut value, name) = (Buffer::EMPTY, Buffer::of(b"x-crash-prequal"));
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
pub(crate) struct Scheduler(pub(crate) Ptr);

// SAFETY: Envoy's scheduler takes events from any thread. It is never deleted, and ignores events once its extension is
// gone.
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
pub(crate) struct Bootstrap<'a>(pub(crate) Ptr, pub(crate) PhantomData<&'a ()>);

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

/// A request that has no host yet, during a hook of a filter of the listener.
#[derive(Clone, Copy)]
pub(crate) struct Incoming<'a>(pub(crate) Ptr, pub(crate) PhantomData<&'a ()>);

impl Incoming<'_> {
    /// Returns the name of the cluster that the request is routed to; empty if there is none.
    pub(crate) fn cluster(&self) -> &[u8] {
        let mut name = Buffer::EMPTY;
        // SAFETY: the filter and the name are valid during the hook, which `self` does not outlive.
        unsafe {
            envoy_dynamic_module_callback_http_get_cluster_name(self.0, &raw mut name);
            bytes(name)
        }
    }

    /// Names the host of the request's first attempt. If Envoy refuses it, the policy chooses.
    pub(crate) fn send_to(self, host: Endpoint) {
        let host = host.to_string();
        // SAFETY: the filter is valid during the hook; Envoy copies the host.
        unsafe {
            envoy_dynamic_module_callback_http_set_upstream_override_host(
                self.0,
                Buffer::of(host.as_bytes()),
                false,
            );
        }
    }
}

/// The response headers or trailers of an attempt, during a hook.
#[derive(Clone, Copy)]
pub(crate) struct Response<'a> {
    pub(crate) filter: Ptr,
    pub(crate) kind: u32,
    pub(crate) during: PhantomData<&'a ()>,
}

impl<'a> Response<'a> {
    /// Returns all headers at once, because Envoy takes far longer to find even a few of them by name.
    pub(crate) fn headers(self) -> List<'a> {
        // SAFETY: the filter is valid during the hook.
        let count = unsafe { envoy_dynamic_module_callback_http_get_headers_size(self.filter, self.kind) };
        let mut headers = vec![Header::EMPTY; count];
        // SAFETY: as above; the list has room for that many.
        let found = unsafe {
            envoy_dynamic_module_callback_http_get_headers(self.filter, self.kind, headers.as_mut_ptr())
        };
        List(if found { headers.into() } else { Cow::Borrowed(&[]) })
    }

    /// Removes a header. `list` is consumed, because it may point to that header.
    pub(crate) fn remove(self, name: &str, list: List<'a>) {
        drop(list);
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

/// The headers of a message, during a hook, until one is changed. Their names are in lower case.
pub(crate) struct List<'a>(pub(crate) Cow<'a, [Header]>);

impl List<'_> {
    fn pairs(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        // SAFETY: invariant 4; `self` does not outlive the hook.
        self.0.iter().map(|header| unsafe {
            (
                bytes(Buffer { data: header.name, length: header.name_length }),
                bytes(Buffer { data: header.value, length: header.value_length }),
            )
        })
    }
}

impl Headers for List<'_> {
    fn all<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        let name = name.to_owned();
        self.pairs().filter(move |(found, _)| *found == name.as_bytes()).map(|(_, value)| value)
    }

    fn get(&self, name: &str) -> Option<&[u8]> {
        self.pairs().find(|(found, _)| *found == name.as_bytes()).map(|(_, value)| value)
    }
}
