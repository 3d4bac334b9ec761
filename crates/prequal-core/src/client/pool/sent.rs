//! The requests of the last few hundred microseconds to one replica.
//!
//! A report on a response does not count the requests that reached the replica after the response had left it. At the
//! moment of a burst of responses, many requests are on their way, because each response lets a client send its next
//! request. If each report replaced the RIF in the pool, all of those requests would go to this replica.
//!
//! The reply to a probe that overtook a request does not count that request either.
//!
//! This module says how many of the pool's own requests a report may have missed. It assumes the same round-trip time
//! for all replicas, and does not know the requests of other Envoys.

use crate::shared::time::Micros;

/// Age below which a report that has just arrived may not count a request, in units of [`SLOT_US`]: a round trip inside
/// a zone, 600 microseconds. If round trips are longer, some requests are overlooked. If they are shorter, the pool's
/// own count usually keeps a request from being counted twice.
const ROUND_TRIP: u32 = 3;
/// Age below which the latest request may still be on its way, in units of [`SLOT_US`]: 20 ms.
const LONGEST_TRIP: i32 = 100;
/// Resolution, microseconds.
const SLOT_US: u64 = 200;
/// Number of slots kept: more than a round trip, and as many as fill whole 32-bit words.
const SLOTS: usize = 4;
/// Backward jump of the clock beyond which it counts as a step, in slots: one second. A smaller one means that a worker
/// is late.
const STEP: i32 = 5000;

/// Numbers of requests in the latest slots.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Sent {
    /// Number of the latest slot, wrapping.
    slot: u32,
    /// The latest slot first.
    counts: [u8; SLOTS],
}

impl Sent {
    /// Counts a request sent at `now`.
    pub(super) fn count(&mut self, now: Micros) {
        let passed = slot(now).wrapping_sub(self.slot) as i32;
        if !(-STEP..=0).contains(&passed) {
            self.slot = slot(now);
            let gone = usize::try_from(passed).map_or(SLOTS, |passed| passed.min(SLOTS));
            self.counts.rotate_right(gone);
            self.counts.iter_mut().take(gone).for_each(|count| *count = 0);
        }
        let late = self.slot.wrapping_sub(slot(now)) as usize;
        if let Some(count) = self.counts.get_mut(late) {
            *count = count.saturating_add(1);
        }
    }

    /// Whether the latest request may still be on its way at `at`, even between distant zones.
    pub(super) fn is_recent(&self, at: Micros) -> bool {
        let age = slot(at).wrapping_sub(self.slot) as i32;
        self.counts.iter().any(|count| *count > 0) && (-STEP..LONGEST_TRIP).contains(&age)
    }

    /// Number of requests that a report received at `at` may not count.
    pub(super) fn uncounted(&self, at: Micros) -> u16 {
        if self.slot.wrapping_sub(slot(at)) as i32 > STEP {
            return 0;
        }
        let oldest = slot(at).wrapping_sub(ROUND_TRIP - 1);
        let ages = (0..).map(|age| self.slot.wrapping_sub(age).wrapping_sub(oldest) as i32);
        self.counts
            .iter()
            .zip(ages)
            .filter(|(_, since)| *since >= 0)
            .map(|(count, _)| u16::from(*count))
            .sum()
    }
}

fn slot(at: Micros) -> u32 {
    (at.0 / SLOT_US) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_uncounted_for_a_round_trip() {
        let mut sent = Sent::default();
        assert_eq!(sent.uncounted(Micros(1_000_000)), 0);
        for at in [1_000_000, 1_000_100, 1_000_250, 1_000_450] {
            sent.count(Micros(at));
        }
        // Even a report that was received earlier does not count them.
        let uncounted =
            [999_000, 1_000_450, 1_000_650, 1_000_850, 1_001_050].map(|at| sent.uncounted(Micros(at)));
        assert_eq!(uncounted, [4, 4, 2, 1, 0]);
        sent.count(Micros(1_010_000));
        assert_eq!(sent.uncounted(Micros(1_010_000)), 1, "the others are too old");
    }

    #[test]
    fn the_clock_may_step_and_wrap() {
        let mut sent = Sent::default();
        sent.count(Micros(u64::from(u32::MAX) * SLOT_US));
        sent.count(Micros((u64::from(u32::MAX) + 1) * SLOT_US));
        assert_eq!(sent.uncounted(Micros((u64::from(u32::MAX) + 2) * SLOT_US)), 2);
        // A request of a late worker counts at its own time, and after a step back, earlier requests are forgotten.
        sent.count(Micros(u64::from(u32::MAX) * SLOT_US));
        assert_eq!(sent.uncounted(Micros((u64::from(u32::MAX) + 3) * SLOT_US)), 1);
        let stepped = Micros((u64::from(u32::MAX) - 10_000) * SLOT_US);
        assert_eq!(sent.uncounted(stepped), 0);
        sent.count(stepped);
        assert_eq!(sent.uncounted(stepped), 1);
        (0..1000).for_each(|_| sent.count(stepped));
        assert_eq!(sent.uncounted(stepped), 255);
    }
}
