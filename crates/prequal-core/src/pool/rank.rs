//! Orders of the pool's entries, and hot and cold: θ from the history of reported RIFs, and where an entry ranks under it. Which entries stand, and what
//! becomes of the one chosen, is the pool's business.

use std::cmp::Ordering;
use std::ops::RangeInclusive;

use rand::Rng;

use super::{
    Branch, Candidate, Entry, FULL_SHARE, HotRule, MAX_HISTORY, MAX_POOL, PoolSettings, PoolState, UNKNOWN,
};
use crate::members::Standing;
use crate::time::Stamp;

/// An order of the pool's entries: the first is chosen, the last is the worst.
pub(super) trait Order {
    type Rank: Ord;

    /// Where an entry stands, lowest first.
    fn rank(&self, entry: &Entry, rng: &mut impl Rng) -> Self::Rank;

    /// What to call the choice of an entry that stands there.
    fn branch(&self, entry: &Entry, rank: &Self::Rank) -> Branch;

    /// What a request may expect there, microseconds.
    fn latency_us(&self, entry: &Entry) -> Option<u32> {
        entry.latency_us()
    }
}

pub(super) enum Theta {
    AllHot,
    NoneHot,
    At(u32, bool),
}

impl Theta {
    pub(super) fn is_hot(&self, rif: u32) -> bool {
        match *self {
            Self::AllHot => true,
            Self::NoneHot => false,
            Self::At(theta, or_equal) => rif > theta || (or_equal && rif == theta),
        }
    }

    /// Where a replica stands, lowest first; see the module's head.
    fn rank(&self, entry: &Entry) -> Rank {
        let (rif, latency_us) = (entry.load(), entry.latency_us);
        let unknown = latency_us == UNKNOWN;
        // Under RIF-only control (`q_rif` = 0) latency, known or not, only breaks ties.
        if unknown && rif > 0 && !matches!(self, Self::AllHot) {
            return (Tier::Probation, rif, 0);
        }
        let latency = if unknown { 0 } else { latency_us };
        if self.is_hot(rif) { (Tier::Hot, rif, latency) } else { (Tier::Cold, latency, rif) }
    }
}

/// The rule of hot and cold over one set of entries.
pub(super) struct Hcl {
    theta: Theta,
    /// Latency of the fastest cold entry, and those that count as equally fast.
    lowest: u32,
    band: RangeInclusive<u32>,
    /// The highest latency at which a cold entry goes before the hot ones.
    limit: u32,
    /// The fleet is being learned, and half of the entries or more are of replicas that know nothing.
    new: bool,
    /// Weights differ.
    uneven: bool,
}

impl Hcl {
    fn over(entries: &[Entry], theta: Theta, settings: &PoolSettings, learning: bool) -> Self {
        let (mut lowest, mut lowest_hot) = (None, None);
        for entry in entries.iter().filter(|entry| entry.latency_us != UNKNOWN) {
            let least = if theta.is_hot(entry.load()) { &mut lowest_hot } else { &mut lowest };
            *least = Some(least.map_or(entry.latency_us, |so_far: u32| so_far.min(entry.latency_us)));
        }
        // Only where a hot entry may be so much the faster does it take the median to tell.
        let limit = match (lowest, lowest_hot) {
            (Some(cold), Some(hot))
                if settings.cold_limit > 0.0 && times(hot, settings.cold_limit) < cold =>
            {
                limit(entries, settings)
            }
            _ => u32::MAX,
        };
        let lowest = lowest.unwrap_or(0);
        let band = lowest..=times(lowest, settings.latency_band);
        let weight = entries.first().map_or(Standing::UNIT, |first| first.weight);
        let uneven = entries.iter().any(|entry| entry.weight != weight);
        let unknown = || entries.iter().filter(|entry| entry.latency_us == UNKNOWN).count();
        let new = learning && unknown() * 2 >= entries.len();
        Self { theta, lowest, band, limit, new, uneven }
    }

}

impl Order for Hcl {
    type Rank = Rank;

    fn rank(&self, entry: &Entry, rng: &mut impl Rng) -> Rank {
        match self.theta.rank(entry) {
            (Tier::Probation, load, _) if self.new => (Tier::Hot, load, UNKNOWN),
            (Tier::Cold, latency, load) if latency > self.limit => (Tier::Slow, latency, load),
            (Tier::Cold, latency, load) if self.band.contains(&latency) => {
                (Tier::Cold, self.lowest, if self.uneven { entry.draw(rng) } else { load })
            }
            (Tier::Hot, _, latency) if self.uneven => (Tier::Hot, entry.draw(rng), latency),
            rank => rank,
        }
    }

    fn branch(&self, _: &Entry, (tier, ..): &Rank) -> Branch {
        if *tier == Tier::Cold { Branch::Cold } else { Branch::Hot }
    }
}

/// [`PoolSettings::cold_limit`] as a latency. The upper median: the slower half of a fleet cannot be too slow for it, nor
/// can a minority that claims to be fast make the others look slow.
fn limit(entries: &[Entry], settings: &PoolSettings) -> u32 {
    let mut latencies = [0; MAX_POOL];
    let mut known = 0;
    let answered = entries.iter().filter(|entry| entry.latency_us != UNKNOWN);
    for (place, entry) in latencies.iter_mut().zip(answered) {
        *place = entry.latency_us;
        known += 1;
    }
    let Some(latencies) = latencies.get_mut(..known).filter(|known| !known.is_empty()) else {
        return u32::MAX;
    };
    let (_, median, _) = latencies.select_nth_unstable(known / 2);
    times(*median, settings.cold_limit)
}

fn times(latency_us: u32, factor: f64) -> u32 {
    (f64::from(latency_us) * factor) as u32
}

/// Tier, first and second criterion.
pub(super) type Rank = (Tier, u32, u32);

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Tier {
    Cold,
    Hot,
    /// Cold, yet far slower than most.
    Slow,
    /// Busy and unknown.
    Probation,
}

/// Any score of entries as they are at a time, the lowest first.
pub(super) struct Scored<F>(pub(super) F, pub(super) Stamp);

impl<F: Fn(&Candidate) -> f64> Order for Scored<F> {
    type Rank = Score;

    fn rank(&self, entry: &Entry, _: &mut impl Rng) -> Score {
        Score((self.0)(&entry.candidate(self.1)))
    }

    fn branch(&self, _: &Entry, _: &Score) -> Branch {
        Branch::Scored
    }
}

/// A score as a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Score(f64);

impl Ord for Score {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Score {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Score {}

/// Index and rank of the lowest of `items`; ties are broken at random.
pub(super) fn lowest<T, R: Ord, G: Rng>(
    items: &[T],
    rank: impl Fn(&T, &mut G) -> R,
    rng: &mut G,
) -> Option<(usize, R)> {
    let mut best: Option<(usize, R)> = None;
    let mut ties = 1;
    for (index, item) in items.iter().enumerate() {
        let rank = rank(item, rng);
        match &best {
            Some((_, least)) if rank > *least => {}
            Some((_, least)) if rank == *least => {
                ties += 1;
                if rng.random_range(0..ties) == 0 {
                    best = Some((index, rank));
                }
            }
            _ => {
                ties = 1;
                best = Some((index, rank));
            }
        }
    }
    best
}

/// The first in order, where a young replica gives way to the best of the others as often as its share says.
pub(super) fn lowest_ramped<O: Order, G: Rng>(
    entries: &[Entry],
    order: &O,
    rng: &mut G,
) -> Option<(usize, O::Rank)> {
    let rank = |entry: &Entry, rng: &mut G| order.rank(entry, rng);
    let best = lowest(entries, rank, rng)?;
    let share = entries.get(best.0)?.share;
    if share >= FULL_SHARE {
        return Some(best);
    }
    // Where half or more are young the fleet is new: seconds between their starts say nothing.
    let grown = entries.iter().filter(|entry| entry.share >= FULL_SHARE).count();
    if grown * 2 <= entries.len() || rng.random_range(0..FULL_SHARE) < share {
        return Some(best);
    }
    let grown = |entry: &Entry, rng: &mut G| (entry.share < FULL_SHARE, order.rank(entry, rng));
    lowest(entries, grown, rng).map(|(index, (_, rank))| (index, rank))
}

impl PoolState {
    pub(super) fn hot_and_cold(&self, settings: &PoolSettings, now: Stamp, entries: &[Entry]) -> Hcl {
        Hcl::over(entries, self.theta(settings, now), settings, self.is_learning(settings, now))
    }

    pub(super) fn remember_rif(&mut self, settings: &PoolSettings, now: Stamp, load: u32) {
        let size = settings.rif_history.clamp(1, MAX_HISTORY);
        let next = usize::from(self.history_next) % size;
        if let (Some(slot), Some(at)) = (self.history_rif.get_mut(next), self.history_at.get_mut(next)) {
            *slot = u16::try_from(load).unwrap_or(u16::MAX);
            *at = now;
        }
        self.history_next = ((next + 1) % size) as u16;
        self.history_count = (usize::from(self.history_count) + 1).min(size) as u16;
    }

    /// θ by nearest rank over the reports younger than `max_age_ms`.
    pub(super) fn theta(&self, settings: &PoolSettings, now: Stamp) -> Theta {
        let small = settings.hot == HotRule::Auto && self.auto_ge == 0;
        let q_rif = if small { settings.q_rif_small } else { settings.q_rif };
        if q_rif >= 1.0 {
            return Theta::NoneHot;
        }
        if q_rif <= 0.0 {
            return Theta::AllHot;
        }
        // Counting beats sorting: RIFs are small numbers nearly always.
        let mut counts = [0u8; SMALL_RIF];
        let mut large = [0u16; MAX_HISTORY];
        let (mut total, mut large_count) = (0usize, 0usize);
        let samples = self.history_rif.iter().zip(&self.history_at).take(usize::from(self.history_count));
        for (rif, at) in samples {
            if now.distance_ms(*at) >= settings.max_age_ms {
                continue;
            }
            total += 1;
            if let Some(count) = counts.get_mut(usize::from(*rif)) {
                *count += 1;
            } else if let Some(slot) = large.get_mut(large_count) {
                *slot = *rif;
                large_count += 1;
            }
        }
        if total == 0 {
            return Theta::NoneHot;
        }
        let rank = ((q_rif * total as f64).ceil() as usize).clamp(1, total);
        let mut seen = 0;
        let small = counts.iter().position(|count| {
            seen += usize::from(*count);
            seen >= rank
        });
        let theta = match small {
            Some(rif) => rif as u32,
            None => {
                let index = rank - (total - large_count) - 1;
                large.get_mut(..large_count).map_or(u32::MAX, |large| {
                    large.sort_unstable();
                    large.get(index).map_or(u32::MAX, |rif| u32::from(*rif))
                })
            }
        };
        let or_equal = match settings.hot {
            HotRule::Ge => true,
            HotRule::Gt => false,
            HotRule::Auto => self.auto_ge == 1,
        };
        Theta::At(theta, or_equal)
    }
}

const SMALL_RIF: usize = 64;
