//! Text tables with aligned columns, and the formats of the figures in them.

/// Lays out `rows` under `header`; the first column is left-aligned, all others right-aligned.
pub(crate) fn render(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(header.get(column).map(|cell| cell.chars().count())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for (column, (cell, width)) in cells.zip(&widths).enumerate() {
            if column == 0 {
                line += &format!("{cell:<width$}");
            } else {
                line += &format!("  {cell:>width$}");
            }
        }
        line.truncate(line.trim_end().len());
        line + "\n"
    };
    let mut text = line(&mut header.iter().copied());
    text += &line(
        &mut widths.iter().map(|width| "-".repeat(*width)).collect::<Vec<_>>().iter().map(String::as_str),
    );
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

/// One figure per pass: the figure itself if there is one pass, else `lowest–highest`.
pub(crate) fn range(values: &[f64], format: impl Fn(f64) -> String) -> String {
    let Some((first, rest)) = values.split_first() else { return "–".to_owned() };
    let (low, high) = crate::stats::min_max(values.iter().copied());
    // A column without any number has no range.
    if rest.is_empty() || low > high || format(low) == format(high) {
        return format(*first);
    }
    format!("{}–{}", format(low), format(high))
}

/// One figure per pass: the figure itself if there is one pass, else `median (lowest–highest)`.
pub(crate) fn spread(values: &[f64], format: impl Fn(f64) -> String) -> String {
    let range = range(values, &format);
    let middle = format(crate::stats::median(values.iter().copied()));
    if range == middle || values.is_empty() { range } else { format!("{middle} ({range})") }
}

/// Milliseconds; `failed` for an infinite value, a quantile that failures reach.
pub(crate) fn ms(value: f64) -> String {
    if value.is_infinite() {
        "failed".to_owned()
    } else if value.is_nan() {
        "–".to_owned()
    } else {
        format!("{value:.1}")
    }
}

/// A share as a percentage with three decimals, because some goals are fractions of a percent.
pub(crate) fn percent(share: f64) -> String {
    if share.is_nan() { "–".to_owned() } else { format!("{:.3} %", share * 100.0) }
}

/// Two decimals.
pub(crate) fn two(value: f64) -> String {
    if value.is_nan() { "–".to_owned() } else { format!("{value:.2}") }
}

/// A number of occurrences.
pub(crate) fn count(value: f64) -> String {
    if value.is_nan() { "–".to_owned() } else { format!("{value:.0}") }
}

/// One decimal.
pub(crate) fn one(value: f64) -> String {
    if value.is_nan() { "–".to_owned() } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align() {
        let rows = [vec!["a".to_owned(), "1.0".to_owned()], vec!["longer".to_owned(), "10–12".to_owned()]];
        assert_eq!(
            render(&["arm", "ms"], &rows),
            "arm        ms\n------  -----\na         1.0\nlonger  10–12\n"
        );
    }

    #[test]
    fn several_passes_show_their_median() {
        assert_eq!(spread(&[50.6], ms), "50.6");
        assert_eq!(spread(&[50.0, 57.0, 51.0], ms), "51.0 (50.0–57.0)");
        assert_eq!(spread(&[50.0, 50.01], ms), "50.0");
        assert_eq!(spread(&[], ms), "–");
    }

    #[test]
    fn one_pass_has_no_range() {
        assert_eq!(range(&[50.61], ms), "50.6");
        assert_eq!(range(&[50.61, 50.62], ms), "50.6");
        assert_eq!(range(&[52.0, 50.0], ms), "50.0–52.0");
        assert_eq!(range(&[], ms), "–");
        assert_eq!(range(&[f64::NAN, f64::NAN], ms), "–");
    }
}
