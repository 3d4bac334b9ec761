//! The paper's load ramp (§5.1, figure 6) on a real kernel: replicas burn CPU time in cgroups, and antagonists come and
//! go on the same cores. The simulator runs the same ramp for comparison.
//!
//! `scale` says how the paper's testbed is reduced to two cores. This benchmark cannot show three things: a hundred
//! replicas and a hundred clients; machines that are full for minutes; and the other ways in which antagonists slow a
//! replica down, such as contention for caches and memory bandwidth. Its single Envoy knows all requests, which helps
//! rules that count their own requests.

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

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;

use figures::QUANTILES;
use machines::Machines;
pub(crate) use part::run as part;
use policy::Policy;
use ramp::{Ramp, Step};
use report::PolicyRuns;

use crate::passes::{self, Length};

/// The load ramp over contended CPU.
#[derive(Args, Clone, Debug)]
pub(crate) struct Contention {
    /// Loads relative to the allocation, ascending, comma-separated
    #[arg(long, value_delimiter = ',', value_parser = load, value_name = "LOADS", conflicts_with = "quick",
        default_value = "0.75,0.83,0.93,1.03,1.14,1.27,1.41,1.57,1.74")]
    steps: Vec<f64>,
    /// Only the simulator, at the same scale: needs neither root nor Envoy
    #[arg(long)]
    pub(crate) simulated: bool,
    #[command(flatten)]
    length: Length,
}

/// Runs the ramps; the exit code says whether every goal was reached.
pub(crate) async fn run(args: &Contention) -> Result<ExitCode> {
    if !args.simulated
        && let Some(missing) = Machines::missing()
    {
        eprintln!("{missing}");
        return Ok(ExitCode::from(2));
    }
    let policies = chosen(&args.length)?;
    let loads = if args.length.quick { vec![0.75, 1.03, 1.27, 1.74] } else { args.steps.clone() };
    let ramp = Ramp { loads, measured: args.length.seconds(30) };
    let passes = args.length.passes(3);
    describe(&ramp, policies.len(), passes);
    let mut runs: Vec<PolicyRuns> = policies
        .iter()
        .map(|policy| PolicyRuns { policy: *policy, measured: Vec::new(), simulated: Vec::new() })
        .collect();
    let total = passes * runs.len();
    for pass in 0..passes {
        let seed = pass as u64 + 1;
        for (number, index) in passes::order(policies.len(), pass).enumerate() {
            let PolicyRuns { policy, measured, simulated } = &mut runs[index];
            if !args.simulated {
                println!("[{}/{total}] {}", pass * policies.len() + number + 1, policy.label());
                let steps = ramp.run(*policy, seed).await;
                let steps = steps.with_context(|| format!("{}, pass {seed}", policy.label()))?;
                for (load, step) in ramp.loads.iter().zip(&steps) {
                    println!("  {load}x: {}", short(step));
                }
                measured.push(steps);
            }
            let steps = (0..ramp.loads.len()).map(|step| simulated::step(&ramp, step, *policy, seed));
            simulated.push(steps.collect());
        }
    }
    println!("\n{}", report::tables(&ramp, &runs));
    report::draw(&args.length.out.join("contention.svg"), &ramp, &runs)?;
    if args.simulated {
        return Ok(ExitCode::SUCCESS);
    }
    Ok(report::judge(&ramp, &runs).print())
}

fn describe(ramp: &Ramp, policies: usize, passes: usize) {
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

/// The policies that `--arms` names, or those of figure 6 if it names none, or every one for `all`. A name selects all
/// policies whose names begin with it, unless it is the whole name of one policy.
fn chosen(length: &Length) -> Result<Vec<Policy>> {
    let names = &length.arms;
    if names.is_empty() {
        return Ok(Policy::RAMP.to_vec());
    }
    if *names == ["all"] {
        return Ok(Policy::ALL.to_vec());
    }
    let mut chosen = length.named("this", &Policy::ALL, Policy::label)?;
    let is_whole = |name: &String| Policy::ALL.iter().any(|policy| policy.label() == name);
    chosen.retain(|policy| {
        let begins = |name: &&String| policy.label().starts_with(*name);
        names.iter().filter(begins).any(|name| policy.label() == name || !is_whole(name))
    });
    Ok(chosen)
}

/// Parses a load relative to the allocation.
fn load(text: &str) -> Result<f64, String> {
    let load = text.parse().ok().filter(|load: &f64| (0.1..=2.0).contains(load));
    load.ok_or_else(|| "a load is a number from 0.1 to 2".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        contention: Contention,
    }

    impl Contention {
        fn parse(options: &[&str]) -> Self {
            CommandLine::parse_from(["contention"].iter().chain(options)).contention
        }
    }

    #[test]
    fn policies_are_chosen_by_the_beginnings_of_their_names() {
        let chosen = |names: &str| chosen(&Contention::parse(&["--arms", names]).length);
        let labels =
            |names| -> Vec<&str> { chosen(names).unwrap().iter().map(|policy| policy.label()).collect() };
        assert_eq!(labels("wrr,prequal ("), ["wrr (CPU)", "prequal (paper)"]);
        assert_eq!(labels("prequal,cs"), ["cswrr", "prequal"]);
        assert_eq!(labels("all").len(), 10);
        assert!(chosen("nothing").unwrap_err().to_string().contains("rif_only"));
        assert_eq!(super::chosen(&Contention::parse(&[]).length).unwrap().len(), 6);
    }

    #[test]
    fn loads_are_checked() {
        assert_eq!(load("1.27"), Ok(1.27));
        for bad in ["0", "2.1", "NaN", "x"] {
            assert!(load(bad).is_err(), "{bad}");
        }
    }
}
