//! State that the threads of this Envoy share: immutable values behind atomic pointers.
//!
//! A pick copies the current value, changes the copy, and swaps the pointer if no other thread has done so. No thread
//! ever waits for another. The copy reuses the memory of the value that this thread replaced last, so a pick usually
//! allocates no memory.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::{ArcSwap, Guard};
use prequal_core::client::store::{Store, Value};
use prequal_core::shared::blob::Blob;
use prequal_core::shared::cas::{UpdateEnd, Updated};

/// Maximum number of tries of one change, as in Envoy's shared data.
const MAX_TRIES: u32 = 8;

/// The values of one upstream cluster, by name.
#[derive(Clone, Default)]
pub(crate) struct Shared(Arc<Mutex<HashMap<String, Arc<dyn Any + Send + Sync>>>>);

/// A value, and the number of the write that wrote it.
#[derive(Clone, Default)]
struct Numbered<B> {
    number: u32,
    value: B,
}

/// One thread's access to a value.
pub(crate) struct Slot<B> {
    cell: Arc<ArcSwap<Numbered<B>>>,
    /// Memory for the next change.
    spare: Arc<Numbered<B>>,
}

impl Store for Shared {
    type Value<B: Blob + Clone> = Slot<B>;

    fn open<B: Blob + Clone>(&self, name: &str) -> Slot<B> {
        let new = || Arc::new(ArcSwap::from_pointee(Numbered::<B>::default()));
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let value = values.entry(name.to_owned()).or_insert_with(|| new());
        // The value of a name always has the same type.
        let cell = Arc::clone(value).downcast().unwrap_or_else(|_| new());
        Slot { cell, spare: Arc::default() }
    }
}

impl<B: Blob + Clone> Value<B> for Slot<B> {
    fn update<T>(&mut self, mut change: impl FnMut(&mut B) -> (T, bool)) -> Updated<T> {
        let mut conflicts = 0;
        loop {
            let current = self.cell.load();
            // If another thread still reads the spare, this allocates memory.
            let next = Arc::make_mut(&mut self.spare);
            next.number = current.number.wrapping_add(1);
            next.value.clone_from(&current.value);
            let (result, changed) = change(&mut next.value);
            if !changed {
                return Updated { result, end: UpdateEnd::NoUpdate, conflicts, replaced: 0 };
            }
            let previous = self.cell.compare_and_swap(&*current, Arc::clone(&self.spare));
            if Arc::ptr_eq(&previous, &current) {
                self.spare = Guard::into_inner(previous);
                return Updated { result, end: UpdateEnd::Written, conflicts, replaced: 0 };
            }
            if conflicts + 1 == MAX_TRIES {
                return Updated { result, end: UpdateEnd::GivenUp, conflicts, replaced: 0 };
            }
            conflicts += 1;
        }
    }

    fn newer(&mut self, seen: &mut Option<u32>) -> Option<Updated<B>> {
        let current = self.cell.load();
        if seen.replace(current.number) == Some(current.number) {
            return None;
        }
        Some(Updated { result: current.value.clone(), end: UpdateEnd::NoUpdate, conflicts: 0, replaced: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prequal_core::client::pool::PoolState;
    use prequal_core::shared::blob::{BlobError, Tag};
    use std::borrow::Cow;
    use std::collections::HashSet;

    /// A number that the threads increment.
    #[derive(Clone, Debug, Default)]
    struct Count(u64);

    impl Blob for Count {
        const TAG: Tag = PoolState::TAG;

        fn decode(_: &[u8]) -> Result<Self, BlobError> {
            Err(BlobError::Content)
        }

        fn encode(&self) -> Cow<'_, [u8]> {
            Cow::Borrowed(&[])
        }
    }

    #[test]
    fn threads_lose_no_write() {
        let shared = Shared::default();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let mut slot = shared.open::<Count>("count");
                std::thread::spawn(move || {
                    let mut written = 0;
                    for turn in 0..20_000 {
                        let updated = slot.transact(turn % 7 == 0, |count| {
                            count.0 += 1;
                            ((), true)
                        });
                        written += u64::from(updated.end == UpdateEnd::Written);
                    }
                    written
                })
            })
            .collect();
        let written: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        let total = shared.open::<Count>("count").update(|count| (count.0, false)).result;
        assert_eq!(total, written);
        assert!(written > 20_000, "at least a quarter of the writes succeed: {written}");
    }

    #[test]
    fn a_thread_alone_uses_the_same_memory_again() {
        let mut slot = Shared::default().open::<Count>("count");
        let mut places = HashSet::new();
        for turn in 1..=10 {
            slot.update(|count| {
                count.0 += 1;
                ((), true)
            });
            let current = slot.cell.load_full();
            assert_eq!(current.value.0, turn);
            places.insert(Arc::as_ptr(&current));
        }
        assert_eq!(places.len(), 2);
    }

    #[test]
    fn a_thread_sees_what_others_wrote_once() {
        let shared = Shared::default();
        let (mut one, mut other, mut seen) =
            (shared.open::<Count>("count"), shared.open::<Count>("count"), None);
        assert_eq!(other.newer(&mut seen).map(|read| read.result.0), Some(0));
        one.update(|count| {
            count.0 = 7;
            ((), true)
        });
        assert_eq!(other.newer(&mut seen).map(|read| read.result.0), Some(7));
        assert!(other.newer(&mut seen).is_none());
    }
}
