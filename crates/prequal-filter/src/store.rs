//! The blobs in Envoy's shared data, three per upstream cluster, shared by all workers.
//!
//! Writes are compare-and-swap with a bounded number of tries. A blob that does not decode (another version, damage)
//! is replaced and counted.

use prequal_core::exceptions::Exceptions;
use prequal_core::members::Members;
use prequal_core::pool::PoolState;
use proxy_wasm::hostcalls;

use crate::metrics::Metrics;

/// Tries before a write is given up; a conflict is a few per cent likely under load.
const MAX_TRIES: usize = 8;

/// Where one cluster's blobs live.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    pool_key: String,
    members_key: String,
    exceptions_key: String,
}

impl Store {
    /// Keys carry the root id: in Istio all plugins share one namespace.
    pub(crate) fn new(root_id: &str, cluster: &str) -> Self {
        let key = |what| format!("prequal/1/{root_id}/{cluster}/{what}");
        Self { pool_key: key("pool"), members_key: key("members"), exceptions_key: key("exceptions") }
    }

    /// Makes sure that all blobs exist: the host cannot create one exclusively afterwards (CAS 0 means "any").
    pub(crate) fn seed(&self) {
        for (key, empty) in [
            (&self.pool_key, PoolState::new().as_bytes().to_vec()),
            (&self.members_key, Members::default().encode()),
            (&self.exceptions_key, Exceptions::new().as_bytes().to_vec()),
        ] {
            if matches!(hostcalls::get_shared_data(key), Ok((None, _))) {
                let _ = hostcalls::set_shared_data(key, Some(&empty), None);
            }
        }
    }

    /// The pool as it is, for reading only.
    pub(crate) fn pool(&self, metrics: &Metrics) -> PoolState {
        self.load_pool(metrics).0
    }

    /// Reads, changes and writes the pool. `change` runs again on a conflict and returns `None` to leave the blob
    /// as it is. The second value says whether the change was written; if not it is lost, never the request.
    pub(crate) fn update_pool<T>(
        &self,
        metrics: &Metrics,
        mut change: impl FnMut(&mut PoolState) -> (T, bool),
    ) -> (T, bool) {
        let mut tries = 0;
        loop {
            let (mut pool, cas) = self.load_pool(metrics);
            let (result, write) = change(&mut pool);
            if !write || hostcalls::set_shared_data(&self.pool_key, Some(pool.as_bytes()), cas).is_ok() {
                return (result, write);
            }
            tries += 1;
            if tries == MAX_TRIES {
                metrics.cas_giveups.one();
                return (result, false);
            }
            metrics.cas_conflicts.one();
        }
    }

    /// The membership as it is, for reading only.
    pub(crate) fn members(&self, metrics: &Metrics) -> Members {
        self.load_members(metrics).0
    }

    /// The membership and its number, unless that is still `seen`. Decoding a large one is dear.
    pub(crate) fn members_since(
        &self,
        metrics: &Metrics,
        seen: Option<u32>,
    ) -> Option<(Members, Option<u32>)> {
        let (bytes, cas) = hostcalls::get_shared_data(&self.members_key).unwrap_or((None, None));
        (cas.is_none() || cas != seen).then(|| (decode_members(bytes, metrics), cas))
    }

    /// Reads and changes the membership; written if `change` says that there is news.
    pub(crate) fn update_members(
        &self,
        metrics: &Metrics,
        mut change: impl FnMut(&mut Members) -> bool,
    ) -> Members {
        let mut tries = 0;
        loop {
            let (mut members, cas) = self.load_members(metrics);
            let write = change(&mut members);
            if !write || hostcalls::set_shared_data(&self.members_key, Some(&members.encode()), cas).is_ok() {
                return members;
            }
            tries += 1;
            if tries == MAX_TRIES {
                metrics.cas_giveups.one();
                return members;
            }
            metrics.cas_conflicts.one();
        }
    }

    /// Reads and changes the exceptions table; written if `change` says that there is news.
    pub(crate) fn update_exceptions<T>(
        &self,
        metrics: &Metrics,
        mut change: impl FnMut(&mut Exceptions) -> (T, bool),
    ) -> (Exceptions, T) {
        let mut tries = 0;
        loop {
            let (mut table, cas) = self.load_exceptions(metrics);
            let (result, write) = change(&mut table);
            if !write || hostcalls::set_shared_data(&self.exceptions_key, Some(table.as_bytes()), cas).is_ok()
            {
                return (table, result);
            }
            tries += 1;
            if tries == MAX_TRIES {
                metrics.cas_giveups.one();
                return (table, result);
            }
            metrics.cas_conflicts.one();
        }
    }

    fn load_exceptions(&self, metrics: &Metrics) -> (Exceptions, Option<u32>) {
        let (bytes, cas) = hostcalls::get_shared_data(&self.exceptions_key).unwrap_or((None, None));
        let table = bytes.and_then(|bytes| Exceptions::decode(&bytes).ok()).unwrap_or_else(|| {
            metrics.blob_replaced.one();
            Exceptions::new()
        });
        (table, cas)
    }

    fn load_pool(&self, metrics: &Metrics) -> (PoolState, Option<u32>) {
        let (bytes, cas) = hostcalls::get_shared_data(&self.pool_key).unwrap_or((None, None));
        let pool = bytes.and_then(|bytes| PoolState::decode(&bytes).ok()).unwrap_or_else(|| {
            metrics.blob_replaced.one();
            PoolState::new()
        });
        (pool, cas)
    }

    fn load_members(&self, metrics: &Metrics) -> (Members, Option<u32>) {
        let (bytes, cas) = hostcalls::get_shared_data(&self.members_key).unwrap_or((None, None));
        (decode_members(bytes, metrics), cas)
    }
}

fn decode_members(bytes: Option<Vec<u8>>, metrics: &Metrics) -> Members {
    bytes.and_then(|bytes| Members::decode(&bytes).ok()).unwrap_or_else(|| {
        metrics.blob_replaced.one();
        Members::default()
    })
}
