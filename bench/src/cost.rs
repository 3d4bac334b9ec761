//! `cost`: CPU time per request of the filter, step by step in both roles; CPU time of unused clusters; and CPU time
//! per request of the agent, compared with other proxies.
//!
//! In the parts that measure CPU time per request, every process under measurement has one worker, bound to the first
//! core; the generator and the replicas use the other cores. Replicas answer at once, so that nothing hides the cost,
//! and report their own load, so that no agent is needed behind Envoy. Variants run in short interleaved rounds.
//! Compare only medians and ratios of the same call: the machine's speed drifts.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use prequal_testbed::{Agent, Envoy, EnvoyConfig, FILTER_NAME, Policy, SHIM_NAME, cpu_time};
use serde_json::{Value, json};

use crate::backends::{Backends, Fleet, ReplicaSpec, Service};
use crate::closed::{self, Round};
use crate::deadline;
use crate::deployment::{CLUSTER, empty_module, empty_native_module, start_agents, start_envoys};
use crate::goals::print_verdict;
use crate::passes;
use crate::peer::{Peer, RunningPeer};
use crate::process::{self, cores, pin, resident_kib};
use crate::stats::median;
use crate::table::{self, one, range, two};

mod cold;
pub(crate) mod growth;
mod held;
pub(crate) mod idle;
mod inbound;
mod kind;
mod replicas;
pub(crate) mod resident;

const CONNECTIONS: usize = 16;
/// Goal for the filter without probes, relative to no filter: with one cluster configured, and with several.
const ONE_CLUSTER_FACTOR: f64 = 1.5;
const SEVERAL_CLUSTERS_FACTOR: f64 = 1.55;
/// The variants to which these goals apply.
const PROBES_OFF: &str = "+ filter, probes off";
const THREE_CLUSTERS: &str = "+ filter, probes off, three clusters";
/// The variants that, with [`PROBES_OFF`], are also measured cold.
const NO_FILTER: &str = "no filter";
const NATIVE_CHAIN: &str = "native chain";
const EMPTY_MODULE: &str = "+ empty module";
const ADAPTIVE: &str = "+ filter, adaptive (default)";
/// Envoy's own policy with the filter `prequal-strip`, which the native module needs too.
const STRIP: &str = "strip alone";
/// A native module that does nothing: as a policy alone, and with all of its hooks.
const EMPTY_POLICY: &str = "native, empty policy";
const EMPTY_NATIVE: &str = "native, empty module";
/// The native module.
const NATIVE_POLICY: &str = "native, policy alone";
const NATIVE_OFF: &str = "native, probes off";
const NATIVE: &str = "native, adaptive (default)";
/// Goals for the native module, relative to no filter.
const NATIVE_POLICY_FACTOR: f64 = 1.02;
const NATIVE_FACTOR: f64 = 1.05;
/// Maximum growth of the agent's memory that still counts as none, KiB.
const FLAT_KIB: u64 = 1024;

/// The rounds of every variant.
#[derive(Args, Clone, Copy, Debug)]
struct Rounds {
    /// Rounds per variant
    #[arg(long = "rounds", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Milliseconds per round
    #[arg(long = "round-ms", default_value_t = 1500, value_parser = clap::value_parser!(u64).range(100..))]
    ms: u64,
}

impl Rounds {
    fn length(self) -> Duration {
        Duration::from_millis(self.ms)
    }
}

/// Arguments of `cost`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Cost {
    #[command(flatten)]
    rounds: Rounds,
    /// Requests through one agent while its memory is watched; 0 skips this part
    #[arg(long, default_value_t = 1_000_000)]
    memory_requests: u64,
    /// Size of the larger fleet
    #[arg(long, default_value_t = 1000, value_parser = fleet_size)]
    replicas: usize,
    /// Run only this part
    #[arg(long)]
    only: Option<CostPart>,
    /// With `--only cold`: another build of the filter's module to compare; may be repeated
    #[arg(long, value_name = "FILE")]
    module: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum CostPart {
    /// The filter, step by step
    Filter,
    /// The same with cold caches: one request to each Envoy in turn
    Cold,
    /// The inbound role
    Inbound,
    /// The size of the fleet
    Replicas,
    /// Agent, Envoy and nginx as reverse proxies
    Proxies,
    /// Clusters that get no requests
    Idle,
    /// The agent's memory
    Memory,
    /// Synchronous requests whose probes hang
    Deadline,
}

/// Runs the parts, prints the figures and judges them; the exit code shows whether every goal was reached.
pub(crate) async fn run(cost: &Cost) -> Result<ExitCode> {
    let wanted = |part| cost.only.is_none_or(|only| only == part);
    let mut reached = true;
    if wanted(CostPart::Filter) {
        reached &= filter(cost).await?;
    }
    if wanted(CostPart::Cold) {
        cold::run(cost).await?;
    }
    if wanted(CostPart::Inbound) {
        inbound::run(cost).await?;
    }
    if wanted(CostPart::Replicas) {
        reached &= replicas::run(cost).await?;
    }
    if wanted(CostPart::Idle) {
        reached &= idle::run().await?;
    }
    if wanted(CostPart::Proxies) {
        reached &= proxies(cost).await?;
    }
    if wanted(CostPart::Memory) && cost.memory_requests > 0 {
        reached &= memory(cost.memory_requests).await?;
    }
    if wanted(CostPart::Deadline) {
        reached &= tokio::task::block_in_place(|| deadline::run(1000))?;
    }
    Ok(if reached { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn fleet_size(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|size| (17..=20_000).contains(size))
        .ok_or_else(|| "must be 17 to 20000".to_owned())
}

/// Replicas that use almost no CPU time and report their load themselves.
fn trivial(count: usize) -> Fleet {
    Fleet::of(count, ReplicaSpec::new(Service::Trivial))
}

/// Binds the `measured` processes to the first core, and the `rest` to the other cores if the machine has any.
fn place(measured: &[u32], rest: &[u32]) -> Result<()> {
    let cores = cores();
    if cores < 2 {
        return Ok(());
    }
    for pid in measured {
        pin(*pid, 0..1)?;
    }
    for pid in rest.iter().copied().chain([std::process::id()]) {
        pin(pid, 1..cores)?;
    }
    Ok(())
}

/// One line of a table: the target, the processes whose CPU time counts, and the rounds so far.
struct Variant {
    name: &'static str,
    target: SocketAddr,
    /// Each connection repeats one of these.
    paths: Vec<String>,
    pids: Vec<u32>,
    saturated: Vec<Round>,
    /// Rounds with one connection, so that nothing queues.
    serial: Vec<Round>,
}

impl Variant {
    fn new(name: &'static str, target: SocketAddr, pids: Vec<u32>) -> Self {
        Self { name, target, paths: vec!["/".to_owned()], pids, saturated: Vec::new(), serial: Vec::new() }
    }

    fn paths(mut self, paths: Vec<String>) -> Self {
        self.paths = paths;
        self
    }

    async fn round(&self, connections: usize, length: Duration) -> Result<Round> {
        let cpu = || self.pids.iter().map(|pid| cpu_time(*pid)).sum();
        closed::round(self.target, &self.paths, connections, length, cpu).await.context(self.name)
    }

    fn cpu(&self) -> f64 {
        median(self.saturated.iter().map(|round| round.cpu_us))
    }

    fn cpu_range(&self) -> String {
        range(&self.saturated.iter().map(|round| round.cpu_us).collect::<Vec<_>>(), one)
    }

    fn per_second(&self) -> f64 {
        median(self.saturated.iter().map(|round| round.per_second))
    }

    fn serial_median(&self) -> f64 {
        median(self.serial.iter().map(|round| round.median_us))
    }
}

fn steps(replicas: &[SocketAddr]) -> Result<Vec<(&'static str, EnvoyConfig)>> {
    let shipped = || EnvoyConfig::for_replicas(replicas);
    let native = || EnvoyConfig::native_for_replicas(replicas);
    // The native policy alone: no upstream filter and no logger, so no reports.
    let without_reports = |config: &mut EnvoyConfig| {
        let protocol =
            "/typed_extension_protocol_options/envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
        let options = config.cluster_mut(CLUSTER).pointer_mut(protocol).and_then(Value::as_object_mut);
        options.map(|options| options.remove("http_filters"));
        let router = config.router_mut()["typed_config"].as_object_mut();
        router.map(|router| router.remove("upstream_log"));
    };
    let fixed = |r_probe: u32| {
        move |settings: &mut Value| {
            settings["clusters"][0]["budget"] = json!("fixed");
            settings["clusters"][0]["r_probe"] = json!(r_probe);
        }
    };
    let off = |settings: &mut Value| {
        fixed(0)(settings);
        settings["clusters"][0]["idle_probe_interval_ms"] = json!(0);
        // Without probes the filter would not find the replicas.
        settings["clusters"][0]["endpoints"] =
            json!(replicas.iter().map(ToString::to_string).collect::<Vec<_>>());
    };
    let synchronous = |settings: &mut Value| settings["clusters"][0]["mode"] = json!("sync");
    let probe_free = |settings: &mut Value| {
        settings["clusters"][0] =
            json!({"cluster": CLUSTER, "probe_cluster": format!("{CLUSTER}-agent"), "rule": "peak_ewma"});
    };
    let more = |settings: &mut Value| {
        off(settings);
        if let Some(clusters) = settings["clusters"].as_array_mut() {
            clusters.extend(["second", "third"].map(|name| {
                json!({"cluster": name, "probe_cluster": format!("{name}-agent"), "budget": "fixed", "r_probe": 0,
                       "idle_probe_interval_ms": 0})
            }));
        }
    };
    let empty = empty_native_module()?;
    Ok(vec![
        (NO_FILTER, shipped()?.without_prequal().policy(Policy::LeastRequest)),
        (NATIVE_CHAIN, shipped()?.edit(|config| config.remove_filter(FILTER_NAME))),
        (EMPTY_MODULE, shipped()?.module(&empty_module()?)),
        (PROBES_OFF, shipped()?.filter_settings(off)),
        (
            THREE_CLUSTERS,
            shipped()?
                .add_cluster("second", "/second", replicas)
                .add_cluster("third", "/third", replicas)
                .filter_settings(more),
        ),
        (ADAPTIVE, shipped()?),
        ("+ filter, r_probe = 1", shipped()?.filter_settings(fixed(1))),
        ("+ filter, r_probe = 3", shipped()?.filter_settings(fixed(3))),
        ("+ filter, synchronous, d = 3", shipped()?.filter_settings(synchronous)),
        ("+ filter, no probes (peak_ewma)", shipped()?.filter_settings(probe_free)),
        (
            STRIP,
            shipped()?.policy(Policy::LeastRequest).edit(|config| {
                [FILTER_NAME, SHIM_NAME].iter().for_each(|name| config.remove_filter(name));
            }),
        ),
        (EMPTY_POLICY, native()?.native_module(&empty).edit(without_reports)),
        (EMPTY_NATIVE, native()?.native_module(&empty)),
        (NATIVE_POLICY, native()?.filter_settings(off).edit(without_reports)),
        (NATIVE_OFF, native()?.filter_settings(off)),
        (NATIVE, native()?),
    ])
}

/// Sends requests that are not counted, to fill caches, connections and pools.
async fn warm_up(rounds: Rounds, variants: &[Variant]) -> Result<()> {
    for variant in variants {
        variant.round(CONNECTIONS, rounds.length().min(Duration::from_millis(300))).await?;
    }
    Ok(())
}

async fn saturate(rounds: Rounds, variants: &mut [Variant]) -> Result<()> {
    let begin = Instant::now();
    for number in 1..=rounds.count {
        for index in passes::order(variants.len(), number as usize) {
            let variant = &mut variants[index];
            let round = variant.round(CONNECTIONS, rounds.length()).await?;
            variant.saturated.push(round);
        }
        println!("  round {number} of {}, {:.0} s", rounds.count, begin.elapsed().as_secs_f64());
    }
    Ok(())
}

async fn filter(cost: &Cost) -> Result<bool> {
    println!("Envoy CPU per request: 10 replicas that answer at once, {CONNECTIONS} connections, one worker");
    let backends = Backends::start(&trivial(10))?;
    let (names, configs): (Vec<_>, Vec<_>) = steps(&backends.addresses)?.into_iter().unzip();
    let envoys = tokio::task::spawn_blocking(move || start_envoys(configs)).await??;
    let pids: Vec<u32> = envoys.iter().map(Envoy::pid).collect();
    place(&pids, &[backends.pid()])?;
    let mut variants: Vec<Variant> = names
        .iter()
        .zip(&envoys)
        .map(|(name, envoy)| Variant::new(name, envoy.addr(), vec![envoy.pid()]))
        .collect();
    warm_up(cost.rounds, &variants).await?;
    let before = counters(&envoys)?;
    saturate(cost.rounds, &mut variants).await?;
    let after = counters(&envoys)?;

    let none = variants[0].cpu();
    let mut previous = none;
    let rows: Vec<Vec<String>> = variants
        .iter()
        .zip(before.iter().zip(&after))
        .map(|(variant, (before, after))| {
            let cpu = variant.cpu();
            let requests = (after.requests - before.requests) as f64;
            let row = vec![
                variant.name.to_owned(),
                one(cpu),
                variant.cpu_range(),
                format!("{:+.1}", cpu - previous),
                format!("{:+.1}", cpu - none),
                two(cpu / none),
                format!("{:.0}", variant.per_second()),
                two((after.sent - before.sent) as f64 / requests),
                format!("{:.1} %", (after.steered - before.steered) as f64 / requests * 100.0),
            ];
            previous = cpu;
            row
        })
        .collect();
    let header =
        ["variant", "CPU µs", "min–max", "step", "added", "× none", "req/s", "probes/req", "steered"];
    println!("\n{}", table::render(&header, &rows));
    println!("step: compared with the line above; added and ×: compared with no filter.\n");
    let goals = [
        (PROBES_OFF, "filter without probes, one cluster", ONE_CLUSTER_FACTOR),
        (THREE_CLUSTERS, "filter without probes, three clusters", SEVERAL_CLUSTERS_FACTOR),
        (NATIVE_POLICY, "native policy alone", NATIVE_POLICY_FACTOR),
        (NATIVE_OFF, "native policy and reports", NATIVE_FACTOR),
    ];
    let mut reached = true;
    for (name, what, limit) in goals {
        let variant = variants.iter().find(|variant| variant.name == name).context("a goal of a variant")?;
        let factor = variant.cpu() / none;
        reached &=
            print_verdict(factor <= limit, &format!("{what}: {factor:.2} times no filter (at most {limit})"));
    }
    println!();
    Ok(reached)
}

#[derive(Clone, Copy)]
struct Counters {
    requests: u64,
    sent: u64,
    steered: u64,
}

fn counters(envoys: &[Envoy]) -> Result<Vec<Counters>> {
    tokio::task::block_in_place(|| {
        envoys
            .iter()
            .map(|envoy| {
                let filter = envoy.prequal(CLUSTER)?;
                let requests = envoy.stat("http.ingress.downstream_rq_completed")?;
                Ok(Counters { requests, sent: filter.probes("sent"), steered: filter.steered() })
            })
            .collect()
    })
}

async fn proxies(cost: &Cost) -> Result<bool> {
    let begin = Instant::now();
    println!("As plain reverse proxies before one replica that answers at once, one worker each");
    let backends = Backends::start(&trivial(1))?;
    let replica = backends.addresses[0];
    let agent = start_agents(&[replica], &[])?.pop().context("no agent")?;
    let config = EnvoyConfig::for_replicas(&[replica])?.without_prequal().policy(Policy::RoundRobin);
    let envoy = tokio::task::spawn_blocking(move || Envoy::start(config)).await??;
    let nginx = process::find("nginx").map(|_| RunningPeer::start(Peer::NginxLeastConn, &[replica], 1));
    let nginx = nginx.transpose()?;

    let mut variants = vec![
        Variant::new("direct", replica, vec![]),
        Variant::new("probe-agent", agent.addr(), vec![agent.pid()]),
        Variant::new("Envoy, no filter", envoy.addr(), vec![envoy.pid()]),
    ];
    match &nginx {
        Some(nginx) => variants.push(Variant::new("nginx", nginx.address(), nginx.pids()?)),
        None => println!("  nginx is not installed: skipped"),
    }
    let measured: Vec<u32> = variants.iter().flat_map(|variant| variant.pids.iter().copied()).collect();
    place(&measured, &[backends.pid()])?;
    let length = cost.rounds.length();
    for number in 1..=cost.rounds.count {
        for index in passes::order(variants.len(), number as usize) {
            let variant = &mut variants[index];
            let saturated = variant.round(CONNECTIONS, length).await?;
            let serial = variant.round(1, length / 2).await?;
            variant.saturated.push(saturated);
            variant.serial.push(serial);
        }
        println!("  round {number} of {}, {:.0} s", cost.rounds.count, begin.elapsed().as_secs_f64());
    }

    let direct = variants[0].serial_median();
    let rows: Vec<Vec<String>> = variants
        .iter()
        .map(|variant| {
            let added: Vec<f64> = variant
                .serial
                .iter()
                .zip(&variants[0].serial)
                .map(|(through, direct)| through.median_us - direct.median_us)
                .collect();
            let proxy = !variant.pids.is_empty();
            let if_proxy = |text: String| if proxy { text } else { "–".to_owned() };
            vec![
                variant.name.to_owned(),
                if_proxy(one(variant.cpu())),
                if_proxy(variant.cpu_range()),
                format!("{:.0}", variant.per_second()),
                one(variant.serial_median()),
                if_proxy(format!("{:+.1}", variant.serial_median() - direct)),
                if_proxy(range(&added, one)),
            ]
        })
        .collect();
    let header = ["proxy", "CPU µs", "min–max", "req/s", "serial p50 µs", "added µs", "min–max"];
    println!("\n{}", table::render(&header, &rows));
    println!("CPU and req/s: {CONNECTIONS} connections; serial p50 and added: one connection.\n");
    let (agent, envoy) = (&variants[1], &variants[2]);
    let cpu = print_verdict(
        agent.cpu() <= envoy.cpu(),
        &format!("agent CPU per request {} µs (at most Envoy's {} µs)", one(agent.cpu()), one(envoy.cpu())),
    );
    let latency = print_verdict(
        agent.serial_median() <= envoy.serial_median(),
        &format!(
            "agent adds {} µs at the median (at most Envoy's {} µs)",
            one(agent.serial_median() - direct),
            one(envoy.serial_median() - direct)
        ),
    );
    println!();
    Ok(cpu && latency)
}

async fn memory(requests: u64) -> Result<bool> {
    const READINGS: u64 = 10;
    println!("Agent memory over {requests} requests, {CONNECTIONS} connections");
    let backends = Backends::start(&trivial(1))?;
    let agent: Agent = start_agents(&backends.addresses, &[])?.pop().context("no agent")?;
    let start = resident_kib(agent.pid())?;
    let mut readings = Vec::new();
    for part in 1..=READINGS {
        closed::send(agent.addr(), CONNECTIONS, requests / READINGS).await?;
        readings.push(resident_kib(agent.pid())?);
        println!("  {:>9} requests: {} KiB", part * (requests / READINGS), readings[readings.len() - 1]);
    }
    let (first, last) = (readings[0], readings[readings.len() - 1]);
    let reached = print_verdict(
        last <= first + FLAT_KIB,
        &format!(
            "agent memory {start} KiB idle, {first} KiB after the first tenth, {last} KiB at the end (at most {FLAT_KIB} KiB more)"
        ),
    );
    println!();
    Ok(reached)
}
