//! The compiler for the `.wasm`: the machine's own with `wasm32-wasip1`, or Debian's `rustc-web` if no standard library
//! for that target is available. Also the compiler for Linux programs of another architecture, chosen in the same way.
//!
//! `rustup target add` downloads from a host that some networks (CI among them) block. Debian ships a compiler with the
//! standard library's source. It is unpacked into `target/toolchain/`, never installed, and builds
//! `wasm32-unknown-unknown` with cargo's `-Zbuild-std`. Package versions are whatever the machine's Debian offers; none
//! is fixed here.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::{exports, progress, run, workspace};

/// The compiler to use.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
pub(crate) enum Choice {
    /// rustup's if it has the target or can fetch it, else Debian's
    #[default]
    Auto,
    /// The machine's own compiler with the target wasm32-wasip1
    Rustup,
    /// Debian's rustc-web, unpacked under target/toolchain/, with the target wasm32-unknown-unknown
    Debian,
}

/// A compiler that is ready to build the filter.
#[derive(Debug)]
pub(crate) enum Toolchain {
    /// The machine's compiler has `wasm32-wasip1`.
    Native,
    /// Unpacked Debian packages.
    Debian(Debian),
}

/// The folder of the unpacked Debian packages, and the LLVM that they came with.
#[derive(Debug)]
pub(crate) struct Debian {
    root: PathBuf,
    llvm: String,
}

impl Toolchain {
    /// Finds or fetches the compiler and prints one line that says which one it is.
    pub(crate) fn prepare(choice: Choice) -> Result<Self> {
        let toolchain = match choice {
            Choice::Rustup => native(NATIVE_TARGET)
                .with_context(|| format!("no {NATIVE_TARGET} for the machine's own compiler"))?,
            Choice::Debian => Self::Debian(Debian::prepare()?),
            Choice::Auto => Self::with_target(NATIVE_TARGET)?,
        };
        progress::say(match &toolchain {
            Self::Native => format!("wasm: the machine's own compiler, target {NATIVE_TARGET}"),
            Self::Debian(debian) => {
                format!(
                    "wasm: {}, target {DEBIAN_TARGET}, standard library built from source",
                    debian.version()?
                )
            }
        });
        Ok(toolchain)
    }

    /// The machine's compiler if it has `target` or rustup can fetch it, else Debian's.
    fn with_target(target: &str) -> Result<Self> {
        match native(target) {
            Ok(found) => Ok(found),
            Err(why) => {
                progress::say(format_args!(
                    "rustup cannot provide {target} here ({}); falling back to Debian's packages",
                    progress::last_line(&why)
                ));
                Ok(Self::Debian(Debian::prepare()?))
            }
        }
    }

    /// A compiler for Linux programs on `target`, regardless of this machine's architecture.
    pub(crate) fn for_programs(target: &str) -> Result<Self> {
        let toolchain = Self::with_target(target)?;
        progress::say(format_args!("{target}: {}", toolchain.version()?));
        Ok(toolchain)
    }

    /// The version that the compiler prints.
    pub(crate) fn version(&self) -> Result<String> {
        match self {
            Self::Native => {
                let said = run::output(run::tool("rustc").arg("--version"))?;
                Ok(said.split(" (").next().unwrap_or_default().trim().to_owned())
            }
            Self::Debian(debian) => debian.version(),
        }
    }

    /// Builds the filter with these cargo features and returns the module.
    pub(crate) fn build_filter(&self, features: &str) -> Result<PathBuf> {
        self.build_filter_of(workspace::root(), &self.target_dir(), features)
    }

    /// Like [`Self::build_filter`], from the sources in `root` into `target_dir`. With the native compiler the bytes
    /// depend on neither folder.
    pub(crate) fn build_filter_of(&self, root: &Path, target_dir: &Path, features: &str) -> Result<PathBuf> {
        let mut command = run::cargo();
        command.current_dir(root);
        command.args(["build", "--package", "prequal-filter", "--lib", "--profile", "wasm"]);
        command.arg("--target-dir").arg(target_dir);
        if !features.is_empty() {
            command.args(["--features", features]);
        }
        match self {
            Self::Native => reproducible(&mut command, NATIVE_TARGET, &[])?,
            Self::Debian(debian) => {
                reproducible(&mut command, DEBIAN_TARGET, &[])?;
                debian.configure(&mut command, "panic_abort")?;
                let linker = debian.root.join("usr/bin").join(format!("wasm-ld-{}", debian.llvm));
                command.env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER", linker);
            }
        }
        let built = fs::read(run::built_file(&mut command, "prequal_filter.wasm")?)?;
        let module = target_dir.join("prequal_filter.wasm");
        fs::write(&module, exports::without(&built, &IDLE_CALLBACKS)?)?;
        Ok(module)
    }

    /// Builds programs for Linux on `target`, each given with its package, and returns them. `profile` is one of
    /// Cargo.toml. The C library is linked statically, so the programs run on any distribution, and in an image that
    /// holds nothing else. `linker` replaces the machine's own. One command builds all of them: separate commands would
    /// compile the dependencies again for each program, with only the features that it needs.
    pub(crate) fn build_programs(
        &self,
        profile: &str,
        target: &str,
        linker: Option<&str>,
        programs: &[(&str, &str)],
    ) -> Result<Vec<PathBuf>> {
        let mut command = run::cargo();
        command.args(["build", "--profile", profile]);
        for (package, program) in programs {
            command.args(["--package", package, "--bin", program]);
        }
        reproducible(&mut command, target, &["-Ctarget-feature=+crt-static"])?;
        self.for_linux(&mut command, target, linker)?;
        run::built_files(&mut command, &programs.iter().map(|(_, program)| *program).collect::<Vec<_>>())
    }

    /// Builds the native module for Linux on `target` with these cargo features and returns it. `linker` replaces the
    /// machine's own.
    pub(crate) fn build_native(&self, target: &str, linker: Option<&str>, features: &str) -> Result<PathBuf> {
        let mut command = run::cargo();
        command.args(["build", "--profile", "native", "--package", "prequal-native", "--features", features]);
        reproducible(&mut command, target, &[])?;
        self.for_linux(&mut command, target, linker)?;
        run::built_file(&mut command, "libprequal_native.so")
    }

    /// Makes `command` build with this compiler for Linux on `target`.
    fn for_linux(&self, command: &mut Command, target: &str, linker: Option<&str>) -> Result<()> {
        if let Self::Debian(debian) = self {
            command.arg("--target-dir").arg(self.target_dir());
            debian.configure(command, "panic_unwind")?;
        }
        if let Some(linker) = linker {
            let triple = target.to_uppercase().replace('-', "_");
            command.env(format!("CARGO_TARGET_{triple}_LINKER"), linker);
        }
        Ok(())
    }

    /// Each compiler has its own folder, separate from the host's, so that no build invalidates another's work.
    pub(crate) fn target_dir(&self) -> PathBuf {
        workspace::target().join("wasm").join(match self {
            Self::Native => "native",
            Self::Debian(_) => "debian",
        })
    }
}

impl Debian {
    fn prepare() -> Result<Self> {
        let root = workspace::target().join("toolchain").join("debian");
        let marker = root.join("packages.txt");
        if !marker.is_file() {
            for program in ["apt-get", "apt-cache", "dpkg", "dpkg-query"] {
                ensure!(
                    run::succeeds(run::tool(program).arg("--version")),
                    "the fallback needs Debian's `{program}`, which is missing here; if the network allows it, use \
                     `rustup target add {NATIVE_TARGET}` instead"
                );
            }
            // Renamed at the end, so that an interrupted run leaves nothing that looks complete.
            let scratch = root.with_file_name(format!(".debian-{}", std::process::id()));
            fs::create_dir_all(&scratch)?;
            let unpacked = unpack(&scratch).and_then(|()| {
                if root.exists() {
                    fs::remove_dir_all(&root)?;
                }
                Ok(fs::rename(&scratch, &root)?)
            });
            if unpacked.is_err() {
                fs::remove_dir_all(&scratch)?;
            }
            unpacked?;
        }
        let llvm = fs::read_dir(root.join("usr/lib"))?
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .find_map(|name| name.strip_prefix("llvm-").map(str::to_owned))
            .with_context(|| format!("no LLVM in {}", root.display()))?;
        Ok(Self { root, llvm })
    }

    /// The version that the compiler prints.
    fn version(&self) -> Result<String> {
        let said = run::output(
            run::tool(self.rustc()).arg("--version").env("LD_LIBRARY_PATH", self.library_path()?),
        )
        .context("Debian's compiler does not start")?;
        Ok(format!("Debian's {}", said.split(" (").next().unwrap_or_default().trim()))
    }

    fn configure(&self, command: &mut Command, panic: &str) -> Result<()> {
        command
            .arg(format!("-Zbuild-std=std,{panic}"))
            .env("LD_LIBRARY_PATH", self.library_path()?)
            .env("RUSTC", self.rustc())
            // -Zbuild-std is only allowed in nightly cargo, and this compiler is a stable one.
            .env("RUSTC_BOOTSTRAP", "1");
        Ok(())
    }

    fn rustc(&self) -> PathBuf {
        self.root.join("usr/bin/rustc")
    }

    /// The unpacked libraries first, then the outer cargo's value.
    fn library_path(&self) -> Result<OsString> {
        let mut folders = vec![self.root.join("usr/lib").join(format!("llvm-{}", self.llvm)).join("lib")];
        for entry in fs::read_dir(self.root.join("usr/lib"))? {
            let path = entry?.path();
            if path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.ends_with("-linux-gnu")) {
                folders.push(path);
            }
        }
        folders.extend(std::env::split_paths(&std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default()));
        Ok(std::env::join_paths(folders)?)
    }
}

/// The machine's compiler, with the target added by rustup if it was missing.
fn native(target: &str) -> Result<Toolchain> {
    if has_target(target) {
        return Ok(Toolchain::Native);
    }
    progress::silently(&format!("rustup target add {target}"), || {
        run::output(run::tool("rustup").args(["target", "add", target]))
    })?;
    ensure!(has_target(target), "rustup added {target}, but the compiler in use does not have it");
    Ok(Toolchain::Native)
}

/// Asks the compiler itself instead of rustup, so that a distribution's packages count too.
fn has_target(target: &str) -> bool {
    run::output(run::tool("rustc").args(["--print", "target-libdir", "--target", target]))
        .ok()
        .and_then(|folder| fs::read_dir(folder.trim()).ok())
        .into_iter()
        .flatten()
        .any(|entry| entry.is_ok_and(|e| e.file_name().to_string_lossy().starts_with("libstd-")))
}

/// Callbacks in which the filter has nothing to do. The SDK exports all callbacks, Envoy calls those that are exported,
/// and a call for every request has a cost (`docs/results/performance.md`).
const IDLE_CALLBACKS: [&str; 2] = ["proxy_on_done", "proxy_on_log"];

/// Sets target and flags so that the build contains no path of this machine. Otherwise it would: panics name their
/// source file, and the source files of dependencies are in the user's cargo folder.
fn reproducible(command: &mut Command, target: &str, flags: &[&str]) -> Result<()> {
    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(std::env::home_dir()?.join(".cargo")));
    let home = home.context("no home folder and no CARGO_HOME")?;
    let mut flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
    let (library, name) = library_source()?;
    for (from, to) in [(workspace::root(), "/prequal"), (&home, "/cargo"), (&library, &name)] {
        flags.push(format!("--remap-path-prefix={}={to}", from.display()));
    }
    command.args(["--target", target, "--config"]);
    command.arg(format!("target.{target}.rustflags={}", serde_json::to_string(&flags)?));
    // Either variable would override these flags.
    command.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS");
    Ok(())
}

/// Where rustup puts the source of the standard library, and the name that its files have in a build without that
/// source.
fn library_source() -> Result<(PathBuf, String)> {
    let sysroot = run::output(run::tool("rustc").args(["--print", "sysroot"]))?;
    let about = run::output(run::tool("rustc").arg("-vV"))?;
    let commit = about.lines().find_map(|line| line.strip_prefix("commit-hash: "));
    let commit = commit.context("rustc names no commit")?;
    Ok((Path::new(sysroot.trim()).join("lib/rustlib/src/rust"), format!("/rustc/{commit}")))
}

/// Downloads the packages and unpacks them into `root`.
fn unpack(root: &Path) -> Result<()> {
    // Only root may refresh the lists. If they cannot be refreshed and are too old, a download below fails.
    if let Err(why) = progress::silently("apt-get update", || run::output(run::tool("apt-get").arg("update")))
    {
        progress::say(format_args!(
            "apt-get update failed ({}); using the lists that are here",
            progress::last_line(&why)
        ));
    }
    let packages = resolve()?;
    let what = format!("fetching {} (about 140 MB)", packages.join(" "));
    let folder = root.join("debs");
    fs::create_dir_all(&folder)?;
    progress::silently(&what, || {
        run::output(run::tool("apt-get").arg("download").args(&packages).current_dir(&folder))
    })?;
    progress::silently("unpacking them", || {
        for entry in fs::read_dir(&folder)? {
            run::output(run::tool("dpkg").arg("-x").arg(entry?.path()).arg(root))?;
        }
        Ok(())
    })?;
    fs::remove_dir_all(&folder)?;
    Ok(fs::write(root.join("packages.txt"), packages.join("\n") + "\n")?)
}

/// The packages to unpack: compiler, library source, linker, and their dependencies that are not installed.
///
/// The compiler's dependency on a C toolchain is not followed: cargo on this machine already has one.
fn resolve() -> Result<Vec<String>> {
    let mut wanted: BTreeSet<String> = ["rustc-web", "rust-web-src"].map(str::to_owned).into();
    follow("libstd-rust-web-dev", &mut wanted)?;
    let llvm = wanted
        .iter()
        .find_map(|name| name.strip_prefix("libllvm"))
        .context("libstd-rust-web-dev depends on no libllvm package; is libllvm installed already?")?
        .to_owned();
    follow(&format!("lld-{llvm}"), &mut wanted)?;
    Ok(wanted.into_iter().collect())
}

/// Adds `package` and everything it depends on that is not installed.
fn follow(package: &str, wanted: &mut BTreeSet<String>) -> Result<()> {
    let mut pending = vec![package.to_owned()];
    while let Some(package) = pending.pop() {
        // LLVM is included even if installed: its version determines the name of the linker's package.
        let needed = package.starts_with("libllvm") || !is_installed(&package);
        if !needed || !wanted.insert(package.clone()) {
            continue;
        }
        let listed = run::output(run::tool("apt-cache").args(["depends", &package]))?;
        if listed.trim().is_empty() {
            bail!("apt-cache knows no package {package}");
        }
        pending.extend(depends(&listed));
    }
    Ok(())
}

/// The packages that `apt-cache depends` lists as required, without virtual ones (`<name>`).
fn depends(listed: &str) -> Vec<String> {
    listed
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .filter(|name| !name.starts_with('<'))
        .map(str::to_owned)
        .collect()
}

fn is_installed(package: &str) -> bool {
    run::output(run::tool("dpkg-query").args(["-W", "-f", "${db:Status-Status}", package]))
        .is_ok_and(|status| status == "installed")
}

/// Target that rustup provides: it has WASI imports, which Envoy implements.
pub(crate) const NATIVE_TARGET: &str = "wasm32-wasip1";

/// Target that imports only the proxy-wasm ABI, and so needs no C library.
const DEBIAN_TARGET: &str = "wasm32-unknown-unknown";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_without_virtual_packages() {
        let listed = "rustc-web\n  Depends: libc6\n |Depends: <libc-dev>\n  Depends: <libc-dev>\n    libc6-dev\n\
                      \x20 Depends: libllvm22\n  Recommends: cargo-web\n";
        assert_eq!(depends(listed), ["libc6", "libllvm22"]);
    }
}
