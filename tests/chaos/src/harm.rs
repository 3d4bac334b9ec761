//! Which errors are a fault's own: what a killed process was working on.
//!
//! A kill is an interval, from the order until the process is gone. A failed request is its own if it was in flight in
//! that interval and did not end long after, and was not answered by a replica that lives.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::load::Sample;

/// How long after the end of a process its peers may take to see it: a request sent meanwhile went into the void.
const UNSEEN: Duration = Duration::from_millis(20);
/// How long after that an error may still reach the user: a stream, or an upload, sees it at its next part.
const SHOWN: Duration = Duration::from_secs(1);

/// All kills of one run.
#[derive(Debug, Default)]
pub(crate) struct Harm(Mutex<Vec<Kill>>);

#[derive(Clone, Debug)]
struct Kill {
    from: Instant,
    until: Instant,
    /// `None`: the proxy, on which all requests are.
    replica: Option<usize>,
}

impl Harm {
    /// Runs `kill`, which ends the process that serves `replica`, or all of them.
    pub(crate) fn note<T>(&self, replica: Option<usize>, kill: impl FnOnce() -> T) -> T {
        let from = Instant::now();
        let done = kill();
        let until = Instant::now();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Kill { from, until, replica });
        done
    }

    /// Forgets all.
    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Whether the failed request `sample` is one of a killed process.
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
        place
            && sample.begun <= self.until + UNSEEN
            && ended >= self.from
            && ended <= self.until + UNSEEN + SHOWN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mix::Kind;

    #[test]
    fn only_what_was_in_flight_there_is_a_kills_own() {
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
        assert!(!kill.explains(&sample(990, 9000, None)), "it was seen late");
    }
}
