//! Work that uses CPU time, at a limited speed.
//!
//! A piece of work alternates between a slice of CPU time and a pause, so that it never gets more than a given share of
//! a core. If the kernel withholds CPU time, slices come late and the work takes longer.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Time from the beginning of a slice to that of the next one.
pub(super) const SLICE: Duration = Duration::from_millis(10);
/// Maximum delay that a piece of work may make up for by exceeding its speed. Without this, the work would take too
/// long, because the kernel grants CPU time per period, not continuously.
const CATCH_UP: Duration = SLICE.saturating_mul(2);

/// CPU time that this thread has used so far.
pub(super) fn thread_cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to a valid local value.
    let outcome = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    debug_assert_eq!(outcome, 0);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Iterates a hash function until this thread has used `cpu` more CPU time.
pub(super) fn burn(cpu: Duration) {
    let until = thread_cpu() + cpu;
    let mut hash = 0u64;
    while thread_cpu() < until {
        for _ in 0..100 {
            let mut hasher = DefaultHasher::new();
            hash.hash(&mut hasher);
            hash = hasher.finish();
        }
        black_box(hash);
    }
    // In this call the kernel checks the group's quota. Otherwise it would check at its next tick, up to 4 ms later.
    std::thread::yield_now();
}

/// The instants at which one piece of work may continue.
pub(super) struct Pace(Instant);

impl Pace {
    pub(super) fn from(now: Instant) -> Self {
        Self(now)
    }

    /// Returns the instant at which the work may continue after a slice that ended `now`. `length` is the intended time
    /// of the slice with its pause.
    pub(super) fn next(&mut self, length: Duration, now: Instant) -> Instant {
        self.0 = self.0.max(now.checked_sub(CATCH_UP).unwrap_or(now)) + length;
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burning_uses_the_cpu_time_that_it_should() {
        let before = thread_cpu();
        burn(Duration::from_millis(5));
        let used = thread_cpu() - before;
        assert!(used >= Duration::from_millis(5) && used < Duration::from_millis(8), "{used:?}");
    }

    #[test]
    fn work_that_was_held_up_catches_up_a_little() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut pace = Pace::from(begin);
        assert_eq!(pace.next(SLICE, at(1)), at(10));
        assert_eq!(pace.next(SLICE, at(15)), at(20), "a late slice does not delay the next one");
        assert_eq!(pace.next(SLICE, at(100)), at(90), "but only two slices are made up for");
        assert_eq!(pace.next(SLICE, at(100)), at(100));
    }
}
