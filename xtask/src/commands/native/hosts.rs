//! Measures the native module with many hosts, and with hosts that change all the time. A small program takes Envoy's
//! place.
//!
//! The results are the module's own CPU time and memory, without Envoy's. `cargo xtask bench growth` and `memory`
//! measure the same with Envoy.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use super::elf::Library;
use super::loader::Loader;
use crate::progress;

/// The program's source. [`Loader::build`] adds stubs for the functions of Envoy that it does not define.
const PROGRAM: &str = include_str!("hosts.c");

/// Numbers of hosts. A pool has at most 128 entries.
const SIZES: [usize; 4] = [10, 128, 1000, 10_000];
const ATTEMPTS: usize = 400_000;
const ROUNDS: usize = 5;
/// Goal for the cost of an attempt with the most hosts, relative to the cost with as many hosts as fit into the pool.
const FLAT: f64 = 1.25;
/// Number of updates of a cluster with at most ten hosts at a time. The hosts are taken from ten thousand.
const UPDATES: usize = 1_000_000;
const FEW: usize = 10;
/// Number of updates of a cluster of at most ten thousand hosts.
const LARGE_UPDATES: usize = 1000;
/// Goal for the growth of the heap, bytes: its largest size in the second half of the updates less that in the first.
const GROWTH: i64 = 1 << 18;

/// Measures, prints and judges the module in `file`.
pub(super) fn run(loader: &Loader<'_>, file: &Path, library: &Library) -> Result<()> {
    let program = loader.build("hosts", PROGRAM, library)?;
    let measure = |what: &str, hosts: usize, count: usize| -> Result<Vec<f64>> {
        let said = loader.run(&program, file, &[what, &hosts.to_string(), &count.to_string()])?;
        let numbers = said.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>();
        numbers.with_context(|| format!("{what} of {hosts} hosts:\n{said}"))
    };
    progress::say(format_args!("CPU time of an attempt: choice, report, end ({ROUNDS} rounds)"));
    let mut costs = [const { Vec::new() }; SIZES.len()];
    for _ in 0..ROUNDS {
        for (hosts, costs) in SIZES.into_iter().zip(&mut costs) {
            let [nanoseconds, by_load] = measure("attempts", hosts, ATTEMPTS)?[..] else {
                anyhow::bail!("two numbers are expected");
            };
            ensure!(by_load > 90.0, "{hosts} hosts: only {by_load} % of the choices were made by load");
            costs.push(nanoseconds);
        }
    }
    let medians = costs.map(|mut costs| {
        costs.sort_by(f64::total_cmp);
        costs.get(ROUNDS / 2).copied().unwrap_or(f64::NAN)
    });
    for (hosts, cost) in SIZES.into_iter().zip(medians) {
        progress::say(format_args!(
            "{hosts:>6} hosts: {cost:.0} ns, {:.2} times 10 hosts",
            cost / medians[0]
        ));
    }
    let factor = medians[3] / medians[1];
    let flat = factor <= FLAT;
    verdict(flat, &format!("10000 hosts cost {factor:.2} times as much as 128 (at most {FLAT})"));
    let mut level = true;
    for (most, count) in [(FEW, UPDATES), (SIZES[3], LARGE_UPDATES)] {
        let [main_us, worker_us, before, early, late] = measure("updates", most, count)?[..] else {
            anyhow::bail!("five numbers are expected");
        };
        let growth = (late - early) as i64;
        progress::say(format_args!(
            "{count} updates of up to {most} hosts: {main_us:.1} µs on the main thread, {worker_us:.1} µs on a worker; heap \
             {before} bytes before, at most {early} in the first half, {late} in the second"
        ));
        verdict(
            growth <= GROWTH,
            &format!("the heap grew by {growth} bytes from half to half (at most {GROWTH})"),
        );
        level &= growth <= GROWTH;
    }
    ensure!(flat && level, "a goal was missed");
    Ok(())
}

fn verdict(reached: bool, what: &str) {
    progress::say(format_args!("{}: {what}", if reached { "reached" } else { "MISSED" }));
}
