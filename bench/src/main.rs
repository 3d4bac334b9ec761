//! Benchmarks, nearly all of them through a real Envoy: the demo, the end-to-end scenarios, costs, and others. The
//! simulator, which needs no Envoy, is also part of this program.
//!
//! `cargo xtask demo` and `cargo xtask bench` set up this program's environment and run it. `benches/` measures the
//! cost of the rules without Envoy.

mod arm;
mod backends;
mod closed;
mod comparison;
mod contention;
mod cost;
mod deadline;
mod demo;
mod deployment;
mod e2e;
mod generators;
mod goals;
mod load;
mod passes;
mod peer;
mod plb;
mod plot;
mod process;
mod recovery;
mod scenario;
mod sidecars;
mod sim;
mod soak;
mod stats;
mod streams;
mod table;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "prequal-bench", about = "Benchmarks through a real Envoy")]
struct Cli {
    /// In `demo` and `e2e`: run Prequal as a native dynamic module, instead of as a WebAssembly filter
    #[arg(long, global = true)]
    native: bool,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Prequal against Envoy's own policies: table, plot, verdict
    Demo(demo::Demo),
    /// Scenarios that are judged against the project's goals
    #[command(subcommand)]
    E2e(e2e::EndToEnd),
    /// Prequal against other load balancers in the same run: HAProxy, nginx, Caddy, linkerd's policy, Envoy's own
    Peers(e2e::Peers),
    /// CPU time per request: the filter step by step, and the agent against other proxies
    Cost(cost::Cost),
    /// The paper's load ramp: replicas that burn CPU in cgroups, next to antagonists; needs root
    Contention(contention::Contention),
    /// Replicas and antagonists of `contention` (started by it)
    #[command(hide = true)]
    ContentionPart,
    /// Checks our load generator against others: vegeta, fortio, h2load and oha
    Generators(generators::Generators),
    /// CPU time per request as replicas, clusters, workers or requests in flight grow
    Growth(cost::growth::Growth),
    /// Resident memory of Envoy by workers, clusters and replicas, and of an agent
    Memory(cost::resident::MemoryArgs),
    /// Many Envoys with few requests each, against one: latency, messages, and the cost at rest
    Sidecars(sidecars::Sidecars),
    /// PLB below the service, on a fabric of network namespaces: the effect of repathing
    Plb(plb::Plb),
    /// Agents and backends of `plb` (started by it)
    #[command(hide = true)]
    PlbServers(plb::Servers),
    /// Envoy and load of `plb` (started by it)
    #[command(hide = true)]
    PlbClient(plb::Client),
    /// Millions of requests with failures mixed in: memory, counters and connections afterwards
    Soak(soak::Soak),
    /// Arrivals and sizes of a real inference service, replayed against engines with continuous batching
    Trace(trace::Replay),
    /// The simulator: policies in virtual time, without Envoy
    Sim(sim::Sim),
    /// The proxy with linkerd's policy (started by `peers`)
    #[command(hide = true)]
    P2c(peer::p2c::Args),
    /// The replicas of a benchmark (started by the other commands)
    #[command(hide = true)]
    Backends,
}

fn main() -> anyhow::Result<ExitCode> {
    process::raise_file_limit();
    let Cli { native, command } = Cli::parse();
    if native {
        println!("Prequal runs as a native dynamic module.");
        deployment::NATIVE.store(true, std::sync::atomic::Ordering::Relaxed);
    }
    if let Command::Backends = &command {
        return backends::serve().map(|()| ExitCode::SUCCESS);
    }
    if let Command::P2c(args) = &command {
        return peer::p2c::serve(args).map(|()| ExitCode::SUCCESS);
    }
    if let Command::ContentionPart = &command {
        return contention::part().map(|()| ExitCode::SUCCESS);
    }
    if let Command::Sim(sim) = &command {
        return sim::run(sim).map(|()| ExitCode::SUCCESS);
    }
    let needs_envoy = !matches!(&command, Command::Contention(args) if args.simulated);
    if let Some(missing) = prequal_testbed::missing(&[]).filter(|_| needs_envoy) {
        eprintln!("{missing}");
        return Ok(ExitCode::from(2));
    }
    match &command {
        Command::Plb(args) => return plb::run(args),
        Command::PlbServers(args) => return plb::servers(args).map(|()| ExitCode::SUCCESS),
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        match &command {
            Command::Demo(demo) => demo::run(demo).await,
            Command::E2e(what) => e2e::run(what).await,
            Command::Peers(args) => e2e::peers(args).await,
            Command::Cost(cost) => cost::run(cost).await,
            Command::Contention(args) => contention::run(args).await,
            Command::Generators(args) => generators::run(args).await,
            Command::Growth(growth) => cost::growth::run(growth).await,
            Command::Memory(memory) => cost::resident::run(memory).await,
            Command::Sidecars(sidecars) => sidecars::run(sidecars).await,
            Command::PlbClient(args) => plb::client(args).await,
            Command::Soak(args) => soak::run(args).await,
            Command::Trace(args) => trace::run(args).await,
            Command::ContentionPart
            | Command::Plb(_)
            | Command::PlbServers(_)
            | Command::P2c(_)
            | Command::Backends
            | Command::Sim(_) => {
                unreachable!("handled above")
            }
        }
    })
}
