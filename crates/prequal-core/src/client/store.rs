//! The store of the state that the workers of an embedder share.
//!
//! A balancer asks its [`Store`] for three values: the pool, the membership and the ejection table. An embedder whose
//! workers share no memory implements [`SharedData`], bytes by key with compare-and-swap, and gets the store from
//! [`Cas`]. An embedder whose balancers need not share values uses [`Memory`], which changes values in place.

use crate::shared::blob::Blob;
use crate::shared::cas::{self, OwnCopy, Place, UpdateEnd, Updated};

/// Storage of a balancer's values.
pub trait Store {
    /// A value in this store.
    type Value<B: Blob + Clone>: Value<B>;

    /// Returns the value called `name`, and creates it if it does not exist.
    fn open<B: Blob + Clone>(&self, name: &str) -> Self::Value<B>;
}

/// A value that workers share.
pub trait Value<B> {
    /// Reads the value, changes it, and writes it if `change` reports an update. Runs `change` again if another worker
    /// has written in the meantime. A change that reports no update must not alter the value in a way that matters.
    fn update<T>(&mut self, change: impl FnMut(&mut B) -> (T, bool)) -> Updated<T>;

    /// Like [`Self::update`]. If `look` is false, the read may be skipped while no other worker writes; use this for
    /// changes that are nearly always updates.
    fn transact<T>(&mut self, look: bool, change: impl FnMut(&mut B) -> (T, bool)) -> Updated<T> {
        let _ = look;
        self.update(change)
    }

    /// Returns the value if it has been written since the write number `seen`, and updates `seen`.
    fn newer(&mut self, seen: &mut Option<u32>) -> Option<Updated<B>>;
}

/// Bytes by key, visible to all workers of an embedder.
pub trait SharedData {
    /// Returns the bytes and the number of the write that wrote them.
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>);

    /// Writes the bytes only if the stored number still equals `number`; always if that is `None` or 0. Returns whether
    /// they were written.
    fn set(&self, key: &str, bytes: &[u8], number: Option<u32>) -> bool;
}

/// A place in shared data. Blobs of other versions have other keys. A damaged blob, which does not decode, is replaced.
#[derive(Debug)]
pub struct At<'a, D> {
    /// The host's shared data.
    pub data: &'a D,
    /// Key of the value.
    pub key: &'a str,
}

impl<D: SharedData> At<'_, D> {
    /// Makes sure that the blob exists. If an update had to create it, two workers could overwrite each other, because
    /// a write that names number 0 is never refused.
    pub fn seed<B: Blob>(&self) {
        if self.data.get(self.key).0.is_none() {
            self.data.set(self.key, &B::default().encode(), None);
        }
    }
}

impl<B: Blob, D: SharedData> Place<B> for At<'_, D> {
    fn read(&self) -> (Option<B>, Option<u32>) {
        let (bytes, number) = self.data.get(self.key);
        (bytes.and_then(|bytes| B::decode(&bytes).ok()), number)
    }

    fn write(&self, blob: &B, number: Option<u32>) -> bool {
        self.data.set(self.key, &blob.encode(), number)
    }
}

/// Values in shared data.
#[derive(Clone, Debug)]
pub struct Cas<D> {
    /// The host's shared data.
    pub data: D,
    /// Prefix of the keys.
    pub prefix: String,
}

/// A value of [`Cas`].
#[derive(Debug)]
pub struct Blobbed<D, B> {
    data: D,
    key: String,
    /// The value as this worker last wrote it, if it uses [`transact`](Value::transact).
    own: OwnCopy<B>,
}

impl<D: SharedData + Clone> Store for Cas<D> {
    type Value<B: Blob + Clone> = Blobbed<D, B>;

    fn open<B: Blob + Clone>(&self, name: &str) -> Blobbed<D, B> {
        let key = format!("{}/{name}", self.prefix);
        At { data: &self.data, key: &key }.seed::<B>();
        Blobbed { data: self.data.clone(), key, own: OwnCopy::default() }
    }
}

impl<D: SharedData, B: Blob> Value<B> for Blobbed<D, B> {
    fn update<T>(&mut self, change: impl FnMut(&mut B) -> (T, bool)) -> Updated<T> {
        cas::update(&At { data: &self.data, key: &self.key }, change)
    }

    fn transact<T>(&mut self, look: bool, change: impl FnMut(&mut B) -> (T, bool)) -> Updated<T> {
        self.own.update(&At { data: &self.data, key: &self.key }, look, change)
    }

    fn newer(&mut self, seen: &mut Option<u32>) -> Option<Updated<B>> {
        let (bytes, number) = self.data.get(&self.key);
        if number.is_some() && number == *seen {
            return None;
        }
        *seen = number;
        let value = bytes.and_then(|bytes| B::decode(&bytes).ok());
        let replaced = u32::from(value.is_none());
        Some(Updated { result: value.unwrap_or_default(), end: UpdateEnd::NoUpdate, conflicts: 0, replaced })
    }
}

/// The store for a host whose balancers share nothing, or whose threads share one balancer behind the host's own lock.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory;

/// A value of [`Memory`]. Its number counts the changes.
#[derive(Clone, Debug, Default)]
pub struct InMemory<B> {
    value: B,
    number: u32,
}

impl Store for Memory {
    type Value<B: Blob + Clone> = InMemory<B>;

    fn open<B: Blob + Clone>(&self, _: &str) -> InMemory<B> {
        InMemory::default()
    }
}

impl<B: Clone> Value<B> for InMemory<B> {
    fn update<T>(&mut self, mut change: impl FnMut(&mut B) -> (T, bool)) -> Updated<T> {
        let (result, changed) = change(&mut self.value);
        self.number = self.number.wrapping_add(changed.into());
        Updated {
            result,
            end: if changed { UpdateEnd::Written } else { UpdateEnd::NoUpdate },
            conflicts: 0,
            replaced: 0,
        }
    }

    fn newer(&mut self, seen: &mut Option<u32>) -> Option<Updated<B>> {
        let changed = seen.replace(self.number) != Some(self.number);
        changed.then(|| self.update(|value| (value.clone(), false)))
    }
}
