//! Estimates how fast a replica is, and how much it can serve at once, from its requests in flight.
//!
//! While `r` requests are in flight, a replica of base latency **W** and knee **K** finishes them at the rate
//! `min(r, K) / W`: beyond K, further requests only wait. [`Levels`] records for each level `r` how long it lasted,
//! T\[r\], and how many good responses left it, D\[r\]. It also records how many requests arrived as the `r`-th,
//! n\[r\], and how long they took, S\[r\]. All of these fade with a time constant of [`FADES_US`]. The fit takes W and
//! K from two likelihoods, where N is the number of good responses:
//!
//! - Departures are a Poisson process of that rate: ℓ(k) = Σ D\[r\]·ln min(r, k) − N·ln E(k), with
//!   E(k) = Σ min(r, k)·T\[r\].
//! - A request that arrives as the `r`-th takes an exponential time of mean W·max(1, r / K):
//!   ℓ₂(k) = −Σ n\[r\]·ln max(1, r/k) − N·ln(Σ S\[r\] / max(1, r/k) / N). Where service times are constant,
//!   departures come together, and the first likelihood alone would find knees that do not exist.
//!
//! The score of `k` is ℓ + α·ℓ₂ − ln k. K is the smallest `k` whose score is within 0.5 of the best: a higher knee
//! needs evidence. W is E(K) / N. The last term of the score is a scale-invariant prior. If all requests arrive while
//! the replica is saturated, the data say nothing about K, and without the prior, K would be the highest level by
//! chance.
//!
//! Where many requests are in flight, the spread of the levels matters. If it is wide, the data suffice, and the prior
//! is left out. If it is narrow, a higher knee must explain each response clearly better than a knee of 1 does: K is
//! 1 if the score of 1 is within 0.5 + 0.005·N of the best.
//!
//! α is 1 unless latencies vary far less than exponential ones (`Levels::steadiness`). With one slot and constant
//! service times, a request that has just begun does not leave soon, so departures seem to say that two requests are
//! served at once. Latencies are then the better evidence.
//!
//! Where requests are evidently served one by one (`capacity/single.rs`), or share one core (`capacity/one_core.rs`), K is
//! 1 whatever the scores.
//!
//! The fit also says how far it can be trusted ([`Capacity::rse_percent`]) and whether latencies are steady
//! ([`Capacity::steady`]), which tells clients how to choose among equal replicas. Both depend on how much latencies vary
//! at the same level, because waiting also makes them differ.
//!
//! `docs/design/adr/0008-predicted-latency.md` has the alternatives with their curves.
//!
//! Single responses show at once what the fit is slow to see (`capacity/recent.rs`): that a replica has become faster,
//! and that requests beyond its knee do not wait.
//!
//! Requests that are in flight but not at the server (a stream, a request that waits for its client) do not count in
//! the level; the caller leaves them out ([`crate::server::tracker`]).

use crate::shared::capacity::{Capacity, FADES_US};
use crate::shared::time::{MAX_LATENCY_US, Micros};

mod one_core;
mod recent;
mod single;

use one_core::OneCore;
use recent::{Beyond, FastRun};
use single::OneByOne;

/// Highest knee that is distinguished; more requests in flight count as this many.
pub const MAX_KNEE: u16 = 512;
/// Minimum gain in log-likelihood that justifies a higher knee.
const DOUBT: f64 = 0.5;
/// α is this divided by the squared coefficient of variation of the latencies, limited to the range from 1 to
/// [`MOST_STEADY`].
const STEADY: f64 = 0.05;
const MOST_STEADY: f64 = 16.0;
/// Highest knee at which α may exceed 1. Where service times are constant and a replica has more slots than this, the
/// fitted knee is slightly too high. That does no harm: latencies are then reported as steady, and replicas take turns
/// up to a higher RIF, which spaces requests evenly.
const STEADY_KNEE: u16 = 3;
/// Squared coefficient of variation, within the levels up to the knee, below which latencies are reported as steady.
const EVEN: f64 = 0.2;
/// Number of requests that must have arrived at these levels before their variation is known.
const EVIDENT: f64 = 4.0;
/// Variation that the standard error assumes until then: that of exponential times.
const EXPONENTIAL: f64 = 1.0;
/// Sums below this have faded away.
const FADED: f64 = 1e-9;
/// Mean level of arrivals above which the spread of their levels matters.
const MANY: f64 = 6.0;
/// Squared coefficient of variation of the arrivals' levels below which their spread is narrow, and the evidence per
/// response that a higher knee then needs in addition. Clients that keep the RIF constant leave only small differences
/// between the levels, and these depend on whether requests are served together.
const NARROW: f64 = 0.02;
const CLEARLY: f64 = 0.005;
/// Squared coefficient of variation that is assumed before any latency at a level is known. It weighs as much as one new
/// latency.
const ASSUMED: f64 = 0.25;
/// Number of departures below which the last fit is kept.
const LEAST: f64 = 0.5;
/// Minimum time between fits, microseconds.
const FIT_EVERY_US: u64 = 10_000;
/// Age of the fit beyond which a good response renews it, microseconds.
const FIT_AT_LEAST_US: u64 = 3_000_000;
/// Departures are a burst if the time between them is at most 1/`TOGETHER` of the later one's latency.
const TOGETHER: u32 = 128;
/// Maximum time without an event that is credited to a level, microseconds; a clock step is not service time.
const LONGEST_US: u64 = 60_000_000;
/// Weight of a new event at which all weights are scaled down.
const HEAVY: f64 = 1e12;
/// Replaces a time of zero.
const TINY: f64 = 1e-9;
/// Backward jump of the clock beyond which it counts as a step, microseconds; a smaller one is a late update.
const STEP_US: u64 = 1_000_000;

/// Fading sums for one level.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    /// Time spent with this many requests in flight.
    time: f64,
    /// Good responses that left while this many requests were in flight, including themselves.
    left: f64,
    /// Good responses to requests that brought the level to this many on arrival, and the time they took.
    met: f64,
    took: f64,
    /// Sum of the squares of these times.
    squares: f64,
}

/// Counts at each level, and the fit to them.
#[derive(Debug)]
pub struct Levels {
    /// One row per level, from level 1 upwards.
    rows: Vec<Row>,
    /// Natural logarithm of each level.
    logs: Vec<f64>,
    /// Scores and E(k) of the last fit, kept so that fitting does not allocate.
    scores: Vec<(f64, f64)>,
    /// Sum of the squares of the weights of the good responses that left.
    left_squares: f64,
    /// When the last good response left, and at which level its burst began.
    burst: (Micros, u32),
    /// Number of requests in flight, and since when; `None` before the first update.
    level: u32,
    since: Option<Micros>,
    /// Time at which the weight was 1.
    origin: Micros,
    /// Latest time seen.
    latest: Micros,
    fitted_at: Option<Micros>,
    fit: Option<Capacity>,
    run: FastRun,
    beyond: Beyond,
    single: OneByOne,
    one_core: OneCore,
}

impl Default for Levels {
    fn default() -> Self {
        Self::new()
    }
}

impl Levels {
    /// Creates the counts of an idle replica without history.
    pub fn new() -> Self {
        Self {
            rows: Vec::new(),
            logs: Vec::new(),
            scores: Vec::new(),
            left_squares: 0.0,
            burst: (Micros(0), 0),
            level: 0,
            since: None,
            origin: Micros(0),
            latest: Micros(0),
            fitted_at: None,
            fit: None,
            run: FastRun::default(),
            beyond: Beyond::default(),
            single: OneByOne::default(),
            one_core: OneCore::default(),
        }
    }

    /// Returns the number of requests in flight at the server, as far as is known.
    pub fn level(&self) -> u32 {
        self.level
    }

    /// Returns the latency of a request at the current level according to the last fit, microseconds.
    pub fn expected_us(&self) -> Option<f64> {
        Some(self.fit?.latency_us(self.level.saturating_sub(1)).into())
    }

    /// Changes the level from `before` to `after`. The time since the last update is credited to the level at that
    /// update. If other workers have changed the level unnoticed, this time is divided equally among the levels from
    /// the one at the last update to `before`. The time also counts as work done (`FastRun::worked`).
    pub fn moved(&mut self, now: Micros, before: u32, after: u32) {
        let weight = self.credit(now, before, after);
        self.one_core.moved(now, weight, before, after);
        if after < before {
            self.single.left(now);
        }
    }

    /// Records that a request which left at `left_at` to wait for its client is back.
    pub(crate) fn came_back(&mut self, now: Micros, left_at: Micros) {
        let others = self.level;
        self.credit(now, others, others.saturating_add(1));
        self.one_core.came_back(now, others);
        self.single.came_back(now, left_at);
    }

    /// Does what [`Self::moved`] says, and returns the weight of the present.
    fn credit(&mut self, now: Micros, before: u32, after: u32) -> f64 {
        let weight = self.weight(now);
        let elapsed = self.elapsed(now);
        if elapsed > 0.0 {
            let (low, high) = (self.level.min(before), self.level.max(before));
            let share = elapsed / f64::from(high - low + 1);
            // The levels from `MAX_KNEE` upwards share one row.
            let most = u32::from(MAX_KNEE);
            let knee = self.fit.map_or(most, |fit| fit.knee.into());
            let mut worked = 0.0;
            for level in low..=high.min(most) {
                let times = if level == most { f64::from(high - most.max(low) + 1) } else { 1.0 };
                worked += share * times * f64::from(level.min(knee));
                self.row(level, |row| row.time += share * times * weight);
            }
            if low > most {
                worked += elapsed * f64::from(knee);
                self.row(most, |row| row.time += elapsed * weight);
            }
            self.run.worked(worked);
        }
        (self.level, self.since) = (after, Some(now));
        weight
    }

    /// Records that another worker's request arrived or left at `at`, like [`Self::moved`], unless the update is late.
    /// A late update changes nothing, because later updates already include it.
    pub fn heard(&mut self, at: Micros, before: u32, after: u32) {
        self.single.share();
        if self.since.is_none_or(|since| at >= since) {
            self.moved(at, before, after);
        }
    }

    /// Counts a good response that left while `level` requests were in flight, itself included. It had arrived as the
    /// `arrived_as`-th and took `latency_us`.
    pub fn served(&mut self, now: Micros, level: u32, arrived_as: u32, latency_us: u32) {
        if let Some(fit) = self.fit {
            self.beyond.answered(now, fit, arrived_as, latency_us);
            if self.run.answered(now, fit, level, arrived_as, latency_us) {
                self.start_anew(now);
                return;
            }
        }
        let weight = self.weight(now);
        let level = self.level_of_burst(now, level.max(1), u64::from(latency_us / TOGETHER));
        self.row(level, |row| row.left += weight);
        self.left_squares += weight * weight;
        self.one_core.answered(now, latency_us);
        if arrived_as > 1 {
            self.single.answered(now, weight, latency_us);
        }
        let took = f64::from(latency_us);
        self.row(arrived_as.max(1), |row| {
            row.met += weight;
            row.took += took * weight;
            row.squares += took * took * weight;
        });
        // Where responses are rare, this one would no longer be recent enough for a fit when the next report is due.
        if self.fitted_at.is_none_or(|at| now.distance(at) > FIT_AT_LEAST_US) {
            self.capacity(now, false);
        }
    }

    /// Forgets everything except the run of fast responses, which count as if each request had been alone.
    fn start_anew(&mut self, now: Micros) {
        let (answers, took) = self.run.take();
        self.rows.clear();
        self.logs.clear();
        self.single.start_anew();
        self.one_core.start_anew();
        (self.origin, self.latest, self.since) = (now, now, Some(now));
        // Nothing is known about their variation yet, so they count as exponential.
        let squares = 2.0 * took * took / answers.max(1.0);
        self.row(1, |row| *row = Row { time: took, left: answers, met: answers, took, squares });
        self.left_squares = answers;
        self.fitted_at = None;
    }

    /// Returns the level at which a burst of departures began. Requests that arrive together leave together if their
    /// service times are equal. The later ones leave at lower levels, but that is not evidence about those levels.
    fn level_of_burst(&mut self, now: Micros, level: u32, together: u64) -> u32 {
        let (last, began_at) = self.burst;
        let level = if now.distance(last) <= together && level < began_at { began_at } else { level };
        self.burst = (now, level);
        level
    }

    /// Continues at `now` without crediting the time before, because updates of that time were lost.
    pub fn resume(&mut self, now: Micros) {
        self.since = self.since.max(Some(now));
    }

    /// Returns base latency and knee, including the time since the last event; `None` until a good response has left.
    /// While too few have left recently, the last fit is kept. With `leaving`, a request that is about to leave counts
    /// as departed; otherwise its time would count without its end.
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

    /// Fits with `weight` as the weight of the present, and with `running` added to the current level.
    fn fitted(&mut self, weight: f64, running: Row) -> Option<Capacity> {
        let current = (self.level as usize).min(self.rows.len());
        let mut all = Row::default();
        // Σ n·ln r and Σ S / r over the levels not visited yet.
        let (mut log_met, mut took_each) = (0.0, 0.0);
        // Σ n·r and Σ n·r².
        let (mut levels, mut squares) = (0.0, 0.0);
        for (index, (row, log)) in self.rows.iter().zip(&self.logs).enumerate() {
            let level = (index + 1) as f64;
            all.time += row.time;
            all.left += row.left;
            all.met += row.met;
            all.took += row.took;
            all.squares += row.squares;
            log_met += row.met * log;
            took_each += row.took / level;
            levels += row.met * level;
            squares += row.met * level * level;
        }
        if current > 0 {
            all.time += running.time;
            all.left += running.left;
        }
        if all.left < LEAST * weight {
            return None;
        }
        let alpha = self.steadiness(weight);
        let many = levels > MANY * all.met;
        let narrow = squares * all.met < (1.0 + NARROW) * levels * levels;
        let prior = if many && !narrow { 0.0 } else { 1.0 };
        let (mut time, mut left, mut met) = (all.time, all.left, all.met);
        let (mut effort, mut took, mut gain, mut last_log) = (0.0, 0.0, 0.0, 0.0);
        let mut best = f64::NEG_INFINITY;
        self.scores.clear();
        for (index, (row, log)) in self.rows.iter().zip(&self.logs).enumerate() {
            let k = (index + 1) as f64;
            // `time` and `left` cover this level and those above it, `met` only those above it.
            effort += time;
            gain += (log - last_log) * left;
            took += row.took;
            met -= row.met;
            log_met -= row.met * log;
            took_each -= row.took / k;
            // Rounding may leave slightly negative sums above the highest level.
            let each = (took + k * took_each).max(TINY) / all.met.max(TINY);
            let departures = gain - all.left * effort.max(TINY).ln();
            let arrivals = met * log - log_met - all.left * each.ln();
            let score = (departures + alpha * arrivals) / weight - prior * log;
            best = if score > best { score } else { best };
            self.scores.push((score, effort));
            let (running_time, running_left) =
                if index + 1 == current { (running.time, running.left) } else { (0.0, 0.0) };
            time -= row.time + running_time;
            left -= row.left + running_left;
            last_log = *log;
        }
        let (one, _) = self.scores.first()?;
        let single = self.rows.first().is_some_and(|alone| self.single.is_evident(alone, weight))
            || (!self.single.shared
                && self.one_core.is_evident(self.latest, self.level, &all, weight, running.left > 0.0));
        let unclear = many && narrow && *one >= best - (DOUBT + CLEARLY * all.left / weight);
        let knee = if single || unclear {
            0
        } else {
            self.scores.iter().position(|(score, _)| *score >= best - DOUBT)?
        };
        let (_, effort) = self.scores.get(knee)?;
        let base = (effort / all.left).clamp(1.0, f64::from(MAX_LATENCY_US));
        let knee = u16::try_from(knee + 1).unwrap_or(MAX_KNEE);
        // As many equally recent responses would show W as precisely.
        let responses = all.left * all.left / (self.left_squares + running.left * running.left);
        let variation = self.variation(knee, responses / all.met.max(TINY));
        let rse = 100.0 * (variation.unwrap_or(EXPONENTIAL) / responses).sqrt();
        Some(Capacity {
            base_us: base as u32,
            knee,
            open: self.beyond.is_open(self.latest),
            steady: variation.map_or(self.fit.is_some_and(|fit| fit.steady), |known| known < EVEN),
            rse_percent: rse.min(f64::from(u8::MAX)) as u8,
        })
    }

    /// Returns α, the weight of the second likelihood. Of the levels up to the knee, the one whose latencies vary least
    /// determines it.
    fn steadiness(&self, weight: f64) -> f64 {
        let Some(fit) = self.fit.filter(|fit| fit.knee <= STEADY_KNEE) else { return 1.0 };
        // Levels with at least one full observation.
        let known = self.rows.iter().take(fit.knee.into()).filter(|row| row.met > weight && row.took > 0.0);
        let variation = known
            .map(|row| {
                let squared = (row.squares * row.met / (row.took * row.took) - 1.0).max(0.0);
                squared + ASSUMED * weight / row.met
            })
            .fold(f64::INFINITY, f64::min);
        (STEADY / variation).clamp(1.0, MOST_STEADY)
    }

    /// Returns the squared coefficient of variation of the latencies within the levels up to the knee; `None` if too few
    /// requests arrived at these levels. `each` is the number of responses that a weight of 1 stands for.
    fn variation(&self, knee: u16, each: f64) -> Option<f64> {
        let (mut met, mut means, mut within, mut levels) = (0.0, 0.0, 0.0, 0.0);
        // A row that has faded away must not be divided by.
        for row in self.rows.iter().take(knee.into()).filter(|row| row.met > FADED && row.took > 0.0) {
            let mean = row.took * row.took / row.met;
            met += row.met;
            means += mean;
            within += (row.squares - mean).max(0.0);
            levels += 1.0;
        }
        let responses = met * each;
        (responses >= EVIDENT).then(|| within / means + ASSUMED * levels / responses)
    }

    /// Time that the level has lasted, microseconds.
    fn elapsed(&self, now: Micros) -> f64 {
        self.since.map_or(0, |since| now.saturating_since(since).min(LONGEST_US)) as f64
    }

    /// Returns the weight of an event now; past events weigh less and less in comparison.
    fn weight(&mut self, now: Micros) -> f64 {
        if now < self.latest && now.distance(self.latest) > STEP_US {
            // After a step back, past events keep their age.
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
            for sum in [&mut row.time, &mut row.left, &mut row.met, &mut row.took, &mut row.squares] {
                *sum /= weight;
            }
        }
        self.left_squares /= weight * weight;
        self.single.scale(weight);
        self.one_core.scale(weight);
        // Drops empty levels at the top, which would cost time at every fit.
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
