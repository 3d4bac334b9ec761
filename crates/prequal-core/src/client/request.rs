//! What one request carries from its beginning to its end, and what the proxy can be asked about it. `balancer.rs` decides
//! what follows from it.

use crate::ejection::flights::Flight;
use crate::endpoint::Endpoint;
use crate::pool::Pick;
use crate::time::Micros;

use super::count::Class;

/// What the proxy says of a request. Each answer may be dear, so it is asked only where it matters.
pub trait Witness {
    /// The time.
    fn now(&self) -> Micros;

    /// Whether the request went to the balancer's cluster at all. Otherwise nothing of it counts.
    fn is_ours(&self) -> bool;

    /// The replica that the proxy used last. It tries no other once a response has begun.
    fn served_by(&self) -> Option<Endpoint>;

    /// Who ended the request.
    fn class(&self) -> Class;

    /// How often the proxy sent the request.
    fn attempts(&self) -> u64;
}

/// A request, from [`begin`](super::Balancer::begin) to [`ended`](super::Balancer::ended). The default was not placed.
#[derive(Debug, Default)]
pub struct Request {
    /// The choice. Probes that are due with it are for the host to send.
    pub pick: Pick,
    /// Where a retry goes, if hosts can be told so.
    pub runner_up: Option<Endpoint>,
    pub(super) began: Micros,
    /// The request to the chosen replica until something is known of its end; `None` when nothing watches it.
    pub(super) flight: Option<Flight>,
    /// It is a trial, and has been answered.
    pub(super) trial: bool,
    /// The replica's failure of this request has been told.
    pub(super) blamed: bool,
    /// It was, as a retry elsewhere was answered.
    pub(super) rescued: bool,
    /// The proxy's word on whether it went to this cluster, and on who serves, once asked.
    pub(super) ours: Option<bool>,
    pub(super) served_by: Option<Endpoint>,
    /// The replica that was chosen reported on the response.
    pub(super) answered: bool,
    /// The response carries an error.
    pub(super) failed: bool,
    /// The latency that the replica reported on the response, microseconds.
    pub(super) reported_us: Option<u32>,
    /// Requests in flight and utilisation that the response told, for the rules without probes.
    pub(super) told: (Option<u32>, Option<f64>),
}

impl Request {
    /// What a response tells the rules without probes: requests in flight, and utilisation.
    pub fn tell(&mut self, rif: Option<u32>, utilisation: Option<f64>) {
        self.told = (rif, utilisation);
    }

    /// The same of its trailers, unless the headers told a utilisation: `read` reads them then.
    pub fn tell_late(&mut self, read: impl FnOnce() -> Option<f64>) {
        self.told.1 = self.told.1.or_else(read);
    }

    pub(super) fn served_by(&mut self, proxy: &impl Witness) -> Option<Endpoint> {
        self.served_by = self.served_by.or_else(|| proxy.served_by());
        self.served_by
    }
}
