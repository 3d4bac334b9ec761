//! Starts and stops the servers; their programs are in `tests/servers` and `tests/grpc-go/server`.

use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command};

use anyhow::{Context as _, Result, ensure};
use prequal_testbed::{eventually, workspace_root};
use tempfile::TempDir;
use tokio::net::TcpSocket;

use crate::subject::PATIENCE;
use crate::tools::{go_program, missing, missing_go};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    /// HTTP/1.1.
    Nginx,
    /// Cleartext HTTP/2 only.
    NginxHttp2,
    /// The same, but it closes a connection after fewer requests than are in flight.
    NginxFewRequests,
    /// HTTP/1.1.
    Node,
    /// Cleartext HTTP/2 only.
    NodeHttp2,
    /// `net/http`: HTTP/1.1 and cleartext HTTP/2.
    Go,
    /// gRPC's server.
    GoGrpc,
    /// The JDK's server: HTTP/1.1.
    Java,
}

impl Kind {
    pub(super) const ALL: [Self; 8] = [
        Self::Nginx,
        Self::NginxHttp2,
        Self::NginxFewRequests,
        Self::Node,
        Self::NodeHttp2,
        Self::Go,
        Self::GoGrpc,
        Self::Java,
    ];

    /// Returns whether the server speaks nothing but cleartext HTTP/2.
    pub(super) fn only_http2(self) -> bool {
        matches!(self, Self::NginxHttp2 | Self::NginxFewRequests | Self::NodeHttp2)
    }

    fn is_nginx(self) -> bool {
        matches!(self, Self::Nginx | Self::NginxHttp2 | Self::NginxFewRequests)
    }

    /// A message if the program that runs or builds the server is missing.
    pub(super) fn missing(self) -> Option<String> {
        match self {
            Self::Nginx | Self::NginxHttp2 | Self::NginxFewRequests => missing("nginx", &["-v"], "nginx"),
            Self::Node | Self::NodeHttp2 => missing("node", &["--version"], "nodejs"),
            Self::Go | Self::GoGrpc => missing_go(),
            Self::Java => missing("java", &["-version"], "default-jre-headless"),
        }
    }
}

/// A running server; it ends on drop.
pub(super) struct Server {
    kind: Kind,
    command: Command,
    child: Child,
    addr: SocketAddr,
    /// Reserves the port while the server restarts. With `SO_REUSEADDR`, which all servers set too, they can still bind
    /// it.
    _reserved: TcpSocket,
    _dir: TempDir,
}

impl Server {
    /// Starts a server and waits until it accepts connections.
    pub(super) fn start(kind: Kind) -> Result<Self> {
        let reserved = TcpSocket::new_v4()?;
        reserved.set_reuseaddr(true)?;
        reserved.bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        let (addr, dir) = (reserved.local_addr()?, TempDir::new()?);
        let mut command = command(kind, addr, &dir)?;
        let child = spawn(&mut command, addr)?;
        Ok(Self { kind, command, child, addr, _reserved: reserved, _dir: dir })
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Ends the server gracefully, waits for its end, and starts it again.
    pub(super) fn restart(&mut self) -> Result<()> {
        // SIGTERM ends nginx at once. Its container image asks for SIGQUIT.
        let signal = if self.kind.is_nginx() { "-QUIT" } else { "-TERM" };
        self.signal(signal)?;
        eventually("the server ends", PATIENCE, || self.child.try_wait().ok().flatten());
        self.child = spawn(&mut self.command, self.addr)?;
        Ok(())
    }

    fn signal(&self, signal: &str) -> Result<()> {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status()?;
        ensure!(sent.success(), "no process {}", self.child.id());
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Without this signal, nginx's workers would outlive it.
        if self.signal("-TERM").is_ok() {
            let _ = self.child.wait();
        }
    }
}

fn spawn(command: &mut Command, addr: SocketAddr) -> Result<Child> {
    let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
    eventually("the server listens", PATIENCE, || {
        let ended = child.try_wait().ok().flatten();
        assert_eq!(ended, None, "{command:?} ended");
        TcpStream::connect(addr).ok()
    });
    Ok(child)
}

/// Returns the command that starts the server.
fn command(kind: Kind, addr: SocketAddr, dir: &TempDir) -> Result<Command> {
    let programs = workspace_root().join("tests/servers");
    let mut command = match kind {
        Kind::Nginx | Kind::NginxHttp2 | Kind::NginxFewRequests => {
            let protocol = if kind.only_http2() { "http2" } else { "" };
            let requests = if kind == Kind::NginxFewRequests { "20" } else { "500" };
            let template = std::fs::read_to_string(programs.join("nginx.conf"))?;
            let text = template
                .replace("DIR", &dir.path().display().to_string())
                .replace("REQUESTS", requests)
                .replace("ADDR PROTOCOL", &format!("{addr} {protocol}"));
            let conf = dir.path().join("nginx.conf");
            std::fs::write(&conf, text)?;
            let mut command = Command::new("nginx");
            command.arg("-p").arg(dir.path()).args(["-e", "stderr", "-c"]).arg(conf);
            return Ok(command);
        }
        Kind::Node | Kind::NodeHttp2 => {
            let mut command = Command::new("node");
            command.arg(programs.join("server.js"));
            command.arg(if kind == Kind::Node { "http" } else { "http2" });
            command
        }
        Kind::Java => {
            let mut command = Command::new("java");
            command.args(["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]).arg(programs.join("Server.java"));
            command
        }
        Kind::Go | Kind::GoGrpc => {
            let mut command = Command::new(go_program("tests/grpc-go", "./server", "go-server")?);
            command.arg(if kind == Kind::Go { "http" } else { "grpc" }).arg(addr.to_string());
            return Ok(command);
        }
    };
    command.args([addr.ip().to_string(), addr.port().to_string()]);
    Ok(command)
}
