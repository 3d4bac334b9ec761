//! The error type; each variant tells the caller how to respond.

use std::io;

/// Result of the functions of this crate that call the kernel.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors, grouped by remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is out of range or contradicts another. Nothing was changed.
    #[error("{0}")]
    Invalid(String),
    /// The kernel requires more rights.
    #[error("{doing}: not permitted; {cure}")]
    NotPermitted {
        /// The attempted action.
        doing: String,
        /// The missing right and how to get it.
        cure: String,
    },
    /// This kernel or host lacks a feature.
    #[error("{what}; {cure}")]
    Unsupported {
        /// The missing feature.
        what: String,
        /// How to get it.
        cure: String,
    },
    /// A process, socket, namespace, device or route does not exist, or no longer exists.
    #[error("{0}")]
    Gone(String),
    /// The kernel's answer makes no sense.
    #[error("{what}: malformed: {why}")]
    Malformed {
        /// The message or file.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The kernel refused for another reason.
    #[error("{doing}: {reason}")]
    Kernel {
        /// The attempted action.
        doing: String,
        /// The error from the kernel.
        reason: io::Error,
    },
    /// A change failed half-way, and the part already made could not be undone.
    #[error("{doing}: failed half-way; still changed: {left}")]
    HalfApplied {
        /// The attempted action.
        doing: String,
        /// The part that is still changed.
        left: String,
        /// Why the change failed.
        source: Box<Error>,
    },
}

impl Error {
    /// Maps the kernel's error for `doing` to a variant; `cure` says how to get a missing right.
    pub(crate) fn kernel(doing: impl Into<String>, cure: &str, source: io::Error) -> Self {
        let doing = doing.into();
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Self::NotPermitted { doing, cure: cure.to_owned() },
            Some(libc::ENOSYS) => Self::Unsupported {
                what: format!("{doing}: this kernel does not know the call"),
                cure: "a newer kernel is needed".to_owned(),
            },
            _ => Self::Kernel { doing, reason: source },
        }
    }

    pub(crate) fn malformed(what: &'static str, why: impl ToString) -> Self {
        Self::Malformed { what, why: why.to_string() }
    }

    /// Returns the error number, if the kernel gave one that has no variant of its own.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Kernel { reason, .. } => reason.raw_os_error(),
            _ => None,
        }
    }
}

/// The remedy for most missing rights in this crate.
pub(crate) const NET_ADMIN: &str = "run as root or with CAP_NET_ADMIN in this network namespace";
