//! Decides which errors are a fault's own: those of requests that a killed process was working on.
//!
//! A kill is the interval from the order until the process is gone. A failed request belongs to it if it was in flight
//! in that interval, did not end long after, and was not answered by a replica that is alive.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::load::Sample;

/// Time after the end of a process until its peers notice. Requests sent to it meanwhile are lost.
const UNSEEN: Duration = Duration::from_millis(20);
/// Further time in which an error may still reach the user: a stream or an upload notices only at its next part.
const SHOWN: Duration = Duration::from_secs(1);
/// Time after which Envoy closes a connection whose upgraded stream it has broken off: the default of
/// `delayed_close_timeout`.
const DELAYED_CLOSE: Duration = Duration::from_secs(1);

/// All kills of one run.
#[derive(Debug, Default)]
pub(crate) struct Harm(Mutex<Vec<Kill>>);

#[derive(Clone, Debug)]
struct Kill {
    from: Instant,
    until: Instant,
    /// `None` for the proxy, which carries all requests.
    replica: Option<usize>,
}

impl Harm {
    /// Runs `kill`, which ends the process that serves `replica`; `None` means the proxy.
    pub(crate) fn note<T>(&self, replica: Option<usize>, kill: impl FnOnce() -> T) -> T {
        let from = Instant::now();
        let done = kill();
        let until = Instant::now();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Kill { from, until, replica });
        done
    }

    /// Forgets all kills.
    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Whether the proxy or its filter was killed.
    pub(crate) fn of_proxy(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|kill| kill.replica.is_none())
    }

    /// Whether a kill explains the failed request `sample`.
    pub(crate) fn explains(&self, sample: &Sample) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|kill| kill.explains(sample))
    }
}

impl Kill {
    fn explains(&self, sample: &Sample) -> bool {
        let Some(ended) = sample.ended else { return false };
        let place = match (self.replica, sample.replica) {
            (Some(killed), Some(answered)) => killed == answered,
            _ => true,
        };
        let shown = if self.replica.is_none() { SHOWN + DELAYED_CLOSE } else { SHOWN };
        place
            && sample.begun <= self.until + UNSEEN
            && ended >= self.from
            && ended <= self.until + UNSEEN + shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mix::Kind;

    #[test]
    fn a_kill_explains_only_requests_that_were_in_flight_there() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let kill = Kill { from: at(1000), until: at(1010), replica: Some(3) };
        let sample = |begun, ended, replica| Sample {
            kind: Kind::Http1,
            begun: at(begun),
            ended: Some(at(ended)),
            replica,
            error: Some("reset".to_owned()),
        };
        assert!(kill.explains(&sample(990, 1012, None)), "in flight");
        assert!(kill.explains(&sample(500, 1400, Some(3))), "a stream");
        assert!(!kill.explains(&sample(500, 1400, Some(4))), "a stream elsewhere");
        assert!(!kill.explains(&sample(980, 995, None)), "it failed before");
        assert!(!kill.explains(&sample(1100, 1105, None)), "it was sent after");
        assert!(!kill.explains(&sample(990, 9000, None)), "the error came too late");
        assert!(!kill.explains(&sample(500, 2500, Some(3))), "the error came too late");
        let proxy = Kill { replica: None, ..kill };
        assert!(proxy.explains(&sample(500, 2500, Some(3))), "Envoy closes a second later");
    }
}
