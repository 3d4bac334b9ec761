//! The time: monotonic, so that steps of the wall clock do not reach the balancer.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use prequal_core::shared::time::Micros;

/// The balancer's times must be well above zero, because some are the present time minus a duration.
const START: Duration = Duration::from_secs(3600);

/// Returns the time since one hour before the first call of this function.
pub(crate) fn now() -> Micros {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    let began = *BEGAN.get_or_init(Instant::now);
    Micros((START + began.elapsed()).as_micros() as u64)
}
