//! An antagonist: a process that uses a varying amount of CPU time on a replica's machine.

use std::time::{Duration, Instant};

use super::burn::{Pace, SLICE, burn};
use super::scale::{ROOM, allocation};
use super::spare::Course;

/// Length of one piece of CPU time. The replica gets its turn between two pieces.
const PIECE: Duration = Duration::from_micros(100);

/// Uses CPU time according to `course` for as long as the process lives.
pub(super) fn run(course: &Course) {
    let begin = Instant::now();
    let mut pace = Pace::from(begin);
    loop {
        let mut rest = SLICE.mul_f64(demand(course, begin.elapsed()));
        while !rest.is_zero() {
            let piece = rest.min(PIECE);
            burn(piece);
            rest -= piece;
        }
        let now = Instant::now();
        std::thread::sleep(pace.next(SLICE, now).saturating_duration_since(now));
    }
}

/// Cores that the antagonist wants at an instant.
fn demand(course: &Course, at: Duration) -> f64 {
    (ROOM - course.at(at)).max(0.0) * allocation()
}
