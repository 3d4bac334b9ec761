//! Envoy's shared data, which holds the blobs that all workers share. The outbound role has three blobs per upstream
//! cluster. The inbound role has one for the slots and one per replica. Each version of a blob has a key of its own.

use prequal_core::client::Counters;
use prequal_core::client::ejection::EjectionTable;
use prequal_core::client::members::Members;
use prequal_core::client::pool::PoolState;
use prequal_core::client::store::{At, Cas, SharedData};
use prequal_core::shared::blob::{Blob, Tag};
use prequal_core::shared::cas::{self, UpdateEnd};
use proxy_wasm::hostcalls;

use crate::metrics::BlobCounters;

/// Shared data of this Envoy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Envoy;

impl SharedData for Envoy {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        hostcalls::get_shared_data(key).unwrap_or((None, None))
    }

    fn set(&self, key: &str, bytes: &[u8], number: Option<u32>) -> bool {
        hostcalls::set_shared_data(key, Some(bytes), number).is_ok()
    }
}

/// Access to the blobs of one cluster.
pub(crate) type Blobs = Cas<Envoy>;

/// Returns access to the blobs of one cluster. Keys contain the versions of all three blobs. A module with another
/// version of one of them therefore uses its own set of three, which are consistent with each other. Keys also contain
/// the root id, because in Istio all plugins share one namespace. Names are quoted, because they may contain slashes.
pub(crate) fn blobs_of(root_id: &str, cluster: &str) -> Blobs {
    let [pool, members, ejections] = [PoolState::TAG, Members::TAG, EjectionTable::TAG].map(Tag::version);
    Cas { data: Envoy, prefix: format!("prequal/{pool}.{members}.{ejections}/{root_id:?}/{cluster:?}") }
}

/// Creates the blob if it does not exist.
pub(crate) fn seed<B: Blob>(key: &str) {
    At { data: &Envoy, key }.seed::<B>();
}

/// Reads and changes a blob; see [`cas::update`]. The second value is true if the blob was written. Otherwise `change`
/// asked for no write, or the write was lost in conflicts; the request continues in either case.
pub(crate) fn update<B: Blob, T>(
    key: &str,
    counters: &BlobCounters,
    change: impl FnMut(&mut B) -> (T, bool),
) -> (T, bool) {
    let updated = cas::update(&At { data: &Envoy, key }, change);
    counters.updated(&updated);
    (updated.result, updated.end == UpdateEnd::Written)
}
