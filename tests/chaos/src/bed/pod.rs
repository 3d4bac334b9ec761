//! One replica: a backend and the agent in front of it. Each can be killed, hung and restarted at its address. Orders
//! are idempotent, so that overlapping faults do not undo each other.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Result, ensure};
use prequal_testbed::{Agent, AgentOptions};

use super::backend::{Process, signal};
use crate::backend::Mode;
use crate::harm::Harm;

/// First port of the agents. It is below the ephemeral range, so that no connection takes the port of a dead agent.
const AGENT_PORTS: u16 = 8101;
const BACKEND_PORTS: u16 = 9101;

/// One replica.
pub(crate) struct Pod {
    pub(crate) number: usize,
    agent: Mutex<Option<Agent>>,
    backend: Mutex<Backend>,
    /// A process that replaces the agent and lies.
    liar: Mutex<Option<Process>>,
}

#[derive(Default)]
struct Backend {
    process: Option<Process>,
    /// Requests broken on purpose by backend processes that have ended.
    broken: u64,
}

impl Pod {
    pub(super) fn start(number: usize) -> Result<Self> {
        let pod = Self { number, agent: Mutex::default(), backend: Mutex::default(), liar: Mutex::default() };
        pod.start_backend()?;
        pod.start_agent(&[])?;
        Ok(pod)
    }

    /// The address at which Envoy finds the replica.
    pub(crate) fn addr(&self) -> SocketAddr {
        ([127, 0, 0, 1], AGENT_PORTS + self.number as u16).into()
    }

    fn backend_addr(&self) -> SocketAddr {
        ([127, 0, 0, 1], BACKEND_PORTS + self.number as u16).into()
    }

    fn agent(&self) -> MutexGuard<'_, Option<Agent>> {
        lock(&self.agent)
    }

    /// Starts the agent with extra arguments, unless it is running.
    pub(crate) fn start_agent(&self, args: &[String]) -> Result<()> {
        let mut agent = self.agent();
        if agent.is_none() {
            let options = AgentOptions {
                listen: self.addr().to_string(),
                args: args.to_vec(),
                ..AgentOptions::default()
            };
            *agent = Some(Agent::start_with(self.backend_addr(), &options)?);
        }
        Ok(())
    }

    /// Kills the agent, as a crash would.
    pub(crate) fn kill_agent(&self, harm: &Harm) {
        if let Some(mut agent) = self.agent().take() {
            harm.note(Some(self.number), || agent.kill());
        }
    }

    /// Ends the agent with SIGTERM; it finishes what it is working on.
    pub(crate) fn terminate_agent(&self, limit: Duration) -> Result<()> {
        if let Some(mut agent) = self.agent().take() {
            ensure!(agent.terminate(limit).is_some(), "agent {} still runs after {limit:?}", self.number);
        }
        Ok(())
    }

    /// Starts a lying process in place of the agent, which must have ended.
    pub(crate) fn start_liar(&self, mode: Mode) -> Result<()> {
        let mut process = Process::start(self.number, self.addr())?;
        process.order(mode)?;
        *lock(&self.liar) = Some(process);
        Ok(())
    }

    /// Kills the lying process.
    pub(crate) fn end_liar(&self, harm: &Harm) {
        if let Some(mut liar) = lock(&self.liar).take() {
            harm.note(Some(self.number), || liar.kill());
        }
    }

    /// Process id of the agent, if it is running.
    pub(crate) fn agent_pid(&self) -> Option<u32> {
        self.agent().as_ref().map(Agent::pid)
    }

    /// Sends the agent a signal, if it is running.
    pub(crate) fn signal_agent(&self, number: i32) {
        if let Some(pid) = self.agent_pid() {
            signal(pid, number);
        }
    }

    /// Starts the backend, unless it is running.
    pub(crate) fn start_backend(&self) -> Result<()> {
        let mut backend = lock(&self.backend);
        if backend.process.is_none() {
            backend.process = Some(Process::start(self.number, self.backend_addr())?);
        }
        Ok(())
    }

    /// Kills the backend, as a crash would.
    pub(crate) fn kill_backend(&self, harm: &Harm) {
        let mut backend = lock(&self.backend);
        if let Some(mut process) = backend.process.take() {
            harm.note(Some(self.number), || process.kill());
        }
    }

    /// Sends the backend a signal, if it is running.
    pub(crate) fn signal_backend(&self, number: i32) {
        if let Some(process) = &lock(&self.backend).process {
            process.signal(number);
        }
    }

    /// Orders a behaviour of the backend, if it is running.
    pub(crate) fn order(&self, mode: Mode) -> Result<()> {
        let mut backend = lock(&self.backend);
        let backend = &mut *backend;
        let Some(process) = &mut backend.process else { return Ok(()) };
        if mode == Mode::Well {
            // Record the count now, so that a later kill does not lose it.
            backend.broken = backend.broken.max(process.counts()?.1);
        }
        process.order(mode)
    }

    /// Requests that the backend has broken on purpose so far.
    pub(crate) fn broken(&self) -> Result<u64> {
        let mut backend = lock(&self.backend);
        let backend = &mut *backend;
        if let Some(process) = &mut backend.process {
            backend.broken = backend.broken.max(process.counts()?.1);
        }
        Ok(backend.broken)
    }

    /// The agent's failure counts, to explain a miss.
    pub(super) fn evidence(&self) -> Vec<String> {
        let Some(Ok(metrics)) = self.agent().as_ref().map(Agent::metrics) else { return Vec::new() };
        let failures = metrics.into_iter().filter(|(name, value)| {
            *value > 0.0
                && (name.contains("errors_total") || name.contains("\"failure\"") || name.contains("refused"))
        });
        failures.map(|(name, value)| format!("agent {}: {name} {value}", self.number)).collect()
    }

    /// Counts that are not zero.
    pub(super) fn unbalanced(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        match &*self.agent() {
            // A process that stays hung or dead means that a fault did not end.
            None => found.push(format!("agent {} does not run", self.number)),
            Some(agent) => match agent.rif() {
                Ok(0) => {}
                Ok(rif) => found.push(format!("RIF {rif} at agent {}", self.number)),
                Err(error) => found.push(format!("agent {}: {error:#}", self.number)),
            },
        }
        match &mut lock(&self.backend).process {
            None => found.push(format!("backend {} does not run", self.number)),
            Some(process) => match process.counts()?.0 {
                0 => {}
                count => found.push(format!("{count} in flight at backend {}", self.number)),
            },
        }
        Ok(found)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
