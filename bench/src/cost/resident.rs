//! `memory`: the resident memory that workers, clusters and replicas take in an Envoy, with and without Prequal, and
//! that connections and streams take in an agent.
//!
//! Every figure is read from a new process that has served requests on each of its clusters. What one more worker,
//! cluster or replica takes is the difference between the largest and the smallest size, divided by the difference of
//! the sizes.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use prequal_testbed::{Agent, Envoy, EnvoyConfig};

use super::held::{Backend, hold};
use super::kind::{EnvoyKind, path};
use super::replicas::{PROBING, host, members};
use crate::closed::{self, Connection};
use crate::deployment::{CLUSTER, start_agents};
use crate::goals::Goals;
use crate::process::resident_kib;
use crate::sim::plot::{self, Chart, Line};
use crate::stats::{median, min_max};
use crate::table::{self, one, spread, two};

/// Requests on each cluster before the memory is read, and the connections that send them.
const REQUESTS: u64 = 2000;
const CONNECTIONS: usize = 16;
/// Wait before the memory is read.
const SETTLES: Duration = Duration::from_secs(1);
/// Time to wait until the filter knows every replica.
const PATIENCE: Duration = Duration::from_secs(40);
/// Replicas of a cluster, unless their number is what grows.
const REPLICAS: usize = 10;
/// Idle connections, and requests in flight, of an agent.
const HELD: usize = 1000;
/// Goals for the agent: its own memory; KiB per idle connection; KiB per HTTP/2 stream in flight, with its connection
/// to the backend.
const AGENT_KIB: f64 = 8192.0;
const CONNECTION_KIB: f64 = 24.0;
const STREAM_KIB: f64 = 48.0;

/// Arguments of `memory`.
#[derive(Args, Clone, Debug)]
pub(crate) struct MemoryArgs {
    /// Processes started for each figure
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    starts: u32,
    /// One start each
    #[arg(long)]
    quick: bool,
    /// Only this part
    #[arg(long)]
    only: Option<Part>,
    /// Folder for the plot
    #[arg(long, default_value = "target/bench", value_name = "DIR")]
    out: PathBuf,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum Part {
    /// An Envoy's workers
    Workers,
    /// An Envoy's clusters
    Clusters,
    /// Replicas of one cluster
    Replicas,
    /// Ten thousand replicas that Envoy learns by EDS
    Eds,
    /// An agent
    Agent,
}

/// A quantity, such as the number of workers. Envoys that differ in it are compared.
struct MemoryQuantity {
    part: Part,
    name: &'static str,
    sizes: &'static [usize],
    /// The growth is given per this amount.
    unit: f64,
    unit_name: &'static str,
    /// Goals for the filter and the native module at the smallest size, MiB more than without Prequal; `None` if that
    /// size is not judged.
    smallest_mib: Option<[f64; 2]>,
    /// The same for the growth per unit.
    unit_mib: [f64; 2],
    config: fn(EnvoyKind, &[SocketAddr], usize) -> Result<EnvoyConfig>,
}

const QUANTITIES: [MemoryQuantity; 4] = [
    MemoryQuantity {
        part: Part::Workers,
        name: "workers",
        sizes: &[1, 2, 4],
        unit: 1.0,
        unit_name: "worker",
        // Set after a first reading (42 and 1.5 MiB), to notice growth. All other goals were set before any reading.
        smallest_mib: Some([48.0, 4.0]),
        unit_mib: [12.0, 1.0],
        config: |kind, replicas, workers| {
            Ok(kind.config(&replicas[..REPLICAS], 1)?.concurrency(u32::try_from(workers)?))
        },
    },
    MemoryQuantity {
        part: Part::Clusters,
        name: "clusters, two workers",
        sizes: &[1, 16, 64],
        unit: 1.0,
        unit_name: "cluster",
        smallest_mib: None,
        unit_mib: [1.0, 0.5],
        config: |kind, replicas, clusters| Ok(kind.config(&replicas[..REPLICAS], clusters)?.concurrency(2)),
    },
    MemoryQuantity {
        part: Part::Replicas,
        name: "replicas, one worker",
        sizes: &[REPLICAS, 1000 + REPLICAS],
        unit: 1000.0,
        unit_name: "1000 replicas",
        smallest_mib: None,
        unit_mib: [48.0, 48.0],
        config: |kind, replicas, count| kind.config(&replicas[..count], 1),
    },
    MemoryQuantity {
        part: Part::Eds,
        name: "replicas by EDS, one worker",
        sizes: &[REPLICAS, 10_000],
        unit: 1000.0,
        unit_name: "1000 replicas by EDS",
        smallest_mib: None,
        unit_mib: [48.0, 48.0],
        config: |kind, replicas, count| {
            let clusters: &[&str] = if kind == EnvoyKind::Without { &[CLUSTER] } else { &[CLUSTER, PROBING] };
            Ok(kind.config(&replicas[..count], 1)?.eds(clusters))
        },
    },
];

/// The readings of one quantity and kind, MiB: for each size, one per start.
struct Readings {
    kind: EnvoyKind,
    by_size: Vec<Vec<f64>>,
}

impl Readings {
    /// Median of the starts with one of the sizes.
    fn mib(&self, size: usize) -> f64 {
        median(self.by_size[size].iter().copied())
    }

    /// MiB that one unit more takes.
    fn per_unit(&self, quantity: &MemoryQuantity) -> f64 {
        let last = quantity.sizes.len() - 1;
        (self.mib(last) - self.mib(0)) / (quantity.sizes[last] - quantity.sizes[0]) as f64 * quantity.unit
    }
}

/// Measures and judges everything; the exit code shows whether every goal was reached.
pub(crate) async fn run(memory: &MemoryArgs) -> Result<ExitCode> {
    let starts = if memory.quick { 1 } else { memory.starts };
    let wanted = |part| memory.only.is_none_or(|only| only == part);
    let quantities: Vec<&MemoryQuantity> =
        QUANTITIES.iter().filter(|quantity| wanted(quantity.part)).collect();
    let most = quantities.iter().flat_map(|quantity| quantity.sizes).max().copied().unwrap_or(0);
    let backends = host(most.max(REPLICAS))?;
    let replicas: Vec<_> = backends.iter().flat_map(|backends| backends.addresses.iter().copied()).collect();
    let (mut goals, mut charts) = (Goals::default(), Vec::new());
    for quantity in quantities {
        let readings = measure(quantity, &replicas, starts).await?;
        println!("\n{}", shown(quantity, &readings));
        if let Some(limits) = quantity.smallest_mib {
            let what = format!("with one {}", quantity.unit_name);
            judge(&what, &readings, |readings| readings.mib(0), limits, &mut goals);
        }
        let per_unit = |readings: &Readings| readings.per_unit(quantity);
        judge(&format!("per {}", quantity.unit_name), &readings, per_unit, quantity.unit_mib, &mut goals);
        charts.push(chart(quantity, &readings));
    }
    if wanted(Part::Agent) {
        agent(starts, &mut goals).await?;
    }
    std::fs::create_dir_all(&memory.out)?;
    let path = memory.out.join("memory.svg");
    plot::write(&path, "Resident memory of an Envoy", &charts)?;
    println!("Plot: {}\n", path.display());
    Ok(goals.print())
}

async fn measure(quantity: &MemoryQuantity, replicas: &[SocketAddr], starts: u32) -> Result<Vec<Readings>> {
    println!("Envoy's resident memory over {}", quantity.name);
    let mut all: Vec<Readings> =
        EnvoyKind::ALL.map(|kind| Readings { kind, by_size: vec![Vec::new(); quantity.sizes.len()] }).into();
    for start in 1..=starts {
        for readings in &mut all {
            for (size, into) in quantity.sizes.iter().zip(&mut readings.by_size) {
                let config = (quantity.config)(readings.kind, replicas, *size)?;
                let read = envoy_mib(readings.kind, config).await;
                into.push(
                    read.with_context(|| format!("{}, {size} {}", readings.kind.name(), quantity.name))?,
                );
            }
        }
        println!("  start {start} of {starts}");
    }
    Ok(all)
}

/// Starts an Envoy, sends requests to each of its clusters, and reads its memory.
async fn envoy_mib(kind: EnvoyKind, mut config: EnvoyConfig) -> Result<f64> {
    // One route answers 404 for Prequal's own paths; every other route leads to a cluster.
    let clusters = config.routes_mut().iter().filter(|route| route["route"].is_object()).count();
    let cluster = config.cluster_mut(CLUSTER);
    let replicas = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"].as_array().map_or(0, Vec::len);
    let envoy = tokio::task::spawn_blocking(move || Envoy::start(config)).await??;
    for cluster in 0..clusters {
        let mut connection = Connection::open(envoy.addr(), &path(cluster)).await?;
        for _ in 0..REQUESTS / clusters as u64 {
            connection.get().await?;
        }
    }
    closed::send(envoy.addr(), CONNECTIONS, REQUESTS).await?;
    let begin = Instant::now();
    while kind == EnvoyKind::Filter && members(&envoy)? < replicas as u64 && begin.elapsed() < PATIENCE {
        closed::send(envoy.addr(), CONNECTIONS, REQUESTS).await?;
    }
    tokio::time::sleep(SETTLES).await;
    let kib = resident_kib(envoy.pid())?;
    tokio::task::spawn_blocking(move || drop(envoy)).await?;
    Ok(kib as f64 / 1024.0)
}

fn shown(quantity: &MemoryQuantity, all: &[Readings]) -> String {
    let mut header = vec![quantity.name.to_owned()];
    header.extend(quantity.sizes.iter().map(|size| format!("{size}, MiB")));
    header.push(format!("MiB per {}", quantity.unit_name));
    let rows: Vec<Vec<String>> = all
        .iter()
        .map(|readings| {
            let cells = readings.by_size.iter().map(|values| spread(values, one));
            let last = two(readings.per_unit(quantity));
            std::iter::once(readings.kind.name().to_owned()).chain(cells).chain([last]).collect()
        })
        .collect();
    table::render(&header.iter().map(String::as_str).collect::<Vec<_>>(), &rows)
}

/// Adds a verdict for each kind that runs Prequal: `of` may be at most `limits` MiB above its value without Prequal.
fn judge(what: &str, all: &[Readings], of: impl Fn(&Readings) -> f64, limits: [f64; 2], goals: &mut Goals) {
    let mib = |kind| all.iter().find(|readings| readings.kind == kind).map_or(f64::NAN, &of);
    for (kind, limit) in [EnvoyKind::Filter, EnvoyKind::Native].into_iter().zip(limits) {
        let more = mib(kind) - mib(EnvoyKind::Without);
        let line =
            format!("{}, {what}: {} MiB more than without Prequal (at most {limit})", kind.name(), two(more));
        goals.add(more <= limit, line);
    }
}

fn chart(quantity: &MemoryQuantity, all: &[Readings]) -> Chart {
    let value = |values: &Vec<f64>| {
        let (low, high) = min_max(values.iter().copied());
        (median(values.iter().copied()), low, high)
    };
    let line = |readings: &Readings| Line {
        label: readings.kind.name().to_owned(),
        values: readings.by_size.iter().map(value).collect(),
    };
    Chart {
        title: format!("MiB over {}", quantity.name),
        x_label: quantity.name.to_owned(),
        points: quantity.sizes.iter().map(usize::to_string).collect(),
        lines: all.iter().map(line).collect(),
        logarithmic: false,
        ceiling: None,
        format: one,
    }
}

/// Measures the agent, prints its figures and adds its verdicts.
async fn agent(starts: u32, goals: &mut Goals) -> Result<()> {
    println!("An agent's resident memory: idle, with {HELD} idle connections, with {HELD} streams in flight");
    let backend = Backend::start().await?;
    let args = ["--upstream-http2", "never"].map(str::to_owned);
    let start = || start_agents(&[backend.address], &args)?.pop().context("no agent");
    let kib = |agent: &Agent| anyhow::Ok(resident_kib(agent.pid())? as f64);
    let (mut idle, mut connection, mut stream) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..starts {
        let agent = start()?;
        closed::send(agent.addr(), CONNECTIONS, REQUESTS).await?;
        let before = kib(&agent)?;
        idle.push(before);
        let mut connections = Vec::new();
        for _ in 0..HELD {
            let mut opened = Connection::open(agent.addr(), "/").await?;
            opened.get().await?;
            connections.push(opened);
        }
        connection.push((kib(&agent)? - before) / HELD as f64);

        let agent = start()?;
        closed::send(agent.addr(), CONNECTIONS, REQUESTS).await?;
        let before = kib(&agent)?;
        let _held = hold(&agent, HELD).await?;
        stream.push((kib(&agent)? - before) / HELD as f64);
    }
    let rows = [
        ("agent after 2000 requests", idle, AGENT_KIB),
        ("per idle connection", connection, CONNECTION_KIB),
        ("per HTTP/2 stream in flight", stream, STREAM_KIB),
    ];
    let cells = rows.each_ref().map(|(what, values, _)| vec![(*what).to_owned(), spread(values, one)]);
    println!("\n{}", table::render(&["agent", "KiB"], &cells));
    for (what, values, limit) in rows {
        let got = median(values);
        goals.add(got <= limit, format!("{what}: {} KiB (at most {limit})", one(got)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_takes_the_difference_between_the_sizes() {
        let readings = Readings {
            kind: EnvoyKind::Filter,
            by_size: vec![vec![40.0, 41.0, 39.0], vec![66.0], vec![76.0]],
        };
        // 36 MiB for three more workers.
        assert_eq!(readings.per_unit(&QUANTITIES[0]), 12.0);
        let readings = Readings { kind: EnvoyKind::Filter, by_size: vec![vec![40.0], vec![60.0]] };
        assert_eq!(readings.per_unit(&QUANTITIES[2]), 20.0, "per 1000 replicas");
    }

    #[test]
    fn clusters_are_counted_by_their_routes() {
        let replicas = ["127.0.0.1:1".parse().unwrap(); REPLICAS];
        let mut config = EnvoyKind::Filter.config(&replicas, 16).unwrap();
        assert_eq!(config.routes_mut().iter().filter(|route| route["route"].is_object()).count(), 16);
    }
}
