//! A control group with little memory, for a process and a neighbour that fills it. Works with versions 1 and 2 of
//! control groups; needs root.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// Maximum memory of the group.
pub(crate) const LIMIT_MB: usize = 64;

/// The path of the memory controller, and the names of its files.
struct Controller {
    root: &'static str,
    limit: &'static str,
    /// The limit that includes swap; absent where the kernel does not count swap.
    swap: &'static str,
    /// The value to write to `swap`.
    swap_limit: usize,
}

const V1: Controller = Controller {
    root: "/sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    swap: "memory.memsw.limit_in_bytes",
    swap_limit: LIMIT_MB << 20,
};
const V2: Controller =
    Controller { root: "/sys/fs/cgroup", limit: "memory.max", swap: "memory.swap.max", swap_limit: 0 };

impl Controller {
    fn find() -> Result<Self> {
        let controllers = Path::new(V2.root).join("cgroup.subtree_control");
        if Path::new(V1.root).join("cgroup.procs").exists() {
            return Ok(V1);
        }
        match fs::read_to_string(controllers) {
            Ok(list) if list.split_ascii_whitespace().any(|name| name == "memory") => Ok(V2),
            _ => bail!("no memory controller of control groups in /sys/fs/cgroup"),
        }
    }

    /// The group of the process `pid` now.
    fn group_of(&self, pid: u32) -> Result<PathBuf> {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let path = groups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            let memory = controllers.split(',').any(|name| name == "memory");
            (memory || (self.root == V2.root && controllers.is_empty())).then_some(path)
        });
        let path = path.with_context(|| format!("process {pid} is in no control group"))?;
        Ok(Path::new(self.root).join(path.trim_start_matches('/')))
    }
}

/// The group, the process in it, and the group that the process came from.
pub(crate) struct Tight {
    group: PathBuf,
    home: PathBuf,
    pid: u32,
}

impl Tight {
    /// Moves `pid` into a new group. Memory that the process already uses is not counted; memory that it allocates from
    /// now on is.
    pub(crate) fn around(pid: u32) -> Result<Self> {
        let controller = Controller::find()?;
        let home = controller.group_of(pid)?;
        let tight = Self { group: make(&controller)?, home, pid };
        join(&tight.group, pid)?;
        Ok(tight)
    }

    pub(crate) fn group(&self) -> &Path {
        &self.group
    }
}

/// Moves the process back, if it still runs, and removes the group.
impl Drop for Tight {
    fn drop(&mut self) {
        let _ = join(&self.home, self.pid);
        remove(&self.group);
    }
}

/// Why no such group can be made here; `None` if one can.
pub(crate) fn missing() -> Option<String> {
    let made = Controller::find().and_then(|controller| make(&controller));
    match made {
        Ok(group) => {
            remove(&group);
            None
        }
        Err(error) => Some(format!("{error:#}")),
    }
}

/// Puts the process `pid` into `group`; 0 is the caller.
pub(crate) fn join(group: &Path, pid: u32) -> Result<()> {
    let file = group.join("cgroup.procs");
    fs::write(&file, pid.to_string()).with_context(|| format!("writing {}", file.display()))
}

fn make(controller: &Controller) -> Result<PathBuf> {
    let group = Path::new(controller.root).join(format!("prequal-chaos-{}", std::process::id()));
    fs::create_dir(&group).with_context(|| format!("creating {}", group.display()))?;
    let set = |file: &str, value: usize| {
        let path = group.join(file);
        match fs::write(&path, value.to_string()) {
            Err(error) if error.kind() == ErrorKind::NotFound && file == controller.swap => Ok(()),
            written => written.with_context(|| format!("writing {}", path.display())),
        }
    };
    // In this order, because the limit with swap may not be lower than the one without.
    let limited =
        set(controller.limit, LIMIT_MB << 20).and_then(|()| set(controller.swap, controller.swap_limit));
    if let Err(error) = limited {
        remove(&group);
        return Err(error);
    }
    Ok(group)
}

/// Removes the group. Tries for two seconds, because a killed process stays in its group until it has ended.
fn remove(group: &Path) {
    let start = Instant::now();
    while fs::remove_dir(group).is_err_and(|error| error.kind() != ErrorKind::NotFound) {
        if start.elapsed() > Duration::from_secs(2) {
            eprintln!("{} is left behind", group.display());
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
