//! `growth`: whether the CPU time of a request grows with the fleet, the clusters, the workers, or the requests in
//! flight.
//!
//! All sizes of one quantity run side by side and take turns, so that the machine's drift cancels out. Growth is judged
//! against the smallest size of the same kind; the growth of Envoy without Prequal is shown for comparison.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use super::{Rounds, Variant};
use crate::goals::Goals;
use crate::sim::plot::{self, Chart, Line};
use crate::stats::min_max;
use crate::table::{self, one, two};

mod clusters;
mod in_flight;
mod replicas;
mod workers;

/// Goal for the cost of a request at the largest size, relative to that at the smallest.
const FACTOR: f64 = 1.25;

/// Arguments of `growth`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Growth {
    #[command(flatten)]
    rounds: Rounds,
    /// Only this quantity
    #[arg(long)]
    only: Option<Quantity>,
    /// Two short rounds, without the largest sizes: the figures are not meaningful
    #[arg(long)]
    quick: bool,
    /// Folder for the plot
    #[arg(long, default_value = "target/bench", value_name = "DIR")]
    out: PathBuf,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum Quantity {
    /// Replicas of one cluster, 10 to 10000
    Replicas,
    /// Clusters of one Envoy, 1 to 256
    Clusters,
    /// Workers of one Envoy, 1 to 16
    Workers,
    /// Requests in flight at an agent, 1 to 10000
    InFlight,
}

impl Growth {
    fn rounds(&self) -> Rounds {
        if self.quick { Rounds { count: 2, ms: 300 } } else { self.rounds }
    }

    /// The sizes to measure: with `--quick`, all but the largest.
    fn sizes(&self, all: &[usize]) -> Vec<usize> {
        all[..all.len() - usize::from(self.quick)].to_vec()
    }
}

/// The measured cost at every size of one quantity.
struct Grown {
    /// Name of the quantity, for the axis of its chart.
    quantity: &'static str,
    sizes: Vec<usize>,
    /// Names of the kinds that are compared at each size.
    kinds: Vec<&'static str>,
    /// The first `shown` kinds are shown but not judged.
    shown: usize,
    /// Largest size that is judged, and the reason why larger ones are not.
    beyond: Option<(usize, &'static str)>,
    /// All kinds of the first size, then those of the next.
    variants: Vec<Variant>,
}

impl Grown {
    fn variant(&self, size: usize, kind: usize) -> &Variant {
        &self.variants[size * self.kinds.len() + kind]
    }

    fn is_beyond(&self, size: usize) -> bool {
        self.beyond.is_some_and(|(limit, _)| self.sizes[size] > limit)
    }

    /// Cost at a size relative to that at the smallest.
    fn factor(&self, size: usize, kind: usize) -> f64 {
        self.variant(size, kind).cpu() / self.variant(0, kind).cpu()
    }

    fn table(&self) -> String {
        let mut rows = Vec::new();
        for (size, count) in self.sizes.iter().enumerate() {
            for (kind, name) in self.kinds.iter().enumerate() {
                let variant = self.variant(size, kind);
                let mark = self.beyond.filter(|_| self.is_beyond(size)).map_or("", |(_, why)| why);
                rows.push(vec![
                    format!("{count}, {name}"),
                    one(variant.cpu()),
                    variant.cpu_range(),
                    two(self.factor(size, kind)),
                    format!("{:.0}", variant.per_second()),
                    mark.to_owned(),
                ]);
            }
        }
        let header = [self.quantity, "CPU µs", "min–max", "× smallest", "req/s", ""];
        table::render(&header, &rows)
    }

    fn judge(&self, goals: &mut Goals) {
        let Some(last) = (1..self.sizes.len()).rev().find(|size| !self.is_beyond(*size)) else {
            println!("{}: not judged, because only the smallest size fits this machine", self.quantity);
            return;
        };
        let beside: Vec<String> = (0..self.shown)
            .map(|kind| format!("; {}: {} times", self.kinds[kind], two(self.factor(last, kind))))
            .collect();
        for kind in self.shown..self.kinds.len() {
            let factor = self.factor(last, kind);
            let line = format!(
                "{} {}, {}: {} µs a request, {} times that with {} (at most {FACTOR}){}",
                self.sizes[last],
                self.quantity,
                self.kinds[kind],
                one(self.variant(last, kind).cpu()),
                two(factor),
                self.sizes[0],
                beside.concat(),
            );
            goals.add(factor <= FACTOR, line);
        }
    }

    fn chart(&self) -> Chart {
        let value = |size: usize, kind: usize| {
            let variant = self.variant(size, kind);
            let (low, high) = min_max(variant.saturated.iter().map(|round| round.cpu_us));
            (variant.cpu(), low, high)
        };
        let line = |(kind, name): (usize, &&str)| Line {
            label: (*name).to_owned(),
            values: (0..self.sizes.len()).map(|size| value(size, kind)).collect(),
        };
        Chart {
            title: format!("CPU µs per request over {}", self.quantity),
            x_label: self.quantity.to_owned(),
            points: self.sizes.iter().map(usize::to_string).collect(),
            lines: self.kinds.iter().enumerate().map(line).collect(),
            logarithmic: false,
            ceiling: None,
            format: one,
        }
    }
}

/// Measures every quantity; the exit code shows whether every goal was reached.
pub(crate) async fn run(growth: &Growth) -> Result<ExitCode> {
    let wanted = |quantity| growth.only.is_none_or(|only| only == quantity);
    let mut all = Vec::new();
    if wanted(Quantity::Replicas) {
        all.push(replicas::run(growth.rounds(), growth.sizes(&replicas::SIZES)).await?);
    }
    if wanted(Quantity::Clusters) {
        all.push(clusters::run(growth.rounds(), growth.sizes(&clusters::SIZES)).await?);
    }
    if wanted(Quantity::InFlight) {
        all.push(in_flight::run(growth.rounds(), growth.sizes(&in_flight::SIZES)).await?);
    }
    // Last, because it lets this process use all cores again.
    if wanted(Quantity::Workers) {
        all.push(workers::run(growth.rounds(), growth.sizes(&workers::SIZES)).await?);
    }
    let mut goals = Goals::default();
    for grown in &all {
        println!("\n{}", grown.table());
        grown.judge(&mut goals);
    }
    let charts: Vec<Chart> = all.iter().map(Grown::chart).collect();
    std::fs::create_dir_all(&growth.out)?;
    let path = growth.out.join("growth.svg");
    plot::write(&path, "Cost of a request as one quantity grows", &charts)?;
    println!("Plot: {}\n", path.display());
    Ok(goals.print())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::closed::Round;

    /// Two sizes of each of two kinds, with these costs. The first kind is only shown, the second one is judged.
    fn grown(costs: [f64; 4], beyond: Option<(usize, &'static str)>) -> Grown {
        let variant = |cpu_us| {
            let target = ([127, 0, 0, 1], 1).into();
            let saturated = vec![Round { cpu_us, per_second: 1.0, median_us: 1.0 }];
            Variant { saturated, ..Variant::new("", target, Vec::new()) }
        };
        Grown {
            quantity: "replicas",
            sizes: vec![10, 1000],
            kinds: vec!["without", "filter"],
            shown: 1,
            beyond,
            variants: costs.map(variant).into(),
        }
    }

    #[test]
    fn growth_is_relative_to_the_smallest_size_of_the_same_kind() {
        let grown = grown([40.0, 50.0, 48.0, 70.0], None);
        assert_eq!((grown.factor(1, 0), grown.factor(1, 1)), (1.2, 1.4));
        assert!(grown.table().contains("1000, filter"), "{}", grown.table());
    }

    #[test]
    fn a_size_beyond_the_machine_is_marked() {
        let grown = grown([1.0, 1.0, 9.0, 9.0], Some((100, "more than fit")));
        assert!(!grown.is_beyond(0) && grown.is_beyond(1));
        assert_eq!(grown.table().matches("more than fit").count(), 2);
    }
}
