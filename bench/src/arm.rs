//! The alternatives that a scenario compares: Envoy's own policies, other load balancers, and Prequal.

use crate::peer::Peer;

/// The policy that chooses the replica.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Arm {
    RoundRobin,
    LeastRequest,
    FullScan,
    /// Envoy's policy that picks a replica at random.
    Random,
    /// Envoy's client_side_weighted_round_robin, weighted by the load that the agents report.
    Cswrr,
    /// The same with load reports out of band, on a stream from each agent.
    CswrrOutOfBand,
    /// Envoy's consistent hashing on the request's key.
    RingHash,
    /// Prequal's filter chain with a module that does nothing. It measures Envoy's part of the filter's cost.
    EmptyModule,
    /// Another load balancer in Envoy's place.
    Peer(Peer),
    /// The filter as shipped.
    Prequal,
    /// The native module as shipped.
    Native,
    /// The filter in synchronous mode: probes this many replicas per request, with a hint derived from the request's
    /// key.
    Hinted(u8),
    /// The filter with `profile: inference`, but without hints: requests lack the header that a hint is derived from.
    Inference,
    /// The filter with `profile: inference` and a hint derived from the request's key; probes this many replicas per
    /// request.
    InferenceHinted(u8),
    /// The filter with another selection rule, given by its name in the configuration.
    Rule(&'static str),
}

impl Arm {
    /// Envoy's own policies that do not use the request's key.
    pub(crate) const STOCK: [Self; 5] =
        [Self::RoundRobin, Self::LeastRequest, Self::FullScan, Self::Random, Self::Cswrr];
    /// All of [`STOCK`](Self::STOCK) but [`Random`](Self::Random), which neither rotates nor uses any information.
    pub(crate) const BASELINES: [Self; 4] =
        [Self::RoundRobin, Self::LeastRequest, Self::FullScan, Self::Cswrr];
    /// The usual comparison, in the order of a pass.
    pub(crate) const USUAL: [Self; 5] =
        [Self::RoundRobin, Self::LeastRequest, Self::FullScan, Self::Cswrr, Self::Prequal];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::LeastRequest => "least_request (2 choices)",
            Self::FullScan => "least_request (full scan)",
            Self::Random => "random",
            Self::Cswrr => "cswrr",
            Self::CswrrOutOfBand => "cswrr, out of band",
            Self::RingHash => "ring_hash",
            Self::EmptyModule => "empty module",
            Self::Peer(peer) => peer.label(),
            Self::Prequal => "prequal",
            Self::Native => "prequal, native module",
            Self::Hinted(3) => "prequal, sync + hint, d = 3",
            Self::Hinted(_) => "prequal, sync + hint",
            Self::Inference => "inference profile",
            Self::InferenceHinted(8) => "inference profile + hint (8 probes)",
            Self::InferenceHinted(_) => "inference profile + hint",
            Self::Rule(name) => name,
        }
    }

    /// Whether the filter or the native module chooses.
    pub(crate) fn is_prequal(self) -> bool {
        let hinted = matches!(self, Self::Hinted(_) | Self::InferenceHinted(_));
        hinted || matches!(self, Self::Prequal | Self::Native | Self::Inference | Self::Rule(_))
    }
}
