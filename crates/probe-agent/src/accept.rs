//! Accepts connections until it is stopped. The caller decides what to do with each.

use std::future::{self, Future};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::log::Log;
use crate::socket::{BACKLOG, Listener, Socket};
use crate::traffic::{Event, OpenConnection, Port, Traffic};

/// Counts the connections of a port and limits their number.
pub(crate) struct Door {
    pub(crate) port: Port,
    pub(crate) traffic: Arc<Traffic>,
    pub(crate) log: Log,
    /// `None`: no limit.
    pub(crate) room: Option<Arc<Semaphore>>,
}

/// Token of an accepted connection: until it is dropped, the connection counts as open and keeps its permit.
pub(crate) struct Admitted {
    _open: OpenConnection,
    _room: Option<OwnedSemaphorePermit>,
}

impl Door {
    /// Waits for room for one more connection. Without room, a client that connects waits in the system's backlog.
    async fn room(&self) -> Option<OwnedSemaphorePermit> {
        let room = self.room.as_ref()?;
        if let Ok(permit) = room.clone().try_acquire_owned() {
            return Some(permit);
        }
        self.traffic.count(Event::Full);
        self.log.failure("accept", || "--max-connections reached: further connections wait");
        // The semaphore is never closed.
        room.clone().acquire_owned().await.ok()
    }

    fn failed(&self, error: &io::Error) {
        self.traffic.count(match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => Event::AcceptDescriptors,
            Some(libc::ENOBUFS | libc::ENOMEM) => Event::AcceptMemory,
            _ => Event::AcceptOther,
        });
        self.log.failure("accept", || error.to_string());
    }
}

/// Accepts until `stop`. Closing the listener would reset the connections that the system had accepted by then, so they
/// are served too, unless the limit on connections is reached. Serves no more of them than the backlog holds:
/// otherwise, clients that never stop connecting would keep the agent from draining.
pub(crate) async fn accept(
    listener: Listener,
    door: Door,
    stop: impl Future<Output = ()>,
    mut serve: impl FnMut(Socket, Admitted),
) {
    let mut stop = pin!(stop);
    let mut pause = FIRST_PAUSE;
    // Number of connections that may still be accepted; `None` before `stop`.
    let mut left = None::<u32>;
    while left != Some(0) {
        let accepted = tokio::select! {
            biased;
            () = &mut stop, if left.is_none() => {
                left = Some(BACKLOG);
                continue;
            }
            accepted = async { (door.room().await, listener.accept().await) } => accepted,
            () = future::ready(()), if left.is_some() => return,
        };
        left = left.map(|left| left - 1);
        match accepted {
            (room, Ok(socket)) => {
                serve(socket, Admitted { _open: Traffic::connect(&door.traffic, door.port), _room: room });
                pause = FIRST_PAUSE;
            }
            (_, Err(error)) => {
                door.failed(&error);
                if left.is_some() {
                    return;
                }
                // Without file descriptors or memory, trying again at once would fail again. A client that left is not
                // a reason to make the others wait.
                if !matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
                {
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        () = &mut stop => return,
                    }
                    pause = (pause * 2).min(LAST_PAUSE);
                }
            }
        }
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[tokio::test]
    async fn clients_that_keep_connecting_do_not_prevent_a_stop() {
        let listener = Listener::bind("service", &"127.0.0.1:0".parse().unwrap(), None).unwrap();
        let addr = listener.local().unwrap().tcp().unwrap();
        let (traffic, log) = (Arc::<Traffic>::default(), Log::default());
        let door = Door { port: Port::Service, traffic, log, room: None };
        let first = TcpStream::connect(addr).unwrap();
        // Wait until the runtime has seen the connection.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let mut accepted = 0;
        accept(listener, door, async {}, |_, _| {
            accepted += 1;
            assert!(accepted <= BACKLOG, "more connections are accepted than the backlog holds");
            drop(TcpStream::connect(addr).unwrap());
        })
        .await;
        assert_eq!(accepted, BACKLOG, "connections that the system had accepted are served");
        drop(first);
    }
}
