//! The results of an experiment, and the files made from them: CSV, SVG, a section of the evaluation and its tables.

mod page;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use super::grid::{Cell, Metric};
use super::plot::{self, Chart};
use crate::stats::min_max;

/// The result of one experiment.
pub(crate) struct Report {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    /// Describes the runs and the source's statements, for readers who do not know the source.
    pub(crate) text: String,
    pub(crate) header: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
    pub(crate) statements: Vec<Statement>,
    pub(crate) charts: Vec<Chart>,
    pub(crate) verdicts: Vec<Verdict>,
    /// Header and lines.
    pub(crate) csv: String,
}

/// A goal and whether it was reached.
#[derive(Clone, Debug)]
pub(crate) struct Verdict {
    pub(crate) what: String,
    pub(crate) got: String,
    pub(crate) reached: bool,
}

impl Verdict {
    pub(crate) fn new(what: impl Into<String>, reached: bool, got: impl Into<String>) -> Self {
        Self { what: what.into(), got: got.into(), reached }
    }

    fn line(&self) -> String {
        format!("{}: {} — {}", if self.reached { "reached" } else { "MISSED" }, self.what, self.got)
    }
}

/// A figure that the source states, beside the result here.
#[derive(Clone, Debug)]
pub(crate) struct Statement {
    what: String,
    source: String,
    here: String,
    /// Whether the result agrees.
    holds: bool,
}

impl Statement {
    pub(crate) fn new(
        what: impl Into<String>,
        source: impl Into<String>,
        here: impl Into<String>,
        holds: bool,
    ) -> Self {
        Self { what: what.into(), source: source.into(), here: here.into(), holds }
    }

    pub(crate) fn here_is(&self, text: &str) -> bool {
        self.here == text
    }

    fn cells(&self) -> Vec<String> {
        let holds = if self.holds { "yes" } else { "**no**" };
        vec![self.what.clone(), self.source.clone(), self.here.clone(), holds.to_owned()]
    }
}

impl Report {
    /// Prints the table and the verdicts.
    pub(crate) fn print(&self) {
        let header: Vec<&str> = self.header.iter().map(String::as_str).collect();
        println!("{} — {}\n", self.name, self.title);
        println!("{}", crate::table::render(&header, &self.rows));
        for verdict in &self.verdicts {
            println!("{}", verdict.line());
        }
        println!();
    }

    /// Writes `<name>.csv`, `<name>.svg`, `<name>.md` (the section of the evaluation) and `<name>-tables.md` into
    /// `folder`.
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let put = |ending: &str, text: &str| {
            let path = folder.join(format!("{}{ending}", self.name));
            fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
        };
        put(".csv", &self.csv)?;
        if !self.charts.is_empty() {
            plot::write(&folder.join(format!("{}.svg", self.name)), self.title, &self.charts)?;
        }
        put(".md", &page::section(self))?;
        put("-tables.md", &page::tables(self))
    }
}

/// The cells as CSV, one line per run.
pub(crate) fn csv(name: &str, cells: &[Cell], metrics: &[Metric]) -> String {
    let mut text = String::from("experiment,point,policy,seed");
    for metric in metrics {
        let _ = write!(text, ",{}", metric.name);
    }
    text.push('\n');
    for cell in cells {
        for (seed, values) in &cell.values {
            let _ = write!(text, "{name},\"{}\",\"{}\",{seed}", cell.point, cell.arm);
            for value in values {
                let _ = write!(text, ",{value}");
            }
            text.push('\n');
        }
    }
    text
}

/// Formats milliseconds for tables; `TO` means beyond the deadline.
pub(crate) fn ms(value: f64) -> String {
    if value.is_infinite() {
        "TO".to_owned()
    } else if value.is_nan() {
        "–".to_owned()
    } else {
        format!("{value:.0}")
    }
}

pub(crate) fn percent(value: f64) -> String {
    if value == 0.0 { "0".to_owned() } else { format!("{:.2} %", value * 100.0) }
}

/// The median, and the extremes over the seeds if they differ; a dash if there is no value.
pub(crate) fn spread(values: &[f64], format: impl Fn(f64) -> String) -> String {
    if values.iter().all(|value| value.is_nan()) {
        return "–".to_owned();
    }
    let (low, high) = min_max(values.iter().copied());
    let middle = format(crate::stats::median(values.iter().copied()));
    if format(low) == format(high) {
        middle
    } else {
        format!("{middle} ({}–{})", format(low), format(high))
    }
}
