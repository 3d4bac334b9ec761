//! The order of the event queue, and the slots for queries and probes in progress.

use std::cmp::Ordering;

use super::{Event, Nanos};

pub(super) struct Timed {
    pub(super) at: Nanos,
    pub(super) sequence: u64,
    pub(super) event: Event,
}

impl Ord for Timed {
    fn cmp(&self, other: &Self) -> Ordering {
        // Reversed, because the heap returns the greatest element first.
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Timed {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Timed {}

pub(super) struct Slab<T> {
    pub(super) items: Vec<Option<T>>,
    pub(super) free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(super) fn insert(&mut self, item: T) -> u32 {
        match self.free.pop() {
            Some(slot) => {
                self.items[slot as usize] = Some(item);
                slot
            }
            None => {
                self.items.push(Some(item));
                self.items.len() as u32 - 1
            }
        }
    }

    pub(super) fn get(&mut self, slot: u32) -> Option<&mut T> {
        self.items[slot as usize].as_mut()
    }

    pub(super) fn remove(&mut self, slot: u32) -> Option<T> {
        let item = self.items[slot as usize].take();
        if item.is_some() {
            self.free.push(slot);
        }
        item
    }
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { items: Vec::new(), free: Vec::new() }
    }
}
