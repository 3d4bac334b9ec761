//! Values in flight in order of age: a linked list in a slab, so that any value can be removed in O(1).
//! [`crate::server::tracker`] and [`crate::client::ejection::flights`] define the values and the meaning of their age.

/// Numbered values, some of which are linked in order of age. It allocates only when more values are in flight than
/// ever before.
#[derive(Debug)]
pub(crate) struct InFlight<T> {
    slots: Vec<Node<T>>,
    free: Vec<usize>,
    oldest: Option<usize>,
    newest: Option<usize>,
}

#[derive(Debug)]
struct Node<T> {
    value: T,
    prev: Option<usize>,
    next: Option<usize>,
    linked: bool,
    taken: bool,
}

impl<T> Default for InFlight<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), oldest: None, newest: None }
    }
}

impl<T: Copy> InFlight<T> {
    /// Inserts a value without adding it to the order, and returns its number. The number is valid until
    /// [`Self::remove`].
    pub(crate) fn insert(&mut self, value: T) -> usize {
        let slot = Node { value, prev: None, next: None, linked: false, taken: true };
        match self.free.pop() {
            Some(index) => {
                if let Some(place) = self.slots.get_mut(index) {
                    *place = slot;
                }
                index
            }
            None => {
                self.slots.push(slot);
                self.slots.len() - 1
            }
        }
    }

    /// Appends a value to the order as the newest.
    pub(crate) fn link(&mut self, index: usize) {
        let newest = self.newest;
        let Some(slot) = self.slots.get_mut(index).filter(|slot| slot.taken && !slot.linked) else { return };
        (slot.linked, slot.prev, slot.next) = (true, newest, None);
        match newest.and_then(|newest| self.slots.get_mut(newest)) {
            Some(newest) => newest.next = Some(index),
            None => self.oldest = Some(index),
        }
        self.newest = Some(index);
    }

    /// Takes a value out of the order; the value stays.
    pub(crate) fn unlink(&mut self, index: usize) {
        let Some(slot) = self.slots.get_mut(index).filter(|slot| slot.linked) else { return };
        slot.linked = false;
        let (prev, next) = (slot.prev, slot.next);
        match prev.and_then(|prev| self.slots.get_mut(prev)) {
            Some(prev) => prev.next = next,
            None => self.oldest = next,
        }
        match next.and_then(|next| self.slots.get_mut(next)) {
            Some(next) => next.prev = prev,
            None => self.newest = prev,
        }
    }

    /// Removes and returns a value; `None` if it was removed before.
    pub(crate) fn remove(&mut self, index: usize) -> Option<T> {
        self.unlink(index);
        let slot = self.slots.get_mut(index).filter(|slot| slot.taken)?;
        slot.taken = false;
        self.free.push(index);
        Some(slot.value)
    }

    /// Returns the value with this number, if the number is valid.
    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.slots.get_mut(index).filter(|slot| slot.taken).map(|slot| &mut slot.value)
    }

    /// Returns the oldest value in the order and its number.
    pub(crate) fn oldest(&self) -> Option<(usize, T)> {
        let index = self.oldest?;
        Some((index, self.slots.get(index)?.value))
    }

    /// Returns the oldest value in the order other than `spared`.
    pub(crate) fn oldest_but(&self, spared: Option<usize>) -> Option<T> {
        let slot = self.slots.get(self.oldest?)?;
        let slot = if self.oldest == spared { self.slots.get(slot.next?)? } else { slot };
        Some(slot.value)
    }

    /// Number of values, in the order or not.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removal_of_any_entry_keeps_the_order() {
        let mut list = InFlight::default();
        let at: Vec<usize> = (0..4).map(|value| list.insert(value)).collect();
        assert_eq!((list.oldest(), list.len()), (None, 4), "not in the order yet");
        at.iter().for_each(|&index| list.link(index));
        list.link(at[0]);
        list.unlink(at[1]);
        assert_eq!(
            [None, Some(at[0]), Some(at[2])].map(|spared| list.oldest_but(spared)),
            [Some(0), Some(2), Some(0)]
        );
        assert_eq!((list.remove(at[0]), list.remove(at[0])), (Some(0), None), "once");
        list.link(at[0]);
        assert_eq!((list.oldest(), list.len()), (Some((at[2], 2)), 3));
        assert_eq!(list.insert(7), at[0], "places are used again");
        list.link(at[1]);
        assert_eq!((list.remove(at[1]), list.remove(at[2]), list.remove(at[3])), (Some(1), Some(2), Some(3)));
        assert_eq!((list.oldest(), list.get_mut(at[0])), (None, Some(&mut 7)));
        assert_eq!(list.get_mut(at[1]), None);
    }
}
