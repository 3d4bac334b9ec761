//! `X-Netflix.server.utilization`: requests in flight as a percentage of what the replica is meant to hold, for Zuul
//! and similar clients.

use std::fmt::Write as _;
use std::num::NonZeroU32;

use http::HeaderValue;

/// Settings of the utilisation header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Utilization {
    /// Number of requests in flight that counts as 100 %.
    pub max: NonZeroU32,
    /// Percentage that the replica is meant to run at, sent as `target=`. `None`: not sent.
    pub target: Option<u32>,
}

impl Utilization {
    /// Returns a value such as `37.5, target=60`: rounded to a tenth of a percent, and above 100 if there are more
    /// requests than `max`.
    pub(crate) fn header_value(&self, rif: u32) -> Option<HeaderValue> {
        let max = u64::from(self.max.get());
        let tenths = (u64::from(rif) * 1000 + max / 2) / max;
        let mut text = String::with_capacity(24);
        write!(text, "{}", tenths / 10).ok()?;
        if !tenths.is_multiple_of(10) {
            write!(text, ".{}", tenths % 10).ok()?;
        }
        if let Some(target) = self.target {
            write!(text, ", target={target}").ok()?;
        }
        HeaderValue::try_from(text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_rounded_to_tenths() {
        for (rif, max, target, expected) in [
            (0, 10, None, "0"),
            (1, 10, None, "10"),
            (3, 8, Some(60), "37.5, target=60"),
            (1, 3, None, "33.3"),
            (1, 10_000, None, "0"),
            (15, 10, Some(80), "150, target=80"),
            (u32::MAX, 1, None, "429496729500"),
        ] {
            let value = Utilization { max: NonZeroU32::new(max).unwrap(), target }.header_value(rif).unwrap();
            assert_eq!(value, expected, "{rif} of {max}");
        }
    }
}
