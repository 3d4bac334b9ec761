//! Listening and accepting, until told to stop. What is done with a connection is the caller's to say.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::plb::Plb;

pub(crate) fn listen(port: &str, addr: SocketAddr, plb: Option<&Plb>) -> io::Result<TcpListener> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    if let Some(plb) = plb {
        plb.prepare(port, &socket, addr.is_ipv6());
    }
    socket.listen(BACKLOG)
}

/// Accepts until `stop`. Connections that the system had taken by then are served too: closing the listener would reset them.
pub(crate) async fn accept(
    listener: TcpListener,
    stop: impl Future<Output = ()>,
    mut serve: impl FnMut(TcpStream),
) {
    let mut stop = pin!(stop);
    loop {
        let accepted = tokio::select! {
            biased;
            accepted = listener.accept() => accepted,
            () = &mut stop => return,
        };
        match accepted {
            Ok((tcp, _)) => {
                let _ = tcp.set_nodelay(true);
                serve(tcp);
            }
            // Out of file descriptors, or a client that left at once: neither ends the agent.
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

const BACKLOG: u32 = 4096;
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
