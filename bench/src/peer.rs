//! Other load balancers in Envoy's place: which ones there are, and how they are run.
//!
//! Every peer forwards HTTP/1.1 over connections that stay open, on as many threads or workers as Envoy has, without
//! retries, health checks or an access log, and with limits so high that it refuses nothing. The files in `peer/` hold
//! one configuration each.

mod caddy;
mod haproxy;
mod nginx;
pub(crate) mod p2c;

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use prequal_testbed::cpu_time;
use tempfile::TempDir;

use crate::process;

/// Maximum time until a peer listens.
const START_LIMIT: Duration = Duration::from_secs(10);
/// Time that a peer has to end by itself before it is killed.
const END_LIMIT: Duration = Duration::from_secs(2);
/// Time without a byte from the replica after which a peer gives up on a request: the shipped Envoy's `timeout`.
const REPLY_LIMIT_S: u32 = 15;
/// Client connections that a peer accepts, more than the generator opens.
const MOST_CONNECTIONS: u32 = 8000;

/// A load balancer with one of its policies.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Peer {
    /// HAProxy: the server with the fewest connections.
    HaproxyLeastconn,
    /// HAProxy: the less busy of two servers drawn at random.
    HaproxyRandom,
    /// nginx: the server with the fewest connections, counted by all workers together.
    NginxLeastConn,
    /// nginx: the less busy of two servers drawn at random.
    NginxRandom,
    /// Caddy: the upstream with the fewest requests in flight.
    CaddyLeastConn,
    /// The policy of linkerd: the better of two endpoints by peak EWMA, from the crate `tower`.
    P2cPeakEwma,
}

impl Peer {
    /// All of them, in the order of a pass.
    pub(crate) const ALL: [Self; 6] = [
        Self::HaproxyLeastconn,
        Self::HaproxyRandom,
        Self::NginxLeastConn,
        Self::NginxRandom,
        Self::CaddyLeastConn,
        Self::P2cPeakEwma,
    ];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::HaproxyLeastconn => "haproxy leastconn",
            Self::HaproxyRandom => "haproxy random(2)",
            Self::NginxLeastConn => "nginx least_conn",
            Self::NginxRandom => "nginx random two",
            Self::CaddyLeastConn => "caddy least_conn",
            Self::P2cPeakEwma => "p2c peak_ewma (tower)",
        }
    }

    /// Name of the program, which has to be installed; `None` if this program contains the peer.
    fn program(self) -> Option<&'static str> {
        match self {
            Self::HaproxyLeastconn | Self::HaproxyRandom => Some("haproxy"),
            Self::NginxLeastConn | Self::NginxRandom => Some("nginx"),
            Self::CaddyLeastConn => Some("caddy"),
            Self::P2cPeakEwma => None,
        }
    }

    /// Name and version of the program or library. Fails if this machine cannot run the peer.
    pub(crate) fn version(self) -> Result<String> {
        let Some(name) = self.program() else { return Ok(p2c::version()) };
        let flag = if name == "caddy" { "version" } else { "-v" };
        let output = installed(name)?.arg(flag).output().with_context(|| format!("running {name}"))?;
        // nginx prints its version on standard error.
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        ensure!(output.status.success(), "{name} {flag}: {}", text.trim());
        version(name, &text)
    }

    fn command(self, setup: &Setup) -> Result<Command> {
        match self {
            Self::HaproxyLeastconn => haproxy::command(setup, "leastconn"),
            Self::HaproxyRandom => haproxy::command(setup, "random(2)"),
            Self::NginxLeastConn => nginx::command(setup, "least_conn"),
            Self::NginxRandom => nginx::command(setup, "random two least_conn"),
            Self::CaddyLeastConn => caddy::command(setup),
            Self::P2cPeakEwma => p2c::command(setup),
        }
    }
}

/// What a peer's configuration is made from.
struct Setup<'a> {
    /// The address for requests.
    listen: SocketAddr,
    replicas: &'a [SocketAddr],
    /// Number of threads or worker processes.
    workers: u32,
    /// A folder for the peer's files.
    folder: &'a Path,
}

impl Setup<'_> {
    /// Writes a file into the folder and returns its path.
    fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.folder.join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }
}

/// A running peer; it ends on drop.
pub(crate) struct RunningPeer {
    peer: Peer,
    address: SocketAddr,
    child: Child,
    folder: TempDir,
}

impl RunningPeer {
    /// Starts `peer` in front of `replicas` and waits until it listens.
    pub(crate) fn start(peer: Peer, replicas: &[SocketAddr], workers: u32) -> Result<Self> {
        let folder = TempDir::new()?;
        // Not every peer can report a port that the system chose, so ask the system for a free one first.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let setup = Setup { listen: address, replicas, workers, folder: folder.path() };
        let mut command = peer.command(&setup)?;
        let log = File::create(log(&folder))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {}", peer.label()))?;
        let mut running = Self { peer, address, child, folder };
        running.wait_until_it_listens()?;
        Ok(running)
    }

    /// The address for requests.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// CPU time used so far by all its processes.
    pub(crate) fn cpu_time(&self) -> Result<Duration> {
        self.pids()?.into_iter().map(cpu_time).sum()
    }

    /// All its processes.
    pub(crate) fn pids(&self) -> Result<Vec<u32>> {
        process::tree(self.child.id())
    }

    fn wait_until_it_listens(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        while TcpStream::connect(self.address).is_err() {
            let ended = self.child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                let log = fs::read_to_string(log(&self.folder)).unwrap_or_default();
                bail!("{} does not listen: {log}", self.peer.label());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for RunningPeer {
    fn drop(&mut self) {
        // SIGTERM first: nginx has to end its workers. If the process has ended, another may have its number by now.
        if matches!(self.child.try_wait(), Ok(None))
            && let Ok(pid) = libc::pid_t::try_from(self.child.id())
        {
            // SAFETY: kill takes plain integers and touches no memory of this process.
            unsafe { libc::kill(pid, libc::SIGTERM) };
        }
        let deadline = Instant::now() + END_LIMIT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        // An error means that it has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn log(folder: &TempDir) -> PathBuf {
    folder.path().join("log")
}

/// A command that runs an installed program.
fn installed(program: &str) -> Result<Command> {
    Ok(Command::new(process::find(program).with_context(|| format!("{program} is not installed"))?))
}

/// The version in what a program prints about itself: the first word that begins like a number.
fn version(program: &str, text: &str) -> Result<String> {
    let number = |word: &&str| word.starts_with(|first: char| first.is_ascii_digit());
    let words = text.split(|c: char| c.is_whitespace() || c == '/');
    let version = words.map(|word| word.trim_start_matches('v')).find(number);
    Ok(format!("{program} {}", version.with_context(|| format!("{program} printed {text:?}"))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of a configuration with two replicas and two workers.
    pub(super) fn configuration(file: &str, command: impl Fn(&Setup) -> Result<Command>) -> String {
        let folder = TempDir::new().unwrap();
        let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let setup = Setup {
            listen: address(1000),
            replicas: &[address(1001), address(1002)],
            workers: 2,
            folder: folder.path(),
        };
        // The program may be missing here. Its configuration is written before the search for the program.
        let _ = command(&setup);
        fs::read_to_string(folder.path().join(file)).unwrap()
    }

    #[test]
    fn versions_are_read_from_what_the_programs_print() {
        for (program, text, expected) in [
            (
                "haproxy",
                "HAProxy version 2.6.12-1+deb12u4 2026/01/02 - https://haproxy.org/\nStatus: old\n",
                "2.6.12-1+deb12u4",
            ),
            ("nginx", "nginx version: nginx/1.22.1\n", "1.22.1"),
            ("caddy", "v2.11.9 h1:AbC=\n", "2.11.9"),
        ] {
            assert_eq!(version(program, text).unwrap(), format!("{program} {expected}"));
        }
        assert!(version("caddy", "unknown").is_err());
    }

    #[test]
    fn every_configuration_has_both_replicas_and_the_policy() {
        let nginx = |setup: &Setup| Peer::NginxRandom.command(setup);
        let haproxy = |setup: &Setup| Peer::HaproxyLeastconn.command(setup);
        let caddy = |setup: &Setup| Peer::CaddyLeastConn.command(setup);
        for (text, policy) in [
            (configuration("nginx.conf", nginx), "random two least_conn;"),
            (configuration("haproxy.cfg", haproxy), "balance leastconn"),
            (configuration("caddy.json", caddy), r#""policy":"least_conn""#),
        ] {
            for part in ["127.0.0.1:1000", "127.0.0.1:1001", "127.0.0.1:1002", policy] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }
}
