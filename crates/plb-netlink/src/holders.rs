//! Reaches the sockets of other processes, many times over and many at once.
//!
//! Which descriptor of which process a socket is stands in `/proc/*/fd` only, and reading that costs milliseconds on a busy
//! host. So one walk over the processes serves every socket that waits for one, what it finds is remembered, and walks
//! take a tenth of the time at most. What is remembered may be stale: a descriptor counts as the socket only if its
//! cookie says so.
//!
//! Left out: how a socket is duplicated ([`crate::pidfd`]), and what is done with it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::{Error, Result, pidfd, sock};

/// One descriptor that is, or was, a certain socket.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Holder {
    /// Process.
    pub pid: u32,
    /// Its descriptor.
    pub fd: i32,
}

impl Holder {
    /// A duplicate of the socket with that cookie.
    ///
    /// # Errors
    /// [`Error::Gone`] if the descriptor is closed or is another socket by now.
    pub fn open(self, cookie: u64) -> Result<OwnedFd> {
        let socket = pidfd::duplicate(self.pid, self.fd)?;
        // What is no socket any more has no cookie.
        if sock::cookie(&socket).ok() == Some(cookie) {
            return Ok(socket);
        }
        let Self { pid, fd } = self;
        Err(Error::Gone(format!(
            "descriptor {fd} of process {pid} is not the socket with cookie {cookie} (any more)"
        )))
    }
}

/// What is known of who holds which socket.
#[derive(Debug, Default)]
pub struct Holders {
    by_inode: HashMap<u64, Holder>,
    next_walk: Option<Instant>,
    walks: u64,
}

impl Holders {
    /// A duplicate of a socket whose holder is known. `None`: it is not known, or not any more.
    ///
    /// # Errors
    /// Without the right to trace the holder.
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

    /// Remembers what is known from elsewhere.
    pub fn learn(&mut self, inode: u64, holder: Holder) {
        self.by_inode.insert(inode, holder);
    }

    /// Whether the last walk is long enough ago.
    pub fn may_walk(&self) -> bool {
        self.next_walk.is_none_or(|at| Instant::now() >= at)
    }

    /// Walks over the processes until the holders of all of `missing` are found, those first that hold others. On the
    /// way it learns of all in `watched`, and it forgets all that are not.
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

    /// Walks so far.
    pub fn walks(&self) -> u64 {
        self.walks
    }
}

/// A walk counts as at least so long, so that a host without processes is not walked all the time either.
const LEAST: Duration = Duration::from_millis(1);
