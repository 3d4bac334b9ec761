//! The paper's load ramp (§5.1, figure 6) on a real kernel: replicas that burn CPU time in cgroups, and antagonists that come
//! and go on the same cores. The simulator runs the same ramp beside it.
//!
//! `scale` says how the paper's testbed is reduced to two cores. What this cannot show: a hundred replicas and a hundred
//! clients (one Envoy knows all of its own requests, which helps rules that count them), machines that are full for minutes,
//! and the other ways in which isolation slows a replica down, such as caches and memory bandwidth.

mod antagonist;
mod burn;
mod cgroup;
mod figures;
mod machines;
mod part;
mod policy;
mod ramp;
mod replica;
mod report;
mod scale;
mod simulated;
mod spare;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;

use figures::QUANTILES;
use machines::Machines;
pub(crate) use part::run as part;
use policy::Policy;
use ramp::{Ramp, Step};
use report::Runs;

/// The load ramp over contended CPU.
#[derive(Args, Clone, Debug)]
pub(crate) struct Contention {
    /// Loads relative to the allocation, ascending, comma-separated
    #[arg(long, value_delimiter = ',', value_parser = load, value_name = "LOADS",
        default_value = "0.75,0.83,0.93,1.03,1.14,1.27,1.41,1.57,1.74")]
    steps: Vec<f64>,
    /// Measured seconds per step [default: 30; with --quick: 8]
    #[arg(long, value_parser = clap::value_parser!(u64).range(2..=600))]
    seconds: Option<u64>,
    /// Passes over all policies [default: 3; with --quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=100))]
    passes: Option<u64>,
    /// One short pass over the steps 0.75, 1.03, 1.27 and 1.74: shows that it works
    #[arg(long, conflicts_with = "steps")]
    quick: bool,
    /// Only policies with one of these names, or whose names begin with one, comma-separated; `all` adds the filter's other rules
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    arms: Vec<String>,
    /// Only the simulator, at the same scale: needs neither root nor Envoy
    #[arg(long)]
    pub(crate) simulated: bool,
    /// Folder for the plot
    #[arg(long, default_value = "target/bench", value_name = "DIR")]
    out: PathBuf,
}

/// Runs the ramps; the exit code says whether every goal was reached.
pub(crate) async fn run(args: &Contention) -> Result<ExitCode> {
    if !args.simulated
        && let Some(missing) = Machines::missing()
    {
        eprintln!("{missing}");
        return Ok(ExitCode::from(2));
    }
    let policies = chosen(&args.arms)?;
    let (seconds, passes) = if args.quick { (8, 1) } else { (30, 3) };
    let loads = if args.quick { vec![0.75, 1.03, 1.27, 1.74] } else { args.steps.clone() };
    let measured = Duration::from_secs(args.seconds.unwrap_or(seconds));
    let ramp = Ramp { loads, measured };
    let passes = args.passes.unwrap_or(passes);
    describe(&ramp, policies.len(), passes);
    let mut runs: Vec<Runs> = policies
        .iter()
        .map(|policy| Runs { policy: *policy, measured: Vec::new(), simulated: Vec::new() })
        .collect();
    let total = passes as usize * runs.len();
    for pass in 1..=passes {
        for (number, of_policy) in runs.iter_mut().enumerate() {
            let policy = of_policy.policy;
            if !args.simulated {
                println!(
                    "[{}/{total}] {}",
                    (pass as usize - 1) * policies.len() + number + 1,
                    policy.label()
                );
                let steps = ramp.run(policy, pass).await;
                let steps = steps.with_context(|| format!("{}, pass {pass}", policy.label()))?;
                for (load, step) in ramp.loads.iter().zip(&steps) {
                    println!("  {load}x: {}", short(step));
                }
                of_policy.measured.push(steps);
            }
            let simulated = (0..ramp.loads.len()).map(|step| simulated::step(&ramp, step, policy, pass));
            of_policy.simulated.push(simulated.collect());
        }
    }
    println!("\n{}", report::tables(&ramp, &runs));
    report::draw(&args.out.join("contention.svg"), &ramp, &runs)?;
    if args.simulated {
        return Ok(ExitCode::SUCCESS);
    }
    Ok(report::judge(&ramp, &runs).print())
}

fn describe(ramp: &Ramp, policies: usize, passes: u64) {
    println!(
        "{} replicas with {:.3} cores each, on machines with {:.2} cores each; a query gets at most {} of a core, \
         and its work\nis max(0, N(80, 80)) ms at that speed. One of the machines is full at any time. {passes} passes, \
         {policies} policies, {} s each.",
        scale::REPLICAS,
        scale::allocation(),
        scale::machine(),
        scale::CORE,
        ramp.length().as_secs(),
    );
}

/// The figures of a step in one line.
fn short(step: &Step) -> String {
    let Step { figures, failures, .. } = step;
    let mut parts: Vec<String> =
        QUANTILES.iter().zip(figures.quantiles_ms).map(|((_, name), ms)| format!("{name} {ms:.0}")).collect();
    parts.push(format!("failed {:.2} %", figures.failed * 100.0));
    parts.extend(failures.iter().map(|(status, count)| format!("{count} with status {status}")));
    parts.join(", ")
}

/// The policies whose names begin with one of `names`; those of figure 6 if there are no names.
fn chosen(names: &[String]) -> Result<Vec<Policy>> {
    if names.is_empty() {
        return Ok(Policy::RAMP.to_vec());
    }
    if names == ["all"] {
        return Ok(Policy::ALL.to_vec());
    }
    let known = || Policy::ALL.iter().map(|policy| policy.label());
    if let Some(name) = names.iter().find(|name| !known().any(|label| label.starts_with(*name))) {
        bail!("--arms {name}: choose from all, {}", known().collect::<Vec<_>>().join(", "));
    }
    // A whole name means that policy alone.
    let exact = |name: &String| known().any(|label| label == name);
    let named = |policy: &Policy| {
        names.iter().any(|name| policy.label() == name || !exact(name) && policy.label().starts_with(name))
    };
    Ok(Policy::ALL.into_iter().filter(named).collect())
}

/// Parses a load relative to the allocation.
fn load(text: &str) -> Result<f64, String> {
    let load = text.parse().ok().filter(|load: &f64| (0.1..=2.0).contains(load));
    load.ok_or_else(|| "a load is a number from 0.1 to 2".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_chosen_by_the_beginnings_of_their_names() {
        let labels = |names: &[&str]| -> Vec<&str> {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            chosen(&names).unwrap().iter().map(|policy| policy.label()).collect()
        };
        assert_eq!(labels(&["wrr", "prequal ("]), ["wrr (CPU)", "prequal (paper)"]);
        assert_eq!(labels(&["prequal", "cs"]), ["cswrr", "prequal"]);
        assert_eq!(labels(&[]).len(), 6);
        assert_eq!(labels(&["all"]).len(), 10);
        assert!(chosen(&["nothing".to_owned()]).unwrap_err().to_string().contains("rif_only"));
    }

    #[test]
    fn loads_are_checked() {
        assert_eq!(load("1.27"), Ok(1.27));
        for bad in ["0", "2.1", "NaN", "x"] {
            assert!(load(bad).is_err(), "{bad}");
        }
    }
}
