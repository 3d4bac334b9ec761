//! Predicted latency: the next request goes to the replica with the lowest cost, according to the capacities that
//! replicas report ([`crate::server::capacity`]). This module defines the cost of an entry, which entries count as
//! equal, and when a replica that looks worse is tried. The pool decides which entries exist, and what happens to the
//! chosen one.

use rand::Rng;

use super::entry::{OPEN, STEADY};
use super::noise::Noise;
use super::rank::Order;
use super::{Branch, Entry, MAX_POOL, UNKNOWN};
use crate::client::members::Placement;
use crate::client::sync_mode::Answer;
use crate::shared::capacity::Capacity;
use crate::shared::endpoint::Endpoint;
use crate::shared::time::Stamp;

/// Entries within this factor of the lowest cost count as equal; the error of the estimates widens it ([`Noise`]). With
/// a narrow band, a replica that has recovered would never get its traffic back: it looks slow, so it gets no requests,
/// so it keeps looking slow.
const BAND: f32 = 1.35;
/// Highest cost, in multiples of the lowest cost, at which a home of the request's hint still gets the request. Beyond
/// the knee, a cost of 2 means 1.4 times as many requests in flight. Unless homes get most of the requests with their
/// hints, no replica keeps a hint's data in its cache. With 4, caches are hit slightly more often, but the longest
/// waits are 1.5 times as long. While most replicas are congested, the limit is the square root of this, because the
/// cost is then the latency.
const HOME: f32 = 2.0;
/// Credit for trials that every pick adds, in multiples of the lowest cost: at most one request in a thousand goes to a
/// replica that looks twice as slow.
const CREDIT: f32 = 0.001;
/// Maximum price of a trial, in multiples of the lowest cost: one request in 4000 for a replica that looks far slower.
/// It is also the maximum credit.
const DEAREST: f32 = 4.0;
/// Replicas that cost more than this, in multiples of the lowest cost, look far slower.
const FAR: f32 = 2.0;
/// Maximum price once the last trial is [`OVERDUE_MS`] ago, which happens below 500 requests a second. One request in
/// 4000 would be a trial every 40 s at 100 requests a second.
const DEAREST_OVERDUE: f32 = 2.0;
/// Time after which a trial is overdue, milliseconds. Then a replica that is not idle may get it, too: if it always has a
/// request that waits for an event, it is never idle.
const OVERDUE_MS: u32 = 8000;
/// Maximum price once the last trial is [`LONG_OVERDUE_MS`] ago, which happens below 33 requests a second: one request
/// in 250. Without it, at two requests a second a replica that has recovered would get no request for 17 minutes.
const DEAREST_LONG_OVERDUE: f32 = 0.25;
/// Time after which a trial is long overdue, milliseconds.
const LONG_OVERDUE_MS: u32 = 60_000;
/// After a trial, a replica that reports at most this fraction of its earlier base latency gets another trial.
const PROMISING: f64 = 0.8;
/// Reports younger than this limit count as equally fresh, milliseconds. [`FRESH_COSTS`] may raise the limit. Older
/// reports are grouped: up to twice the limit, up to four times, and so on. Among reports that are only milliseconds
/// apart, the order is chance. If that decided, requests would follow each other to the same replica.
const FRESH_MS: u32 = 32;
/// The same limit as a multiple of the lowest cost. In milliseconds, it is rounded down to a power of two. While the
/// requests that a report counted may still be in flight, the report is not out of date, whatever its age. Taking turns
/// is then better, because it spaces requests evenly.
const FRESH_COSTS: f32 = 2.0;
/// A replica counts as typical if its rate (the knee divided by the base latency) differs from the typical rate by at most
/// a factor of 1 + this many standard errors. Such a difference may be due to chance.
const STANDARD_ERRORS: f32 = 4.0;
/// Relative standard errors below this are too small to matter, percent.
const LEAST_ERROR: u8 = 5;
/// A replica whose rate is more than this many times the typical one, or less than the typical one divided by this, does
/// not count as typical, however uncertain it is.
const RATE_LIMIT: f32 = 3.0;
/// Nor does a replica whose base latency is more than this many times the typical one. The limit is wider because the
/// base latency is less certain than the rate: a few responses do not show whether a replica serves one fast request at
/// a time or several slow ones.
const BASE_LIMIT: f32 = 4.0;
/// A base latency counts as at least the pool's median base latency divided by this. No fleet needs finer distinctions.
/// A replica that reports almost no latency then gets a few requests more than the others, but not all of them.
const FASTEST: u32 = 32;
/// A replica with this many times its knee in flight is congested.
const CONGESTED: u32 = 3;
/// Below the knee, having waited for a whole round of turns outweighs this many requests in flight.
const TURN: u32 = 5;
/// Where latencies vary, a busy replica was just chosen if that is less than this part of a round ago.
const JUST_CHOSEN: u32 = 4;
/// Where weights differ, a replica of average weight with this many requests in flight waits twice as long for its turn as
/// an idle one. In Envoy's `least_request`, this number is 1. But with 1, weights of 3 to 1 result in shares of 2 to 1
/// while two requests are in flight.
const WEIGHTED_TURN: f32 = 4.0;
/// Upper bound of a credit: more than the slowest replica at the highest RIF could cost.
const MOST_CREDIT: f32 = 1e30;

/// The rule for one set of entries.
pub(super) struct Predicted {
    /// Base latency of a typical replica: the lower median of the known ones. It is assumed for a replica that has not
    /// reported one.
    usual_us: u32,
    lowest: f32,
    /// Whether the costs of all entries count as equal, before the pick adds its request to one of them.
    all_equal: bool,
    /// Whether most replicas are congested. Each replica then has so many requests that its reports show its rate, but
    /// not its knee: a knee of 1 with a base latency of 5 ms, and one of 24 with 120 ms, are equally plausible. So only
    /// the latency counts, which depends on the rate, and the knee decides nothing.
    congested: bool,
    /// Whether the latencies of most replicas are steady.
    steady: bool,
    /// Entries up to this multiple of the lowest cost count as equal.
    band: f32,
    /// A home may cost this multiple of the lowest cost.
    home: f32,
    /// Whether weights differ.
    uneven: bool,
    /// Upper median of the known knees, relative to the weights.
    usual_knee: u32,
    /// `None` if no replica may count as typical.
    typical: Option<Typical>,
    /// Lower base latencies count as this one.
    least_us: u32,
    /// Number of entries.
    count: u32,
    /// Number of picks so far.
    picks: u16,
    /// Logarithm to base 2 of the age up to which reports count as equally fresh, milliseconds.
    fresh_log2: u32,
    now: Stamp,
}

impl Predicted {
    /// The rule for `entries`, whose base latencies have the error `noise`. `learning` says that the client has known
    /// most of the fleet for a short time only.
    pub(super) fn over(entries: &[Entry], picks: u16, noise: &Noise, learning: bool, now: Stamp) -> Self {
        let summary = Summary::of(entries, learning);
        let usual_us = summary.usual_base_us(entries);
        let congested = summary.congested * 2 > entries.len();
        let mut rule = Self {
            usual_us,
            lowest: f32::MAX,
            all_equal: false,
            congested,
            steady: summary.steady * 2 > summary.known,
            band: BAND * (1.0 + noise.error()),
            home: if congested { HOME.sqrt() } else { HOME },
            uneven: summary.uneven,
            usual_knee: summary.usual_knee(entries),
            typical: summary.compares.then(|| Typical::new(usual_us, summary.usual_rate(entries), learning)),
            least_us: summary.least_base_us(entries),
            count: entries.len() as u32,
            picks,
            fresh_log2: FRESH_MS.ilog2(),
            now,
        };
        let mut highest = 0.0;
        for entry in entries {
            let cost = rule.cost(entry);
            rule.lowest = if cost < rule.lowest { cost } else { rule.lowest };
            highest = if cost > highest { cost } else { highest };
        }
        rule.all_equal = rule.is_equal(highest);
        let fresh_ms = (rule.lowest * FRESH_COSTS / 1000.0) as u32;
        rule.fresh_log2 = fresh_ms.max(FRESH_MS).ilog2();
        rule
    }

    /// Capacity assumed for an entry. An unknown replica counts as typically fast, and as saturated by one request: it
    /// gets no other until it has answered. An open knee may be higher than reported. It counts double, up to the
    /// typical knee: otherwise a new replica that gets one request at a time would never get two.
    ///
    /// A replica whose difference from the typical one may be due to chance counts as typical ([`STANDARD_ERRORS`]).
    /// Otherwise a replica with an unlucky estimate would get no requests that could correct it. So does a replica that
    /// saturates at about the typical rate, while the client is learning.
    fn capacity(&self, entry: &Entry) -> Capacity {
        let capacity = entry.capacity();
        let capacity = capacity.map(|known| Capacity { base_us: known.base_us.max(self.least_us), ..known });
        let Some(known) = capacity else { return Capacity::new(self.usual_us, 1) };
        match self.typical {
            Some(typical) if typical.is_like(known) => typical.capacity,
            _ if known.open => {
                let usual = self.usual_knee.saturating_mul(entry.weight.into()) / u32::from(Placement::UNIT);
                let knee = (2 * u32::from(known.knee)).min(usual).max(known.knee.into());
                Capacity { knee: u16::try_from(knee).unwrap_or(u16::MAX), ..known }
            }
            _ => known,
        }
    }

    fn cost(&self, entry: &Entry) -> f32 {
        self.cost_at(self.capacity(entry), entry.at_server())
    }

    fn cost_at(&self, capacity: Capacity, load: u32) -> f32 {
        if self.congested { capacity.latency_us(load) as f32 } else { capacity.cost(load) }
    }

    fn is_equal(&self, cost: f32) -> bool {
        cost <= self.lowest * self.band
    }

    /// Returns the entry that gets a trial, if one is due.
    pub(super) fn trial(&self, entries: &[Entry], trials: &mut Trials, rng: &mut impl Rng) -> Option<usize> {
        if entries.is_empty() {
            return None;
        }
        if trials.at == Stamp(0) {
            // A new client has not missed any trial yet.
            trials.at = self.now;
        }
        let since_last = self.now.distance_ms(trials.at);
        let dearest = match since_last {
            LONG_OVERDUE_MS.. => DEAREST_LONG_OVERDUE,
            OVERDUE_MS.. => DEAREST_OVERDUE,
            _ => DEAREST,
        };
        let most = dearest * self.lowest;
        for credit in &mut trials.credits {
            let saved = *credit + CREDIT * self.lowest;
            *credit = if saved < most { saved } else { most };
        }
        // No entry looks worse, so no second pass over the costs is needed.
        if self.all_equal {
            return None;
        }
        // Chooses one candidate of each kind at random: slightly slower, far slower.
        let mut idle = [0; 2];
        let mut tried = [None; 2];
        for (index, entry) in entries.iter().enumerate() {
            let most_busy = if since_last < OVERDUE_MS { 0 } else { u32::from(entry.knee) - 1 };
            if entry.at_server() > most_busy || entry.unproven == 1 {
                continue;
            }
            let cost = self.cost(entry);
            if self.is_equal(cost) {
                continue;
            }
            if trials.promising == 1 && entry.endpoint == trials.last {
                trials.promising = 0;
                return Some(index);
            }
            let kind = usize::from(cost > self.lowest * FAR);
            let (Some(idle), Some(tried)) = (idle.get_mut(kind), tried.get_mut(kind)) else { continue };
            *idle += 1;
            if *idle == 1 || rng.random_range(0..*idle) == 0 {
                *tried = Some((index, entry, cost));
            }
        }
        // The far slower one comes first: it has waited longer.
        for (tried, credit) in tried.into_iter().zip(&mut trials.credits).rev() {
            let Some((index, entry, cost)) = tried else { continue };
            let price = (cost - self.lowest).min(most);
            if *credit >= price {
                *credit -= price;
                (trials.last, trials.base_us, trials.last_us) =
                    (entry.endpoint, entry.base_us, entry.base_us);
                (trials.promising, trials.at) = (0, self.now);
                return Some(index);
            }
        }
        None
    }
}

/// What is typical of the replicas. A few responses show the rate at which a replica saturates, but not whether it serves
/// one fast request at a time or several slow ones. So replicas are compared by their rate.
#[derive(Clone, Copy)]
struct Typical {
    /// The lower median of the known base latencies, and the knee that goes with it and the typical rate.
    capacity: Capacity,
    /// The upper median of the known rates.
    rate: f32,
    /// Whether the client has known most of the fleet for a short time only.
    learning: bool,
}

impl Typical {
    fn new(base_us: u32, rate: f32, learning: bool) -> Self {
        let knee = (rate * base_us as f32 + 0.5) as u16;
        Self { capacity: Capacity::new(base_us, knee.max(1)), rate, learning }
    }

    /// Whether `known` may differ from this only by chance.
    fn is_like(&self, known: Capacity) -> bool {
        if self.learning && self.is_within(known, BAND, FAR) {
            return true;
        }
        if known.rse_percent < LEAST_ERROR {
            return false;
        }
        let by_chance = 1.0 + STANDARD_ERRORS / 100.0 * f32::from(known.rse_percent);
        self.is_within(known, if by_chance < RATE_LIMIT { by_chance } else { RATE_LIMIT }, BASE_LIMIT)
    }

    /// Whether the rate of `known` is within a factor of `rates`, and its base latency at most `bases` times as long.
    fn is_within(&self, known: Capacity, rates: f32, bases: f32) -> bool {
        // Multiplies instead of computing the rate, because every pick compares every entry and divisions are slow.
        let (knee, base_us) = (f32::from(known.knee), known.base_us as f32);
        let typical = self.rate * base_us;
        knee <= typical * rates && typical <= knee * rates && base_us <= self.capacity.base_us as f32 * bases
    }
}

/// Requests per microsecond at which a replica saturates.
fn rate(capacity: Capacity) -> f32 {
    f32::from(capacity.knee) / capacity.base_us.max(1) as f32
}

/// Credit for trials, and the result of the last trial.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Trials {
    /// Credit saved, microseconds: for replicas that look slightly slower, and for those that look far slower. With a
    /// single credit the cheap trials would always be paid first.
    credits: [f32; 2],
    /// Base latency that the tried replica reported before its trial, and the last one it reported.
    base_us: u32,
    last_us: u32,
    last: Endpoint,
    /// 1 once the replica reports so much less that it is tried again at once.
    promising: u32,
    /// Time of the last trial.
    at: Stamp,
}

impl Trials {
    /// Evaluates a report of `replica`. A recovered replica gets its traffic back within a few requests, although its
    /// report still includes older slow requests: it is tried again for as long as the reported latency falls.
    pub(super) fn reported(&mut self, replica: Endpoint, capacity: Option<Capacity>) {
        if replica != self.last {
            return;
        }
        let base_us = capacity.map_or(UNKNOWN, |capacity| capacity.base_us);
        if base_us < self.last_us && f64::from(base_us) <= f64::from(self.base_us) * PROMISING {
            self.promising = 1;
        }
        self.last_us = base_us;
    }

    /// Whether a blob may hold these values.
    pub(super) fn is_sound(&self) -> bool {
        self.credits.iter().all(|credit| (0.0..=MOST_CREDIT).contains(credit)) && self.promising <= 1
    }
}

/// Rank of an entry. The first criterion is whether its cost is beyond the band. Entries beyond the band are ranked by
/// cost, the others by requests in flight, then by the age of the report, then by turn. A replica below its knee serves
/// every request at once, so its RIF does not count before the age of its report. While most replicas are congested, it
/// does.
///
/// Where latencies are steady, the turn weighs the RIF against the time since the replica was last chosen ([`TURN`]).
/// Taking turns spaces requests evenly. Where all requests take the same time, this keeps queues short, as in round
/// robin.
///
/// Where latencies vary, the lowest RIF decides, as the knee is less certain. Idle replicas then take turns. Among busy
/// ones, chance decides: of those with equally many requests in flight, the one chosen longest ago is likely to be at a
/// long request. Only those that were just chosen ([`JUST_CHOSEN`]) come last, as their reports may not count that
/// request yet.
///
/// Where weights differ, the longest wait relative to the weight decides. It counts less the higher the RIF is relative to
/// the weight ([`WEIGHTED_TURN`]). So replicas whose RIF is in proportion to their weights share by weight. The age of
/// reports does not count.
///
/// The parts are packed into one number, because every pick compares the ranks of all entries. From the highest bit
/// down: one bit for the first, 31 for the second, 32 for the others.
type PredictedRank = u64;

/// The bit of [`PredictedRank`] that says that the cost exceeds the band.
const BEYOND: u64 = 1 << 63;

impl Order for Predicted {
    type Rank = PredictedRank;

    fn rank(&self, entry: &Entry, rng: &mut impl Rng) -> PredictedRank {
        let (capacity, requests) = (self.capacity(entry), entry.at_server());
        let cost = self.cost_at(capacity, requests);
        if !self.is_equal(cost) {
            // Costs are positive, so their bits sort in the same order, and the sign is 0.
            return BEYOND | u64::from(cost.to_bits()) << 32;
        }
        let knee = u32::from(capacity.knee);
        let load = if requests < knee && !self.congested { 0 } else { entry.load_at_server() };
        if self.uneven {
            // Without the random part, replicas of low weight would get too many requests, because turns are whole numbers.
            let waited = f32::from(self.picks.wrapping_sub(entry.chosen)) + 1.0 + rng.random::<f32>();
            let weight = f32::from(entry.weight.max(1));
            let relative_rif = f32::from(entry.rif) * f32::from(Placement::UNIT) / weight;
            let turn = (relative_rif + WEIGHTED_TURN) / (waited * weight);
            // Positive, so its bits sort in the same order.
            return u64::from(load) << 32 | u64::from(turn.to_bits());
        }
        // The higher the knee, the less the age of a report matters.
        let age = u32::BITS - (self.now.distance_ms(entry.received) >> self.fresh_log2).leading_zeros();
        let age = if age < knee { 0 } else { age / knee };
        let waited = u32::from(self.picks.wrapping_sub(entry.chosen)).min(self.count);
        let turn = match u32::from(entry.rif) {
            rif if self.steady => rif * self.count + TURN * (self.count - waited),
            0 => self.count - waited,
            rif => rif * 2 * self.count + u32::from(waited < self.count.div_ceil(JUST_CHOSEN)),
        };
        // The load is below 2^25, even at the lowest weight.
        u64::from(load) << 32 | u64::from(age << 24 | turn.min((1 << 24) - 1))
    }

    fn branch(&self, entry: &Entry, _: &Self::Rank) -> Branch {
        if entry.at_server() < self.capacity(entry).knee.into() { Branch::Cold } else { Branch::Hot }
    }

    fn latency_us(&self, entry: &Entry) -> Option<u32> {
        Some(entry.capacity()?.latency_us(entry.at_server()))
    }
}

/// The order in which the homes of a request's hint come first, unless their cost is far above the lowest.
pub(super) struct AtHome<'a> {
    pub(super) rule: Predicted,
    /// The answers that say which replicas are homes.
    pub(super) answers: &'a [Answer],
}

impl Order for AtHome<'_> {
    /// Place among the homes, then the rank without homes.
    type Rank = (u8, PredictedRank);

    fn rank(&self, entry: &Entry, rng: &mut impl Rng) -> Self::Rank {
        let home = self.answers.iter().find(|answer| answer.replica == entry.endpoint);
        let home = home.and_then(|answer| answer.home);
        let home = home.filter(|_| self.rule.cost(entry) <= self.rule.lowest * self.rule.home);
        (home.unwrap_or(u8::MAX), self.rule.rank(entry, rng))
    }

    fn branch(&self, entry: &Entry, (_, rank): &Self::Rank) -> Branch {
        self.rule.branch(entry, rank)
    }

    fn latency_us(&self, entry: &Entry) -> Option<u32> {
        self.rule.latency_us(entry)
    }
}

/// Facts that show which medians a pick needs. Where latencies are steady, most picks need none.
struct Summary {
    /// Whether the usual base latency is needed: one is unknown, or replicas are compared.
    needs_base: bool,
    /// Whether the usual knee is needed: one is open.
    needs_knee: bool,
    /// Whether replicas are compared with the typical one: the client is learning, or an estimate is uncertain.
    compares: bool,
    /// Whether weights differ.
    uneven: bool,
    /// Number of congested replicas.
    congested: usize,
    /// Number of replicas with a known capacity, and of those whose latencies are steady.
    known: usize,
    steady: usize,
    /// The lowest and the highest of the known base latencies.
    least_us: u32,
    most_us: u32,
}

impl Summary {
    fn of(entries: &[Entry], learning: bool) -> Self {
        let weight = entries.first().map_or(Placement::UNIT, |first| first.weight);
        let mut all = Self {
            needs_base: false,
            needs_knee: false,
            compares: learning,
            uneven: false,
            congested: 0,
            known: 0,
            steady: 0,
            least_us: UNKNOWN,
            most_us: 0,
        };
        for entry in entries {
            let unknown = entry.base_us == UNKNOWN;
            all.needs_base |= unknown;
            all.needs_knee |= entry.is(OPEN);
            all.compares |= entry.rse_percent >= LEAST_ERROR;
            all.uneven |= entry.weight != weight;
            all.known += usize::from(!unknown);
            all.steady += usize::from(entry.is(STEADY));
            all.congested += usize::from(entry.at_server() >= CONGESTED * u32::from(entry.knee));
            all.least_us = all.least_us.min(entry.base_us);
            all.most_us = all.most_us.max(if unknown { 0 } else { entry.base_us });
        }
        all.needs_base |= all.compares;
        all
    }

    /// Lower median of the known base latencies; 1 if none is known. Not computed unless it is needed.
    fn usual_base_us(&self, entries: &[Entry]) -> u32 {
        if !self.needs_base {
            return 1;
        }
        let known = entries.iter().filter_map(|entry| Some(entry.capacity()?.base_us));
        middle(known, |count| (count - 1) / 2).unwrap_or(1)
    }

    /// Upper median of the known base latencies, divided by [`FASTEST`]; 1 if no two are that far apart.
    fn least_base_us(&self, entries: &[Entry]) -> u32 {
        if self.least_us >= self.most_us / FASTEST {
            return 1;
        }
        let known = entries.iter().filter_map(|entry| Some(entry.capacity()?.base_us));
        middle(known, |count| count / 2).map_or(1, |usual| usual / FASTEST).max(1)
    }

    /// Upper median of the known rates; 0 if none is known.
    fn usual_rate(&self, entries: &[Entry]) -> f32 {
        // Rates are positive, so their bits sort in the same order.
        let known = entries.iter().filter_map(|entry| Some(rate(entry.capacity()?).to_bits()));
        f32::from_bits(middle(known, |count| count / 2).unwrap_or(0))
    }

    /// Upper median of the known knees, relative to the weights; 1 if none is known. Not computed unless it is needed.
    fn usual_knee(&self, entries: &[Entry]) -> u32 {
        if !self.needs_knee {
            return 1;
        }
        let relative =
            |knee: u16, weight: u16| u32::from(knee) * u32::from(Placement::UNIT) / u32::from(weight.max(1));
        let known = entries.iter().filter_map(|entry| Some(relative(entry.capacity()?.knee, entry.weight)));
        middle(known, |count| count / 2).unwrap_or(1)
    }
}

/// Returns the value at position `place` of the sorted values.
fn middle<T: Copy + Default + Ord>(
    values: impl Iterator<Item = T>,
    place: impl FnOnce(usize) -> usize,
) -> Option<T> {
    let mut known = [T::default(); MAX_POOL];
    let mut count = 0;
    for (slot, value) in known.iter_mut().zip(values) {
        *slot = value;
        count += 1;
    }
    let known = known.get_mut(..count).filter(|known| !known.is_empty())?;
    Some(*known.select_nth_unstable(place(count)).1)
}
