//! Sends millions of requests through the shipped configuration, with failures of every kind mixed in, and checks
//! memory, counters and connections afterwards.
//!
//! This file sends the requests and judges the result. It does not measure latency; `cargo xtask bench e2e` does. The
//! kinds of requests and their expected outcomes are in `soak/kinds.rs`, memory over time in `soak/memory.rs`.

mod kinds;
mod memory;

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use prequal_testbed::{Agent, AgentOptions, Backend, Client, Envoy, EnvoyConfig, IDLE_PROBES, Reply};
use serde_json::json;

use crate::deployment::CLUSTER;
use crate::goals::print_verdict;
use crate::table;
use kinds::{RequestKind, TIMEOUT_PATH};
use memory::{MemorySeries, Samples};

/// Sends requests of many kinds through Envoy, filter and agents, then checks memory, counters and connections
#[derive(clap::Args)]
pub(crate) struct Soak {
    /// Number of requests to send
    #[arg(long, default_value_t = 10_000_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1_000..))]
    requests: u64,

    /// Stop sending after this many seconds, even if requests are left
    #[arg(long, value_name = "N")]
    seconds: Option<u64>,

    /// Requests in parallel
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    at_once: u16,
}

const REPLICAS: usize = 4;
const WORKERS: u32 = 2;
/// Interval between two samples of the memory.
const SAMPLED: Duration = Duration::from_secs(1);
/// Interval between two lines of progress.
const REPORTED: Duration = Duration::from_secs(60);
/// Maximum time until everything in flight has ended.
const SETTLES: Duration = Duration::from_secs(30);

/// Requests between two checks while a replica is ejected.
const TRIALS: u64 = 50;

/// The processes under test.
struct Bed {
    backends: Vec<Backend>,
    agents: Vec<Agent>,
    envoy: Envoy,
}

/// For each kind of request, the number that ended as expected and the number that did not.
#[derive(Debug, Default)]
struct Tally([[AtomicU64; 2]; RequestKind::COUNT]);

pub(crate) async fn run(args: &Soak) -> Result<ExitCode> {
    let bed = Arc::new(tokio::task::block_in_place(start)?);
    let (began, tally) = (Instant::now(), Arc::new(Tally::default()));
    let samples = send(args, &bed, &tally).await;
    let seconds = began.elapsed().as_secs_f64();
    let sent: u64 = tally.0.iter().flatten().map(|count| count.load(Ordering::Relaxed)).sum();
    println!(
        "{sent} requests in {seconds:.0} s, {:.0} a second, {} at a time\n",
        sent as f64 / seconds,
        args.at_once
    );
    let mut reached = judge_requests(&tally);
    reached &= judge_memory(&samples);
    let given_up =
        tally.0[RequestKind::Abort as usize].iter().map(|count| count.load(Ordering::Relaxed)).sum();
    reached &= tokio::task::block_in_place(|| judge_rest(&bed, sent, given_up))?;
    // The tasks that shared the bed ended with the load.
    let bed = Arc::into_inner(bed).context("the load still runs")?;
    let at_once = args.at_once.into();
    reached &= tokio::task::block_in_place(|| judge_connections(bed, at_once))?;
    println!("\n{}", if reached { "PASS" } else { "MISS" });
    Ok(if reached { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn start() -> Result<Bed> {
    let mut backends = Vec::new();
    for _ in 0..REPLICAS {
        let backend = Backend::start(Reply::ok())?;
        backend.set_handler(|seen| kinds::reply(&seen.path));
        backends.push(backend);
    }
    let options =
        AgentOptions { args: ["--threads", "1"].map(str::to_owned).to_vec(), ..AgentOptions::default() };
    let agents = backends
        .iter()
        .map(|backend| Agent::start_with(backend.addr(), &options))
        .collect::<Result<Vec<_>>>()?;
    let addrs: Vec<SocketAddr> = agents.iter().map(Agent::addr).collect();
    // A separate route for requests that Envoy times out: the shipped 15 s would take the whole soak.
    let config = EnvoyConfig::for_replicas(&addrs)?.concurrency(WORKERS).edit(|config| {
        let mut route = config.routes_mut().last().cloned().unwrap_or_default();
        route["match"] = json!({"prefix": TIMEOUT_PATH});
        route["route"]["timeout"] = json!("0.05s");
        let last = config.routes_mut().len() - 1;
        config.routes_mut().insert(last, route);
    });
    let envoy = Envoy::start(config)?;
    Ok(Bed { backends, agents, envoy })
}

/// Sends all requests and samples the memory meanwhile. All clients have been dropped on return.
async fn send(args: &Soak, bed: &Arc<Bed>, tally: &Arc<Tally>) -> Vec<(String, Samples)> {
    let next = Arc::new(AtomicU64::new(0));
    let stop = args.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let target = bed.envoy.addr();
    let clients = [Client::reconnecting(target, false), Client::reconnecting(target, true)];
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..args.at_once {
        let (next, tally, clients, requests) = (next.clone(), tally.clone(), clients.clone(), args.requests);
        tasks.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= requests || stop.is_some_and(|stop| Instant::now() >= stop) {
                    return;
                }
                let kind = RequestKind::of(number);
                let well = kind.send(&clients, target).await;
                tally.0[kind as usize][usize::from(!well)].fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    drop(clients);
    let mut memory = MemorySeries::new(&bed.agents, &bed.envoy);
    let mut tick = tokio::time::interval(SAMPLED);
    let began = Instant::now();
    let mut progress = tokio::time::interval_at((began + REPORTED).into(), REPORTED);
    while !tasks.is_empty() {
        tokio::select! {
            _ = tick.tick() => memory.sample(),
            _ = progress.tick() => {
                let begun = next.load(Ordering::Relaxed).min(args.requests);
                eprintln!("  {begun} of {} requests, {} s", args.requests, began.elapsed().as_secs());
            }
            _ = tasks.join_next() => {}
        }
    }
    memory.finish()
}

/// Checks that the requests of each kind ended as expected.
fn judge_requests(tally: &Tally) -> bool {
    let count = |kind: RequestKind, bad: usize| tally.0[kind as usize][bad].load(Ordering::Relaxed);
    let rows: Vec<Vec<String>> = RequestKind::ALL
        .into_iter()
        .map(|kind| vec![kind.what().to_owned(), count(kind, 0).to_string(), count(kind, 1).to_string()])
        .collect();
    println!("{}", table::render(&["requests", "as expected", "otherwise"], &rows));
    let bad: u64 = RequestKind::ALL.into_iter().map(|kind| count(kind, 1)).sum();
    print_verdict(bad == 0, &format!("{bad} requests ended differently than expected (expected: 0)"))
}

fn judge_memory(samples: &[(String, Samples)]) -> bool {
    let rows: Vec<Vec<String>> = samples
        .iter()
        .map(|(name, samples)| {
            let [first, half, last] = samples.at_start_half_end();
            let kib = |kib: f64| format!("{kib:.0}");
            vec![name.clone(), kib(first), kib(half), kib(last), format!("{:+.0}", samples.growth())]
        })
        .collect();
    println!("\n{}", table::render(&["KiB resident", "start", "half", "end", "fit of the 2nd half"], &rows));
    let judged = samples.iter().map(|(name, samples)| {
        print_verdict(
            samples.is_flat(),
            &format!("{name}: grows by no more than {:.0} KiB", samples.allowed()),
        )
    });
    // Judge every process, even after one that grows.
    judged.fold(true, |reached, flat| reached & flat)
}

/// Checks that nothing is in flight and that all counters balance. Polls, because the last requests still have to end,
/// and because replicas that hung stay ejected until requests to them have been answered.
fn judge_rest(bed: &Bed, mut sent: u64, given_up: u64) -> Result<bool> {
    let started = Instant::now();
    let wrong = loop {
        let wrong = unsettled(bed, sent, given_up)?;
        if wrong.is_empty() || started.elapsed() > SETTLES {
            break wrong;
        }
        if bed.envoy.prequal(CLUSTER)?.other("prequal_ejected") > 0 {
            let client = bed.envoy.client();
            for _ in 0..TRIALS {
                client.get("/")?;
            }
            sent += TRIALS;
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    let agents: BTreeMap<&str, f64> = ["success", "failure", "aborted", "streaming"]
        .into_iter()
        .map(|class| {
            let name = format!("prequal_agent_requests_total{{class=\"{class}\"}}");
            let of = |agent: &Agent| agent.metrics().ok().and_then(|metrics| metrics.get(&name).copied());
            (class, bed.agents.iter().filter_map(of).sum())
        })
        .collect();
    println!("\nthe agents counted {agents:?}");
    let text = if wrong.is_empty() {
        "everything is back at zero and balanced".to_owned()
    } else {
        wrong.join("; ")
    };
    Ok(print_verdict(wrong.is_empty(), &text))
}

/// Lists the counts that have not settled. A request that its client aborts may not have reached the filter.
fn unsettled(bed: &Bed, sent: u64, given_up: u64) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    let mut expect = |what: String, found: u64, expected: u64| {
        if found != expected {
            wrong.push(format!("{what} is {found}, not {expected}"));
        }
    };
    for (number, (agent, backend)) in bed.agents.iter().zip(&bed.backends).enumerate() {
        expect(format!("RIF of agent {number}"), agent.rif()?.into(), 0);
        expect(format!("requests at backend {number}"), backend.active().unsigned_abs(), 0);
        expect(format!("tunnels of agent {number}"), gauge(agent, TUNNELS)?, 0);
    }
    let stats = bed.envoy.stats()?;
    // Envoy keeps idle connections; the agents must count exactly these.
    let kept = ["cluster.replicas.upstream_cx_active", "cluster.replicas-agent.upstream_cx_active"];
    let kept = kept.iter().filter_map(|gauge| stats.get(*gauge)).sum();
    let mut open = 0;
    for agent in &bed.agents {
        open += gauge(agent, CONNECTIONS)?;
    }
    expect("connections that the agents count".to_owned(), open, kept);
    for gauge in [
        "http.ingress.downstream_rq_active",
        "http.ingress.downstream_cx_active",
        "cluster.replicas.upstream_rq_active",
        "cluster.replicas.upstream_rq_pending_active",
        "cluster.replicas-agent.upstream_rq_active",
    ] {
        let found = stats.get(gauge).copied().with_context(|| format!("Envoy has no {gauge}"))?;
        expect(gauge.to_owned(), found, 0);
    }
    // Idle probes continue, so a few probes may be in flight.
    let filter = bed.envoy.prequal(CLUSTER)?;
    let picks: u64 = filter.picks.values().sum();
    let ended: u64 = filter.outcomes.values().sum();
    expect(
        "requests placed by the filter".to_owned(),
        picks,
        picks.clamp(sent.saturating_sub(given_up), sent),
    );
    expect("requests that the filter saw end".to_owned(), ended, picks);
    let open = filter.probes_open().unsigned_abs();
    if open > IDLE_PROBES {
        expect("probes without an end".to_owned(), open, 0);
    }
    expect("replicas ejected at rest".to_owned(), filter.other("prequal_ejected"), 0);
    expect("members".to_owned(), filter.other("prequal_members"), REPLICAS as u64);
    Ok(wrong)
}

const CONNECTIONS: &str = "prequal_agent_connections{port=\"service\"}";
const TUNNELS: &str = "prequal_agent_tunnels";

/// A gauge of an agent.
fn gauge(agent: &Agent, name: &str) -> Result<u64> {
    let value = *agent.metrics()?.get(name).with_context(|| format!("no {name} in /metrics"))?;
    ensure!(value >= 0.0 && value.fract() == 0.0, "{name} is {value}");
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    Ok(value as u64)
}

/// HTTP/2 connections that an agent may open to its backend (`--max-upstream-connections`).
const HTTP2_CONNECTIONS: usize = 16;

/// Checks that no connection to an agent is left once Envoy is gone, by the system's count and by the agents' own.
/// Agents keep idle connections to their backends: at most `at_once` over HTTP/1.1, and a few over HTTP/2.
fn judge_connections(bed: Bed, at_once: usize) -> Result<bool> {
    let Bed { backends, agents, envoy } = bed;
    drop(envoy);
    ensure!(backends.len() == agents.len(), "a replica is gone");
    let to_agents: Vec<u16> = agents.iter().map(|agent| agent.addr().port()).collect();
    let to_backends: Vec<u16> = backends.iter().map(|backend| backend.addr().port()).collect();
    let started = Instant::now();
    let left = loop {
        let mut counted = 0;
        for agent in &agents {
            counted += gauge(agent, CONNECTIONS)? + gauge(agent, TUNNELS)?;
        }
        let left = [established(&to_agents)? as u64, counted];
        if left == [0; 2] || started.elapsed() > SETTLES {
            break left;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let [open, counted] = left;
    let kept = established(&to_backends)?;
    let most = backends.len() * (at_once + HTTP2_CONNECTIONS);
    let mut reached = print_verdict(
        open == 0,
        &format!("{open} connections to the agents are left after Envoy has gone (expected: 0)"),
    );
    reached &= print_verdict(
        counted == 0,
        &format!("the agents count {counted} open connections and tunnels (expected: 0)"),
    );
    reached &= print_verdict(
        kept <= most,
        &format!("the agents keep {kept} connections to the backends (≤ {most})"),
    );
    Ok(reached)
}

/// Established or half-closed connections whose local port is one of `ports`.
fn established(ports: &[u16]) -> Result<usize> {
    const CLOSED: [&str; 3] = ["06", "07", "0A"];
    let table = fs::read_to_string("/proc/net/tcp").context("reading /proc/net/tcp")?;
    let open = table.lines().skip(1).filter(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let port = fields.get(1).and_then(|local| u16::from_str_radix(local.rsplit(':').next()?, 16).ok());
        port.is_some_and(|port| ports.contains(&port))
            && fields.get(3).is_some_and(|state| !CLOSED.contains(state))
    });
    Ok(open.count())
}
