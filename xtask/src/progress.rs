//! Progress lines. All go to standard error, so that standard output holds only a command's result.

use std::fmt::Display;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Interval at which a silent piece of work reports that it is still running.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// Prints one progress line.
pub(crate) fn say(line: impl Display) {
    eprintln!("    {line}");
}

/// Prints the line that opens a step.
pub(crate) fn headline(line: impl Display) {
    eprintln!("==> {line}");
}

/// Runs `work`, which prints nothing itself, and prints its name, a heartbeat, and the time it took.
pub(crate) fn silently<T>(what: &str, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    say(format_args!("{what} ..."));
    let started = Instant::now();
    let (done, waiting) = mpsc::channel::<()>();
    let result = thread::scope(|scope| {
        scope.spawn(move || {
            while waiting.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout) {
                say(format_args!("{what}: {} so far", seconds(started.elapsed())));
            }
        });
        let result = work();
        drop(done);
        result
    });
    if result.is_ok() && started.elapsed() >= Duration::from_secs(2) {
        say(format_args!("{what}: done in {}", seconds(started.elapsed())));
    }
    result
}

/// The line of an error that says what went wrong, for one-line messages.
pub(crate) fn last_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default().trim().to_owned()
}

/// A duration for people to read: `0.4 s`, `75 s`.
pub(crate) fn seconds(elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64();
    if seconds < 10.0 { format!("{seconds:.1} s") } else { format!("{seconds:.0} s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_cut_to_its_last_line() {
        let error = anyhow::anyhow!("`rustup target add` failed\ninfo: downloading\nerror: no\n");
        assert_eq!(last_line(&error), "error: no");
    }

    #[test]
    fn durations_are_short() {
        assert_eq!(seconds(Duration::from_millis(440)), "0.4 s");
        assert_eq!(seconds(Duration::from_millis(75_400)), "75 s");
    }
}
