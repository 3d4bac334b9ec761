//! What the simulator itself costs, and how that grows: the one experiment whose figures are of this machine.

use std::time::Instant;

use super::balancer::Arm;
use super::engine;
use super::plans::paper;
use super::report::{Report, Verdict};
use super::scenario::{NORMAL, Scenario};

/// Ascending, because the peak of memory never falls.
const SIZES: [usize; 6] = [4, 10, 32, 100, 316, 1000];

pub(crate) fn experiment(quick: bool) -> Report {
    let mut rows = Vec::new();
    let mut csv = String::from("servers,simulated_s,wall_s,events,peak_mib\n");
    let mut verdicts = Vec::new();
    for n in SIZES.into_iter().filter(|n| !quick || *n <= 100) {
        let mut scenario = Scenario::testbed(n, 1.74, NORMAL);
        (scenario.warm_up, scenario.measured) = if n <= 100 { (10.0, 50.0) } else { (2.0, 8.0) };
        let simulated = scenario.warm_up + scenario.measured;
        let started = Instant::now();
        let run = engine::run(&scenario, &Arm::Prequal(paper()), 1);
        let wall = started.elapsed().as_secs_f64();
        let memory = peak_mib();
        rows.push(vec![
            format!("{n} × {n}"),
            format!("{simulated:.0}"),
            format!("{wall:.2}"),
            format!("{:.2}", wall / simulated),
            run.events.to_string(),
            format!("{:.2}", run.events as f64 / wall / 1e6),
            format!("{memory:.0}"),
        ]);
        csv += &format!("{n},{simulated},{wall},{},{memory}\n", run.events);
        if n == 100 {
            let what = "100 × 100 at 1.74x, 60 simulated seconds in less than 60 s of one core";
            verdicts.push(Verdict::new(what, wall < 60.0, format!("{wall:.1} s")));
        }
    }
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
        text: "The paper profile at 1.74x (13 k queries/s at 100 × 100, 130 k at 1000 × 1000, three probes each), one \
            core. Unlike all other figures these are of the machine that made the page. Time grows faster than the \
            events: choosing whom to probe looks at every member. Memory is one pool and one membership per \
            client (so n² bytes times about 28) and one sample per query."
            .to_owned(),
        header: header.map(str::to_owned).to_vec(),
        rows,
        charts: Vec::new(),
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
