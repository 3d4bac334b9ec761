//! Compares many runs: their order, the tables and the curves.

use anyhow::{Context, Result};

use crate::arm::Arm;
use crate::passes;
use crate::plot::{Curve, Panel};
use crate::scenario::{Goal, Load, Measured, Scenario};
use crate::table::{self, count, ms, one, percent, spread, two};

/// The runs of a comparison, all passes together.
pub(crate) struct Comparison {
    pub(crate) scenario: Scenario,
    pub(crate) runs: Vec<Measured>,
}

/// One column of a table.
struct Column {
    heading: String,
    /// The figure of one run.
    value: Box<dyn Fn(&Measured) -> f64>,
    over_passes: Over,
}

/// How the figures of several passes are combined.
enum Over {
    /// Median and range.
    Spread(fn(f64) -> String),
    /// The sum of all.
    Sum,
}

impl Column {
    fn spread(
        heading: impl Into<String>,
        value: impl Fn(&Measured) -> f64 + 'static,
        format: fn(f64) -> String,
    ) -> Self {
        Self { heading: heading.into(), value: Box::new(value), over_passes: Over::Spread(format) }
    }

    fn sum(heading: &str, count: impl Fn(&Measured) -> usize + 'static) -> Self {
        let value = Box::new(move |run: &Measured| count(run) as f64);
        Self { heading: heading.to_owned(), value, over_passes: Over::Sum }
    }

    fn cell<'a>(&self, runs: impl Iterator<Item = &'a Measured>) -> String {
        let values: Vec<f64> = runs.map(&self.value).collect();
        match self.over_passes {
            Over::Spread(format) => spread(&values, format),
            Over::Sum => format!("{:.0}", values.iter().sum::<f64>()),
        }
    }
}

impl Comparison {
    /// Runs every arm once per pass and topology, interleaved: A B C D, B C D A, ….
    pub(crate) async fn run(scenario: Scenario, passes: usize, topologies: &[usize]) -> Result<Self> {
        println!("{}", scenario.title);
        let total = passes * topologies.len() * scenario.arms.len();
        let mut comparison = Self { scenario, runs: Vec::new() };
        let arms = comparison.scenario.arms.clone();
        for pass in 0..passes {
            for envoys in topologies {
                for arm in passes::order(arms.len(), pass).map(|index| arms[index]) {
                    let step = format!("[{}/{total}]", comparison.runs.len() + 1);
                    // All arms of a pass get the same requests.
                    let seed = pass as u64 + 1;
                    let run = comparison.scenario.run_cold(arm, *envoys, seed, &step).await;
                    let run = run.with_context(|| {
                        let place = comparison.scenario.topology(*envoys);
                        format!("{}, {place}, pass {seed}", arm.label())
                    })?;
                    comparison.print_run(&run);
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

    fn print_run(&self, run: &Measured) {
        let figures: Vec<String> = self
            .columns()
            .iter()
            .map(|column| format!("{} {}", column.heading, column.cell(std::iter::once(run))))
            .collect();
        println!("  {}", figures.join(", "));
        if let Some(recovery) = &run.recovery {
            let shown: Vec<String> =
                recovery.series.iter().map(|part| format!("{:.0}", part * 100.0)).collect();
            println!("  share after healing, % of the fair share, second by second: {}", shown.join(" "));
        }
    }

    /// Heading and figure of every column of the judged part.
    pub(crate) fn figures(&self, arm: Arm, envoys: usize) -> Vec<(String, String)> {
        let figure = |column: Column| {
            let cell = column.cell(self.of(arm, envoys));
            (column.heading, cell)
        };
        self.columns().into_iter().map(figure).collect()
    }

    /// Columns of the judged part.
    fn columns(&self) -> Vec<Column> {
        let scenario = &self.scenario;
        let quantile = |heading, q| Column::spread(heading, move |run| run.judged.quantile_ms(q), ms);
        let mut columns = vec![
            quantile("p50 ms", 0.5),
            quantile("p95 ms", 0.95),
            quantile("p99 ms", 0.99),
            quantile("p99.9 ms", 0.999),
        ];
        match scenario.load {
            Load::Closed { .. } => columns.push(Column::spread("req/s", |run| run.per_second, one)),
            Load::Open { keys, .. } => {
                let limit = scenario.good_within;
                let heading = format!("≤ {} ms", limit.as_millis());
                columns.push(Column::spread(heading, move |run| run.judged.within(limit), percent));
                if keys.is_some() {
                    columns.push(Column::spread("cache hits", |run| run.judged.hit_rate(), percent));
                }
            }
        }
        if let Some(marked) = &scenario.marked {
            let heading = format!("to {}", marked.label);
            columns.push(Column::spread(heading, |run| run.judged.marked_share(), percent));
        }
        if scenario.goals.iter().any(|goal| matches!(goal, Goal::LeastPart(_))) {
            let replicas = scenario.fleet.len();
            let part = move |run: &Measured| run.judged.least_part(replicas);
            columns.push(Column::spread("least used, of fair share", part, percent));
        }
        if scenario.watch.is_some() {
            columns.push(Column::spread("back after s", back_after, |seconds| {
                if seconds.is_infinite() { "not".to_owned() } else { one(seconds) }
            }));
        }
        columns.push(Column::spread("probes/query", |run| run.probes_per_query.unwrap_or(f64::NAN), two));
        let ejections = |run: &Measured| run.ejections.map_or(f64::NAN, |times| times as f64);
        columns.push(Column::spread("ejections", ejections, count));
        columns.push(Column::spread(format!("{} µs/req", scenario.proxy()), |run| run.envoy_us, one));
        columns.push(Column::sum("failed", |run| run.judged.failed));
        if scenario.fleet.0.iter().any(|replica| replica.slots.is_some()) {
            columns.push(Column::sum("rejected", |run| run.judged.rejected));
        }
        columns.push(Column::sum("samples", |run| run.judged.samples));
        columns
    }

    /// Columns of the part before the judged one.
    fn columns_before(&self) -> Vec<Column> {
        let mut columns = vec![
            Column::spread("p50 ms", |run| run.before.quantile_ms(0.5), ms),
            Column::spread("p99 ms", |run| run.before.quantile_ms(0.99), ms),
        ];
        if let Some(marked) = &self.scenario.marked {
            let heading = format!("to {}", marked.label);
            columns.push(Column::spread(heading, |run| run.before.marked_share(), percent));
        }
        columns.push(Column::sum("failed", |run| run.before.failed));
        columns.push(Column::sum("samples", |run| run.before.samples));
        columns
    }

    /// Tables of one topology: the comparison, the part before the judged one, and the generator's own figures.
    pub(crate) fn tables(&self, envoys: usize) -> String {
        let title = &self.scenario.title;
        let table = self.table(envoys, &self.columns());
        let workers = match self.scenario.workers(envoys) {
            1 => String::new(),
            workers => format!(" with {workers} workers"),
        };
        let mut text = format!("{title}, {}{workers}\n\n{table}", self.scenario.topology(envoys));
        let before = self.scenario.judged.start.as_secs();
        if before > 0 {
            let table = self.table(envoys, &self.columns_before());
            text += &format!("\nThe first {before} s, excluded above:\n\n{table}");
        }
        text + &self.generator(envoys)
    }

    fn table(&self, envoys: usize, columns: &[Column]) -> String {
        let mut header = vec!["policy"];
        header.extend(columns.iter().map(|column| column.heading.as_str()));
        let rows: Vec<Vec<String>> = self
            .scenario
            .arms
            .iter()
            .map(|arm| {
                let cells = columns.iter().map(|column| column.cell(self.of(*arm, envoys)));
                std::iter::once(arm.label().to_owned()).chain(cells).collect()
            })
            .collect();
        table::render(&header, &rows)
    }

    /// The generator's lateness and CPU use: if it could not keep up, the other figures are distorted.
    fn generator(&self, envoys: usize) -> String {
        let runs = || self.runs.iter().filter(|run| run.envoys == envoys);
        let cpu = runs().map(|run| run.generator_cpu).fold(0.0, f64::max);
        let cpu = format!("it used at most {:.0} % of a core", cpu * 100.0);
        if matches!(self.scenario.load, Load::Closed { .. }) {
            return format!("\nThe generator is a closed loop; {cpu}.\n");
        }
        let late = |of: fn(&Measured) -> f64| runs().map(of).fold(0.0, f64::max) * 1e3;
        let (p99, most) = (late(|run| run.late.0.as_secs_f64()), late(|run| run.late.1.as_secs_f64()));
        let (p99, most) = (two(p99), ms(most));
        format!("\nThe generator's lateness: p99 {p99} ms, maximum {most} ms; {cpu}.\n")
    }

    /// The curves of the first pass in one topology.
    pub(crate) fn panel(&self, envoys: usize) -> Panel {
        self.panel_of(envoys, &self.scenario.arms)
    }

    /// The curves of some arms, of the first pass in one topology.
    pub(crate) fn panel_of(&self, envoys: usize, arms: &[Arm]) -> Panel {
        let runs = arms.iter().filter_map(|arm| self.of(*arm, envoys).next());
        Panel {
            title: format!("{}, {}", self.scenario.title, self.scenario.topology(envoys)),
            curves: runs
                .map(|run| Curve { label: run.arm.label().to_owned(), points: run.judged.tail() })
                .collect(),
        }
    }
}

/// Seconds until the healed replica was back; infinite if it did not come back, NaN if it was not watched.
fn back_after(run: &Measured) -> f64 {
    match &run.recovery {
        None => f64::NAN,
        Some(recovery) => recovery.after.map_or(f64::INFINITY, |after| after.as_secs_f64()),
    }
}
