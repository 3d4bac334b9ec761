//! Replaces `plb.rs` in a build without the Cargo feature `plb`. No socket is ever prepared, because `Agent::bind`
//! refuses the setting.

use std::os::fd::AsFd;

use crate::log::Log;

#[derive(Debug)]
pub(crate) struct Plb;

impl Plb {
    pub(crate) fn new(_: Log) -> Self {
        Self
    }

    pub(crate) fn prepare(&self, _which: &str, _socket: &impl AsFd, _ipv6: bool) {}
}
