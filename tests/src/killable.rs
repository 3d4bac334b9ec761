//! A backend that can be killed and restarted at the same address.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;
use tokio::net::TcpSocket;

use crate::process::Process;

/// A [`crate::Backend`] in a process of its own; killed on drop.
#[derive(Debug)]
pub struct Killable {
    program: PathBuf,
    addr: SocketAddr,
    delay: Duration,
    process: Process,
    dir: TempDir,
    /// Reserves the port while no process listens, so that connections are refused and no other process takes the port.
    _reserved: TcpSocket,
}

impl Killable {
    /// Starts `program` (`killable-backend`) on a free port of 127.0.0.1. It answers every request with 200 after
    /// `delay`.
    pub fn start(program: &Path, delay: Duration) -> Result<Self> {
        let reserved = TcpSocket::new_v4()?;
        reserved.set_reuseport(true)?;
        reserved.bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        let (addr, dir) = (reserved.local_addr()?, TempDir::new()?);
        let process = spawn(program, addr, delay, dir.path())?;
        Ok(Self { program: program.into(), addr, delay, process, dir, _reserved: reserved })
    }

    /// The listening address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Kills the backend, as a crash would.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Lets the backend finish its requests; fails unless it ends within `limit`.
    pub fn terminate(&mut self, limit: Duration) -> Result<()> {
        let status = self.process.terminate(limit).context("the backend still runs")?;
        ensure!(status.success(), "{status}");
        Ok(())
    }

    /// Restarts the backend after [`Self::kill`] or [`Self::terminate`], and waits until it listens.
    pub fn restart(&mut self) -> Result<()> {
        self.process = spawn(&self.program, self.addr, self.delay, self.dir.path())?;
        Ok(())
    }
}

fn spawn(program: &Path, addr: SocketAddr, delay: Duration, dir: &Path) -> Result<Process> {
    let mut command = Command::new(program);
    command.args([addr.to_string(), delay.as_millis().to_string()]);
    let mut process =
        Process::spawn("killable-backend", &mut command, dir.join("backend.log"), Some(Stdio::piped()))?;
    let stdout = process.child().stdout.take().context("stdout is piped")?;
    let ready = BufReader::new(stdout).lines().next().transpose()?;
    ensure!(ready.as_deref() == Some("ready"), "the backend did not start: {}", process.log());
    Ok(process)
}
