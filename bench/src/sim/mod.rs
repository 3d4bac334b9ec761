//! The simulator: compares policies in virtual time, at a scale beyond any machine here, using the shipped types of
//! `prequal-core`.

pub(crate) mod balancer;
mod cache;
pub(crate) mod engine;
mod grid;
mod measure;
pub(crate) mod plans;
mod plb;
pub(crate) mod plot;
pub(crate) mod policies;
mod report;
pub(crate) mod scenario;
mod server;
mod speed;

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use std::{fs, io};

use anyhow::{Context as _, Result, bail};

use plans::{Cells, Experiment, NAMES, NOT_IN_CI, RunLength, sources};
use report::{Report, csv, spread};

/// Runs experiments: prints a table and verdicts, and writes CSV, SVG, and a section of the evaluation with its tables
/// to `--out`.
#[derive(clap::Args)]
pub(crate) struct Sim {
    /// Experiments by name. `all` runs every one and then writes docs/results/evaluation.md (not with --quick),
    /// `report` writes it from the results of earlier runs in --out, `list` lists the names
    #[arg(required = true)]
    experiments: Vec<String>,
    /// Shorter runs, fewer points, one seed: `all` takes up to three minutes. Fails if a goal is missed
    #[arg(long)]
    quick: bool,
    /// Seeds, comma-separated [default: 1,2,3; with --quick: 1]
    #[arg(long, value_delimiter = ',')]
    seeds: Vec<u64>,
    /// Output folder [default: target/sim; with --quick: target/sim/quick]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Only points whose label contains TEXT (`x` also matches `×`); may be repeated. Prints, but writes no files
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Only policies with this name, or if there is none, policies whose names contain it; comma-separated. Prints, but
    /// writes no files
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    arms: Vec<String>,
}

/// The part of an experiment to run, for work on a single rule.
struct Filter<'a> {
    points: &'a [String],
    arms: &'a [String],
}

impl Filter<'_> {
    fn is_off(&self) -> bool {
        self.points.is_empty() && self.arms.is_empty()
    }

    fn apply(&self, plan: &mut Experiment) {
        let plain = |text: &str| text.to_lowercase().replace('×', "x");
        let contains = |name: &str, text: &String| plain(name).contains(&plain(text));
        if !self.points.is_empty() {
            plan.points.retain(|point| self.points.iter().any(|text| contains(&point.label, text)));
        }
        for point in plan.points.iter_mut().filter(|_| !self.arms.is_empty()) {
            let names: Vec<String> = point.arms.iter().map(|(name, _)| name.clone()).collect();
            let meant = |name: &str, text: &String| {
                let exact = names.iter().find(|known| plain(known) == plain(text));
                exact.map_or_else(|| contains(name, text), |exact| name == exact)
            };
            point.arms.retain(|(name, _)| self.arms.iter().any(|text| meant(name, text)));
        }
        plan.points.retain(|point| !point.arms.is_empty());
    }
}

pub(crate) fn run(sim: &Sim) -> Result<()> {
    let length = RunLength { quick: sim.quick };
    let seeds = match (&sim.seeds[..], sim.quick) {
        ([], true) => vec![1],
        ([], false) => vec![1, 2, 3],
        (seeds, _) => seeds.to_vec(),
    };
    let default_out = if sim.quick { "target/sim/quick" } else { "target/sim" };
    let out = sim.out.clone().unwrap_or_else(|| default_out.into());
    let all = sim.experiments.iter().any(|name| name == "all");
    let mut names: Vec<&str> = Vec::new();
    for name in &sim.experiments {
        match name.as_str() {
            "all" => {
                names = NAMES.to_vec();
                // `speed` runs first, because the peak memory that it reports is that of the whole process.
                names.rotate_right(1);
                names.retain(|name| !(sim.quick && NOT_IN_CI.contains(name)));
            }
            "list" => println!("{}", NAMES.join("\n")),
            "report" => {}
            name if NAMES.contains(&name) => names.push(name),
            other => bail!("no experiment \"{other}\"; choose from: all, list, report, {}", NAMES.join(", ")),
        }
    }
    let filter = Filter { points: &sim.only, arms: &sim.arms };
    let mut missed = Vec::new();
    for name in names {
        // One seed is not enough for the goal on the share of the slow half, which only a few requests determine: over
        // eight seeds, the share was 0.04 to 0.18 %.
        let seeds = if name == "netflix" && sim.seeds.is_empty() { &[1, 2, 3] } else { &seeds[..] };
        let Some(report) = experiment(name, length, seeds, &filter)? else { continue };
        report.print();
        if filter.is_off() {
            report.write(&out)?;
        }
        let unreached = report.verdicts.iter().filter(|verdict| !verdict.reached);
        missed.extend(unreached.map(|verdict| format!("{name}: {}", verdict.what)));
    }
    if (all && !sim.quick && filter.is_off()) || sim.experiments.iter().any(|name| name == "report") {
        write_evaluation(&out)?;
    }
    if sim.quick && !missed.is_empty() {
        bail!("goals missed:\n  {}", missed.join("\n  "));
    }
    Ok(())
}

/// Runs one experiment; `None` if the filter leaves nothing to run.
fn experiment(name: &str, length: RunLength, seeds: &[u64], filter: &Filter<'_>) -> Result<Option<Report>> {
    match name {
        "plbsim" | "speed" if !filter.is_off() => return Ok(None),
        "plbsim" => return Ok(Some(plb::experiment(length.quick, seeds))),
        "speed" => return Ok(Some(speed::experiment(length.quick, seeds))),
        _ => {}
    }
    let mut plan = plans::plan(name, length).with_context(|| format!("no experiment \"{name}\""))?;
    filter.apply(&mut plan);
    if plan.points.is_empty() {
        return Ok(None);
    }
    let started = Instant::now();
    let shown = io::stderr().is_terminal();
    let cells = grid::run(&plan.points, &plan.metrics, seeds, |progress| {
        if shown {
            eprint!("\r{name}: {progress}, {:.0} s ", started.elapsed().as_secs_f64());
            let _ = io::stderr().flush();
        }
    });
    if shown {
        eprintln!();
    }
    let mut report = reduce(plan, Cells(cells), seeds);
    if !filter.is_off() {
        // A verdict is meaningless without the figures that it compares.
        report.verdicts.retain(|verdict| !verdict.got.contains("NaN") && !verdict.got.contains('–'));
    }
    Ok(Some(report))
}

/// Table, charts, verdicts and CSV of the cells that were run.
fn reduce(plan: Experiment, cells: Cells, seeds: &[u64]) -> Report {
    let mut header = vec!["point".to_owned(), "policy".to_owned()];
    header.extend(plan.columns.iter().map(|(name, ..)| (*name).to_owned()));
    let rows = cells.0.iter().map(|cell| {
        let figures = plan.columns.iter().map(|(_, metric, format)| spread(&cell.series(*metric), format));
        [cell.point.clone(), cell.arm.clone()].into_iter().chain(figures).collect()
    });
    let charts = plan.charts.iter().map(|(metric, logarithmic)| chart(&plan, &cells, *metric, *logarithmic));
    let charts = charts.chain(sources::charts(plan.name, &cells));
    Report {
        name: plan.name,
        title: plan.title,
        text: plan.text.to_owned(),
        header,
        rows: rows.collect(),
        statements: sources::statements(plan.name, &cells),
        charts: charts.collect(),
        verdicts: (plan.judge)(&cells),
        csv: csv_header(&plan, seeds) + &csv(plan.name, &cells.0, &plan.metrics),
    }
}

fn chart(plan: &Experiment, cells: &Cells, metric: usize, logarithmic: bool) -> plot::Chart {
    let mut arms: Vec<&str> = Vec::new();
    for cell in &cells.0 {
        if !arms.contains(&cell.arm.as_str()) {
            arms.push(&cell.arm);
        }
    }
    let value = |point: &str, arm: &str| {
        let cell = cells.0.iter().find(|cell| cell.point == point && cell.arm == arm);
        cell.map_or((f64::NAN, f64::NAN, f64::NAN), |cell| {
            let (low, high) = crate::stats::min_max(cell.series(metric));
            (cell.median(metric), low, high)
        })
    };
    // Points without a value for the metric are not drawn.
    let says = |point: &str| arms.iter().any(|arm| !value(point, arm).0.is_nan());
    let points: Vec<&str> =
        plan.points.iter().map(|point| &*point.label).filter(|point| says(point)).collect();
    let lines = arms.iter().map(|arm| plot::Line {
        label: (*arm).to_owned(),
        values: points.iter().map(|point| value(point, arm)).collect(),
    });
    let lines = lines.filter(|line| line.values.iter().any(|(middle, ..)| !middle.is_nan())).collect();
    let name = plan.metrics[metric].name;
    let column = plan.columns.iter().find(|(_, shown, _)| *shown == metric);
    let (title, format) =
        column.map_or((name, plans::two as fn(f64) -> String), |(title, _, format)| (*title, *format));
    plot::Chart {
        title: title.to_owned(),
        x_label: plan.x_label.to_owned(),
        points: points.iter().map(|point| (*point).to_owned()).collect(),
        lines,
        logarithmic,
        ceiling: name.ends_with("ms").then_some(5000.0),
        format,
    }
}

/// The comment line that every CSV begins with.
fn csv_comment(seeds: &[u64]) -> String {
    format!("# commit {}; seeds {seeds:?}\n", commit())
}

/// Comment lines of the CSV: commit, seeds and configuration.
fn csv_header(plan: &Experiment, seeds: &[u64]) -> String {
    let mut text = csv_comment(seeds);
    for point in &plan.points {
        let s = &point.scenario;
        let _ = write!(
            text,
            "# {}: {} clients, {:?}, sizes {:?}, keys {:?}, warm-up {} s, measured {} s, deadline {:?} s, changes {:?}",
            point.label, s.clients, s.load, s.sizes, s.keys, s.warm_up, s.measured, s.deadline, s.changes
        );
        let mut kinds: Vec<(usize, &scenario::ServerSpec)> = Vec::new();
        for server in &s.servers {
            match kinds.iter_mut().find(|(_, known)| *known == server) {
                Some((count, _)) => *count += 1,
                None => kinds.push((1, server)),
            }
        }
        for (count, server) in kinds {
            let _ = write!(text, "; {count} × {server:?}");
        }
        text.push('\n');
    }
    for (name, arm) in plan.points.iter().flat_map(|point| &point.arms) {
        let line = format!("# {name}: {arm:?}\n");
        if !text.contains(&line) {
            text += &line;
        }
    }
    text
}

fn commit() -> String {
    let git =
        |args: &[&str]| Command::new("git").args(args).output().ok().filter(|output| output.status.success());
    let Some(hash) = git(&["rev-parse", "--short", "HEAD"]) else { return "unknown".to_owned() };
    let dirty = git(&["status", "--porcelain", "--", "bench", "crates"])
        .is_some_and(|output| !output.stdout.is_empty());
    format!("{}{}", String::from_utf8_lossy(&hash.stdout).trim(), if dirty { ", changed" } else { "" })
}

/// Assembles docs/results/evaluation.md, its plots and its tables from the files of earlier runs.
fn write_evaluation(out: &Path) -> Result<()> {
    let statements = Path::new("docs/results/evaluation");
    fs::create_dir_all(statements)?;
    let mut text = include_str!("evaluation.md").to_owned();
    for name in NAMES {
        let [section, tables] = ["", "-tables"].map(|ending| out.join(format!("{name}{ending}.md")));
        text += "\n";
        text += fs::read_to_string(&section)
            .with_context(|| format!("{}: run the experiment `{name}` first", section.display()))?
            .trim_end();
        text += "\n";
        fs::copy(&tables, statements.join(format!("{name}.md")))
            .with_context(|| format!("{}: run the experiment `{name}` first", tables.display()))?;
        let plot = out.join(format!("{name}.svg"));
        if plot.is_file() {
            fs::copy(&plot, statements.join(format!("{name}.svg")))?;
        }
    }
    fs::write("docs/results/evaluation.md", text)?;
    println!("wrote docs/results/evaluation.md and the tables beside it");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs one experiment, shortened to half a second, and checks the files that are written.
    #[test]
    fn an_experiment_leaves_csv_plot_and_verdict() {
        let mut plan = plans::plan("ingress", RunLength { quick: true }).unwrap();
        plan.points.truncate(1);
        plan.points[0].arms.truncate(2);
        (plan.points[0].scenario.warm_up, plan.points[0].scenario.measured) = (0.1, 0.5);
        let cells = grid::run(&plan.points, &plan.metrics, &[4, 5], |_| ());
        let report = reduce(plan, Cells(cells), &[4, 5]);
        let folder = tempfile::tempdir().unwrap();
        report.write(folder.path()).unwrap();
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        let csv = read("ingress.csv");
        assert!(csv.starts_with("# commit ") && csv.contains("seeds [4, 5]"), "{csv}");
        assert!(
            csv.contains("14 × ServerSpec") && csv.contains("2 × ServerSpec"),
            "both kinds of server: {csv}"
        );
        assert_eq!(
            csv.lines().filter(|line| line.starts_with("ingress,")).count(),
            4,
            "a line per policy and seed"
        );
        assert!(read("ingress.svg").contains("to slow pair"));
        let page = read("ingress.md");
        assert!(
            page.contains("evaluation/ingress.svg") && page.contains("[All tables](evaluation/ingress.md)"),
            "{page}"
        );
        let tables = read("ingress-tables.md");
        assert!(tables.contains("RR, p99 ms with 1 client"), "{tables}");
    }

    #[test]
    fn a_filter_keeps_the_points_and_policies_that_it_names() {
        let kept = |points: &[&str], arms: &[&str]| -> Vec<String> {
            let [points, arms] =
                [points, arms].map(|texts| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>());
            let mut plan = plans::plan("fleets", RunLength { quick: true }).unwrap();
            Filter { points: &points, arms: &arms }.apply(&mut plan);
            let arms =
                |point: &grid::Point| point.arms.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
            plan.points.iter().map(|point| format!("{}: {}", point.label, arms(point).join(", "))).collect()
        };
        // `LL` is a policy's name, so it does not match LL-Po2C as well; `po2c` matches every name that contains it.
        assert_eq!(kept(&["12 x 4, Exactly"], &["LL", "rr"]), ["12 × 4, exactly 40, 90 %: RR, LL"]);
        assert_eq!(kept(&["12 × 4, exactly"], &["po2c"]), ["12 × 4, exactly 40, 90 %: LL-Po2C, YARP-Po2C"]);
        assert_eq!(kept(&[], &["no such policy"]), [""; 0]);
    }

    #[test]
    fn a_point_without_the_figure_is_not_drawn_and_shows_a_dash_in_the_table() {
        let plan = plans::plan("smallfleet", RunLength { quick: true }).unwrap();
        // Only closed loops have a throughput.
        let (metric, _) = *plan.charts.last().unwrap();
        let cells = plan.points.iter().map(|point| {
            let value = if point.label.starts_with("n = ") { f64::NAN } else { 100.0 };
            let values = vec![(1, vec![value; plan.metrics.len()]), (2, vec![value; plan.metrics.len()])];
            grid::Cell { point: point.label.clone(), arm: "LL".to_owned(), values }
        });
        let cells = Cells(cells.collect());
        let drawn = chart(&plan, &cells, metric, false);
        assert_eq!(drawn.points, ["0 ms", "0.5 ms"]);
        assert_eq!(drawn.lines.iter().map(|line| line.values.len()).collect::<Vec<_>>(), [2]);
        let table = reduce(plan, cells, &[1, 2]).rows;
        assert!(table[0][2..].iter().all(|cell| cell == "–"), "{table:?}");
    }

    #[test]
    fn every_experiment_has_a_plot() {
        for name in NAMES.into_iter().filter(|name| !["plbsim", "speed"].contains(name)) {
            let plan = plans::plan(name, RunLength { quick: false }).unwrap();
            assert!(
                !plan.charts.is_empty() || !sources::charts(name, &Cells(Vec::new())).is_empty(),
                "{name}"
            );
        }
    }
}
