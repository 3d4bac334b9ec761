//! Where the state lies that the workers of a host share.
//!
//! A balancer asks its [`Store`] for three values: the pool, the membership and the ejection table. A host whose
//! workers have no memory in common implements [`SharedData`], bytes by key with compare-and-swap, and gets the store
//! from [`Cas`]. In one memory a value is changed where it lies: [`Memory`].

use crate::blob::Blob;
use crate::shared::{self, End, Own, Place, Updated};

/// Where a balancer's values lie.
pub trait Store {
    /// A value of this kind.
    type Value<B: Blob + Clone>: Value<B>;

    /// The value called `name`, made if there is none.
    fn open<B: Blob + Clone>(&self, name: &str) -> Self::Value<B>;
}

/// A value that workers share.
pub trait Value<B> {
    /// Reads the value and changes it, and writes it if `change` says that there is an update; runs `change` again if
    /// another has written meanwhile. A change without an update must leave nothing behind that matters.
    fn update<T>(&mut self, change: impl FnMut(&mut B) -> (T, bool)) -> Updated<T>;

    /// The same. Without `look`, for changes that nearly always are updates, the reading may be saved while nobody else
    /// writes.
    fn transact<T>(&mut self, look: bool, change: impl FnMut(&mut B) -> (T, bool)) -> Updated<T> {
        let _ = look;
        self.update(change)
    }

    /// The value, unless nobody has written it since it was `seen`.
    fn newer(&mut self, seen: &mut Option<u32>) -> Option<Updated<B>>;
}

/// Bytes by key, which all workers of a host see.
pub trait SharedData {
    /// The bytes, and the number of the write that they are from.
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>);

    /// Writes the bytes, unless they have another number than this by now; `None` or 0: whatever they have. True if written.
    fn set(&self, key: &str, bytes: &[u8], number: Option<u32>) -> bool;
}

/// A place in shared data. A blob of another version lies under another key; one that does not decode (damage) is replaced.
#[derive(Debug)]
pub struct At<'a, D> {
    /// The host's.
    pub data: &'a D,
    /// Under which the value lies.
    pub key: &'a str,
}

impl<D: SharedData> At<'_, D> {
    /// Makes sure that the blob exists: a host cannot create one exclusively afterwards (number 0 means "any").
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
    /// The host's.
    pub data: D,
    /// What the keys begin with.
    pub prefix: String,
}

/// A value of [`Cas`].
#[derive(Debug)]
pub struct Blobbed<D, B> {
    data: D,
    key: String,
    /// As this worker wrote it last, if it [transacts](Value::transact).
    own: Own<B>,
}

impl<D: SharedData + Clone> Store for Cas<D> {
    type Value<B: Blob + Clone> = Blobbed<D, B>;

    fn open<B: Blob + Clone>(&self, name: &str) -> Blobbed<D, B> {
        let key = format!("{}/{name}", self.prefix);
        At { data: &self.data, key: &key }.seed::<B>();
        Blobbed { data: self.data.clone(), key, own: Own::default() }
    }
}

impl<D: SharedData, B: Blob> Value<B> for Blobbed<D, B> {
    fn update<T>(&mut self, change: impl FnMut(&mut B) -> (T, bool)) -> Updated<T> {
        shared::update(&At { data: &self.data, key: &self.key }, change)
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
        Some(Updated { result: value.unwrap_or_default(), end: End::NoUpdate, conflicts: 0, replaced })
    }
}

/// The store of a host whose balancers share nothing, or lock what they share themselves.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory;

/// A value of [`Memory`]; its number counts the changes.
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
        Updated { result, end: if changed { End::Written } else { End::NoUpdate }, conflicts: 0, replaced: 0 }
    }

    fn newer(&mut self, seen: &mut Option<u32>) -> Option<Updated<B>> {
        let changed = seen.replace(self.number) != Some(self.number);
        changed.then(|| self.update(|value| (value.clone(), false)))
    }
}
