//! Reads, changes and writes values that workers share, by compare-and-swap on version numbers that the host provides.
//!
//! The host gives every write a number, and accepts a write only if the value still has the number that the writer
//! names. [`OwnCopy`] skips the read where a worker is the only writer. [`crate::shared::blob`] defines what a value is
//! and when its bytes are valid. The caller decides where the value is stored ([`Place`]).

/// Maximum number of tries of one write; under load, a conflict has a probability of a few per cent.
const MAX_TRIES: u32 = 8;

/// Where a shared value is stored.
pub trait Place<B> {
    /// Returns the value (`None` if it is missing or damaged) and its number (`None` if it has none).
    fn read(&self) -> (Option<B>, Option<u32>);

    /// Writes the value only if the stored one still has this number. Returns whether it was written.
    fn write(&self, value: &B, number: Option<u32>) -> bool;
}

/// How an update ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum UpdateEnd {
    /// The value contains the change.
    Written,
    /// The change reported that there is nothing to write.
    NoUpdate,
    /// Other writes conflicted too often; the change is lost.
    GivenUp,
}

/// Result of an update.
#[derive(Clone, Copy, Debug)]
pub struct Updated<T> {
    /// Return value of the last run of the change.
    pub result: T,
    /// How it ended.
    pub end: UpdateEnd,
    /// Number of times the change ran again because another worker had written in the meantime; a rerun after a failed
    /// guess of [`OwnCopy`] is not counted.
    pub conflicts: u32,
    /// Number of times the update started from the default because the stored value was missing or damaged.
    pub replaced: u32,
}

/// Reads the value, changes it, and writes it if `change` reports an update. Runs `change` again on a conflict.
pub fn update<B: Default, T>(place: &impl Place<B>, change: impl FnMut(&mut B) -> (T, bool)) -> Updated<T> {
    OwnCopy::default().update(place, true, change)
}

/// A worker's copy of a shared value, as the worker last wrote it.
///
/// While no other worker writes, the worker changes its copy and writes it without reading. The host does not return
/// the number of a write. But numbers rise by at least one, so a write that named `n` has the number `n + 1` or more.
/// If the value's number *is* `n + 1`, the value is from that write: another write before it would have made it fail,
/// and a later one has a higher number. So the worker names `n + 1`, and the host refuses the write unless the copy is
/// the current value.
#[derive(Debug, Default)]
pub struct OwnCopy<B> {
    value: B,
    /// Lowest number that the worker's last write can have; `None` if there was no write, or if it named no number.
    number: Option<u32>,
    /// Whether the value still had that number when the worker last read it. If others write as well, guessing costs
    /// more than it saves.
    alone: bool,
}

impl<B: Default> OwnCopy<B> {
    /// Like [`update`]. If `look` is false, the read is skipped where possible; use this for changes that are always
    /// updates.
    pub fn update<T>(
        &mut self,
        place: &impl Place<B>,
        look: bool,
        mut change: impl FnMut(&mut B) -> (T, bool),
    ) -> Updated<T> {
        let guess = self.number.take();
        if let (false, true, Some(number)) = (look, self.alone, guess) {
            let (result, changed) = change(&mut self.value);
            if changed && place.write(&self.value, guess) {
                self.number = after(number);
                return Updated { result, end: UpdateEnd::Written, conflicts: 0, replaced: 0 };
            }
        }
        let (mut conflicts, mut replaced) = (0, 0);
        loop {
            let (value, number) = place.read();
            replaced += u32::from(value.is_none());
            self.value = value.unwrap_or_default();
            self.alone = guess.is_some() && guess == number;
            let (result, changed) = change(&mut self.value);
            let end = if !changed {
                UpdateEnd::NoUpdate
            } else if place.write(&self.value, number) {
                self.number = number.and_then(after);
                UpdateEnd::Written
            } else if conflicts + 1 == MAX_TRIES {
                UpdateEnd::GivenUp
            } else {
                conflicts += 1;
                continue;
            };
            return Updated { result, end, conflicts, replaced };
        }
    }
}

/// Lowest number of a write that names `number`; `None` if that is the last number, because the host then wraps around.
fn after(number: u32) -> Option<u32> {
    number.checked_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::cell::{Cell, RefCell};

    /// Values in one host, which numbers all writes in one sequence.
    struct Host {
        next: Cell<u32>,
        values: RefCell<Vec<(u64, u32)>>,
        reads: Cell<u32>,
        /// Writes by others that are still to happen, each between a read and the write that follows.
        intruders: Cell<u32>,
    }

    struct At<'a>(&'a Host, usize);

    impl Host {
        fn new(values: usize, next: u32) -> Self {
            let host = Self {
                next: Cell::new(next),
                values: RefCell::new(vec![(0, 0); values]),
                reads: Cell::new(0),
                intruders: Cell::new(0),
            };
            (0..values).for_each(|index| assert!(At(&host, index).write(&0, None)));
            host
        }

        fn value(&self, index: usize) -> u64 {
            self.values.borrow()[index].0
        }
    }

    impl Place<u64> for At<'_> {
        fn read(&self) -> (Option<u64>, Option<u32>) {
            let (value, number) = self.0.values.borrow()[self.1];
            self.0.reads.set(self.0.reads.get() + 1);
            if let Some(left) = self.0.intruders.get().checked_sub(1) {
                self.0.intruders.set(left);
                assert!(self.write(&(value + 1), None));
            }
            (Some(value), Some(number))
        }

        fn write(&self, value: &u64, number: Option<u32>) -> bool {
            let slot = &mut self.0.values.borrow_mut()[self.1];
            if number.is_some_and(|number| number != 0 && number != slot.1) {
                return false;
            }
            let number = self.0.next.get();
            self.0.next.set(number.wrapping_add(1).max(1));
            *slot = (*value, number);
            true
        }
    }

    fn add(own: &mut OwnCopy<u64>, place: &At<'_>) -> Updated<u64> {
        own.update(place, false, |value| {
            *value += 1;
            (*value, true)
        })
    }

    #[test]
    fn a_worker_alone_stops_reading_after_two_reads() {
        let host = Host::new(1, 7);
        let mut own = OwnCopy::default();
        for count in 1..=10 {
            assert_eq!(add(&mut own, &At(&host, 0)).result, count);
        }
        assert_eq!((host.value(0), host.reads.get()), (10, 2));
        // Another worker writes: this costs one wrong guess, one read, and one more read to see that the worker is
        // alone again.
        add(&mut OwnCopy::default(), &At(&host, 0));
        for count in 12..=20 {
            assert_eq!(add(&mut own, &At(&host, 0)).result, count);
        }
        assert_eq!((host.value(0), host.reads.get()), (20, 2 + 1 + 2));
    }

    #[test]
    fn a_change_without_an_update_has_no_effect() {
        let host = Host::new(1, 1);
        let mut own = OwnCopy::default();
        (0..3).for_each(|_| _ = add(&mut own, &At(&host, 0)));
        // The worker is alone at first, so the first change is to its own copy.
        for look in [false, true] {
            let updated = own.update(&At(&host, 0), look, |value| {
                *value += 100;
                (*value, false)
            });
            assert_eq!((updated.result, updated.end, host.value(0)), (103, UpdateEnd::NoUpdate, 3));
        }
        assert_eq!(add(&mut own, &At(&host, 0)).result, 4);
    }

    #[test]
    fn conflicts_are_counted_up_to_a_limit() {
        let host = Host::new(1, 1);
        for (intruders, conflicts, end) in
            [(3, 3, UpdateEnd::Written), (100, MAX_TRIES - 1, UpdateEnd::GivenUp)]
        {
            host.intruders.set(intruders);
            let updated = add(&mut OwnCopy::default(), &At(&host, 0));
            assert_eq!((updated.conflicts, updated.end), (conflicts, end));
        }
    }

    proptest! {
        /// For any order of writers, even after the numbers wrap, and with writes to other values in between.
        #[test]
        fn no_write_is_ever_lost(
            steps in vec((0..3usize, 0..2usize, any::<bool>()), 0..200),
            next in prop_oneof![1u32..100, u32::MAX - 100..],
        ) {
            let host = Host::new(2, next);
            let mut owns: Vec<[OwnCopy<u64>; 2]> = (0..3).map(|_| Default::default()).collect();
            let mut expected = [0, 0];
            for (worker, value, look) in steps {
                let updated = owns[worker][value].update(&At(&host, value), look, |value| {
                    *value += 1;
                    (*value, true)
                });
                expected[value] += 1;
                prop_assert_eq!(updated.result, expected[value]);
                prop_assert_eq!(host.value(value), expected[value]);
            }
        }
    }
}
