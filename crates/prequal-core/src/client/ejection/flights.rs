//! One worker's requests in flight: which of them have waited too long, and how many succeeded between two failures.
//!
//! A request waits for its replica once it has been sent completely: the time that the client takes to send it is not
//! the replica's fault. The limit of a request is [`EjectionSettings::wait_factor`] times the 90th percentile of this
//! worker's latest response times, or the 99th percentile if that is higher. The latter matters where, for example, one
//! request in twenty takes 80 times as long as the others: a healthy replica whose slots are all busy with such
//! requests does not answer for that long. The limit is proportionally higher for a replica whose reported latency
//! exceeds that of a typical answer, and four times as high for one that does not know its latency.
//!
//! A request beyond its limit is a sign of an unresponsive replica only if no request sent to the replica after it has
//! been answered. Where one request in a hundred is slow, later requests overtake it. During a stall, no request
//! overtakes the first one that is stuck. A request must be overdue in two checks in a row: after the worker itself was
//! blocked, every request looks overdue at first, because the answers have not been read yet.
//!
//! Every operation takes O(1) on average, except that recording a failure and [`Flights::silent`] visit every replica.
//! Memory is allocated only when more requests are in flight, or more replicas in use, than ever before.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::mem;

use super::{EjectionSettings, Event, FADES_MS, FORGOTTEN_MS, MEMORY, Timing, fading};
use crate::shared::endpoint::Endpoint;
use crate::shared::fnv::Fnv;
use crate::shared::in_flight::InFlight;
use crate::shared::time::{Micros, Stamp};

/// A request in flight. Pass it back to [`Flights::answered`], [`Flights::abandoned`] or [`Flights::gone`].
#[derive(Debug)]
#[must_use = "a flight that is dropped looks overdue forever"]
pub struct Flight(usize);

/// A request that ended with an answer or a failure of its replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Landed {
    /// The chosen replica.
    pub replica: Endpoint,
    /// Time since the request was sent completely, microseconds; since its beginning if it was answered before that.
    pub latency_us: u32,
    /// Comparison of the latency with its limit.
    pub timing: Timing,
    /// Whether the request was a trial.
    pub trial: bool,
    /// Number of successful requests to the replica since the last failure.
    pub requests: f32,
    /// Number of other replicas that have recently answered, without a failure.
    pub well: u32,
}

impl Landed {
    /// Returns this as an event of the replica, which reported a latency of `reported_us` with the answer.
    pub fn event(&self, failed: bool, reported_us: Option<u32>) -> Event {
        if failed {
            return Event::Failed { requests: self.requests, well: self.well, trial: self.trial };
        }
        let admits = reported_us.is_some_and(|reported| reported >= self.latency_us / 2);
        let in_time = if self.timing == Timing::Late && admits { Timing::Slow } else { self.timing };
        Event::Answered { latency_us: self.latency_us, in_time, trial: self.trial }
    }
}

/// A replica that is unresponsive.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Overdue {
    /// The replica.
    pub replica: Endpoint,
    /// Whether the waiting request is a trial.
    pub trial: bool,
    /// Whether the replica had reported an ordinary latency (at most twice the typical one) when the request was sent.
    pub ordinary: bool,
}

impl Overdue {
    /// Returns this as an event of the replica.
    pub fn event(&self) -> Event {
        Event::Unresponsive { trial: self.trial, ordinary: self.ordinary }
    }
}

/// The requests in flight of one worker to one upstream cluster.
#[derive(Debug)]
pub struct Flights {
    /// Ordered by the time of the next check.
    in_flight: InFlight<WatchedRequest>,
    replicas: HashMap<Endpoint, ReplicaState, BuildHasherDefault<Fnv>>,
    window: Box<[u32]>,
    answers: usize,
    /// The limit that all replicas share, and the median of the latest response times, microseconds; both 0 until
    /// enough answers have come.
    limit_us: u32,
    typical_us: u32,
    looks: Looks,
}

#[derive(Clone, Copy, Debug)]
struct WatchedRequest {
    replica: Endpoint,
    started: Micros,
    /// Time at which to check the request next.
    check_at: Micros,
    limit_us: u32,
    trial: bool,
    ordinary: bool,
    /// Whether the client has sent the whole request.
    whole: bool,
}

/// State of a replica as this worker sees it.
#[derive(Clone, Copy, Debug, Default)]
struct ReplicaState {
    /// Latest start among the answered requests.
    answered: Micros,
    /// Latest start among the requests that waited long and then failed or got no answer.
    unanswered: Option<Micros>,
    requests: f32,
    updated: Stamp,
    failed: Option<Stamp>,
}

impl ReplicaState {
    /// Whether it has recently answered and not failed.
    fn is_well(&self, now: Stamp) -> bool {
        let lately = |at| now.distance_ms(at) < FADES_MS as u32;
        self.requests > 0.0 && lately(self.updated) && !self.failed.is_some_and(lately)
    }

    /// Whether it has recently left a request unanswered, and has not answered a later one.
    fn is_silent(&self, now: Micros) -> bool {
        self.unanswered.is_some_and(|started| {
            let recently = now.saturating_since(started) < u64::from(FORGOTTEN_MS) * 1000;
            started >= self.answered && started <= now && recently
        })
    }

    /// Returns and resets the number of successful requests since the last failure, faded up to `now`.
    fn take_requests(&mut self, now: Micros) -> f32 {
        let faded = mem::take(&mut self.requests) * fading(now.stamp().distance_ms(self.updated));
        self.updated = now.stamp();
        faded
    }
}

impl Default for Flights {
    fn default() -> Self {
        Self::new()
    }
}

impl Flights {
    /// Creates the state of a worker without requests or history.
    pub fn new() -> Self {
        Self {
            in_flight: InFlight::default(),
            replicas: HashMap::default(),
            window: vec![0; WINDOW].into_boxed_slice(),
            answers: 0,
            limit_us: 0,
            typical_us: 0,
            looks: Looks::default(),
        }
    }

    /// Records a request to `replica`, which last reported a latency of `latency_us`. The wait starts once the request
    /// is `whole`, now or [later](Self::completed).
    pub fn sent(
        &mut self,
        now: Micros,
        replica: Endpoint,
        latency_us: Option<u32>,
        trial: bool,
        whole: bool,
    ) -> Flight {
        let index = self.in_flight.insert(WatchedRequest {
            replica,
            started: now,
            check_at: now.plus(u64::from(self.limit_us)),
            limit_us: self.limit_for(latency_us, trial),
            trial,
            ordinary: latency_us.is_some_and(|latency| latency / 2 <= self.typical_us),
            whole,
        });
        if whole {
            self.watch(index);
        }
        Flight(index)
    }

    /// Records that the client has sent the whole request: from now on the request waits for the replica.
    pub fn completed(&mut self, flight: &Flight, now: Micros) {
        let check_at = now.plus(u64::from(self.limit_us));
        if let Some(request) = self.in_flight.get_mut(flight.0).filter(|request| !request.whole) {
            (request.whole, request.started, request.check_at) = (true, now, check_at);
            self.watch(flight.0);
        }
    }

    fn watch(&mut self, index: usize) {
        // Without a limit there is nothing to check.
        if self.in_flight.get_mut(index).is_some_and(|request| request.limit_us > 0) {
            self.in_flight.link(index);
        }
    }

    /// Records that the replica has answered, successfully or not.
    pub fn answered(
        &mut self,
        settings: &EjectionSettings,
        flight: Flight,
        now: Micros,
        failed: bool,
    ) -> Option<Landed> {
        let request = self.in_flight.remove(flight.0)?;
        let latency_us = u32::try_from(now.saturating_since(request.started)).unwrap_or(u32::MAX);
        let requests = self.seen(request.replica, now, |seen| {
            // A time in the future means that the clock has stepped back. If it were kept, no request would start later
            // for a long time.
            let known = if seen.answered > now { Micros(0) } else { seen.answered };
            seen.answered = known.max(request.started);
            let good = seen.take_requests(now);
            seen.requests = if failed { 0.0 } else { (good + 1.0).min(MEMORY) };
            if failed {
                seen.failed = Some(now.stamp());
            }
            good
        });
        if !failed && request.whole {
            self.learn(settings, latency_us);
        }
        let timing = match u64::from(request.limit_us) {
            _ if !request.whole => Timing::InTime,
            0 => Timing::InTime,
            limit if u64::from(latency_us) <= limit => Timing::InTime,
            limit if u64::from(latency_us) <= limit * 2 => Timing::Narrow,
            _ => Timing::Late,
        };
        let WatchedRequest { replica, trial, .. } = request;
        let well = if failed { self.well_beside(replica, now) } else { 0 };
        Some(Landed { replica, latency_us, timing, trial, requests, well })
    }

    /// Records that the replica failed a request, perhaps a `trial`, that it seemed to have [answered](Self::answered)
    /// successfully: an error in trailers, or a body that was broken off. The request no longer counts as successful.
    pub fn failed_late(&mut self, replica: Endpoint, now: Micros, trial: bool) -> Event {
        let requests = self.seen(replica, now, |seen| {
            seen.failed = Some(now.stamp());
            (seen.take_requests(now) - 1.0).max(0.0)
        });
        Event::Failed { requests, well: self.well_beside(replica, now), trial }
    }

    /// Number of other replicas that have recently answered, without a failure.
    fn well_beside(&self, replica: Endpoint, now: Micros) -> u32 {
        let is_well =
            |(other, seen): &(&Endpoint, &ReplicaState)| **other != replica && seen.is_well(now.stamp());
        self.replicas.iter().filter(is_well).count() as u32
    }

    /// Records that the request ended without evidence about the replica, for example because Envoy sent it elsewhere.
    pub fn gone(&mut self, flight: Flight) {
        self.in_flight.remove(flight.0);
    }

    /// Records that the client went away before the replica had answered.
    pub fn abandoned(&mut self, flight: Flight, now: Micros) {
        if let Some(request) = self.in_flight.remove(flight.0).filter(|request| request.whole) {
            self.unanswered(request.replica, request.started, now);
        }
    }

    /// Records that `replica` did not answer a request that began at `started` and has ended. The replica is silent if
    /// the request waited for more than twice the typical time plus 50 ms. Returns whether it did.
    pub fn unanswered(&mut self, replica: Endpoint, started: Micros, now: Micros) -> bool {
        let silent = now.saturating_since(started) > 2 * u64::from(self.typical_us) + SLACK_US as u64;
        if silent {
            // A start in the future means that the clock has stepped back. If it were kept, the replica would count as
            // silent for too long.
            self.seen(replica, now, |seen| {
                seen.unanswered = seen.unanswered.filter(|known| *known <= now).max(Some(started));
            });
        }
        silent
    }

    /// Records that `replica` has answered a probe. It is not silent.
    pub fn heard(&mut self, replica: Endpoint) {
        if let Some(seen) = self.replicas.get_mut(&replica) {
            seen.unanswered = None;
        }
    }

    /// Returns the replicas that recently left a request unanswered and have not answered a later one.
    pub fn silent(&self, now: Micros) -> impl Iterator<Item = Endpoint> {
        self.replicas.iter().filter(move |(_, seen)| seen.is_silent(now)).map(|(replica, _)| *replica)
    }

    /// Returns the next unresponsive replica. Call it often, each time until it returns `None`; a call checks only a
    /// few requests.
    pub fn overdue(&mut self, now: Micros) -> Option<Overdue> {
        let before = self.looks.before(now);
        for _ in 0..LOOKS {
            let (index, request) = self.in_flight.oldest()?;
            let stepped = request.started > now;
            if request.check_at > before && !stepped {
                return None;
            }
            self.in_flight.unlink(index);
            if stepped || before.saturating_since(request.started) < u64::from(request.limit_us) {
                // After a step back of the clock, the request starts now. A slow replica has a limit longer than the
                // shared one: its request is checked again once the shared limit has passed again, not at its own
                // limit, so that the list stays in order.
                let again = now.plus(u64::from(self.limit_us.max(1)));
                let place = self.in_flight.get_mut(index)?;
                (place.started, place.check_at) = (request.started.min(now), again);
                self.in_flight.link(index);
                continue;
            }
            let overtaken = |seen: &ReplicaState| seen.answered > request.started && seen.answered <= now;
            if self.replicas.get(&request.replica).is_some_and(overtaken) {
                continue;
            }
            return Some(Overdue {
                replica: request.replica,
                trial: request.trial,
                ordinary: request.ordinary,
            });
        }
        None
    }

    /// Number of requests in flight.
    pub fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether no request is in flight.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Time after which a request to a replica that reports `latency_us` is overdue, microseconds; 0: never. A trial
    /// shows whether the replica is as good as the others, so its limit is the shared one.
    fn limit_for(&self, latency_us: Option<u32>, trial: bool) -> u32 {
        let slower = match latency_us {
            _ if trial => 1.0,
            Some(latency_us) => f64::from(latency_us) / f64::from(self.typical_us.max(1)),
            None => UNKNOWN_SLOWER,
        };
        // `max` would be a call in wasm.
        (f64::from(self.limit_us) * slower.clamp(1.0, f64::MAX)) as u32
    }

    fn learn(&mut self, settings: &EjectionSettings, latency_us: u32) {
        if settings.wait_factor <= 0.0 {
            self.limit_us = 0;
            return;
        }
        if let Some(place) = self.window.get_mut(self.answers % WINDOW) {
            *place = latency_us;
        }
        // If the count wrapped to zero, there would be no answers to sort, so it wraps to `WINDOW`. The range of a
        // `usize` is a multiple of `WINDOW`, so the oldest answer is still the next to be replaced.
        self.answers = self.answers.checked_add(1).unwrap_or(WINDOW);
        if !self.answers.is_multiple_of(LEARN_EVERY) {
            return;
        }
        let mut sorted = [0; WINDOW];
        let known = self.answers.min(WINDOW);
        let Some(sorted) = sorted.get_mut(..known) else { return };
        for (to, from) in sorted.iter_mut().zip(&self.window) {
            *to = *from;
        }
        let (below, rare, _) = sorted.select_nth_unstable(known * 99 / 100);
        let rare = f64::from(*rare);
        let (_, high, _) = below.select_nth_unstable(known * 9 / 10);
        let longest = (f64::from(*high) * settings.wait_factor).max(rare);
        let (_, typical, _) = sorted.select_nth_unstable(known / 2);
        self.typical_us = *typical;
        self.limit_us = (longest + SLACK_US) as u32;
    }

    /// Number of replicas remembered.
    #[cfg(test)]
    pub(super) fn remembered(&self) -> usize {
        self.replicas.len()
    }

    fn seen<T>(&mut self, replica: Endpoint, now: Micros, look: impl FnOnce(&mut ReplicaState) -> T) -> T {
        // Replicas that have left make room before the map grows.
        if self.replicas.len() == self.replicas.capacity() && !self.replicas.contains_key(&replica) {
            self.replicas.retain(|_, seen| {
                now.stamp().distance_ms(seen.updated) < FORGOTTEN_MS || seen.is_silent(now)
            });
        }
        look(self.replicas.entry(replica).or_default())
    }
}

/// Times of this worker's last two checks.
#[derive(Clone, Copy, Debug, Default)]
struct Looks {
    last: Micros,
    before: Micros,
}

impl Looks {
    /// Returns the time of an earlier check, at least [`LOOK_US`] before this one. A request counts only if it was
    /// overdue at that time already.
    fn before(&mut self, now: Micros) -> Micros {
        if now < self.last {
            (self.last, self.before) = (now, now);
        } else if now.saturating_since(self.last) >= LOOK_US {
            (self.last, self.before) = (now, self.last);
        }
        self.before
    }
}

/// Factor by which a replica of unknown latency may be slower than the others. The pool sends it one request at a time
/// anyway.
const UNKNOWN_SLOWER: f64 = 4.0;
/// Number of answers that the limit is computed from.
const WINDOW: usize = 256;
/// Number of answers between two computations of the limit; also the minimum for the first one.
const LEARN_EVERY: usize = 32;
/// Maximum number of requests that one call of [`Flights::overdue`] checks.
const LOOKS: usize = 8;
/// Minimum time between two checks, microseconds: enough for a blocked event loop to process what arrived in the
/// meantime.
const LOOK_US: u64 = 20_000;
/// Added to every limit, microseconds: a short pause of the replica, the machine or this Envoy is not a problem.
const SLACK_US: f64 = 50_000.0;

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: EjectionSettings = EjectionSettings { failure_share: 0.1, wait_factor: 2.0 };

    #[test]
    fn a_rare_long_request_is_not_overdue() {
        let mut flights = Flights::new();
        let send = |flights: &mut Flights, at| {
            flights.sent(Micros(at), "10.0.0.1:80".parse().unwrap(), Some(5000), false, true)
        };
        for at in (0..2 * WINDOW as u64).map(|number| number * 1_000_000) {
            let flight = send(&mut flights, at);
            let takes = if (at / 1_000_000).is_multiple_of(20) { 400_000 } else { 5000 };
            flights.answered(&SETTINGS, flight, Micros(at + takes), false).unwrap();
        }
        let _flight = send(&mut flights, 1_000_000_000);
        let mut overdue = |after: u64| {
            // A request counts as overdue only at the second look.
            (0..2).any(|look| flights.overdue(Micros(1_000_000_000 + after + look * LOOK_US)).is_some())
        };
        assert!(!overdue(390_000));
        assert!(overdue(460_000));
    }

    #[test]
    fn the_limit_survives_a_wrap_of_the_answer_count() {
        let mut flights = Flights::new();
        let answer = |flights: &mut Flights, at: u64| {
            let flight = flights.sent(Micros(at), "10.0.0.1:80".parse().unwrap(), None, false, true);
            flights.answered(&SETTINGS, flight, Micros(at + 1000), false).unwrap();
        };
        (0..WINDOW as u64).for_each(|at| answer(&mut flights, at));
        let limit = flights.limit_us;
        flights.answers = usize::MAX;
        (0..2 * LEARN_EVERY as u64).for_each(|at| answer(&mut flights, at));
        assert_eq!((flights.limit_us, limit), (52_000, 52_000));
    }
}
