//! `cargo xtask plb-guest`: tests the kernel's own PLB in a guest machine. This machine's kernel may lack DCTCP, and a
//! test should not change a machine's default congestion control.

use std::time::Duration;

use anyhow::Result;

use crate::commands::guest::Guest;
use crate::{progress, run};

/// Proves in a guest kernel that PLB repaths, by counting the bytes on each path and reading the labels on the wire.
///
/// Needs x86_64 Debian. Fetches a kernel (34 MB) into target/guest/ once. QEMU, busybox and cpio are installed with apt
/// if run as root; otherwise the command to run is printed. Takes one to three minutes after that, without KVM.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Maximum time in the guest, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 170)]
    timeout: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    prove(Duration::from_secs(args.timeout))
}

/// Time limit for the guest in `cargo xtask test`.
pub(crate) const LIMIT: Duration = Duration::from_secs(170);

/// Builds everything and runs the guest. Fails if a test case fails.
pub(crate) fn prove(limit: Duration) -> Result<()> {
    let guest = Guest::new("plb", MEMORY)?;
    progress::headline("building the guest");
    // Use the features of the whole workspace, which the tests were just built with.
    let plb = run::built_file(run::cargo().args(["build", "--workspace", "--bin", "plb"]), "plb")?;
    let test = run::built_test(run::cargo().args(["test", "--workspace", "--test", TEST]), TEST)?;
    guest.tool("tc", "sbin/tc")?;
    guest.built(&plb, "bin/plb")?;
    guest.built(&test, "bin/guest")?;
    guest.modules(&MODULES)?;
    guest.run("guest", limit)
}

/// The test program that runs in the guest.
const TEST: &str = "guest";

/// Memory of the guest, MiB.
const MEMORY: u32 = 1024;

/// In loading order: each depends only on those before it.
const MODULES: [&str; 8] =
    ["veth", "sch_htb", "sch_netem", "sch_codel", "sch_fq", "tcp_dctcp", "inet_diag", "tcp_diag"];
