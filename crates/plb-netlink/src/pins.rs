//! Whether a connection may be moved now, and whether by the kernel or by `plb`.
//!
//! Two things pin a connection: an explicit label, and `SO_TXREHASH` off. A label of 0 is no pin: it is what a host with
//! automatic labels off sends, and what [`crate::daemon::Way::SocketOptions`] leaves behind on its way.

use std::fmt;
use std::os::fd::AsFd;

use crate::detector::Cause;
use crate::flowlabel::{self, Current, Label};
use crate::{Result, sock};

/// What keeps a connection where it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Pin {
    /// It holds an explicit label.
    Label(Label),
    /// `SO_TXREHASH` is off, for this socket or as the namespace's default.
    RehashOff,
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Label(label) => write!(f, "explicit label {label}"),
            Self::RehashOff => f.write_str("SO_TXREHASH is off"),
        }
    }
}

/// What a socket says of itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Facts {
    /// Its label.
    pub label: Current,
    /// Whether the kernel may change an automatic one.
    pub may_rehash: bool,
}

impl Facts {
    /// Reads them from a duplicate of the socket.
    ///
    /// # Errors
    /// On anything but TCP over IPv6.
    pub fn read(socket: &impl AsFd) -> Result<Self> {
        Ok(Self { label: flowlabel::current(socket)?, may_rehash: sock::may_rehash(socket)? })
    }
}

/// What should happen to a connection that has a reason to move.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// Nothing.
    Stay(Pin),
    /// The kernel has moved it at this timeout by itself.
    LeftToKernel,
    /// Give it another label.
    Move,
}

/// The rule. `relabelled`: something rewrites its label on the way out, so that the kernel's choice does not show.
pub fn judge(facts: Facts, cause: Cause, relabelled: bool) -> Verdict {
    match facts {
        Facts { label: Current::Explicit(label, _), .. } => Verdict::Stay(Pin::Label(label)),
        Facts { may_rehash: false, .. } => Verdict::Stay(Pin::RehashOff),
        Facts { label: Current::Automatic, .. } if cause == Cause::Timeout && !relabelled => {
            Verdict::LeftToKernel
        }
        _ => Verdict::Move,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_hold_and_timeouts_are_the_kernels_where_it_can() {
        use Cause::{Forced, Idle, Timeout};
        let label = Label::new(0xabc).unwrap();
        let explicit = Current::Explicit(label, None);
        let (auto, zero) = (Current::Automatic, Current::Zero);
        for (label_now, may_rehash, cause, relabelled, expected) in [
            (auto, true, Idle, false, Verdict::Move),
            (auto, true, Forced, true, Verdict::Move),
            (auto, true, Timeout, false, Verdict::LeftToKernel),
            (auto, true, Timeout, true, Verdict::Move),
            // The kernel changes its hash at a timeout, but the label is 0 all the same.
            (zero, true, Timeout, false, Verdict::Move),
            (zero, true, Idle, false, Verdict::Move),
            (auto, false, Timeout, false, Verdict::Stay(Pin::RehashOff)),
            (auto, false, Forced, true, Verdict::Stay(Pin::RehashOff)),
            (zero, false, Timeout, false, Verdict::Stay(Pin::RehashOff)),
            (explicit, true, Timeout, true, Verdict::Stay(Pin::Label(label))),
            (explicit, false, Idle, false, Verdict::Stay(Pin::Label(label))),
        ] {
            let facts = Facts { label: label_now, may_rehash };
            assert_eq!(judge(facts, cause, relabelled), expected, "{facts:?} {cause:?} {relabelled}");
        }
    }
}
