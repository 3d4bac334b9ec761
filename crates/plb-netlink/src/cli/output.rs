//! Tables and JSON.

use serde_json::{Value, json};

/// How to print, and whether to make changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    pub(crate) json: bool,
    pub(crate) dry_run: bool,
}

impl Output {
    /// Prints the JSON if `--json` was given, otherwise the result of `human`.
    pub(crate) fn print(self, value: &Value, human: impl FnOnce() -> String) {
        if self.json {
            line(&format!("{value:#}"));
        } else {
            line(human().trim_end());
        }
    }

    /// Prints a change that was made, or that would be made without `--dry-run`.
    pub(crate) fn changed(self, what: &str, details: Value) {
        let value = json!({"changed": !self.dry_run, "what": what, "details": details});
        self.print(&value, || if self.dry_run { format!("would do: {what}") } else { what.to_owned() });
    }
}

/// Prints a line; if the reader has gone away, the command ends quietly.
pub(crate) fn line(text: &str) {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{text}").and_then(|()| out.flush()).is_err() {
        std::process::exit(0);
    }
}

/// Formats a table: each column is as wide as its widest cell, with two spaces between columns.
pub(crate) fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let mut widths = header.map(str::len);
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let render = |cells: &[&str]| {
        let mut text = String::new();
        for (cell, width) in cells.iter().zip(widths) {
            text.push_str(&format!("{cell:width$}  "));
        }
        text.trim_end().to_owned()
    };
    let mut lines = vec![render(&header)];
    lines.extend(rows.iter().map(|row| render(&row.each_ref().map(String::as_str))));
    lines.join("\n")
}

/// Formats a value; `-` if it is unknown.
pub(crate) fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [["a".to_owned(), "long cell".to_owned()], ["bb".to_owned(), String::new()]];
        assert_eq!(table(["x", "y"], &rows), "x   y\na   long cell\nbb");
    }
}
