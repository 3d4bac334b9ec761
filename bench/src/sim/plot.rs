//! Line charts over an axis of points, and dot charts with a named row for each line. Each chart is one panel,
//! logarithmic or linear. SVG only, so that no font library is needed.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::*;

/// One panel.
pub(crate) struct Chart {
    /// The quantity that is drawn.
    pub(crate) title: String,
    /// The quantity that varies from point to point. Empty if the points do not form an axis: then each line is a row
    /// of dots, one per point.
    pub(crate) x_label: String,
    /// Labels of the points, evenly spaced.
    pub(crate) points: Vec<String>,
    pub(crate) lines: Vec<Line>,
    pub(crate) logarithmic: bool,
    /// The deadline: values above it are drawn at it.
    pub(crate) ceiling: Option<f64>,
    /// Formats a value for the axis.
    pub(crate) format: fn(f64) -> String,
}

impl Chart {
    /// Pixels.
    fn height(&self) -> u32 {
        if self.x_label.is_empty() { 90 + 20 * self.lines.len() as u32 } else { 340 }
    }

    fn scale(&self, value: f64) -> f64 {
        let value = self.ceiling.map_or(value, |ceiling| value.min(ceiling));
        if self.logarithmic { value.max(1e-9).log10() } else { value }
    }

    /// The range of the value axis, scaled; `None` without any value.
    fn range(&self) -> Option<(f64, f64)> {
        let all = self.lines.iter().flat_map(|line| &line.values).flat_map(|(_, low, high)| [*low, *high]);
        // Zero has no logarithm, so it is drawn at the lower end.
        let shown = all.filter(|value| !self.logarithmic || *value > 0.0).map(|value| self.scale(value));
        let (low, high) = crate::stats::min_max(shown.filter(|value| value.is_finite()));
        let low = if self.logarithmic { low } else { low.min(0.0) };
        let margin = ((high - low) * 0.06).max(1e-6);
        let below = if self.logarithmic { margin } else { 0.0 };
        (low <= high && !self.points.is_empty()).then_some((low - below, high + margin))
    }

    /// Round values within the range, scaled.
    fn ticks(&self, low: f64, high: f64) -> Vec<f64> {
        if !self.logarithmic {
            return steps(low, high);
        }
        let decades = || (low.floor() as i32..=high.floor() as i32).map(|power| 10f64.powi(power));
        let fine = decades().flat_map(|decade| [1.0, 2.0, 5.0].map(|times| (times * decade).log10()));
        let inside = |at: &f64| (low..=high).contains(at);
        match fine.filter(inside).collect::<Vec<_>>() {
            // Within less than an octave a logarithmic axis is nearly linear.
            few if few.len() < 3 => {
                steps(10f64.powf(low), 10f64.powf(high)).into_iter().map(f64::log10).filter(inside).collect()
            }
            many if many.len() > 10 => decades().map(f64::log10).filter(inside).collect(),
            some => some,
        }
    }

    fn label(&self, scaled: f64) -> String {
        // A tick has few digits, but converting its logarithm back adds a small error.
        let value = if self.logarithmic { 10f64.powf(scaled) * (1.0 + 1e-12) } else { scaled };
        (self.format)(value)
    }
}

/// One value per point of the chart: median, lowest and highest over the seeds; NaN values are omitted.
pub(crate) struct Line {
    pub(crate) label: String,
    pub(crate) values: Vec<(f64, f64, f64)>,
}

/// Multiples of 1, 2 or 5 times a power of ten: four to ten of them.
fn steps(low: f64, high: f64) -> Vec<f64> {
    // If the range is empty, avoid endless ticks.
    let rough = ((high - low) / 10.0).max(high.abs().max(1e-3) * 1e-6);
    let decade = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|times| times * decade).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(decade);
    let first = (low / step).ceil() as i64;
    (first..).map(|index| index as f64 * step).take_while(|at| *at <= high).take(20).collect()
}

/// An axis that rises or falls, with given ticks.
struct TickAxis {
    from: f64,
    to: f64,
    ticks: Vec<f64>,
}

impl TickAxis {
    /// An axis with ticks for `count` names at 0, 1, 2 and so on.
    fn of_names(from: f64, to: f64, count: usize) -> Self {
        Self { from, to, ticks: (0..count).map(|index| index as f64).collect() }
    }
}

impl Ranged for TickAxis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (first, last): (i32, i32)) -> i32 {
        first + ((value - self.from) / (self.to - self.from) * f64::from(last - first)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks.clone() }
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.from..self.to
    }
}

/// Colours that remain distinguishable with red-green blindness (Okabe and Ito).
const COLOURS: [RGBColor; 8] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(204, 121, 167),
    RGBColor(0, 0, 0),
    RGBColor(120, 120, 120),
];
const FONT: &str = "sans-serif";

/// Draws the charts one below the other and writes them to `path`.
pub(crate) fn write(path: &Path, title: &str, charts: &[Chart]) -> Result<()> {
    let height = 50 + charts.iter().map(Chart::height).sum::<u32>();
    let root = SVGBackend::new(path, (900, height)).into_drawing_area();
    let failed = |error: &dyn std::fmt::Display| anyhow!("drawing {}: {error}", path.display());
    root.fill(&WHITE).map_err(|error| failed(&error))?;
    let mut below = root.titled(title, (FONT, 20)).map_err(|error| failed(&error))?;
    for chart in charts {
        let (area, rest) = below.split_vertically(chart.height());
        let drawn = if chart.x_label.is_empty() { draw_dots(&area, chart) } else { draw_lines(&area, chart) };
        drawn.map_err(|error| failed(&error))?;
        below = rest;
    }
    root.present().map_err(|error| failed(&error))
}

type Drawn = Result<(), Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws the legend beside the plot, starting at its top: the library's own legend would be inside the plot.
fn legend<'a>(area: &Area<'_>, labels: impl Iterator<Item = &'a str>) -> Drawn {
    for (row, label) in labels.enumerate() {
        let y = 44 + 18 * row as i32;
        area.draw(&Circle::new((722, y), 5, colour(row).filled()))?;
        area.draw(&Text::new(label.to_owned(), (734, y - 6), (FONT, 12)))?;
    }
    Ok(())
}

fn colour(index: usize) -> RGBAColor {
    COLOURS[index % COLOURS.len()].mix(if index < COLOURS.len() { 1.0 } else { 0.5 })
}

fn draw_lines(area: &Area<'_>, chart: &Chart) -> Drawn {
    let Some((low, high)) = chart.range() else { return Ok(()) };
    let scale = |value: f64| chart.scale(value).max(low);
    let points = chart.points.len();
    let mut context = ChartBuilder::on(area)
        .caption(&chart.title, (FONT, 16))
        .margin(8)
        .margin_right(190)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(
            TickAxis::of_names(-0.3, points as f64 - 0.7, points),
            TickAxis { from: low, to: high, ticks: chart.ticks(low, high) },
        )?;
    context
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .x_labels(chart.points.len())
        .x_label_formatter(&|at| chart.points.get(at.round() as usize).cloned().unwrap_or_default())
        .y_label_formatter(&|at| chart.label(*at))
        .x_desc(&chart.x_label)
        .label_style((FONT, 12))
        .axis_desc_style((FONT, 13))
        .draw()?;
    for (index, line) in chart.lines.iter().enumerate() {
        let colour = colour(index);
        let known = || line.values.iter().enumerate().filter(|(_, (middle, ..))| !middle.is_nan());
        let style = colour.stroke_width(2);
        context.draw_series(LineSeries::new(
            known().map(|(x, (middle, ..))| (x as f64, scale(*middle))),
            style,
        ))?;
        context.draw_series(
            known().map(|(x, (middle, ..))| Circle::new((x as f64, scale(*middle)), 3, colour.filled())),
        )?;
        let bars = known().filter(|(_, (_, low, high))| scale(*high) > scale(*low));
        context.draw_series(bars.map(|(x, (_, low, high))| {
            PathElement::new(
                [(x as f64, scale(*low)), (x as f64, scale(*high))],
                colour.mix(0.6).stroke_width(1),
            )
        }))?;
    }
    legend(area, chart.lines.iter().map(|line| line.label.as_str()))?;
    Ok(())
}

/// One row per line from the top, one dot per point, and a bar from the lowest to the highest seed.
fn draw_dots(area: &Area<'_>, chart: &Chart) -> Drawn {
    let Some((low, high)) = chart.range() else { return Ok(()) };
    let scale = |value: f64| chart.scale(value).max(low);
    let rows = chart.lines.len();
    let mut context = ChartBuilder::on(area)
        .caption(&chart.title, (FONT, 16))
        .margin(8)
        .margin_right(190)
        .x_label_area_size(30)
        .y_label_area_size(170)
        .build_cartesian_2d(
            TickAxis { from: low, to: high, ticks: chart.ticks(low, high) },
            TickAxis::of_names(rows as f64 - 0.4, -0.6, rows),
        )?;
    context
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .x_label_formatter(&|at| chart.label(*at))
        .y_labels(rows)
        .y_label_formatter(&|at| {
            chart.lines.get(at.round() as usize).map(|line| line.label.clone()).unwrap_or_default()
        })
        .label_style((FONT, 12))
        .draw()?;
    let points = chart.points.len();
    for index in 0..points {
        let colour = colour(index);
        // Dots in one row are slightly offset vertically, so that equal values stay visible.
        let offset = (index as f64 - (points as f64 - 1.0) / 2.0) * (0.6 / points as f64);
        let values = || {
            chart.lines.iter().enumerate().filter_map(move |(row, line)| {
                let value = line.values.get(index).copied().filter(|(middle, ..)| !middle.is_nan())?;
                Some((row as f64 + offset, value))
            })
        };
        context.draw_series(values().map(|(y, (_, low, high))| {
            PathElement::new([(scale(low), y), (scale(high), y)], colour.mix(0.6).stroke_width(1))
        }))?;
        context.draw_series(
            values().map(|(y, (middle, ..))| Circle::new((scale(middle), y), 4, colour.filled())),
        )?;
    }
    if points > 1 {
        legend(area, chart.points.iter().map(String::as_str))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_and_point_is_named_and_a_timeout_is_drawn_at_the_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chart.svg");
        let line = |label: &str, last: f64| Line {
            label: label.to_owned(),
            values: vec![(80.0, 79.0, 82.0), (f64::NAN, f64::NAN, f64::NAN), (last, last, last)],
        };
        let chart = |x_label: &str| Chart {
            title: "p99".to_owned(),
            x_label: x_label.to_owned(),
            points: ["0.75x", "0.83x", "0.93x"].map(str::to_owned).to_vec(),
            lines: vec![line("WRR", f64::INFINITY), line("Prequal", 90.0)],
            logarithmic: true,
            ceiling: Some(5000.0),
            format: |ms| format!("{ms:.0} ms"),
        };
        write(&path, "ramp", &[chart("load"), chart("")]).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        // Each label appears once in the line chart and once in the dot chart.
        for label in ["WRR", "Prequal", "0.75x", "0.93x", "p99"] {
            assert_eq!(text.matches(&format!("\n{label}\n")).count(), 2, "{label}");
        }
        assert!(text.contains("ramp") && text.contains("2000 ms") && text.contains("100 ms"));
        assert!(!text.contains("inf"));
        assert_eq!(text.matches("cx=\"722\"").count(), 2 + 3, "every name in a legend has its colour");
    }

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(
            steps(0.0, 0.93),
            [0.0, 0.1, 0.2, 0.30000000000000004, 0.4, 0.5, 0.6000000000000001, 0.7000000000000001, 0.8, 0.9]
        );
        assert_eq!(steps(-1.0, 13.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0]);
        assert_eq!(steps(360.0, 360.0).len(), 1);
    }
}
