//! What comparisons have in common: their options, the choice of what is compared, and its order in every pass.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;

use crate::scenario::Scenario;

/// The length of a comparison, what is compared, and the folder for its plot.
#[derive(Args, Clone, Debug)]
pub(crate) struct Length {
    /// Passes over all policies [default: 3; cpu-bound 5; with --quick 1]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1000))]
    passes: Option<u64>,
    /// Judged seconds per run, or per step of a ramp [default: 60; contention and generators 30; cpu-bound and idle 20;
    /// with --quick a fifth]
    #[arg(long, value_parser = clap::value_parser!(u64).range(4..=3600))]
    seconds: Option<u64>,
    /// One short pass, to check that it works: its figures are not meaningful
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only policies whose names begin with one of these, comma-separated [default: all of the comparison]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub(crate) arms: Vec<String>,
    /// Folder for the plot
    #[arg(long, default_value = "target/bench", value_name = "DIR")]
    pub(crate) out: PathBuf,
}

impl Length {
    /// Number of passes.
    pub(crate) fn passes(&self, default: u64) -> usize {
        self.passes.unwrap_or(if self.quick { 1 } else { default }) as usize
    }

    /// Judged part of a run.
    pub(crate) fn seconds(&self, default: u64) -> Duration {
        Duration::from_secs(self.seconds.unwrap_or(if self.quick { default / 5 } else { default }))
    }

    /// Keeps only the requested arms of every scenario.
    pub(crate) fn choose(&self, mut scenarios: Vec<Scenario>) -> Result<Vec<Scenario>> {
        for scenario in &mut scenarios {
            scenario.arms = self.named(&scenario.name, &scenario.arms, |arm| arm.label())?;
        }
        Ok(scenarios)
    }

    /// Keeps the requested ones of `all`. The error for an unknown name mentions `place`, which compares them.
    pub(crate) fn named<T: Copy>(
        &self,
        place: &str,
        all: &[T],
        label: impl Fn(T) -> &'static str,
    ) -> Result<Vec<T>> {
        let begins = |one: T, name: &str| label(one).starts_with(name);
        if let Some(name) = self.arms.iter().find(|name| !all.iter().any(|one| begins(*one, name))) {
            let labels: Vec<&str> = all.iter().map(|one| label(*one)).collect();
            bail!("--arms {name}: {place} has {}", labels.join(", "));
        }
        let wanted = |one: &T| self.arms.is_empty() || self.arms.iter().any(|name| begins(*one, name));
        Ok(all.iter().copied().filter(wanted).collect())
    }
}

/// The order of `count` arms in pass number `pass`, as indices. Each pass begins with another arm: the machine's speed
/// drifts within a pass, so no arm may always run at the same position.
pub(crate) fn order(count: usize, pass: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |place| (place + pass) % count)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        length: Length,
    }

    fn parsed(line: &str) -> Length {
        CommandLine::parse_from(std::iter::once("bench").chain(line.split_whitespace())).length
    }

    #[test]
    fn quick_shortens_only_what_is_not_given() {
        let length = parsed("--quick --seconds 30");
        assert_eq!((length.seconds(60), length.passes(3)), (Duration::from_secs(30), 1));
        assert_eq!(parsed("--quick").seconds(60), Duration::from_secs(12));
        assert_eq!((parsed("").seconds(60), parsed("").passes(3)), (Duration::from_secs(60), 3));
        assert!(CommandLine::try_parse_from(["bench", "--seconds", "3"]).is_err());
    }

    #[test]
    fn arms_are_chosen_by_the_beginnings_of_their_names() {
        const ALL: [&str; 3] = ["round_robin", "least_request", "least_request (full scan)"];
        let chosen = |line| parsed(line).named("this", &ALL, |name| name).unwrap();
        assert_eq!(chosen("--arms least,round"), ALL);
        assert_eq!(chosen("--arms least_request"), ALL[1..]);
        assert_eq!(chosen(""), ALL);
        let error = parsed("--arms lest").named("this", &ALL, |name| name).unwrap_err().to_string();
        assert_eq!(error, format!("--arms lest: this has {}", ALL.join(", ")));
    }

    #[test]
    fn every_arm_has_every_place_once_in_as_many_passes() {
        let orders: Vec<Vec<usize>> = (0..3).map(|pass| order(3, pass).collect()).collect();
        assert_eq!(orders, [[0, 1, 2], [1, 2, 0], [2, 0, 1]]);
        assert_eq!(order(3, 4).collect::<Vec<_>>(), orders[1]);
        assert_eq!(order(0, 1).count(), 0);
    }
}
