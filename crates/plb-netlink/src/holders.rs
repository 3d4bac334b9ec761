//! Finds and opens sockets of other processes, repeatedly and in large numbers.
//!
//! Only `/proc/*/fd` shows which descriptor of which process refers to a socket, and reading it takes milliseconds on
//! a busy host. Therefore one walk over the processes serves all sockets that are waiting, its results are
//! remembered, and walks take at most a tenth of the time. Remembered results may be stale: a descriptor is accepted
//! as the socket only if its cookie matches.
//!
//! This module does not cover how a socket is duplicated ([`crate::pidfd`]) or what is done with it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::{Error, Result, pidfd, sock};

/// A descriptor that refers, or once referred, to a certain socket.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Holder {
    /// Process id.
    pub pid: u32,
    /// Descriptor in that process.
    pub fd: i32,
}

impl Holder {
    /// Returns a duplicate of the socket with this cookie.
    ///
    /// # Errors
    /// [`Error::Gone`] if the descriptor is closed or refers to another socket by now.
    pub fn open(self, cookie: u64) -> Result<OwnedFd> {
        let socket = pidfd::duplicate(self.pid, self.fd)?;
        // A descriptor that is no longer a socket has no cookie.
        if sock::cookie(&socket).ok() == Some(cookie) {
            return Ok(socket);
        }
        let Self { pid, fd } = self;
        Err(Error::Gone(format!(
            "descriptor {fd} of process {pid} is not the socket with cookie {cookie} (any more)"
        )))
    }
}

/// Known holders of sockets.
#[derive(Debug, Default)]
pub struct Holders {
    by_inode: HashMap<u64, Holder>,
    next_walk: Option<Instant>,
    walks: u64,
}

impl Holders {
    /// Returns a duplicate of a socket whose holder is known. Returns `None` if no holder is known, or the known one no
    /// longer holds the socket.
    ///
    /// # Errors
    /// If the right to trace the holder is missing.
    pub fn open(&mut self, inode: u64, cookie: u64) -> Result<Option<(Holder, OwnedFd)>> {
        let Some(holder) = self.by_inode.get(&inode).copied() else { return Ok(None) };
        match holder.open(cookie) {
            Ok(socket) => Ok(Some((holder, socket))),
            Err(Error::Gone(_)) => {
                self.by_inode.remove(&inode);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Adds a holder that is known from elsewhere.
    pub fn learn(&mut self, inode: u64, holder: Holder) {
        self.by_inode.insert(inode, holder);
    }

    /// Returns whether enough time has passed since the last walk.
    pub fn may_walk(&self) -> bool {
        self.next_walk.is_none_or(|at| Instant::now() >= at)
    }

    /// Walks over the processes until the holders of all of `missing` are found, starting with processes that are known
    /// to hold other sockets. Along the way it records the holders of all sockets in `watched`, and it forgets all
    /// other sockets.
    pub fn walk(&mut self, watched: &HashSet<u64>, mut missing: HashSet<u64>) {
        let began = Instant::now();
        self.walks += 1;
        self.by_inode.retain(|inode, _| watched.contains(inode));
        let first: BTreeSet<u32> = self.by_inode.values().map(|holder| holder.pid).collect();
        let others = pidfd::processes().into_iter().filter(|pid| !first.contains(pid));
        for pid in first.iter().copied().chain(others) {
            if missing.is_empty() {
                break;
            }
            for (fd, inode) in pidfd::sockets(pid).unwrap_or_default() {
                if watched.contains(&inode) {
                    missing.remove(&inode);
                    self.by_inode.insert(inode, Holder { pid, fd });
                }
            }
        }
        self.next_walk = Some(Instant::now() + began.elapsed().max(LEAST) * 9);
    }

    /// Returns the number of walks so far.
    pub fn walks(&self) -> u64 {
        self.walks
    }
}

/// Minimum duration assumed for a walk, so that walks stay rare even on a host with few processes.
const LEAST: Duration = Duration::from_millis(1);
