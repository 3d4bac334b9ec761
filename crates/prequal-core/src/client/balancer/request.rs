//! The state of one request, and what the proxy can be asked about it. `balancer.rs` acts on both.

use crate::client::ejection::flights::Flight;
use crate::client::pool::{Branch, Pick};
use crate::shared::endpoint::Endpoint;
use crate::shared::time::Micros;

use crate::client::count::Class;

/// What the proxy knows about a request. Each call may be expensive, so the balancer calls only what it needs.
pub trait Witness {
    /// Returns the time.
    fn now(&self) -> Micros;

    /// Whether the request went to the balancer's cluster at all. If not, the request does not count.
    fn is_ours(&self) -> bool;

    /// Returns the replica that the proxy used last. The proxy tries no other once a response has begun.
    fn served_by(&self) -> Option<Endpoint>;

    /// Returns the party that ended the request.
    fn class(&self) -> Class;

    /// Returns how many times the proxy sent the request.
    fn attempts(&self) -> u64;
}

/// A request, from [`begin`](super::Balancer::begin) to [`ended`](super::Balancer::ended). The default value is a
/// request that was not placed.
#[derive(Debug, Default)]
pub struct Request {
    /// The choice. The embedder sends the probes in [`Pick::probes`].
    pub pick: Pick,
    /// Target of a retry, if the proxy can be given one.
    pub runner_up: Option<Endpoint>,
    pub(super) began: Micros,
    /// The request as ejection tracks it, until its outcome is known; `None` if ejection does not track it.
    pub(super) flight: Option<Flight>,
    /// Whether the request was a trial. Set once the request has been answered or has failed.
    pub(super) trial: bool,
    /// Whether the replica's failure of this request has been recorded.
    pub(super) blamed: bool,
    /// Whether the failure was recorded because a retry elsewhere was answered.
    pub(super) rescued: bool,
    /// Whether the request went to this cluster, according to the proxy; `None` until asked.
    pub(super) ours: Option<bool>,
    /// The replica that served the request, according to the proxy; `None` until asked.
    pub(super) served_by: Option<Endpoint>,
    /// Whether the chosen replica reported on the response.
    pub(super) reported: bool,
    /// Whether response headers without an error have arrived.
    pub(super) answered: bool,
    /// Whether the response carries an error.
    pub(super) failed: bool,
    /// Latency that the replica reported on the response, microseconds.
    pub(super) reported_us: Option<u32>,
    /// Requests in flight and utilisation from the response, for the rules without probes.
    pub(super) response_load: (Option<u32>, Option<f64>),
}

impl Request {
    /// Stores the requests in flight and the utilisation from a response, for the rules without probes.
    pub fn set_response_load(&mut self, rif: Option<u32>, utilisation: Option<f64>) {
        self.response_load = (rif, utilisation);
    }

    /// Stores the utilisation that `read` finds in the trailers. If the headers had one, `read` is not called.
    pub fn set_late_utilisation(&mut self, read: impl FnOnce() -> Option<f64>) {
        self.response_load.1 = self.response_load.1.or_else(read);
    }

    /// Whether the proxy's own policy placed the request, so that it may reveal a replica without an agent.
    pub(super) fn explores(&self) -> bool {
        self.pick.branch == Branch::Agentless && self.pick.replica.is_none()
    }

    pub(super) fn served_by(&mut self, proxy: &impl Witness) -> Option<Endpoint> {
        self.served_by = self.served_by.or_else(|| proxy.served_by());
        self.served_by
    }
}
