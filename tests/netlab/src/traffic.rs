//! Bulk TCP between two namespaces.

use std::io::{Read as _, Write as _};
use std::net::{Ipv6Addr, SocketAddrV6, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use plb_netlink::sock;
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, Type};

use crate::{Fabric, H2, Node, Result};

/// Accepts connections and reads everything, until dropped.
#[derive(Debug)]
pub struct Sink {
    /// The listening address.
    pub addr: SocketAddrV6,
    received: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Sink {
    /// Bytes received so far, over all connections.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The acceptor reads this flag every 5 ms, and each connection at least every 200 ms.
    }
}

/// Starts a sink in `h2`.
///
/// # Errors
/// When it cannot listen.
pub fn sink(fabric: &Fabric) -> Result<Sink> {
    let listener = fabric.within(Node::H2, || {
        TcpListener::bind(SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 0, 0, 0)).map_err(|e| e.to_string())
    })?;
    let port = listener.local_addr().map_err(|e| e.to_string())?.port();
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    let (received, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, ended) = (received.clone(), stop.clone());
    std::thread::spawn(move || {
        while !ended.load(Ordering::Relaxed) {
            let Ok((mut stream, _)) = listener.accept() else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            let (count, ended) = (count.clone(), ended.clone());
            std::thread::spawn(move || {
                let _ = stream.set_nonblocking(false);
                let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
                let mut buffer = vec![0; 1 << 16];
                while !ended.load(Ordering::Relaxed) {
                    match stream.read(&mut buffer) {
                        Ok(0) => break,
                        Ok(n) => {
                            count.fetch_add(n as u64, Ordering::Relaxed);
                        }
                        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                        Err(_) => break,
                    }
                }
            });
        }
    });
    Ok(Sink { addr: SocketAddrV6::new(H2, port, 0, 0), received, stop })
}

/// A connection from `h1` that sends without pause until dropped.
#[derive(Debug)]
pub struct Flow {
    stream: TcpStream,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    sent: Arc<AtomicU64>,
}

/// Connects from `h1` to the sink and sends `chunk` bytes at a time, with `pause` in between. `prepare` can change the
/// socket before it connects.
///
/// # Errors
/// When it cannot connect.
pub fn flow(
    fabric: &Fabric,
    to: SocketAddrV6,
    chunk: usize,
    pause: Duration,
    prepare: impl FnOnce(&Socket) -> plb_netlink::Result<()> + Send,
) -> Result<Flow> {
    let stream = fabric.within(Node::H1, || {
        let socket =
            Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP)).map_err(|e| e.to_string())?;
        prepare(&socket).map_err(|e| e.to_string())?;
        socket.connect(&SockAddr::from(to)).map_err(|e| format!("connecting to {to}: {e}"))?;
        Ok(TcpStream::from(socket))
    })?;
    Flow::over(stream, chunk, pause)
}

impl Flow {
    /// Starts sending over an existing connection.
    ///
    /// # Errors
    /// When the descriptor cannot be duplicated.
    pub fn over(stream: TcpStream, chunk: usize, pause: Duration) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let sent = Arc::new(AtomicU64::new(0));
        let mut writer = stream.try_clone().map_err(|e| e.to_string())?;
        writer.set_write_timeout(Some(Duration::from_millis(100))).map_err(|e| e.to_string())?;
        let (ended, count) = (stop.clone(), sent.clone());
        let thread = std::thread::spawn(move || {
            let data = vec![0x5a; chunk];
            while !ended.load(Ordering::Relaxed) {
                match writer.write(&data) {
                    Ok(n) => {
                        count.fetch_add(n as u64, Ordering::Relaxed);
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                    Err(_) => break,
                }
                if !pause.is_zero() {
                    std::thread::sleep(pause);
                }
            }
        });
        Ok(Self { stream, stop, thread: Some(thread), sent })
    }

    /// The local port.
    pub fn port(&self) -> u16 {
        self.stream.local_addr().map_or(0, |addr| addr.port())
    }

    /// Bytes passed to the kernel.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// The congestion control of the connection.
    ///
    /// # Errors
    /// If the kernel does not report it.
    pub fn congestion(&self) -> Result<String> {
        sock::congestion(&self.stream).map_err(|e| e.to_string())
    }
}

impl AsFd for Flow {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Reset the connection, instead of a long close handshake over a broken path.
        let _ = SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Polls until `holds` returns true; returns the time that it took.
///
/// # Errors
/// If `holds` does not return true within `limit`.
pub fn eventually(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) -> Result<Duration> {
    let started = Instant::now();
    while started.elapsed() < limit {
        if holds() {
            return Ok(started.elapsed());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(format!("not within {limit:?}: {what}"))
}
