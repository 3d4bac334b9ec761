//! `cargo xtask silent`: tests the agent with far more silent connections than this machine's file descriptor limit
//! allows. The other hostile peers are tested on the machine itself (`crates/probe-agent/tests/floods.rs`).

use std::time::Duration;

use anyhow::Result;

use crate::commands::guest::Guest;
use crate::{progress, run};

/// Opens 100 000 silent connections to an agent, in a guest machine without a file descriptor limit.
///
/// Runs the release build of `crates/probe-agent/tests/floods.rs` in QEMU without KVM. All well-behaved requests must
/// be answered, and the agent's memory must stay bounded. Once all connections are open, 200 requests a second must be
/// served. Needs x86_64 Debian. Fetches a kernel (34 MB) into target/guest/ once. QEMU, busybox and cpio are installed
/// with apt if run as root; otherwise the command to run is printed. Takes two to three minutes after that. Run nothing
/// else meanwhile: on a busy machine, the emulated CPU does not reach the rate.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of silent connections
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(..=400_000))]
    connections: u32,

    /// Maximum time in the guest, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    timeout: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let guest = Guest::new(TEST, MEMORY + args.connections / CONNECTIONS_PER_MIB)?;
    progress::headline("building the guest");
    let test = run::built_test(
        run::cargo().args(["test", "--release", "--package", "probe-agent", "--test", TEST]),
        TEST,
    )?;
    let agent = run::built_file(
        run::cargo().args(["build", "--release", "--package", "probe-agent", "--bin", AGENT]),
        AGENT,
    )?;
    guest.tool("prlimit", "bin/prlimit")?;
    guest.built(&test, "bin/floods")?;
    // The test starts the agent by the path at which it was built.
    guest.built(&agent, agent.to_string_lossy().trim_start_matches('/'))?;
    let command =
        format!("PREQUAL_ONLY_SILENT=1 PREQUAL_SILENT_CONNECTIONS={} floods --nocapture", args.connections);
    guest.run(&command, Duration::from_secs(args.timeout))
}

const TEST: &str = "floods";
const AGENT: &str = "probe-agent";

/// Memory of the guest without silent connections, MiB.
const MEMORY: u32 = 1024;

/// A silent connection needs at most 32 KiB in the guest: two sockets with their buffers, and the agent's own memory.
const CONNECTIONS_PER_MIB: u32 = 32;
