//! When a balancer asks the proxy who served a request, although the response names the replica that was chosen.
//!
//! Nearly always that replica served it, and asking costs as much as a tenth of a request. But a replica that the proxy sent the
//! request to instead, after a failure or because it would not use the chosen one, can claim to be the chosen one: its failure
//! would go unseen, and the load would be an invention. Both need a diversion, so after one the balancer asks each time; and
//! one response in [`EVERY`] is asked about at any time, so that a liar cannot hide the diversions themselves.

use crate::time::Micros;

/// How often a balancer asks without a reason to doubt.
const EVERY: u8 = 16;
/// How long it doubts after a diversion, microseconds.
const DOUBT_US: u64 = 10_000_000;

/// One worker's doubts about the responses of one upstream cluster.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Doubt {
    unasked: u8,
    diverted: Option<Micros>,
}

impl Doubt {
    /// A response names the replica that was chosen: whether to ask who served the request.
    pub(super) fn asks(&mut self, now: Micros) -> bool {
        self.unasked = (self.unasked + 1) % EVERY;
        self.unasked == 0 || self.diverted.is_some_and(|at| now.distance(at) < DOUBT_US)
    }

    /// A request was served by another replica than the chosen one.
    pub(super) fn diverted(&mut self, now: Micros) {
        self.diverted = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_response_in_sixteen_is_asked_about_and_all_after_a_diversion() {
        let mut doubt = Doubt::default();
        let asked = |doubt: &mut Doubt, at| (0..160).filter(|_| doubt.asks(Micros(at))).count();
        assert_eq!(asked(&mut doubt, 1), 10);
        doubt.diverted(Micros(20_000_000));
        assert_eq!(asked(&mut doubt, 29_999_999), 160);
        assert_eq!(
            asked(&mut doubt, 10_000_001),
            160,
            "a clock that steps back doubts no longer than it stepped"
        );
        assert_eq!(asked(&mut doubt, 30_000_000), 10);
        assert_eq!(asked(&mut doubt, 1), 10);
    }
}
