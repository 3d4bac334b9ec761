//! `generators`: checks our load generator, and the claims measured with it, against other load generators.
//!
//! Every generator sends the same load to its own deployment, started cold: a constant rate over HTTP/1.1, through one
//! Envoy with one worker. The same code reduces every generator's record of its requests to quantiles, because the
//! generators' own summaries are approximate (vegeta's digest, fortio's wide buckets) or have no quantiles (h2load).
//! Each generator's file says how it paces requests and what follows for its latencies.

mod fortio;
mod generator;
mod h2load;
mod oha;
mod order;
mod vegeta;
mod verdict;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use self::generator::Generator;
use self::order::Order;
use crate::arm::Arm;
use crate::deployment::Deployment;
use crate::e2e::{self, FIRST};
use crate::goals::Goals;
use crate::passes::{self, Length};
use crate::plot::{Curve, Panel};
use crate::scenario::{Load, Scenario};
use crate::stats::{Summary, median};
use crate::table::{self, ms, one, percent, spread, two};

/// Requests per second of the fleet `equal`.
const EQUAL_RATE: u32 = 1280;

/// Arguments of `generators`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Generators {
    /// The other generators, comma-separated
    #[arg(long, value_delimiter = ',', default_values = Generator::OTHERS.map(Generator::name))]
    generators: Vec<Generator>,
    /// The replicas, and the claim that is judged
    #[arg(long, default_value = "demo")]
    fleet: Claim,
    #[command(flatten)]
    length: Length,
}

/// The replicas, and the claim that goes with them.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Claim {
    /// The demo's: 14 replicas at 50 ms and 2 at 800 ms. Prequal's tail is far below round robin's
    Demo,
    /// 16 identical replicas at 80 % load. Prequal is not worse than Envoy's own policies
    Equal,
}

impl Claim {
    fn name(self) -> &'static str {
        match self {
            Self::Demo => "demo",
            Self::Equal => "equal",
        }
    }

    fn scenario(self, seconds: Duration) -> Scenario {
        match self {
            Self::Demo => {
                Scenario { arms: vec![Arm::RoundRobin, Arm::FullScan, Arm::Prequal], ..e2e::ingress(seconds) }
            }
            // These generators cannot send a Poisson stream, so ours does not either.
            Self::Equal => Scenario {
                title: format!(
                    "16 replicas with 4 slots, exponential 40 ms; {EQUAL_RATE} requests/s, 80 % load"
                ),
                load: Load::constant(EQUAL_RATE),
                workers: 1,
                arms: vec![Arm::RoundRobin, Arm::LeastRequest, Arm::FullScan, Arm::Prequal],
                ..e2e::equal(seconds)
            },
        }
    }
}

/// One run of one generator.
struct GeneratorRun {
    arm: Arm,
    generator: Generator,
    judged: Summary,
}

/// All runs of the comparison.
struct Runs {
    scenario: Scenario,
    fleet: Claim,
    /// Ours first.
    generators: Vec<Generator>,
    runs: Vec<GeneratorRun>,
    /// The largest p99 lateness of our own generator.
    late: Duration,
}

impl Runs {
    fn new(fleet: Claim, scenario: Scenario, others: &[Generator]) -> Self {
        let generators = std::iter::once(Generator::Ours).chain(others.iter().copied()).collect();
        Self { scenario, fleet, generators, runs: Vec::new(), late: Duration::ZERO }
    }

    /// The runs of one arm and generator, one per pass.
    fn of(&self, arm: Arm, generator: Generator) -> impl Iterator<Item = &Summary> {
        let wanted = move |run: &&GeneratorRun| run.arm == arm && run.generator == generator;
        self.runs.iter().filter(wanted).map(|run| &run.judged)
    }

    /// A quantile, ms: the median over the passes.
    fn quantile_ms(&self, arm: Arm, generator: Generator, q: f64) -> f64 {
        median(self.of(arm, generator).map(|judged| judged.quantile_ms(q)))
    }

    /// Requests per second that every generator was asked to send.
    fn asked(&self) -> u32 {
        match self.scenario.load {
            Load::Open { arrivals, .. } => arrivals.per_second(),
            Load::Closed { .. } => 0,
        }
    }

    /// Requests per second that a generator sent: the median over the passes.
    fn sent(&self, arm: Arm, generator: Generator) -> f64 {
        let seconds = (self.scenario.judged.end - self.scenario.judged.start).as_secs_f64();
        median(self.of(arm, generator).map(|judged| judged.samples as f64 / seconds))
    }

    /// Every arm with every generator once per pass.
    async fn measure(&mut self, passes: usize) -> Result<()> {
        let (arms, generators) = (self.scenario.arms.clone(), self.generators.clone());
        let total = passes * arms.len() * generators.len();
        for pass in 0..passes {
            for arm in passes::order(arms.len(), pass).map(|index| arms[index]) {
                for generator in passes::order(generators.len(), pass).map(|index| generators[index]) {
                    let step = format!("[{}/{total}] {}", self.runs.len() + 1, generator.name());
                    let judged = match generator {
                        Generator::Ours => self.ours(arm, pass as u64 + 1, &step).await,
                        _ => other(&self.scenario, self.asked(), arm, generator, &step).await,
                    };
                    let judged = judged.with_context(|| {
                        format!("{}, {}, pass {}", arm.label(), generator.name(), pass + 1)
                    })?;
                    println!("  {}", figures(&judged));
                    self.runs.push(GeneratorRun { arm, generator, judged });
                }
            }
        }
        Ok(())
    }

    async fn ours(&mut self, arm: Arm, seed: u64, step: &str) -> Result<Summary> {
        let measured = self.scenario.run_cold(arm, 1, seed, step).await?;
        self.late = self.late.max(measured.late.0);
        Ok(measured.judged)
    }

    fn table(&self) -> String {
        let within = format!("≤ {} ms", self.scenario.good_within.as_millis());
        let header = [
            "policy, generator",
            "loop",
            "p50 ms",
            "p95 ms",
            "p99 ms",
            "p99.9 ms",
            &within,
            "sent/s",
            "failed",
            "samples",
            "against ours",
        ];
        let pairs = self.scenario.arms.iter().flat_map(|arm| self.generators.iter().map(|by| (*arm, *by)));
        let rows: Vec<Vec<String>> = pairs.map(|(arm, by)| self.row(arm, by)).collect();
        table::render(&header, &rows)
    }

    fn row(&self, arm: Arm, generator: Generator) -> Vec<String> {
        let cell = |value: &dyn Fn(&Summary) -> f64, format: fn(f64) -> String| {
            spread(&self.of(arm, generator).map(value).collect::<Vec<_>>(), format)
        };
        let sum =
            |value: &dyn Fn(&Summary) -> usize| self.of(arm, generator).map(value).sum::<usize>().to_string();
        let mut row = vec![format!("{}, {}", arm.label(), generator.name()), generator.pacing().to_owned()];
        row.extend(QUANTILES.map(|q| cell(&|judged| judged.quantile_ms(q), ms)));
        row.push(cell(&|judged| judged.within(self.scenario.good_within), percent));
        row.push(one(self.sent(arm, generator)));
        row.extend([sum(&|judged| judged.failed), sum(&|judged| judged.samples)]);
        row.push(match generator {
            Generator::Ours => String::new(),
            _ => verdict::agreement(self, arm, generator).0.word().to_owned(),
        });
        row
    }

    /// One panel per arm, with the curves of the first pass.
    fn panels(&self) -> Vec<Panel> {
        let curve = |arm, by: Generator| {
            let judged = self.of(arm, by).next()?;
            Some(Curve { label: by.name().to_owned(), points: judged.tail() })
        };
        let panel = |arm: &Arm| Panel {
            title: arm.label().to_owned(),
            curves: self.generators.iter().filter_map(|by| curve(*arm, *by)).collect(),
        };
        self.scenario.arms.iter().map(panel).collect()
    }
}

const QUANTILES: [f64; 4] = [0.5, 0.95, 0.99, 0.999];

/// Runs everything; the exit code says whether every goal was reached.
pub(crate) async fn run(args: &Generators) -> Result<ExitCode> {
    let (others, missing): (Vec<Generator>, Vec<Generator>) =
        args.generators.iter().partition(|generator| generator.is_installed());
    for generator in &missing {
        println!("{}: skipped, because it is not on the PATH.", generator.name());
    }
    if others.is_empty() {
        bail!("no generator to compare with: `cargo xtask bench generators` installs them");
    }
    let length = &args.length;
    let scenario = args.fleet.scenario(length.seconds(30));
    let scenario = Scenario { arms: length.named(&scenario.name, &scenario.arms, Arm::label)?, ..scenario };
    let mut runs = Runs::new(args.fleet, scenario, &others);
    println!("{}\n{}\n", runs.scenario.title, verdict::goals(args.fleet));
    runs.measure(length.passes(3)).await?;

    println!("\n{}, one Envoy\n\n{}", runs.scenario.title, runs.table());
    println!("Our generator's lateness: p99 at most {} ms.\n", two(runs.late.as_secs_f64() * 1e3));
    let name = format!("generators-{}", args.fleet.name());
    e2e::draw(&length.out.join(format!("{name}.svg")), &name, &runs.panels())?;
    let mut goals = Goals::default();
    verdict::judge(&runs, &mut goals);
    Ok(goals.print())
}

/// Starts a deployment cold, lets another generator send to it, and takes it down.
async fn other(
    scenario: &Scenario,
    per_second: u32,
    arm: Arm,
    generator: Generator,
    step: &str,
) -> Result<Summary> {
    let length = scenario.judged.end;
    let deployment = Deployment::start(arm, 1, scenario.workers(1), &scenario.fleet).await?;
    println!("{step} {}: started, sending for {} s", arm.label(), length.as_secs());
    let folder = tempfile::tempdir()?;
    let order =
        Order { target: deployment.targets()[0], per_second, length, folder: folder.path().to_owned() };
    let samples = tokio::task::spawn_blocking(move || generator.send(&order)).await?;
    deployment.stop().await;
    let samples = samples?;
    let judged = samples.iter().filter(|sample| (FIRST..length).contains(&sample.due));
    Ok(Summary::of(judged, |_| false))
}

/// The figures of one run, in a line.
fn figures(judged: &Summary) -> String {
    let [p50, p95, p99, p999] = QUANTILES.map(|q| ms(judged.quantile_ms(q)));
    format!(
        "p50 {p50} ms, p95 {p95} ms, p99 {p99} ms, p99.9 {p999} ms, {} of {} failed",
        judged.failed, judged.samples
    )
}
