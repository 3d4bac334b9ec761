//! Line charts over labelled points, one panel each, logarithmic or not. SVG only, so that no font library is needed.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

/// One panel.
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) x_label: String,
    pub(crate) y_label: String,
    /// Labels of the points, evenly spaced.
    pub(crate) points: Vec<String>,
    pub(crate) lines: Vec<Line>,
    pub(crate) logarithmic: bool,
    /// Values above are drawn here: the deadline.
    pub(crate) ceiling: Option<f64>,
}

/// One value per point of the chart: median, lowest and highest over the seeds; NaN is left out.
pub(crate) struct Line {
    pub(crate) label: String,
    pub(crate) values: Vec<(f64, f64, f64)>,
}

/// Distinguishable also with red-green blindness (Okabe and Ito).
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

/// Draws the charts below each other and writes `path`.
pub(crate) fn write(path: &Path, title: &str, charts: &[Chart]) -> Result<()> {
    let root = SVGBackend::new(path, (900, 50 + 340 * charts.len() as u32)).into_drawing_area();
    let failed = |error: &dyn std::fmt::Display| anyhow!("drawing {}: {error}", path.display());
    root.fill(&WHITE).map_err(|error| failed(&error))?;
    let body = root.titled(title, (FONT, 20)).map_err(|error| failed(&error))?;
    for (area, chart) in body.split_evenly((charts.len(), 1)).iter().zip(charts) {
        draw(area, chart).map_err(|error| failed(&error))?;
    }
    root.present().map_err(|error| failed(&error))
}

fn draw(area: &DrawingArea<SVGBackend<'_>, Shift>, chart: &Chart) -> Result<(), Box<dyn std::error::Error>> {
    let cap = |value: f64| chart.ceiling.map_or(value, |ceiling| value.min(ceiling));
    let scale = |value: f64| if chart.logarithmic { cap(value).max(1e-9).log10() } else { cap(value) };
    let all = chart.lines.iter().flat_map(|line| &line.values).flat_map(|(_, low, high)| [*low, *high]);
    let (low, high) = crate::stats::min_max(all.map(scale).filter(|value| value.is_finite()));
    if low > high || chart.points.is_empty() {
        return Ok(());
    }
    let low = if chart.logarithmic { low } else { low.min(0.0) };
    let margin = ((high - low) * 0.06).max(1e-6);
    let last = chart.points.len() - 1;
    let mut context = ChartBuilder::on(area)
        .caption(&chart.title, (FONT, 16))
        .margin(8)
        .margin_right(190)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(-0.3..last as f64 + 0.3, low..high + margin)?;
    let labels = |position: &f64| {
        let nearest = position.round();
        let label = chart.points.get(nearest.max(0.0) as usize).filter(|_| (position - nearest).abs() < 1e-6);
        label.cloned().unwrap_or_default()
    };
    let values = |value: &f64| {
        let value = if chart.logarithmic { 10f64.powf(*value) } else { *value };
        if value >= 100.0 {
            format!("{value:.0}")
        } else if value >= 1.0 || value == 0.0 {
            format!("{value:.1}")
        } else {
            format!("{value:.3}")
        }
    };
    context
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .x_labels(chart.points.len() * 4)
        .x_label_formatter(&labels)
        .y_label_formatter(&values)
        .x_desc(&chart.x_label)
        .y_desc(&chart.y_label)
        .label_style((FONT, 12))
        .axis_desc_style((FONT, 13))
        .draw()?;
    for (index, line) in chart.lines.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let known = || line.values.iter().enumerate().filter(|(_, (middle, ..))| !middle.is_nan());
        let style =
            if index < COLOURS.len() { colour.stroke_width(2) } else { colour.mix(0.5).stroke_width(2) };
        context
            .draw_series(LineSeries::new(known().map(|(x, (middle, ..))| (x as f64, scale(*middle))), style))?
            .label(&line.label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
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
    context
        .configure_series_labels()
        .position(SeriesLabelPosition::Coordinate(660, 4))
        .legend_area_size(24)
        .background_style(WHITE.mix(0.9))
        .label_font((FONT, 12))
        .draw()?;
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
        let chart = Chart {
            title: "p99".to_owned(),
            x_label: "load".to_owned(),
            y_label: "ms".to_owned(),
            points: ["0.75x", "0.83x", "0.93x"].map(str::to_owned).to_vec(),
            lines: vec![line("WRR", f64::INFINITY), line("Prequal", 90.0)],
            logarithmic: true,
            ceiling: Some(5000.0),
        };
        write(&path, "ramp", &[chart]).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        for label in ["WRR", "Prequal", "0.75x", "0.93x", "ramp"] {
            assert!(text.contains(label), "{label}");
        }
        assert!(!text.contains("inf"));
    }
}
