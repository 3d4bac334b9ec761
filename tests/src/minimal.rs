//! A root folder as in a minimal image: Envoy, glibc's libraries, dynamic modules, and nothing else.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

use crate::config::{MODULES, envoy_binary, target_dir};

/// A folder that serves as the root of an Envoy; see [`crate::EnvoyConfig::inside`]. Removed on drop.
#[derive(Debug)]
pub struct MinimalRoot(TempDir);

/// Envoy in that folder.
const ENVOY: &str = "/envoy";

/// The libraries of Debian's package `libc6` that programs are linked with.
const GLIBC: [&str; 6] = ["ld-linux-", "libc.so.", "libdl.so.", "libm.so.", "libpthread.so.", "librt.so."];

impl MinimalRoot {
    /// Copies Envoy, the libraries that it needs, and `modules` into a new folder. Fails if Envoy needs a library other
    /// than glibc's.
    pub fn new(modules: &[&Path]) -> Result<Self> {
        // Below target/, where Envoy is: there, hard links suffice, and they take no space.
        let root = Self(TempDir::new_in(target_dir())?);
        let envoy = envoy_binary();
        let linked = Command::new("ldd").arg(&envoy).env("LC_ALL", "C").output().context("ldd")?;
        ensure!(linked.status.success(), "ldd: {}", String::from_utf8_lossy(&linked.stderr));
        // `libc.so.6 => /lib/libc.so.6 (0x...)`, or the path alone for the loader.
        let linked = String::from_utf8(linked.stdout)?;
        for library in linked.split_whitespace().filter(|word| word.starts_with('/')) {
            let name = library.rsplit('/').next().unwrap_or_default();
            ensure!(GLIBC.iter().any(|known| name.starts_with(known)), "Envoy needs {library}");
            root.put(Path::new(library), library)?;
        }
        root.put(&envoy, ENVOY)?;
        for module in modules {
            let name = module.file_name().and_then(|name| name.to_str()).context("a module has a name")?;
            root.put(module, &format!("{MODULES}/{name}"))?;
        }
        Ok(root)
    }

    fn put(&self, from: &Path, to: &str) -> Result<()> {
        let (from, to) = (fs::canonicalize(from)?, self.0.path().join(to.trim_start_matches('/')));
        fs::create_dir_all(to.parent().context("a file in a folder")?)?;
        fs::hard_link(&from, &to)
            .or_else(|_| fs::copy(&from, &to).map(drop))
            .with_context(|| format!("copying {}", from.display()))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Every file in it.
    pub fn files(&self) -> Result<Vec<PathBuf>> {
        let (mut files, mut pending) = (Vec::new(), vec![self.path().to_owned()]);
        while let Some(folder) = pending.pop() {
            for entry in fs::read_dir(folder)? {
                let path = entry?.path();
                if path.is_dir() { pending.push(path) } else { files.push(path) }
            }
        }
        Ok(files)
    }

    /// Why no process can be started in it; `None` if one can.
    pub fn missing(&self) -> Option<String> {
        let output = envoy_in(self.path()).arg("--version").output();
        match output {
            Ok(output) if output.status.success() => None,
            Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(error) => Some(format!("unshare: {error}")),
        }
    }
}

/// Envoy with `root` as its root folder. A user other than root needs a user namespace for that.
pub(crate) fn envoy_in(root: &Path) -> Command {
    let mut command = Command::new("unshare");
    let is_root = fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
    if !is_root {
        command.arg("--map-root-user");
    }
    command.arg(format!("--root={}", root.display())).arg("--wd=/").arg(ENVOY);
    command
}
