//! An experiment in the evaluation: its short section of the page, and its tables in a file beside the page.

use std::fmt::Write as _;

use super::{Report, Statement, Verdict};

/// Maximum number of columns of figures in the section's table. With more points than this, the points become rows.
const MOST_COLUMNS: usize = 10;

/// Maximum number of rows of the section's table. With more points than this, only the file of tables has them.
const MOST_ROWS: usize = 80;

/// The policies that the section's table shows if there are too many points and too many policies for all.
const SHOWN: [&str; 6] = ["RR", "LL", "CSWRR", "C3", "Prequal (paper)", "Prequal (ours)"];

/// The section: text, plot, missed goals, and a table of medians.
pub(super) fn section(report: &Report) -> String {
    let mut page = format!("## {}: {}\n\n{}\n\n", report.name, report.title, report.text.trim());
    if !report.charts.is_empty() {
        let _ = writeln!(page, "![{}](evaluation/{}.svg)\n", report.title, report.name);
    }
    let reached = report.verdicts.iter().filter(|verdict| verdict.reached).count();
    let _ = write!(page, "Goals reached: {reached} of {}.", report.verdicts.len());
    if !report.statements.is_empty() {
        let holds = report.statements.iter().filter(|statements| statements.holds).count();
        let _ = write!(
            page,
            " Statements of the source that the simulator reproduces: {holds} of {}.",
            report.statements.len()
        );
    }
    let _ = writeln!(page, " [All tables](evaluation/{}.md).\n", report.name);
    let missed: Vec<&Verdict> = report.verdicts.iter().filter(|verdict| !verdict.reached).collect();
    for verdict in &missed {
        let _ = writeln!(page, "- {}", verdict.line());
    }
    if !missed.is_empty() {
        page.push('\n');
    }
    page + &summary(report)
}

/// The file of tables: the source's statements, and every figure with its extremes.
pub(super) fn tables(report: &Report) -> String {
    let mut page = format!(
        "# {}: {}\n\nThe tables of an experiment in [the evaluation](../evaluation.md), which explains it.\n\n",
        report.name, report.title
    );
    if !report.statements.is_empty() {
        page += "## Compared with the source\n\n";
        let header = ["the source states", "source", "here", "reproduces"].map(str::to_owned);
        page += &table(&header, report.statements.iter().map(Statement::cells));
    }
    page += "## Goals\n\n";
    for verdict in &report.verdicts {
        let _ = writeln!(page, "- {}", verdict.line());
    }
    page += "\n## All figures\n\n";
    page + table(&report.header, report.rows.iter().cloned()).trim_end() + "\n"
}

/// The medians of one figure, by policy and point. An experiment with one point or one policy shows all figures, and
/// one without policies its whole table. There is no table if it would be too long.
fn summary(report: &Report) -> String {
    if report.header.get(1).is_none_or(|column| column != "policy") {
        return table(&report.header, report.rows.iter().cloned());
    }
    let (points, policies) = (distinct(report, 0), distinct(report, 1));
    if points.len() > MOST_ROWS {
        return String::new();
    }
    if points.len() == 1 || policies.len() == 1 {
        let left_out = usize::from(points.len() > 1);
        let keep = |cells: &[String]| {
            let kept = cells.iter().enumerate().filter(|(column, _)| *column != left_out);
            kept.map(|(_, cell)| median(cell).to_owned()).collect::<Vec<_>>()
        };
        return table(&keep(&report.header), report.rows.iter().map(|row| keep(row)));
    }
    let Some(figure) = headline(report) else { return table(&report.header, report.rows.iter().cloned()) };
    let cell = |point: &str, policy: &str| {
        let row = report.rows.iter().find(|row| row[0] == point && row[1] == policy);
        row.map_or_else(|| "–".to_owned(), |row| median(&row[figure]).to_owned())
    };
    let name = &report.header[figure];
    if points.len() <= MOST_COLUMNS {
        let header = std::iter::once(name.as_str()).chain(points.iter().copied());
        let rows = policies.iter().map(|policy| {
            let figures = points.iter().map(|point| cell(point, policy));
            std::iter::once((*policy).to_owned()).chain(figures).collect()
        });
        return table(&header.map(str::to_owned).collect::<Vec<_>>(), rows);
    }
    let fits = policies.len() <= MOST_COLUMNS;
    let shown: Vec<&str> = policies.into_iter().filter(|policy| fits || SHOWN.contains(policy)).collect();
    let header = std::iter::once(name.as_str()).chain(shown.iter().copied());
    let rows = points.iter().map(|point| {
        let figures = shown.iter().map(|policy| cell(point, policy));
        std::iter::once((*point).to_owned()).chain(figures).collect()
    });
    table(&header.map(str::to_owned).collect::<Vec<_>>(), rows)
}

/// The column of the figure that the first plot shows, or of the p99.
fn headline(report: &Report) -> Option<usize> {
    let column = |name: &str| report.header.iter().position(|column| column == name);
    report.charts.first().and_then(|chart| column(&chart.title)).or_else(|| column("p99 ms"))
}

/// The values of a column, in the order of their first appearance.
fn distinct(report: &Report, column: usize) -> Vec<&str> {
    let mut values: Vec<&str> = Vec::new();
    for row in &report.rows {
        if !values.contains(&row[column].as_str()) {
            values.push(&row[column]);
        }
    }
    values
}

/// A cell without the extremes that follow the median in brackets.
fn median(cell: &str) -> &str {
    cell.split_once(" (").filter(|(_, rest)| rest.contains('–')).map_or(cell, |(median, _)| median)
}

fn table(header: &[String], rows: impl Iterator<Item = Vec<String>>) -> String {
    let row = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = row(header) + &format!("|{}\n", "---|".repeat(header.len()));
    for cells in rows {
        text += &row(&cells);
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A report of these points and policies whose p99 is `10 (9–12)`.
    fn report(points: &[String], policies: &[&str]) -> Report {
        let rows = points.iter().flat_map(|point| {
            let row = |policy: &&str| {
                vec![point.clone(), (*policy).to_owned(), "1".to_owned(), "10 (9–12)".to_owned()]
            };
            policies.iter().map(row)
        });
        Report {
            name: "load",
            title: "load ramp",
            text: "Text.".to_owned(),
            header: ["point", "policy", "p50 ms", "p99 ms"].map(str::to_owned).to_vec(),
            rows: rows.collect(),
            statements: vec![Statement::new("p99", "9", "10", false), Statement::new("p50", "1", "1", true)],
            charts: Vec::new(),
            verdicts: vec![
                Verdict::new("p99 at most 20", true, "10"),
                Verdict::new("p99 at most 9", false, "10"),
            ],
            csv: String::new(),
        }
    }

    fn points(count: usize) -> Vec<String> {
        (0..count).map(|point| format!("{point}x")).collect()
    }

    #[test]
    fn the_section_has_missed_goals_and_medians_and_the_tables_have_the_rest() {
        let report = report(&points(2), &["RR", "LL"]);
        let section = section(&report);
        assert!(section.contains("Goals reached: 1 of 2."), "{section}");
        assert!(section.contains("reproduces: 1 of 2. [All tables](evaluation/load.md)"), "{section}");
        assert!(section.contains("- MISSED: p99 at most 9") && !section.contains("- reached"), "{section}");
        assert!(
            section.ends_with("| p99 ms | 0x | 1x |\n|---|---|---|\n| RR | 10 | 10 |\n| LL | 10 | 10 |\n\n"),
            "{section}"
        );
        let tables = tables(&report);
        assert!(
            tables.contains("- reached: p99 at most 20") && tables.contains("| p99 | 9 | 10 | **no** |"),
            "{tables}"
        );
        assert!(tables.contains("| 1x | LL | 1 | 10 (9–12) |"), "{tables}");
    }

    #[test]
    fn the_summary_fits_the_page() {
        let first = |points: usize, policies: &[&str]| {
            summary(&report(&self::points(points), policies)).lines().next().unwrap_or_default().to_owned()
        };
        assert_eq!(first(1, &["RR", "LL"]), "| policy | p50 ms | p99 ms |");
        assert_eq!(first(2, &["RR"]), "| point | p50 ms | p99 ms |");
        assert_eq!(first(11, &["RR", "LL"]), "| p99 ms | RR | LL |");
        let many: Vec<String> = (0..11).map(|policy| format!("P{policy}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).chain(["LL", "C3"]).collect();
        assert_eq!(first(11, &many), "| p99 ms | LL | C3 |");
        assert_eq!(first(MOST_ROWS, &["RR", "LL"]), "| p99 ms | RR | LL |");
        assert_eq!(first(MOST_ROWS + 1, &["RR", "LL"]), "");
    }

    #[test]
    fn a_median_loses_only_its_extremes() {
        assert_eq!(median("10 (9–12)"), "10");
        assert_eq!(median("0.58 % (0.46 %–2.85 %)"), "0.58 %");
        assert_eq!(median("Prequal (paper)"), "Prequal (paper)");
        assert_eq!(median("–"), "–");
    }
}
