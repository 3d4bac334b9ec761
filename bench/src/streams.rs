//! Open streams in the background: WebSockets on which nothing happens. Each is a request in flight at its replica, which
//! does no work for it.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Streams, which end when this value is dropped.
pub(crate) struct Streams {
    _open: Vec<TcpStream>,
}

impl Streams {
    /// Opens `count` streams through `targets`, each in turn.
    ///
    /// # Errors
    /// If a stream is refused.
    pub(crate) async fn open(targets: &[SocketAddr], count: usize) -> Result<Self> {
        let mut open = Vec::with_capacity(count);
        for target in targets.iter().cycle().take(count) {
            open.push(one(*target).await.with_context(|| format!("a WebSocket through {target}"))?);
        }
        Ok(Self { _open: open })
    }
}

async fn one(target: SocketAddr) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(target).await?;
    let request = format!(
        "GET / HTTP/1.1\r\nhost: {target}\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head);
    ensure!(head.starts_with("HTTP/1.1 101 "), "{head}");
    Ok(stream)
}
