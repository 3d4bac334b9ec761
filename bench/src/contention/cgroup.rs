//! Control groups of the kernel's CPU controller, in version 1 or version 2 of its interface.
//!
//! Version 1 has weights from 2 to 262144 in `cpu.shares` (default 1024) and the quota in two files. Version 2 has
//! weights from 1 to 10000 in `cpu.weight` (default 100), quota and period in `cpu.max`, and passes a controller on to
//! the groups below only if `cgroup.subtree_control` says so.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};

/// A group. Dropping it removes it; its processes and the groups below must be gone.
#[derive(Debug)]
pub(super) struct Cgroup {
    path: PathBuf,
    interface: Interface,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Interface {
    V1,
    V2,
}

impl Cgroup {
    /// Creates a group directly below the root. Removes an empty one that an earlier run has left.
    pub(super) fn top(name: &str) -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let (root, interface) = controller(&mounts, |root| {
            fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default()
        })
        .context("no cgroup hierarchy with the CPU controller is mounted")?;
        if interface == Interface::V2 {
            pass_on(&root)?;
        }
        let path = root.join(name);
        if path.is_dir() {
            clear(&path).with_context(|| {
                format!("{} exists and is in use; is another run under way?", path.display())
            })?;
        }
        Self::create(path, interface)
    }

    /// Creates a group below this one.
    pub(super) fn below(&self, name: &str) -> Result<Self> {
        if self.interface == Interface::V2 {
            pass_on(&self.path)?;
        }
        Self::create(self.path.join(name), self.interface)
    }

    fn create(path: PathBuf, interface: Interface) -> Result<Self> {
        fs::create_dir(&path)
            .with_context(|| format!("creating the cgroup {} (this needs root)", path.display()))?;
        Ok(Self { path, interface })
    }

    /// Sets the share of contended CPU time, relative to the default of 1.
    pub(super) fn weigh(&self, weight: f64) -> Result<()> {
        match self.interface {
            Interface::V1 => self.write("cpu.shares", &format!("{:.0}", weight * 1024.0)),
            Interface::V2 => self.write("cpu.weight", &format!("{:.0}", weight * 100.0)),
        }
    }

    /// Limits the group to `cores` in every `period`.
    pub(super) fn limit(&self, cores: f64, period: Duration) -> Result<()> {
        let quota = (cores * period.as_micros() as f64).round();
        let period = period.as_micros();
        match self.interface {
            Interface::V1 => {
                self.write("cpu.cfs_period_us", &period.to_string())?;
                self.write("cpu.cfs_quota_us", &format!("{quota:.0}"))
            }
            Interface::V2 => self.write("cpu.max", &format!("{quota:.0} {period}")),
        }
    }

    /// Moves a process into the group, with all of its threads.
    pub(super) fn add(&self, pid: u32) -> Result<()> {
        self.write("cgroup.procs", &pid.to_string())
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.path.join(file);
        fs::write(&path, text).with_context(|| format!("writing {text:?} to {}", path.display()))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The kernel needs a moment to remove an ended process from its group.
        for _ in 0..50 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            sleep(Duration::from_millis(10));
        }
        eprintln!("the cgroup {} could not be removed", self.path.display());
    }
}

/// Finds the CPU controller in the text of `/proc/self/mounts`; `controllers` reads the list of a version 2 hierarchy.
fn controller(mounts: &str, controllers: impl Fn(&Path) -> String) -> Option<(PathBuf, Interface)> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let (_, root, kind, options) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let root = PathBuf::from(root);
        match kind {
            "cgroup" => options.split(',').any(|option| option == "cpu").then_some((root, Interface::V1)),
            "cgroup2" => {
                let has_cpu = controllers(&root).split_whitespace().any(|name| name == "cpu");
                has_cpu.then_some((root, Interface::V2))
            }
            _ => None,
        }
    })
}

/// Makes the CPU controller available to the groups below `path`.
fn pass_on(path: &Path) -> Result<()> {
    let file = path.join("cgroup.subtree_control");
    fs::write(&file, "+cpu").with_context(|| format!("writing +cpu to {} (this needs root)", file.display()))
}

/// Removes a group and all groups below it.
fn clear(path: &Path) -> Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            clear(&entry.path())?;
        }
    }
    Ok(fs::remove_dir(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "cgroup /sys/fs/cgroup/cpuset cgroup rw,relatime,cpuset 0 0\n\
                      cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,nosuid,cpu,cpuacct 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0\n";

    #[test]
    fn the_cpu_controller_is_found_in_either_version() {
        let found = controller(V1, |_| String::new());
        assert_eq!(found, Some((PathBuf::from("/sys/fs/cgroup/cpu,cpuacct"), Interface::V1)));
        let v2 = "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n";
        let found = controller(v2, |_| "cpuset cpu io memory pids\n".to_owned());
        assert_eq!(found, Some((PathBuf::from("/sys/fs/cgroup"), Interface::V2)));
        assert_eq!(controller(v2, |_| "cpuset memory\n".to_owned()), None, "cpuset is another controller");
    }
}
