//! Decides whether an outcome meets its goal, and lists what it misses.

use crate::fault::Goal;
use crate::run::{BACK, Outcome};

/// A text for each part of the goal that was missed; empty if the goal is met.
pub(crate) fn misses(outcome: &Outcome, goal: Goal, waits_for_traffic: bool) -> Vec<String> {
    let mut misses = Vec::new();
    if let Some(broken) = &outcome.broken {
        misses.push(broken.clone());
    }
    if outcome.errors.len() > goal.errors {
        misses.push(format!(
            "{} errors, {} allowed; {}",
            outcome.errors.len(),
            goal.errors,
            most(&outcome.errors)
        ));
    }
    let limit = goal.recovery.as_secs();
    match outcome.recovery {
        None => misses.push(format!("not recovered within {limit} s: {}", outcome.unwell)),
        Some(after) if after > goal.recovery => {
            misses.push(format!("recovered after {:.1} s, {limit} allowed", after.as_secs_f64()));
        }
        Some(_) if waits_for_traffic && outcome.back.is_none_or(|back| back > BACK) => {
            misses.push(format!("traffic not back within {} s: {}", BACK.as_secs(), outcome.unwell));
        }
        Some(_) => {}
    }
    if !outcome.unbalanced.is_empty() {
        misses.push(format!("at rest: {}", outcome.unbalanced.join(", ")));
    }
    misses
}

/// The allowed cost of two faults at once: the sum of their errors, and the longer of their recovery times.
pub(crate) fn sum(goals: &[Goal]) -> Goal {
    Goal {
        errors: goals.iter().map(|goal| goal.errors).sum(),
        recovery: goals.iter().map(|goal| goal.recovery).max().unwrap_or_default(),
    }
}

/// The first few errors.
fn most(errors: &[String]) -> String {
    let shown: Vec<&str> = errors.iter().take(3).map(String::as_str).collect();
    shown.join("; ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_kind_of_miss_is_named() {
        let goal = Goal::within(5);
        let well = Outcome {
            recovery: Some(Duration::from_secs(5)),
            back: Some(BACK),
            own: 9,
            ..Outcome::default()
        };
        assert!(misses(&well, goal, true).is_empty());
        let error = Outcome { errors: vec!["503".to_owned()], ..well };
        assert_eq!(misses(&error, goal, true), ["1 errors, 0 allowed; 503"]);
        let slow = Outcome { recovery: Some(Duration::from_secs(6)), ..Outcome::default() };
        assert_eq!(misses(&slow, goal, true), ["recovered after 6.0 s, 5 allowed"]);
        let never = Outcome { unwell: "errors".to_owned(), ..Outcome::default() };
        assert_eq!(misses(&never, goal, true), ["not recovered within 5 s: errors"]);
        let away = Outcome {
            recovery: Some(Duration::ZERO),
            unwell: "replica 3 gets 0 %".to_owned(),
            ..Outcome::default()
        };
        assert_eq!(misses(&away, goal, true), ["traffic not back within 45 s: replica 3 gets 0 %"]);
        assert!(misses(&away, goal, false).is_empty());
        let stuck = Outcome {
            recovery: Some(Duration::ZERO),
            unbalanced: vec!["RIF 1 at agent 3".to_owned()],
            broken: Some("it could not end".to_owned()),
            ..Outcome::default()
        };
        assert_eq!(misses(&stuck, goal, false), ["it could not end", "at rest: RIF 1 at agent 3"]);
    }
}
