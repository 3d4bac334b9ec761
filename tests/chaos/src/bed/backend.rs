//! A backend's process as its parent uses it: orders, counts, signals.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::backend::{COUNTS, Mode};

/// How long a backend may take to answer its parent.
const PATIENCE: Duration = Duration::from_secs(5);

/// The backend's process; killed on drop.
pub(super) struct Process {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
}

impl Process {
    /// Starts the backend of replica `number` at `addr`, and waits until it listens.
    pub(super) fn start(number: usize, addr: SocketAddr) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["backend", &addr.to_string(), &number.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting a backend")?;
        let orders = child.stdin.take().context("stdin is piped")?;
        let lines = BufReader::new(child.stdout.take().context("stdout is piped")?).lines();
        let (answered, answers) = sync_channel(16);
        std::thread::spawn(move || {
            // Runs until the backend ends or this value is dropped.
            for line in lines.map_while(Result::ok) {
                if answered.send(line).is_err() {
                    return;
                }
            }
        });
        let process = Self { child, orders, answers };
        ensure!(process.answer()? == "ready", "the backend did not start");
        Ok(process)
    }

    fn answer(&self) -> Result<String> {
        self.answers.recv_timeout(PATIENCE).context("a backend does not answer")
    }

    /// Orders a behaviour, effective immediately.
    pub(super) fn order(&mut self, mode: Mode) -> Result<()> {
        writeln!(self.orders, "{mode}")?;
        ensure!(self.answer()? == "ok", "the backend did not understand");
        Ok(())
    }

    /// Requests in flight, and those broken on purpose so far.
    pub(super) fn counts(&mut self) -> Result<(u64, u64)> {
        writeln!(self.orders, "{COUNTS}")?;
        let answer = self.answer()?;
        let (in_flight, broken) = answer.split_once(' ').context("two numbers")?;
        Ok((in_flight.parse()?, broken.parse()?))
    }

    pub(super) fn signal(&self, signal: i32) {
        self::signal(self.child.id(), signal);
    }

    /// Sends SIGKILL and waits for the process to end.
    pub(super) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends `signal` to `pid`, a child of this process that has not been waited for.
pub(super) fn signal(pid: u32, signal: i32) {
    let pid = libc::pid_t::try_from(pid).expect("a process id fits pid_t");
    // SAFETY: kill takes plain integers; the child is not reaped, so that no other process has its id.
    unsafe { libc::kill(pid, signal) };
}
