//! Orders of the pool's entries, and the hot and cold rule: θ from the history of reported RIFs, and the rank of an
//! entry under it. The pool decides which entries exist, and what happens to the chosen one.

use std::cmp::Ordering;
use std::ops::RangeInclusive;

use rand::Rng;

use super::{Branch, Candidate, Entry, FULL_SHARE, HotRule, MAX_HISTORY, PoolSettings, PoolState, UNKNOWN};
use crate::client::members::Placement;
use crate::shared::time::Stamp;

/// An order of the pool's entries: the first is chosen, the last is the worst.
pub(super) trait Order {
    type Rank: Ord;

    /// Rank of an entry, lowest first.
    fn rank(&self, entry: &Entry, rng: &mut impl Rng) -> Self::Rank;

    /// Branch to report when an entry of this rank is chosen.
    fn branch(&self, entry: &Entry, rank: &Self::Rank) -> Branch;

    /// Latency that a request can expect at this entry's replica, microseconds.
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

    /// Rank of an entry, lowest first; see the documentation of the pool module.
    fn rank(&self, entry: &Entry) -> HclRank {
        let (rif, latency_us) = (entry.load(), entry.latency_us);
        let unknown = latency_us == UNKNOWN;
        // Under RIF-only control (`q_rif` = 0), latency only breaks ties, known or not.
        if unknown && rif > 0 && !matches!(self, Self::AllHot) {
            return (Tier::Probation, rif, 0);
        }
        let latency = if unknown { 0 } else { latency_us };
        if self.is_hot(rif) { (Tier::Hot, rif, latency) } else { (Tier::Cold, latency, rif) }
    }
}

/// The hot and cold rule for one set of entries.
pub(super) struct Hcl {
    theta: Theta,
    /// Where weights differ: the latencies of cold entries that count as equal to the lowest.
    alike: Option<RangeInclusive<u32>>,
    /// Whether the fleet is being discovered, and the latency of at least half of the entries is unknown.
    new: bool,
}

impl Hcl {
    fn over(entries: &[Entry], theta: Theta, learning: bool) -> Self {
        let weight = entries.first().map_or(Placement::UNIT, |first| first.weight);
        let uneven = entries.iter().any(|entry| entry.weight != weight);
        let cold = |entry: &&Entry| entry.latency_us != UNKNOWN && !theta.is_hot(entry.load());
        let lowest = || entries.iter().filter(cold).map(|entry| entry.latency_us).min().unwrap_or(0);
        let alike = uneven.then(lowest).map(|lowest| lowest..=(f64::from(lowest) * ALIKE) as u32);
        let unknown = || entries.iter().filter(|entry| entry.latency_us == UNKNOWN).count();
        let new = learning && unknown() * 2 >= entries.len();
        Self { theta, alike, new }
    }
}

impl Order for Hcl {
    type Rank = HclRank;

    fn rank(&self, entry: &Entry, rng: &mut impl Rng) -> HclRank {
        match (self.theta.rank(entry), &self.alike) {
            ((Tier::Probation, load, _), _) if self.new => (Tier::Hot, load, UNKNOWN),
            ((Tier::Cold, latency, _), Some(alike)) if alike.contains(&latency) => {
                (Tier::Cold, *alike.start(), entry.draw(rng))
            }
            ((Tier::Hot, _, latency), Some(_)) => (Tier::Hot, entry.draw(rng), latency),
            (rank, _) => rank,
        }
    }

    fn branch(&self, _: &Entry, (tier, ..): &Self::Rank) -> Branch {
        if *tier == Tier::Cold { Branch::Cold } else { Branch::Hot }
    }
}

/// Tier, first criterion, second criterion.
pub(super) type HclRank = (Tier, u32, u32);

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Tier {
    Cold,
    Hot,
    /// Busy, with an unknown latency.
    Probation,
}

/// Order by any score of the entries at a given time, lowest first.
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

/// Returns the index and rank of the lowest of `items`; ties are broken at random.
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

/// The first entry in an order.
pub(super) struct First<R> {
    pub(super) index: usize,
    pub(super) rank: R,
    /// Index of the young entry that yielded to it.
    pub(super) gave_way: Option<usize>,
}

/// Returns the first entry in order. A young replica yields to the best of the others as often as its share requires.
pub(super) fn lowest_with_slow_start<O: Order, G: Rng>(
    entries: &[Entry],
    order: &O,
    rng: &mut G,
) -> Option<First<O::Rank>> {
    let rank = |entry: &Entry, rng: &mut G| order.rank(entry, rng);
    let (best, rank) = lowest(entries, rank, rng)?;
    let first = First { index: best, rank, gave_way: None };
    let share = entries.get(best)?.share;
    if share >= FULL_SHARE {
        return Some(first);
    }
    // If at least half are young, the whole fleet is new, and a few seconds between starts do not matter.
    let grown = entries.iter().filter(|entry| entry.share >= FULL_SHARE).count();
    if grown * 2 <= entries.len() || rng.random_range(0..FULL_SHARE) < share {
        return Some(first);
    }
    let grown = |entry: &Entry, rng: &mut G| (entry.share < FULL_SHARE, order.rank(entry, rng));
    lowest(entries, grown, rng).map(|(index, (_, rank))| First { index, rank, gave_way: Some(best) })
}

impl PoolState {
    pub(super) fn hot_and_cold(&self, settings: &PoolSettings, now: Stamp, entries: &[Entry]) -> Hcl {
        Hcl::over(entries, self.theta(settings, now), self.is_learning(settings, now))
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

    /// Returns θ by nearest rank over the reports younger than `max_age_ms`.
    pub(super) fn theta(&self, settings: &PoolSettings, now: Stamp) -> Theta {
        let q_rif = settings.q_rif;
        if q_rif >= 1.0 {
            return Theta::NoneHot;
        }
        if q_rif <= 0.0 {
            return Theta::AllHot;
        }
        // Counting beats sorting: RIFs are nearly always small numbers.
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
        Theta::At(theta, settings.hot == HotRule::Ge)
    }
}

const SMALL_RIF: usize = 64;
/// Where weights differ, latencies within this factor count as equal, so that weights decide and not noise.
const ALIKE: f64 = 1.5;
