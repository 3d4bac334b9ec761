//! Decides whether a connection may be moved now, and whether the kernel or `plb` does it.
//!
//! Two things pin a connection: an explicit label, and `SO_TXREHASH` off. A label of 0 is not a pin. A host with
//! automatic labels off sends it, and so does a socket after [`crate::daemon::Way::SocketOptions`] has switched its
//! label off.

use std::fmt;
use std::os::fd::AsFd;

use crate::detector::Cause;
use crate::flowlabel::{self, Current, Label};
use crate::{Result, sock};

/// Reason why a connection stays on its path.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Pin {
    /// The connection has an explicit label.
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

/// State of a socket that determines whether it is pinned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PinFacts {
    /// Label of the socket.
    pub label: Current,
    /// Whether the kernel may change an automatic label.
    pub may_rehash: bool,
}

impl PinFacts {
    /// Reads the facts from a duplicate of the socket.
    ///
    /// # Errors
    /// On a socket that is not TCP over IPv6.
    pub fn read(socket: &impl AsFd) -> Result<Self> {
        Ok(Self { label: flowlabel::current(socket)?, may_rehash: sock::may_rehash(socket)? })
    }
}

/// Decision about a connection that has a reason to move.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Decision {
    /// Leave it on its path.
    Stay(Pin),
    /// Leave it alone: the kernel has already moved it at this timeout.
    LeftToKernel,
    /// Give it another label.
    Move,
}

/// Decides whether to move a connection. `relabelled` is true if its label is rewritten at the egress, which hides the
/// kernel's choice.
pub fn judge(facts: PinFacts, cause: Cause, relabelled: bool) -> Decision {
    match facts {
        PinFacts { label: Current::Explicit(label, _), .. } => Decision::Stay(Pin::Label(label)),
        PinFacts { may_rehash: false, .. } => Decision::Stay(Pin::RehashOff),
        PinFacts { label: Current::Automatic, .. } if cause == Cause::Timeout && !relabelled => {
            Decision::LeftToKernel
        }
        _ => Decision::Move,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_hold_and_the_kernel_handles_the_timeouts_that_it_can() {
        use Cause::{Forced, Idle, Timeout};
        let label = Label::new(0xabc).unwrap();
        let explicit = Current::Explicit(label, None);
        let (auto, zero) = (Current::Automatic, Current::Zero);
        for (label_now, may_rehash, cause, relabelled, expected) in [
            (auto, true, Idle, false, Decision::Move),
            (auto, true, Forced, true, Decision::Move),
            (auto, true, Timeout, false, Decision::LeftToKernel),
            (auto, true, Timeout, true, Decision::Move),
            // The kernel changes its hash at a timeout, but the label stays 0.
            (zero, true, Timeout, false, Decision::Move),
            (zero, true, Idle, false, Decision::Move),
            (auto, false, Timeout, false, Decision::Stay(Pin::RehashOff)),
            (auto, false, Forced, true, Decision::Stay(Pin::RehashOff)),
            (zero, false, Timeout, false, Decision::Stay(Pin::RehashOff)),
            (explicit, true, Timeout, true, Decision::Stay(Pin::Label(label))),
            (explicit, false, Idle, false, Decision::Stay(Pin::Label(label))),
        ] {
            let facts = PinFacts { label: label_now, may_rehash };
            assert_eq!(judge(facts, cause, relabelled), expected, "{facts:?} {cause:?} {relabelled}");
        }
    }
}
