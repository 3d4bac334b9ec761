//! TCP and Unix sockets: listening, accepting, connecting.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixStream};

use crate::config::{Listen, Upstream};
use crate::plb::Plb;

/// A connection.
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    /// Connects, without a limit of time.
    pub(crate) async fn connect(target: &Upstream) -> io::Result<Self> {
        Ok(match (target.path(), target.addr()) {
            (Some(path), _) => Self::Unix(connect_unix(path).await?),
            (None, Some(addr)) => Self::Tcp(TcpStream::connect(addr).await?),
            (None, None) => Self::Tcp(TcpStream::connect((target.host(), target.port())).await?),
        })
    }

    pub(crate) fn set_nodelay(&self) -> io::Result<()> {
        match self {
            Self::Tcp(tcp) => tcp.set_nodelay(true),
            Self::Unix(_) => Ok(()),
        }
    }

    /// Waits for the first byte, and returns whether the other side closed instead of sending it. Always false for a
    /// Unix socket, which is not checked.
    pub(crate) async fn is_abandoned(&self) -> bool {
        match self {
            Self::Tcp(tcp) => !matches!(tcp.peek(&mut [0]).await, Ok(1)),
            Self::Unix(_) => false,
        }
    }

    pub(crate) fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Self::Tcp(tcp) => Some(tcp),
            Self::Unix(_) => None,
        }
    }
}

/// Connects, and waits as long as the queue of connections that the listener has not accepted is full. A TCP connection
/// waits in the kernel in this case.
async fn connect_unix(path: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(QUEUE_FULL).await,
            connected => return connected,
        }
    }
}

/// Listens until it is dropped, which removes a Unix socket's file.
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl Listener {
    pub(crate) fn bind(port: &str, listen: &Listen, plb: Option<&Plb>) -> io::Result<Self> {
        match listen {
            Listen::Tcp(addr) => {
                let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
                socket.set_reuseaddr(true)?;
                socket.bind(*addr)?;
                if let Some(plb) = plb {
                    plb.prepare(port, &socket, addr.is_ipv6());
                }
                socket.listen(BACKLOG).map(Self::Tcp)
            }
            Listen::Unix(path) => {
                remove_abandoned(path)?;
                Ok(Self::Unix(UnixListener::bind(path)?, path.clone()))
            }
        }
    }

    pub(crate) async fn accept(&self) -> io::Result<Socket> {
        let socket = match self {
            Self::Tcp(listener) => Socket::Tcp(listener.accept().await?.0),
            Self::Unix(listener, _) => Socket::Unix(listener.accept().await?.0),
        };
        let _ = socket.set_nodelay();
        Ok(socket)
    }

    pub(crate) fn local(&self) -> io::Result<Listen> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(Listen::Tcp),
            Self::Unix(_, path) => Ok(Listen::Unix(path.clone())),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Removes a socket file that a killed process left behind. No process listens on it, but it would make `bind` fail.
fn remove_abandoned(path: &Path) -> io::Result<()> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    if is_socket && std::os::unix::net::UnixStream::connect(path).is_err_and(refused) {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Tcp(tcp) => Pin::new(tcp).poll_read(cx, buf),
            Self::Unix(unix) => Pin::new(unix).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Tcp(tcp) => Pin::new(tcp).poll_write(cx, buf),
            Self::Unix(unix) => Pin::new(unix).poll_write(cx, buf),
        }
    }

    /// Neither kind has its own buffer.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Tcp(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Self::Unix(unix) => Pin::new(unix).poll_shutdown(cx),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Tcp(tcp) => Pin::new(tcp).poll_write_vectored(cx, bufs),
            Self::Unix(unix) => Pin::new(unix).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}

/// Pause after which a connection is tried again if the listener's queue was full.
const QUEUE_FULL: Duration = Duration::from_millis(5);
/// Number of connections that the system accepts ahead of the agent.
pub(crate) const BACKLOG: u32 = 4096;
