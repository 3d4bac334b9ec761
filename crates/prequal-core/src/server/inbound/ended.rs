//! The log of one replica. It holds the results of the latest requests on all workers, and what else all workers must
//! agree on: how long the replica has been up, and where its probes arrive.
//!
//! Each worker has its own [`Replica`], appends the results of its own requests, and reads what others have appended. A
//! worker that seldom reads misses entries that have left the log. Its estimates then leave out those requests and
//! their time.

use std::borrow::Cow;

use bytemuck::Zeroable;

use crate::server::replica::Replica;
use crate::server::tracker::Ended;
use crate::shared::blob::{Blob, BlobError, Tag, read_plain};
use crate::shared::endpoint::Endpoint;
use crate::shared::outcome::Outcome;
use crate::shared::time::{MAX_LATENCY_US, Micros};

/// Number of requests kept.
pub const LOG_ENTRIES: usize = 64;

/// The log. It is plain data, and its bytes are the blob in shared data.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct EndedLog {
    tag: Tag,
    /// Port of the replica's host where probes arrive; 0 means the serving port.
    probe_port: u16,
    /// Time since which the replica has been able to serve, microseconds; 0 while it cannot.
    up: u64,
    /// Number of requests so far.
    written: u64,
    events: [LogEntry; LOG_ENTRIES],
}

#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct LogEntry {
    at: u64,
    latency_us: u32,
    /// From the low end: two bits of outcome, then the RIF at arrival, then the level at the end. Both are at most
    /// [`MAX_RIF`].
    counts: u32,
    /// Number of requests at the server when this one arrived, itself included.
    arrived_as: u32,
    padding: u32,
}

/// Position up to which a worker has read the log.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ReadPosition(u64);

impl Default for EndedLog {
    fn default() -> Self {
        Self { tag: Self::TAG, ..Self::zeroed() }
    }
}

impl EndedLog {
    /// Initialises an empty log from `replica`. Returns true if the log was empty.
    pub fn begin(&mut self, replica: &Replica, now: Micros) -> bool {
        let blank = self.written == 0 && self.up == 0;
        if blank {
            self.up = replica.up().unwrap_or(now).0;
        }
        blank
    }

    /// Records in `replica` what others have appended since `seen`.
    pub fn read(&self, seen: &mut ReadPosition, replica: &mut Replica) {
        // A log that was replaced holds fewer entries than this worker has read.
        let from = if seen.0 > self.written { 0 } else { seen.0 };
        let kept = self.written.saturating_sub(LOG_ENTRIES as u64);
        replica.missed(kept.saturating_sub(from));
        for number in from.max(kept)..self.written {
            if let Some(event) = self.events.get(number as usize % LOG_ENTRIES) {
                if from < kept && number == kept {
                    replica.tracker.missed_until(Micros(event.at));
                }
                replica.record(event.ended());
            }
        }
        seen.0 = self.written;
        replica.set_up((self.up != 0).then_some(Micros(self.up)));
    }

    /// Appends the result of a request. The caller has read the log before and has recorded this request itself.
    pub fn append(&mut self, seen: &mut ReadPosition, ended: Ended) {
        if let Some(event) = self.events.get_mut(self.written as usize % LOG_ENTRIES) {
            *event = LogEntry::from(ended);
        }
        self.written = self.written.wrapping_add(1);
        seen.0 = self.written;
    }

    /// Sets whether the replica can serve. Returns true if that is a change.
    pub fn set_up(&mut self, up: bool, now: Micros) -> bool {
        if up == (self.up != 0) {
            return false;
        }
        self.up = if up { now.0 } else { 0 };
        true
    }

    /// Returns the endpoint where probes arrive, if it differs from `endpoint`.
    pub fn probe_endpoint(&self, endpoint: Endpoint) -> Option<Endpoint> {
        (self.probe_port != 0 && self.probe_port != endpoint.port())
            .then(|| endpoint.with_port(self.probe_port))
    }

    /// Records that a probe for `endpoint` arrived at `at`. An address on another host is ignored, because a report
    /// cannot carry it. Returns true if the endpoint is new.
    pub fn probed_at(&mut self, endpoint: Endpoint, at: Endpoint) -> bool {
        let changed = at.same_host(&endpoint) && self.probe_endpoint(endpoint).unwrap_or(endpoint) != at;
        if changed {
            self.probe_port = at.port();
        }
        changed
    }
}

impl From<Ended> for LogEntry {
    fn from(ended: Ended) -> Self {
        let outcome = match ended.outcome {
            Outcome::Success => 0,
            Outcome::Failure => 1,
            Outcome::Aborted => 2,
            Outcome::Streaming => 3,
        };
        let (rif, level) = (ended.rif_at_arrival.min(MAX_RIF), ended.level.min(MAX_RIF));
        let arrived_as = ended.arrived_as;
        let counts = level << (2 + RIF_BITS) | rif << 2 | outcome;
        Self {
            at: ended.at.0,
            latency_us: ended.latency_us.min(MAX_LATENCY_US),
            counts,
            arrived_as,
            padding: 0,
        }
    }
}

impl LogEntry {
    fn ended(self) -> Ended {
        let outcome = match self.counts & 3 {
            0 => Outcome::Success,
            1 => Outcome::Failure,
            2 => Outcome::Aborted,
            _ => Outcome::Streaming,
        };
        let (rif_at_arrival, level) = (self.counts >> 2 & MAX_RIF, self.counts >> (2 + RIF_BITS));
        let (at, latency_us) = (Micros(self.at), self.latency_us);
        Ended { at, rif_at_arrival, arrived_as: self.arrived_as, level, latency_us, outcome }
    }
}

/// Number of bits of a request count.
const RIF_BITS: u32 = 15;
/// Maximum count; higher counts are stored as this. The estimates do not distinguish higher counts.
const MAX_RIF: u32 = (1 << RIF_BITS) - 1;

impl Blob for EndedLog {
    const TAG: Tag = Tag::new(u32::from_le_bytes(*b"pqel"), 2);

    fn decode(bytes: &[u8]) -> Result<Self, BlobError> {
        let log: Self = read_plain(bytes)?;
        let sound = log.events.iter().all(|event| event.latency_us <= MAX_LATENCY_US);
        if sound { Ok(log) } else { Err(BlobError::Content) }
    }

    fn encode(&self) -> Cow<'_, [u8]> {
        bytemuck::bytes_of(self).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::tracker::{Present, TrackerConfig};
    use crate::wire::report::LoadReport;
    use proptest::prelude::*;

    /// A worker: its replica, and how far it has read the shared log.
    struct Worker(Replica, ReadPosition);

    impl Worker {
        fn new() -> Self {
            Self(Replica::new(TrackerConfig::default(), None), ReadPosition::default())
        }

        fn serve(&mut self, log: &mut EndedLog, at: u64, took_ms: u64, outcome: Outcome) {
            let ticket = self.0.tracker.start_behind(ms(at), TWO);
            let now = ms(at + took_ms);
            let ended = self.0.finish(ticket, now, outcome);
            log.begin(&self.0, now);
            log.read(&mut self.1, &mut self.0);
            log.append(&mut self.1, ended);
        }

        fn report(&mut self, log: &EndedLog, at: u64) -> String {
            log.read(&mut self.1, &mut self.0);
            let endpoint: Endpoint = "10.0.0.1:80".parse().unwrap();
            let report = self.0.report_at(ms(at), TWO, endpoint, log.probe_endpoint(endpoint), None);
            LoadReport { capacity: None, ..report }.to_string()
        }
    }

    const TWO: Present = Present { rif: 2, away: 0 };

    fn ms(ms: u64) -> Micros {
        Micros::from_millis(1_000_000 + ms)
    }

    #[test]
    fn a_worker_without_requests_reports_what_the_others_saw() {
        let mut log = EndedLog::default();
        let (mut one, mut other) = (Worker::new(), Worker::new());
        for at in 0..5 {
            one.serve(&mut log, at * 50, 30, Outcome::Success);
        }
        assert_eq!(other.report(&log, 1000), "2;30000;10.0.0.1:80;up=0");
        assert_eq!(one.report(&log, 1000), other.report(&log, 1000));
        for at in 0..20 {
            other.serve(&mut log, 2000 + at, 1, Outcome::Failure);
        }
        assert_eq!(one.report(&log, 2030), other.report(&log, 2030));
        assert!(one.report(&log, 2030).contains(";fail="));
        // Each request counts once: a worker does not read back what it appended.
        let mut late = Worker::new();
        assert_eq!(late.report(&log, 2030), one.report(&log, 2030));
    }

    #[test]
    fn a_worker_that_reads_rarely_uses_the_latest_results() {
        let mut log = EndedLog::default();
        let (mut one, mut other) = (Worker::new(), Worker::new());
        for at in 0..1000 {
            one.serve(&mut log, at * 10, if at < 900 { 2 } else { 7 }, Outcome::Success);
        }
        assert_eq!(other.report(&log, 10_000), "2;7000;10.0.0.1:80;up=9");
    }

    #[test]
    fn all_workers_report_one_age_which_survives_a_lost_log() {
        let mut log = EndedLog::default();
        let (mut one, mut other) = (Worker::new(), Worker::new());
        one.serve(&mut log, 0, 1, Outcome::Success);
        assert!(!log.set_up(true, ms(5000)) && log.set_up(false, ms(5000)));
        assert!(other.report(&log, 9000).ends_with(";up=0"));
        assert!(log.set_up(true, ms(10_000)));
        assert!(other.report(&log, 13_000).ends_with(";up=3"));
        // A damaged log is replaced. A worker that knows the replica's age restores it.
        let mut log = EndedLog::default();
        other.serve(&mut log, 13_000, 1, Outcome::Success);
        assert!(other.report(&log, 14_000).ends_with(";up=4"));
        assert!(one.report(&log, 14_000).ends_with(";up=4"), "what it had seen is gone, and it reads on");
    }

    #[test]
    fn a_probe_port_of_the_same_host_is_recorded() {
        let mut log = EndedLog::default();
        let endpoint: Endpoint = "10.0.0.1:80".parse().unwrap();
        for (at, changed, expected) in [
            ("10.0.0.1:80", false, None),
            ("10.0.0.2:81", false, None),
            ("10.0.0.1:81", true, Some("10.0.0.1:81")),
            ("10.0.0.1:81", false, Some("10.0.0.1:81")),
            ("10.0.0.1:80", true, None),
        ] {
            assert_eq!(log.probed_at(endpoint, at.parse().unwrap()), changed, "{at}");
            assert_eq!(
                log.probe_endpoint(endpoint),
                expected.map(|text: &str| text.parse().unwrap()),
                "{at}"
            );
        }
    }

    #[test]
    fn invalid_logs_are_refused() {
        let log = EndedLog::default();
        assert_eq!(EndedLog::decode(&log.encode()).unwrap().encode(), log.encode());
        assert!(matches!(EndedLog::decode(&[]), Err(BlobError::Size { .. })));
        assert_eq!(EndedLog::decode(&[0; size_of::<EndedLog>()]).unwrap_err(), BlobError::Version);
        let mut broken = log;
        broken.events[3].latency_us = u32::MAX;
        assert_eq!(EndedLog::decode(&broken.encode()).unwrap_err(), BlobError::Content);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), size_of::<EndedLog>()), now: u64, seen: u64) {
            let mut log: EndedLog = bytemuck::pod_read_unaligned(&bytes);
            log.tag = EndedLog::TAG;
            log.events.iter_mut().for_each(|event| event.latency_us %= MAX_LATENCY_US);
            let mut log = EndedLog::decode(&log.encode()).unwrap();
            let mut replica = Replica::new(TrackerConfig::default(), None);
            let mut seen = ReadPosition(seen);
            log.read(&mut seen, &mut replica);
            let ticket = replica.tracker.start(Micros(now));
            let ended = replica.finish(ticket, Micros(now), Outcome::Success);
            log.append(&mut seen, ended);
            let _ = replica.report(Micros(now), "[::1]:1".parse().unwrap(), None, None);
        }
    }
}
