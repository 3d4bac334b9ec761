//! Base latency and knee of a replica, and the latency that they predict.

use super::time::MAX_LATENCY_US;

/// Time constant with which observations of a replica fade, microseconds. At half this value, the estimate is noisier;
/// at twice this value, it shows a recovery later.
pub const FADES_US: f64 = 6e6;

/// Base latency and knee of a replica.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Capacity {
    /// Latency of a request while nothing waits, microseconds, 1 to [`MAX_LATENCY_US`].
    pub base_us: u32,
    /// Number of requests in flight beyond which further requests only wait, at least 1.
    pub knee: u16,
    /// Whether the replica has shown no saturation, so that its knee may be higher.
    pub open: bool,
    /// Whether requests take almost the same time as long as none waits.
    pub steady: bool,
    /// Relative standard error of the base latency, percent, 0 to 255: how far it is likely to be wrong by chance, because
    /// requests differ and only a few are recent. 0 if it is unknown; it then counts as exact.
    pub rse_percent: u8,
}

impl Capacity {
    /// Returns a capacity of which only base latency (microseconds) and knee are known.
    pub const fn new(base_us: u32, knee: u16) -> Self {
        Self { base_us, knee, open: false, steady: false, rse_percent: 0 }
    }

    /// Returns the capacity of a replica that reports only a latency. A request that finds up to `rif` others in flight
    /// has this latency; with more, the latency grows.
    pub fn at_face_value(latency_us: u32, rif: u32) -> Self {
        let knee = u16::try_from(rif.saturating_add(1)).unwrap_or(u16::MAX);
        Self::new(latency_us.max(1), knee)
    }

    /// Returns the expected latency of a request that finds `rif` others in flight, microseconds.
    pub fn latency_us(self, rif: u32) -> u32 {
        (f64::from(self.base_us) * self.crowding(rif)).min(f64::from(MAX_LATENCY_US)) as u32
    }

    /// Returns the cost of a request that finds `rif` others in flight. Beyond the knee, crowding counts twice: the
    /// request is delayed, and it delays those that come after it.
    pub fn cost(self, rif: u32) -> f32 {
        if rif < self.knee.into() {
            // Nothing waits. Every pick computes the cost of every entry, so saving the division matters.
            return self.base_us as f32;
        }
        let crowding = self.crowding(rif);
        (f64::from(self.base_us) * crowding * crowding) as f32
    }

    pub(crate) fn crowding(self, rif: u32) -> f64 {
        let crowding = (f64::from(rif) + 1.0) / f64::from(self.knee.max(1));
        // `max` would be a function call in wasm.
        if crowding > 1.0 { crowding } else { 1.0 }
    }
}
