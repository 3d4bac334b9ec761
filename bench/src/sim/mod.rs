//! The simulator: policies against each other in virtual time, at a scale no machine here has, driving the very types of
//! `prequal-core` that ship.

mod balancer;
mod engine;
mod grid;
mod measure;
mod plans;
mod plb;
mod plot;
mod report;
mod scenario;
mod server;
mod speed;

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use std::{fs, io};

use anyhow::{Context as _, Result, bail};

use plans::{Cells, Length, NAMES, Plan};
use report::{Report, csv, spread};

/// Runs experiments: a table and a verdict on standard output, CSV, SVG and a page of the report in `--out`.
#[derive(clap::Args)]
pub(crate) struct Sim {
    /// Experiments by name; `all` runs every one and then writes docs/evaluation.md (not with --quick), `report` writes it
    /// from what earlier runs left in --out, `list` names them
    #[arg(required = true)]
    experiments: Vec<String>,
    /// Shorter runs, fewer points, one seed: at most three minutes for `all`. Fails when a bar is missed that is not
    /// known to be
    #[arg(long)]
    quick: bool,
    /// Seeds, comma-separated [default: 1,2,3; with --quick: 1]
    #[arg(long, value_delimiter = ',')]
    seeds: Vec<u64>,
    /// Where the files go [default: target/sim; with --quick: target/sim/quick]
    #[arg(long)]
    out: Option<PathBuf>,
}

pub(crate) fn run(sim: &Sim) -> Result<()> {
    let length = Length { quick: sim.quick };
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
                // `speed` goes first: the peak of memory that it reports is the process's.
                names.rotate_right(1);
            }
            "list" => println!("{}", NAMES.join("\n")),
            "report" => {}
            name if NAMES.contains(&name) => names.push(name),
            other => bail!("no experiment \"{other}\"; there are: all, list, report, {}", NAMES.join(", ")),
        }
    }
    let mut missed = Vec::new();
    for name in names {
        let report = experiment(name, length, &seeds)?;
        report.print();
        report.write(&out)?;
        let bars = report.verdicts.iter().filter(|verdict| !verdict.reached);
        missed.extend(bars.map(|verdict| format!("{name}: {}", verdict.what)));
    }
    if (all && !sim.quick) || sim.experiments.iter().any(|name| name == "report") {
        write_evaluation(&out)?;
    }
    if sim.quick {
        missed.retain(|bar| !KNOWN_MISSES.contains(&bar.as_str()));
        if !missed.is_empty() {
            bail!("bars missed that used to be reached:\n  {}", missed.join("\n  "));
        }
    }
    Ok(())
}

/// Bars that `--quick` misses, and why that is no regression. `docs/evaluation.md` has the full runs.
const KNOWN_MISSES: [&str; 2] = [
    // Two seconds have too few large requests for a p99.
    "plbsim: 1:2: p99 of large requests with PLB within 20 % of even weights (paper 1.0)",
    // Even weights repath more often here than in the paper, where cross-traffic and think times are unknown.
    "plbsim: 1:100: repaths over those at even weights, above 5 (paper 14)",
];

fn experiment(name: &str, length: Length, seeds: &[u64]) -> Result<Report> {
    match name {
        "plbsim" => return Ok(plb::experiment(length.quick, seeds)),
        "speed" => return Ok(speed::experiment(length.quick)),
        _ => {}
    }
    let plan = plans::plan(name, length).with_context(|| format!("no experiment \"{name}\""))?;
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
    Ok(reduce(plan, Cells(cells), seeds))
}

/// Table, charts, verdicts and CSV of what was run.
fn reduce(plan: Plan, cells: Cells, seeds: &[u64]) -> Report {
    let mut header = vec!["point".to_owned(), "policy".to_owned()];
    header.extend(plan.columns.iter().map(|(name, ..)| (*name).to_owned()));
    let rows = cells.0.iter().map(|cell| {
        let figures = plan.columns.iter().map(|(_, metric, format)| spread(&cell.series(*metric), format));
        [cell.point.clone(), cell.arm.clone()].into_iter().chain(figures).collect()
    });
    let charts = plan.charts.iter().map(|(metric, logarithmic)| chart(&plan, &cells, *metric, *logarithmic));
    Report {
        name: plan.name,
        title: plan.title,
        text: plan.text.to_owned(),
        header,
        rows: rows.collect(),
        charts: charts.collect(),
        verdicts: (plan.judge)(&cells),
        csv: head(&plan, seeds) + &csv(plan.name, &cells.0, &plan.metrics),
    }
}

fn chart(plan: &Plan, cells: &Cells, metric: usize, logarithmic: bool) -> plot::Chart {
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
    let lines = arms.into_iter().map(|arm| plot::Line {
        label: arm.to_owned(),
        values: plan.points.iter().map(|point| value(&point.label, arm)).collect(),
    });
    let name = plan.metrics[metric].name;
    plot::Chart {
        title: name.replace('_', " "),
        x_label: plan.x_label.to_owned(),
        y_label: name.replace('_', " "),
        points: plan.points.iter().map(|point| point.label.clone()).collect(),
        lines: lines.collect(),
        logarithmic,
        ceiling: name.ends_with("ms").then_some(5000.0),
    }
}

/// Comment lines of the CSV: commit, seeds and configuration.
fn head(plan: &Plan, seeds: &[u64]) -> String {
    let mut text = format!("# commit {}; seeds {seeds:?}\n", commit());
    for point in &plan.points {
        let s = &point.scenario;
        let _ = writeln!(
            text,
            "# {}: {} clients, {} servers, {:?}, variation {}, warm-up {} s, measured {} s, deadline {:?} s; first {:?}",
            point.label,
            s.clients,
            s.servers.len(),
            s.load,
            s.variation,
            s.warm_up,
            s.measured,
            s.deadline,
            s.servers[0]
        );
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

/// Puts the pages of earlier runs together as docs/evaluation.md, with their plots.
fn write_evaluation(out: &Path) -> Result<()> {
    let plots = Path::new("docs/evaluation");
    fs::create_dir_all(plots)?;
    let mut text = include_str!("evaluation.md").to_owned();
    for name in NAMES {
        let page = out.join(format!("{name}.md"));
        text += "\n";
        text += &fs::read_to_string(&page)
            .with_context(|| format!("{}: run the experiment `{name}` first", page.display()))?;
        let plot = out.join(format!("{name}.svg"));
        if plot.is_file() {
            fs::copy(&plot, plots.join(format!("{name}.svg")))?;
        }
    }
    fs::write("docs/evaluation.md", text)?;
    println!("wrote docs/evaluation.md");
    Ok(())
}
