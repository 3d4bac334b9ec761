//! Cache affinity: how a replica uses query hints (paper §4, "Sync mode").
//!
//! A replica that has cached what a query needs reports less load than it has, and so attracts the query. This module
//! decides which hints are accepted, which were served recently, and how a report is scaled. Whether a replica may
//! scale its reports is the embedder's decision.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::shared::capacity::Capacity;
use crate::wire::report::LoadReport;

/// Maximum length of an accepted hint, bytes.
pub const MAX_HINT: usize = 64;

/// An accepted hint: 1 to [`MAX_HINT`] bytes of visible ASCII, otherwise opaque.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Hint<'a>(&'a str);

impl<'a> Hint<'a> {
    /// Parses a header's value. Returns `None` if it is empty, too long, or contains anything but visible ASCII.
    pub fn parse(value: &'a [u8]) -> Option<Self> {
        let fits = (1..=MAX_HINT).contains(&value.len()) && value.iter().all(u8::is_ascii_graphic);
        std::str::from_utf8(value).ok().filter(|_| fits).map(Self)
    }

    /// Returns the hint as received.
    pub fn as_str(self) -> &'a str {
        self.0
    }

    /// Returns the key. Two hints share a key with probability 2^-64; a query may then be sent to a replica without its
    /// data.
    fn key(self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        hasher.finish()
    }
}

/// The most recently served hints, each once. The least recently served hint is forgotten first.
///
/// Stores 64-bit keys instead of hints, about 50 bytes per entry. Every operation is O(log capacity).
#[derive(Clone, Debug)]
pub struct RecentHints {
    capacity: usize,
    /// Number of the request that last served each key.
    served: BTreeMap<u64, u64>,
    order: BTreeMap<u64, u64>,
    requests: u64,
}

impl RecentHints {
    /// Creates a set that remembers the last `capacity` hints; none if 0.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, served: BTreeMap::new(), order: BTreeMap::new(), requests: 0 }
    }

    /// Records that a query with this hint was served.
    pub fn serve(&mut self, hint: Hint<'_>) {
        let key = hint.key();
        self.requests = self.requests.wrapping_add(1);
        if let Some(before) = self.served.insert(key, self.requests) {
            self.order.remove(&before);
        }
        self.order.insert(self.requests, key);
        if self.order.len() > self.capacity
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.served.remove(&oldest);
        }
    }

    /// Whether a query with this hint was served recently.
    pub fn contains(&self, hint: Hint<'_>) -> bool {
        self.served.contains_key(&hint.key())
    }
}

/// Returns `report` with RIF and latencies divided by `divisor`, 1 to 2^32 − 1; 0 counts as 1.
///
/// Rounds up: an idle replica stays idle, and a busy one never looks idle. An unknown latency stays unknown.
#[must_use]
pub fn scaled(report: &LoadReport, divisor: u32) -> LoadReport {
    let divisor = divisor.max(1);
    let away = report.away / divisor;
    let fewer = u16::try_from(report.away - away).unwrap_or(u16::MAX);
    LoadReport {
        rif: report.rif.div_ceil(divisor),
        away,
        latency_us: report.latency_us.map(|us| us.div_ceil(divisor)),
        // If it is scaled, its difference from other replicas is not due to chance.
        capacity: report.capacity.map(|of| Capacity {
            base_us: of.base_us.div_ceil(divisor),
            knee: of.knee.saturating_sub(fewer).max(1),
            rse_percent: if divisor > 1 { 0 } else { of.rse_percent },
            ..of
        }),
        ..*report
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hint(text: &str) -> Hint<'_> {
        Hint::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn only_short_visible_ascii_is_a_hint() {
        let long = "h".repeat(MAX_HINT);
        for good in ["0123456789abcdef", "a", "user=7;~", &long] {
            assert_eq!(hint(good).as_str(), good);
        }
        let too_long = "h".repeat(MAX_HINT + 1);
        let huge = "h".repeat(65_536);
        for bad in ["", " ", "a b", "a\tb", "a\0", "\u{7f}", "é", &too_long, &huge] {
            assert_eq!(Hint::parse(bad.as_bytes()), None, "{bad:?}");
        }
        assert_eq!(Hint::parse(b"\xff\xfe"), None);
    }

    #[test]
    fn the_least_recently_served_is_forgotten_first() {
        let mut recent = RecentHints::new(2);
        recent.serve(hint("a"));
        recent.serve(hint("b"));
        recent.serve(hint("a"));
        recent.serve(hint("c"));
        assert_eq!(["a", "b", "c"].map(|text| recent.contains(hint(text))), [true, false, true]);
    }

    #[test]
    fn a_capacity_of_zero_remembers_nothing() {
        let mut recent = RecentHints::new(0);
        recent.serve(hint("a"));
        assert!(!recent.contains(hint("a")));
    }

    #[test]
    fn scaling_never_turns_idle_into_busy_or_busy_into_idle() {
        let honest = LoadReport::parse("25;50123;127.0.0.1:80;fail=7;up=3").unwrap();
        assert_eq!(scaled(&honest, 10).to_string(), "3;5013;127.0.0.1:80;fail=7;up=3");
        assert_eq!(scaled(&honest, 1), honest);
        assert_eq!(scaled(&honest, 0), honest);
        // The difference that scaling makes is not due to chance.
        let uncertain = LoadReport::parse("25;50123;127.0.0.1:80;base=20005;knee=4;rse=37").unwrap();
        assert_eq!(scaled(&uncertain, 10).to_string(), "3;5013;127.0.0.1:80;base=2001;knee=4");
        assert_eq!(scaled(&uncertain, 1), uncertain);
        let least = scaled(&honest, u32::MAX);
        assert_eq!((least.rif, least.latency_us), (1, Some(1)));
        let idle = LoadReport::parse("0;;127.0.0.1:80").unwrap();
        assert_eq!(scaled(&idle, 10), idle);
    }

    proptest! {
        #[test]
        fn the_last_distinct_hints_are_remembered_and_no_more(
            capacity in 0usize..6, served in proptest::collection::vec(0u8..10, 0..100)
        ) {
            let mut recent = RecentHints::new(capacity);
            let mut last: Vec<u8> = Vec::new();
            for n in served {
                recent.serve(hint(&n.to_string()));
                last.retain(|other| *other != n);
                last.insert(0, n);
                last.truncate(capacity);
                prop_assert!(recent.served.len() == last.len() && recent.order.len() == last.len());
                for n in 0..10 {
                    prop_assert_eq!(recent.contains(hint(&n.to_string())), last.contains(&n));
                }
            }
        }
    }
}
