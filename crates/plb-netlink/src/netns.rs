//! Network namespaces. All functions of this crate act on the namespace of the calling thread.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::thread;

use crate::{Error, Result, sys};

/// An open network namespace; it exists at least as long as this value.
#[derive(Debug)]
pub struct Namespace {
    file: File,
    /// What it is called in messages.
    what: String,
}

impl Namespace {
    /// Opens a namespace created by `ip netns add`.
    ///
    /// # Errors
    /// [`Error::Gone`], listing the existing names.
    pub fn named(name: &str) -> Result<Self> {
        if name.is_empty() || name.contains('/') || name == "." || name == ".." {
            return Err(Error::Invalid(format!(
                "network namespace `{name}`: must be the name of a file in {FOLDER}"
            )));
        }
        let file = File::open(PathBuf::from(FOLDER).join(name)).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => {
                let there = names();
                let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
                Error::Gone(format!("no network namespace `{name}`; `ip netns` shows: {there}"))
            }
            _ => Error::kernel(format!("opening network namespace `{name}`"), "run as root", source),
        })?;
        Ok(Self { file, what: format!("network namespace `{name}`") })
    }

    /// Opens the namespace of a process.
    ///
    /// # Errors
    /// [`Error::Gone`] if there is no such process.
    pub fn of_process(pid: u32) -> Result<Self> {
        let file = File::open(format!("/proc/{pid}/ns/net")).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => Error::Gone(format!("no process {pid}")),
            _ => Error::kernel(
                format!("opening the network namespace of process {pid}"),
                "run as that process's user or as root",
                source,
            ),
        })?;
        Ok(Self { file, what: format!("the network namespace of process {pid}") })
    }

    /// Moves the calling thread, and threads that it starts later, into this namespace permanently.
    ///
    /// # Errors
    /// If CAP_SYS_ADMIN is missing.
    pub fn enter(&self) -> Result<()> {
        sys::enter_network_namespace(self.file.as_fd()).map_err(|source| match source.raw_os_error() {
            // The name outlives a namespace whose mount was lost; the file is then a regular file.
            Some(libc::EINVAL) => Error::Gone(format!("{} is gone, and only its name is left", self.what)),
            _ => Error::kernel(format!("entering {}", self.what), "run as root (CAP_SYS_ADMIN)", source),
        })
    }

    /// Runs `work` inside the namespace, on a separate thread; the calling thread stays in its own namespace.
    ///
    /// # Errors
    /// Same as [`enter`](Self::enter), or the error of `work`.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                self.enter()?;
                work()
            });
            match inside.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }
}

/// Returns the names that `ip netns` lists, sorted.
pub fn names() -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(FOLDER)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

const FOLDER: &str = "/run/netns";
