//! Many runs side by side: the order they take, the tables, the plot.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::plot::{Curve, Panel};
use crate::scenario::{Arm, Measured, PER_SECOND, run_cold, topology_label};
use crate::table::{self, ms, one, percent, range, two};

/// The runs of a comparison, all passes together.
#[derive(Default)]
pub(crate) struct Comparison {
    pub(crate) runs: Vec<Measured>,
}

impl Comparison {
    /// Runs every arm once per pass and topology, interleaved: A B C D, A B C D, ….
    pub(crate) async fn run(passes: usize, topologies: &[usize], measured: Duration) -> Result<Self> {
        let mut comparison = Self::default();
        let total = passes * topologies.len() * Arm::ALL.len();
        for pass in 1..=passes {
            for envoys in topologies {
                for arm in Arm::ALL {
                    let step = format!("[{}/{total}]", comparison.runs.len() + 1);
                    let run = run_cold(arm, *envoys, measured, &step).await.with_context(|| {
                        format!("{}, {}, pass {pass}", arm.label(), topology_label(*envoys))
                    })?;
                    println!(
                        "  p50 {} ms, p99 {} ms, p99.9 {} ms, slow pair {}, failed {}",
                        ms(run.rest.quantile_ms(0.5)),
                        ms(run.rest.quantile_ms(0.99)),
                        ms(run.rest.quantile_ms(0.999)),
                        percent(run.rest.slow_share()),
                        run.rest.failed + run.first.failed,
                    );
                    comparison.runs.push(run);
                }
            }
        }
        Ok(comparison)
    }

    /// The runs of one arm in one topology, one per pass.
    pub(crate) fn of(&self, arm: Arm, envoys: usize) -> impl Iterator<Item = &Measured> {
        self.runs.iter().filter(move |run| run.arm == arm && run.envoys == envoys)
    }

    /// Tables of one topology: the comparison, and the first two seconds apart.
    pub(crate) fn tables(&self, envoys: usize) -> String {
        let column = |arm: Arm, value: &dyn Fn(&Measured) -> f64, format: &dyn Fn(f64) -> String| {
            range(&self.of(arm, envoys).map(value).collect::<Vec<_>>(), format)
        };
        let arms = || Arm::ALL.into_iter().filter(|arm| self.of(*arm, envoys).next().is_some());
        let count = |value: f64| format!("{value:.0}");
        let rows: Vec<Vec<String>> = arms()
            .map(|arm| {
                let samples: usize = self.of(arm, envoys).map(|run| run.rest.samples).sum();
                let failed: usize = self.of(arm, envoys).map(|run| run.rest.failed).sum();
                vec![
                    arm.label().to_owned(),
                    column(arm, &|run| run.rest.quantile_ms(0.5), &ms),
                    column(arm, &|run| run.rest.quantile_ms(0.95), &ms),
                    column(arm, &|run| run.rest.quantile_ms(0.99), &ms),
                    column(arm, &|run| run.rest.quantile_ms(0.999), &ms),
                    column(arm, &|run| run.rest.within_objective(), &percent),
                    column(arm, &|run| run.rest.slow_share(), &percent),
                    failed.to_string(),
                    column(arm, &|run| run.probes_per_query.unwrap_or(f64::NAN), &two),
                    column(arm, &|run| run.envoy_us, &one),
                    samples.to_string(),
                ]
            })
            .collect();
        let first: Vec<Vec<String>> = arms()
            .map(|arm| {
                vec![
                    arm.label().to_owned(),
                    column(arm, &|run| run.first.quantile_ms(0.5), &ms),
                    column(arm, &|run| run.first.quantile_ms(0.99), &ms),
                    column(arm, &|run| run.first.slow_share(), &percent),
                    column(arm, &|run| run.first.slow as f64, &count),
                    self.of(arm, envoys).map(|run| run.first.failed).sum::<usize>().to_string(),
                    self.of(arm, envoys).map(|run| run.first.samples).sum::<usize>().to_string(),
                ]
            })
            .collect();
        format!(
            "{} ({PER_SECOND} requests/s, after the first 2 s)\n\n{}\nThe first 2 s, left out above:\n\n{}",
            capitalised(topology_label(envoys)),
            table::render(
                &[
                    "policy",
                    "p50 ms",
                    "p95 ms",
                    "p99 ms",
                    "p99.9 ms",
                    "≤ 500 ms",
                    "to slow pair",
                    "failed",
                    "probes/query",
                    "Envoy µs/req",
                    "samples",
                ],
                &rows
            ),
            table::render(
                &["policy", "p50 ms", "p99 ms", "to slow pair", "slow requests", "failed", "samples"],
                &first
            ),
        )
    }

    /// Draws the first pass of every topology into `path`.
    pub(crate) fn plot(&self, path: &Path, topologies: &[usize]) -> Result<()> {
        let panels: Vec<Panel> = topologies
            .iter()
            .map(|envoys| Panel {
                title: format!("through {}", topology_label(*envoys)),
                curves: Arm::ALL
                    .into_iter()
                    .filter_map(|arm| self.of(arm, *envoys).next())
                    .map(|run| Curve { label: run.arm.label().to_owned(), points: run.rest.tail() })
                    .collect(),
            })
            .collect();
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let title = format!("{PER_SECOND} requests/s, 14 replicas answer in 50 ms, 2 in 800 ms");
        crate::plot::write(path, &title, &panels)
    }
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters
        .next()
        .map(|first| first.to_uppercase().collect::<String>() + letters.as_str())
        .unwrap_or_default()
}
