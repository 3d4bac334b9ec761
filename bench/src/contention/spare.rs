//! The antagonists' schedule: how much of its machine each leaves to the replica, over time.
//!
//! The real antagonists and the simulator follow the same schedule, which a seed fixes.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use rand_distr::{Distribution as _, Exp1};
use serde::{Deserialize, Serialize};

use super::scale::ROOM;

/// One machine at a time is full: its antagonist takes everything beyond the replica's allocation. After this time,
/// another machine is full instead. In this time a replica above its allocation gathers so many queries that some miss
/// a deadline of 5 s, as in the paper.
const FULL: Duration = Duration::from_secs(20);
/// Mean time between two changes of an antagonist whose machine is not full.
const DWELL: Duration = Duration::from_secs(5);
/// Range of the spare capacity on the machines that are not full, in allocations. One of the eight machines is full, so
/// the mean over all is 0.96; the simulator's figure 6 has 0.95.
const SPARE: std::ops::Range<f64> = 0.7..ROOM;

/// Spare capacity of one machine, in allocations of the replica, from each instant on. The first instant is zero.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Course(Vec<(Duration, f64)>);

impl Course {
    /// The course of each of `machines` machines for `length`. At every instant exactly one of them is full.
    pub(super) fn of_all(machines: usize, length: Duration, seed: u64) -> Vec<Self> {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut full = vec![Vec::new(); machines];
        let (mut at, mut machine) = (Duration::ZERO, rng.random_range(0..machines));
        while at < length {
            full[machine].push(at);
            at += FULL;
            machine = (machine + rng.random_range(1..machines.max(2))) % machines;
        }
        full.iter().map(|full| Self::drawn(full, length, &mut rng)).collect()
    }

    /// The course of a machine that is full for a while from each of these instants on.
    fn drawn(full: &[Duration], length: Duration, rng: &mut SmallRng) -> Self {
        let (mut at, mut steps) = (Duration::ZERO, Vec::new());
        while at < length {
            let next = full.iter().find(|start| **start + FULL > at);
            if next.is_some_and(|start| *start <= at) {
                steps.push((at, 0.0));
                at = next.map_or(length, |start| *start + FULL);
            } else {
                steps.push((at, rng.random_range(SPARE)));
                let dwell: f64 = Exp1.sample(rng);
                at = (at + DWELL.mul_f64(dwell)).min(next.copied().unwrap_or(length));
            }
        }
        Self(steps)
    }

    /// The spare capacity at an instant.
    pub(super) fn at(&self, instant: Duration) -> f64 {
        let passed = self.0.partition_point(|(at, _)| *at <= instant);
        self.0.get(passed.saturating_sub(1)).map_or(0.0, |(_, spare)| *spare)
    }

    /// The course from `start` on, for `length`, with instants counted from `start`.
    pub(super) fn part(&self, start: Duration, length: Duration) -> Vec<(Duration, f64)> {
        let later = self.0.iter().filter(|(at, _)| *at > start && *at < start + length);
        std::iter::once((Duration::ZERO, self.at(start)))
            .chain(later.map(|(at, spare)| (*at - start, *spare)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(10_000);

    #[test]
    fn one_machine_is_full_at_any_time_and_the_mean_is_that_of_the_simulator() {
        let courses = Course::of_all(8, LONG, 1);
        let (mut sum, mut changes, mut last) = (0.0, 0, None);
        for second in 0..10_000 {
            let spare = courses.iter().map(|course| course.at(Duration::from_secs(second)));
            let spare: Vec<f64> = spare.collect();
            let full: Vec<usize> = (0..8).filter(|machine| spare[*machine] == 0.0).collect();
            assert_eq!(full.len(), 1, "after {second} s");
            changes += u32::from(last.replace(full[0]).is_some_and(|last| last != full[0]));
            sum += spare.iter().sum::<f64>();
        }
        assert_eq!(changes, 499, "another one every 20 s");
        assert!((sum / 80_000.0 - 0.96).abs() < 0.02, "{}", sum / 80_000.0);
    }

    #[test]
    fn a_part_begins_with_the_state_at_its_start() {
        let seconds = Duration::from_secs;
        let course = Course(vec![(seconds(0), 0.5), (seconds(4), 1.0), (seconds(9), 0.0)]);
        assert_eq!(course.part(seconds(5), seconds(10)), [(seconds(0), 1.0), (seconds(4), 0.0)]);
        assert_eq!(course.part(seconds(4), seconds(5)), [(seconds(0), 1.0)]);
    }

    #[test]
    fn the_seed_fixes_the_courses_and_machines_differ() {
        let courses = Course::of_all(2, LONG, 7);
        assert_eq!(courses, Course::of_all(2, LONG, 7));
        assert_ne!(courses[0], courses[1]);
    }
}
