//! Time as given by the caller. Host clocks may be wall clocks and may step, so no operation here can fail.

/// Longest latency that is reported or believed: one hour, in microseconds.
pub const MAX_LATENCY_US: u32 = 3_600_000_000;

/// Microseconds on the caller's clock, from an arbitrary origin.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Micros(pub u64);

impl Micros {
    /// Converts from milliseconds; saturates.
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms.saturating_mul(1000))
    }

    /// Microseconds elapsed since `earlier`; zero if the clock stepped back.
    pub const fn saturating_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// Microseconds between two times, in either direction: a time in the future is as suspect as an old one.
    pub const fn distance(self, other: Self) -> u64 {
        self.0.abs_diff(other.0)
    }

    /// Returns this time plus `us` microseconds; saturates.
    #[must_use]
    pub const fn plus(self, us: u64) -> Self {
        Self(self.0.saturating_add(us))
    }

    /// Returns the stamp to keep in shared data.
    pub const fn stamp(self) -> Stamp {
        Stamp((self.0 / 1000) as u32)
    }
}

/// Milliseconds modulo 2^32 (49 days), as stored by the blobs in shared data.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Stamp(pub u32);

impl Stamp {
    /// Distance in milliseconds between two stamps, in either direction.
    ///
    /// A stamp in the future is as suspect as an old one. After the clock steps back by an hour, everything stored
    /// looks an hour old and expires, instead of living for another hour.
    pub const fn distance_ms(self, other: Self) -> u32 {
        (self.0.wrapping_sub(other.0) as i32).unsigned_abs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_step_back_stamps_count_as_old() {
        let stored = Micros::from_millis(10_000_000).stamp();
        let now = Micros::from_millis(10_000_000 - 3_600_000).stamp();
        assert_eq!(now.distance_ms(stored), 3_600_000);
    }

    #[test]
    fn stamps_survive_the_wrap() {
        assert_eq!(Stamp(5).distance_ms(Stamp(u32::MAX - 4)), 10);
    }
}
