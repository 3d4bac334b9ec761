//! `cargo xtask bench`: criterion for code speed, the harness of `bench/` for everything that needs a real Envoy.

use std::ffi::OsString;

use anyhow::Result;

use crate::commands::build::{self, WasmArgs};
use crate::commands::{envoy, generators, go, peers};
use crate::toolchain::Choice;
use crate::{progress, run, workspace};

/// Runs the criterion benchmarks or, with a subcommand, benchmarks through a real Envoy.
///
/// Compare only numbers from the same run: two runs, or two machines, are not comparable.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Option<What>,

    /// Passed to criterion: a filter on benchmark names, or its options
    #[arg(last = true, value_name = "CRITERION ARGS")]
    criterion: Vec<OsString>,
}

#[derive(clap::Subcommand)]
enum What {
    /// Sends load end to end through a real Envoy, compares Prequal with Envoy's own policies, and judges each goal.
    ///
    /// `cargo xtask bench e2e ingress` is the demo's scenario at full length. The other scenarios with a fault are
    /// `stall`, `sinkhole`, `slow-half`, `cpu-bound`, `affinity` and `rules`; those without a fault are `equal`,
    /// `equal-90`, `mix`, `generations`, `queue`, `constant`, `idle` and `fleet`. `--quick` only shows that a scenario
    /// works. Every argument is passed to the harness; `cargo xtask bench e2e -- --help` prints its own help.
    E2e(HarnessArgs),
    /// Compares Prequal with other load balancers in the same run: HAProxy, nginx, Caddy, linkerd's policy and Envoy's
    /// own policies.
    ///
    /// `cargo xtask bench peers equal` runs one fleet of `e2e`. HAProxy and nginx are taken from this machine; if they
    /// are missing, Debian's packages are unpacked under target/ and never installed. Caddy is built from its Go module
    /// into target/bin/. A program that is not available is skipped, with the reason. Every argument is passed to the
    /// harness; `cargo xtask bench peers -- --help` prints its own help.
    Peers(HarnessArgs),
    /// Runs the paper's load ramp on replicas that burn CPU time in cgroups, beside antagonists, and in the simulator.
    ///
    /// Needs root. `cargo xtask bench contention -- --help` prints the harness's own help.
    Contention(HarnessArgs),
    /// Runs Envoy and agents with eight replicas over network namespaces in which some paths lose or mark every packet,
    /// with and without PLB.
    ///
    /// Needs root. `cargo xtask bench plb -- --help` prints the harness's own help.
    Plb(HarnessArgs),
    /// Measures CPU per request, step by step: no filter, filter without probes, filter with probes, the agent.
    ///
    /// Every argument is passed to the harness; `cargo xtask bench cost -- --help` prints its own help.
    Cost(HarnessArgs),
    /// Lets vegeta, fortio, h2load and oha send the demo's load, and compares their figures with those of this
    /// project's generator.
    ///
    /// The first run builds vegeta and fortio from their Go modules and oha from crates.io, into target/bin/, in a few
    /// minutes. h2load is installed with apt if run as root; otherwise the command to run is printed. A generator
    /// that is missing is skipped.
    /// Every argument is passed to the harness; `cargo xtask bench generators -- --help` prints its own help.
    Generators(HarnessArgs),
    /// Measures whether the CPU time of a request grows with replicas, clusters, workers or requests in flight.
    ///
    /// Every argument is passed to the harness; `cargo xtask bench growth -- --help` prints its own help.
    Growth(HarnessArgs),
    /// Measures the resident memory of Envoy per worker, cluster and replica, and of an agent per connection and
    /// stream.
    ///
    /// Every argument is passed to the harness; `cargo xtask bench memory -- --help` prints its own help.
    Memory(HarnessArgs),
    /// Compares many Envoys that each send few requests with one that sends them all, and measures their idle cost.
    ///
    /// Every argument is passed to the harness; `cargo xtask bench sidecars -- --help` prints its own help.
    Sidecars(HarnessArgs),
    /// Replays the arrivals and sizes of a real inference service against replicas with continuous batching.
    ///
    /// `cargo xtask bench trace -- --help` prints the harness's own help.
    Trace(HarnessArgs),
}

#[derive(clap::Args)]
struct HarnessArgs {
    #[command(flatten)]
    wasm: WasmArgs,

    /// Passed to the harness
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.what {
        None => run::check(
            run::cargo()
                .args(["bench", "--package", "prequal-bench", "--benches", "--"])
                .args(&args.criterion),
        ),
        Some(What::E2e(rest)) => harness("e2e", &rest.args, rest.wasm.toolchain),
        Some(What::Peers(rest)) => {
            let setup = if wants_help(&rest.args) { Vec::new() } else { peers::prepare()? };
            harness_with("peers", &rest.args, rest.wasm.toolchain, setup)
        }
        Some(What::Contention(rest)) => harness("contention", &rest.args, rest.wasm.toolchain),
        Some(What::Plb(rest)) => harness("plb", &rest.args, rest.wasm.toolchain),
        Some(What::Growth(rest)) => harness("growth", &rest.args, rest.wasm.toolchain),
        Some(What::Memory(rest)) => harness("memory", &rest.args, rest.wasm.toolchain),
        Some(What::Sidecars(rest)) => harness("sidecars", &rest.args, rest.wasm.toolchain),
        Some(What::Cost(rest)) => harness("cost", &rest.args, rest.wasm.toolchain),
        Some(What::Generators(rest)) => {
            if !wants_help(&rest.args) {
                progress::headline("preparing the generators");
                generators::prepare(&rest.args);
            }
            harness("generators", &rest.args, rest.wasm.toolchain)
        }
        Some(What::Trace(rest)) => harness("trace", &rest.args, rest.wasm.toolchain),
    }
}

/// Sets up everything that the harness needs, then runs it with `subcommand` and `args`.
pub(crate) fn harness(subcommand: &str, args: &[OsString], toolchain: Choice) -> Result<()> {
    harness_with(subcommand, args, toolchain, Vec::new())
}

/// [`harness`] with further environment variables.
fn harness_with(
    subcommand: &str,
    args: &[OsString],
    toolchain: Choice,
    variables: Vec<(&str, OsString)>,
) -> Result<()> {
    let envoy = envoy::default_envoy()?;
    // `--help` needs none of the setup, and another command may be using the same files.
    if !wants_help(args) {
        build::dist(toolchain)?;
    }
    progress::headline("building the harness");
    let program = run::built_program("prequal-bench")?;
    progress::headline(format_args!("prequal-bench {subcommand}"));
    run::check(
        std::process::Command::new(program)
            .current_dir(workspace::root())
            .arg(subcommand)
            .args(args)
            .env("PATH", path()?)
            .envs(variables)
            .env("ENVOY", envoy)
            .env("PREQUAL_DIST", workspace::dist())
            .env("PREQUAL_DIST_TEST", workspace::dist_test()),
    )
}

fn wants_help(args: &[OsString]) -> bool {
    args.iter().any(|arg| arg == "--help")
}

/// `PATH`, with the folder of the programs that xtask builds in front.
fn path() -> Result<OsString> {
    let given = std::env::var_os("PATH").unwrap_or_default();
    Ok(std::env::join_paths(std::iter::once(go::bin()).chain(std::env::split_paths(&given)))?)
}
