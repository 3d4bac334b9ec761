//! Probes: sending them, and tracking the replies that have not arrived.
//!
//! Probes belong to the root and not to the stream that triggers them: the SDK drops replies whose stream has ended
//! (`docs/design/adr/0001-root-owned-probes.md`).

use std::collections::HashMap;
use std::time::Duration;

use prequal_core::client::ProbeEnd;
use prequal_core::client::members::Target;
use prequal_core::client::pool::ProbesDue;
use prequal_core::client::reply::Reply;
use prequal_core::client::sync_mode::Answer;
use prequal_core::shared::time::Micros;
use prequal_core::wire::hint::HintHash;
use prequal_core::wire::report::{HEADER_DEST, HEADER_HINT, PROBE_PATH};
use proxy_wasm::hostcalls;
use proxy_wasm::types::MapType;

use crate::filter::{Cluster, Filter};
use crate::host::Headers;

/// Maximum number of probes in flight per worker. Beyond this, the probe cluster is not answering and more probes
/// would not help.
const MAX_IN_FLIGHT: usize = 1024;
/// Longest deadline of a waiting request, milliseconds, at which its replies may wait for its pick.
const SHORT_WAIT_MS: u32 = 50;

/// The probes of one root.
#[derive(Default)]
pub(crate) struct Probes(HashMap<u32, Probe>);

/// A probe whose reply has not arrived.
struct Probe {
    cluster: usize,
    call: Call,
}

/// A probe to send.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    /// Target of the probe; `None` if the probe cluster's policy chooses.
    pub(crate) target: Option<Target>,
    /// The stream that waits for the reply.
    pub(crate) waiter: Option<u32>,
    pub(crate) hint: Option<HintHash>,
    pub(crate) timeout_ms: u64,
}

impl Probes {
    /// Sends the probes that are due.
    pub(crate) fn send(&mut self, filter: &Filter, index: usize, due: ProbesDue, now: Micros) {
        let Some(cluster) = filter.clusters.get(index).filter(|_| !due.is_empty()) else { return };
        let targets = cluster.balancer.borrow_mut().targets(due, now, &mut *filter.rng.borrow_mut());
        let timeout_ms = cluster.balancer.borrow().config().probe.timeout_ms;
        for target in targets {
            self.dispatch(index, cluster, Call { target, waiter: None, hint: None, timeout_ms });
        }
    }

    /// Sends one probe. Returns true if it was sent.
    pub(crate) fn dispatch(&mut self, index: usize, cluster: &Cluster, call: Call) -> bool {
        let token = (self.0.len() < MAX_IN_FLIGHT).then(|| {
            let address = call.target.map(|target| target.probe.to_string());
            let hint = call.hint.map(|hint| hint.to_string());
            let mut headers = vec![(":method", "GET"), (":path", PROBE_PATH), (":authority", "prequal")];
            headers.extend(address.as_deref().map(|address| (HEADER_DEST, address)));
            headers.extend(hint.as_deref().map(|hint| (HEADER_HINT, hint)));
            let timeout = Duration::from_millis(call.timeout_ms);
            let balancer = cluster.balancer.borrow();
            let to = &balancer.config().probe_cluster;
            hostcalls::dispatch_http_call(to, headers, None, Vec::new(), timeout).ok()
        });
        let Some(token) = token.flatten() else {
            cluster.metrics.undispatched.one();
            return false;
        };
        cluster.metrics.sent.one();
        self.0.insert(token, Probe { cluster: index, call });
        true
    }

    /// Handles the reply to a probe, which has `header_count` headers. If a stream waits for the probe, returns that
    /// stream and the answer.
    pub(crate) fn replied(
        &mut self,
        filter: &Filter,
        token: u32,
        header_count: usize,
        now: Micros,
    ) -> Option<(u32, Option<Answer>)> {
        let Probe { cluster, call } = self.0.remove(&token)?;
        let mut balancer = filter.clusters.get(cluster)?.balancer.borrow_mut();
        let verified = balancer.config().pool.verified_probes;
        // Envoy passes no headers if the reply broke off in its body.
        let reply = if header_count == 0 {
            Err(ProbeEnd::Refused)
        } else {
            Reply::read(&Headers::of(MapType::HttpCallResponseHeaders), verified)
        };
        let answer = balancer.replied(now, call.target, call.hint.is_some(), reply);
        let waits = |waiter| filter.waits.borrow().contains(waiter);
        let soon = balancer.config().choice.sync.deadline_ms <= SHORT_WAIT_MS;
        // The pick of a request that waits for the reply would apply the report soon.
        if !(soon && call.waiter.is_some_and(waits)) {
            balancer.settle(now, &mut *filter.rng.borrow_mut());
        }
        Some((call.waiter?, answer))
    }
}
