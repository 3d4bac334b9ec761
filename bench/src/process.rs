//! Memory, placement and limits of processes. Linux only; CPU time comes from the testbed.

use std::env;
use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

/// Resident memory of `pid` in KiB.
pub(crate) fn resident_kib(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS")?;
    line.split_whitespace().nth(1).context("VmRSS without a value")?.parse().context("VmRSS")
}

/// Finds a program in `PATH`, or where Debian keeps servers.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// `root` and all its descendants.
pub(crate) fn tree(root: u32) -> Result<Vec<u32>> {
    let mut pids = vec![root];
    let mut next = 0;
    while let Some(pid) = pids.get(next).copied() {
        for thread in threads(pid)? {
            // A thread may end between the listing and the reading.
            let Ok(text) = fs::read_to_string(format!("/proc/{pid}/task/{thread}/children")) else {
                continue;
            };
            pids.extend(text.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
        next += 1;
    }
    Ok(pids)
}

/// Number of cores that this process may use, as of the first call. [`pin`] does not change it, although the system
/// then counts only the cores to which this process is bound.
pub(crate) fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Binds every thread of `pid` to `cores`; threads that it starts later inherit the binding.
pub(crate) fn pin(pid: u32, cores: Range<usize>) -> Result<()> {
    for thread in threads(pid)? {
        // SAFETY: a zeroed cpu_set_t is the empty set; the calls only read and write that local value.
        let outcome = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            cores.clone().for_each(|core| libc::CPU_SET(core, &mut set));
            libc::sched_setaffinity(thread as libc::pid_t, size_of::<libc::cpu_set_t>(), &set)
        };
        if outcome != 0 {
            bail!("binding thread {thread} to cores {cores:?}: {}", std::io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Raises the limit of open files to what the system allows: every request in flight needs several.
pub(crate) fn raise_file_limit() {
    // SAFETY: both calls get a valid pointer to a local rlimit.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 && limit.rlim_cur < limit.rlim_max {
            limit.rlim_cur = limit.rlim_max;
            // If this fails, the old limit stays, which is enough for the demo.
            let _ = libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

fn threads(pid: u32) -> Result<Vec<u32>> {
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task")).with_context(|| format!("process {pid}"))? {
        threads.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_this_process_is_read() {
        assert!(resident_kib(std::process::id()).unwrap() > 0);
    }

    #[test]
    fn programs_are_found_by_name() {
        assert!(find("sh").unwrap().ends_with("sh"));
        assert_eq!(find("no such program"), None);
    }

    #[test]
    fn a_tree_includes_grandchildren() {
        // The `:` keeps the shell from replacing itself with its last command.
        let nested = "sleep 5 & echo $!; wait; :";
        let mut shell = std::process::Command::new("sh")
            .args(["-c", &format!("sh -c '{nested}'; :")])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(shell.stdout.as_mut().unwrap()), &mut line)
            .unwrap();
        let sleeping: u32 = line.trim().parse().unwrap();
        let pids = tree(shell.id()).unwrap();
        for pid in &pids {
            // SAFETY: kill takes plain integers; these processes were started above.
            unsafe { libc::kill(*pid as libc::pid_t, libc::SIGKILL) };
        }
        shell.wait().unwrap();
        assert_eq!(pids.len(), 3, "{pids:?}");
        assert!(pids.contains(&sleeping), "{pids:?}, {sleeping}");
    }
}
