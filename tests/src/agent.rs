//! The real `probe-agent`, as a child process.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

use crate::client::http_get;
use crate::config::dist_dir;
use crate::process::{Process, cpu_time};

/// How an [`Agent`] is started. The defaults bind free ports of 127.0.0.1.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    /// `--listen`.
    pub listen: String,
    /// `--advertise`, if it differs from the bound address.
    pub advertise: Option<String>,
    /// `--probe-listen`: a separate port for probes.
    pub probe_listen: Option<String>,
    /// `--report`: `always` or `probe-only`.
    pub report: Option<&'static str>,
    /// Further arguments, passed unchanged.
    pub args: Vec<String>,
}

impl Default for AgentOptions {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:0".into(),
            advertise: None,
            probe_listen: None,
            report: None,
            args: Vec::new(),
        }
    }
}

/// A running agent; killed on drop.
#[derive(Debug)]
pub struct Agent {
    service: SocketAddr,
    probe: Option<SocketAddr>,
    admin: SocketAddr,
    process: Process,
    _dir: TempDir,
}

impl Agent {
    /// Starts an agent in front of `upstream` and waits until it is ready.
    pub fn start(upstream: SocketAddr) -> Result<Self> {
        Self::start_with(upstream, &AgentOptions::default())
    }

    /// Starts an agent in front of `upstream` with `options` and waits until it is ready.
    pub fn start_with(upstream: SocketAddr, options: &AgentOptions) -> Result<Self> {
        let dir = TempDir::new()?;
        let mut command = Command::new(dist_dir().join("probe-agent"));
        command.args(["--listen", &options.listen, "--admin", "127.0.0.1:0"]);
        command.args(["--upstream", &upstream.to_string()]);
        if let Some(advertise) = &options.advertise {
            command.args(["--advertise", advertise]);
        }
        if let Some(listen) = &options.probe_listen {
            command.args(["--probe-listen", listen]);
        }
        if let Some(report) = options.report {
            command.args(["--report", report]);
        }
        command.args(&options.args);
        let mut process =
            Process::spawn("probe-agent", &mut command, dir.path().join("agent.log"), Some(Stdio::piped()))?;
        let stdout = process.child().stdout.take().context("stdout is piped")?;
        let (mut service, mut probe, mut admin) = (None, None, None);
        let mut lines = BufReader::new(stdout).lines();
        loop {
            let Some(line) = lines.next().transpose()? else {
                bail!("the agent ended before it was ready: {}", process.log());
            };
            if line == "ready" {
                break;
            }
            let Some((what, addr)) = line.strip_prefix("listening ").and_then(|rest| rest.split_once('='))
            else {
                continue;
            };
            let addr = addr.parse().with_context(|| format!("not an address: {line}"))?;
            match what {
                "service" => service = Some(addr),
                "probe" => probe = Some(addr),
                "admin" => admin = Some(addr),
                _ => {}
            }
        }
        // Continue reading, so that the agent neither blocks on a full pipe nor ends because of a closed one.
        std::thread::spawn(move || lines.for_each(drop));
        Ok(Self {
            service: service.context("the agent named no service address")?,
            probe,
            admin: admin.context("the agent named no admin address")?,
            process,
            _dir: dir,
        })
    }

    /// The address for requests.
    pub fn addr(&self) -> SocketAddr {
        self.service
    }

    /// The address for probes: their separate port if there is one, else the service port.
    pub fn probe_addr(&self) -> SocketAddr {
        self.probe.unwrap_or(self.service)
    }

    /// The address of `/metrics` and `/healthz`.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// All samples of `/metrics`: from name with labels, exactly as printed, to value.
    pub fn metrics(&self) -> Result<BTreeMap<String, f64>> {
        let text = http_get(self.admin, "/metrics")?;
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        Ok(samples
            .filter_map(|line| {
                let (name, value) = line.rsplit_once(' ')?;
                Some((name.to_owned(), value.parse().ok()?))
            })
            .collect())
    }

    /// Requests in flight by the agent's own count.
    pub fn rif(&self) -> Result<u32> {
        let metrics = self.metrics()?;
        let rif = metrics.get("prequal_agent_rif").context("no prequal_agent_rif in /metrics")?;
        // The count is far below 2^32. If something goes very wrong, a saturated value shows it.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
        Ok(*rif as u32)
    }

    /// CPU time used so far.
    pub fn cpu_time(&self) -> Result<Duration> {
        cpu_time(self.process.pid())
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Kills the agent, as a crash would.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Stops the agent as a stalled machine would: connections stay open, nothing answers.
    pub fn freeze(&self) {
        self.process.signal(libc::SIGSTOP);
    }

    /// Undoes [`Self::freeze`].
    pub fn thaw(&self) {
        self.process.signal(libc::SIGCONT);
    }

    /// Sends SIGTERM and waits up to `limit`; returns `None` if the agent still runs then.
    pub fn terminate(&mut self, limit: Duration) -> Option<ExitStatus> {
        self.process.terminate(limit)
    }
}
