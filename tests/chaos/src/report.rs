//! The table: on the terminal, and in `docs/results/reliability.md`.

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};
use prequal_testbed::workspace_root;

use crate::bed::Module;
use crate::fault::Goal;
use crate::run::Outcome;

/// One run and its verdict.
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) what: String,
    pub(crate) goal: Goal,
    pub(crate) outcome: Outcome,
    pub(crate) misses: Vec<String>,
}

/// The document that contains the table.
const DOCUMENT: &str = "docs/results/reliability.md";

/// The table as text, one line per run.
pub(crate) fn text(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
    let mut text = format!(
        "{:<width$}  {:>8}  {:>5}  {:>6}  {:>5}  {:>14}  {:>6}  verdict\n",
        "fault", "requests", "own", "errors", "late", "recovery/goal", "back"
    );
    for row in rows {
        let outcome = &row.outcome;
        let recovery = format!("{}/{} s", seconds(outcome.recovery), row.goal.recovery.as_secs());
        let _ = writeln!(
            text,
            "{:<width$}  {:>8}  {:>5}  {:>6}  {:>5}  {recovery:>14}  {:>6}  {}",
            row.name,
            outcome.requests,
            outcome.own,
            outcome.errors.len(),
            outcome.late,
            seconds(outcome.back),
            verdict(row),
        );
    }
    text
}

/// The number of goals met.
pub(crate) fn summary(rows: &[Row], impossible: &[String]) -> String {
    let met = rows.iter().filter(|row| row.misses.is_empty()).count();
    let mut text = format!("{met} of {} goals met\n", rows.len());
    for reason in impossible {
        let _ = writeln!(text, "impossible here: {reason}");
    }
    text
}

/// Returns the document's text before and after the table of `module`, with the comments that enclose the table.
pub(crate) fn around_table(module: Module) -> Result<(String, String)> {
    let command = match module {
        Module::Wasm => "cargo xtask chaos --write",
        Module::Native => "cargo xtask chaos --module native --write",
    };
    let [begin, end] = ["begin", "end"].map(|place| format!("<!-- {command}: {place} -->\n"));
    let text =
        fs::read_to_string(workspace_root().join(DOCUMENT)).with_context(|| format!("reading {DOCUMENT}"))?;
    let (before, rest) = text.split_once(&begin).with_context(|| format!("{DOCUMENT} has no {begin}"))?;
    let (_, after) = rest.split_once(&end).with_context(|| format!("{DOCUMENT} has no {end}"))?;
    Ok((before.to_owned() + &begin, end + after))
}

/// Replaces the table of `module` in the document. `how` says how the faults were run.
pub(crate) fn write(rows: &[Row], impossible: &[String], how: &str, module: Module) -> Result<()> {
    let (before, after) = around_table(module)?;
    let text = before + &markdown(rows, impossible, how) + &after;
    fs::write(workspace_root().join(DOCUMENT), text).with_context(|| format!("writing {DOCUMENT}"))
}

fn markdown(rows: &[Row], impossible: &[String], how: &str) -> String {
    let mut text = format!("\n{how}: {}\n", summary(rows, impossible));
    text += "| fault | what happens | own | errors | late | recovery (goal) | traffic back | goal met |\n";
    text += "|---|---|---|---|---|---|---|---|\n";
    for row in rows {
        let outcome = &row.outcome;
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} | {} | {} s ({} s) | {} s | {} |",
            row.name,
            row.what,
            outcome.own,
            outcome.errors.len(),
            outcome.late,
            seconds(outcome.recovery),
            row.goal.recovery.as_secs(),
            seconds(outcome.back),
            if row.misses.is_empty() { "yes" } else { "**no**" },
        );
    }
    let missed: Vec<&Row> = rows.iter().filter(|row| !row.misses.is_empty()).collect();
    if !missed.is_empty() {
        text += "\nMissed:\n\n";
        for row in missed {
            let _ = writeln!(text, "- `{}`: {}", row.name, row.misses.join("; ").replace('\n', " "));
        }
    }
    text.push('\n');
    text
}

/// `met`, or what was missed.
pub(crate) fn verdict(row: &Row) -> String {
    if row.misses.is_empty() { "met".to_owned() } else { format!("MISSED: {}", row.misses.join("; ")) }
}

fn seconds(time: Option<Duration>) -> String {
    time.map_or_else(|| "–".to_owned(), |time| format!("{:.1}", time.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_a_table_for_each_module() -> Result<()> {
        for module in [Module::Wasm, Module::Native] {
            around_table(module)?;
        }
        Ok(())
    }
}
