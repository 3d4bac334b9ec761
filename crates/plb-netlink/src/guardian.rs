//! Restores the automatic labels that a process has switched on or off, if the process ends without restoring them
//! itself: because it was killed, ran out of memory, or crashed.
//!
//! When a process ends, the kernel undoes the effects of its BPF programs, but an option set on another process's
//! socket stays set. So a second process receives a note about each socket over a pipe before the socket is touched,
//! and acts when that pipe closes.

use std::collections::HashMap;
use std::io::{BufRead, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::str::FromStr;

use crate::holders::{Holder, Holders};
use crate::{Error, Result, sock};

/// A socket whose automatic label has been switched on or off, or is about to be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Note {
    /// Holder through which the socket was reached.
    pub holder: Holder,
    /// Inode of the socket, used to find it if its descriptor has changed.
    pub inode: u64,
    /// Cookie of the socket.
    pub cookie: u64,
    /// Whether its owner had automatic labels on.
    pub was: bool,
}

/// Handle of the second process, for its parent. Dropping it closes the pipe and waits.
#[derive(Debug)]
pub struct Guardian {
    child: Child,
    notes: Option<ChildStdin>,
}

impl Guardian {
    /// Starts the second process: `command` must pass its standard input to [`attend`].
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|source| Error::kernel("starting the guardian", "", source))?;
        Ok(Self { notes: child.stdin.take(), child })
    }

    /// Announces a change. Call this before the socket is touched; if it fails, leave the socket alone.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub fn note(&mut self, note: &Note) -> Result<()> {
        let Note { holder: Holder { pid, fd }, inode, cookie, was } = note;
        self.line(&format!("{pid} {fd} {inode} {cookie} {was}\n"))
    }

    /// Withdraws a note: the socket is in its original state again, or closed.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub fn forget(&mut self, cookie: u64) -> Result<()> {
        self.line(&format!("{cookie}\n"))
    }

    fn line(&mut self, line: &str) -> Result<()> {
        let notes = self.notes.as_mut().ok_or_else(|| Error::Gone("the guardian has ended".to_owned()))?;
        notes.write_all(line.as_bytes()).map_err(|_| Error::Gone("the guardian has ended".to_owned()))
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        self.notes = None;
        let _ = self.child.wait();
    }
}

/// Runs the second process: reads notes until the first process is gone, then switches the sockets back. Returns the
/// number of sockets that it could not switch back.
pub fn attend(notes: impl BufRead) -> usize {
    let mut pending: HashMap<u64, Note> = HashMap::new();
    for line in notes.lines().map_while(std::result::Result::ok) {
        match line.parse::<Note>() {
            // The first note wins: it holds the state from before the socket was touched.
            Ok(note) => drop(pending.entry(note.cookie).or_insert(note)),
            Err(()) => drop(line.parse().ok().and_then(|cookie: u64| pending.remove(&cookie))),
        }
    }
    let mut holders = Holders::default();
    for note in pending.values() {
        holders.learn(note.inode, note.holder);
    }
    switch_back(&mut holders, pending.into_values())
}

/// Restores the automatic labels of sockets. A socket that has closed counts as done. Returns the number of sockets
/// that could not be reached or that refused.
pub fn switch_back(holders: &mut Holders, notes: impl Iterator<Item = Note>) -> usize {
    let mut failed = 0;
    let mut attempt = |holders: &mut Holders, note: &Note| match holders.open(note.inode, note.cookie) {
        Ok(None) => false,
        Ok(Some((_, socket))) => {
            failed += usize::from(sock::set_auto_label(&socket, note.was).is_err());
            true
        }
        Err(_) => {
            failed += 1;
            true
        }
    };
    let elsewhere: Vec<Note> = notes.filter(|note| !attempt(holders, note)).collect();
    if !elsewhere.is_empty() {
        let inodes: std::collections::HashSet<u64> = elsewhere.iter().map(|note| note.inode).collect();
        holders.walk(&inodes, inodes.clone());
        for note in &elsewhere {
            attempt(holders, note);
        }
    }
    failed
}

impl FromStr for Note {
    type Err = ();

    fn from_str(line: &str) -> std::result::Result<Self, ()> {
        let fields: Vec<&str> = line.split(' ').collect();
        let [pid, fd, inode, cookie, was] = fields[..] else { return Err(()) };
        Ok(Self {
            holder: Holder { pid: pid.parse().map_err(drop)?, fd: fd.parse().map_err(drop)? },
            inode: inode.parse().map_err(drop)?,
            cookie: cookie.parse().map_err(drop)?,
            was: was.parse().map_err(drop)?,
        })
    }
}
