//! Faults under load: the shipped configuration, a real Envoy, eight agents with backends, and 500 requests a second
//! of mixed kinds. Each fault has a goal; the exit status is nonzero if one is missed. `cargo xtask chaos` builds what
//! is needed and runs this program.
//!
//! * `mix`, `load`: the users' requests, and which outcomes are errors.
//! * `backend`, `bed`: the system under test.
//! * `fault`, `faults`: the faults, as data.
//! * `run`, `harm`, `verdict`, `report`: what a fault costs, which errors are its own, and whether the cost is too
//!   high.

mod backend;
mod bed;
mod cgroup;
mod clock;
mod fault;
mod faults;
mod harm;
mod load;
mod mix;
mod network;
mod report;
mod run;
mod verdict;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use crate::bed::{Bed, Module};
use crate::fault::{Fault, Goal, Scope};
use crate::report::Row;
use crate::run::Outcome;

#[derive(Parser)]
#[command(name = "prequal-chaos", about = "Faults under load, each with a goal")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs faults and judges their cost
    Run(Args),
    /// A backend (started by `run`)
    #[command(hide = true)]
    Backend { addr: SocketAddr, number: usize },
    /// Uses CPU (started by `run`)
    #[command(hide = true)]
    Hog,
    /// Uses memory in a control group (started by `run`)
    #[command(hide = true)]
    MemoryHog { group: PathBuf },
}

#[derive(clap::Args)]
struct Args {
    /// Run only these faults; `all` runs every fault, `NAME+NAME` two at once [default: all]
    faults: Vec<String>,

    /// List all faults and exit
    #[arg(long)]
    list: bool,

    /// Do not wait until replicas have their traffic back. If no faults are named, run only a few, as in CI
    #[arg(long)]
    short: bool,

    /// Afterwards, run this many random pairs of faults
    #[arg(long, value_name = "N", default_value_t = 0)]
    pairs: u32,

    /// Determines the pairs and the requests; printed, so that a run can be repeated [default: random]
    #[arg(long, value_name = "S")]
    seed: Option<u64>,

    /// Requests a second
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(10..=10_000))]
    rate: u32,

    /// Maximum number of runs of a fault until it meets its goal. On a shared machine a run can miss by chance
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10))]
    tries: u32,

    /// Write the table into docs/results/reliability.md. Only if all faults are run, at full length
    #[arg(long, conflicts_with = "short")]
    write: bool,

    /// The form in which Envoy runs Prequal
    #[arg(long, value_enum, default_value_t = Module::Wasm)]
    module: Module,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Backend { addr, number } => backend::serve(addr, number).map(|()| ExitCode::SUCCESS),
        Command::Hog => faults::hog().map(|()| ExitCode::SUCCESS),
        Command::MemoryHog { group } => faults::memory_hog(&group).map(|()| ExitCode::SUCCESS),
        Command::Run(args) if args.list => {
            faults::all().for_each(|fault| println!("{:<24} {}", fault.name, fault.what));
            Ok(ExitCode::SUCCESS)
        }
        Command::Run(args) => run(&args),
    };
    done.unwrap_or_else(|error| {
        // Without a backtrace, because another program failed.
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

/// The faults of one run: one or two.
type Plan = Vec<&'static Fault>;

fn run(args: &Args) -> Result<ExitCode> {
    if let Some(missing) = prequal_testbed::missing(&[]) {
        eprintln!("{missing}");
        return Ok(ExitCode::from(2));
    }
    let seed = args.seed.unwrap_or_else(any_seed);
    let mut rng = SmallRng::seed_from_u64(seed);
    let plans = plans(args, &mut rng)?;
    if args.write {
        ensure!(
            args.faults.is_empty() || args.faults.iter().any(|name| name == "all"),
            "--write needs all faults"
        );
        // A missing table must stop the run now, not after half an hour of faults.
        report::around_table(args.module)?;
    }
    network::enter()?;
    let dir = tempfile::TempDir::new()?;
    let clock = clock(dir.path());
    println!("seed {seed}, {} requests/s, {} runs", args.rate, plans.len());

    let (mut rows, mut impossible) = (Vec::new(), Vec::new());
    let mut bed = Some(Bed::start(clock.clone(), args.module)?);
    for (index, plan) in plans.iter().enumerate() {
        for tries_left in (0..args.tries).rev() {
            let bed_now = match bed.take() {
                Some(bed) => bed,
                None => Bed::start(clock.clone(), args.module)?,
            };
            if let Some(reason) = plan.iter().find_map(|fault| (fault.missing)(&bed_now)) {
                println!("[{}/{}] {}: impossible here: {reason}", index + 1, plans.len(), name(plan));
                impossible.push(format!("{}: {reason}", name(plan)));
                bed = Some(bed_now);
                break;
            }
            println!("[{}/{}] {}: {}", index + 1, plans.len(), name(plan), what(plan));
            let started = Instant::now();
            let outcome = run::run(&bed_now, plan, args.rate, rng.random(), !args.short);
            let row = row(plan, outcome, !args.short);
            println!("        {:.0} s: {}", started.elapsed().as_secs_f64(), report::verdict(&row));
            if row.misses.is_empty() {
                bed = Some(bed_now);
            } else {
                // A system that did not recover cannot be the starting point of the next run.
                bed_now.evidence().iter().for_each(|line| println!("        {line}"));
                if tries_left > 0 {
                    println!("        trying again");
                    continue;
                }
            }
            rows.push(row);
            break;
        }
    }
    drop(bed);
    println!("\n{}{}", report::text(&rows), report::summary(&rows, &impossible));
    if args.write {
        let mut how = format!("At {} requests/s", args.rate);
        if args.pairs > 0 {
            let _ = write!(how, ", with {} random pairs (seed {seed})", args.pairs);
        }
        if args.tries > 1 {
            let _ = write!(how, ", at most {} tries each", args.tries);
        }
        report::write(&rows, &impossible, &how, args.module)?;
    }
    Ok(if rows.iter().all(|row| row.misses.is_empty()) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A random seed that is short enough to type.
fn any_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::from(now.subsec_micros())
}

fn plans(args: &Args, rng: &mut SmallRng) -> Result<Vec<Plan>> {
    let names: Vec<&str> = if args.short && args.faults.is_empty() {
        faults::SHORT.to_vec()
    } else {
        args.faults.iter().map(String::as_str).collect()
    };
    let all: Vec<&Fault> = faults::all().collect();
    let mut plans: Vec<Plan> = Vec::new();
    for name in if names.is_empty() { &["all"][..] } else { &names } {
        if *name == "all" {
            plans.extend(all.iter().map(|fault| vec![*fault]));
        } else {
            plans.push(plan(name)?);
        }
    }
    let pairs: Vec<Plan> = all
        .iter()
        .flat_map(|first| all.iter().map(move |second| vec![*first, *second]))
        .filter(|pair| pair[0].name < pair[1].name && pair_up(pair[0].scope, pair[1].scope))
        .collect();
    plans.extend((0..args.pairs).map(|_| pairs[rng.random_range(0..pairs.len())].clone()));
    Ok(plans)
}

/// The fault of this name, or the two of `NAME+NAME`.
fn plan(names: &str) -> Result<Plan> {
    let fault = |name| {
        let known = faults::all().find(|fault| fault.name == name);
        known.with_context(|| format!("no such fault: {name}; --list shows all"))
    };
    let plan = names.split('+').map(fault).collect::<Result<Plan>>()?;
    ensure!(plan.len() <= 2, "at most two faults at once: {names}");
    if let [first, second] = plan[..] {
        ensure!(pair_up(first.scope, second.scope), "{names}: these faults affect the same thing");
    }
    Ok(plan)
}

/// Whether faults of these scopes do not interfere with each other.
fn pair_up(first: Scope, second: Scope) -> bool {
    match (first, second) {
        (Scope::Replicas, Scope::Replicas) => true,
        (Scope::Replicas, Scope::Fleet) | (Scope::Fleet, Scope::Replicas) => false,
        _ => first != second,
    }
}

fn name(plan: &Plan) -> String {
    plan.iter().map(|fault| fault.name).collect::<Vec<_>>().join(" + ")
}

fn what(plan: &Plan) -> String {
    plan.iter().map(|fault| fault.what).collect::<Vec<_>>().join("; and ")
}

fn row(plan: &Plan, outcome: Result<Outcome>, waits_for_traffic: bool) -> Row {
    let outcome =
        outcome.unwrap_or_else(|error| Outcome { broken: Some(format!("{error:#}")), ..Outcome::default() });
    let goals: Vec<Goal> = plan.iter().map(|fault| fault.goal).collect();
    let goal = verdict::sum(&goals);
    let misses = verdict::misses(&outcome, goal, waits_for_traffic);
    let what = if plan.len() == 1 { what(plan) } else { "both at once".to_owned() };
    Row { name: name(plan), what, goal, outcome, misses }
}

/// Makes Envoy's clock steppable, if there is a compiler. Call it while this process has only one thread.
fn clock(dir: &Path) -> Option<PathBuf> {
    if !network::has("cc", "--version") {
        return None;
    }
    match clock::prepare(dir) {
        Ok((program, offset)) => {
            // SAFETY: no other thread reads or writes the environment: there is none yet.
            unsafe { std::env::set_var("ENVOY", program) };
            Some(offset)
        }
        Err(error) => {
            eprintln!("Envoy's clock cannot be stepped: {error:#}");
            None
        }
    }
}
