//! Decides when a balancer asks the proxy whether a request was for its cluster, and which replica served it, even
//! though the response names the chosen replica.
//!
//! Nearly always, the chosen replica did serve the request, and asking costs up to a tenth of what a request costs. But
//! the proxy may have diverted the request to another replica, after a failure or because it would not use the chosen
//! one, and that replica may claim to be the chosen one. The balancer would then miss the failure and record an
//! invented load. Both require a diversion, so for a while after one, the balancer asks about every response. Otherwise
//! it asks about one response in [`EVERY`], so that a lying replica cannot hide the diversions themselves, and so that
//! requests for another cluster with the same replicas are noticed.

use crate::shared::time::Micros;

/// Without a recent diversion, the balancer asks about one response in this many.
const EVERY: u8 = 16;
/// Time after a diversion during which the balancer asks about every response, microseconds.
const DOUBT_US: u64 = 10_000_000;

/// One worker's doubts about the responses of one upstream cluster.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Doubt {
    unasked: u8,
    diverted: Option<Micros>,
}

impl Doubt {
    /// Whether to ask about a request whose response names the chosen replica.
    pub(super) fn asks(&mut self, now: Micros) -> bool {
        self.unasked = (self.unasked + 1) % EVERY;
        self.unasked == 0 || self.diverted.is_some_and(|at| now.distance(at) < DOUBT_US)
    }

    /// Records that a replica other than the chosen one served a request.
    pub(super) fn diverted(&mut self, now: Micros) {
        self.diverted = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_response_in_sixteen_is_verified_and_each_after_a_diversion() {
        let mut doubt = Doubt::default();
        let asked = |doubt: &mut Doubt, at| (0..160).filter(|_| doubt.asks(Micros(at))).count();
        assert_eq!(asked(&mut doubt, 1), 10);
        doubt.diverted(Micros(20_000_000));
        assert_eq!(asked(&mut doubt, 29_999_999), 160);
        assert_eq!(
            asked(&mut doubt, 10_000_001),
            160,
            "a step back by less than ten seconds does not end the doubt"
        );
        assert_eq!(asked(&mut doubt, 30_000_000), 10);
        assert_eq!(asked(&mut doubt, 1), 10);
    }
}
