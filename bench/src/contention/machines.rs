//! The machines of the model: each is a cgroup with a quota, in which a replica and an antagonist compete by weight.
//!
//! While its antagonist is quiet, a replica can use more than its allocation. However busy the antagonist is, the
//! kernel leaves the replica its allocation. Weights decide only among processes on the same core, so a machine is
//! bound to one.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use prequal_testbed::cpu_time;

use super::cgroup::Cgroup;
use super::part::{PartProcess, Role};
use super::replica;
use super::scale::{PERIOD, ROOM, machine};
use super::spare::Course;
use crate::process;

/// Name of the cgroup of all machines.
const TOP: &str = "prequal-contention";

/// All machines. Dropping them ends their processes and removes their cgroups.
pub(super) struct Machines {
    machines: Vec<Machine>,
    _top: Cgroup,
}

// Fields are dropped in order: processes end before their groups are removed, and inner groups go before outer ones.
struct Machine {
    address: SocketAddr,
    replica: PartProcess,
    antagonist: PartProcess,
    _inner: [Cgroup; 2],
    _outer: Cgroup,
}

impl Machines {
    /// Returns why machines cannot be made here, in one line.
    pub(super) fn missing() -> Option<String> {
        Cgroup::top(TOP).err().map(|error| format!("missing: cgroups with the CPU controller: {error:#}"))
    }

    /// Starts one machine per course. The antagonists wait.
    pub(super) fn start(courses: Vec<Course>, seed: u64) -> Result<Self> {
        let top = Cgroup::top(TOP)?;
        // The scheduler treats a group like one process. Without this weight, all machines together would get one
        // process's time.
        top.weigh(courses.len() as f64)?;
        let numbered = (0u16..).zip(courses);
        let machines = numbered.map(|(number, course)| Machine::start(&top, number, course, seed));
        Ok(Self { machines: machines.collect::<Result<_>>()?, _top: top })
    }

    /// Addresses of the replicas.
    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        self.machines.iter().map(|machine| machine.address).collect()
    }

    /// Lets the antagonists begin.
    pub(super) fn begin(&mut self) -> Result<()> {
        self.machines.iter_mut().try_for_each(|machine| machine.antagonist.begin())
    }

    /// CPU time of all replicas so far.
    pub(super) fn replica_cpu(&self) -> Result<Duration> {
        self.machines.iter().map(|machine| cpu_time(machine.replica.pid())).sum()
    }
}

impl Machine {
    fn start(top: &Cgroup, number: u16, course: Course, seed: u64) -> Result<Self> {
        let outer = top.below(&format!("machine-{number}"))?;
        outer.limit(machine(), PERIOD)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let core = usize::from(number) % cores;
        let start = |name, weight, role| -> Result<(PartProcess, Cgroup, String)> {
            let group = outer.below(name)?;
            group.weigh(weight)?;
            let mut part = PartProcess::start()?;
            group.add(part.pid())?;
            process::pin(part.pid(), core..core + 1)?;
            let answer = part.assume(&role)?;
            Ok((part, group, answer))
        };
        let seed = seed.wrapping_mul(1000) + u64::from(number);
        let role = Role::Replica(replica::Spec { number, seed });
        let (replica, replica_group, address) = start("replica", 1.0, role)?;
        let (antagonist, antagonist_group, _) = start("antagonist", ROOM, Role::Antagonist(course))?;
        let address = address.parse().with_context(|| format!("a replica printed {address:?}"))?;
        let _inner = [replica_group, antagonist_group];
        Ok(Self { address, replica, antagonist, _inner, _outer: outer })
    }
}
