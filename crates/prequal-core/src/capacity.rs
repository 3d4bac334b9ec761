//! How fast a replica is, and how much it can serve at once: counted from its requests in flight.
//!
//! While `r` requests are in flight, a replica of base latency **W** and knee **K** finishes them at the rate `min(r, K) / W`:
//! beyond K more requests only wait. [`Levels`] keeps, for each level `r`, how long it lasted and how many good answers left
//! it, and how many requests arrived as the `r`-th and what they took. All of it fades with a time constant of
//! [`FADES_US`]. The fit takes W and K from two likelihoods:
//!
//! - departures are a Poisson process of that rate: ℓ(k) = Σ D\[r\]·ln min(r, k) − N·ln E(k), with E(k) = Σ min(r, k)·T\[r\];
//! - a request that arrives as the `r`-th takes an exponential time of mean W·max(1, r / K):
//!   ℓ₂(k) = −Σ n\[r\]·ln max(1, r/k) − N·ln(Σ S\[r\] / max(1, r/k) / N). Alone the first finds knees that are not there where
//!   service times are constant, because departures then come in lockstep.
//!
//! K is the smallest `k` whose sum ℓ + ℓ₂ is within 0.5 of the best: that a replica can serve more must be shown. W is
//! E(K) / N. `docs/adr/0008-predicted-latency.md` has the alternatives with their curves.
//!
//! What the fit is slow to see, single answers show at once (`capacity/recent.rs`): that a replica has become faster, and that requests
//! beyond its knee do not wait.
//!
//! What is in flight but not at the server (a stream, a request that waits for its client) is no part of the level; the
//! caller leaves it out ([`crate::tracker`]).

use crate::time::{MAX_LATENCY_US, Micros};

mod recent;

use recent::{Beyond, FastRun};

/// Highest knee that is told apart; more in flight count as this many.
pub const MAX_KNEE: u16 = 512;
/// Time constant of what is counted, microseconds. Half of it is noisier, twice as much finds a healed replica later.
pub const FADES_US: f64 = 6e6;
/// Log-likelihood by which a higher knee must be better.
const DOUBT: f64 = 0.5;
/// Departures below which the last fit stands.
const LEAST: f64 = 0.5;
/// The fit is renewed at most this often, microseconds.
const FIT_EVERY_US: u64 = 10_000;
/// A good answer renews a fit that is older than this, microseconds.
const FIT_AT_LEAST_US: u64 = 3_000_000;
/// Departures are a burst if no more than this part of what the later one took lies between them.
const TOGETHER: u32 = 128;
/// Longest stretch without an event that is credited, microseconds: a step of the clock is no service time.
const LONGEST_US: u64 = 60_000_000;
/// Weights are scaled back when the present weighs this much.
const HEAVY: f64 = 1e12;
/// Stands in for the time of requests that took none.
const TINY: f64 = 1e-9;
/// A step back of the clock by more than this is one, microseconds; less is an update that comes late.
const STEP_US: u64 = 1_000_000;

/// Base latency and knee of a replica.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Capacity {
    /// What a request takes while nothing waits, microseconds, 1 to [`MAX_LATENCY_US`].
    pub base_us: u32,
    /// Requests in flight beyond which more only wait, at least 1.
    pub knee: u16,
    /// The replica has shown no saturation: its knee may be higher than that.
    pub open: bool,
}

impl Capacity {
    /// Of a replica that reports a latency alone: it holds for one request more than are in flight, and then grows.
    pub fn at_face_value(latency_us: u32, rif: u32) -> Self {
        let knee = u16::try_from(rif.saturating_add(1)).unwrap_or(u16::MAX);
        Self { base_us: latency_us.max(1), knee, open: false }
    }

    /// What a request may expect that finds `rif` in flight, microseconds.
    pub fn latency_us(self, rif: u32) -> u32 {
        (f64::from(self.base_us) * self.crowding(rif)).min(f64::from(MAX_LATENCY_US)) as u32
    }

    /// What such a request costs, itself and those that come after it. The square is the marginal cost: a newcomer delays
    /// others as they delay it.
    pub fn cost(self, rif: u32) -> f32 {
        let crowding = self.crowding(rif);
        (f64::from(self.base_us) * crowding * crowding) as f32
    }

    fn crowding(self, rif: u32) -> f64 {
        let crowding = (f64::from(rif) + 1.0) / f64::from(self.knee.max(1));
        // `max` would be a call in wasm.
        if crowding > 1.0 { crowding } else { 1.0 }
    }
}

/// One level: sums that fade.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    /// Time spent with so many in flight.
    time: f64,
    /// Good answers that left while so many, themselves included, were in flight.
    left: f64,
    /// Good answers to requests that arrived as this many-th, and what they took.
    met: f64,
    took: f64,
}

/// What has been counted at each level, and the fit to it.
#[derive(Debug)]
pub struct Levels {
    /// Level 1 first; as many as were ever reached.
    rows: Vec<Row>,
    /// Natural logarithm of each level.
    logs: Vec<f64>,
    /// Scores and E(k) of the last fit: kept so that fitting does not allocate.
    scores: Vec<(f64, f64)>,
    /// When the last good answer left, and at which level the burst began that it belongs to.
    burst: (Micros, u32),
    /// How many are in flight, since when; `None` before the first update.
    level: u32,
    since: Option<Micros>,
    /// When the weight was 1.
    origin: Micros,
    /// The latest time heard of.
    latest: Micros,
    fitted_at: Option<Micros>,
    fit: Option<Capacity>,
    run: FastRun,
    beyond: Beyond,
}

impl Default for Levels {
    fn default() -> Self {
        Self::new()
    }
}

impl Levels {
    /// An idle replica of which nothing is known.
    pub fn new() -> Self {
        Self {
            rows: Vec::new(),
            logs: Vec::new(),
            scores: Vec::new(),
            burst: (Micros(0), 0),
            level: 0,
            since: None,
            origin: Micros(0),
            latest: Micros(0),
            fitted_at: None,
            fit: None,
            run: FastRun::default(),
            beyond: Beyond::default(),
        }
    }

    /// Requests in flight at the server, as far as is known.
    pub fn level(&self) -> u32 {
        self.level
    }

    /// The level was `before` and is `after` from now on. The time since the last update is credited to the level of
    /// then, or in equal parts to those between it and `before` where others have changed it unheard.
    pub fn moved(&mut self, now: Micros, before: u32, after: u32) {
        let weight = self.weight(now);
        let elapsed = self.elapsed(now) * weight;
        if elapsed > 0.0 {
            let (low, high) = (self.level.min(before), self.level.max(before));
            let share = elapsed / f64::from(high - low + 1);
            // Levels beyond the highest that is told apart have one row.
            let most = u32::from(MAX_KNEE);
            for level in low..=high.min(most) {
                let times = if level == most { f64::from(high - most.max(low) + 1) } else { 1.0 };
                self.row(level, |row| row.time += share * times);
            }
            if low > most {
                self.row(most, |row| row.time += elapsed);
            }
        }
        (self.level, self.since) = (after, Some(now));
    }

    /// Another worker's request arrived at `at`, or left then: [`Self::moved`], unless the update comes late. Then it
    /// changes nothing: what was heard since knew of it.
    pub fn heard(&mut self, at: Micros, before: u32, after: u32) {
        if self.since.is_none_or(|since| at >= since) {
            self.moved(at, before, after);
        }
    }

    /// A good answer left while `level` requests were in flight, itself included. It had arrived as the `arrived_as`-th and
    /// took `latency_us`.
    pub fn served(&mut self, now: Micros, level: u32, arrived_as: u32, latency_us: u32) {
        if let Some(fit) = self.fit {
            self.beyond.answered(now, fit, arrived_as, latency_us);
            if self.run.answered(now, fit, arrived_as, latency_us) {
                self.start_anew(now);
                return;
            }
        }
        let weight = self.weight(now);
        let level = self.level_of_burst(now, level.max(1), u64::from(latency_us / TOGETHER));
        self.row(level, |row| row.left += weight);
        self.row(arrived_as.max(1), |row| {
            row.met += weight;
            row.took += f64::from(latency_us) * weight;
        });
        // Where answers are rare none would be recent enough when the next report is due.
        if self.fitted_at.is_none_or(|at| now.distance(at) > FIT_AT_LEAST_US) {
            self.capacity(now, false);
        }
    }

    /// Forgets all but the run of fast answers, which count as if each had been alone.
    fn start_anew(&mut self, now: Micros) {
        let (answers, took) = self.run.take();
        self.rows.clear();
        self.logs.clear();
        (self.origin, self.latest, self.since) = (now, now, Some(now));
        self.row(1, |row| *row = Row { time: took, left: answers, met: answers, took });
        self.fitted_at = None;
    }

    /// The level at which a burst of departures began. Requests that came together leave together where service times are
    /// equal: that the later of them leave at lower levels says nothing of those.
    fn level_of_burst(&mut self, now: Micros, level: u32, together: u64) -> u32 {
        let (last, began_at) = self.burst;
        let level = if now.distance(last) <= together && level < began_at { began_at } else { level };
        self.burst = (now, level);
        level
    }

    /// Goes on at `now` without crediting what lies before: updates of it were lost.
    pub fn resume(&mut self, now: Micros) {
        self.since = self.since.max(Some(now));
    }

    /// Base latency and knee, with the running stretch counted. `None` until a good answer has left. While too few have left
    /// lately the last fit stands. `leaving`: one that is about to leave counts as if it had, lest its time count without its
    /// end.
    pub fn capacity(&mut self, now: Micros, leaving: bool) -> Option<Capacity> {
        let fresh = self.fitted_at.is_some_and(|at| now.distance(at) < FIT_EVERY_US);
        if !fresh || (leaving && self.fit.is_none()) {
            let weight = self.weight(now);
            self.row(self.level, |_| ());
            let running = self.elapsed(now) * weight;
            self.fitted_at = Some(now);
            let left = if leaving && self.level > 0 { weight } else { 0.0 };
            self.fit = self.fitted(weight, Row { time: running, left, ..Row::default() }).or(self.fit);
        }
        self.fit
    }

    /// The fit where the present weighs `weight`, and `running` is to be added to the current level.
    fn fitted(&mut self, weight: f64, running: Row) -> Option<Capacity> {
        let current = (self.level as usize).min(self.rows.len());
        let mut all = Row::default();
        // Of the levels not looked at yet: Σ n·ln r and Σ S / r.
        let (mut log_met, mut took_each) = (0.0, 0.0);
        for (index, (row, log)) in self.rows.iter().zip(&self.logs).enumerate() {
            all.time += row.time;
            all.left += row.left;
            all.met += row.met;
            all.took += row.took;
            log_met += row.met * log;
            took_each += row.took / (index + 1) as f64;
        }
        if current > 0 {
            all.time += running.time;
            all.left += running.left;
        }
        if all.left < LEAST * weight {
            return None;
        }
        let (mut time, mut left, mut met) = (all.time, all.left, all.met);
        let (mut effort, mut took, mut gain, mut last_log) = (0.0, 0.0, 0.0, 0.0);
        let mut best = f64::NEG_INFINITY;
        self.scores.clear();
        for (index, (row, log)) in self.rows.iter().zip(&self.logs).enumerate() {
            let k = (index + 1) as f64;
            // `time` and `left` are of this level and those above it, `met` of those above it.
            effort += time;
            gain += (log - last_log) * left;
            took += row.took;
            met -= row.met;
            log_met -= row.met * log;
            took_each -= row.took / k;
            // Rounding may leave a little less than nothing above the highest level.
            let each = (took + k * took_each).max(TINY) / all.met.max(TINY);
            // N·ln E and N·ln of the mean in one; those that are about to leave are not worth a second logarithm.
            let score = (gain + met * log - log_met - all.left * (effort * each).max(TINY).ln()) / weight;
            best = if score > best { score } else { best };
            self.scores.push((score, effort));
            let (running_time, running_left) =
                if index + 1 == current { (running.time, running.left) } else { (0.0, 0.0) };
            time -= row.time + running_time;
            left -= row.left + running_left;
            last_log = *log;
        }
        let knee = self.scores.iter().position(|(score, _)| *score >= best - DOUBT)?;
        let (_, effort) = self.scores.get(knee)?;
        let base = (effort / all.left).clamp(1.0, f64::from(MAX_LATENCY_US));
        let knee = u16::try_from(knee + 1).unwrap_or(MAX_KNEE);
        Some(Capacity { base_us: base as u32, knee, open: self.beyond.is_open(self.latest) })
    }

    /// How long the level has lasted, microseconds.
    fn elapsed(&self, now: Micros) -> f64 {
        self.since.map_or(0, |since| now.saturating_since(since).min(LONGEST_US)) as f64
    }

    /// What an event now weighs; the past weighs less and less beside it.
    fn weight(&mut self, now: Micros) -> f64 {
        if now < self.latest && now.distance(self.latest) > STEP_US {
            // After a step back the past is as old as it was.
            let stepped = now.distance(self.latest);
            self.origin = Micros(self.origin.0.saturating_sub(stepped));
            self.since = self.since.map(|_| now);
            self.latest = now;
        }
        self.latest = self.latest.max(now);
        let exponent = now.saturating_since(self.origin) as f64 / FADES_US;
        let weight = exponent.min(700.0).exp();
        if weight < HEAVY {
            return weight;
        }
        for row in &mut self.rows {
            for sum in [&mut row.time, &mut row.left, &mut row.met, &mut row.took] {
                *sum /= weight;
            }
        }
        // Levels of which nothing is left cost time at every fit.
        let used = self.rows.iter().rposition(|row| row.time > 1.0 || row.left > 1e-6 || row.met > 1e-6);
        let used = used.map_or(0, |index| index + 1);
        self.rows.truncate(used);
        self.logs.truncate(used);
        self.origin = now;
        1.0
    }

    fn row(&mut self, level: u32, change: impl FnOnce(&mut Row)) {
        let Some(index) = (level.min(u32::from(MAX_KNEE)) as usize).checked_sub(1) else { return };
        while self.rows.len() <= index {
            self.rows.push(Row::default());
            self.logs.push((self.rows.len() as f64).ln());
        }
        if let Some(row) = self.rows.get_mut(index) {
            change(row);
        }
    }
}

#[cfg(test)]
mod tests;
