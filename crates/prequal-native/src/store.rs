//! State that the threads of this Envoy share: immutable values behind atomic pointers.
//!
//! A pick reads a pointer, changes a copy, and swaps the pointer if nobody else has. No thread ever waits for another.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use prequal_core::client::store::{Store, Value};
use prequal_core::shared::blob::Blob;
use prequal_core::shared::cas::{self, OwnCopy, Place, UpdateEnd, Updated};

/// The values of one upstream cluster, by name.
#[derive(Clone, Default)]
pub(crate) struct Shared(Arc<Mutex<HashMap<String, Arc<dyn Any + Send + Sync>>>>);

/// A value, and the number of the write that wrote it.
struct Numbered<B> {
    number: u32,
    value: B,
}

/// One thread's access to a value.
pub(crate) struct Slot<B> {
    cell: Cell<B>,
    /// The value as this thread last wrote it.
    own: OwnCopy<B>,
}

struct Cell<B>(Arc<ArcSwap<Numbered<B>>>);

impl Store for Shared {
    type Value<B: Blob + Clone> = Slot<B>;

    fn open<B: Blob + Clone>(&self, name: &str) -> Slot<B> {
        let new = || Arc::new(ArcSwap::from_pointee(Numbered { number: 1, value: B::default() }));
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let value = values.entry(name.to_owned()).or_insert_with(|| new());
        // A name always has the same type.
        let cell = Arc::clone(value).downcast().unwrap_or_else(|_| new());
        Slot { cell: Cell(cell), own: OwnCopy::default() }
    }
}

impl<B: Blob + Clone> Place<B> for Cell<B> {
    fn read(&self) -> (Option<B>, Option<u32>) {
        let current = self.0.load();
        (Some(current.value.clone()), Some(current.number))
    }

    fn write(&self, value: &B, number: Option<u32>) -> bool {
        let current = self.0.load();
        if number != Some(current.number) {
            return false;
        }
        let next = Numbered { number: current.number.wrapping_add(1), value: value.clone() };
        let previous = self.0.compare_and_swap(&*current, Arc::new(next));
        Arc::ptr_eq(&previous, &current)
    }
}

impl<B: Blob + Clone> Value<B> for Slot<B> {
    fn update<T>(&mut self, change: impl FnMut(&mut B) -> (T, bool)) -> Updated<T> {
        cas::update(&self.cell, change)
    }

    fn transact<T>(&mut self, look: bool, change: impl FnMut(&mut B) -> (T, bool)) -> Updated<T> {
        self.own.update(&self.cell, look, change)
    }

    fn newer(&mut self, seen: &mut Option<u32>) -> Option<Updated<B>> {
        let current = self.cell.0.load();
        if *seen == Some(current.number) {
            return None;
        }
        *seen = Some(current.number);
        Some(Updated { result: current.value.clone(), end: UpdateEnd::NoUpdate, conflicts: 0, replaced: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prequal_core::client::pool::PoolState;
    use prequal_core::shared::blob::{BlobError, Tag};
    use std::borrow::Cow;

    /// A number of which threads count up.
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
