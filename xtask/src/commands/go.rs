//! Programs from Go modules, built with `go install` into target/bin/. The Go module proxy has their sources, and Go
//! checks them against the public checksum log.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use crate::{progress, run, workspace};

/// A program and its pinned version.
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) module: &'static str,
    /// The program's folder in the module, with a leading slash; empty if it is the module itself.
    pub(crate) folder: &'static str,
    pub(crate) version: &'static str,
    /// The oldest Go that builds it.
    pub(crate) go: &'static str,
}

impl Program {
    /// Path of the program once it is built.
    pub(crate) fn path(&self) -> PathBuf {
        bin().join(self.name)
    }

    /// Builds the program, and replaces an earlier build. `linker_flags` are passed to the linker.
    pub(crate) fn build(&self, linker_flags: &str) -> Result<PathBuf> {
        let Self { name, module, folder, version, go } = self;
        if !run::succeeds(run::tool("go").arg("version")) {
            bail!("Go is missing: https://go.dev/dl, or a `golang` package of {go} or later");
        }
        // Each process builds into its own folder, then renames: parallel commands never return a partial program.
        let scratch = workspace::target().join(format!(".{name}-{}", std::process::id()));
        fs::create_dir_all(&scratch)?;
        fs::create_dir_all(bin())?;
        let made = progress::silently(&format!("building {name} {version} from its Go module"), || {
            run::output(
                run::tool("go")
                    .args(["install", "-trimpath", "-ldflags", &format!("-s -w {linker_flags}")])
                    .arg(format!("{module}{folder}@{version}"))
                    .env("GOBIN", &scratch)
                    .env("CGO_ENABLED", "0"),
            )
        })
        .and_then(|_| {
            fs::rename(scratch.join(name), self.path()).with_context(|| format!("go made no {name}"))
        });
        fs::remove_dir_all(&scratch)?;
        made.map(|()| self.path())
    }

    /// Builds the program unless target/bin/ has exactly this version. `linker_flags` are passed to the linker.
    pub(crate) fn prepare(&self, linker_flags: &str) -> Result<()> {
        let pinned = format!("\tmod\t{}\t{}\t", self.module, self.version);
        let said = run::output(run::tool("go").args(["version", "-m"]).arg(self.path()));
        if !said.is_ok_and(|said| said.contains(&pinned)) {
            self.build(linker_flags)?;
        }
        Ok(())
    }
}

/// The folder of the built programs.
pub(crate) fn bin() -> PathBuf {
    workspace::target().join("bin")
}
