//! Child processes: stops them reliably, shows their log if a test fails, and reads their CPU time.

use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

/// A child process that is killed on drop. If it is dropped while a panic unwinds, the end of its log is printed first.
#[derive(Debug)]
pub(crate) struct Process {
    name: &'static str,
    child: Child,
    log: PathBuf,
    stopped: bool,
}

impl Process {
    /// Starts `command` with stderr (and stdout, if `stdout` is `None`) appended to `log`.
    pub(crate) fn spawn(
        name: &'static str,
        command: &mut Command,
        log: PathBuf,
        stdout: Option<Stdio>,
    ) -> Result<Self> {
        let open = || fs::File::options().create(true).append(true).open(&log);
        let file = open().with_context(|| format!("cannot write {}", log.display()))?;
        let stdout = match stdout {
            Some(stdio) => stdio,
            None => open()?.into(),
        };
        let child = command
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {name}: {}", command.get_program().display()))?;
        Ok(Self { name, child, log, stopped: false })
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, if the process has ended.
    pub(crate) fn exited(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().ok().flatten();
        self.stopped |= status.is_some();
        status
    }

    /// Sends a signal, unless the process has ended and been reaped: its number may belong to another process by now.
    pub(crate) fn signal(&self, signal: i32) {
        if self.stopped {
            return;
        }
        let pid = libc::pid_t::try_from(self.child.id()).expect("a process id fits pid_t");
        // SAFETY: kill takes plain integers and touches no memory of this process.
        unsafe { libc::kill(pid, signal) };
    }

    /// Sends SIGKILL and waits.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.stopped = true;
    }

    /// Sends SIGTERM and waits up to `limit` for the process to end.
    pub(crate) fn terminate(&mut self, limit: Duration) -> Option<ExitStatus> {
        self.signal(libc::SIGTERM);
        let start = Instant::now();
        while start.elapsed() < limit {
            if let Some(status) = self.exited() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }

    pub(crate) fn log(&self) -> String {
        tail(&self.log)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.stopped {
            self.kill();
        }
        if std::thread::panicking() {
            eprintln!("--- log of {} ---\n{}--- end of log ---", self.name, self.log());
        }
    }
}

/// CPU time that process `pid` has used so far. If the kernel keeps scheduler statistics, this is the sum over the
/// living threads, with a resolution of a nanosecond. Otherwise it includes ended threads, and the resolution is a
/// clock tick.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    let mut total = Duration::ZERO;
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).context("the process has ended")?;
    for task in tasks {
        // A thread may end between the listing and the reading.
        let Ok(text) = fs::read_to_string(task?.path().join("schedstat")) else { continue };
        let nanos = text.split_ascii_whitespace().next().and_then(|field| field.parse().ok());
        total += Duration::from_nanos(nanos.unwrap_or(0));
    }
    if total > Duration::ZERO {
        return Ok(total);
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The program's name is in parentheses and may contain spaces; user and system time are fields 14 and 15, counted
    // from 1.
    let fields = stat.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
    let ticks: u64 =
        fields.split_ascii_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    // SAFETY: sysconf reads a constant of the system.
    let per_second = u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).unwrap_or(100).max(1);
    Ok(Duration::from_millis(ticks * 1000 / per_second))
}

/// The last 16 KiB of a file, as text.
fn tail(path: &Path) -> String {
    const LIMIT: u64 = 16 * 1024;
    let Ok(mut file) = fs::File::open(path) else { return String::new() };
    let length = file.metadata().map_or(0, |meta| meta.len());
    let _ = file.seek(SeekFrom::Start(length.saturating_sub(LIMIT)));
    let mut bytes = Vec::new();
    let _ = file.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}
