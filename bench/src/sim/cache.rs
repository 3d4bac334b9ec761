//! The keys that a simulated server remembers, if it has a cache.

use std::collections::VecDeque;

use super::scenario::CacheSpec;

/// Keys, the most recently used at the end. Caches are small, so a linear search is cheap enough.
#[derive(Debug, Default)]
pub(crate) struct Cache(VecDeque<u32>);

impl Cache {
    /// Looks up `key` and remembers it. Returns the query's work as a multiple of the usual.
    pub(crate) fn look_up(&mut self, spec: &CacheSpec, key: u32) -> f64 {
        let place = self.0.iter().rposition(|known| *known == key);
        match place {
            Some(place) => drop(self.0.remove(place)),
            None if self.0.len() >= spec.entries => drop(self.0.pop_front()),
            None => {}
        }
        self.0.push_back(key);
        if place.is_some() { 1.0 } else { spec.miss }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_key_is_evicted() {
        let (spec, mut cache) = (CacheSpec { entries: 2, miss: 10.0 }, Cache::default());
        let work = [1, 2, 1, 3, 1, 2, 3].map(|key| cache.look_up(&spec, key));
        // 3 evicts 2, not 1, which was used in between.
        assert_eq!(work, [10.0, 10.0, 1.0, 10.0, 1.0, 10.0, 10.0]);
    }
}
