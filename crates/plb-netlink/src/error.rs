//! One error type; its variant says what the caller can do about it.

use std::io;

/// The result of everything in this crate that asks the kernel.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, by what helps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is out of range or contradicts another. Nothing was done.
    #[error("{0}")]
    Invalid(String),
    /// The kernel wants more rights.
    #[error("{doing}: not permitted; {cure}")]
    NotPermitted {
        /// What was tried.
        doing: String,
        /// Which right is missing and how to get it.
        cure: String,
    },
    /// This kernel or host lacks something.
    #[error("{what}; {cure}")]
    Unsupported {
        /// What is missing.
        what: String,
        /// How to get it.
        cure: String,
    },
    /// A process, socket, namespace, device or route is not there, or not any more.
    #[error("{0}")]
    Gone(String),
    /// The kernel answered with something that cannot be what it meant.
    #[error("{what}: malformed: {why}")]
    Malformed {
        /// Which message or file.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The kernel refused for another reason.
    #[error("{doing}: {reason}")]
    Kernel {
        /// What was tried.
        doing: String,
        /// What the kernel said.
        reason: io::Error,
    },
    /// A change failed after part of it was made, and that part could not be taken back.
    #[error("{doing}: failed half-way; still changed: {left}")]
    HalfApplied {
        /// What was tried.
        doing: String,
        /// What is no longer as it was.
        left: String,
        /// Why it failed.
        source: Box<Error>,
    },
}

impl Error {
    /// Sorts what the kernel said about `doing`; `cure` is what helps against a missing right.
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

    /// The error number, where the kernel gave one that no variant stands for.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Kernel { reason, .. } => reason.raw_os_error(),
            _ => None,
        }
    }
}

/// The cure for most missing rights here.
pub(crate) const NET_ADMIN: &str = "run as root or with CAP_NET_ADMIN in this network namespace";
