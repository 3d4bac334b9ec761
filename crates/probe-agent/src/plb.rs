//! `--plb` (Protective Load Balancing): sockets that the network can move away from congested and broken paths.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};

use plb_netlink::prepare::prepare;

use crate::log::Log;

/// Prepares sockets, and logs each obstacle once.
#[derive(Debug)]
pub(crate) struct Plb {
    log: Log,
    logged: Mutex<BTreeSet<String>>,
}

impl Plb {
    pub(crate) fn new(log: Log) -> Self {
        Self { log, logged: Mutex::default() }
    }

    /// Prepares a socket. Must be called before `connect` or `listen`. `which` is for messages.
    pub(crate) fn prepare(&self, which: &str, socket: &impl AsFd, ipv6: bool) {
        for obstacle in prepare(socket, ipv6) {
            let line = format!("--plb: {which}: {obstacle}");
            let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
            if !logged.contains(&line) {
                self.log.say(&line);
                logged.insert(line);
            }
        }
    }
}
