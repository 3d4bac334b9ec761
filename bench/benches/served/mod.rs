//! The end of a successful request, for the benches and for the allocation test.

use prequal_core::client::{Class, Witness};
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;

/// The proxy's report that this replica answered a request at this time.
pub struct Served(pub Micros, pub Endpoint);

impl Witness for Served {
    fn now(&self) -> Micros {
        self.0
    }

    fn is_ours(&self) -> bool {
        true
    }

    fn served_by(&self) -> Option<Endpoint> {
        Some(self.1)
    }

    fn class(&self) -> Class {
        Class::Answer
    }

    fn attempts(&self) -> u64 {
        1
    }
}
