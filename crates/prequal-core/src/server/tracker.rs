//! The server side: counts requests in flight (RIF) and estimates the latency of a request that arrives now.
//!
//! Paper §4, "Load signals": a finished request is recorded under the RIF that it found on arrival. An estimate is the
//! median of recent samples at or near the current RIF. Where the paper is silent:
//!
//! - If there is no sample at this RIF, the nearest RIF with a sample counts. If no sample is younger than
//!   [`TrackerConfig::max_age_us`], the latency is *unknown*, which makes clients send one request to find out (see
//!   [`crate::client::pool`]).
//! - A request that has waited for more than [`TrackerConfig::stall_factor`] medians raises the estimate to its age, so
//!   that a stall shows before anything finishes. It does not raise the estimate if a later request has finished: then
//!   the request is heavy, not stuck. Below this threshold, the age says little. The age is low wherever many requests
//!   have just arrived, so counting it would send even more requests there (in the simulator, at 1.74 times the
//!   allocated CPU, p99.9 was then 997 ms instead of 558).
//! - The time that a request waits for its client (a slow upload or download) does not count.
//! - Failures and aborts are never samples. A replica that only fails would stay unknown, so every client would try it.
//!   Instead it reports [`TrackerConfig::failure_latency_us`] for `max_age_us` after a failure.
//!
//! The tracker also counts what [`crate::server::capacity`] needs: how many requests are at the server, and for how
//! long. A request that takes ten times as long as the others, while ten of them pass it, no longer counts as at the
//! server; its time up to that moment does count. If it still counted, one request in 500 that takes a thousand times
//! as long would make its replica look two or three times as slow. Clients would then move to other replicas, although
//! this one answers everything else in time.
//!
//! The tracker does not synchronise: embedders wrap it in a mutex (every operation is O(1) amortised). Where several
//! workers of an Envoy serve one replica, each has its own tracker, receives the total number of requests in flight,
//! and passes the results of its requests ([`Ended`]) to the others.

use crate::server::capacity::Levels;
use crate::shared::capacity::Capacity;
use crate::shared::in_flight::InFlight;
use crate::shared::outcome::Outcome;
use crate::shared::time::{MAX_LATENCY_US, Micros};

/// Settings of a [`Tracker`]. All durations are in microseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrackerConfig {
    /// Age beyond which samples are forgotten. Default 15 s: a replica that no client picks is tried again that often.
    /// With a much shorter age, the estimate at a rarely reached RIF comes from lower RIFs, and is too low exactly when
    /// it matters (in the simulator, at 1.74 times the allocated CPU, an age of 5 s does as well as 15 s, but with 1 s,
    /// queries time out).
    pub max_age_us: u64,
    /// A request that has waited for more than this many times the median latency raises the estimate. Default 3;
    /// 0 means never (the paper).
    pub stall_factor: u32,
    /// Latency reported while there is no sample and a request failed within `max_age_us`. Default 1 s.
    pub failure_latency_us: u32,
}

impl Default for TrackerConfig {
    fn default() -> Self {
        Self { max_age_us: 15_000_000, stall_factor: 3, failure_latency_us: 1_000_000 }
    }
}

/// Result of a request that has ended, as input to the estimate.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ended {
    /// When it ended.
    pub at: Micros,
    /// Number of other requests in flight when it arrived.
    pub rif_at_arrival: u32,
    /// Number of requests at the server when it arrived, itself included, at least 1.
    pub arrived_as: u32,
    /// Number of requests at the server when it ended, itself included; 0 if it was not at the server.
    pub level: u32,
    /// Time from its arrival to its end, less the time it was away, microseconds, at most [`MAX_LATENCY_US`].
    pub latency_us: u32,
    /// How it ended.
    pub outcome: Outcome,
}

/// A request in flight. Pass it to [`Tracker::finish`]. It cannot be copied, so it is counted down only once.
#[derive(Debug)]
#[must_use = "a ticket that is dropped leaves the RIF one too high"]
pub struct Ticket {
    visit: Visit,
    rif_at_arrival: u32,
    arrived_as: u32,
}

impl Ticket {
    /// Returns an identifier of the request for [`Tracker::client_waits`]. It outlives the ticket.
    pub fn visit(&self) -> Visit {
        self.visit
    }
}

/// Requests in flight, here and elsewhere.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Present {
    /// Number of requests in flight.
    pub rif: u32,
    /// Number of those that are not at the server: streams, very long requests, and requests that wait for their
    /// client.
    pub away: u32,
}

impl Present {
    /// Number of requests at the server.
    fn level(self) -> u32 {
        self.rif.saturating_sub(self.away)
    }
}

/// Identifies a request that is, or was, in flight.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Visit {
    slot: usize,
    number: u64,
}

/// State of a request in flight.
#[derive(Clone, Copy, Debug)]
struct Open {
    number: u64,
    arrived: Micros,
    /// When it last came to the server; the linked requests are in this order.
    since: Micros,
    /// Since when it does not count as at the server; `None` while it does.
    away: Option<Micros>,
    /// Whether it stays away: a stream, or a very long request.
    stays_away: bool,
    /// Its place among the overtaken requests, and the number of successes when it was first overtaken.
    overtaken: Option<(usize, u64)>,
    /// Time it was away before `since`, microseconds.
    away_us: u64,
}

/// Requests in flight and recent latencies of one replica.
#[derive(Debug)]
pub struct Tracker {
    config: TrackerConfig,
    rif: u32,
    /// Number of requests in flight that are not at the server: streams, very long requests, and requests that wait for
    /// their client.
    away: u32,
    /// All requests in flight. Those that may be stuck (at the server and not overtaken) are linked in order of age.
    in_flight: InFlight<Open>,
    /// Requests at the server that later ones have overtaken, in order of age.
    overtaken: InFlight<Visit>,
    arrivals: u64,
    /// Number of requests that have succeeded, here and elsewhere.
    successes: u64,
    levels: Levels,
    buckets: Box<[Bucket]>,
    /// Highest bucket ever used plus one; limits the search for a neighbour.
    used: usize,
    last_failure: Option<Micros>,
}

impl Tracker {
    /// Creates the tracker of an idle replica without history.
    pub fn new(config: TrackerConfig) -> Self {
        Self {
            config,
            rif: 0,
            away: 0,
            in_flight: InFlight::default(),
            overtaken: InFlight::default(),
            arrivals: 0,
            successes: 0,
            levels: Levels::new(),
            buckets: vec![Bucket::default(); BUCKETS].into_boxed_slice(),
            used: 0,
            last_failure: None,
        }
    }

    /// Counts a request that arrives.
    pub fn start(&mut self, now: Micros) -> Ticket {
        self.start_behind(now, self.present())
    }

    /// Counts a request that arrives where `others` are in flight, here and elsewhere.
    pub fn start_behind(&mut self, now: Micros, others: Present) -> Ticket {
        self.arrivals = self.arrivals.wrapping_add(1);
        let number = self.arrivals;
        let slot = self.in_flight.insert(Open {
            number,
            arrived: now,
            since: now,
            away: None,
            stays_away: false,
            overtaken: None,
            away_us: 0,
        });
        self.in_flight.link(slot);
        self.rif = self.rif.saturating_add(1);
        let arrived_as = others.level().saturating_add(1);
        self.levels.moved(now, others.level(), arrived_as);
        Ticket { visit: Visit { slot, number }, rif_at_arrival: others.rif, arrived_as }
    }

    /// Ends a request, whatever its outcome. Records and returns its result.
    pub fn finish(&mut self, ticket: Ticket, now: Micros, outcome: Outcome) -> Ended {
        self.finish_among(ticket, now, outcome, self.present())
    }

    /// Like [`Self::finish`], where `present` are in flight here and elsewhere, including this request.
    pub fn finish_among(&mut self, ticket: Ticket, now: Micros, outcome: Outcome, present: Present) -> Ended {
        let level = present.level();
        self.rif = self.rif.saturating_sub(1);
        let open = self.in_flight.remove(ticket.visit.slot);
        if let Some((place, _)) = open.and_then(|open| open.overtaken) {
            self.overtaken.remove(place);
        }
        let arrived = open.map_or(now, |open| open.arrived);
        let away_us =
            open.map_or(0, |open| open.away_us + open.away.map_or(0, |since| now.saturating_since(since)));
        let level = match open.and_then(|open| open.away) {
            Some(_) => {
                self.away = self.away.saturating_sub(1);
                0
            }
            None => level,
        };
        let latency = now.saturating_since(arrived).saturating_sub(away_us);
        let latency_us = u32::try_from(latency).unwrap_or(u32::MAX).min(MAX_LATENCY_US);
        let Ticket { rif_at_arrival, arrived_as, .. } = ticket;
        let ended = Ended { at: now, rif_at_arrival, arrived_as, level, latency_us, outcome };
        if level > 0 {
            self.levels.moved(now, level, level - 1);
        }
        self.take(ended);
        if let Some(open) = open
            && outcome == Outcome::Success
        {
            self.overtake(open.since);
            self.set_long_ones_apart(now);
        }
        ended
    }

    /// Records the result of a request that ended elsewhere.
    pub fn record(&mut self, ended: Ended) {
        if ended.level > 0 {
            let arrived = Micros(ended.at.0.saturating_sub(ended.latency_us.into()));
            self.levels.heard(arrived, ended.arrived_as.saturating_sub(1), ended.arrived_as);
            self.levels.heard(ended.at, ended.level, ended.level - 1);
        }
        self.take(ended);
        if ended.outcome == Outcome::Success && ended.level > 0 {
            self.overtake(Micros(ended.at.0.saturating_sub(ended.latency_us.into())));
        }
    }

    /// Records that the results of other workers' requests that ended before `at` are lost. Their time is not counted
    /// either.
    pub fn missed_until(&mut self, at: Micros) {
        self.levels.resume(at);
    }

    fn take(&mut self, ended: Ended) {
        match ended.outcome {
            Outcome::Success => {
                let index = bucket_of(ended.rif_at_arrival);
                if let Some(bucket) = self.buckets.get_mut(index) {
                    bucket.push(Sample { latency: ended.latency_us, at: ended.at });
                    self.used = self.used.max(index + 1);
                }
                self.levels.served(ended.at, ended.level, ended.arrived_as, ended.latency_us);
            }
            Outcome::Failure => self.last_failure = Some(ended.at),
            Outcome::Aborted | Outcome::Streaming => {}
        }
    }

    /// Marks as overtaken the requests that came to the server before `since`: they are heavy, not stuck.
    fn overtake(&mut self, since: Micros) {
        self.successes = self.successes.wrapping_add(1);
        while let Some((slot, open)) = self.in_flight.oldest().filter(|(_, open)| open.since < since) {
            self.in_flight.unlink(slot);
            let place = self.overtaken.insert(Visit { slot, number: open.number });
            self.overtaken.link(place);
            if let Some(open) = self.in_flight.get_mut(slot) {
                open.overtaken = Some((place, self.successes));
            }
        }
    }

    /// Stops counting very long requests as at the server.
    fn set_long_ones_apart(&mut self, now: Micros) {
        let Some(expected_us) = self.levels.expected_us() else { return };
        while let Some((_, visit)) = self.overtaken.oldest()
            && let Some(open) = self.open(visit)
            && let Some((_, since)) = open.overtaken
            && now.saturating_since(open.since) as f64 > LONG * expected_us
            && self.successes.wrapping_sub(since) >= OVERTAKEN
        {
            self.leave_for_good(visit, now);
        }
    }

    /// Turns a request into a stream. It still counts as in flight, but no longer says anything about the server's
    /// speed.
    pub fn streaming(&mut self, ticket: &Ticket, now: Micros) {
        self.leave_for_good(ticket.visit, now);
    }

    fn leave_for_good(&mut self, visit: Visit, now: Micros) {
        self.client_waits(visit, now);
        if let Some(open) = self.open(visit) {
            open.stays_away = true;
        }
    }

    /// Records that the request now waits for its client, which uploads or downloads slowly. It stays in flight.
    pub fn client_waits(&mut self, visit: Visit, now: Micros) {
        let Some(open) = self.open(visit).filter(|open| open.away.is_none()) else { return };
        open.away = Some(now);
        if let Some((place, _)) = open.overtaken.take() {
            self.overtaken.remove(place);
        }
        self.in_flight.unlink(visit.slot);
        self.away = self.away.saturating_add(1);
        let level = self.levels.level();
        self.levels.moved(now, level, level.saturating_sub(1));
    }

    /// Records that the client is back: the request is at the server again.
    pub fn client_is_back(&mut self, visit: Visit, now: Micros) {
        let Some(open) = self.open(visit).filter(|open| !open.stays_away) else { return };
        let Some(away) = open.away.take() else { return };
        open.away_us += now.saturating_since(away);
        open.since = now;
        self.in_flight.link(visit.slot);
        self.away = self.away.saturating_sub(1);
        self.levels.came_back(now, away);
    }

    fn open(&mut self, visit: Visit) -> Option<&mut Open> {
        self.in_flight.get_mut(visit.slot).filter(|open| open.number == visit.number)
    }

    /// Returns the number of requests in flight now.
    pub fn rif(&self) -> u32 {
        self.rif
    }

    /// Returns the requests in flight here.
    pub fn present(&self) -> Present {
        Present { rif: self.rif, away: self.away }
    }

    /// Returns base latency and knee, for a RIF that counts the requests in flight here; `None` until a request has
    /// been served.
    pub fn capacity(&mut self, now: Micros) -> Option<Capacity> {
        self.capacity_after(now, self.away, None)
    }

    /// Like [`Self::capacity`], for a RIF that includes `away` requests that are not at the server, and after `leaving`
    /// has left with a good response.
    pub fn capacity_after(&mut self, now: Micros, away: u32, leaving: Option<Visit>) -> Option<Capacity> {
        let capacity = self.levels.capacity(now, leaving.is_some())?;
        let away = u16::try_from(away).unwrap_or(u16::MAX);
        Some(Capacity { knee: capacity.knee.saturating_add(away), ..capacity })
    }

    /// Returns the expected latency of a request that arrives now, microseconds; `None` if nothing is known.
    pub fn latency(&self, now: Micros) -> Option<u32> {
        self.latency_at(now, self.rif, None)
    }

    /// Like [`Self::latency`], where `rif` requests are in flight here and elsewhere, not counting `leaving`, which is
    /// about to leave. A stall shows only in the tracker that counts the waiting requests.
    pub fn latency_at(&self, now: Micros, rif: u32, leaving: Option<Visit>) -> Option<u32> {
        let centre = bucket_of(rif);
        match self.nearest_median(centre, now, self.config.max_age_us) {
            Some(median) => {
                let waiting = self.waiting(now, leaving);
                let stalled = waiting.checked_div(self.config.stall_factor).is_some_and(|part| part > median);
                Some(if stalled { waiting } else { median })
            }
            None => self
                .last_failure
                .filter(|at| now.distance(*at) < self.config.max_age_us)
                .map(|_| self.config.failure_latency_us),
        }
    }

    /// Waiting time of the oldest request that is at the server and has not been overtaken, microseconds.
    fn waiting(&self, now: Micros, leaving: Option<Visit>) -> u32 {
        let oldest = self.in_flight.oldest_but(leaving.map(|visit| visit.slot));
        oldest
            .map_or(0, |open| u32::try_from(now.saturating_since(open.since)).unwrap_or(u32::MAX))
            .min(MAX_LATENCY_US)
    }

    fn nearest_median(&self, centre: usize, now: Micros, max_age: u64) -> Option<u32> {
        // At equal distance, the higher RIF is used, to be cautious.
        (0..BUCKETS).take_while(|d| *d <= centre.max(self.used)).find_map(|distance| {
            let above = self.buckets.get(centre + distance).and_then(|b| b.median(now, max_age));
            above.or_else(|| self.buckets.get(centre.checked_sub(distance)?)?.median(now, max_age))
        })
    }
}

/// Multiple of the expected latency beyond which an overtaken request is very long. With 5, requests that are merely
/// long also leave the estimate; with 20, very long ones still raise it (ADR 8).
const LONG: f64 = 10.0;
/// Number of requests that must have succeeded since the long one was first overtaken. If the replica itself has become
/// slow, fewer requests succeed in the meantime, so its requests are not set apart.
const OVERTAKEN: u64 = 10;

/// Recent samples for one RIF (or a narrow range of them).
#[derive(Clone, Copy, Debug)]
struct Bucket {
    samples: [Sample; SAMPLES],
    len: u8,
    next: u8,
}

impl Default for Bucket {
    fn default() -> Self {
        Self { samples: [Sample::default(); SAMPLES], len: 0, next: 0 }
    }
}

impl Bucket {
    fn push(&mut self, sample: Sample) {
        if let Some(slot) = self.samples.get_mut(usize::from(self.next)) {
            *slot = sample;
        }
        self.next = (self.next + 1) % SAMPLES as u8;
        self.len = (self.len + 1).min(SAMPLES as u8);
    }

    fn median(&self, now: Micros, max_age: u64) -> Option<u32> {
        if self.len == 0 {
            return None;
        }
        let mut young = [0u32; SAMPLES];
        let mut count = 0;
        for sample in self.samples.iter().take(usize::from(self.len)) {
            if now.distance(sample.at) < max_age
                && let Some(slot) = young.get_mut(count)
            {
                *slot = sample.latency;
                count += 1;
            }
        }
        let young = young.get_mut(..count)?;
        young.sort_unstable();
        young.get(count / 2).copied()
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    latency: u32,
    at: Micros,
}

/// Returns the bucket of a RIF: exact below 16, then four buckets per octave.
fn bucket_of(rif: u32) -> usize {
    if rif < 16 {
        return rif as usize;
    }
    let octave = rif.ilog2();
    let quarter = (rif >> (octave - 2)) & 3;
    ((octave - 4) * 4 + quarter) as usize + 16
}

/// `bucket_of(u32::MAX) + 1`.
const BUCKETS: usize = 128;

/// Number of samples kept per bucket: at a high request rate, those of the last few hundredths of a second (paper §4).
/// In simulation, more samples drive clients to the same replica, and fewer are too noisy.
const SAMPLES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ms(ms: u64) -> Micros {
        Micros::from_millis(ms)
    }

    fn serve(tracker: &mut Tracker, at: u64, latency: u64) {
        let ticket = tracker.start(ms(at));
        tracker.finish(ticket, ms(at + latency), Outcome::Success);
    }

    #[test]
    fn a_new_tracker_has_no_estimate() {
        let tracker = Tracker::new(TrackerConfig::default());
        assert_eq!((tracker.rif(), tracker.latency(ms(5))), (0, None));
    }

    #[test]
    fn the_estimate_is_the_median_at_the_current_rif() {
        let mut tracker = Tracker::new(TrackerConfig::default());
        for (i, latency) in [10, 500, 20, 30, 25].into_iter().enumerate() {
            serve(&mut tracker, 1000 + i as u64, latency);
        }
        assert_eq!(tracker.latency(ms(1600)), Some(25_000), "one outlier does not move a median");
    }

    #[test]
    fn samples_at_the_current_rif_beat_those_at_others() {
        let mut tracker = Tracker::new(TrackerConfig::default());
        serve(&mut tracker, 0, 10);
        let first = tracker.start(ms(20));
        serve(&mut tracker, 20, 40); // arrived while one was in flight
        tracker.finish(first, ms(70), Outcome::Aborted);
        assert_eq!(tracker.latency(ms(80)), Some(10_000));
        let _held = tracker.start(ms(80));
        assert_eq!(tracker.latency(ms(80)), Some(40_000));
    }

    #[test]
    fn without_samples_at_the_current_rif_the_nearest_are_used() {
        let mut tracker = Tracker::new(TrackerConfig::default());
        serve(&mut tracker, 0, 10);
        let _a = tracker.start(ms(20));
        let _b = tracker.start(ms(20));
        assert_eq!(tracker.latency(ms(20)), Some(10_000), "nearest RIF");
        let mut tracker = Tracker::new(TrackerConfig::default());
        serve(&mut tracker, 0, 10);
        assert_eq!(tracker.latency(ms(14_000)), Some(10_000), "old, but all there is");
        assert_eq!(tracker.latency(ms(15_011)), None, "forgotten");
    }

    #[test]
    fn a_stall_shows_before_anything_finishes() {
        let mut tracker = Tracker::new(TrackerConfig::default());
        serve(&mut tracker, 0, 10);
        let _stuck = tracker.start(ms(100));
        assert_eq!(tracker.latency(ms(130)), Some(10_000), "no stall yet");
        assert_eq!(tracker.latency(ms(900)), Some(800_000));
        tracker.config.stall_factor = 0;
        assert_eq!(tracker.latency(ms(900)), Some(10_000), "the paper's estimator does not look at ages");
    }

    #[test]
    fn a_request_overtaken_by_later_ones_is_heavy_not_stuck() {
        let mut tracker = Tracker::new(TrackerConfig::default());
        serve(&mut tracker, 0, 10);
        let heavy = tracker.start(ms(100));
        serve(&mut tracker, 110, 10);
        assert_eq!(tracker.latency(ms(900)), Some(10_000), "a later one has finished");
        let next = tracker.start(ms(900));
        assert_eq!(tracker.latency(ms(1700)), Some(800_000), "none that came after this one has");
        // An error, an abort or the end of an earlier request says nothing.
        for outcome in [Outcome::Failure, Outcome::Aborted, Outcome::Streaming] {
            let other = tracker.start(ms(1700));
            tracker.finish(other, ms(1710), outcome);
        }
        tracker.finish(heavy, ms(1720), Outcome::Success);
        assert_eq!(tracker.latency(ms(1800)), Some(900_000));
        tracker.finish(next, ms(1800), Outcome::Aborted);
    }

    #[test]
    fn a_request_overtaken_in_another_worker_is_heavy_not_stuck() {
        let (mut one, mut other) =
            (Tracker::new(TrackerConfig::default()), Tracker::new(TrackerConfig::default()));
        serve(&mut one, 0, 10);
        let mut hears = |one: &mut Tracker, at: u64| {
            let ticket = other.start_behind(ms(at), Present { rif: 1, away: 0 });
            one.record(other.finish(ticket, ms(at + 10), Outcome::Success));
        };
        let heavy = one.start(ms(100));
        assert_eq!(one.latency_at(ms(900), 1, None), Some(800_000));
        hears(&mut one, 90);
        assert_eq!(one.latency_at(ms(900), 1, None), Some(800_000), "it came before");
        hears(&mut one, 110);
        assert_eq!(one.latency_at(ms(900), 1, None), Some(10_000));
        one.finish(heavy, ms(1000), Outcome::Success);
    }

    #[test]
    fn very_long_requests_do_not_make_the_replica_look_slow() {
        let base = |long: u64| {
            let mut tracker = Tracker::new(TrackerConfig::default());
            let held: Vec<_> = (0..long).map(|_| tracker.start(ms(0))).collect();
            // Every 20 ms, a request of 10 ms.
            for at in 0..500 {
                serve(&mut tracker, at * 20, 10);
                assert!(tracker.capacity(ms(at * 20 + 10)).is_some());
            }
            let capacity = tracker.capacity(ms(10_000)).unwrap();
            assert_eq!(u64::from(tracker.rif()), long);
            held.into_iter().for_each(|ticket| _ = tracker.finish(ticket, ms(10_000), Outcome::Success));
            assert_eq!((tracker.rif(), tracker.away), (0, 0));
            let ended = tracker.capacity(ms(10_050)).unwrap();
            assert!(ended.base_us < 12_000, "{ended:?}: their end shows nothing, either");
            (capacity.base_us, u64::from(capacity.knee))
        };
        for long in [0, 3] {
            let (base_us, knee) = base(long);
            assert!((9_990..12_000).contains(&base_us), "{long}: {base_us}");
            // The RIF on the wire counts the long requests, so the knee does, too.
            assert!((long + 1..=2 * long + 1).contains(&knee), "{long}: {knee}");
        }
    }

    /// A tracker after a second of requests that take 10 ms each, one every 20 ms; the next one is due at 1000 ms.
    fn at_ten_ms() -> Tracker {
        let mut tracker = Tracker::new(TrackerConfig::default());
        serve_from(&mut tracker, 0, 50);
        tracker
    }

    /// Serves `count` requests that take 10 ms each, one every 20 ms.
    fn serve_from(tracker: &mut Tracker, at: u64, count: u64) {
        for at in (0..count).map(|nth| at + nth * 20) {
            serve(tracker, at, 10);
            assert!(tracker.capacity(ms(at + 10)).is_some());
        }
    }

    #[test]
    fn a_very_long_request_is_one_that_is_ten_times_as_old_and_that_ten_have_overtaken() {
        // After the first request that overtakes the long one, ten more must do so. Nine are too few, although the long
        // request is old enough.
        let mut tracker = at_ten_ms();
        let long = tracker.start(ms(999));
        serve_from(&mut tracker, 1000, 10);
        assert_eq!(tracker.present(), Present { rif: 1, away: 0 });
        serve_from(&mut tracker, 1200, 1);
        assert_eq!(tracker.present(), Present { rif: 1, away: 1 });
        tracker.finish(long, ms(1300), Outcome::Success);
        assert_eq!(tracker.present(), Present::default());

        // Twenty requests pass this one while it is merely a little older than usual.
        let mut tracker = at_ten_ms();
        let long = tracker.start(ms(1000));
        let others: Vec<_> = (0..20).map(|_| tracker.start(ms(1001))).collect();
        others.into_iter().for_each(|ticket| _ = tracker.finish(ticket, ms(1011), Outcome::Success));
        assert_eq!(tracker.present(), Present { rif: 1, away: 0 });
        serve_from(&mut tracker, 1500, 1);
        assert_eq!(tracker.present(), Present { rif: 1, away: 1 });
        tracker.finish(long, ms(1600), Outcome::Aborted);
    }

    #[test]
    fn a_very_long_request_stays_away_when_its_client_is_back() {
        let mut tracker = at_ten_ms();
        let long = tracker.start(ms(1000));
        serve_from(&mut tracker, 1000, 20);
        tracker.client_waits(long.visit(), ms(1400));
        tracker.client_is_back(long.visit(), ms(1410));
        assert_eq!(tracker.present(), Present { rif: 1, away: 1 });
        tracker.finish(long, ms(1500), Outcome::Success);
        assert_eq!(tracker.present(), Present::default());
    }

    #[test]
    fn what_overtook_a_request_before_it_waited_for_its_client_does_not_count() {
        let mut tracker = at_ten_ms();
        let slow = tracker.start(ms(999));
        serve_from(&mut tracker, 1000, 5);
        tracker.client_waits(slow.visit(), ms(1100));
        tracker.client_is_back(slow.visit(), ms(1999));
        serve_from(&mut tracker, 2000, 10);
        assert_eq!(tracker.present(), Present { rif: 1, away: 0 });
        serve_from(&mut tracker, 2200, 1);
        assert_eq!(tracker.present(), Present { rif: 1, away: 1 });
        tracker.finish(slow, ms(2300), Outcome::Success);
        assert!(tracker.overtaken.oldest().is_none());
    }

    #[test]
    fn an_overtaken_request_that_ends_or_waits_for_its_client_does_not_hide_a_very_long_one() {
        let mut tracker = at_ten_ms();
        let [ends, waits] = [0, 0].map(|_| tracker.start(ms(998)));
        serve_from(&mut tracker, 1000, 1);
        tracker.finish(ends, ms(1010), Outcome::Success);
        tracker.client_waits(waits.visit(), ms(1010));
        let long = tracker.start(ms(1019));
        serve_from(&mut tracker, 1020, 1);
        tracker.finish(waits, ms(1030), Outcome::Success);
        assert_eq!(tracker.overtaken.len(), 1);
        serve_from(&mut tracker, 1040, 20);
        assert_eq!(tracker.present(), Present { rif: 1, away: 1 });
        tracker.finish(long, ms(1500), Outcome::Success);
    }

    #[test]
    fn the_end_of_a_very_long_request_overtakes_nothing_in_another_worker() {
        let (mut one, mut other) = (at_ten_ms(), at_ten_ms());
        let long = other.start(ms(1000));
        serve_from(&mut other, 1000, 20);
        let _stuck = one.start(ms(1200));
        // The latency of the long request does not include the time after it was left out. The other worker therefore
        // takes it for one that arrived later.
        let ended = other.finish(long, ms(2000), Outcome::Success);
        assert!(ended.level == 0 && ended.latency_us < 500_000, "{ended:?}");
        one.record(ended);
        assert_eq!(one.latency_at(ms(2000), 1, None), Some(800_000));
    }

    #[test]
    fn a_replica_that_has_become_slow_shows_it_although_requests_overtake_each_other() {
        let mut tracker = Tracker::new(TrackerConfig::default());
        for at in 0..100 {
            serve(&mut tracker, at * 20, 10);
            assert!(tracker.capacity(ms(at * 20 + 10)).is_some());
        }
        // From now on a request takes 200 or 300 ms.
        let mut open = std::collections::VecDeque::new();
        for at in 0..200 {
            let now = 2000 + at * 20;
            open.push_back((now + 200 + at % 2 * 100, tracker.start(ms(now))));
            while let Some(next) = open.iter().position(|(end, _)| *end <= now) {
                let (end, ticket) = open.remove(next).unwrap();
                tracker.finish(ticket, ms(end), Outcome::Success);
                assert!(tracker.capacity(ms(end)).is_some());
            }
        }
        let expected = tracker.capacity(ms(6000)).unwrap().latency_us(tracker.rif());
        assert!(expected > 150_000, "{expected}");
    }

    #[test]
    fn a_stream_counts_in_flight_but_is_no_stall_and_no_sample() {
        let mut tracker = Tracker::new(TrackerConfig::default());
        serve(&mut tracker, 0, 10);
        let socket = tracker.start(ms(100));
        tracker.streaming(&socket, ms(100));
        assert_eq!((tracker.rif(), tracker.latency(ms(1000))), (1, Some(10_000)));
        tracker.finish(socket, ms(9000), Outcome::Streaming);
        assert_eq!((tracker.rif(), tracker.latency(ms(9000))), (0, Some(10_000)));
    }

    #[test]
    fn failures_neither_lower_nor_erase_the_estimate() {
        let mut tracker = Tracker::new(TrackerConfig::default());
        serve(&mut tracker, 0, 100);
        for at in 100..110 {
            let ticket = tracker.start(ms(at));
            tracker.finish(ticket, ms(at), Outcome::Failure);
        }
        assert_eq!(tracker.latency(ms(120)), Some(100_000));
        let mut only_fails = Tracker::new(TrackerConfig::default());
        let ticket = only_fails.start(ms(0));
        only_fails.finish(ticket, ms(0), Outcome::Failure);
        assert_eq!(only_fails.latency(ms(10)), Some(1_000_000));
        assert_eq!(only_fails.latency(ms(15_001)), None, "forgiven");
    }

    #[test]
    fn after_the_clock_steps_back_samples_count_as_old() {
        let mut tracker = Tracker::new(TrackerConfig::default());
        serve(&mut tracker, 3_600_000, 10);
        let ticket = tracker.start(ms(3_600_100));
        tracker.finish(ticket, ms(3_600_100), Outcome::Failure);
        assert_eq!(tracker.latency(ms(3_600_000)), Some(10_000), "a small step");
        assert_eq!(tracker.latency(ms(1000)), None);
    }

    #[test]
    fn trackers_of_one_replica_share_results() {
        let (mut one, mut other) =
            (Tracker::new(TrackerConfig::default()), Tracker::new(TrackerConfig::default()));
        let ticket = one.start_behind(ms(0), Present { rif: 7, away: 0 });
        let ended = one.finish(ticket, ms(30), Outcome::Success);
        assert_eq!((one.rif(), other.latency_at(ms(30), 7, None)), (0, None));
        other.record(ended);
        assert_eq!([&one, &other].map(|tracker| tracker.latency_at(ms(30), 7, None)), [Some(30_000); 2]);
    }

    #[test]
    fn buckets_cover_every_rif_in_order() {
        assert_eq!(bucket_of(u32::MAX) + 1, BUCKETS);
        let mut last = 0;
        for rif in (0..100_000).chain([1 << 20, 1 << 28, u32::MAX]) {
            assert!(bucket_of(rif) >= last, "{rif}");
            last = bucket_of(rif);
        }
    }

    proptest! {
        #[test]
        fn rif_is_the_number_of_open_tickets(ops in proptest::collection::vec((any::<bool>(), 0usize..8, 0u8..4), 0..200)) {
            let mut tracker = Tracker::new(TrackerConfig::default());
            let mut open = Vec::new();
            for (step, (start, which, how)) in ops.into_iter().enumerate() {
                let now = ms(step as u64);
                if start || open.is_empty() {
                    open.push(tracker.start(now));
                } else {
                    let ticket = open.swap_remove(which % open.len());
                    let outcome = match how {
                        0 => Outcome::Success,
                        1 => Outcome::Failure,
                        2 => Outcome::Aborted,
                        _ => { tracker.streaming(&ticket, now); Outcome::Streaming }
                    };
                    tracker.finish(ticket, now, outcome);
                }
                prop_assert_eq!(tracker.rif() as usize, open.len());
            }
            for ticket in open.drain(..) {
                tracker.finish(ticket, ms(1000), Outcome::Aborted);
            }
            prop_assert_eq!(tracker.rif(), 0);
            prop_assert!(tracker.in_flight.oldest().is_none());
        }
    }
}
