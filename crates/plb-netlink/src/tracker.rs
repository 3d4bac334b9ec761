//! Turns a series of `tcp_info` readings of one connection into the events that [`Detector`] takes.
//!
//! User space sees neither ACKs nor sends, only totals. A round ends at the first reading at least one round trip after
//! the round began. Every reading counts as the moment before the next packet is sent. The module is pure; the caller
//! reads the sockets.

use std::time::Duration;

use crate::detector::{Cause, Config, Detector};
use crate::tcpinfo::TcpInfo;

/// One connection under observation.
#[derive(Clone, Debug)]
pub struct Tracker {
    detector: Detector,
    delivered: u32,
    delivered_ce: u32,
    timeouts: Option<u32>,
    round_began: Duration,
}

impl Tracker {
    /// Starts with the first reading. Returns `None` if this kernel does not count deliveries (before Linux 4.18).
    pub fn new(config: Config, now: Duration, info: &TcpInfo) -> Option<Self> {
        Some(Self {
            detector: Detector::new(config),
            delivered: info.delivered?,
            delivered_ce: info.delivered_ce?,
            timeouts: timeouts(info),
            round_began: now,
        })
    }

    /// Processes the next reading. Returns `Some` if the connection must get another label now. `random` is 32 random
    /// bits.
    pub fn observe(&mut self, now: Duration, info: &TcpInfo, random: u32) -> Option<Cause> {
        let (Some(delivered), Some(delivered_ce)) = (info.delivered, info.delivered_ce) else { return None };
        // These are the kernel's totals; they wrap.
        let new = delivered.wrapping_sub(std::mem::replace(&mut self.delivered, delivered));
        let new_ce = delivered_ce.wrapping_sub(std::mem::replace(&mut self.delivered_ce, delivered_ce));
        self.detector.on_ack(new.into(), new_ce.into());
        let before = std::mem::replace(&mut self.timeouts, timeouts(info));
        if let (Some(before), Some(after)) = (before, self.timeouts)
            && after != before
        {
            self.round_began = now;
            return Some(self.detector.on_timeout(now, random));
        }
        let round_trip = Duration::from_micros(info.rtt_us.into());
        if now.saturating_sub(self.round_began) >= round_trip {
            self.round_began = now;
            self.detector.on_round(now);
        }
        self.detector.before_send(info.unacked.into())
    }

    /// Returns the number of consecutive congested rounds, for display.
    pub fn congested_rounds(&self) -> u8 {
        self.detector.congested_rounds()
    }
}

/// Returns the number of timeouts so far. Before Linux 6.7 `tcpi_rehash` is used instead: without PLB hooks it counts
/// only timeouts.
fn timeouts(info: &TcpInfo) -> Option<u32> {
    info.total_rto.map(u32::from).or(info.rehash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detector::Threshold;

    const MS: Duration = Duration::from_millis(1);

    fn reading(delivered: u32, ce: u32, unacked: u32) -> TcpInfo {
        TcpInfo {
            unacked,
            rtt_us: 10_000,
            delivered: Some(delivered),
            delivered_ce: Some(ce),
            total_rto: Some(0),
            ..TcpInfo::default()
        }
    }

    fn tracker(first: &TcpInfo) -> Tracker {
        let config = Config::new(Threshold::HALF, 1, 2, 60_000 * MS).unwrap();
        Tracker::new(config, Duration::ZERO, first).unwrap()
    }

    #[test]
    fn readings_within_one_round_trip_are_one_round() {
        let mut tracker = tracker(&reading(0, 0, 5));
        for (ms, delivered, congested_rounds) in [(4, 10, 0), (8, 20, 0), (10, 30, 1), (19, 40, 1)] {
            assert_eq!(tracker.observe(ms * MS, &reading(delivered, delivered, 5), 0), None);
            assert_eq!(tracker.congested_rounds(), congested_rounds, "{ms} ms");
        }
        assert_eq!(tracker.observe(20 * MS, &reading(50, 50, 5), 0), Some(Cause::Forced));
    }

    #[test]
    fn an_idle_connection_moves_after_m_rounds() {
        let mut tracker = tracker(&reading(0, 0, 5));
        assert_eq!(tracker.observe(10 * MS, &reading(10, 6, 3), 0), None);
        assert_eq!(tracker.observe(11 * MS, &reading(13, 9, 0), 0), Some(Cause::Idle));
    }

    #[test]
    fn totals_wrap() {
        let mut tracker = tracker(&reading(u32::MAX - 4, u32::MAX - 1, 1));
        // 10 delivered, 6 marked: congested. A plain subtraction would overflow.
        assert_eq!(tracker.observe(10 * MS, &reading(5, 4, 1), 0), None);
        assert_eq!(tracker.congested_rounds(), 1);
    }

    #[test]
    fn timeouts_are_seen_on_new_and_old_kernels() {
        let old = |rehash| TcpInfo { total_rto: None, rehash: Some(rehash), ..reading(0, 0, 1) };
        let new = |total| TcpInfo { total_rto: Some(total), ..reading(0, 0, 1) };
        for (before, after) in [(old(3), old(4)), (new(0), new(2))] {
            let mut tracker = tracker(&before);
            assert_eq!(tracker.observe(MS, &before, 0), None);
            assert_eq!(tracker.observe(2 * MS, &after, 0), Some(Cause::Timeout));
            assert_eq!(tracker.observe(3 * MS, &after, 0), None);
        }
    }

    #[test]
    fn without_delivery_counts_there_is_nothing_to_track() {
        let config = Config::default();
        assert!(Tracker::new(config, Duration::ZERO, &TcpInfo::default()).is_none());
    }
}
