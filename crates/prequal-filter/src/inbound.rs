//! The inbound role: at the server's Envoy, this filter counts the requests in flight at the replica behind it,
//! answers probes, and puts reports on responses (`docs/design/adr/0007-inbound-role.md`).
//!
//! - [`stream`]: one request;
//! - [`served`]: one replica, as this worker knows it;
//! - [`vm`]: this VM and its slot among the VMs that serve the same replicas.

use std::rc::Rc;

use prequal_core::config::{InboundConfig, Serving};
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;
use prequal_core::wire::probe::json;
use prequal_core::wire::report::{HEADER_LATENCY, HEADER_LOAD, HEADER_RIF};
use proxy_wasm::hostcalls;
use proxy_wasm::types::MapType;

use crate::host;
use served::Served;
use vm::Vm;

mod served;
pub(crate) mod stream;
mod vm;

pub(crate) use vm::TICK;

/// The inbound role with one configuration on one worker.
pub(crate) struct Inbound {
    config: InboundConfig,
    vm: Rc<Vm>,
}

impl Inbound {
    pub(crate) fn new(config: InboundConfig) -> Self {
        Self { config, vm: Vm::this() }
    }

    pub(crate) fn tick(&self, now: Micros) {
        self.vm.tick(now);
    }

    /// Returns the replica that a request is for; `None` if the request is not to be counted.
    fn replica_of_request(&self, now: Micros) -> Option<Rc<Served>> {
        let endpoint = match self.config.serving {
            Serving::Fixed(endpoint) => endpoint,
            Serving::Destination => destination()?,
            Serving::Port(port) => destination().filter(|at| at.port() == port)?,
        };
        self.vm.served(endpoint, now)
    }

    /// Answers a probe.
    fn answer(&self, now: Micros) {
        let at = destination();
        let endpoint = match self.config.serving {
            Serving::Fixed(endpoint) => Some(endpoint),
            Serving::Destination => at,
            Serving::Port(port) => at.map(|at| at.with_port(port)),
        };
        let Some(served) = endpoint.and_then(|endpoint| self.vm.served(endpoint, now)) else {
            reply(
                503,
                &[],
                b"the address of this connection is not an `ip:port` (set `endpoint`), \
                  or too many replicas are counted already\n",
            );
            return;
        };
        let report = served.answer(&*self.vm, now, at);
        let (load, rif) = (report.to_string(), report.rif.to_string());
        let latency = report.latency_us.map(|us| us.to_string());
        let mut headers = vec![(HEADER_LOAD, &load[..]), (HEADER_RIF, &rif), ("cache-control", "no-store")];
        if let Some(latency) = &latency {
            headers.push((HEADER_LATENCY, latency));
        }
        let accepts = host::header(MapType::HttpRequestHeaders, "accept").unwrap_or_default();
        if accepts.contains("application/json") {
            headers.push(("content-type", "application/json"));
            reply(200, &headers, json(&report, u128::from(now.0 / 1000)).as_bytes());
        } else {
            reply(200, &headers, b"");
        }
    }
}

/// Returns the address that the client connected to.
fn destination() -> Option<Endpoint> {
    host::text_property(&["destination", "address"])?.parse().ok()
}

/// Answers the request that is the effective context.
fn reply(status: u32, headers: &[(&str, &str)], body: &[u8]) {
    // Envoy accepts the reply if no response has begun. If Envoy refused it, the SDK would panic instead of returning
    // an error.
    let _ = hostcalls::send_http_response(status, headers.to_vec(), Some(body));
}
