//! Predicted latency: the next request goes where it costs least, by what replicas say of their capacity
//! ([`crate::capacity`]). What an entry costs, which entries count as equal, and when one that looks worse is tried.
//! Which entries stand, and what becomes of the one chosen, is the pool's business.

use rand::Rng;

use super::rank::Order;
use super::{Branch, Entry, MAX_POOL};
use crate::capacity::Capacity;
use crate::members::Standing;

/// Entries within this factor of the lowest cost count as equal. Wider than the noise of the estimates: a narrow band never
/// gives a healed replica its traffic back, because who looks slow is not sampled and so looks slow.
const BAND: f32 = 1.35;
/// What every pick adds to the credit for trials, in lowest costs: at most one request in a thousand goes to a replica that
/// looks twice as slow.
const CREDIT: f32 = 0.001;
/// Most that a trial is charged, in lowest costs: one request in 5000 for a replica that looks far slower. Also the most
/// that is saved up.
const DEAREST: f32 = 5.0;

/// The rule over one set of entries.
pub(super) struct Predicted {
    /// Stands in for what a replica has not reported.
    unknown_us: u32,
    lowest: f32,
    /// Weights differ.
    uneven: bool,
}

impl Predicted {
    pub(super) fn over(entries: &[Entry]) -> Self {
        let mut rule = Self { unknown_us: median(entries), lowest: f32::MAX, uneven: false };
        let weight = entries.first().map_or(Standing::UNIT, |first| first.weight);
        for entry in entries {
            let cost = rule.cost(entry);
            rule.lowest = if cost < rule.lowest { cost } else { rule.lowest };
            rule.uneven |= entry.weight != weight;
        }
        rule
    }

    /// An unknown replica is as fast as most, and saturated by one request: until it has answered it gets no other.
    fn capacity(&self, entry: &Entry) -> Capacity {
        entry.capacity().unwrap_or(Capacity { base_us: self.unknown_us, knee: 1 })
    }

    fn cost(&self, entry: &Entry) -> f32 {
        self.capacity(entry).cost(entry.rif.into())
    }

    fn is_equal(&self, cost: f32) -> bool {
        cost <= self.lowest * BAND
    }

    /// The entry that a trial goes to, if one is due, by what `credit` there is.
    pub(super) fn trial(&self, entries: &[Entry], credit: &mut f32, rng: &mut impl Rng) -> Option<usize> {
        let saved = *credit + CREDIT * self.lowest;
        let most = DEAREST * self.lowest;
        *credit = if saved < most { saved } else { most };
        let mut tried = None;
        let mut idle = 0;
        for (index, entry) in entries.iter().enumerate() {
            if entry.rif == 0 && entry.unproven == 0 && !self.is_equal(self.cost(entry)) {
                idle += 1;
                if idle == 1 || rng.random_range(0..idle) == 0 {
                    tried = Some((index, self.cost(entry)));
                }
            }
        }
        let (index, cost) = tried?;
        let price = (cost - self.lowest).min(most);
        if *credit < price {
            return None;
        }
        *credit -= price;
        Some(index)
    }
}

/// Worse than the best by more than the band; requests in flight or, if worse, the cost; age of the report.
type Rank = (bool, u32, u32);

impl Order for Predicted {
    type Rank = Rank;

    fn rank(&self, entry: &Entry, rng: &mut impl Rng) -> Rank {
        let cost = self.cost(entry);
        if !self.is_equal(cost) {
            // Costs are positive: their bits are in their order.
            return (true, cost.to_bits(), 0);
        }
        let load = if self.uneven { entry.draw(rng) } else { entry.rif.into() };
        (false, load, u32::MAX - entry.received.0)
    }

    fn branch(&self, entry: &Entry, _: &Rank) -> Branch {
        if u32::from(entry.rif) < self.capacity(entry).knee.into() { Branch::Cold } else { Branch::Hot }
    }

    fn latency_us(&self, entry: &Entry) -> Option<u32> {
        Some(entry.capacity()?.latency_us(entry.rif.into()))
    }
}

/// The lower median base latency of those that are known; 1 if none is.
fn median(entries: &[Entry]) -> u32 {
    let mut known = [0; MAX_POOL];
    let mut count = 0;
    let answered = entries.iter().filter_map(Entry::capacity);
    for (slot, capacity) in known.iter_mut().zip(answered) {
        *slot = capacity.base_us;
        count += 1;
    }
    match known.get_mut(..count) {
        Some(known) if count > 0 => *known.select_nth_unstable((count - 1) / 2).1,
        _ => 1,
    }
}
