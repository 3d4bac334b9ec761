//! One replica in the pool: its report, and how many uses of the report are left.

use rand::Rng;

use super::sent::Sent;
use super::{FULL_SHARE, PoolSettings};
use crate::client::members::Placement;
use crate::shared::capacity::Capacity;
use crate::shared::endpoint::Endpoint;
use crate::shared::time::Stamp;
use crate::wire::load::Load;

/// A replica to choose from, according to its own report.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Candidate {
    /// The replica's endpoint.
    pub endpoint: Endpoint,
    /// Requests in flight: as reported, plus those sent there since.
    pub rif: u32,
    /// Latency estimate, microseconds; `None` if the replica has none.
    pub latency_us: Option<u32>,
    /// Milliseconds since its report was received.
    pub age_ms: u32,
}

/// The knee may be higher.
pub(super) const OPEN: u8 = 1;
/// Requests take almost the same time as long as none waits.
pub(super) const STEADY: u8 = 2;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Entry {
    pub(super) endpoint: Endpoint,
    pub(super) latency_us: u32,
    /// From its [`Capacity`], or [`UNKNOWN`].
    pub(super) base_us: u32,
    /// Knee without the requests that are away.
    pub(super) knee: u16,
    /// Value of the pool's pick counter when this replica was last chosen.
    pub(super) chosen: u16,
    pub(super) received: Stamp,
    /// From its [`Placement`].
    pub(super) sampled: u32,
    /// Number of requests in flight that the server is not working on.
    pub(super) away: u32,
    pub(super) weight: u16,
    pub(super) rif: u16,
    pub(super) uses_left: u16,
    /// 1 for a candidate that no request has reached yet.
    pub(super) unproven: u8,
    /// Traffic relative to that of a replica that is not young, per cent.
    pub(super) share: u8,
    /// Share of its recent requests that failed, per mille.
    pub(super) failing: u16,
    /// [`OPEN`] and [`STEADY`], from its [`Capacity`].
    pub(super) flags: u8,
    /// From its [`Capacity`].
    pub(super) rse_percent: u8,
    /// Its latest requests.
    pub(super) sent: Sent,
}

impl Entry {
    pub(super) fn new(
        settings: &PoolSettings,
        endpoint: Endpoint,
        load: Load,
        placement: Placement,
        received: Stamp,
    ) -> Self {
        let capacity = load.capacity.unwrap_or(Capacity::new(UNKNOWN, 1));
        let knee = u32::from(capacity.knee).saturating_sub(load.away).max(1);
        let rif = u16::try_from(load.rif).unwrap_or(u16::MAX);
        Self {
            base_us: capacity.base_us,
            knee: u16::try_from(knee).unwrap_or(u16::MAX),
            chosen: 0,
            share: settings.share_at(load.up_s),
            endpoint,
            latency_us: load.latency_us.map_or(UNKNOWN, |latency| latency.min(UNKNOWN - 1)),
            received,
            sampled: placement.sampled,
            weight: placement.weight,
            rif,
            // If RIF is out of range, the requests at the server matter more than those that are away.
            away: u32::from(rif).saturating_sub(load.rif.saturating_sub(load.away)),
            uses_left: 1,
            unproven: 0,
            failing: load.failing,
            flags: if capacity.open { OPEN } else { 0 } | if capacity.steady { STEADY } else { 0 },
            rse_percent: capacity.rse_percent,
            sent: Sent::default(),
        }
    }

    /// Whether a blob may hold this entry. The knee must not be 0, because ages are divided by it.
    pub(super) fn is_sound(&self) -> bool {
        self.endpoint.is_valid() && self.knee > 0 && self.share <= FULL_SHARE
    }

    pub(super) fn placement(&self) -> Placement {
        Placement { sampled: self.sampled, weight: self.weight }
    }

    /// Requests in flight that the server is working on.
    pub(super) fn at_server(&self) -> u32 {
        u32::from(self.rif).saturating_sub(self.away)
    }

    /// RIF scaled to a replica of average weight.
    pub(super) fn load(&self) -> u32 {
        self.scaled(self.rif.into())
    }

    /// The same for the requests that the server is working on.
    pub(super) fn load_at_server(&self) -> u32 {
        self.scaled(self.at_server())
    }

    fn scaled(&self, requests: u32) -> u32 {
        // Most weights are equal. Every pick computes every entry's load, so saving the division matters.
        if self.weight == Placement::UNIT {
            return requests;
        }
        // Rounded up: a busy replica never looks idle.
        (requests * u32::from(Placement::UNIT)).div_ceil(u32::from(self.weight.max(1)))
    }

    /// Whether one of [`OPEN`] and [`STEADY`] is set.
    pub(super) fn is(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Whether its next request would wait, as far as is known.
    pub(super) fn is_saturated(&self) -> bool {
        self.capacity().is_some_and(|capacity| self.at_server() >= capacity.knee.into())
    }

    /// Sum of RIF and a random exponential value, relative to the weight. The random value alone would choose in
    /// proportion to the weights; RIF alone would be weighted least request.
    pub(super) fn draw(&self, rng: &mut impl Rng) -> u32 {
        let chance = -2.0 * (1.0 - rng.random::<f32>()).ln();
        ((f32::from(self.rif) + chance) * 256.0 / f32::from(self.weight.max(1))) as u32
    }

    pub(super) fn latency_us(&self) -> Option<u32> {
        (self.latency_us != UNKNOWN).then_some(self.latency_us)
    }

    /// Base latency and knee, for the requests that the server is working on.
    pub(super) fn capacity(&self) -> Option<Capacity> {
        let Self { base_us, knee, .. } = *self;
        (base_us != UNKNOWN).then_some(Capacity {
            base_us,
            knee,
            open: self.is(OPEN),
            steady: self.is(STEADY),
            rse_percent: self.rse_percent,
        })
    }

    pub(super) fn candidate(&self, now: Stamp) -> Candidate {
        Candidate {
            endpoint: self.endpoint,
            rif: u32::from(self.rif),
            latency_us: self.latency_us(),
            age_ms: now.distance_ms(self.received),
        }
    }
}

/// Placeholder for an unknown latency.
pub(super) const UNKNOWN: u32 = u32::MAX;
