//! Duplicates sockets of other processes through a pidfd, so that options can be read and set without the owner's
//! help. Needs the right to trace the owner: the same user, or CAP_SYS_PTRACE.

use std::collections::HashMap;
use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};

use crate::{Error, Result, sys};

/// Duplicates descriptor `fd` of process `pid`. The duplicate is the same socket, so options set on it take effect for
/// the owner too.
///
/// # Errors
/// [`Error::Gone`] for a process or descriptor that does not exist.
pub fn duplicate(pid: u32, fd: i32) -> Result<OwnedFd> {
    let doing = || format!("reaching descriptor {fd} of process {pid}");
    let sort = |source: std::io::Error| match source.raw_os_error() {
        Some(libc::ESRCH) => Error::Gone(format!("no process {pid} (any more)")),
        Some(libc::EINVAL) => Error::Invalid(format!("{pid} is not a process id")),
        Some(libc::EBADF) => Error::Gone(format!("process {pid} has no descriptor {fd} (any more)")),
        _ => Error::kernel(doing(), "be the same user, or root (CAP_SYS_PTRACE)", source),
    };
    let process = sys::pidfd_open(pid).map_err(sort)?;
    sys::pidfd_getfd(process.as_fd(), fd).map_err(sort)
}

/// Process that holds a socket.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Owner {
    /// Process id.
    pub pid: u32,
    /// One of its descriptors.
    pub fd: i32,
    /// Name of the process, `comm`.
    pub command: String,
}

/// Returns the owners of all sockets that the caller may inspect, by inode. If a socket has several owners, the one
/// with the lowest pid is returned.
pub fn owners() -> HashMap<u64, Owner> {
    let mut owners = HashMap::new();
    for pid in processes() {
        let sockets = sockets(pid).unwrap_or_default();
        if sockets.is_empty() {
            continue;
        }
        let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned();
        for (fd, inode) in sockets {
            owners.entry(inode).or_insert_with(|| Owner { pid, fd, command: command.clone() });
        }
    }
    owners
}

/// Returns the ids of all processes of this PID namespace, as `/proc` shows them, sorted.
pub fn processes() -> Vec<u32> {
    let mut pids: Vec<u32> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    pids.sort_unstable();
    pids
}

/// Returns descriptor and inode of every socket of a process, sorted.
///
/// # Errors
/// [`Error::Gone`] for a process that does not exist.
pub fn sockets(pid: u32) -> Result<Vec<(i32, u64)>> {
    let folder = fs::read_dir(format!("/proc/{pid}/fd")).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => Error::Gone(format!("no process {pid} (any more)")),
        _ => Error::kernel(
            format!("listing the sockets of process {pid}"),
            "be the same user, or root (CAP_SYS_PTRACE)",
            source,
        ),
    })?;
    let mut sockets: Vec<(i32, u64)> = folder
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let fd = entry.file_name().to_str()?.parse().ok()?;
            // Descriptors may open and close during the listing.
            let target = fs::read_link(entry.path()).ok()?;
            let inode = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
            Some((fd, inode))
        })
        .collect();
    sockets.sort_unstable();
    Ok(sockets)
}
