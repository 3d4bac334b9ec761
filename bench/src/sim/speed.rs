//! The cost of the simulator itself by size: the only experiment whose figures depend on the machine.

use std::time::Instant;

use super::balancer::SimArm;
use super::engine;
use super::plans::paper;
use super::plot::{Chart, Line};
use super::report::{Report, Verdict, spread};
use super::scenario::{NORMAL, SimScenario};
use crate::stats::{median, min_max};

/// Ascending, because peak memory never falls.
const SIZES: [usize; 6] = [4, 10, 32, 100, 316, 1000];

pub(crate) fn experiment(quick: bool, seeds: &[u64]) -> Report {
    let (mut rows, mut verdicts, mut labels) = (Vec::new(), Vec::new(), Vec::new());
    let (mut times, mut memories) = (Vec::new(), Vec::new());
    let arm = SimArm::Prequal(paper());
    let mut csv = format!("{}# {arm:?}\n", super::csv_comment(seeds));
    csv += "servers,seed,simulated_s,wall_s,events,peak_mib\n";
    for n in SIZES.into_iter().filter(|n| !quick || *n <= 100) {
        let mut scenario = SimScenario::testbed(n, 1.74, NORMAL);
        (scenario.warm_up, scenario.measured) = if n <= 100 { (10.0, 50.0) } else { (2.0, 8.0) };
        let simulated = scenario.warm_up + scenario.measured;
        let (mut walls, mut rates, mut events) = (Vec::new(), Vec::new(), Vec::new());
        for seed in seeds {
            let started = Instant::now();
            let run = engine::run(&scenario, &arm, *seed);
            let wall = started.elapsed().as_secs_f64();
            csv += &format!("{n},{seed},{simulated},{wall},{},{}\n", run.events, peak_mib());
            walls.push(wall);
            rates.push(run.events as f64 / wall / 1e6);
            events.push(run.events as f64);
        }
        let memory = peak_mib();
        let each: Vec<f64> = walls.iter().map(|wall| wall / simulated).collect();
        rows.push(vec![
            format!("{n} × {n}"),
            format!("{simulated:.0}"),
            spread(&walls, |wall| format!("{wall:.2}")),
            spread(&each, |wall| format!("{wall:.3}")),
            spread(&events, |events| format!("{events:.0}")),
            spread(&rates, |rate| format!("{rate:.2}")),
            format!("{memory:.0}"),
        ]);
        if n == 100 {
            let what = "100 × 100 at 1.74x, 60 simulated seconds in less than 60 s of one core, slowest seed";
            let (_, slowest) = min_max(walls.iter().copied());
            verdicts.push(Verdict::new(what, slowest < 60.0, format!("{slowest:.1} s")));
        }
        labels.push(format!("{n} × {n}"));
        let (low, high) = min_max(each.iter().copied());
        times.push((median(each), low, high));
        memories.push((memory, memory, memory));
    }
    let chart = |title: &str, values, format| Chart {
        title: title.to_owned(),
        x_label: "clients × servers".to_owned(),
        points: labels.clone(),
        lines: vec![Line { label: "paper profile".to_owned(), values }],
        logarithmic: true,
        ceiling: None,
        format,
    };
    let charts = vec![
        chart("wall seconds per simulated second, one core", times, |seconds| format!("{seconds:.3}")),
        chart("peak memory, MiB", memories, |mib| format!("{mib:.0}")),
    ];
    let header = [
        "clients × servers",
        "simulated s",
        "wall s",
        "wall s per simulated s",
        "events",
        "million events/s",
        "peak MiB",
    ];
    Report {
        name: "speed",
        title: "what the simulator costs",
        text: "The paper profile at 1.74x (13 k queries/s at 100 × 100, 130 k at 1000 × 1000, three probes each), on \
            one core. Unlike all other figures, these depend on the machine that made the page, and on its other load. \
            Time grows faster than the number of events, because choosing the servers to probe looks at every member. \
            Memory is one pool and one membership per client (about n² times 28 bytes) and one sample per query."
            .to_owned(),
        header: header.map(str::to_owned).to_vec(),
        rows,
        statements: Vec::new(),
        charts,
        verdicts,
        csv,
    }
}

/// Peak resident memory of this process.
fn peak_mib() -> f64 {
    // SAFETY: getrusage fills the struct that it is given, for this process.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    usage.ru_maxrss as f64 / 1024.0
}
