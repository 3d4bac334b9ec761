//! Query hints on the server side: a replica that is ready for a query reports less load to the probe for that query,
//! and so attracts the query (paper §4, "Sync mode").
//!
//! Only the reply to a probe that carries a hint is scaled. Reports on responses and replies to other probes apply to
//! any query, so they are never scaled. A scaled reply says so (`;scaled=10`), for clients that keep reports.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use http::{HeaderMap, HeaderValue};
use prequal_core::server::affinity::{Hint, RecentHints};

use crate::load::{Counters, HintSeen};
use crate::names::HINT;

/// Decides how a replica answers a probe that carries a hint. Runs on the thread that serves the probe, so it must not
/// block.
///
/// A closure `Fn(Hint<'_>) -> u32` is a hook that ignores which hints were served.
pub trait HintHook: Send + Sync {
    /// Returns the divisor of the load in the reply to the probe. 1 (or 0) leaves the load as it is.
    fn divisor(&self, hint: Hint<'_>) -> u32;

    /// Called when the response to a request with this hint begins, if its status is below 400 and its head carries no
    /// gRPC failure.
    fn served(&self, hint: Hint<'_>) {
        let _ = hint;
    }
}

impl<F: Fn(Hint<'_>) -> u32 + Send + Sync> HintHook for F {
    fn divisor(&self, hint: Hint<'_>) -> u32 {
        self(hint)
    }
}

/// Shared [`HintHook`]. Clones share it.
#[derive(Clone)]
pub struct Hook(Arc<dyn HintHook>);

impl Hook {
    /// Wraps a hook of the application.
    pub fn new(hook: impl HintHook + 'static) -> Self {
        Self(Arc::new(hook))
    }

    /// Creates the built-in hook, which divides by `divisor` if the hint is among the last `capacity` hints served
    /// here.
    pub fn recent(capacity: usize, divisor: u32) -> Self {
        Self::new(Recent { hints: Mutex::new(RecentHints::new(capacity)), divisor })
    }

    pub(crate) fn divisor(&self, hint: Hint<'_>) -> u32 {
        self.0.divisor(hint)
    }

    pub(crate) fn served(&self, hint: &HeaderValue) {
        if let Some(hint) = Hint::parse(hint.as_bytes()) {
            self.0.served(hint);
        }
    }
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

struct Recent {
    hints: Mutex<RecentHints>,
    divisor: u32,
}

impl HintHook for Recent {
    fn divisor(&self, hint: Hint<'_>) -> u32 {
        let hints = self.hints.lock().unwrap_or_else(PoisonError::into_inner);
        if hints.contains(hint) { self.divisor } else { 1 }
    }

    fn served(&self, hint: Hint<'_>) {
        self.hints.lock().unwrap_or_else(PoisonError::into_inner).serve(hint);
    }
}

/// Returns the only usable hint among `headers`. A bad hint is ignored and counted; so are two hints, since neither is
/// preferred.
pub(crate) fn of<'a>(headers: &'a HeaderMap, counters: &Counters) -> Option<&'a HeaderValue> {
    let mut all = headers.get_all(HINT).iter();
    let first = all.next()?;
    if all.next().is_none() && Hint::parse(first.as_bytes()).is_some() {
        return Some(first);
    }
    counters.count_hint(HintSeen::Ignored);
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(values: &[&[u8]]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for value in values {
            map.append(HINT, HeaderValue::from_bytes(value).unwrap());
        }
        map
    }

    #[test]
    fn a_single_valid_hint_is_used_and_others_are_counted() {
        let counters = Counters::default();
        assert_eq!(of(&headers(&[b"0123456789abcdef"]), &counters).unwrap(), "0123456789abcdef");
        assert!(of(&headers(&[]), &counters).is_none());
        assert_eq!(counters.hints(HintSeen::Ignored), 0, "an absent hint is not a bad one");
        let huge = [b'h'; 65_536];
        for bad in [&b""[..], b"a b", b"\xff\xfe", &huge[..65], &huge] {
            assert!(of(&headers(&[bad]), &counters).is_none());
        }
        assert!(of(&headers(&[b"a", b"b"]), &counters).is_none());
        assert_eq!(counters.hints(HintSeen::Ignored), 6);
    }

    #[test]
    fn the_built_in_hook_divides_for_hints_that_it_served() {
        let hook = Hook::recent(1, 10);
        let divisor = |text: &str| hook.divisor(Hint::parse(text.as_bytes()).unwrap());
        assert_eq!(divisor("a"), 1);
        hook.served(&HeaderValue::from_static("a"));
        assert_eq!((divisor("a"), divisor("b")), (10, 1));
        hook.served(&HeaderValue::from_static("b"));
        assert_eq!((divisor("a"), divisor("b")), (1, 10));
    }
}
