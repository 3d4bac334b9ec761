//! Reading, changing and writing what workers share, when a host compares numbers and swaps.
//!
//! The host gives every write a number and takes a write only if the value still has the number that the writer names.
//! [`Own`] saves the reading where a worker finds itself alone. What a value is, and when its bytes are one, is
//! [`crate::blob`]'s; where it lies is the caller's ([`Place`]).

/// Tries before a write is given up; a conflict is a few per cent likely under load.
const MAX_TRIES: u32 = 8;

/// Where a shared value lies.
pub trait Place<B> {
    /// The value, `None` if it is damaged, and its number; `None` if there was none.
    fn read(&self) -> (Option<B>, Option<u32>);

    /// Writes, unless the value has another number than this by now. True if written.
    fn write(&self, value: &B, number: Option<u32>) -> bool;
}

/// How an update ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum End {
    /// The change is in the value.
    Written,
    /// The change said that there was no update.
    NoUpdate,
    /// Others wrote too often meanwhile: the change is lost.
    GivenUp,
}

/// What came of an update.
#[derive(Clone, Copy, Debug)]
pub struct Updated<T> {
    /// What the change returned, the last time it ran.
    pub result: T,
    /// How it ended.
    pub end: End,
    /// How often it ran again because another had written meanwhile.
    pub conflicts: u32,
    /// How often it began with a new value because the old one was damaged.
    pub replaced: u32,
}

/// Reads the value and changes it, and writes it if `change` says that there is an update; runs `change` again on a
/// conflict.
pub fn update<B: Default, T>(place: &impl Place<B>, change: impl FnMut(&mut B) -> (T, bool)) -> Updated<T> {
    Own::default().update(place, true, change)
}

/// A worker's copy of a shared value as it has written it last.
///
/// While nobody else writes, the worker changes its copy and writes that, without reading. It knows no number of its own
/// write, but numbers rise by at least one: a write that named `n` has `n + 1` or more. If the value's number *is*
/// `n + 1`, then it is that write's: an earlier one would have made the write fail, and a later one has a higher number.
/// So the worker names `n + 1`, and the host refuses unless the copy is the value.
#[derive(Debug, Default)]
pub struct Own<B> {
    value: B,
    /// The lowest number that the worker's last write can have; `None` if there is none, or it did not name any.
    number: Option<u32>,
    /// It was that write's number when the worker looked last. Where others write as well, guessing costs more than it
    /// saves.
    alone: bool,
}

impl<B: Default> Own<B> {
    /// As [`update`]. Without `look`, for changes that always are updates, the reading is saved where that goes.
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
                return Updated { result, end: End::Written, conflicts: 0, replaced: 0 };
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
                End::NoUpdate
            } else if place.write(&self.value, number) {
                self.number = number.and_then(after);
                End::Written
            } else if conflicts + 1 == MAX_TRIES {
                End::GivenUp
            } else {
                conflicts += 1;
                continue;
            };
            return Updated { result, end, conflicts, replaced };
        }
    }
}

/// The lowest number of a write that names `number`. None after the last: the host goes on at the beginning.
fn after(number: u32) -> Option<u32> {
    number.checked_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::cell::{Cell, RefCell};

    /// Values in one host, which numbers the writes of all.
    struct Host {
        next: Cell<u32>,
        values: RefCell<Vec<(u64, u32)>>,
        reads: Cell<u32>,
        /// Others who write value 0 between a reading and the writing.
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

    fn add(own: &mut Own<u64>, place: &At<'_>) -> Updated<u64> {
        own.update(place, false, |value| {
            *value += 1;
            (*value, true)
        })
    }

    #[test]
    fn alone_a_worker_reads_twice_and_never_again() {
        let host = Host::new(1, 7);
        let mut own = Own::default();
        for count in 1..=10 {
            assert_eq!(add(&mut own, &At(&host, 0)).result, count);
        }
        assert_eq!((host.value(0), host.reads.get()), (10, 2));
        // Another writes: one wrong guess, one reading, and one more to see that nobody is there any more.
        add(&mut Own::default(), &At(&host, 0));
        for count in 12..=20 {
            assert_eq!(add(&mut own, &At(&host, 0)).result, count);
        }
        assert_eq!((host.value(0), host.reads.get()), (20, 2 + 1 + 2));
    }

    #[test]
    fn a_change_without_an_update_writes_nothing_and_leaves_no_trace() {
        let host = Host::new(1, 1);
        let mut own = Own::default();
        (0..3).for_each(|_| _ = add(&mut own, &At(&host, 0)));
        // Alone at first, so that the first change is to its own copy.
        for look in [false, true] {
            let updated = own.update(&At(&host, 0), look, |value| {
                *value += 100;
                (*value, false)
            });
            assert_eq!((updated.result, updated.end, host.value(0)), (103, End::NoUpdate, 3));
        }
        assert_eq!(add(&mut own, &At(&host, 0)).result, 4);
    }

    #[test]
    fn conflicts_are_counted_and_end() {
        let host = Host::new(1, 1);
        for (intruders, conflicts, end) in [(3, 3, End::Written), (100, MAX_TRIES - 1, End::GivenUp)] {
            host.intruders.set(intruders);
            let updated = add(&mut Own::default(), &At(&host, 0));
            assert_eq!((updated.conflicts, updated.end), (conflicts, end));
        }
    }

    proptest! {
        /// Whoever writes when, also past the last number, and with values of other names between.
        #[test]
        fn no_write_is_ever_lost(
            steps in vec((0..3usize, 0..2usize, any::<bool>()), 0..200),
            next in prop_oneof![1u32..100, u32::MAX - 100..],
        ) {
            let host = Host::new(2, next);
            let mut owns: Vec<[Own<u64>; 2]> = (0..3).map(|_| Default::default()).collect();
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
