//! The percentile plot: latency over quantile, both axes logarithmic, in one or more panels.
//!
//! The horizontal axis stretches the tail: 99 %, 99.9 % and 99.99 % are equally spaced. SVG only, so that no font
//! library is needed.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::prelude::*;

/// One line of a panel.
pub(crate) struct Curve {
    pub(crate) label: String,
    /// `(quantile, ms)` in ascending order.
    pub(crate) points: Vec<(f64, f64)>,
}

/// One chart: a title and its lines. Lines at the same position of different panels have the same colour.
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) curves: Vec<Curve>,
}

/// Colours that remain distinguishable with red-green blindness (Okabe and Ito).
const COLOURS: [RGBColor; 8] = [
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(240, 228, 66),
    RGBColor(0, 0, 0),
];
/// `depth(0.5)`, where the axis begins.
const MEDIAN: f64 = std::f64::consts::LOG10_2;
const FONT: &str = "sans-serif";

/// Draws the panels one below the other and writes them to `path`.
pub(crate) fn write(path: &Path, title: &str, panels: &[Panel]) -> Result<()> {
    let size = (1000, 60 + 420 * panels.len() as u32);
    let root = SVGBackend::new(path, size).into_drawing_area();
    let failed = |error: &dyn std::fmt::Display| anyhow!("drawing {}: {error}", path.display());
    root.fill(&WHITE).map_err(|error| failed(&error))?;
    let body = root.titled(title, (FONT, 22)).map_err(|error| failed(&error))?;
    for (area, panel) in body.split_evenly((panels.len(), 1)).iter().zip(panels) {
        draw(area, panel).map_err(|error| failed(&error))?;
    }
    root.present().map_err(|error| failed(&error))
}

/// Position of a quantile on the axis: one unit per factor of ten in the tail.
fn depth(quantile: f64) -> f64 {
    -(1.0 - quantile).log10()
}

/// An axis whose values are already logarithms, with ticks at round values.
struct LogAxis {
    low: f64,
    high: f64,
    ticks: Vec<f64>,
    label: fn(f64) -> String,
}

impl Ranged for LogAxis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        let share = (value - self.low) / (self.high - self.low);
        from + (share * f64::from(to - from)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.iter().copied().filter(|tick| (self.low..=self.high).contains(tick)).collect()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.low..self.high
    }
}

impl ValueFormatter<f64> for LogAxis {
    fn format(value: &f64) -> String {
        value.to_string()
    }

    fn format_ext(&self, value: &f64) -> String {
        (self.label)(*value)
    }
}

fn draw(area: &DrawingArea<SVGBackend<'_>, Shift>, panel: &Panel) -> Result<(), Box<dyn std::error::Error>> {
    let points = || panel.curves.iter().flat_map(|curve| &curve.points);
    let deepest = points().map(|(q, _)| depth(*q)).fold(2.0, f64::max);
    let (low, high) = crate::stats::min_max(points().map(|(_, ms)| *ms));
    if low > high {
        return Ok(());
    }
    let (bottom, top) = ((low * 0.8).log10(), (high * 1.6).log10());
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, (FONT, 18))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(
            LogAxis {
                low: MEDIAN,
                high: deepest + 0.05,
                label: percentile,
                ticks: vec![MEDIAN, 1.0, 2.0, 3.0, 4.0, 5.0],
            },
            LogAxis { low: bottom, high: top, label: milliseconds, ticks: ticks(low * 0.8, high * 1.6) },
        )?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .x_desc("share of requests answered (tail stretched)")
        .y_desc("latency from the due time, ms")
        .label_style((FONT, 14))
        .axis_desc_style((FONT, 15))
        .draw()?;
    for (index, curve) in panel.curves.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        // Earlier curves are wider, so that they stay visible on both sides of later ones where curves coincide.
        let style = colour.stroke_width(6u32.saturating_sub(2 * index as u32).max(3));
        let line = curve.points.iter().map(|(q, ms)| (depth(*q), ms.log10()));
        chart
            .draw_series(LineSeries::new(line, style))?
            .label(&curve.label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::MiddleRight)
        .margin(14)
        .legend_area_size(32)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.3))
        .label_font((FONT, 15))
        .draw()?;
    Ok(())
}

fn milliseconds(log: f64) -> String {
    let ms = 10f64.powf(log);
    if ms < 1.0 { format!("{ms:.1}") } else { format!("{ms:.0}") }
}

fn percentile(depth: f64) -> String {
    let percent = (1.0 - 10f64.powf(-depth)) * 100.0;
    let decimals = (depth.round() as usize).saturating_sub(2);
    format!("{percent:.decimals$} %")
}

/// Logarithms of 1, 2 and 5 times the powers of ten within the range.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    (-1..=5)
        .flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)))
        .filter(|tick| (low..=high).contains(tick))
        .map(f64::log10)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_labels_read_as_percentiles() {
        for (depth, label) in
            [(MEDIAN, "50 %"), (1.0, "90 %"), (2.0, "99 %"), (3.0, "99.9 %"), (4.0, "99.99 %")]
        {
            assert_eq!(percentile(depth), label);
        }
    }

    #[test]
    fn a_panel_without_samples_draws_nothing_and_does_not_fail() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("empty.svg");
        let curves = vec![Curve { label: "none".to_owned(), points: Vec::new() }];
        write(&path, "title", &[Panel { title: "one Envoy".to_owned(), curves }]).unwrap();
        assert!(std::fs::read_to_string(path).unwrap().contains("title"));
    }

    #[test]
    fn every_curve_is_named_in_the_drawing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plot.svg");
        let curve = |label: &str, knee: f64| Curve {
            label: label.to_owned(),
            points: (0..240)
                .map(|step| 1.0 - 0.5 * 10f64.powf(-f64::from(step) / 60.0))
                .map(|q| (q, if q < knee { 50.6 } else { 801.0 }))
                .collect(),
        };
        let panel = |title: &str| Panel {
            title: title.to_owned(),
            curves: vec![
                curve("round robin", 0.875),
                curve("least request, 2 choices", 0.977),
                curve("least request, full scan", 0.99),
                curve("Prequal", 1.0),
            ],
        };
        write(&path, "500 requests/s", &[panel("one Envoy"), panel("four Envoys")]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for label in ["round robin", "Prequal", "four Envoys", "99.9 %"] {
            assert!(text.contains(label), "{label}");
        }
        if let Some(keep) = std::env::var_os("PLOT_SAMPLE") {
            std::fs::copy(&path, keep).unwrap();
        }
    }
}
