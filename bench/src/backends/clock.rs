//! A clock that wakes tasks at an instant, as accurately as the kernel can.
//!
//! Tokio's timers are rounded up to the next millisecond, which is one twentieth of a service time of 20 ms. This clock
//! sets a single `timerfd` to the earliest instant that any task waits for.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

/// Wakes the tasks of one runtime.
pub(super) struct Clock {
    timer: AsyncFd<OwnedFd>,
    sleepers: Mutex<Sleepers>,
}

#[derive(Default)]
struct Sleepers {
    /// Ordered by instant, then by a number that distinguishes equal instants.
    waiting: BTreeMap<(Instant, u64), oneshot::Sender<()>>,
    numbered: u64,
}

impl Clock {
    /// Starts a clock that runs until its runtime ends. Must be called within a runtime.
    pub(super) fn start() -> io::Result<Arc<Self>> {
        // SAFETY: the call takes no pointer.
        let timer =
            unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC) };
        if timer < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is open, and this is its only owner.
        let timer = unsafe { OwnedFd::from_raw_fd(timer) };
        // SAFETY: the descriptor is open, and it is neither replaced nor closed while the `AsyncFd` owns it.
        let timer = unsafe { AsyncFd::register_with_interest(timer, Interest::READABLE) }?;
        let clock = Arc::new(Self { timer, sleepers: Mutex::default() });
        tokio::spawn(clock.clone().run());
        Ok(clock)
    }

    /// Returns at that instant; at once if it has passed.
    pub(super) async fn sleep_until(&self, at: Instant) {
        let (wake, woken) = oneshot::channel();
        {
            let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            let number = sleepers.numbered;
            sleepers.numbered += 1;
            sleepers.waiting.insert((at, number), wake);
            if sleepers.waiting.first_key_value().is_some_and(|(first, _)| *first == (at, number)) {
                self.set(at);
            }
        }
        // An error would mean that the runtime is ending.
        let _ = woken.await;
    }

    async fn run(self: Arc<Self>) {
        while let Ok(mut ready) = self.timer.readable().await {
            // The timer is never read: setting it again clears the expiration.
            ready.clear_ready();
            let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            while let Some(first) = sleepers.waiting.first_entry() {
                let at = first.key().0;
                if at > now {
                    self.set(at);
                    break;
                }
                // An error means that the task no longer waits.
                let _ = first.remove().send(());
            }
        }
    }

    fn set(&self, at: Instant) {
        // Zero would disarm the timer.
        let wait = at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let wait =
            libc::timespec { tv_sec: wait.as_secs() as libc::time_t, tv_nsec: wait.subsec_nanos().into() };
        let setting = libc::itimerspec { it_interval: zero, it_value: wait };
        // SAFETY: the descriptor is open, the setting is a valid local value, and the old setting is not requested.
        let outcome =
            unsafe { libc::timerfd_settime(self.timer.as_raw_fd(), 0, &setting, std::ptr::null_mut()) };
        debug_assert_eq!(outcome, 0, "{}", io::Error::last_os_error());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn sleepers_wake_in_order_and_never_early() {
        let clock = Clock::start().unwrap();
        let begin = Instant::now();
        let (woken, mut order) = tokio::sync::mpsc::unbounded_channel();
        // The earliest instant, apart from 0 (which has already passed), is neither first nor last in this list.
        for us in [20_300, 5_100, 9_700, 5_100, 0] {
            let (clock, woken) = (clock.clone(), woken.clone());
            tokio::spawn(async move {
                clock.sleep_until(begin + Duration::from_micros(us)).await;
                assert!(begin.elapsed() >= Duration::from_micros(us));
                woken.send(us).unwrap();
            });
        }
        drop(woken);
        let mut found = Vec::new();
        while let Some(us) = order.recv().await {
            found.push(us);
        }
        assert_eq!(found, [0, 5_100, 5_100, 9_700, 20_300]);
    }

    #[tokio::test]
    async fn sleeps_are_finer_than_a_millisecond() {
        let clock = Clock::start().unwrap();
        let mut late = Vec::new();
        for _ in 0..50 {
            let at = Instant::now() + Duration::from_micros(2_100);
            clock.sleep_until(at).await;
            late.push(at.elapsed());
        }
        late.sort_unstable();
        // Judge only the best tenth, because a busy machine may wake any task late.
        assert!(late[5] < Duration::from_micros(400), "{late:?}");
    }
}
