//! Lists the obstacles to moving the connections of other processes, before any move is attempted.
//!
//! The daemon moves a connection only if it can verify that nothing pins it. Each of these obstacles therefore leaves
//! connections where they are. This list warns of that at the start. Later, the daemon reports each connection that
//! should move but does not. The rights for BPF are not included: without them, attaching the program fails with an
//! error of its own.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use crate::sysctl;

/// Returns one sentence per obstacle; if there are none, every connection of the host can be inspected.
pub fn obstacles() -> Vec<String> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = capabilities(&status);
    let mut obstacles = Vec::new();
    if effective & SYS_PTRACE == 0 {
        obstacles.push("no CAP_SYS_PTRACE: connections of other users stay where they are".to_owned());
    }
    if effective & (DAC_READ_SEARCH | DAC_OVERRIDE) == 0 {
        obstacles.push("no CAP_DAC_READ_SEARCH: connections of other users stay where they are".to_owned());
    }
    if fs::metadata("/proc/self/ns/pid").is_ok_and(|namespace| namespace.ino() != FIRST_PID_NAMESPACE) {
        obstacles.push(
            "not in the host's PID namespace: connections of processes outside this namespace stay where they are"
                .to_owned(),
        );
    }
    if sysctl::read_number("net.core.txrehash").ok().flatten() == Some(0) {
        obstacles.push(
            "net.core.txrehash=0 pins every connection whose owner did not set SO_TXREHASH to 1".to_owned(),
        );
    }
    obstacles
}

/// Returns the effective set from `/proc/PID/status`; empty if it cannot be read.
fn capabilities(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

const DAC_OVERRIDE: u64 = 1 << 1;
const DAC_READ_SEARCH: u64 = 1 << 2;
const SYS_PTRACE: u64 = 1 << 19;
/// `PROC_PID_INIT_INO`, the same on every kernel.
const FIRST_PID_NAMESPACE: u64 = 0xefff_fffc;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read() {
        assert_eq!(
            capabilities("Name:\tplb\nCapPrm:\t0\nCapEff:\t0000000000080004\n"),
            SYS_PTRACE | DAC_READ_SEARCH
        );
        assert_eq!(capabilities("CapEff:\tnonsense\n"), 0);
        assert_eq!(capabilities(""), 0);
    }
}
