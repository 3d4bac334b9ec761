//! The blobs in Envoy's shared data, shared by all workers: three per upstream cluster; in the inbound role one of slots, and
//! one per replica.
//!
//! Writes are compare-and-swap with a bounded number of tries. A blob of another version lies under another key; one
//! that does not decode (damage) is replaced and counted.

use std::cell::RefCell;

use prequal_core::blob::{Blob, Tag};
use prequal_core::exceptions::Exceptions;
use prequal_core::members::Members;
use prequal_core::pool::PoolState;
use prequal_core::shared::{self, End, Own, Place, Updated};
use proxy_wasm::hostcalls;

use crate::metrics::{BlobCounters, Metrics};

/// Where one cluster's blobs live.
pub(crate) struct Store {
    pool_key: String,
    /// The pool as this worker wrote it last.
    own_pool: RefCell<Own<PoolState>>,
    members_key: String,
    exceptions_key: String,
}

impl Store {
    /// Keys carry the versions of all three: a module with others has three of its own, which agree with each other. And
    /// the root id: in Istio all plugins share one namespace. Names are quoted: they may hold slashes themselves.
    pub(crate) fn new(root_id: &str, cluster: &str) -> Self {
        let [pool, members, exceptions] = [PoolState::TAG, Members::TAG, Exceptions::TAG].map(Tag::version);
        let key = |what| format!("prequal/{pool}.{members}.{exceptions}/{root_id:?}/{cluster:?}/{what}");
        Self {
            pool_key: key("pool"),
            own_pool: RefCell::default(),
            members_key: key("members"),
            exceptions_key: key("exceptions"),
        }
    }

    /// Makes sure that all blobs exist.
    pub(crate) fn seed(&self) {
        seed::<PoolState>(&self.pool_key);
        seed::<Members>(&self.members_key);
        seed::<Exceptions>(&self.exceptions_key);
    }

    /// The pool as it is, for reading only.
    pub(crate) fn pool(&self, metrics: &Metrics) -> PoolState {
        load(&self.pool_key, &metrics.blobs).0
    }

    /// Reads, changes and writes the pool; see [`Own::update`].
    pub(crate) fn update_pool<T>(
        &self,
        metrics: &Metrics,
        look: bool,
        change: impl FnMut(&mut PoolState) -> (T, bool),
    ) -> (T, bool) {
        let place = InSharedData { key: &self.pool_key, counters: &metrics.blobs };
        let updated = self.own_pool.borrow_mut().update(&place, look, change);
        place.count(&updated);
        (updated.result, updated.end == End::Written)
    }

    /// The membership as it is, for reading only.
    pub(crate) fn members(&self, metrics: &Metrics) -> Members {
        load(&self.members_key, &metrics.blobs).0
    }

    /// The membership and its number, unless that is still `seen`. Decoding a large one is dear.
    pub(crate) fn members_since(
        &self,
        metrics: &Metrics,
        seen: Option<u32>,
    ) -> Option<(Members, Option<u32>)> {
        let (bytes, cas) = hostcalls::get_shared_data(&self.members_key).unwrap_or((None, None));
        (cas.is_none() || cas != seen).then(|| (decode(bytes, &metrics.blobs), cas))
    }

    /// Reads and changes the membership; see [`update`].
    pub(crate) fn update_members(
        &self,
        metrics: &Metrics,
        mut change: impl FnMut(&mut Members) -> bool,
    ) -> Members {
        update(&self.members_key, &metrics.blobs, |members| ((), change(members))).0
    }

    /// The exceptions table as it is, for reading only.
    pub(crate) fn exceptions(&self, metrics: &Metrics) -> Exceptions {
        load(&self.exceptions_key, &metrics.blobs).0
    }

    /// Reads and changes the exceptions table; see [`update`].
    pub(crate) fn update_exceptions<T>(
        &self,
        metrics: &Metrics,
        change: impl FnMut(&mut Exceptions) -> (T, bool),
    ) -> (Exceptions, T) {
        let (table, result, _) = update(&self.exceptions_key, &metrics.blobs, change);
        (table, result)
    }
}

/// Makes sure that the blob exists: the host cannot create one exclusively afterwards (CAS 0 means "any").
pub(crate) fn seed<B: Blob>(key: &str) {
    if matches!(hostcalls::get_shared_data(key), Ok((None, _))) {
        let _ = hostcalls::set_shared_data(key, Some(&B::default().encode()), None);
    }
}

/// The blob as it is, and its number for a compare-and-swap.
pub(crate) fn load<B: Blob>(key: &str, counters: &BlobCounters) -> (B, Option<u32>) {
    let (bytes, cas) = hostcalls::get_shared_data(key).unwrap_or((None, None));
    (decode(bytes, counters), cas)
}

fn decode<B: Blob>(bytes: Option<Vec<u8>>, counters: &BlobCounters) -> B {
    bytes.and_then(|bytes| B::decode(&bytes).ok()).unwrap_or_else(|| {
        counters.replaced.one();
        B::default()
    })
}

/// Reads and changes a blob; see [`shared::update`]. The last value says whether it was written; if not the change is lost,
/// never the request.
pub(crate) fn update<B: Blob, T>(
    key: &str,
    counters: &BlobCounters,
    change: impl FnMut(&mut B) -> (T, bool),
) -> (B, T, bool) {
    let place = InSharedData { key, counters };
    let (blob, updated) = shared::update(&place, change);
    place.count(&updated);
    (blob, updated.result, updated.end == End::Written)
}

struct InSharedData<'a> {
    key: &'a str,
    counters: &'a BlobCounters,
}

impl<B: Blob> Place<B> for InSharedData<'_> {
    fn read(&self) -> (B, Option<u32>) {
        load(self.key, self.counters)
    }

    fn write(&self, blob: &B, number: Option<u32>) -> bool {
        hostcalls::set_shared_data(self.key, Some(&blob.encode()), number).is_ok()
    }
}

impl InSharedData<'_> {
    fn count<T>(&self, updated: &Updated<T>) {
        self.counters.conflicts.add(updated.conflicts);
        if updated.end == End::GivenUp {
            self.counters.giveups.one();
        }
    }
}
