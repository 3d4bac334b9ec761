//! A [`Backend`] in a process of its own, for [`prequal_testbed::Killable`]: `killable-backend IP:PORT DELAY_MS`.
//!
//! On SIGTERM it finishes its requests and ends, as a well-behaved server does.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use prequal_testbed::{Backend, Reply, block_on};
use tokio::net::TcpSocket;
use tokio::signal::unix::{SignalKind, signal};

fn main() -> Result<()> {
    let [addr, delay] =
        std::env::args().skip(1).collect::<Vec<_>>().try_into().ok().context("two arguments")?;
    let (addr, delay): (SocketAddr, u64) = (addr.parse()?, delay.parse()?);
    let listener = block_on(async move {
        let socket = TcpSocket::new_v4()?;
        // The other socket on this port is the parent's reservation.
        socket.set_reuseport(true)?;
        socket.set_reuseaddr(true)?;
        socket.bind(addr)?;
        socket.listen(1024)?.into_std()
    })?;
    let backend = Backend::on(listener, move |_| Reply::ok().delay(Duration::from_millis(delay)))?;
    block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        println!("ready");
        terminate.recv().await;
        anyhow::Ok(())
    })?;
    backend.finish();
    Ok(())
}
